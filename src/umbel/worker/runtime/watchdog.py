"""A consumer that is connected but hears nothing is found out and rebuilt.

Redis answers every wait for messages within a second, and RabbitMQ sends heartbeats, so silence
for longer means that the other side is gone without a word, or that this side does not ask any
more. The loop itself looks, at every turn, how long ago the broker's socket was last readable.
A full window is a good reason for silence on Redis, where a worker with a full window asks for
nothing. Every rebuild is counted.

Hearing is not being heard: an AMQP broker is also asked something, a few times per heartbeat, and
one that leaves that unanswered for a heartbeat is gone. It is looked at turns of the loop, not at
a clock, so that a loop which was busy with something else blames nobody.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from umbel.worker.runtime.errors import ConnectionFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kombu import Connection

    from umbel.app.conf import Conf
    from umbel.broker.sessions.probes import Probe
    from umbel.worker.runtime.consumer import Consumer

# So often per heartbeat the broker is asked, or looked at for its answer.
LOOKS = 3


class Watchdog:
    """Watches one connection of one consumer."""

    def __init__(self, consumer: Consumer) -> None:
        connection = consumer.connection
        assert connection is not None
        self._consumer = consumer
        self._patience_s = patience_s(consumer.app.conf, connection)
        consumer.last_sign = time.monotonic()
        transport = connection.transport
        on_readable = transport.on_readable

        def heard(*args: Any) -> Any:
            consumer.last_sign = time.monotonic()
            return on_readable(*args)

        transport.on_readable = heard

    def check(self, now: float) -> None:
        """Raise `ConnectionFailed` when it has been silent for too long."""
        consumer = self._consumer
        if self._patience_s is None or now - consumer.last_sign < self._patience_s:
            return
        qos: Any = getattr(consumer.channel, "qos", None)
        if hasattr(qos, "can_consume") and not qos.can_consume():
            consumer.last_sign = now
            return
        consumer.worker.counters.rebuilt_by_watchdog += 1
        raise ConnectionFailed(f"no sign of life for {now - consumer.last_sign:.0f} s")


def questioning(consumer: Consumer, probe: Probe) -> Callable[[], None]:
    """What is to be called `LOOKS` times per heartbeat; raises when no answer has come."""
    looks = 0

    def look() -> None:
        nonlocal looks
        if not probe.open or probe.blocked:
            looks = 0
            if not probe.blocked:
                probe.ask()
            return
        looks += 1
        if looks >= LOOKS:
            consumer.worker.counters.rebuilt_by_watchdog += 1
            raise ConnectionFailed("the broker does not answer")

    return look


def patience_s(conf: Conf, connection: Connection) -> float | None:
    """How much silence is too much; None where silence means nothing."""
    patience, beat = conf.worker_watchdog_timeout, conf.broker_heartbeat
    if not patience:
        return None
    if connection.transport.driver_type == "redis":
        return min(patience, beat) if beat else float(patience)
    if connection.supports_heartbeats and beat:
        return float(max(patience, 2 * beat))
    return None
