"""What goes into an election and what comes out, and how it is read from outside.

`umbel.cluster.election` is the machine.
Everybody who can reach the broker can publish a `worker-elect` and ask for an election. So
`read_elect` and `read_request` never raise: they give what is well formed, or the reason why not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from umbel.cluster.clock import is_clock

# The queue that is a register on RabbitMQ has the id in its name, of at most 255 bytes.
ID_BYTES_MAX: Final = 200
NAME_BYTES_MAX: Final = 1_000
_NUMBER_MAX: Final = 2**53

# Before the token of a refusal: of a long token RabbitMQ tells losers the beginning.
REFUSING: Final = "refused:"

CELERY_CVER: Final = 1
OWN_CVER: Final = 2

# Why something was refused, or what was dropped: the keys of `Elections.counts`.
NOT_AN_ELECTION: Final = "not-an-election"
BAD_ID: Final = "bad-id"
BAD_TOPIC: Final = "bad-topic"
BAD_ACTION: Final = "bad-action"
BAD_CLOCK: Final = "bad-clock"
BAD_SENDER: Final = "bad-sender"
BAD_CVER: Final = "bad-cver"
TOO_BIG: Final = "too-big"
TOO_MANY: Final = "too-many"
REPEATED: Final = "repeated"  # requests whose id is decided
LATE: Final = "late"  # candidates whose id is decided
CROWDED_OUT: Final = "crowded-out"  # candidates
FORGOTTEN: Final = "forgotten"  # tombstones that had to make room
CLAIM_FAILED: Final = "claim-failed"
GIVEN_UP: Final = "given-up"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One life of one node; `inc` is 0 where it tells none."""

    hostname: str
    pid: int
    inc: int = 0


# -- what goes in ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requested:
    """Somebody wants an election held; see `read_request`."""

    id: str
    topic: str
    action: Any
    objection: str | None = None  # why this node could not carry it out


@dataclass(frozen=True, slots=True)
class Heard:
    """A `worker-elect`, our own included; see `read_elect`."""

    id: str
    topic: str
    action: Any
    clock: int
    hostname: str
    pid: int
    inc: int = 0
    cver: int = OWN_CVER
    stands: bool = True  # it may be there to spare Celery's workers only; see `cluster.node`
    objection: str | None = None  # why this node could not carry it out


@dataclass(frozen=True, slots=True)
class Claimed:
    """The register has answered; `winner` is the token it holds.

    Without a winner this node has given up, for `reason`; `owns` if the register is its own.
    """

    id: str
    won: bool
    winner: str | None = None
    reason: str = field(default="", compare=False)
    owns: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """The register was not reached, or has not answered: nobody knows whether it has heard us."""

    id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A node is lost or has left: nobody waits for it."""

    hostname: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; wanted at `due_at`, or some times a second."""


Input = Requested | Heard | Claimed | ClaimFailed | Gone | Tick


# -- what comes out ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublishElect:
    """Publish our `worker-elect` now, before anything slow, and tell it back as `Heard`.

    With a clock to spare Celery's workers it has that clock, does not stand, and is not told back.
    """

    id: str
    topic: str
    action: Any
    spares_at: int | None = None


@dataclass(frozen=True, slots=True)
class PublishAck:
    """Publish a `worker-elect-ack`: a Celery worker counts them."""

    id: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Put `token` into the register of this id, if it is empty, and tell what it holds then."""

    id: str
    topic: str
    action: Any
    token: str


@dataclass(frozen=True, slots=True)
class Act:
    """We have won: carry it out, where the claim has not done that already."""

    id: str
    topic: str
    action: Any


@dataclass(frozen=True, slots=True)
class Decided:
    """The winner is known: a token, or the origin of a Celery worker; `node_of` names its node."""

    id: str
    winner: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """Something was not taken; it is counted."""

    reason: str


Effect = PublishElect | PublishAck | Claim | Act | Decided | Refused


# -- from outside ------------------------------------------------------------------------------


def read_elect(event: Any) -> Heard | str:
    """A `worker-elect` as it came from the broker, or the reason for which it is none."""
    if not isinstance(event, Mapping):
        return NOT_AN_ELECTION
    request = read_request(event)
    if isinstance(request, str):
        return request
    clock: Any = event.get("clock")
    hostname: Any = event.get("hostname")
    pid: Any = event.get("pid")
    inc: Any = event.get("inc", 0)
    cver: Any = event.get("cver")
    if not is_clock(clock):
        return BAD_CLOCK
    if not _is_text(hostname, NAME_BYTES_MAX) or not _is_number(pid) or not _is_number(inc):
        return BAD_SENDER
    if not _is_number(cver) or cver < CELERY_CVER:
        return BAD_CVER
    stands = event.get("stands") is not False
    return Heard(request.id, request.topic, request.action, clock, hostname, pid, inc, cver, stands)


def read_request(arguments: Any) -> Requested | str:
    """The arguments of the control command `election`, or the reason for which they are none."""
    if not isinstance(arguments, Mapping):
        return NOT_AN_ELECTION
    election_id: Any = arguments.get("id")
    topic: Any = arguments.get("topic")
    if not is_word(election_id):
        return BAD_ID
    if not is_word(topic):
        return BAD_TOPIC
    if "action" not in arguments:
        return BAD_ACTION
    return Requested(election_id, topic, arguments["action"])


def is_word(value: Any) -> bool:
    """Whether something can be the id or the topic of an election."""
    return _is_text(value, ID_BYTES_MAX)


def refusing(token: str) -> str:
    """The token with which a node claims that nobody holds an election."""
    return REFUSING + token


def is_refusal(winner: str) -> bool:
    """Whether the register says that nobody holds the election."""
    return winner.startswith(REFUSING)


def node_of(winner: str) -> str:
    """The name of the node that a winner is."""
    parts = winner.removeprefix(REFUSING).rsplit("/", 3)
    return parts[0] if len(parts) == 4 else winner.rpartition(".")[0]


def _is_text(value: Any, bytes_max: int) -> bool:
    if type(value) is not str or not 0 < len(value) <= bytes_max:
        return False
    try:
        return len(value.encode()) <= bytes_max
    except UnicodeEncodeError:
        return False  # half of a surrogate pair: it has no form on the wire


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _NUMBER_MAX
