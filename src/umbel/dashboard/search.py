"""The language of the search field on the tasks page, which is also part of the address.

    state:failed name:img.* runtime:>5s worker:w1@* "ValueError" -queue:mail

Words narrow the search: all must hold. `key:value` looks at one field, a word alone looks for its
text in the id, the name, the arguments and the error. Before a word, `-` turns it round. Several
values are separated by commas, texts may have `*` and `?`, and quotes keep spaces together.
Numbers and times take `>`, `>=`, `<`, `<=`, `=` or a range `1s..5s`.

| key                                | what it looks at                                         |
| ---------------------------------- | -------------------------------------------------------- |
| state                              | failed, running, waiting, done, ... or Celery's names     |
| name, worker, queue, id, root, parent, error, client | a text, the whole of it, with `*` for any |
| runtime, wait, age                 | durations: `250ms`, `5s`, `2m`, `1h`, `3d`               |
| retries, clock                     | whole numbers                                            |

What can not be understood is a `SearchError` that says so; nothing else is ever raised.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.task_states import READY_STATES

if TYPE_CHECKING:
    from umbel.app.events.state import Task

QUERY_CHARS_MAX: Final = 500
WORDS_MAX: Final = 20

Test = Callable[["Task"], bool]

STATES: Final[dict[str, frozenset[str]]] = {
    "failed": frozenset({"FAILURE"}),
    "failure": frozenset({"FAILURE"}),
    "succeeded": frozenset({"SUCCESS"}),
    "success": frozenset({"SUCCESS"}),
    "ok": frozenset({"SUCCESS"}),
    "running": frozenset({"STARTED"}),
    "started": frozenset({"STARTED"}),
    "received": frozenset({"RECEIVED"}),
    "sent": frozenset({"PENDING"}),
    "pending": frozenset({"PENDING"}),
    "waiting": frozenset({"PENDING", "RECEIVED", "RETRY"}),
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
_COMPARISON: Final = re.compile(r"(>=|<=|>|<|=)?(.+)", re.DOTALL)
_WORD: Final = re.compile(r'(-?)(?:([A-Za-z_]+):)?("[^"]*"|\S+)')
_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "=": operator.eq,
}  # fmt: skip
KEYS: Final = ("state", *dict.fromkeys(TEXTS), "runtime", "wait", "age", "retries", "clock")


class SearchError(ValueError):
    """The query can not be understood; the text says what to write instead."""


@dataclass(frozen=True, slots=True)
class Search:
    """A query that was understood."""

    text: str
    tests: tuple[Test, ...]

    def __call__(self, task: Task) -> bool:
        """Whether a task is looked for."""
        return all(test(task) for test in self.tests)


def parse(text: str, now: Callable[[], float] = time.time) -> Search:
    """Understand a query; an empty one finds everything."""
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
        test = _test(key, value, now)
        tests.append(_negated(test) if sign else test)
    return Search(text, tuple(tests))


def _negated(test: Test) -> Test:
    return lambda task: not test(task)


def _test(key: str, value: str, now: Callable[[], float]) -> Test:
    if not key:
        return _anywhere(value)
    if key == "state":
        return _state(value)
    if key in TEXTS:
        return _text(TEXTS[key], value)
    if key in _NUMBERS:
        read, unit = _NUMBERS[key]
        return _compared(key, value, read, now, unit)
    raise SearchError(f"unknown key {key!r}: use one of {', '.join(KEYS)}")


def _anywhere(value: str) -> Test:
    wanted = value.lower()

    def test(task: Task) -> bool:
        texts = (task.uuid, task.name, task.args, task.kwargs, task.exception)
        return any(isinstance(text, str) and wanted in text.lower() for text in texts)

    return test


def _state(value: str) -> Test:
    wanted: set[str] = set()
    for word in value.split(","):
        name = word.strip().lower()
        if name in STATES:
            wanted |= STATES[name]
        elif re.fullmatch(r"[a-z0-9_-]{1,50}", name):
            wanted.add(name.upper())  # a state of the user's own
        else:
            raise SearchError(f"unknown state {word!r}: use one of {', '.join(STATES)}")
    return lambda task: task.state in wanted


def _text(field: str, value: str) -> Test:
    patterns = [re.compile(translate(_glob(one)), re.IGNORECASE) for one in value.split(",") if one]

    def test(task: Task) -> bool:
        text = getattr(task, field)
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
    if task.state == "STARTED":
        return max(0.0, (time.time() if now is None else now) - started)
    ended = task.succeeded or task.failed or task.revoked
    return None if ended is None or ended < started else ended - started


def wait_of(task: Task, now: float | None = None) -> float | None:
    """How long a task waited to be started, or waits."""
    first = task.sent if task.sent is not None else task.received
    if first is None:
        return None
    if task.started is not None:
        return max(0.0, task.started - first)
    if task.state in READY_STATES:
        return None
    return max(0.0, (time.time() if now is None else now) - first)


# key -> how it is read, and whether it is a duration
_NUMBERS: Final[dict[str, tuple[Callable[[Any, float], Any], bool]]] = {
    "runtime": (runtime_of, True),
    "wait": (wait_of, True),
    "age": (_age, True),
    "retries": (lambda task, _: task.retries or 0, False),
    "clock": (lambda task, _: task.clock, False),
}
