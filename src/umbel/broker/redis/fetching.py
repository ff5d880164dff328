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

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from hashlib import sha1
from typing import TYPE_CHECKING, Any

from redis.exceptions import (
    NoScriptError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import (
    TimeoutError as Overdue,
)

from umbel.broker.messages import Unreadable
from umbel.broker.redis.ledger import Arrival, Asked, Ledger, Return
from umbel.broker.redis.messages import ListMessage
from umbel.broker.redis.scripts import POP

if TYPE_CHECKING:
    from umbel.broker.redis.channel import Channel

logger = logging.getLogger("umbel.broker")

# So many messages at most come in one answer.
BATCH_MAX = 256
# So many where the consumer has set no window.
BATCH_UNBOUNDED = 64
# So many acknowledgements are sent together, and they wait for so long at most.
ACKS_MAX, ACKS_WAIT_S = 1_000, 0.05
# Looked at all the same, should a word of the server get lost.
LOOK_AGAIN_S = 1.0
# Silence for so long is the end of the connection, where it has no time-out of its own.
ANSWER_TIMEOUT_S = 10.0
GOODBYE_S = 2.0
# Errors that pass: nothing was taken, and nothing is better elsewhere.
PASSING = ("OOM", "MISCONF", "BUSY", "TRYAGAIN", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN")

_POP_SHA = sha1(POP.encode(), usedforsecurity=False).hexdigest().encode()
_TOLD = object()  # in the place of an answer: the server tells of a change


class Fetcher:
    """Takes messages for one channel."""

    def __init__(self, channel: Channel, ledger: Ledger) -> None:
        self._channel = channel
        self._ledger = ledger
        self._pool: Any = None
        self._connection: Any = None
        self._timeout_s = ANSWER_TIMEOUT_S
        self._told = True  # of changes, by the server
        self._quiet_until = 0.0
        self._owing_since: float | None = None  # room, or acknowledgements
        self._begin = 0
        self._head: tuple[int, bytes, bytes] = (0, b"", b"")  # of a POP: arguments, by sha, in full
        self._names: list[str] = []  # of queues
        self._keys: list[tuple[str, str]] = []  # queue and key of each list, when prepared
        self._delivering = False
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
        self._keys, self._begin, self._quiet_until = [], 0, 0.0

    def _prepare(self) -> None:
        """What is the same in every request."""
        channel, names = self._channel, self._names
        steps = channel.priority_steps
        self._keys = [(q, channel.list_key(q, step)) for step in steps for q in names]
        keys = [channel.key(channel.unacked_key), channel.key(channel.unacked_index_key)]
        keys += [key for _, key in self._keys]
        rest = [f',"",{json.dumps(name)}]' for name in names]
        fixed = [str(len(keys)), *keys, str(len(names)), *rest]
        tail = b"".join(map(_bulk, (part.encode() for part in fixed)))
        sha = _bulk(b"EVALSHA") + _bulk(_POP_SHA) + tail
        source = _bulk(b"EVAL") + _bulk(POP.encode()) + tail
        self._head = (2 + len(fixed), sha, source)

    def ack(self, tag: str) -> None:
        """The note of this message goes with the next request, or soon."""
        ledger = self._ledger
        ledger.acks.append(tag)
        if self.at_once:
            if ledger.asked and ledger.asked[-1].kind == "WAIT":
                self.flush()
            elif self._connection is not None:
                self._send_acks(time.monotonic())
        elif self._owing_since is None:
            self._owe()

    @property
    def delivering(self) -> bool:
        """Whether a message is being handed over right now: `turn` comes soon."""
        return self._delivering

    # -- what the loop tells -------------------------------------------------------------------

    def fileno(self) -> int | None:
        """What to watch; None before the first turn."""
        connection = self._connection
        return None if connection is None else int(connection._sock.fileno())

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
        if self._connection is None:
            if not self._names:
                return
            self._connect()
            if ledger.arrived:
                self._deliver()
        if ledger.asked:
            self._check_overdue(now)
        if not self._asking:
            self._send(now)
        elif ledger.acks and ledger.asked[-1].kind == "WAIT":
            self._flush_if_due(now)

    def on_readable(self) -> None:
        """Read what has come, and deliver it."""
        connection = self._connection
        if connection is None:
            return
        while True:
            try:
                answer = connection.read_response(push_request=True)
            except ReadOnlyError:
                raise
            except ResponseError as exc:
                answer = exc
            if answer is _TOLD:
                self._quiet_until = 0.0
            else:
                self._on_answer(answer)
            if self._connection is not connection or not connection.can_read(timeout=0):
                break
        self._deliver()
        if self._connection is not None and not self._asking:
            # Nobody may look for a while, and there may be acknowledgements to send.
            self._send(time.monotonic(), ahead=self._channel.qos.prefetch_count > 0)

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
        ledger, connection = self._ledger, self._connection
        deadline = time.monotonic() + GOODBYE_S
        while ledger.asked and connection is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not connection.can_read(timeout=left_s):
                raise Overdue("no answer to the last request")
            try:
                answer = connection.read_response(push_request=True)
            except ResponseError as exc:
                answer = exc
            if answer is not _TOLD:
                self._on_answer(answer, last=True)
        left = list(ledger.arrived)
        ledger.arrived.clear()
        return left

    def close(self) -> None:
        """Let the connection go; what it owes stays in the ledger."""
        pool, self._pool = self._pool, None
        self._connection = None
        if pool is not None:
            with contextlib.suppress(Exception):
                pool.disconnect()

    def refresh_credentials(self) -> None:
        """Use a token that was renewed since the connection was made."""
        connection = self._connection
        if connection is None or self._ledger.asked:
            return
        if getattr(connection, "_re_auth_token", None) is not None:
            connection.re_auth()

    # -- connecting ----------------------------------------------------------------------------

    def _connect(self) -> None:
        for protocol in (3, 2):
            pool = self._channel.own_pool(protocol)
            try:
                connection = pool.get_connection()
                if protocol == 3:
                    connection._parser.set_invalidation_push_handler(lambda _: _TOLD)
                    # Not of our own pops.
                    connection.send_command("CLIENT", "TRACKING", "ON", "NOLOOP")
                    connection.read_response()
                break
            except ResponseError as exc:
                pool.disconnect()
                if protocol == 2:
                    raise
                logger.warning("the server does not tell of changes: %s", exc)
            except BaseException:
                pool.disconnect()
                raise
        self._pool, self._told = pool, protocol == 3
        self._timeout_s = connection.socket_timeout or ANSWER_TIMEOUT_S
        try:
            self._reclaim(connection)
        except BaseException:
            self.close()
            raise
        self._connection = connection

    def _reclaim(self, connection: Any) -> None:
        """Get what an earlier connection asked for and did not bring."""
        ledger, channel = self._ledger, self._channel
        tags = ledger.lost()
        if tags and ledger.fence:
            # A request that is still on its way must not be carried out after this.
            _try(connection, "CLIENT", "KILL", *ledger.fence)
        info = _try(connection, "CLIENT", "INFO")
        ledger.fence = _fence(info)
        notes_key = channel.key(channel.unacked_key)
        index_key = channel.key(channel.unacked_index_key)
        found: list[Arrival] = []
        for start in range(0, len(tags), ACKS_MAX):
            chunk = tags[start : start + ACKS_MAX]
            connection.send_command("HMGET", notes_key, *chunk)
            for tag, note in zip(chunk, connection.read_response(), strict=True):
                if note is not None:
                    found.append(channel.arrival(tag, note))
        if found:
            now = time.time()
            scores = [part for arrival in found for part in (now, arrival.tag)]
            connection.send_command("ZADD", index_key, "XX", *scores)
            connection.read_response()
            logger.warning("%d messages whose delivery was cut off are delivered now", len(found))
        ledger.arrived.extend(found)
        ledger.missing.clear()

    # -- asking --------------------------------------------------------------------------------

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

    def _send(self, now: float, *, ahead: bool = True) -> None:
        """Ask for messages, or at least get rid of acknowledgements."""
        ledger = self._ledger
        room = self._room()
        owing = self._owing_since
        due = owing is not None and now - owing >= ACKS_WAIT_S
        if ahead and room > 0 and now >= self._quiet_until:
            if due or room >= self._channel.batch_min:
                self._send_pop(room, now)
                return
            if owing is None:
                self._owe()
        if ledger.acks and (due or len(ledger.acks) >= ACKS_MAX):
            self._send_acks(now)
        elif due and not ledger.acks:
            self._owing_since = None
        if not self._told and room > 0 and ahead and not ledger.asked:
            self._send_wait(now)

    def _owe(self) -> None:
        self._owing_since = time.monotonic()
        if self.wake_later is not None:
            self.wake_later()

    def _send_pop(self, count: int, now: float) -> None:
        ledger = self._ledger
        if not self._keys:
            self._prepare()
        acks = ledger.acks[:ACKS_MAX]
        del ledger.acks[: len(acks)]
        asked = Asked("POP", now, ledger.reserve(count), count, acks, self._keys)
        ledger.asked.append(asked)
        self._owing_since = now if ledger.acks else None
        self._transmit(self._packed(asked, self._head[1]))

    def _packed(self, asked: Asked, head: bytes) -> bytes:
        shared = b"1" if self._channel.shares else b"0"
        fields = [
            repr(time.time()).encode(),
            self._ledger.prefix.encode(),
            b"%d" % asked.first,
            b"%d" % asked.count,
            b"%d" % self._begin,
            shared,
            *[tag.encode() for tag in asked.acks],
        ]
        return b"".join((b"*%d\r\n" % (self._head[0] + len(fields)), head, *map(_bulk, fields)))

    def _send_acks(self, now: float) -> None:
        ledger, channel = self._ledger, self._channel
        acks = ledger.acks[:ACKS_MAX]
        del ledger.acks[: len(acks)]
        ledger.asked.append(Asked("ACK", now, acks=acks, answers_left=2))
        self._owing_since = now if ledger.acks else None
        tags = [tag.encode() for tag in acks]
        self._transmit(
            _command(b"HDEL", channel.key(channel.unacked_key).encode(), *tags)
            + _command(b"ZREM", channel.key(channel.unacked_index_key).encode(), *tags)
        )

    def _send_wait(self, now: float) -> None:
        if not self._keys:
            self._prepare()
        queues = len(self._keys) // len(self._channel.priority_steps)
        turned = [
            self._keys[start + (self._begin + n) % queues][1].encode()
            for start in range(0, len(self._keys), queues)
            for n in range(queues)
        ]
        self._begin = (self._begin + 1) % queues if self._channel.shares else 0
        number = self._ledger.reserve(1)
        asked = Asked("WAIT", now + LOOK_AGAIN_S, number, 1, keys=self._keys)
        self._ledger.asked.append(asked)
        self._transmit(_command(b"BRPOP", *turned, b"%d" % LOOK_AGAIN_S))

    def _transmit(self, packed: bytes) -> None:
        # No check of its health: that waits for an answer.
        self._connection.send_packed_command([packed], check_health=False)

    def _check_overdue(self, now: float) -> None:
        asked = self._ledger.asked[0]
        if now - asked.at < self._timeout_s:
            return
        if self._connection.can_read(timeout=0):
            self.on_readable()  # it has come: it was we who did not look
            return
        raise Overdue(f"no answer within {self._timeout_s:g} s")

    # -- answers -------------------------------------------------------------------------------

    def _on_answer(self, answer: Any, *, last: bool = False) -> None:
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
            if last or asked.keys is not self._keys:  # it is not asked for any more
                ledger.acks[:0] = asked.acks
                return
            asked.answers_left, asked.at = 1, time.monotonic()
            ledger.asked.append(asked)
            self._transmit(self._packed(asked, self._head[2]))
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
        if asked.keys is self._keys:
            self._begin = answer[0]
        for at in range(1, len(answer), 2):
            queue, key = asked.keys[answer[at]]
            for raw in answer[at + 1]:
                arrived.append(Arrival(tag_of(number), queue, key, raw))
                number += 1
        if number - asked.first < asked.count and asked.keys is self._keys:
            # All lists are empty, and we will be told.
            self._quiet_until = time.monotonic() + LOOK_AGAIN_S

    def _on_popped_alone(self, asked: Asked, answer: list[bytes]) -> None:
        """By BRPOP, which notes nothing: for a moment only we have it."""
        key, raw = answer[0].decode(), answer[1]
        queue = next(queue for queue, known in asked.keys if known == key)
        arrival = Arrival(self._ledger.tag(asked.first), queue, key, raw)
        self._channel.note(arrival)
        self._ledger.arrived.append(arrival)

    def _refused(self, asked: Asked, exc: ResponseError) -> None:
        self._ledger.acks[:0] = asked.acks
        code = getattr(exc, "status_code", None) or str(exc).split(" ", 1)[0]
        if code not in PASSING:
            self._channel.leave_to_kombu(exc)
            return
        self._quiet_until = time.monotonic() + LOOK_AGAIN_S
        if not self._complained:
            self._complained = True
            logger.error("the server lets nobody take messages now: %s", exc)

    # -- delivering ----------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Hand over what has arrived; what a callback raises leaves the rest for the next turn."""
        if self._delivering:
            return
        self._delivering = True
        channel, ledger = self._channel, self._ledger
        arrived, asked, consumers = ledger.arrived, ledger.asked, channel.consumers
        ahead = channel.qos.prefetch_count > 0
        try:
            while arrived:
                arrival = arrived.popleft()
                consumer = consumers.get(arrival.queue)
                if consumer is None:
                    self._homeless.append(arrival)
                    continue
                self._hand_over(arrival, *consumer)
                if ahead and not (asked and self._asking) and self._connection is not None:
                    self._send(time.monotonic())  # before the rest is run
        finally:
            self._delivering = False
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
        callback(message)


def untouched(arrivals: list[Arrival]) -> list[Return]:
    """The way back of messages that nobody has seen: as they came, newest first."""
    return [Return(one.tag, one.key, "RPUSH", one.raw) for one in reversed(arrivals)]


def _bulk(part: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(part), part)


def _command(*parts: bytes) -> bytes:
    return b"".join((b"*%d\r\n" % len(parts), *map(_bulk, parts)))


def _try(connection: Any, *command: str) -> Any:
    """Ask something that the server may not know or allow."""
    connection.send_command(*command)
    try:
        return connection.read_response()
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
