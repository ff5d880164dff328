"""Who is there, found out by listening for a while.

Pure: events and the time come in as arguments. Every node tells of itself once per heartbeat
interval. So when the longest interval that was told has passed, with a little patience, and every
node has told its figures, whoever has not been heard sends no heartbeats, and waiting longer would
tell nothing new.

Whether a node sends events of tasks can be known in three ways: it says so in its heartbeat
(`task_events`); such an event was heard; or it has processed tasks between two heartbeats and
none was heard, then it does not. Otherwise it stays unknown.

Whoever can ask nodes directly gives their answers to `rows`: then a node that was heard but did not
answer is told from one that did.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from umbel.app.events.state import State, Worker
from umbel.cli.event_lines import first_load
from umbel.cli.plain import count, number, plain
from umbel.cluster.membership import FREQ_MAX_S
from umbel.cluster.task_states import CUSTOM, class_of
from umbel.wire.events import Event

NODES_MAX = 5_000
PATIENCE_S = 0.25
QUEUES_MAX = 20
REASONS_MAX = 20

# What nodes refuse, by the name that heartbeats give it.
REFUSED_WORDS = {
    "tasks": "task messages",
    "control": "control messages",
    "events": "events",
    "replies": "replies",
    "greetings": "revocations or pauses of other nodes",
}
Refused = dict[str, dict[str, int]]  # by source and reason

ALIVE, SILENT, LEFT = "alive", "silent", "left"
NO_ANSWER, NO_EVENTS = "did not answer", "answers, sends no events"


@dataclass(slots=True)
class _Heard:
    """What the state of a node does not hold."""

    complete: bool = False  # its figures were told
    left: bool = False  # it said goodbye
    processed: int | None = None
    task_events: bool | None = None
    task_event_count: int = 0
    refused_queues: tuple[str, ...] = ()
    refused: Refused = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One line of the answer."""

    hostname: str
    state: str
    alive: bool
    answered: bool | None  # None: nobody asked
    pid: int | None = None
    clock: int | None = None
    active: int | None = None
    processed: int | None = None
    load: float | None = None
    sw_ident: Any = None
    sw_ver: Any = None
    task_events: bool | None = None
    lost: int | None = None
    refused_queues: tuple[str, ...] = ()  # by the broker
    refused: Refused = field(default_factory=dict)  # by the node, since it started


class RollCall:
    """See the module's text."""

    def __init__(self, began_s: float) -> None:
        self._began_s = self._now_s = began_s
        self._state = State(max_workers=NODES_MAX, max_tasks=1, clock=lambda: self._now_s)
        self._heard: dict[str, _Heard] = {}
        self._interval_s = 0.0

    def event(self, event: Event, now_s: float) -> None:
        """Take note of one well-formed event."""
        self._now_s = now_s
        self._state.event(event)
        kind, hostname = event["type"], event["hostname"]
        if "umbel_series" in event:
            return  # of a pool process
        if not kind.startswith("worker-") and class_of(kind) in ("sent", CUSTOM):
            return  # of a client, or of a task's own making: no word of the worker about tasks
        heard = self._heard.get(hostname)
        if heard is None:
            if len(self._heard) >= NODES_MAX:
                return
            heard = self._heard[hostname] = _Heard()
        heard.left = kind == "worker-offline"
        heard.complete |= heard.left
        if kind.startswith("task-"):
            heard.task_event_count += 1
            heard.task_events = True
        elif kind in ("worker-online", "worker-heartbeat"):
            self._heartbeat(heard, event)

    def _heartbeat(self, heard: _Heard, event: Event) -> None:
        said = event.get("task_events")
        if isinstance(said, bool):
            heard.task_events = said
        refused = event.get("refused_queues")
        if isinstance(refused, list):
            heard.refused_queues = tuple(plain(name, 60) for name in refused[:QUEUES_MAX])
        elif "processed" in event:
            heard.refused_queues = ()
        if "processed" in event:
            heard.refused = _refused(event.get("refused"))
        processed = count(event.get("processed"))
        if processed is None:
            return  # the short one that Celery's workers send when asked to
        heard.complete = True
        interval_s = number(event.get("freq"))
        if interval_s is not None:
            self._interval_s = max(self._interval_s, min(interval_s, FREQ_MAX_S))
        before, heard.processed = heard.processed, processed
        if before is not None and processed > before and heard.task_events is None:
            heard.task_events = False

    def complete(self, now_s: float) -> bool:
        """Whether waiting longer would tell nothing new."""
        return (
            bool(self._heard)
            and self._interval_s > 0
            and now_s >= self._began_s + self._interval_s + PATIENCE_S
            and all(heard.complete for heard in self._heard.values())
        )

    @property
    def task_event_count(self) -> int:
        """How many events of tasks were heard from nodes."""
        return sum(heard.task_event_count for heard in self._heard.values())

    def rows(self, now_s: float, answers: Collection[str] | None = None) -> list[NodeStatus]:
        """Every node, by name; `answers` are the names of those that answered, if asked."""
        self._now_s = now_s
        found = [self._row(worker, answers) for worker in self._state.workers.values()]
        known = {row.hostname for row in found}
        found += [
            NodeStatus(name, NO_EVENTS, alive=True, answered=True)
            for name in answers or ()
            if name not in known
        ]
        return sorted(found, key=lambda row: row.hostname)

    def _row(self, worker: Worker, answers: Collection[str] | None) -> NodeStatus:
        heard = self._heard.get(worker.hostname) or _Heard()
        answered = None if answers is None else worker.hostname in answers
        return NodeStatus(
            worker.hostname,
            _state(worker, heard, answered),
            alive=bool(worker.alive or answered),
            answered=answered,
            pid=count(worker.pid),
            clock=count(worker.clock),
            active=count(worker.active),
            processed=count(worker.processed),
            load=first_load(worker.loadavg),
            sw_ident=worker.sw_ident,
            sw_ver=worker.sw_ver,
            task_events=heard.task_events,
            lost=count(worker.lost),
            refused_queues=heard.refused_queues,
            refused=heard.refused,
        )


def _state(worker: Worker, heard: _Heard, answered: bool | None) -> str:
    if worker.alive:
        return NO_ANSWER if answered is False else ALIVE
    if answered:
        return ALIVE
    return LEFT if heard.left else SILENT


def _refused(told: Any) -> Refused:
    """What a heartbeat says of refused input, as far as it makes sense."""
    found: Refused = {}
    for source in REFUSED_WORDS if isinstance(told, dict) else ():
        reasons = told.get(source)
        if isinstance(reasons, dict):
            numbers = {plain(name, 40): count(n) for name, n in list(reasons.items())[:REASONS_MAX]}
            found[source] = {name: n for name, n in numbers.items() if n}
    return {source: reasons for source, reasons in found.items() if reasons}


def refused_text(source: str, reasons: Mapping[str, int]) -> str:
    """`3 events (bad-clock 2, not-an-event 1)`."""
    told = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))
    return f"{sum(reasons.values())} {REFUSED_WORDS[source]} ({told})"
