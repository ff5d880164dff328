"""Callbacks about nodes: what `gossip.on` is.

Three sets of functions: `node_join`, `node_leave`, `node_lost`. Each function is called with a
`NodeInfo`, once for each change. Calls are made one at a time, in the order of the changes.

| what is done                                    | what happens                                |
| ----------------------------------------------- | ------------------------------------------- |
| a function is added to `node_join`              | it is called for every node that is there,  |
|                                                 | within `add`, then for every change         |
| the same function is added again                | nothing                                     |
| the same line of a step's `start` adds another  | it takes the place of the one before; what  |
| one, as `start` runs again after a reconnect    | that one was told is not told again         |
| a step removes its function in `stop` and adds  | it is called for the nodes that have come   |
| it in the next `start`                          | meanwhile                                   |
| a function fails                                | it is logged; the others are called         |

Functions are the same when they are equal, or when the same code made them with the same values in
their closure and defaults: a lambda that is written once is one function however often its line
runs.

Changes are put down under the lock of gossip, together with what membership says, so that a
function that is added at the same time misses none and is told none twice. No lock is held while a
function runs. The calls are made by the thread of gossip, and by whoever adds a function, up to
those for that function; if one of them is at it, it also makes the calls of the other. When
`CALLS_MAX` calls are due because a function does not return, the oldest is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSet
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from types import FunctionType, MethodType
from typing import Any

from umbel.app.events.state_items import Worker as Figures
from umbel.cluster import membership as members
from umbel.wire.events import Event
from umbel.wire.reprs import safe_repr
from umbel.worker.blueprint import Step, Turn, current_turn

logger = logging.getLogger("umbel.gossip")

CALLS_MAX = 10 * members.NODES_MAX


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node as it was when the callback was due; the same node if the hostname is the same.

    What it has not sent is None.
    """

    hostname: str
    pid: int | None = field(compare=False)
    inc: int | None = field(compare=False)  # names this life of the worker
    alive: bool = field(compare=False)  # False for those that left or were lost
    freq: float = field(compare=False)  # seconds between its heartbeats
    loadavg: list[float] | None = field(compare=False)
    clock: int = field(compare=False)
    active: int | None = field(compare=False)
    processed: int | None = field(compare=False)
    sw_ident: str | None = field(compare=False)
    sw_ver: str | None = field(compare=False)
    sw_sys: str | None = field(compare=False)
    timestamp: float | None = field(compare=False)  # of its last event, by its own clock
    heartbeats: list[float] = field(compare=False)  # when its last event came, by our clock

    @property
    def id(self) -> str:
        """The hostname and the process."""
        return f"{self.hostname}.{self.pid}"

    @property
    def status_string(self) -> str:
        """`alive`, to be shown."""
        return "ONLINE" if self.alive else "OFFLINE"


Callback = Callable[[NodeInfo], object]


class _Known:
    """What a node that is there has sent of itself; `number` counts the joins."""

    __slots__ = ("figures", "node", "number", "timestamp")

    def __init__(self, node: members.Node, number: int, now: Callable[[], float]) -> None:
        self.node = node
        self.number = number
        self.figures = Figures(node.hostname, now)
        self.timestamp: float | None = None

    def tell(self, event: Event, now: float) -> None:
        self.figures.tell(event, now)
        self.timestamp = event["timestamp"]

    def info(self, now: float, *, alive: bool) -> NodeInfo:
        figures = self.figures
        heard_at = figures.heard_at
        return NodeInfo(
            self.node.hostname,
            self.node.pid,
            self.node.inc,
            alive,
            figures.freq,
            None if figures.loadavg is None else list(figures.loadavg),
            figures.clock,
            figures.active,
            figures.processed,
            figures.sw_ident,
            figures.sw_ver,
            figures.sw_sys,
            self.timestamp,
            [] if heard_at is None else [time.time() - (now - heard_at)],
        )


class _Registration:
    """One function of one set."""

    __slots__ = ("function", "is_there", "told_to", "turn")

    def __init__(self, function: Callback, turn: Turn | None, told_to: int = 0) -> None:
        self.function = function
        self.turn = turn  # of the step that registered it
        self.told_to = told_to  # the number of the last join that it was called for
        self.is_there = True

    @property
    def step(self) -> Step | None:
        return None if self.turn is None else self.turn.step


class _Calls:
    """The calls that are due, in their order; one is made at a time, without the lock."""

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._due: deque[tuple[_Registration, NodeInfo, int]] = deque(maxlen=CALLS_MAX)
        self._busy = False

    def put(self, registration: _Registration, info: NodeInfo, number: int) -> None:
        self._due.append((registration, info, number))

    def make(self, count_max: int) -> None:
        """Make some of them, unless another thread is at it."""
        for _ in range(count_max):
            with self._lock:
                if self._busy or not self._due:
                    return
                registration, info, number = self._due.popleft()
                if not registration.is_there:
                    continue
                self._busy = True
                registration.told_to = max(registration.told_to, number)
                function = registration.function
            try:
                function(info)
            except (Exception, SystemExit):
                logger.exception("a callback about nodes failed: %s", safe_repr(function, 200))
            finally:
                self._busy = False

    def __len__(self) -> int:
        return len(self._due)


