"""The time by the clock of a Redis server.

Everybody who judges how old something on a server is has to use one clock, and the only one that
all of them can read is the server's: the wall clocks of workers may be hours apart.

The time that is returned was right when the server answered. A caller that uses it later notes a
lease that is a little too short, and finds nothing overdue too early.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

logger = logging.getLogger("umbel.broker")

_refusal_logged = False  # once per process: it is asked every few seconds


def server_time(client: Any) -> float:
    """Unix time by the server's clock; by this machine's where the server refuses TIME."""
    global _refusal_logged
    try:
        seconds, microseconds = client.time()
    except ResponseError as exc:
        if not isinstance(exc, NoPermissionError) and "unknown command" not in str(exc):
            raise  # it passes, as when a script keeps the server busy
        if not _refusal_logged:
            _refusal_logged = True
            logger.warning(
                "The Redis server refuses TIME (%s). Leases of messages are judged by this "
                "machine's clock instead, which must agree with the clocks of all other workers. "
                "Allow TIME to the user of the broker.",
                exc,
            )
        return time.time()
    return float(seconds + microseconds / 1_000_000)
