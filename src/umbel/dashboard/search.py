"""The language of the search field on the tasks page, which is also part of the address.

    state:failed name:img.* runtime:>5s worker:w1@* "ValueError" -queue:mail

Words narrow the search: all must hold. `key:value` looks at one field, a word alone looks for its
text in the id, the name, the arguments and the error. Before a word, `-` turns it round. Several
values are separated by commas, texts may have `*` and `?`, and quotes keep spaces together.
Numbers and times take `>`, `>=`, `<`, `<=`, `=` or a range `1s..5s`.

| key                                | what it looks at                                         |
| ---------------------------------- | -------------------------------------------------------- |
| state                              | failed, running, waiting, done, ...; Celery's names; or   |
|                                    | a state of your own that was seen. A task in such a state |
|                                    | is running                                                |
| name, worker, queue, id, root, parent, error, client | a text, the whole of it, with `*` for any |
| runtime, wait, age                 | durations: `250ms`, `5s`, `2m`, `1h`, `3d`               |
| retries, clock                     | whole numbers                                            |

Visitors who may not see details (arguments, texts of errors) cannot search in them either: for them
a word alone is looked for in the id and the name, and of an error only its class counts.

What cannot be understood is a `SearchError` that says so; nothing else is ever raised.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.task_states import READY_STATES
from umbel.dashboard.texts import shown

if TYPE_CHECKING:
    from umbel.app.events.state import Task

QUERY_CHARS_MAX: Final = 500
WORDS_MAX: Final = 20
STATES_NAMED_MAX: Final = 20

Test = Callable[["Task"], bool]

WAITING: Final = frozenset({"PENDING", "RECEIVED", "RETRY"})
RUNNING: Final = "running"
STATES: Final[dict[str, frozenset[str]]] = {
    "failed": frozenset({"FAILURE"}),
    "failure": frozenset({"FAILURE"}),
    "succeeded": frozenset({"SUCCESS"}),
    "success": frozenset({"SUCCESS"}),
    "ok": frozenset({"SUCCESS"}),
    RUNNING: frozenset({"STARTED"}),  # and any state of the user's own
    "started": frozenset({"STARTED"}),
    "received": frozenset({"RECEIVED"}),
    "sent": frozenset({"PENDING"}),
    "pending": frozenset({"PENDING"}),
    "waiting": WAITING,
    "retry": frozenset({"RETRY"}),
    "retried": frozenset({"RETRY"}),
    "revoked": frozenset({"REVOKED"}),
    "rejected": frozenset({"REJECTED"}),
    "done": READY_STATES,
    "ended": READY_STATES,
}
TEXTS: Final = {
    "name": "name",
    "task": "name",
    "worker": "worker",
    "node": "worker",
    "queue": "queue",
    "id": "uuid",
    "uuid": "uuid",
    "root": "root_id",
    "parent": "parent_id",
    "error": "exception",
    "exception": "exception",
    "client": "client",
}
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_NUMBER: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(ms|s|min|m|h|d)?", re.ASCII)
# Umbel's and Celery's workers write the repr of an exception.
_CLASS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_.]{0,100})\(")
_COMPARISON: Final = re.compile(r"(>=|<=|>|<|=)?(.+)", re.DOTALL)
_WORD: Final = re.compile(r'(-?)(?:([A-Za-z_]+):)?("[^"]*"|\S+)')
_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "=": operator.eq,
}  # fmt: skip
KEYS: Final = ("state", *dict.fromkeys(TEXTS), "runtime", "wait", "age", "retries", "clock")


class SearchError(ValueError):
    """The query cannot be understood; the text says what to write instead."""


@dataclass(frozen=True, slots=True)
class Search:
    """A query that was understood."""

    text: str
    tests: tuple[Test, ...]

    def __call__(self, task: Task) -> bool:
        """Whether a task is looked for."""
        return all(test(task) for test in self.tests)


def parse(
    text: str,
    now: Callable[[], float] = time.time,
    own_states: Callable[[], Collection[str]] = tuple,
    *,
    details: bool = False,
) -> Search:
    """Understand a query; an empty one finds everything.

    `own_states` gives the states of the user's own that were seen, if the query names one.
    """
    text = " ".join(text.split())
    if len(text) > QUERY_CHARS_MAX:
        raise SearchError(f"the search is longer than {QUERY_CHARS_MAX} characters")
    tests: list[Test] = []
    for found in _WORD.finditer(text):
        sign, key, value = found[1], (found[2] or "").lower(), found[3].strip('"')
        if len(tests) >= WORDS_MAX:
            raise SearchError(f"the search has more than {WORDS_MAX} words")
        if not value:
            continue
        test = _test(key, value, now, own_states, details)
        tests.append(_negated(test) if sign else test)
    return Search(text, tuple(tests))


def _negated(test: Test) -> Test:
    return lambda task: not test(task)


def _test(
    key: str,
    value: str,
    now: Callable[[], float],
    own_states: Callable[[], Collection[str]],
    details: bool,
) -> Test:
    if not key:
        return _anywhere(value, details)
    if key == "state":
        return _state(value, own_states)
    if key in TEXTS:
        return _text(TEXTS[key], value, details)
    if key in _NUMBERS:
        read, unit = _NUMBERS[key]
        return _compared(key, value, read, now, unit)
    raise SearchError(f"unknown key {key!r}: use one of {', '.join(KEYS)}")


def _anywhere(value: str, details: bool) -> Test:
    wanted = value.lower()

    def test(task: Task) -> bool:
        texts = [task.uuid, task.name, shown_error(task.exception, details)]
        if details:
            texts += (task.args, task.kwargs)
        return any(isinstance(text, str) and wanted in text.lower() for text in texts)

    return test


def shown_error(text: Any, details: bool) -> str | None:
    """The text of an error, or its class for who may not see details; None if it has none."""
    if not isinstance(text, str):
        return None
    if details:
        return text
    found = _CLASS.match(text)
    return None if found is None else found[1]


def _state(value: str, own_states: Callable[[], Collection[str]]) -> Test:
    wanted: set[str] = set()
    for word in value.split(","):
        name = word.strip()
        if name.lower() in STATES:
            wanted |= STATES[name.lower()]
        elif name.upper() in (own := own_states()):
            wanted.add(name.upper())
        else:
            raise SearchError(_unknown_state(name, own))
    if RUNNING in value.lower().split(","):
        return lambda task: task.running or task.state in wanted
    return lambda task: task.state in wanted


def _unknown_state(name: str, own: Collection[str]) -> str:
    text = f"unknown state {shown(name, 50)!r}: use one of {', '.join(STATES)}"
    named = [shown(state, 50) for state in sorted(own)[:STATES_NAMED_MAX]]
    if not named:
        return f"{text}; no task was in a state of your own"
    more = f" and {len(own) - len(named)} more" if len(own) > len(named) else ""
    return f"{text}; or a state of your own: {', '.join(named)}{more}"


def _text(field: str, value: str, details: bool) -> Test:
    patterns = [re.compile(translate(_glob(one)), re.IGNORECASE) for one in value.split(",") if one]

    def test(task: Task) -> bool:
        text = getattr(task, field)
        if field == "exception":
            text = shown_error(text, details)
        return isinstance(text, str) and any(one.match(text) for one in patterns)

    return test


def _glob(text: str) -> str:
    """Only `*` and `?` mean something; runs of `*` are one, or matching could take for ever."""
    return re.sub(r"\*+", "*", text).replace("[", "[[]")


def _compared(
    key: str, value: str, read: Callable[[Task, float], Any], now: Callable[[], float], unit: bool
) -> Test:
    low, dots, high = value.partition("..")
    bounds: list[tuple[str, float]]
    if dots:
        bounds = [(">=", _amount(key, low, unit)), ("<=", _amount(key, high, unit))]
    else:
        found = _COMPARISON.fullmatch(value)
        assert found is not None
        bounds = [(found[1] or "=", _amount(key, found[2], unit))]

    def test(task: Task) -> bool:
        amount = read(task, now())
        return isinstance(amount, (int, float)) and all(
            _OPERATORS[sign](amount, bound) for sign, bound in bounds
        )

    return test


def _amount(key: str, text: str, unit: bool) -> float:
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None or (found[2] and not unit):
        example = f"{key}:>5s" if unit else f"{key}:>3"
        raise SearchError(f"{key}:{text!r} is no {'duration' if unit else 'number'}: {example}")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _age(task: Task, now: float) -> float | None:
    return None if task.timestamp is None else now - task.timestamp


def runtime_of(task: Task, now: float | None = None) -> float | None:
    """How long a task ran, or runs."""
    told = task.runtime
    if isinstance(told, (int, float)):
        return float(told)
    started = task.started
    if started is None:
        return None
    if task.running:
        return max(0.0, (time.time() if now is None else now) - started)
    ended = task.succeeded or task.failed or task.revoked
    return None if ended is None or ended < started else ended - started


def wait_of(task: Task, now: float | None = None) -> float | None:
    """How long the last attempt of a task waited to be started, or waits."""
    queued = task.queued
    if queued is None:
        return None
    if task.state in WAITING:
        # A retry that nobody saw sent has waited since the attempt before it ended.
        since = max(queued, task.retried or 0.0) if task.state == "RETRY" else queued
        return max(0.0, (time.time() if now is None else now) - since)
    return None if task.started is None else max(0.0, task.started - queued)


# key -> how it is read, and whether it is a duration
_NUMBERS: Final[dict[str, tuple[Callable[[Any, float], Any], bool]]] = {
    "runtime": (runtime_of, True),
    "wait": (wait_of, True),
    "age": (_age, True),
    "retries": (lambda task, _: task.retries or 0, False),
    "clock": (lambda task, _: task.clock, False),
}
