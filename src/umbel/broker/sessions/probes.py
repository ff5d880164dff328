"""Asking an AMQP broker whether it hears us.

Heartbeats tell each side that the other one speaks, not that it listens: a client whose words get
lost on the way goes on receiving heartbeats. A probe is a request that changes nothing and has to
be answered, "let messages flow" on a channel where they do. Nobody waits for the answer; it is
noted when it comes.

A broker that is short of memory or disk stops listening to those who publish, and says so: then
no answer means nothing.
"""

from __future__ import annotations

from typing import Any

from amqp import spec


def probe_for(connection: Any, channel: Any) -> Probe | None:
    """A probe where the broker speaks AMQP."""
    if connection.transport.driver_name != "py-amqp":
        return None
    return Probe(connection.connection, channel)


class Probe:
    """One question at a time on one channel; raises connection errors of py-amqp."""

    def __init__(self, established: Any, channel: Any) -> None:
        self._channel = channel
        self.open = False  # asked and not answered
        self.blocked = False
        channel._callbacks[spec.Channel.FlowOk] = self._on_answer
        self._blocked, self._unblocked = established.on_blocked, established.on_unblocked
        established.on_blocked = self._on_blocked
        established.on_unblocked = self._on_unblocked

    def ask(self) -> None:
        """Ask; `open` is false again when the answer was read."""
        self.open = True
        self._channel.send_method(spec.Channel.Flow, "b", (True,))

    def _on_answer(self, _active: bool) -> None:
        self.open = False

    def _on_blocked(self, reason: str) -> None:
        self.blocked = True
        if self._blocked is not None:
            self._blocked(reason)

    def _on_unblocked(self) -> None:
        self.blocked = self.open = False  # it may have stopped listening before the question
        if self._unblocked is not None:
            self._unblocked()
