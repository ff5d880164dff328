"""What a `State` is made of: workers and tasks.

A `Task` is the summary of its events: see `umbel.cluster.task_summary`.

A `Worker` is alive while it was heard within two heartbeat intervals, on the receiver's monotonic
time; what senders say about the time never counts. `worker-offline` ends it at once. After that,
what was still on its way does not raise it: a life that has an `inc` is over, and one that has
none begins again with `worker-online`. This memory fades after some minutes, so that no forged
message silences a name for good.

Only events of the worker itself (`worker-*`) begin, replace or end a life. What it says of tasks is
a sign of the life that it names, if that is the known one. What tasks say themselves is none: it
comes from pool processes, which go on while the worker stands still, and which name themselves in
Celery and older versions. A worker of which nothing but tasks was heard goes by what they name,
until it speaks for itself.

The figures of a worker are those of its latest event. Brokers keep the order of one sender, but a
reconnect may not: an event that comes within seconds of a later one changes no figure. After that
the arrival decides, so that a forged clock does no lasting harm. A figure that makes no sense is
left out, and the one before it stays.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from umbel.cluster.clock import Order, order
from umbel.cluster.membership import (
    FREQ_MAX_S,
    FREQ_MIN_S,
    FREQ_UNKNOWN_S,
    MEMORY_S,
    is_alive,
)
from umbel.cluster.task_states import READY_STATES
from umbel.cluster.task_summary import Summary

Event = Mapping[str, Any]
Life = tuple[int | None, int | None]  # pid and incarnation

# Who sends heartbeats, but does not tell how often, is taken for one with the default interval.
FREQ_DEFAULT_S: Final = 2.0
# The broker keeps events for five seconds: later than this nothing comes late.
STRAGGLER_S: Final = 10.0
WORD_CHARS_MAX: Final = 200
# The number of latest events by which wall clocks are compared. More: a late event hides among
# others for longer; fewer: a clock that was set is noticed sooner.
SKEWS_MAX: Final = 5

# What `Task.info` shows.
INFO_FIELDS: Final = (
    *("args", "kwargs", "retries", "result", "eta", "runtime", "expires", "exception"),
    *("exchange", "routing_key", "root_id", "parent_id"),
)
WORKER_FIELDS: Final = (
    *("hostname", "pid", "inc", "clock", "freq", "active", "processed", "loadavg"),
    *("sw_ident", "sw_ver", "sw_sys", "lost", "skew_s", "alive", "status_string"),
)


class Task(Summary):
    """One task. Its fields are None where no event has told them."""

    __slots__ = ("listed_under",)

    def __init__(self, uuid: str) -> None:
        super().__init__(uuid)
        self.listed_under: str | None = None  # whose children the state lists it among

    @property
    def ready(self) -> bool:
        """Whether the task has ended."""
        return self.state in READY_STATES

    def info(
        self, fields: Iterable[str] | None = None, extra: Iterable[str] = ()
    ) -> dict[str, Any]:
        """The fields that are known of those that one wants to see."""
        names = (*(INFO_FIELDS if fields is None else fields), *extra)
        found = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def __repr__(self) -> str:
        return f"<Task {self.name}({self.uuid}) {self.state} clock:{self.clock}>"


class Worker:
    """One worker, known by its hostname."""

    __slots__ = (
        *("_is_sure", "_left_at", "_now", "_place", "_placed_at", "_skews_s"),
        *("active", "clock", "freq", "heard_at", "hostname", "inc", "loadavg", "lost", "pid"),
        *("processed", "sw_ident", "sw_sys", "sw_ver"),
    )

    def __init__(self, hostname: str, now: Callable[[], float]) -> None:
        self._now = now
        self.hostname = hostname
        self.heard_at: float | None = None  # on the receiver's monotonic time
        self.freq = FREQ_UNKNOWN_S
        self.sw_ident: str | None = None
        self.sw_ver: str | None = None
        self.sw_sys: str | None = None
        self._is_sure = False  # whether the worker itself has named its life
        self._begin(None, None)

    def _begin(self, pid: int | None, inc: int | None) -> None:
        """Another life: nothing is known of it yet."""
        self.pid, self.inc = pid, inc
        self.clock = 0
        self.active: int | None = None
        self.processed: int | None = None
        self.loadavg: list[float] | None = None
        self.lost: int | None = None  # events of this life that it had to drop
        self._skews_s: deque[float] = deque(maxlen=SKEWS_MAX)
        self._left_at: float | None = None
        self._place: Order | None = None
        self._placed_at = 0.0

    # -- questions ---------------------------------------------------------------------

    @property
    def skew_s(self) -> float | None:
        """How far its wall clock is ahead of the receiver's, by the event that came the quickest.

        An event that was long on its way, or waited at a busy receiver, is no wrong clock.
        """
        return max(self._skews_s, default=None)

    @property
    def alive(self) -> bool:
        """Whether it is there, as of now."""
        return self._is_alive(self._now())

    def _is_alive(self, now: float) -> bool:
        if self._left_at is not None or self.heard_at is None:
            return False
        return is_alive(self.heard_at, self.freq, now)

    @property
    def life(self) -> Life | None:
        """The life that the worker itself has named; None before, and after `worker-offline`."""
        return (self.pid, self.inc) if self._is_sure and self._left_at is None else None

    @property
    def status_string(self) -> str:
        """`alive`, to be shown."""
        return "ONLINE" if self.alive else "OFFLINE"

    def as_dict(self) -> dict[str, Any]:
        """The worker as plain data; when it was heard is told as seconds ago."""
        known = {name: getattr(self, name) for name in WORKER_FIELDS}
        ago = None if self.heard_at is None else max(0.0, self._now() - self.heard_at)
        return {**known, "heard_ago_s": ago}

    def __repr__(self) -> str:
        return f"<Worker {self.hostname} {self.status_string} clock:{self.clock}>"

    # -- events ------------------------------------------------------------------------

    def hear(self, pid: int | None, inc: int | None, clock: int, now: float) -> None:
        """Take an event of a task as a sign of the known life, unless it names another one."""
        if self._left_at is not None or inc != self.inc or pid != self.pid:
            if self._is_another(pid, inc) or self._has_just_left(now):
                return
            if self._left_at is not None:
                self._begin(self.pid, self.inc)
            elif not self._is_sure:
                self._name(pid, inc)
        self.heard_at = now
        if clock > self.clock:  # noqa: PLR1730 - once per event: max() takes longer
            self.clock = clock

    def tell(self, event: Event, now: float) -> None:
        """Take the figures of an event about the worker itself."""
        pid, inc, kind = event.get("pid"), event.get("inc"), event["type"]
        if not self._is_sure:
            self._is_sure, self.pid, self.inc = True, None, None
        if kind == "worker-offline":
            if self._is_another(pid, inc) or self._is_straggler(event, now):
                return
            self._name(pid, inc)
            self._left_at = now
        else:
            is_there = self._appear(pid, inc, now, is_online=kind == "worker-online")
            if not is_there or self._is_straggler(event, now):
                return
        self._place, self._placed_at = order(event), now
        self.clock = self._place[0] or self.clock
        if "freq" in event:
            self.freq = _freq(event["freq"])
        self._take_figures(event)

    def _appear(self, pid: int | None, inc: int | None, now: float, *, is_online: bool) -> bool:
        """The worker says that it is there, perhaps as another life; False if that life is over."""
        if self._left_at is not None or inc != self.inc or pid != self.pid:
            if self._is_late(pid, inc, now, is_online):
                return False
            if self._is_another(pid, inc):
                self._begin(pid, inc)
            elif self._left_at is not None:
                self._begin(self.pid, self.inc)
            else:
                self._name(pid, inc)
        self.heard_at = now
        return True

    def _take_figures(self, event: Event) -> None:
        get = event.get
        self.active = _count(get("active"), self.active)
        self.processed = _count(get("processed"), self.processed)
        self.lost = _count(get("lost"), self.lost)
        self.loadavg = _load(get("loadavg"), self.loadavg)
        self.sw_ident = _word(get("sw_ident"), self.sw_ident)
        self.sw_ver = _word(get("sw_ver"), self.sw_ver)
        self.sw_sys = _word(get("sw_sys"), self.sw_sys)
        received = get("local_received")
        if _is_number(received):
            self._skews_s.append(event["timestamp"] - received)

    def _name(self, pid: int | None, inc: int | None) -> None:
        """The known life tells more of its name."""
        self.pid = self.pid if pid is None else pid
        self.inc = self.inc if inc is None else inc

    def _is_another(self, pid: int | None, inc: int | None) -> bool:
        """Whether this names another life than the known one; who names none does not."""
        if not self._is_sure:
            return False
        if inc is not None and self.inc is not None:
            return inc != self.inc
        return pid is not None and self.pid is not None and pid != self.pid

    def _is_late(self, pid: int | None, inc: int | None, now: float, is_online: bool) -> bool:
        """Whether this is said of a life that is over."""
        just_left = self._has_just_left(now)
        if inc is not None and self.inc is not None and inc != self.inc:
            return inc < self.inc and (just_left or self._is_alive(now))
        if not just_left or self._is_another(pid, inc):
            return False
        return inc is not None or not is_online

    def _has_just_left(self, now: float) -> bool:
        return self._left_at is not None and now - self._left_at < MEMORY_S

    def _is_straggler(self, event: Event, now: float) -> bool:
        if self._place is None or now - self._placed_at >= STRAGGLER_S:
            return False
        place = order(event)
        if not place[0] or not self._place[0]:  # one of them has no clock to compare
            return place[1:] < self._place[1:]
        return place < self._place


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _freq(told: Any) -> float:
    if not _is_number(told) or told <= 0:
        return FREQ_DEFAULT_S
    return float(min(max(told, FREQ_MIN_S), FREQ_MAX_S))


def _count(told: Any, known: int | None) -> int | None:
    return told if type(told) is int and 0 <= told < 2**63 else known


def _word(told: Any, known: str | None) -> str | None:
    return told[:WORD_CHARS_MAX] if type(told) is str else known


def _load(told: Any, known: list[float] | None) -> list[float] | None:
    if type(told) not in (list, tuple) or not 0 < len(told) <= 3:
        return known
    if not all(_is_number(one) and 0 <= one < 2**53 for one in told):
        return known
    return [float(one) for one in told]
