"""A connection of a fetcher's own: told of changes, and asked for what an earlier one lost."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from umbel.broker.redis.ledger import Arrival, Ledger
from umbel.broker.server_time import server_time

if TYPE_CHECKING:
    from umbel.broker.redis.channel import Channel

logger = logging.getLogger("umbel.broker")

# Silence for so long is the end of the connection, where it has no time-out of its own.
ANSWER_TIMEOUT_S = 10.0
# So many notes are asked for in one command.
CHUNK = 1_000

TOLD = object()  # in the place of an answer: the server tells of a change


class Line:
    """An open connection; raises connection errors of redis-py."""

    def __init__(self, channel: Channel) -> None:
        self.told = True  # of changes, by the server
        for protocol in (3, 2):
            self.pool = channel.own_pool(protocol)
            try:
                self.connection: Any = self.pool.get_connection()
                if protocol == 3:
                    self.connection._parser.set_invalidation_push_handler(lambda _: TOLD)
                    # Not of our own pops.
                    self._ask("CLIENT", "TRACKING", "ON", "NOLOOP")
                break
            except ResponseError as exc:
                self.close()
                if protocol == 2:
                    raise
                logger.warning("the server does not tell of changes: %s", exc)
                self.told = False
            except BaseException:
                self.close()
                raise
        self.timeout_s = float(self.connection.socket_timeout or ANSWER_TIMEOUT_S)

    def fileno(self) -> int:
        """What to watch."""
        return int(self.connection._sock.fileno())

    def send(self, packed: bytes) -> None:
        """Send; the answer is somebody's to read."""
        # No check of its health: that waits for an answer.
        self.connection.send_packed_command([packed], check_health=False)

    def read(self) -> Any:
        """The next answer, or `TOLD`; an error of the server is returned."""
        try:
            return self.connection.read_response(push_request=True)
        except ResponseError as exc:
            return exc

    def readable(self, timeout_s: float = 0) -> bool:
        """Whether there is something to read; waits for it."""
        return bool(self.connection.can_read(timeout=timeout_s))

    def reclaim(self, channel: Channel, ledger: Ledger) -> None:
        """Get what an earlier connection asked for and did not bring."""
        tags = ledger.lost()
        if tags and ledger.fence:
            # A request that is still on its way must not be carried out after this.
            self._try("CLIENT", "KILL", *ledger.fence)
        ledger.fence = _fence(self._try("CLIENT", "INFO"))
        found: list[Arrival] = []
        for start in range(0, len(tags), CHUNK):
            chunk = tags[start : start + CHUNK]
            notes = self._ask("HMGET", channel.key(channel.unacked_key), *chunk)
            for tag, note in zip(chunk, notes, strict=True):
                if note is not None:
                    found.append(channel.arrival(tag, note))
        if found:
            now = server_time(channel.plain)
            scores = [part for arrival in found for part in (now, arrival.tag)]
            self._ask("ZADD", channel.key(channel.unacked_index_key), "XX", *scores)
            logger.warning("%d messages whose delivery was cut off are delivered now", len(found))
        ledger.arrived.extend(found)
        ledger.missing.clear()

    def refresh_credentials(self) -> None:
        """Use a token that was renewed since the connection was made."""
        if getattr(self.connection, "_re_auth_token", None) is not None:
            self.connection.re_auth()

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(Exception):
            self.pool.disconnect()

    def _ask(self, *command: Any) -> Any:
        self.connection.send_command(*command)
        return self.connection.read_response()

    def _try(self, *command: str) -> Any:
        """Ask something that the server may not know or allow."""
        try:
            return self._ask(*command)
        except ResponseError as exc:
            logger.debug("%s: %s", " ".join(command[:2]), exc)
            return None


def _fence(info: Any) -> list[str]:
    """What names a connection on its server, and on no other one."""
    if info is None:
        return []
    text = info.decode() if isinstance(info, bytes) else str(info)
    facts = dict(part.split("=", 1) for part in text.split() if "=" in part)
    if not {"id", "addr", "laddr"} <= facts.keys():
        return []
    return ["ID", facts["id"], "ADDR", facts["addr"], "LADDR", facts["laddr"]]
