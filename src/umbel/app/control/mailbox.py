"""Requests to nodes, and their replies.

Any number of threads may call at a time. They share one inbox, and each reply is given to the call
whose ticket it carries; one without, of a call that has ended, is *stale*: dropped and counted. The
time-out of a call is one deadline, set when the request goes out, which is also the `expires` of
the request: no node begins on it when nobody waits any more. Commands for which no reply is wanted
have no deadline; they expire when they could have waited in a node's queue no longer.

How it fails: `kombu.exceptions.OperationalError` names the broker when a request can not be sent
or replies can not be received; then the request may have been obeyed all the same. A reply that can
not be read is dropped and counted, by reason. Nodes that do not answer are not in the result.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from msgspec.structs import replace

from umbel.app.control.collector import Collector
from umbel.broker.connections import hang_up, masked
from umbel.broker.mailboxes import Mailboxes
from umbel.broker.replies import Received
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.control import Reply, ReplyTo, Request, Written, read_reply, write_request
from umbel.wire.limits import Refusal
from umbel.wire.patterns import GLOB, check_pattern
from umbel.wire.signing import KEY_BYTES_MIN, sign

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


def signing_key(app: Umbel) -> bytes | None:
    """The key with which control messages are signed; None when they are not."""
    if app.conf.control_signing == "off":
        return None
    key = (app.conf.control_signing_key or "").encode()
    if len(key) < KEY_BYTES_MIN:
        raise ImproperlyConfigured(
            f"control_signing is {app.conf.control_signing!r} and control_signing_key has "
            f"{len(key)} bytes: give it at least {KEY_BYTES_MIN}, the same to all nodes and clients"
        )
    return key


class _Call:
    """One request that waits for replies: other threads put them in, the caller takes them out."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.arrived: SimpleQueue[Reply | BaseException] = SimpleQueue()
        self.count = 0


class Mailbox:
    """The client's side of remote control; `connection` replaces those of the application."""

    def __init__(self, app: Umbel, connection: Connection | None = None) -> None:
        self._app = app
        self._given = connection
        #: What was dropped: `stale`, `too-many`, and the reasons of `umbel.wire.limits`.
        self.counts: Counter[str] = Counter()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._collector: Collector | None = None
        self._calls: dict[str, _Call] = {}
        self._routing_key = str(uuid.uuid4())

    # -- what is asked -------------------------------------------------------------------

    def cast(self, command: str, arguments: Mapping[str, Any], **to: Any) -> None:
        """Send a command for which no reply is wanted; `to` is as for `call`."""
        life_s = self._app.conf.control_queue_ttl or CAST_LIFE_S
        request = _request(command, arguments, **to)
        self._send(replace(request, expires=time.time() + life_s))

    def call(
        self,
        command: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float,
        limit: int | None = None,
        callback: OnReply | None = None,
        **to: Any,
    ) -> list[dict[str, Any]]:
        """Send a command and return the replies, one `{node name: value}` each.

        `to` is `destination`, a list of node names, or `pattern` and `matcher`.
        """
        request = _request(command, arguments, **to)
        collector = self._use_collector()
        ticket, call = str(uuid.uuid4()), _Call(collector)
        self._calls[ticket] = call
        try:
            reply_to = self._ready(collector)
            deadline = time.monotonic() + timeout_s
            expires = time.time() + timeout_s
            self._send(replace(request, ticket=ticket, reply_to=reply_to, expires=expires))
            return self._gather(call, deadline, limit, set(request.destination or ()), callback)
        finally:
            self._calls.pop(ticket, None)
            collector.release()

    def close(self) -> None:
        """Take the inbox away; calls that still wait are told. It can be used again."""
        collector = self._collector
        if collector is not None and self._pid == os.getpid():
            collector.close()
        self._reset()

    # -- the way out ---------------------------------------------------------------------

    def _send(self, request: Request) -> None:
        app = self._app
        mailboxes = mailboxes_for(app)
        exchange = mailboxes.exchange
        clocked = replace(request, clock=app.clock.forward())
        written = write_request(clocked, app.conf.task_serializer)
        headers = self._signed(written, exchange.name)

        def publish(link: Link) -> None:
            if ("exchange", exchange.name) not in link.declared:
                exchange(link.channel).declare()
                link.declared.add(("exchange", exchange.name))
            _publish(link.producer, exchange.name, written, headers)

        if self._given is None:
            app.publisher.run(publish)
        else:
            self._send_on_given(exchange, written, headers)

    def _send_on_given(self, exchange: Any, written: Written, headers: dict[str, Any]) -> None:
        connection = self._connect()
        try:
            connection.connect()
            channel = connection.channel()
            exchange(channel).declare()
            _publish(Producer(channel, auto_declare=False), exchange.name, written, headers)
        except (*connection.connection_errors, *connection.channel_errors, OSError) as exc:
            raise self._failure("the message could not be sent to", exc) from exc
        finally:
            hang_up(connection)

    def _signed(self, written: Written, exchange: str) -> dict[str, Any]:
        key = signing_key(self._app)
        if key is None:
            return written.headers
        return sign(
            written.body,
            written.headers,
            key,
            time.time(),
            uuid.uuid4().hex,
            exchange=exchange,
            content_type=written.content_type,
        )

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
        elif call.count >= REPLIES_MAX:
            self.counts["too-many"] += 1
        else:
            call.count += 1
            call.arrived.put(reply)

    def _on_end(self, collector: Collector, trouble: BaseException) -> None:
        """On the collector's thread: no replies come any more."""
        for call in list(self._calls.values()):
            if call.collector is collector:
                call.arrived.put(trouble)

    def _gather(
        self,
        call: _Call,
        deadline: float,
        limit: int | None,
        expected: set[str],
        callback: OnReply | None,
    ) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = []
        named = bool(expected)
        while not (limit and len(replies) >= limit) and not (named and not expected):
            try:
                arrived = call.arrived.get(timeout=max(deadline - time.monotonic(), 0))
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


def _publish(producer: Producer, exchange: str, written: Written, headers: dict[str, Any]) -> None:
    producer.publish(
        written.body,
        exchange=exchange,
        routing_key="",
        headers=headers,
        content_type=written.content_type,
        content_encoding=written.content_encoding,
        delivery_mode=PERSISTENT,
    )


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
