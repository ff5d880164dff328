"""Heart: says at regular intervals that this node is there, and how it is.

The dispatcher's thread beats, so a loop that is held up does not look dead. The node says
`worker-online` once per life, and beats at once when its voice has a new connection.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from umbel.version import __version__
from umbel.worker.blueprint import Step
from umbel.worker.observe.refused_input import malformed
from umbel.worker.runtime.queue_watch import QueueWatch

if TYPE_CHECKING:
    from umbel.app.events.dispatcher import Dispatcher
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.options import WorkerOptions
    from umbel.worker.runtime.worker import Worker

SOFTWARE = {"sw_ident": "py-umbel", "sw_ver": __version__, "sw_sys": platform.system()}

# Names of refused queues in one heartbeat.
REFUSED_MAX = 20


class HeartStep(Step):
    """Starts and stops the heartbeats."""

    name = "Heart"
    requires = ("Events",)

    def __init__(self, parent: Consumer, **options: Any) -> None:
        self._beating: Dispatcher | None = None  # the dispatcher that beats for us

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """The switch."""
        return "--without-heartbeat" if options.without_heartbeat else ""

    def start(self, parent: Consumer) -> None:
        """Say that this node is there, and go on saying it."""
        worker, events = parent.worker, parent.worker.events
        if events is None or self._beating is events:
            return  # it outlived the connection
        self._beating = events
        interval_s = worker.plan.heartbeat_interval_s

        def fields() -> dict[str, Any]:
            return vital_signs(worker, interval_s)

        worker.queue_watch = QueueWatch(worker)
        worker.queue_watch.start()
        events.send("worker-online", **fields())
        events.on_connected.append(lambda: events.send("worker-heartbeat", **fields()))
        events.beat(interval_s, fields)

    def stop(self, parent: Consumer) -> None:
        """Say good-bye, unless it is only the consumer's connection that is gone."""
        worker, events = parent.worker, self._beating
        if events is None or (parent.lost and not worker.stop_wanted.is_set()):
            return
        self._beating = None
        if worker.queue_watch is not None:
            worker.queue_watch.stop()
        events.stop_beating()
        events.on_connected.clear()
        events.send("worker-offline", **vital_signs(worker, worker.plan.heartbeat_interval_s))


def vital_signs(worker: Worker, interval_s: float) -> dict[str, Any]:
    """What a heartbeat tells of a worker."""
    events, shift_s = worker.events, worker.wall.shift_s
    refused, odd = sorted(worker.refused_queues)[:REFUSED_MAX], malformed(worker)
    watch, version = worker.queue_watch, worker.app.conf.worker_code_version
    lengths = watch.lengths if watch is not None else None
    return {
        "freq": (events.beat_interval_s if events is not None else None) or interval_s,
        "active": len(worker.deliveries.active),
        "processed": worker.counters.started,
        "loadavg": [round(load, 2) for load in os.getloadavg()],
        "lost": events.lost if events is not None else 0,
        "revoked": worker.gossip.summary(),
        "concurrency": worker.pool.size,
        "reserved": len(worker.deliveries.reserved),
        "task_events": events is not None and events.sends("task"),
        **({"clock_shift": shift_s} if shift_s else {}),
        **({"refused_queues": refused} if refused else {}),
        **({"refused": odd} if odd else {}),
        **({"queue_lengths": lengths} if lengths is not None else {}),
        **({"code_version": version} if version else {}),
        **SOFTWARE,
    }
