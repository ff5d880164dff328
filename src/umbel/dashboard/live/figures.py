"""Counts of the whole cluster, of nodes, of task types and of queues, from events.

Pure: events and the monotonic time come in as arguments. Everything is bounded; names beyond a
bound are counted together as `OTHERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from umbel.app.events.measures import Rate, Sample
from umbel.dashboard.live.executions import KINDS, Execution
from umbel.dashboard.live.series import Series

TYPES_MAX: Final = 1_000
NODES_MAX: Final = 5_000
QUEUES_MAX: Final = 1_000
OTHERS: Final = "(others)"
OUTCOMES: Final = ("SUCCESS", "FAILURE", "RETRY", "REVOKED", "REJECTED")
# A node that finishes so many tasks more without a word about any tells nothing of tasks.
UNHEARD_MIN: Final = 3


@dataclass(slots=True)
class TypeFigures:
    """What is known of one type of tasks."""

    ended: Rate = field(default_factory=Rate)
    counts: dict[str, int] = field(default_factory=dict)
    runtimes: Sample = field(default_factory=Sample)
    waits: Sample = field(default_factory=Sample)


@dataclass(slots=True)
class NodeFigures:
    """What is counted of one node."""

    ended: Rate = field(default_factory=Rate)
    failed: Rate = field(default_factory=Rate)
    task_events: int = 0
    left: bool = False  # it said goodbye
    first_processed: int | None = None
    processed: int = 0
    unheard: int = 0  # tasks that it finished without a word

    @property
    def is_silent_on_tasks(self) -> bool:
        """Whether it runs tasks and tells nothing of them: started without -E."""
        return self.unheard >= UNHEARD_MIN


class Figures:
    """See the module's text. Not for several threads at a time."""

    def __init__(self) -> None:
        self.events = Rate()
        self.task_events = Rate()
        self.ended = Rate()
        self.failed = Rate()
        self.sent = Rate()
        self.series = Series((*OUTCOMES, "sent"))
        self.types: dict[str, TypeFigures] = {}
        self.nodes: dict[str, NodeFigures] = {}
        self.queues: dict[str, Rate] = {}

    def event(self, event: Mapping[str, Any], execution: Execution | None, now_s: float) -> None:
        """Count one well-formed event, and the execution that it is about."""
        kind = event["type"]
        self.events.add(now_s)
        if kind == "task-sent":
            self._sent(event, now_s)
        elif kind[:7] == "worker-":
            self._worker(event, kind)
        elif kind[:5] == "task-":
            self.task_events.add(now_s)
            if kind in KINDS:  # events of a task's own are sent by every worker, -E or not
                node = self._node(event["hostname"])
                node.task_events += 1
                node.unheard, node.first_processed = 0, None
                if execution is not None:
                    self._execution(kind, execution, node, now_s)

    def _sent(self, event: Mapping[str, Any], now_s: float) -> None:
        self.sent.add(now_s)
        self.series.add("sent", now_s)
        queue = event.get("queue")
        if isinstance(queue, str):
            if queue not in self.queues and len(self.queues) >= QUEUES_MAX:
                queue = OTHERS
            self.queues.setdefault(queue[:255], Rate()).add(now_s)

    def _worker(self, event: Mapping[str, Any], kind: str) -> None:
        node = self._node(event["hostname"])
        if kind in ("worker-online", "worker-heartbeat", "worker-offline"):
            node.left = kind == "worker-offline"
        processed = event.get("processed")
        if type(processed) is not int:
            return
        if node.first_processed is None or processed < node.first_processed:
            node.first_processed = processed
        node.unheard = processed - node.first_processed

    def _execution(self, kind: str, one: Execution, node: NodeFigures, now_s: float) -> None:
        if kind == "task-started" and one.received is not None and one.started is not None:
            self._type(one.name).waits.add(one.started - one.received)
        outcome = one.outcome
        if outcome is None or kind in ("task-started", "task-received") or one.ended is None:
            return
        self.ended.add(now_s)
        node.ended.add(now_s)
        figures = self._type(one.name)
        figures.ended.add(now_s)
        figures.counts[outcome] = figures.counts.get(outcome, 0) + 1
        if outcome in OUTCOMES:
            self.series.add(outcome, now_s)
        if outcome == "FAILURE":
            self.failed.add(now_s)
            node.failed.add(now_s)
        if one.runtime_s is not None and outcome in ("SUCCESS", "FAILURE"):
            figures.runtimes.add(one.runtime_s)

    def _type(self, name: str | None) -> TypeFigures:
        name = name or "(unknown)"
        if name not in self.types and len(self.types) >= TYPES_MAX:
            name = OTHERS
        return self.types.setdefault(name, TypeFigures())

    def _node(self, name: str) -> NodeFigures:
        if name not in self.nodes and len(self.nodes) >= NODES_MAX:
            self.nodes.pop(next(iter(self.nodes)))
        return self.nodes.setdefault(name, NodeFigures())
