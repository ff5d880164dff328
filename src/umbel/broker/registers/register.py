"""Write-once registers: whoever writes first has decided, and everybody can read who it was.

Elections rest on them. Messages may be lost, doubled and late; of a register there is one, on the
broker that all nodes share. A claim writes a *token*, which names the node that tries, unless there
is one already, and with the first token goes a message, the *parcel*: what the winner is to send.

| broker   | the register is                          | the parcel goes                            |
| -------- | ---------------------------------------- | ------------------------------------------ |
| Redis    | a key that expires                       | in the script that writes the key          |
| RabbitMQ | a durable queue that expires, whose      | right after, in a transaction with a mark  |
|          | arguments hold the token                 |                                            |
| memory   | an entry of a dictionary                 | while its lock is held                     |
| others   | there is none: no elections              |                                            |

What holds on each of them, whatever happens to connections and processes:

- One token per id, until the register expires. Everybody who asks is told the same one.
- A claim may be repeated with its token, and has to be when its answer was lost: it is told that it
  has won, if it had, and the parcel is there once.
- A claim that has won without being sure of its parcel says so (`Claim.sent`), and repeating it
  goes on from there. On RabbitMQ a winner may die between claim and commit: then there is a winner
  and no message. On Redis and in memory there is no such moment.

A register that is lost with the data of its broker (failover to a replica that was behind, a
flushed database, a deleted queue) can be won again. So can one that has expired: it lives far
longer than elections last, from the claim that won, on RabbitMQ from the winner's last claim.

Modules: `claims` (the words), `registers_redis`, `registers_amqp` with `refusals`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from kombu import Connection, Producer

from umbel.broker.registers.amqp import AmqpRegister
from umbel.broker.registers.claims import (
    TTL_S,
    Claim,
    Register,
    milliseconds,
    own_connection,
    register_name,
    written,
)
from umbel.broker.registers.redis import RedisRegister
from umbel.broker.sessions.connections import driver, hang_up
from umbel.broker.tasks.batches import Parcel, publish_one

__all__ = ["Claim", "MemoryRegister", "Register", "has_registers", "register_for"]

# Of one process; when there are more the oldest is forgotten.
ENTRIES_MAX: Final = 10_000


def register_for(connection: Connection) -> Register | None:
    """Registers on the broker that `connection` goes to, which is only looked at.

    None where there are none. Nothing is opened before the first claim.
    """
    if not has_registers(connection):
        return None
    kind = driver(connection)
    if kind == "redis":
        return RedisRegister(connection)
    return AmqpRegister(connection) if kind == "amqp" else MemoryRegister(connection)


def has_registers(connection: Connection) -> bool:
    """Whether there are registers on the kind of broker that `connection` goes to."""
    kind = driver(connection)
    if kind == "amqp":
        return bool(connection.transport.driver_name == "py-amqp")
    return kind in ("redis", "memory")


class _Entries:
    """What the registers of one state of the memory transport hold."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[str, tuple[str, float]] = {}  # token, when it ends

    def find(self, name: str, now: float) -> str | None:
        token, ends_at = self.held.get(name, ("", now))
        return token if ends_at > now else None

    def put(self, name: str, token: str, now: float, ends_at: float) -> None:
        if len(self.held) >= ENTRIES_MAX:
            self.held = {name: one for name, one in self.held.items() if one[1] > now}
        while len(self.held) >= ENTRIES_MAX:
            del self.held[next(iter(self.held))]
        self.held.pop(name, None)  # the newest is the last
        self.held[name] = (token, ends_at)


_entries: weakref.WeakKeyDictionary[Any, _Entries] = weakref.WeakKeyDictionary()
_finding = threading.Lock()


class MemoryRegister:
    """See `claims.Register`: for workers that share a process."""

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = own_connection(connection)
        self._clock = clock
        with _finding:
            self._entries = _entries.setdefault(connection.transport.state, _Entries())

    def claim(
        self, election_id: str, token: str, *, ttl_s: float = TTL_S, parcel: Parcel | None = None
    ) -> Claim:
        """See `claims.Register`; what the parcel's exchange raises leaves nothing claimed."""
        name, ends_s = register_name(election_id), milliseconds(ttl_s) / 1000
        written(token)  # is checked as it is elsewhere
        with self._entries.lock:
            now = self._clock()
            winner = self._entries.find(name, now)
            if winner is None:
                if parcel is not None:
                    channel = self._connection.default_channel
                    publish_one(Producer(channel, auto_declare=False), parcel)
                self._entries.put(name, token, now, now + ends_s)
                winner = token
        return Claim(winner == token, winner, sent=winner == token)

    def winner(self, election_id: str) -> str | None:
        """See `claims.Register`."""
        with self._entries.lock:
            return self._entries.find(register_name(election_id), self._clock())

    def close(self) -> None:
        """See `claims.Register`."""
        hang_up(self._connection)
