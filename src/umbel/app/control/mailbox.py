"""Requests to nodes, and their replies.

Any number of threads may call at a time. They share one inbox, and each reply is given to the call
whose ticket it carries; one without, of a call that has ended, is *stale*: dropped and counted. The
timeout of a call is one deadline, which includes the time that it takes to open the inbox (up to
half of it) and is also the `expires` of the request: no node begins on it when nobody waits any
more. On Redis the server says how many nodes have heard a request, and a call ends as soon as all
of them have answered. Commands for which no reply is wanted have no deadline; they expire when they
could have waited in a node's queue no longer.

Requests and replies are signed as `control_signing` says (`app.trust`). A wrongly signed reply is
dropped. An unsigned one is returned to clients, which show it, and dropped for `signed_only` calls,
on whose replies a node acts. A node that cannot tell whether a signed command is new, because it
has just started or because the clocks differ, answers with a challenge; then the command is signed
again with the challenge in it and sent to that node once more, unless the node began to listen
after the command was sent. So where signing is required, also commands for which no reply is wanted
have an address for challenges, for some seconds; `close`, and the end of the process, wait for a
moment after the last of them.

How it fails: `kombu.exceptions.OperationalError` names the broker when a request can not be sent
or replies can not be received; then the request may have been obeyed all the same. A reply that can
not be read is dropped and counted, by reason. Nodes that do not answer are not in the result.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from msgspec.structs import replace

from umbel.app.control.collector import Collector
from umbel.app.trust import Trust
from umbel.broker.broadcast.mailboxes import Mailboxes
from umbel.broker.broadcast.replies import Received
from umbel.broker.sessions.connections import hang_up, masked
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.control import Reply, ReplyTo, Request, Written, read_reply, write_request
from umbel.wire.limits import Refusal
from umbel.wire.patterns import GLOB, check_pattern
from umbel.wire.reprs import shown_name
from umbel.wire.signing import (
    CHALLENGE,
    LISTENING_S,
    REPLAYED,
    REQUEST,
    UNSIGNED,
    Distrust,
)

if TYPE_CHECKING:
    from umbel.app.publish import Link
    from umbel.app.umbel import Umbel

logger = logging.getLogger(__name__)

#: Called with `{node name: value}` for each reply as it comes.
OnReply = Callable[[dict[str, Any]], None]

PERSISTENT = 2
# Of one call. Nobody has so many nodes; the rest is dropped and counted.
REPLIES_MAX = 100_000
# How long a command for which nobody waits is worth obeying, unless the queues' TTL says so.
CAST_LIFE_S = 300.0
# How long challenges to a command without reply are answered, and waited for before the end.
CAST_PROOF_S, CAST_SETTLE_S = 5.0, 0.5
# By how much later than a command a node may seem to have begun to listen: its reply takes a while.
LISTENING_SLACK_S = 0.25


def mailboxes_for(app: Umbel) -> Mailboxes:
    """The exchanges and queues of remote control, as the settings say."""
    conf = app.conf
    if conf.control_queue_exclusive and conf.control_queue_durable:
        raise ImproperlyConfigured(
            "control_queue_exclusive and control_queue_durable are both set, but an exclusive "
            "queue ends with its connection: switch one of them off"
        )
    return Mailboxes(
        prefix=conf.control_exchange,
        ttl_s=conf.control_queue_ttl,
        expires_s=conf.control_queue_expires,
        exclusive=conf.control_queue_exclusive,
        durable=conf.control_queue_durable,
    )


class _Call:
    """One request that waits for replies: other threads put them in, the caller takes them out.

    Nobody takes the replies to a *cast* out: it is only there to answer challenges.
    """

    def __init__(
        self,
        request: Request,
        collector: Collector,
        life_s: float,
        *,
        signed_only: bool = False,
        cast: bool = False,
    ) -> None:
        self.request = request
        self.collector = collector
        self.sent_at = time.monotonic()
        self.deadline = self.sent_at + life_s
        self.signed_only = signed_only
        self.cast = cast
        self.arrived: SimpleQueue[Reply | BaseException] = SimpleQueue()
        self.count = 0
        self.nonces: set[str] = set()  # of the signed replies so far
        self.challenged: set[str] = set()  # nodes whose challenge was answered


class Mailbox:
    """The client's side of remote control; `connection` replaces those of the application."""

    def __init__(self, app: Umbel, connection: Connection | None = None) -> None:
        self._app = app
        self._given = connection
        self.trust = Trust(app)
        self._settles = False  # at the end of the process
        #: What was dropped: `stale`, `too-many`, and the reasons of `umbel.wire.limits`.
        self.counts: Counter[str] = Counter()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._collector: Collector | None = None
        self._calls: dict[str, _Call] = {}
        self._casts: deque[_Call] = deque()  # those in there that are casts, the oldest first
        self._routing_key = str(uuid.uuid4())

    # -- what is asked -------------------------------------------------------------------

    def cast(self, command: str, arguments: Mapping[str, Any], **to: Any) -> None:
        """Send a command for which no reply is wanted; `to` is as for `call`."""
        life_s = self._app.conf.control_queue_ttl or CAST_LIFE_S
        request = _request(command, arguments, **to)
        if self.trust.is_required:
            self._cast_with_address(request, life_s)
        else:
            self._send(request, life_s)

    def _cast_with_address(self, request: Request, life_s: float) -> None:
        """Send a command that nodes can challenge; without an address if there is none to have."""
        collector = self._use_collector()
        try:
            reply_to = self._ready(collector)
        except OperationalError as exc:
            logger.debug("a command is sent that no node can challenge: %s", exc)
            self._send(request, life_s)
        else:
            request = replace(request, ticket=str(uuid.uuid4()), reply_to=reply_to)
            self._note_cast(_Call(request, collector, life_s, cast=True))
            self._send(request, life_s)
        finally:
            collector.release()

    def call(
        self,
        command: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float,
        limit: int | None = None,
        callback: OnReply | None = None,
        signed_only: bool = False,
        **to: Any,
    ) -> list[dict[str, Any]]:
        """Send a command and return the replies, one `{node name: value}` each.

        `to` is `destination`, a list of node names, or `pattern` and `matcher`. With `signed_only`
        unsigned replies are dropped where signing is required.
        """
        began = time.monotonic()
        request = _request(command, arguments, **to)
        collector = self._use_collector()
        ticket = str(uuid.uuid4())
        try:
            request = replace(request, ticket=ticket, reply_to=self._ready(collector))
            left_s = max(timeout_s / 2, began + timeout_s - time.monotonic())
            call = _Call(request, collector, left_s, signed_only=signed_only)
            self._calls[ticket] = call
            heard = self._send(request, left_s)
            if heard is not None and not request.destination and not request.pattern:
                limit = min(limit or heard, heard)
            return self._gather(call, limit, set(request.destination or ()), callback)
        finally:
            self._calls.pop(ticket, None)
            collector.release()

    def _note_cast(self, cast: _Call) -> None:
        with self._lock:
            if not self._settles:
                self._settles = True
                atexit.register(_settle, weakref.ref(self))
            while self._casts and self._casts[0].sent_at < cast.sent_at - CAST_PROOF_S:
                self._calls.pop(self._casts.popleft().request.ticket or "", None)
            self._casts.append(cast)
            self._calls[cast.request.ticket or ""] = cast

    def settle(self) -> None:
        """Wait for a moment after the last cast: a node may want a proof that it is new."""
        if self._casts and self._pid == os.getpid():
            time.sleep(max(0.0, self._casts[-1].sent_at + CAST_SETTLE_S - time.monotonic()))

    def close(self) -> None:
        """Take the inbox away; calls that still wait are told. It can be used again."""
        self.settle()
        collector = self._collector
        if collector is not None and self._pid == os.getpid():
            collector.close()
        self._reset()

    # -- the way out ---------------------------------------------------------------------

    def _send(self, request: Request, life_s: float) -> int | None:
        """Publish a request that is worth obeying for `life_s` from now on.

        Returns how many nodes have heard it, where the broker knows.
        """
        app, heard = self._app, None
        mailboxes = mailboxes_for(app)
        exchange = mailboxes.exchange
        now = self.trust.now()
        dated = replace(request, clock=app.clock.forward(), sent_at=now, expires=now + life_s)
        written = write_request(dated, app.conf.task_serializer)
        written = self.trust.signed(written, exchange.name, REQUEST)

        def publish(link: Link) -> None:
            nonlocal heard
            if ("exchange", exchange.name) not in link.declared:
                exchange(link.channel).declare()
                link.declared.add(("exchange", exchange.name))
            _publish(link.producer, exchange.name, written)
            heard = getattr(link.channel, "heard_count", None)

        if self._given is None:
            app.publisher.run(publish)
        else:
            self._send_on_given(exchange, written)
        return heard

    def _send_on_given(self, exchange: Any, written: Written) -> None:
        connection = self._connect()
        try:
            connection.connect()
            channel = connection.channel()
            exchange(channel).declare()
            _publish(Producer(channel, auto_declare=False), exchange.name, written)
        except (*connection.connection_errors, *connection.channel_errors, OSError) as exc:
            raise self._failure("the message could not be sent to", exc) from exc
        finally:
            hang_up(connection)

    # -- the way back --------------------------------------------------------------------

    def _connect(self) -> Connection:
        if self._given is not None:
            return self._given.clone()
        # It lives for moments, and whoever waits has a deadline: nobody beats for it.
        return self._app.connection(self._app.write_url, heartbeat=0)

    def _use_collector(self) -> Collector:
        if self._pid != os.getpid():
            self._reset()  # the parent's threads are not here, its inbox is not ours
        with self._lock:
            if self._collector is None or not self._collector.use():
                self._collector = Collector(
                    self._connect,
                    mailboxes_for(self._app),
                    self._routing_key,
                    self._deliver,
                    self._on_end,
                )
                self._collector.use()
            return self._collector

    def _ready(self, collector: Collector) -> ReplyTo:
        patience_s = (self._app.conf.broker_connection_timeout or 4.0) * 2
        try:
            return collector.ready(patience_s)
        except ImproperlyConfigured:
            raise
        except Exception as exc:
            raise self._failure("replies can not be received from", exc) from exc

    def _deliver(self, received: Received) -> None:
        """On the collector's thread: a message has come."""
        try:
            reply = read_reply(*received, accept=self._app.accept)
        except Refusal as refusal:
            if not self.counts[refusal.reason]:
                logger.warning("a reply was dropped, others will be without a word: %s", refusal)
            self.counts[refusal.reason] += 1
            return
        call = self._calls.get(reply.ticket or "")
        if call is None:
            self.counts["stale"] += 1
            return
        try:
            is_signed = self._check(received, call)
        except Distrust as distrust:
            self._note(f"a reply of {shown_name(reply.hostname)} was dropped", distrust)
            return
        if is_signed and self._answer_challenge(call, reply):
            return
        if call.count >= REPLIES_MAX:
            self.counts["too-many"] += 1
        elif not call.cast:
            call.count += 1
            call.arrived.put(reply)

    def _check(self, received: Received, call: _Call) -> bool:
        """Whether a reply is signed; raises `Distrust` for one that must not be believed."""
        assert call.request.reply_to is not None
        nonce = self.trust.reply_nonce(received, call.request.reply_to.exchange)
        if nonce is None:
            if self.trust.is_required:
                doubt = Distrust(UNSIGNED, "whoever reaches the broker can have sent it")
                if call.signed_only:
                    raise doubt
                self._note("a reply is shown that is not signed", doubt)
            return False
        if nonce in call.nonces:
            raise Distrust(REPLAYED, "it was received before")
        call.nonces.add(nonce)
        return True

    def _note(self, what: str, distrust: Distrust) -> None:
        say = logger.debug if self.counts[distrust.reason] else logger.warning
        say("%s (%s): %s", what, distrust.reason, distrust.text)
        self.counts[distrust.reason] += 1

    def _answer_challenge(self, call: _Call, reply: Reply) -> bool:
        """Send a command again to a node that wants a proof that it is new; whether it was sent."""
        value, node, now = reply.value, reply.hostname, time.monotonic()
        if not isinstance(value, dict) or node in call.challenged or now >= call.deadline:
            return False
        challenge, listening_s = value.get(CHALLENGE), value.get(LISTENING_S)
        if not isinstance(challenge, str) or not isinstance(listening_s, (int, float)):
            return False
        # A node that was not there when the command was sent has got a copy of it.
        if listening_s + LISTENING_SLACK_S < now - call.sent_at:
            return False
        call.challenged.add(node)
        again = replace(
            call.request, destination=(node,), pattern=None, matcher=None, challenge=challenge
        )
        try:
            self._send(again, call.deadline - now)
        except Exception as exc:  # noqa: BLE001 - the caller gets the node's refusal instead
            logger.warning("the challenge of %s could not be answered: %s", node, exc)
            return False
        return True

    def _on_end(self, collector: Collector, trouble: BaseException) -> None:
        """On the collector's thread: no replies come any more."""
        for call in list(self._calls.values()):
            if call.collector is collector:
                call.arrived.put(trouble)

    def _gather(
        self,
        call: _Call,
        limit: int | None,
        expected: set[str],
        callback: OnReply | None,
    ) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = []
        named = bool(expected)
        while not (limit is not None and len(replies) >= limit) and not (named and not expected):
            try:
                arrived = call.arrived.get(timeout=max(call.deadline - time.monotonic(), 0))
            except Empty:
                break
            if isinstance(arrived, BaseException):
                raise self._failure("replies can not be received from", arrived) from arrived
            # The clock in a reply is not witnessed: Celery's nodes put another one there, which
            # only counts control messages.
            replies.append({arrived.hostname: arrived.value})
            expected.discard(arrived.hostname)
            if callback is not None:
                callback(replies[-1])
        return replies

    def _failure(self, what: str, exc: BaseException) -> OperationalError:
        if self._given is not None:
            shown = masked(self._given.as_uri())
        else:
            shown = masked(self._app.write_url)
        return OperationalError(f"{what} {shown}: {type(exc).__name__}: {exc}")


