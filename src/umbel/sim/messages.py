"""What goes over the simulated broker.

A message is made once and shared by all that receive it: the parts that a receiver would read from
the wire are read by the sender already, by the same code. Nobody changes a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from umbel.sim.nodes import Node

# Events: `cluster.node.Heard`.
BEAT: Final = 0
ONLINE: Final = 1
OFFLINE: Final = 2
ELECT: Final = 3
# Control messages.
REQUEST: Final = 4
REVOKE: Final = 5
PAUSE: Final = 6
HELLO: Final = 7
REPLY: Final = 8
# Answers of the register.
ANSWER: Final = 9

EVENT_TYPES: Final = ("worker-heartbeat", "worker-online", "worker-offline", "worker-elect")
EVENT_LAST: Final = ELECT


class Message:
    """One message; `sender` is None for clients and strangers."""

    __slots__ = ("body", "kind", "sender")

    def __init__(self, kind: int, sender: Node | None, body: Any = None) -> None:
        self.kind, self.sender, self.body = kind, sender, body
