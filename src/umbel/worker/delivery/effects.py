"""What the machine asks of its surroundings, and what it knows of a delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from umbel.worker.delivery.states import MessageState, State

if TYPE_CHECKING:
    from umbel.wire.tasks import TaskHeader

# How a message is settled. After REQUEUE, RETURN and COPIED its task is to run again.
ACK: Final = "ack"
REJECT: Final = "reject"
REQUEUE: Final = "requeue"  # to wherever the broker puts what is rejected with requeue
RETURN: Final = "return"  # to its place in the queue; the newest is returned first
COPIED: Final = "copied"  # acknowledged, as a copy of it is in its queue
FINAL: Final = frozenset({ACK, REJECT})


class Policy(Protocol):
    """What one type of task says about its deliveries."""

    @property
    def name(self) -> str:
        """The name of the task."""

    @property
    def acks_late(self) -> bool:
        """Whether its message is settled when it has ended, not when it begins."""

    @property
    def acks_on_failure(self) -> bool:
        """Whether the message of a failed task is acknowledged, not rejected."""

    @property
    def requeue_lost(self) -> bool:
        """Whether a late-acknowledged task whose process died goes back to its queue."""

    def keeps_result(self, header: TaskHeader) -> bool:
        """Whether the state of such a task can be read from the result backend."""


class Timer(Protocol):
    """Something that will be called."""

    def cancel(self) -> object:
        """Do not call it."""


class Delivery:
    """One message that this worker has taken from the broker.

    `eta_s` and `expires_s` are Unix times. `message` is opaque to the machine, which passes it to
    effects and replaces it when the broker has delivered the same message again.
    """

    __slots__ = (
        "cancelled",
        "era",
        "eta_s",
        "expires_s",
        "header",
        "message",
        "message_state",
        "owed",
        "policy",
        "redelivered",
        "state",
        "timer",
    )

    def __init__(
        self, policy: Policy, message: Any, header: TaskHeader, *, redelivered: bool = False
    ) -> None:
        self.policy = policy
        self.message = message
        self.header = header
        self.redelivered = redelivered
        self.eta_s: float | None = None
        self.expires_s: float | None = None
        self.state = State.RECEIVED
        self.message_state = MessageState.OURS
        self.timer: Timer | None = None  # while it is held
        self.era = 0  # of the prefetch window, while it waits
        self.owed = False  # counted as a debt of the prefetch window
        self.cancelled = False  # ended because its message comes again

    @property
    def id(self) -> str:
        """The id of the task."""
        return self.header.id

    @property
    def settled(self) -> bool:
        """Whether the message was settled, whatever the broker has read of that."""
        return self.message_state in (MessageState.SETTLED, MessageState.IN_DOUBT)


# What the surroundings make of a delivery: theirs, with more attributes.
D = TypeVar("D", bound=Delivery)
D_contra = TypeVar("D_contra", bound=Delivery, contravariant=True)


class Effects(Protocol[D]):
    """What the machine has done. All calls come from, and return to, one thread."""

    def fill_pool(self, ready: Iterator[D]) -> None:
        """Hand deliveries to the pool, as many as it has room for; no more are taken from `ready`.

        When it has room again, `Deliveries.dispatch` is called.
        """

    def recall(self) -> Sequence[D]:
        """Take deliveries that have not begun out of the pool, oldest first."""

    def cancel(self, delivery: D) -> None:
        """End a running task whose message will be delivered again."""

    def settle(self, message: Any, how: str) -> bool:
        """Settle a message; false if its connection turned out to be lost."""

    def adopt(self, message: Any) -> None:
        """Let a message of a lost connection be settled on the present one."""

    def put_back(self, message: Any) -> None:
        """Give a message of a lost connection back to its queue, as the next to be delivered."""

    def return_behind(self, delivery: D) -> None:
        """Give a message back behind the others of its queue, then report `returned`, `copied`
        or `not_returned`."""

    def store_revoked(self, delivery: D, why: str, signum: int | None) -> None:
        """Store REVOKED (`revoked`, `expired` or `terminated`), then report `stored`."""

    def received(self, delivery: D) -> None:
        """Send the event for a delivery that will run, now or later."""

    def read_states(self, ids: Sequence[str], then: Callable[[dict[str, Any]], None]) -> None:
        """Read the stored states of tasks without blocking, and pass on what was found."""

    def states_are_late(self, patience_s: float) -> None:
        """Log that the result backend has not answered in this time."""

    def surplus_returned(self, parked_max: int) -> None:
        """Log, the first time, that more tasks wait for rate limits than may be parked."""

    def already_settled(self, header: TaskHeader, how: str) -> None:
        """Log that a message came again whose task has ended."""

    def adopted(self, delivery: D) -> None:
        """Log that the message of a running task came again."""

    def call_after(self, wait_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Call something later."""

    def drop_timers(self) -> None:
        """Cancel all timers that were set for a lost connection, and those of the machine."""

    # -- single queues; these may ask the broker -----------------------------------------

    def queue_of(self, message: Any) -> str | None:
        """The queue that a message came from, as far as that is known."""

    def origin_of(self, message: Any) -> object:
        """Equal for messages that came from one queue in one way; does not ask the broker."""

    def can_rest(self, queue: str) -> bool:
        """Whether a queue is still there after a while without consumers."""

    def rest(self, queue: str) -> None:
        """Consume a queue no longer, until `resume`."""

    def resume(self, queue: str) -> None:
        """Consume a queue again."""

    def length_of(self, queue: str) -> int | None:
        """How many messages are in a queue; None while messages are on their way back to it."""
