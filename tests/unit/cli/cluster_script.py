"""Events of a small cluster as plain mappings, made by hand."""

from __future__ import annotations

import itertools
from typing import Any

Event = dict[str, Any]


class Script:
    """Makes events with a clock and a time that go on by themselves."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now
        self._clock = itertools.count(1)

    def event(self, kind: str, node: str = "w1@host", **fields: Any) -> Event:
        return {
            "type": kind,
            "hostname": node,
            "timestamp": self.now,
            "clock": next(self._clock),
            "pid": 100,
            "utcoffset": 0.0,
            "local_received": self.now,
            **fields,
        }

    def heartbeat(self, node: str = "w1@host", **fields: Any) -> Event:
        told = {"freq": 2.0, "active": 0, "processed": 0, "loadavg": [0.5, 0.4, 0.3]}
        software = {"sw_ident": "py-umbel", "sw_ver": "1.2.3", "sw_sys": "Linux"}
        return self.event("worker-heartbeat", node, **{**told, **software, **fields})

    def task(self, kind: str, uuid: str, node: str = "w1@host", **fields: Any) -> Event:
        return self.event(f"task-{kind}", node, uuid=uuid, **fields)

    def life(self, uuid: str, name: str = "shop.charge", end: str = "succeeded") -> list[Event]:
        """Received, started 0.5 s later, ended 2 s after that."""
        received = self.task("received", uuid, name=name, args="(7,)", kwargs="{}")
        self.now += 0.5
        started = self.task("started", uuid)
        self.now += 2.0
        told = {"runtime": 2.0, "result": "7"} if end == "succeeded" else {"exception": "E()"}
        return [received, started, self.task(end, uuid, **told)]