def _publish(producer: Producer, exchange: str, written: Written) -> None:
    producer.publish(
        written.body,
        exchange=exchange,
        routing_key="",
        headers=written.headers,
        content_type=written.content_type,
        content_encoding=written.content_encoding,
        delivery_mode=PERSISTENT,
    )


def _settle(mailbox: weakref.ref[Mailbox]) -> None:
    """At the end of the process; a mailbox that is gone has nothing to wait for."""
    found = mailbox()
    if found is not None:
        found.settle()


def _request(
    command: str,
    arguments: Mapping[str, Any],
    *,
    destination: Sequence[str] | None = None,
    pattern: str | None = None,
    matcher: str | None = None,
) -> Request:
    """A request that every node will be able to read; raises `ValueError` else."""
    if pattern:
        matcher = matcher or GLOB
        try:
            check_pattern(pattern, matcher)
        except Refusal as refusal:
            raise ValueError(refusal.text) from None
    return Request(
        method=command,
        arguments=dict(arguments),
        destination=_names(destination),
        pattern=pattern or None,
        matcher=matcher if pattern else None,
    )


def _names(destination: Sequence[str] | None) -> tuple[str, ...] | None:
    if destination is None:
        return None
    if isinstance(destination, str) or not all(isinstance(name, str) for name in destination):
        raise ValueError(
            f"destination must be a list of node names, not {destination!r:.100}: "
            "write ['name@host']"
        )
    return tuple(destination) or None
