"""Tasks of a play, what has happened to them, and the messages that ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from umbel.wire.tasks import TaskHeader
from umbel.worker.delivery.effects import Delivery
from umbel.worker.delivery.states import ALLOWED, MessageState, State

if TYPE_CHECKING:
    from umbel.sim.deliveries.brokers import Channel

# How a task ends, as far as its message is concerned.
SUCCESS, FAILURE, REJECTED, REQUEUED = "SUCCESS", "FAILURE", "REJECTED", "REQUEUED"


class Kind(NamedTuple):
    """A type of task, which is the policy of its deliveries."""

    name: str
    acks_late: bool
    acks_on_failure: bool = True
    requeue_lost: bool = True
    per_s: float | None = None  # its rate limit

    def keeps_result(self, header: TaskHeader) -> bool:
        """Whether its stored state can be read."""
        return True


KINDS: Final = (
    Kind("early", acks_late=False),
    Kind("late", acks_late=True),
    Kind("late", acks_late=True),
    Kind("strict", acks_late=True, acks_on_failure=False),
    Kind("once", acks_late=True, requeue_lost=False),
    Kind("slow-early", acks_late=False, per_s=4.0),
    Kind("slow-late", acks_late=True, per_s=4.0),
)


class Task:
    """One task, and what has happened to it."""

    __slots__ = (
        "chord",
        "done",
        "ends",
        "eta_s",
        "excuses",
        "expires_s",
        "header",
        "killed",
        "kind",
        "queue",
        "revoked",
        "runs",
        "takes_s",
    )

    def __init__(self, id_: str, kind: Kind, queue: str, takes_s: float, ends: str) -> None:
        self.kind, self.queue, self.takes_s, self.ends = kind, queue, takes_s, ends
        self.eta_s: float | None = None
        self.expires_s: float | None = None
        self.header = TaskHeader(task=kind.name, id=id_, umbel_sent=1)
        self.chord: int | None = None
        self.runs = 0  # how often its code has begun
        self.excuses = 0  # how often docs/guarantees allow that it runs once more
        self.killed = False  # while its code ran
        self.revoked = False
        self.done = ""  # its outcome


class Stored:
    """A message in the broker."""

    __slots__ = ("redelivered", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.redelivered = False


class Letter:
    """A message that was delivered to a worker."""

    __slots__ = ("channel", "copied", "is_last_word", "number", "settled", "stored", "tag")

    def __init__(self, channel: Channel, tag: int, stored: Stored) -> None:
        self.channel, self.tag, self.stored = channel, tag, stored
        self.number = tag  # in the order of delivery
        self.settled = False
        self.copied = False  # a copy of it is in its queue
        self.is_last_word = False  # settled while its worker stops


_STATE: Any = Delivery.state  # type: ignore[misc]
_MESSAGE_STATE: Any = Delivery.message_state  # type: ignore[misc]


class ForbiddenTransition(Exception):
    """A delivery went from one state to another in a way that the table does not have."""


class CheckedDelivery(Delivery):
    """A delivery that knows its task, and whose transitions are looked up in the table."""

    __slots__ = ("task",)

    def __init__(self, letter: Letter) -> None:
        task = letter.stored.task
        _STATE.__set__(self, State.RECEIVED)
        _MESSAGE_STATE.__set__(self, MessageState.OURS)
        super().__init__(task.kind, letter, task.header, redelivered=letter.stored.redelivered)
        self.task = task
        self.eta_s, self.expires_s = task.eta_s, task.expires_s

    def _get_state(self) -> State:
        return _STATE.__get__(self)

    def _set_state(self, after: State) -> None:
        before = _STATE.__get__(self)
        if before is not after and (before, after) not in ALLOWED:
            raise ForbiddenTransition(f"{self.id}: {before.name} to {after.name}")
        _STATE.__set__(self, after)

    def _get_message_state(self) -> MessageState:
        return _MESSAGE_STATE.__get__(self)

    def _set_message_state(self, after: MessageState) -> None:
        before = _MESSAGE_STATE.__get__(self)
        if before is not after and (before, after) not in ALLOWED:
            raise ForbiddenTransition(f"message of {self.id}: {before.name} to {after.name}")
        _MESSAGE_STATE.__set__(self, after)

    state = property(_get_state, _set_state)
    message_state = property(_get_message_state, _set_message_state)
