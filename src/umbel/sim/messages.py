"""What goes over the simulated broker.

A message is made once and shared by all that receive it: the parts that a receiver would read from
the wire are read by the sender already, by the same code. Nobody changes a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from umbel.cluster import membership

if TYPE_CHECKING:
    from umbel.sim.nodes import Node

# Events: they carry a clock, and a sign of life.
BEAT: Final = 0
ONLINE: Final = 1
OFFLINE: Final = 2
ELECT: Final = 3
# Control messages.
REQUEST: Final = 4
REVOKE: Final = 5
HELLO: Final = 6
REPLY: Final = 7
# Answers of the register.
ANSWER: Final = 8

EVENT_LAST: Final = ELECT


class Message:
    """One message; `sender` is None for clients and strangers."""

    __slots__ = ("body", "clock", "kind", "sender", "sign")

    def __init__(
        self,
        kind: int,
        sender: Node | None,
        clock: Any = 0,
        sign: membership.Heard | membership.Offline | None = None,
        body: Any = None,
    ) -> None:
        self.kind, self.sender, self.clock = kind, sender, clock
        self.sign, self.body = sign, body
