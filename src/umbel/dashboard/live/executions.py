"""Executions of tasks: each time that a worker received a task, and what came of it.

`State` folds all that was said of a task into one summary; here every attempt stands by itself, for
the lanes of the timeline and the attempts of a task. Times are those of the senders' wall clocks,
clocks are logical.

Events may come late: a start that comes after its end is put where it belongs. What is said of an
execution that is not known makes a new one, which knows only that. An execution was caused by the
sending that has its number of retries: a retry is sent under the same id by the one before it.

At most `count_max` are kept; the one that was silent the longest goes first. Whoever has seen
everything up to a `version` asks for what changed since.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from umbel.cluster.task_states import Record
from umbel.cluster.task_summary import retries_of

ENDS: Final = {
    "task-succeeded": "SUCCESS",
    "task-failed": "FAILURE",
    "task-retried": "RETRY",
    "task-revoked": "REVOKED",
    "task-rejected": "REJECTED",
    "task-cancelled": "CANCELLED",
}
KINDS: Final = frozenset({"task-received", "task-started", *ENDS})
NAME_CHARS_MAX: Final = 200


@dataclass(slots=True)
class Execution:
    """One attempt of one task on one worker; None is what was not heard."""

    number: int
    version: int
    uuid: str
    worker: str
    name: str | None = None
    parent: str | None = None
    retries: int | None = None
    sent: float | None = None
    sent_clock: int | None = None
    received: float | None = None
    received_clock: int | None = None
    started: float | None = None
    started_clock: int | None = None
    ended: float | None = None
    ended_clock: int | None = None
    outcome: str | None = None
    exception: str | None = None

    @property
    def runtime_s(self) -> float | None:
        """How long it ran, by its worker's wall clock."""
        if self.started is None or self.ended is None:
            return None
        return max(0.0, self.ended - self.started)


class Executions:
    """See the module's text. Not for several threads at a time."""

    def __init__(self, count_max: int) -> None:
        assert count_max > 0
        self._count_max = count_max
        self._by_change: OrderedDict[int, Execution] = OrderedDict()
        self._by_task: dict[str, list[Execution]] = {}
        self._numbers = itertools.count(1)
        self.version = 0

    def __len__(self) -> int:
        return len(self._by_change)

    def of_task(self, uuid: str) -> list[Execution]:
        """The attempts of a task, in the order in which they were heard of."""
        return list(self._by_task.get(uuid, ()))

    def since(self, version: int, limit: int) -> list[Execution]:
        """What changed after a version, the latest changes, oldest of them first."""
        newest_first = itertools.takewhile(
            lambda one: one.version > version, reversed(self._by_change.values())
        )
        return list(itertools.islice(newest_first, limit))[::-1]

    def event(self, event: Mapping[str, Any], sent: Record | None = None) -> Execution | None:
        """Take an event; gives the execution that it is about.

        `sent` is the last sending of its task that was heard.
        """
        kind = event["type"]
        if kind == "task-sent" and sent is not None:
            for waiting in self._by_task.get(event["uuid"], ()):
                if _cause(waiting, sent):
                    self._changed(waiting)
        if kind not in KINDS:
            return None
        outcome = ENDS.get(kind)
        one = self._find(event, kind)
        if one is None:
            one = self._new(event)
        clock, at = event.get("clock") or None, event["timestamp"]  # 0: it has none
        if kind == "task-received":
            one.received, one.received_clock = at, clock
            one.name, one.parent = _text(event.get("name")), _text(event.get("parent_id"))
            one.retries = retries_of(event.get("retries"))
            if sent is not None:
                _cause(one, sent)
        elif kind == "task-started":
            one.started, one.started_clock = at, clock
        else:
            one.ended, one.ended_clock, one.outcome = at, clock, outcome
            one.exception = _text(event.get("exception"))
            self._guess_start(one, event.get("runtime"))
        self._changed(one)
        return one

    def _changed(self, one: Execution) -> None:
        self.version += 1
        one.version = self.version
        self._by_change.move_to_end(one.number)

    def _guess_start(self, one: Execution, runtime: Any) -> None:
        """A worker that tells no starts tells how long its tasks took."""
        if one.started is None and type(runtime) in (int, float) and 0 <= runtime < math.inf:
            assert one.ended is not None
            one.started = one.ended - runtime

    def _find(self, event: Mapping[str, Any], kind: str) -> Execution | None:
        """The execution that an event continues, or one that has ended and lacks this."""
        clock = event.get("clock") or 0
        own = [
            one
            for one in reversed(self._by_task.get(event["uuid"], ()))
            if one.worker == event["hostname"]
        ]
        open_ones = [one for one in own if one.ended is None]
        if kind == "task-received":
            # One that was received already begins again, and its first try had no end.
            late = [one for one in own if one.received is None and _is_before(clock, one)]
            return next(iter(late), None)
        if kind == "task-started":
            waiting = [one for one in open_ones if one.started is None]
            late = [one for one in own if one.started_clock is None and _is_before(clock, one)]
            return next(iter((*waiting, *late)), None)
        # A retry may be received before the end of the try before it is told: what runs ends first.
        running = [one for one in open_ones if one.started is not None]
        if running or open_ones:
            return next(iter((*running, *open_ones)))
        # Another end of what has ended, such as the rejection of a failed task's message.
        return own[0] if own and own[0].outcome != "RETRY" else None

    def _new(self, event: Mapping[str, Any]) -> Execution:
        if len(self._by_change) >= self._count_max:
            self._forget()
        uuid = event["uuid"]
        one = Execution(next(self._numbers), 0, uuid, event["hostname"])
        siblings = self._by_task.setdefault(uuid, [])
        if siblings:
            one.name, one.parent = siblings[-1].name, siblings[-1].parent
        siblings.append(one)
        self._by_change[one.number] = one
        return one

    def _forget(self) -> None:
        _, oldest = self._by_change.popitem(last=False)
        siblings = self._by_task[oldest.uuid]
        siblings.remove(oldest)
        if not siblings:
            del self._by_task[oldest.uuid]


def _cause(one: Execution, sent: Record) -> bool:
    """Let a sending be the cause of an execution, if it is and none was known."""
    if one.retries != retries_of(getattr(sent, "retries", None)) or one.sent is not None:
        return False
    one.sent, one.sent_clock = sent.timestamp, sent.clock or None
    return True


def _is_before(clock: int, one: Execution) -> bool:
    """Whether what has this clock can belong to an execution: before its end, if it has one."""
    return one.ended is None or clock <= (one.ended_clock or 0)


def _text(value: Any) -> str | None:
    return value[:NAME_CHARS_MAX] if type(value) is str else None