class NodeCallbacks(MutableSet[Callback]):
    """The functions that are called for one kind of change; safe on any thread."""

    def __init__(
        self,
        lock: RLock,
        calls: _Calls,
        present: Callable[[int], list[tuple[NodeInfo, int]]],
    ) -> None:
        """`present` gives the nodes that a new function is called for: those after some join."""
        self._lock = lock
        self._calls = calls
        self._present = present
        self._all: list[_Registration] = []
        self._removed: list[_Registration] = []  # by their own steps, which may add them again

    def add(self, value: Callback) -> None:
        """Call this function for every change from now on, and for the nodes that are there."""
        if not callable(value):
            raise TypeError(f"{safe_repr(value, 100)} is not a function that takes a node")
        with self._lock:
            self._register(value, current_turn())
            count = len(self._calls)
        self._calls.make(count)

    def update(self, *functions: Iterable[Callback]) -> None:
        """Add several."""
        for several in functions:
            for function in several:
                self.add(function)

    def discard(self, value: Callback) -> None:
        """Call this function no more."""
        with self._lock:
            found = self._find(value)
            if found is None:
                return
            self._all.remove(found)
            found.is_there = False
            turn = current_turn()
            if turn is not None and found.step is turn.step:
                self._removed.append(found)

    def put(self, info: NodeInfo, number: int = 0) -> None:
        """Note a change for all functions; `number` counts the joins."""
        for registration in self._all:
            self._calls.put(registration, info, number)

    def __contains__(self, value: object) -> bool:
        with self._lock:
            return self._find(value) is not None

    def __iter__(self) -> Iterator[Callback]:
        with self._lock:
            return iter([registration.function for registration in self._all])

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"<callbacks: {safe_repr(list(self), 500)}>"

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return set(it)  # what `|` and `&` make is not registered

    def _find(self, function: Any) -> _Registration | None:
        return next((one for one in self._all if _is_same(one.function, function)), None)

    def _register(self, function: Callback, turn: Turn | None) -> None:
        found = self._find(function) or _predecessor(self._all, function, turn)
        if found is not None:
            found.function, found.turn = function, turn or found.turn
            return
        removed = _predecessor(self._removed, function, turn)
        if removed is not None:
            self._removed.remove(removed)
        # What is still due for the removed one is not called for that one any more.
        new = _Registration(function, turn, 0 if removed is None else removed.told_to)
        self._all.append(new)
        for info, number in self._present(new.told_to):
            self._calls.put(new, info, number)


class Callbacks:
    """What users want to be told: sets of functions that get the node."""

    def __init__(self, lock: RLock, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, _Known] = {}  # those that are there, in the order of their joins
        self._joins_count = 0
        self._calls = _Calls(lock)
        self.node_join = NodeCallbacks(lock, self._calls, self._present)
        self.node_leave = NodeCallbacks(lock, self._calls, _nobody)
        self.node_lost = NodeCallbacks(lock, self._calls, _nobody)

    def __setattr__(self, name: str, value: Any) -> None:
        """A set that is assigned takes the place of the functions that were registered."""
        current = self.__dict__.get(name)
        if not isinstance(current, NodeCallbacks):
            super().__setattr__(name, value)
        elif value is not current:
            current.clear()
            current.update(value)

    def note(self, effects: Iterable[object], event: Event | None = None) -> None:
        """Note what membership says of an event, or of time; under the lock of both."""
        now, is_news = self._clock(), True
        for effect in effects:
            if isinstance(effect, members.Joined | members.Returned):
                self._join(effect.node, event, now)
            elif isinstance(effect, members.Lost):
                self._part(effect.node, self.node_lost, None, now)
            elif isinstance(effect, members.Left):
                self._part(effect.node, self.node_leave, event, now)
            else:
                continue
            is_news = False
        if event is not None and is_news:
            self._tell(event, now)

    def _tell(self, event: Event, now: float) -> None:
        """Take the figures of a node that is there from its event."""
        known = self._known.get(event["hostname"])
        life = members.Heard(event["hostname"], event.get("pid"), event.get("inc"))
        if known is not None and members.is_of(life, known.node):
            known.tell(event, now)

    def deliver(self) -> None:
        """Make the calls that are due."""
        while len(self._calls):
            count = len(self._calls)
            self._calls.make(count)
            if len(self._calls) >= count:
                return  # another thread is at it

    def _join(self, node: members.Node, event: Event | None, now: float) -> None:
        self._joins_count += 1
        known = self._known[node.hostname] = _Known(node, self._joins_count, self._clock)
        if event is not None:
            known.tell(event, now)
        self.node_join.put(known.info(now, alive=True), known.number)

    def _part(
        self, node: members.Node, callbacks: NodeCallbacks, event: Event | None, now: float
    ) -> None:
        known = self._known.pop(node.hostname, None) or _Known(node, 0, self._clock)
        if event is not None:
            known.tell(event, now)
        callbacks.put(known.info(now, alive=False))

    def _present(self, since: int) -> list[tuple[NodeInfo, int]]:
        """The nodes that are there and came after join number `since`."""
        now, known = self._clock(), self._known.values()
        return [(one.info(now, alive=True), one.number) for one in known if one.number > since]


def _nobody(since: int) -> list[tuple[NodeInfo, int]]:
    return []


def _predecessor(
    registrations: list[_Registration], function: Callback, turn: Turn | None
) -> _Registration | None:
    """What the same line registered when the same step was started before."""
    if turn is None:
        return None
    origin = _origin(function)
    for one in registrations:
        if one.step is turn.step and one.turn is not turn and _origin(one.function) == origin:
            return one
    return None


def _origin(function: Any) -> Any:
    """The code of a function; the kind of another callable."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return getattr(function, "__code__", type(function))


def _is_same(one: Any, other: Any) -> bool:
    if one is other or one == other:
        return True
    both_are_functions = isinstance(one, FunctionType) and isinstance(other, FunctionType)
    return (
        both_are_functions
        and one.__code__ is other.__code__
        and one.__globals__ is other.__globals__
        and _values(one) == _values(other)
    )


def _values(function: FunctionType) -> list[int]:
    """What a function has in its closure and defaults, by identity."""
    found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            found.append(cell)
    return [id(value) for value in found]
