"""Messages that come again after a lost connection, and whether their tasks run again.

Where messages belong to a connection, as on RabbitMQ, the broker delivers what was not settled
again when the connection is gone, marked as redelivered. Such a message is recognised by its `Key`:

| what this worker knows of its task        | the message                                         |
| ----------------------------------------- | --------------------------------------------------- |
| it runs, and is acknowledged late         | is *adopted*: settled when the task ends            |
| it runs, and was acknowledged early       | is acknowledged: the acknowledgement was lost       |
| it has ended since, or just before        | is settled in the same way as before, and not run   |
| it was put back, or cancelled             | runs                                                |
| nothing                                   | runs                                                |

Acknowledgements that were written just before a connection is lost may not have been read, so the
last `RECENT_MAX` of them are kept (`recent`); those of the last `RECENT_S` count. What was settled
is remembered for `REMEMBERED_S` after the loss. Only messages that are marked as redelivered are
looked up: two messages with one id which a client has sent both run.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple

from umbel.worker.delivery.effects import ACK, FINAL, D

if TYPE_CHECKING:
    from umbel.wire.tasks import TaskHeader

RECENT_MAX: Final = 1024
RECENT_S: Final = 120.0
SETTLED_MAX: Final = 10_000
REMEMBERED_S: Final = 3600.0


class Key(NamedTuple):
    """What a message is recognised by; a retry, or a replacement, of the same id is another one.

    So is one that was sent at another moment, where the sender says when.
    """

    id: str
    task: str
    retries: int | None
    nesting: int | None
    eta: str | None
    clock: int | None
    sent_ms: int | None

    @classmethod
    def of(cls, header: TaskHeader) -> Key:
        """The key of a message with this header."""
        return cls(
            header.id,
            header.task,
            header.retries,
            header.replaced_task_nesting,
            header.eta,
            _number(header.umbel_clock),
            _number(header.umbel_sent),
        )


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


class Settled(NamedTuple):
    """How a message was settled that may come again, and until when that is remembered."""

    how: str
    until: float


class Redeliveries(Generic[D]):
    """What one worker knows of messages that may come again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[Key, D] = {}  # whose messages come again
        self._settled: OrderedDict[Key, Settled] = OrderedDict()
        self.adopted: set[int] = set()  # deliveries, by their identity
        # Settled on this connection: how, and when. Kept only where messages belong to it.
        self.recent: deque[tuple[str, TaskHeader, float]] | None = None

    def recognise(self, header: TaskHeader) -> D | Settled | None:
        """The running task of a message that came again, or how it was settled; once."""
        key = Key.of(header)
        settled, delivery = self._settled.pop(key, None), self._running.pop(key, None)
        if delivery is not None and not delivery.settled:
            return delivery
        return None if settled is None or settled.until < self._clock() else settled

    def expect(self, delivery: D) -> None:
        """The message of a running task comes again."""
        self._running[Key.of(delivery.header)] = delivery
        if delivery.settled:  # early, and the broker may not have heard of it
            self.remember(delivery.header, ACK)

    def remember(self, header: TaskHeader, how: str) -> None:
        """A message was settled, and the broker may not know: if it comes again, it is not run.

        Unless it was put back.
        """
        key = Key.of(header)
        if how not in FINAL:
            self._running.pop(key, None)
            self._settled.pop(key, None)
            return
        self._settled[key] = Settled(how, self._clock() + REMEMBERED_S)
        self._settled.move_to_end(key)
        while len(self._settled) > SETTLED_MAX:
            self._settled.popitem(last=False)

    def note(self, header: TaskHeader, how: str) -> None:
        """A message was settled on this connection, which may be lost before that is read."""
        if self.recent is not None and how in FINAL:
            self.recent.append((how, header, self._clock()))

    def ended(self, delivery: D) -> None:
        """A task has ended whose message was to come again, or has."""
        self.adopted.discard(id(delivery))
        key = Key.of(delivery.header)
        if self._running.get(key) is delivery:
            del self._running[key]

    def connection_lost(self, *, tied: bool) -> None:
        """Nothing is adopted any more, and what was written last may not have been read."""
        self.adopted.clear()
        if tied:
            since = self._clock() - RECENT_S
            for how, header, when in self.recent or ():
                if when >= since:
                    self.remember(header, how)
            self.recent = None

    def connection_back(self, *, tied: bool) -> None:
        """There is a new connection."""
        if tied:
            self.recent = deque(maxlen=RECENT_MAX)
