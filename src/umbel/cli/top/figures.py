"""From events to the numbers that `umbel top` shows.

Pure: events and the time come in as arguments, rows come out. The time is monotonic seconds of
whoever looks; only differences between two events of the same node use that node's own clock
(runtime, wait), so no skew between hosts shows up as a duration.

Rates are those of the last ten seconds. Percentiles are those of the last 512 tasks of a type.

Everything is bounded. Of too many open tasks the oldest is forgotten and counted; task types
beyond the bound are counted together as one. An event that comes after the end of its task but
stands before it in the order of events changes nothing. Tasks that were running before the first
event was seen are not known; a node's `active` counts them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from umbel.app.events.measures import Rate, Sample
from umbel.app.events.state import State, Worker
from umbel.cli.event_lines import call_text, first_load, software
from umbel.cli.plain import count, number, plain
from umbel.cluster.clock import Order, order
from umbel.wire.events import Event

OPEN_TASKS_MAX = 20_000
ENDED_TASKS_MAX = 20_000
TYPES_MAX = 1_000
NODES_MAX = 5_000
NAME_CHARS_MAX = 100
CALL_CHARS_MAX = 100
UNKNOWN = "(unknown)"
OTHERS = "(others)"

ENDS = {
    "task-succeeded": "succeeded",
    "task-failed": "failed",
    "task-retried": "retried",
    "task-revoked": "revoked",
    "task-rejected": "rejected",
    "task-cancelled": "revoked",
}
# After these the same task may come again; after the others another end says nothing new, such as
# the rejection of the message of a task that has failed.
GO_ON = frozenset({"retried", "rejected"})


@dataclass(slots=True)
class TypeFigures:
    """What is known of one type of tasks."""

    name: str
    ended: Rate = field(default_factory=Rate)
    counts: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    running: int = 0
    runtimes: Sample = field(default_factory=Sample)
    waits: Sample = field(default_factory=Sample)


@dataclass(slots=True)
class OpenTask:
    """A task that a node has received and not ended."""

    uuid: str
    node: str
    type: TypeFigures
    seen_at_s: float
    name: str = UNKNOWN
    call: str = ""
    received: float | None = None  # times of the node
    started: float | None = None
    running: bool = False


@dataclass(slots=True, frozen=True)
class NodeRow:
    """A node as it is shown."""

    node: str
    alive: bool
    status: str
    active: int | None
    processed: int | None
    per_s: float
    load: float | None
    lost: int | None
    clock: int
    software: str
    heard_s: float | None


@dataclass(slots=True, frozen=True)
class TypeRow:
    """A type of tasks as it is shown."""

    name: str
    per_s: float
    waiting: int
    running: int
    succeeded: int
    failed: int
    retried: int
    runtime_p50_s: float | None
    runtime_p95_s: float | None
    wait_p50_s: float | None
    wait_p95_s: float | None


@dataclass(slots=True, frozen=True)
class RunningRow:
    """A running task as it is shown."""

    uuid: str
    name: str
    node: str
    node_alive: bool
    running_s: float
    call: str


@dataclass(slots=True, frozen=True)
class Totals:
    """The line above the tables."""

    nodes_alive: int
    nodes: int
    events_per_s: float
    ended_per_s: float
    failed_per_s: float
    waiting: int
    running: int
    events: int
    forgotten: int


class Figures:
    """See the module's text."""

    def __init__(
        self,
        *,
        open_tasks_max: int = OPEN_TASKS_MAX,
        types_max: int = TYPES_MAX,
        nodes_max: int = NODES_MAX,
    ) -> None:
        self._now_s = 0.0
        # Who is there is the live state's business; tasks are counted here.
        self._state = State(max_workers=nodes_max, max_tasks=1, clock=lambda: self._now_s)
        self._node_rates: OrderedDict[str, Rate] = OrderedDict()
        self._left: OrderedDict[str, None] = OrderedDict()  # said goodbye
        self._types: dict[str, TypeFigures] = {}
        self._open: OrderedDict[str, OpenTask] = OrderedDict()
        self._ended: OrderedDict[str, tuple[Order, str]] = OrderedDict()
        self._open_tasks_max = open_tasks_max
        self._types_max = types_max
        self._nodes_max = nodes_max
        self._events, self._finished, self._failed = Rate(), Rate(), Rate()
        self.event_count = 0
        self.task_event_count = 0  # of nodes; clients tell what they send in any case
        self.forgotten_count = 0

    # -- what comes in

    def event(self, event: Event, now_s: float) -> None:
        """Count one well-formed event."""
        self._now_s = now_s
        self.event_count += 1
        self._events.add(now_s)
        kind = event["type"]
        if kind in ("worker-online", "worker-offline"):
            self._leave_behind(event)
            self._note_leaving(event["hostname"], left=kind == "worker-offline")
        self._state.event(event)
        if kind in ENDS or kind in ("task-received", "task-started"):
            self._task_event(kind, event, now_s)

    def _leave_behind(self, event: Event) -> None:
        """A node that begins or ends runs nothing of what it ran in the life before."""
        node = event["hostname"]
        known = self._state.workers.get(node)
        life = event.get("pid"), event.get("inc")
        if (
            event["type"] == "worker-online"
            and known is not None
            and (known.pid, known.inc) == life
        ):
            return  # the same life, connected anew: its tasks go on
        for uuid in [uuid for uuid, task in self._open.items() if task.node == node]:
            self._close(uuid)

    def _note_leaving(self, node: str, *, left: bool) -> None:
        self._left.pop(node, None)
        if left:
            self._left[node] = None
            if len(self._left) > self._nodes_max:
                self._left.popitem(last=False)

    def _task_event(self, kind: str, event: Event, now_s: float) -> None:
        self.task_event_count += 1
        uuid = event["uuid"]
        place = order(event)
        ended = self._ended.get(uuid)
        if ended is not None and place <= ended[0]:
            return  # late: its task has ended
        if kind in ENDS:
            how = ENDS[kind]
            if ended is None or ended[1] in GO_ON:
                self._end(how, event, now_s)
            self._ended[uuid] = (place, how)
            self._ended.move_to_end(uuid)
            if len(self._ended) > ENDED_TASKS_MAX:
                self._ended.popitem(last=False)
            return
        self._ended.pop(uuid, None)
        task = self._open.get(uuid)
        if task is None or task.node != event["hostname"]:
            task = self._begin(event, now_s)
        if kind == "task-received":
            self._receive(task, event)
        elif not task.running:
            self._start(task, event, now_s)

    def _begin(self, event: Event, now_s: float) -> OpenTask:
        uuid = event["uuid"]
        self._close(uuid)  # another node has it now
        name = _name(event)
        task = OpenTask(uuid, event["hostname"], self._type(name), now_s, name)
        task.type.waiting += 1
        self._open[uuid] = task
        if len(self._open) > self._open_tasks_max:
            self._close(next(iter(self._open)))
            self.forgotten_count += 1
        return task

    def _receive(self, task: OpenTask, event: Event) -> None:
        task.received = event["timestamp"]
        task.call = call_text(event, CALL_CHARS_MAX)
        name = _name(event)
        if task.name == UNKNOWN and name != UNKNOWN:  # came after its start
            before, task.type, task.name = task.type, self._type(name), name
            for one, step in ((before, -1), (task.type, 1)):
                if task.running:
                    one.running += step
                else:
                    one.waiting += step

    def _start(self, task: OpenTask, event: Event, now_s: float) -> None:
        task.running, task.seen_at_s, task.started = True, now_s, event["timestamp"]
        task.type.waiting -= 1
        task.type.running += 1
        if task.received is not None:
            task.type.waits.add(task.started - task.received)

    def _end(self, how: str, event: Event, now_s: float) -> None:
        task = self._close(event["uuid"])
        known = task.type if task is not None else self._type(_name(event))
        known.counts[how] = known.counts.get(how, 0) + 1
        known.ended.add(now_s)
        self._finished.add(now_s)
        if how == "failed":
            self._failed.add(now_s)
        self._node_rate(event["hostname"]).add(now_s)
        runtime = number(event.get("runtime"))
        if runtime is None and task is not None and task.started is not None:
            runtime = event["timestamp"] - task.started if how in ("succeeded", "failed") else None
        if runtime is not None:
            known.runtimes.add(runtime)

    def _close(self, uuid: str) -> OpenTask | None:
        task = self._open.pop(uuid, None)
        if task is not None:
            if task.running:
                task.type.running -= 1
            else:
                task.type.waiting -= 1
        return task

    def _type(self, name: str) -> TypeFigures:
        found = self._types.get(name)
        if found is None:
            if len(self._types) >= self._types_max:
                name = OTHERS
            found = self._types.setdefault(name, TypeFigures(name))
        return found

    def _node_rate(self, node: str) -> Rate:
        rate = self._node_rates.get(node)
        if rate is None:
            rate = self._node_rates[node] = Rate()
            if len(self._node_rates) > self._nodes_max:
                self._node_rates.popitem(last=False)
        return rate

    # -- what comes out

    def totals(self, now_s: float) -> Totals:
        """The cluster in one line."""
        self._now_s = now_s
        workers = list(self._state.workers.values())
        return Totals(
            nodes_alive=sum(1 for worker in workers if worker.alive),
            nodes=len(workers),
            events_per_s=self._events.per_s(now_s),
            ended_per_s=self._finished.per_s(now_s),
            failed_per_s=self._failed.per_s(now_s),
            waiting=sum(one.waiting for one in self._types.values()),
            running=sum(one.running for one in self._types.values()),
            events=self.event_count,
            forgotten=self.forgotten_count,
        )

    def nodes(self, now_s: float) -> list[NodeRow]:
        """Every node that was heard, alive or not."""
        self._now_s = now_s
        return [self._node_row(worker, now_s) for worker in self._state.workers.values()]

    def _node_row(self, worker: Worker, now_s: float) -> NodeRow:
        rate = self._node_rates.get(worker.hostname)
        status = "alive" if worker.alive else "left" if worker.hostname in self._left else "silent"
        return NodeRow(
            node=plain(worker.hostname, NAME_CHARS_MAX),
            alive=worker.alive,
            status=status,
            active=count(worker.active),
            processed=count(worker.processed),
            per_s=rate.per_s(now_s) if rate is not None else 0.0,
            load=first_load(worker.loadavg),
            lost=count(worker.lost),
            clock=worker.clock or 0,
            software=software(worker.sw_ident, worker.sw_ver),
            heard_s=max(0.0, now_s - worker.heard_at) if worker.heard_at is not None else None,
        )

    def types(self, now_s: float) -> list[TypeRow]:
        """Every type of tasks that was seen."""
        return [_type_row(one, now_s) for one in self._types.values()]

    def running(self, now_s: float) -> list[RunningRow]:
        """Every task that is known to run, those that began first in front."""
        self._now_s = now_s
        alive = {worker.hostname for worker in self._state.workers.values() if worker.alive}
        return [
            RunningRow(
                uuid=plain(task.uuid, NAME_CHARS_MAX),
                name=task.name,
                node=plain(task.node, NAME_CHARS_MAX),
                node_alive=task.node in alive,
                running_s=max(0.0, now_s - task.seen_at_s),
                call=task.call,
            )
            for task in self._open.values()
            if task.running
        ]


def _type_row(one: TypeFigures, now_s: float) -> TypeRow:
    runtime_p50_s, runtime_p95_s = one.runtimes.percentiles(0.5, 0.95)
    wait_p50_s, wait_p95_s = one.waits.percentiles(0.5, 0.95)
    return TypeRow(
        name=one.name,
        per_s=one.ended.per_s(now_s),
        waiting=one.waiting,
        running=one.running,
        succeeded=one.counts.get("succeeded", 0),
        failed=one.counts.get("failed", 0),
        retried=one.counts.get("retried", 0),
        runtime_p50_s=runtime_p50_s,
        runtime_p95_s=runtime_p95_s,
        wait_p50_s=wait_p50_s,
        wait_p95_s=wait_p95_s,
    )


def _name(event: Event) -> str:
    name = event.get("name")
    return plain(name, NAME_CHARS_MAX) if isinstance(name, str) and name else UNKNOWN
