"""Makes events: says who, when, and the how manieth.

Every process that sends events has one stamper per name it goes by. Clock and sequence number are
taken together, so that among the events of one incarnation the numbers run in the order in which
the events were made, and a number that never arrives is an event that was lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from umbel.cluster.clock import Clock

Event = dict[str, Any]
_last_inc = 0
_inc_lock = threading.Lock()


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


class Stamper:
    """See the module's text."""

    def __init__(self, hostname: str, clock: Clock) -> None:
        self.hostname = hostname
        self.clock = clock
        self.pid = os.getpid()
        self.inc = new_incarnation()
        self.seq = 0
        self.utcoffset = hours_west()

    def count(self, clock: int | None = None) -> tuple[int, int]:
        """The number of the next event and its clock: the one that was set aside, or the next."""
        own = self.clock
        with own.lock:
            self.seq = seq = self.seq + 1
            return seq, own.step() if clock is None else clock

    def make(self, kind: str, fields: Mapping[str, Any], clock: int | None = None) -> Event:
        """One event; `clock` is the value that was set aside for it earlier, if one was."""
        seq, stamp = self.count(clock)
        return {
            "type": kind,
            "hostname": self.hostname,
            "pid": self.pid,
            "utcoffset": self.utcoffset,
            "clock": stamp,
            "timestamp": time.time(),
            "seq": seq,
            "inc": self.inc,
            **fields,
        }
