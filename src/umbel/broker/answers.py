"""Not waiting for ever for an AMQP broker's answer.

py-amqp waits without a bound, and a bound on reading from the socket is none: the heartbeats of a
broker that does not hear us keep coming. So every wait gets a deadline, which is looked at before
each frame is read. A wait that has a time-out of its own keeps it. `TimeoutError` is raised then,
which counts as a lost connection: an answer that comes later would be taken for another one's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kombu import Connection
from kombu.transport import pyamqp

from umbel.broker.amqp.bounded import BoundedConnection
from umbel.broker.amqp.transport import OURS


class PatientConnection(Connection):
    """kombu's connection, whose patience with AMQP brokers has an end."""

    answer_timeout_s = 30.0
    # Ours, or "pyamqp" for kombu's.
    amqp_transport = "umbel"

    def get_transport_cls(self) -> Any:
        """Ours for AMQP, unless the other is wanted."""
        found = super().get_transport_cls()
        return OURS.get(found, found) if self.amqp_transport == "umbel" else found

    def create_transport(self) -> Any:
        """Another one after each change of brokers."""
        transport = super().create_transport()
        if isinstance(transport, pyamqp.Transport):
            ours = isinstance(transport, tuple(OURS.values()))
            kind = transport.Connection if ours else BoundedConnection
            transport.Connection = partial(kind, answer_timeout_s=self.answer_timeout_s)
        return transport

    def clone(self, **changes: Any) -> Any:
        """Another one to the same brokers, as patient and of the same kind."""
        made = super().clone(**changes)
        made.answer_timeout_s, made.amqp_transport = self.answer_timeout_s, self.amqp_transport
        return made


def bound(connection: Connection, timeout_s: float) -> None:
    """Change how long an open connection waits for each answer."""
    established = getattr(connection, "_connection", None)
    if isinstance(established, BoundedConnection):
        established.answer_timeout_s = timeout_s
