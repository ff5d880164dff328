"""Asking one Redis server for messages, on a connection of its own, without waiting for it.

`turn` is called whenever a loop is about to wait: it sends what is to be sent. `on_readable` is
called when something has come: it reads answers and delivers. Requests are answered in the order
in which they are sent; at most one of them asks for messages at a time.

| request | when                                                             | answers |
| ------- | ---------------------------------------------------------------- | ------- |
| POP     | there is room in the window, and maybe something to take         | 1       |
| ACK     | acknowledgements have waited for long enough, and nothing is popped | 2    |
| WAIT    | nothing is there, and the server can not tell of changes (BRPOP) | 1       |

A little room is not asked for at once: small batches cost as much as large ones. It waits until
there is more (`Channel.batch_min`), or for as long as an acknowledgement does.

Connection errors are raised to the loop, whose consumer is built anew with the same ledger.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as Overdue

from umbel.broker.redis.ledger import Arrival, Asked, Ledger, Return
from umbel.broker.redis.line import TOLD, Line
from umbel.broker.redis.messages import ListMessage
from umbel.broker.redis.requests import Requests
from umbel.broker.tasks.messages import Unreadable

if TYPE_CHECKING:
    from umbel.broker.redis.channel import Channel

logger = logging.getLogger("umbel.broker")

# So many messages at most come in one answer. While the server takes them it serves nobody else,
# the tasks that use it among them: more is less work for both sides, and longer waits for others.
BATCH_MAX = 32
# So many where the consumer has set no window.
BATCH_UNBOUNDED = 64
# So many acknowledgements are sent together, and they wait for so long at most.
ACKS_MAX, ACKS_WAIT_S = 1_000, 0.05
# Looked at all the same, should a word of the server get lost.
LOOK_AGAIN_S = 1.0
GOODBYE_S = 2.0
# Errors that pass: nothing was taken, and nothing is better elsewhere.
PASSING = ("OOM", "MISCONF", "BUSY", "TRYAGAIN", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN")


class Fetcher:
    """Takes messages for one channel."""

    def __init__(self, channel: Channel, ledger: Ledger) -> None:
        self._channel = channel
        self._ledger = ledger
        self._line: Line | None = None
        self._quiet_until = 0.0
        self._owing_since: float | None = None  # room, or acknowledgements
        self._begin = 0
        self._names: list[str] = []  # of queues
        self._requests: Requests | None = None  # about them, when prepared
        self.delivering = False  # a message is being handed over right now: `turn` comes soon
        self._homeless: list[Arrival] = []
        self._complained = False
        self.delivered_count = 0
        self.at_once = False  # acknowledgements are sent as they are made
        self.wake_later: Callable[[], None] | None = None  # has the loop turn in a moment

    # -- what the channel tells ----------------------------------------------------------------

    def set_queues(self, queues: Iterable[str]) -> None:
        """Take from these queues from now on."""
        self._names = list(queues)
        if self._channel.queue_order_strategy == "sorted":
            self._names.sort()
        self._requests, self._begin, self._quiet_until = None, 0, 0.0

    def ack(self, tag: str) -> None:
        """The note of this message goes with the next request, or soon."""
        ledger = self._ledger
        ledger.acks.append(tag)
        if self.at_once:
            if ledger.asked and ledger.asked[-1].kind == "WAIT":
                self.flush()
            elif self._line is not None:
                self._send_acks(self._line, time.monotonic())
        elif self._owing_since is None:
            self._owe()

    # -- what the loop tells -------------------------------------------------------------------

    def fileno(self) -> int | None:
        """What to watch; None before the first turn."""
        return None if self._line is None else self._line.fileno()

    @property
    def pool(self) -> Any:
        """The pool of its connection; None while there is none."""
        return None if self._line is None else self._line.pool

    @property
    def is_told(self) -> bool:
        """Whether the server tells of changes."""
        return self._line is not None and self._line.told

    def patience_s(self, now: float) -> float:
        """How long a loop may wait before it calls `turn` again."""
        if self._owing_since is not None:
            return max(0.0, self._owing_since + ACKS_WAIT_S - now)
        return LOOK_AGAIN_S

    def turn(self, now: float) -> None:
        """Deliver what is left over, and send what is due."""
        ledger = self._ledger
        if ledger.arrived:
            self._deliver()
        line = self._line
        if line is None:
            if not self._names:
                return
            line = self._connect()
            if ledger.arrived:
                self._deliver()
        if ledger.asked:
            self._check_overdue(line, now)
        if not self._asking:
            self._send(line, now)
        elif ledger.acks and ledger.asked[-1].kind == "WAIT":
            self._flush_if_due(now)

    def on_readable(self) -> None:
        """Read what has come, and deliver it."""
        line = self._line
        if line is None:
            return
        while True:
            answer = line.read()
            if isinstance(answer, ReadOnlyError):
                raise answer
            if answer is TOLD:
                self._quiet_until = 0.0
            else:
                self._on_answer(line, answer)
            if self._line is not line or not line.readable():
                break
        self._deliver()
        if self._line is line and not self._asking:
            # Nobody may look for a while, and there may be acknowledgements to send.
            self._send(line, time.monotonic(), ahead=self._channel.qos.prefetch_count > 0)

    def flush(self) -> None:
        """Have every acknowledgement on the server when this returns."""
        acks = self._ledger.acks
        while acks:
            chunk = acks[:ACKS_MAX]
            self._channel.forget(chunk)
            del acks[: len(chunk)]
        self._owing_since = None

    def _flush_if_due(self, now: float) -> None:
        if self._owing_since is not None and now - self._owing_since >= ACKS_WAIT_S:
            self.flush()

    # -- the end -------------------------------------------------------------------------------

    def finish(self) -> list[Arrival]:
        """Read what is still to come; everything that was taken and never delivered."""
        ledger, line = self._ledger, self._line
        deadline = time.monotonic() + GOODBYE_S
        while ledger.asked and line is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not line.readable(left_s):
                raise Overdue("no answer to the last request")
            answer = line.read()
            if answer is not TOLD:
                self._on_answer(line, answer, last=True)
        left = list(ledger.arrived)
        ledger.arrived.clear()
        return left

    def close(self) -> None:
        """Let the connection go; what it owes stays in the ledger."""
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def refresh_credentials(self) -> None:
        """Use a token that was renewed since the connection was made."""
        if self._line is not None and not self._ledger.asked:
            self._line.refresh_credentials()

    # -- asking --------------------------------------------------------------------------------

    def _connect(self) -> Line:
        line = Line(self._channel)
        try:
            line.reclaim(self._channel, self._ledger)
        except BaseException:
            line.close()
            raise
        self._line = line
        return line

    def _prepared(self) -> Requests:
        if self._requests is None:
            self._requests = Requests(self._channel, self._names)
        return self._requests

    @property
    def _asking(self) -> bool:
        return any(asked.count for asked in self._ledger.asked)

    def _room(self) -> int:
        qos = self._channel.qos
        if not self._names:
            return 0
        coming = self._ledger.pending
        if not qos.prefetch_count:
            return BATCH_UNBOUNDED - coming
        return min(int(qos.prefetch_count) - len(qos._delivered) - coming, BATCH_MAX)

    def _send(self, line: Line, now: float, *, ahead: bool = True) -> None:
        """Ask for messages, or at least get rid of acknowledgements."""
        ledger = self._ledger
        room = self._room()
        owing = self._owing_since
        due = owing is not None and now - owing >= ACKS_WAIT_S
        if ahead and room > 0 and now >= self._quiet_until:
            if due or room >= self._channel.batch_min:
                self._send_pop(line, room, now)
                return
            if owing is None:
                self._owe()
        if ledger.acks and (due or len(ledger.acks) >= ACKS_MAX):
            self._send_acks(line, now)
        elif due and not ledger.acks:
            self._owing_since = None
        if not line.told and room > 0 and ahead and not ledger.asked:
            self._send_wait(line, now)

    def _owe(self) -> None:
        self._owing_since = time.monotonic()
        if self.wake_later is not None:
            self.wake_later()

    def _send_pop(self, line: Line, count: int, now: float) -> None:
        ledger, requests = self._ledger, self._prepared()
        asked = Asked("POP", now, ledger.reserve(count), count, self._due_acks(now), requests)
        ledger.asked.append(asked)
        line.send(requests.pop(asked, ledger.prefix, self._begin))

    def _send_acks(self, line: Line, now: float) -> None:
        acks = self._due_acks(now)
        self._ledger.asked.append(Asked("ACK", now, acks=acks, answers_left=2))
        line.send(self._prepared().acknowledge(acks))

    def _due_acks(self, now: float) -> list[str]:
        waiting = self._ledger.acks
        acks = waiting[:ACKS_MAX]
        del waiting[: len(acks)]
        self._owing_since = now if waiting else None
        return acks

    def _send_wait(self, line: Line, now: float) -> None:
        ledger, requests = self._ledger, self._prepared()
        number = ledger.reserve(1)
        ledger.asked.append(Asked("WAIT", now + LOOK_AGAIN_S, number, 1, requests=requests))
        line.send(requests.wait(self._begin, LOOK_AGAIN_S))
        self._begin = requests.next_after(self._begin)

    def _check_overdue(self, line: Line, now: float) -> None:
        if now - self._ledger.asked[0].at < line.timeout_s:
            return
        if not line.readable():
            raise Overdue(f"no answer within {line.timeout_s:g} s")
        self.on_readable()  # it has come: it was we who did not look

    # -- answers -------------------------------------------------------------------------------

    def _on_answer(self, line: Line, answer: Any, *, last: bool = False) -> None:
        ledger = self._ledger
        asked = ledger.asked[0]
        asked.answers_left -= 1
        if asked.answers_left:
            return
        ledger.asked.popleft()
        if asked.kind == "ACK":
            if isinstance(answer, ResponseError):
                self._refused(asked, answer)
        elif isinstance(answer, NoScriptError):
            requests = self._requests
            if last or requests is None or asked.requests is not requests:
                ledger.acks[:0] = asked.acks  # the rest is not asked for any more
                return
            asked.answers_left, asked.at = 1, time.monotonic()
            ledger.asked.append(asked)
            line.send(requests.pop(asked, ledger.prefix, self._begin, in_full=True))
        elif isinstance(answer, ResponseError):
            self._refused(asked, answer)
        elif asked.kind == "WAIT":
            self._quiet_until = 0.0
            if answer is not None:
                self._on_popped_alone(asked, answer)
        else:
            self._complained = False
            self._on_popped(asked, answer)

    def _on_popped(self, asked: Asked, answer: list[Any]) -> None:
        ledger = self._ledger
        tag_of, number, arrived = ledger.tag, asked.first, ledger.arrived
        lists = asked.requests.lists
        same = asked.requests is self._requests
        if same:
            self._begin = answer[0]
        for at in range(1, len(answer), 2):
            queue, key = lists[answer[at]]
            for raw in answer[at + 1]:
                arrived.append(Arrival(tag_of(number), queue, key, raw))
                number += 1
        if same and number - asked.first < asked.count:
            # All lists are empty, and we will be told.
            self._quiet_until = time.monotonic() + LOOK_AGAIN_S

    def _on_popped_alone(self, asked: Asked, answer: list[bytes]) -> None:
        """By BRPOP, which notes nothing: for a moment only we have it."""
        key, raw = answer[0].decode(), answer[1]
        queue = next(queue for queue, known in asked.requests.lists if known == key)
        arrival = Arrival(self._ledger.tag(asked.first), queue, key, raw)
        rest = f',"",{json.dumps(queue)}]'.encode()
        self._channel.note(arrival.tag, b"[" + raw + rest)
        self._ledger.arrived.append(arrival)

    def _refused(self, asked: Asked, exc: ResponseError) -> None:
        self._ledger.acks[:0] = asked.acks
        code = getattr(exc, "status_code", None) or str(exc).split(" ", 1)[0]
        if code not in PASSING:
            raise exc
        self._quiet_until = time.monotonic() + LOOK_AGAIN_S
        if not self._complained:
            self._complained = True
            logger.error("the server lets nobody take messages now: %s", exc)

    # -- delivering ----------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Hand over what has arrived; what a callback raises leaves the rest for the next turn."""
        if self.delivering:
            return
        self.delivering = True
        channel, ledger = self._channel, self._ledger
        arrived, consumers, delivered = ledger.arrived, channel.consumers, channel.qos._delivered
        window = channel.qos.prefetch_count
        # When so few are left it is time to ask for more.
        low = window - max(1, channel.batch_min) if window else -1
        asks = self._line is not None and not self._asking
        try:
            while arrived:
                arrival = arrived.popleft()
                consumer = consumers.get(arrival.queue)
                if consumer is None:
                    self._homeless.append(arrival)
                    continue
                self._hand_over(arrival, *consumer)
                if asks and len(delivered) + len(arrived) <= low and self._line is not None:
                    if not self._asking:  # a callback may have taken a turn
                        self._send(self._line, time.monotonic())  # before the rest is run
                    asks = not self._asking
        finally:
            self.delivering = False
        if self._homeless:
            homeless, self._homeless = self._homeless, []
            ledger.returns[:0] = untouched(homeless)  # before what is older

    def _hand_over(self, arrival: Arrival, callback: Any, no_ack: bool) -> None:
        channel, tag = self._channel, arrival.tag
        try:
            message = ListMessage(arrival.raw, tag, arrival.queue, arrival.key, channel)
        except Unreadable as exc:
            logger.error("a message from the broker could not be read and was dropped: %s", exc)
            self.ack(tag)
            return
        if no_ack:
            self.ack(tag)
        else:
            channel.qos._delivered[tag] = message
        self.delivered_count += 1
        (channel.receiver or callback)(message)


def untouched(arrivals: list[Arrival]) -> list[Return]:
    """The way back of messages that nobody has seen: as they came, newest first."""
    return [Return(one.tag, one.key, "RPUSH", one.raw) for one in reversed(arrivals)]
