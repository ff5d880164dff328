"""Keeping messages that a worker holds from being delivered to another one.

On Redis a message that is not acknowledged within the visibility time-out is taken for lost and
given to somebody else, even if it merely waits for its eta or still runs. The lease of a message
is its score in the index of unacknowledged ones; renewing it sets the score to now by the server's
clock, for members that are still there. Other brokers tie a message to its connection and need
nothing.

For the same reason the end of a connection ends no lease there: what arrived on an old channel is
settled, or put back, on a new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from kombu.transport import virtual

from umbel.broker.server_time import server_time

# So many are renewed in one command.
CHUNK = 1_000


def lease_s(channel: Any) -> float | None:
    """After how long this channel's broker takes a silent message for lost; None: never."""
    if getattr(channel, "unacked_index_key", None) is None:
        return None
    return float(channel.visibility_timeout)


def renew(channel: Any, tags: Iterable[str]) -> int:
    """Renew the leases of these deliveries; how many commands that took."""
    rest, commands = iter(tags), 0
    while chunk := list(islice(rest, CHUNK)):
        with channel.conn_or_acquire() as client:
            now = server_time(client)
            client.zadd(channel.unacked_index_key, dict.fromkeys(chunk, now), xx=True)
        commands += 1
    return commands


def disown(channel: Any) -> None:
    """Let a channel that is lost put nothing back, neither when it closes nor when it is freed."""
    if channel is not None and lease_s(channel) is not None:
        channel.qos._delivered.clear()
        channel.qos._dirty.clear()
        if hasattr(channel, "abandon"):
            channel.abandon()


def adopt(channel: Any, message: Any) -> None:
    """Let a message of a lost channel be settled on this one."""
    message.channel = channel
    virtual.QoS.append(channel.qos, message, message.delivery_tag)


def put_back(channel: Any, message: Any) -> None:
    """Give a message of a lost channel back to its queue, as the next to be delivered."""
    give = getattr(channel.qos, "put_back", None)
    if give is not None:
        give(message)
    else:
        channel.qos.restore_by_tag(message.delivery_tag)
