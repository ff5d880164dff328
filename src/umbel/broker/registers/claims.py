"""The words of write-once registers: what is asked, what is answered, and what it is kept under.

Ids and tokens come from anywhere and go into keys, names of queues and texts of errors. So both are
bounded, and written in a few harmless characters: an id that has others, or is long, goes by its
hash; in a token the others are written as in addresses (`%C3%A4`), and read back by who asks.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import quote, unquote

from kombu import Connection
from kombu.exceptions import OperationalError

from umbel.broker.sessions.connections import driver, masked
from umbel.broker.tasks.batches import Parcel
from umbel.broker.tasks.tail import sibling

PREFIX: Final = "umbel.election."
# A day: longer than any message about an election is on its way.
TTL_S: Final = 86_400.0
TTL_MIN_S, TTL_MAX_S = 0.001, 30 * 86_400.0
ID_CHARS_MAX: Final = 1_000
TOKEN_CHARS_MAX: Final = 255
# For each answer of the broker: a claim that is not answered is tried once more, then given up.
ANSWER_S: Final = 5.0

_PLAIN = re.compile(r"[A-Za-z0-9._:@+=-]{1,64}")
_HARMLESS: Final = "@:+=,/"  # and letters, digits and ._-~


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim."""

    won: bool
    # Whose the register is, by its token.
    winner: str
    # The parcel of the winner is where it belongs, for certain; also if it had none.
    sent: bool
    # Why that is not certain. Another claim with the same token and parcel goes on from there.
    reason: str = ""


class Register(Protocol):
    """Registers on one broker. Any thread may ask; connections are the register's own.

    Raises `kombu.exceptions.OperationalError` when the broker does not answer in time or refuses:
    then it is not known whether the claim was made. Claiming again with the same token tells.
    """

    def claim(
        self, election_id: str, token: str, *, ttl_s: float = TTL_S, parcel: Parcel | None = None
    ) -> Claim:
        """Write the token, unless another one is there, and send the parcel if it was written.

        Every claim of a token comes with the same parcel, which is sent once, however often.
        """

    def winner(self, election_id: str) -> str | None:
        """Whose the register is; None when nobody has claimed it. Claims nothing."""

    def close(self) -> None:
        """Let the connections go; never raises."""


def register_name(election_id: str) -> str:
    """Under what the register of an election is kept."""
    if not 0 < len(election_id) <= ID_CHARS_MAX:
        raise ValueError(
            f"the id of an election has 1 to {ID_CHARS_MAX} characters, this one has "
            f"{len(election_id)}: {election_id[:40]!r}"
        )
    if _PLAIN.fullmatch(election_id):
        return PREFIX + election_id
    return hashed_name(election_id)


def hashed_name(election_id: str) -> str:
    """The same, where the id is too long or has characters that make trouble."""
    digest = hashlib.sha256(election_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{PREFIX}~{digest[:32]}"  # no plain id begins so


def written(token: str) -> str:
    """A token as it is kept."""
    if not 0 < len(token) <= TOKEN_CHARS_MAX:
        raise ValueError(
            f"a token has 1 to {TOKEN_CHARS_MAX} characters, this one has {len(token)}: "
            f"{token[:40]!r}"
        )
    return quote(token, safe=_HARMLESS, errors="surrogatepass")


def read(kept: str) -> str:
    """The token of which this is kept."""
    try:
        return unquote(kept, errors="surrogatepass")
    except UnicodeDecodeError:  # it was shortened, or is not ours
        return kept


def milliseconds(ttl_s: float) -> int:
    """The time to live of a register, for brokers."""
    if not TTL_MIN_S <= ttl_s <= TTL_MAX_S:
        raise ValueError(f"a register lives {TTL_MIN_S:g} to {TTL_MAX_S:g} s, not {ttl_s:g}")
    return int(ttl_s * 1000)


def own_connection(connection: Connection) -> Connection:
    """A new, unopened one to the very broker that `connection` goes to; its waits are bounded.

    Agreement is among those who ask the same broker: there is no other one to change to.
    """
    made = sibling(connection)
    made.connect_timeout = made.answer_timeout_s = ANSWER_S
    kind = driver(connection)
    if kind == "redis":
        made.transport_options.update(socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
    elif kind == "amqp":
        made.transport_options.update(write_timeout=ANSWER_S)
    return made


def unanswered(connection: Connection, name: str, exc: BaseException) -> OperationalError:
    """The error for who asked; it names the broker, without passwords."""
    return OperationalError(
        f"the register {name} on {masked(connection.as_uri())} can not be asked: "
        f"{type(exc).__name__}: {exc}"
    )
