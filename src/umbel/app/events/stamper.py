"""Makes events: the sender, the time, the clock and the sequence number of each.

A *life* is one run of one worker, named by its hostname, pid and incarnation (`inc`). Events that
others send under a worker's name, such as a task in a pool process, belong to the same life: they
carry its pid and incarnation, so no monitor takes the sender for another worker.

Every stamper numbers its events 1, 2, 3, ...: a number that never arrives is an event that was
lost. The numbers without `umbel_series` are the worker's own. Processes cannot share a counter, so
everybody else who sends events of that life names the series of its numbers by a random number.

Clock and sequence number are taken together, so that within one series the numbers run in the
order in which the events were made. A *blind* event has a number but no clock, and does not move
the sender's clock.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from umbel.cluster.clock import Clock

Event = dict[str, Any]
_last_inc = 0
_inc_lock = threading.Lock()
_CELL = struct.Struct("=Q")


def new_incarnation() -> int:
    """The microseconds of now: greater than that of any earlier life of this node."""
    global _last_inc
    with _inc_lock:
        _last_inc = max(time.time_ns() // 1000, _last_inc + 1)
        return _last_inc


def hours_west() -> float:
    """The local time zone as events tell it: hours that it lies west of UTC."""
    offset_s = time.localtime().tm_gmtoff
    return -offset_s / 3600


class Life:
    """The life of a worker, known to its process and to those that are forked from it.

    Pool processes are forked before the worker has claimed its name and begins to send events. So
    the incarnation is kept in memory that they share.
    """

    def __init__(self, hostname: str) -> None:
        self.hostname = hostname
        self.pid = os.getpid()
        self._cell = mmap.mmap(-1, _CELL.size)

    @property
    def inc(self) -> int:
        """The incarnation; 0 before the worker sends events."""
        return int(_CELL.unpack_from(self._cell)[0])

    def begin(self, inc: int) -> None:
        """The worker sends events from now on."""
        _CELL.pack_into(self._cell, 0, inc)


class Stamper:
    """Stamps the events of one sender: a life of its own, or somebody else's that has begun."""

    def __init__(self, hostname: str, clock: Clock, life: Life | None = None) -> None:
        self.hostname = hostname
        self.clock = clock
        self.pid = os.getpid() if life is None else life.pid
        self.inc = new_incarnation() if life is None else life.inc
        self.series = {} if life is None else {"umbel_series": secrets.randbits(52) + 1}
        self.seq = 0
        self.utcoffset = hours_west()

    def count(self, clock: int | None = None) -> tuple[int, int]:
        """The number of the next event and its clock: the one that was set aside, or the next."""
        own = self.clock
        with own.lock:
            self.seq = seq = self.seq + 1
            return seq, own.step() if clock is None else clock

    def make(
        self,
        kind: str,
        fields: Mapping[str, Any],
        clock: int | None = None,
        *,
        blind: bool = False,
    ) -> Event:
        """One event; `clock` is the value that was set aside for it earlier, if one was."""
        stamp: dict[str, int] = {}
        if blind:
            with self.clock.lock:
                self.seq = seq = self.seq + 1
        else:
            seq, stamp["clock"] = self.count(clock)
        return {
            "type": kind,
            "hostname": self.hostname,
            "pid": self.pid,
            "utcoffset": self.utcoffset,
            **stamp,
            "timestamp": time.time(),
            "seq": seq,
            "inc": self.inc,
            **self.series,
            **fields,
        }
