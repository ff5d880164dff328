"""Sending messages: a bounded set of open links to the broker, shared by all threads.

A link is a connection with its channel and what has been declared on it. Publishing borrows a
link and gives it back; a link that failed is thrown away and the message is tried on a fresh
one as the retry policy says. When the policy is exhausted the caller gets
`kombu.exceptions.OperationalError`, as with Celery, and knows that the message was not sent,
or, for a connection that broke in the middle, may have been sent once. Of a batch the error says
how much was surely sent, and a further try goes on from there.

RabbitMQ confirms what is sent, unless `broker_transport_options` has `confirm_publish` off. What it
refuses, or cannot route, or does not take because it is short of memory or disk space, is an error
that is not tried again (`umbel.broker.sessions.errors`), except that a queue which was deleted
meanwhile is declared once more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kombu import Connection, Queue
from kombu.exceptions import OperationalError

from umbel.app.events.publisher import event_exchange, publish_events
from umbel.app.routes import Destination
from umbel.broker.amqp.blocking import Alarm, blocked
from umbel.broker.amqp.bounded import share_alarm
from umbel.broker.sessions.connections import driver, hang_up, masked
from umbel.broker.sessions.errors import ConnectionBlocked, NotTaken, Unroutable
from umbel.broker.sessions.session import opening
from umbel.broker.tasks import delayed
from umbel.broker.tasks.batches import Parcel
from umbel.broker.tasks.outlets import outlet_for

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.wire.events import Event

logger = logging.getLogger(__name__)

# So many events of sent tasks go into one message.
EVENTS_MAX = 500
WRITE_TIMEOUT_MIN_S = 1.0


class BatchNotSent(OperationalError):
    """A batch was not sent to its end; the first `sent` of its `total` messages surely were."""

    def __init__(self, why: str, sent: int, total: int) -> None:
        super().__init__(
            f"{why}; of {total} messages the first {sent} were sent, those after them may have been"
        )
        self.sent, self.total = sent, total


class RetryPolicy:
    """How often and how patiently a publish is tried again."""

    def __init__(self, policy: Mapping[str, Any] | None, enabled: bool) -> None:
        chosen = dict(policy or {})
        self.max_retries: int | None = chosen.get("max_retries", 3) if enabled else 0
        self.start_s = float(chosen.get("interval_start", 0) or 0)
        self.step_s = float(chosen.get("interval_step", 0.2) or 0)
        self.max_s = float(chosen.get("interval_max", 0.2) or 0)

    def delay_s(self, attempt: int) -> float | None:
        """How long to wait before try number `attempt + 1`; None when there is none."""
        if self.max_retries is not None and attempt >= self.max_retries:
            return None
        return min(self.start_s + attempt * self.step_s, self.max_s)


class Link:
    """One open connection for publishing."""

    def __init__(self, publisher: Publisher, connection: Connection) -> None:
        self._publisher = publisher
        self.connection = connection
        self.declared: set[tuple[str, str]] = set()
        self.used = False
        with opening(connection):  # patience is the retry policy's matter
            share_alarm(connection, publisher.alarm, publisher.blocked_timeout_s)
            self.channel = connection.default_channel
            kind = driver(connection)
            self.outlet = outlet_for(self.channel, kind, confirm=publisher.confirms)
            self.producer = self.outlet.producer

    def declare(self, destination: Destination) -> None:
        """Make sure that what the message is sent to exists; asked once per link."""
        for kind, entity in (("queue", destination.queue), ("exchange", destination.declare)):
            if entity is not None and (kind, entity.name) not in self.declared:
                # Only a broker with a server knows what others have declared.
                asked = getattr(entity, "passive", False)
                if not asked or driver(self.connection) == "amqp":
                    entity(self.channel).declare()
                # What the broker deletes by itself may be gone the next time.
                if entity.can_cache_declaration:
                    self.declared.add((kind, entity.name))
        if destination.delay_kind:
            self._declare_delays(destination)

    def publish_one(self, parcel: Parcel, to: Destination) -> None:
        """Publish a message to a destination that is declared."""
        mandatory = to.needs_queue
        try:
            self.outlet.publish_one(parcel, mandatory=mandatory)
        except Unroutable:
            self._declare_again((to,))
            self.outlet.publish_one(parcel, mandatory=mandatory)

    def publish(self, parcels: Sequence[Parcel], places: Collection[Destination]) -> Iterator[int]:
        """Publish a batch to destinations that are declared; tells what is there from the first."""
        optional = {(to.exchange, to.routing_key) for to in places if not to.needs_queue}
        try:
            yield from self.outlet.publish(parcels, optional=optional)
        except Unroutable as exc:
            # Of those that were written only these are missing; the others are not sent again.
            yield exc.indexes[0]
            self._declare_again(places)
            lost = [parcels[index] for index in exc.indexes]
            for _ in self.outlet.publish([*lost, *parcels[exc.written :]], optional=optional):
                pass
            yield len(parcels)

    def _declare_again(self, places: Iterable[Destination]) -> None:
        """Queues were deleted since they were declared here, or were never declared by anybody."""
        self.declared.clear()
        for to in places:
            self.declare(to)
            for queue in self._publisher.queues_behind(to):
                queue(self.channel).declare()

    def _declare_delays(self, destination: Destination) -> None:
        # A message for an exchange that is not there would be lost without a word.
        queue = destination.queue
        key = ("delays", queue.name if queue is not None else "")
        if key not in self.declared:
            queues = [queue] if queue is not None else []
            delayed.declare(self.connection, queues, destination.delay_kind)
            self.declared.add(key)

    def close(self, *, lost: bool = False) -> None:
        """Close without caring whether the other side is still there."""
        hang_up(self.connection, lost=lost)


class Publisher:
    """Borrows links, publishes, and repairs what breaks."""

    def __init__(self, app: Umbel) -> None:
        self._app = app
        self._limit = app.conf.broker_pool_limit or 0
        self._free: list[Link] = []
        self._open = 0
        self._changed = threading.Condition()
        self._closed = False
        self.alarm = Alarm()

    @property
    def confirms(self) -> bool:
        """Whether single messages wait for RabbitMQ's confirm."""
        return bool(self._app.conf.broker_transport_options.get("confirm_publish", True))

    @property
    def blocked_timeout_s(self) -> float:
        """How long a blocked connection is waited for."""
        return float(self._app.conf.broker_blocked_connection_timeout)

    def queues_behind(self, to: Destination) -> list[Queue]:
        """The application's queues that may get what is sent to an exchange of theirs."""
        queues = self._app.queues.copy().values()
        return [queue for queue in queues if to.exchange and queue.exchange.name == to.exchange]

    def send(
        self,
        parcel: Parcel,
        to: Destination,
        policy: RetryPolicy,
        events: Sequence[Event] = (),
    ) -> None:
        """Publish one message, and then the events that tell of it."""

        def publish(link: Link) -> None:
            link.declare(to)
            link.publish_one(parcel, to)
            if events:
                self._tell(link, events)

        self._with_link(publish, policy)

    def send_many(
        self,
        parcels: Sequence[Parcel],
        places: Collection[Destination],
        policy: RetryPolicy,
        events: Sequence[Event] = (),
    ) -> None:
        """Publish all `parcels`, in order, in as few round trips as the broker allows.

        `places` are where they go, each of them once.
        Raises `BatchNotSent` when the broker can not be reached to the end.
        """
        sent = 0

        def publish(link: Link) -> None:
            nonlocal sent
            for to in places:
                link.declare(to)
            before = sent
            for count in link.publish(parcels[before:] if before else parcels, places):
                sent = before + count
            for start in range(0, len(events), EVENTS_MAX):
                self._tell(link, events[start : start + EVENTS_MAX])

        try:
            self._with_link(publish, policy)
        except ConnectionBlocked as exc:
            raise BatchNotSent(str(exc), sent, len(parcels)) from exc
        except NotTaken as exc:
            exc.add_note(f"{sent} of {len(parcels)} messages had been sent before")
            raise
        except OperationalError as exc:
            raise BatchNotSent(str(exc), sent, len(parcels)) from exc.__cause__
        except BaseException as exc:
            exc.add_note(f"{sent} of {len(parcels)} messages had been sent")
            raise

    def _tell(self, link: Link, events: Sequence[Event]) -> None:
        """The tasks are sent: that the events are not must not make it look otherwise."""
        try:
            exchange = event_exchange(self._app.conf.event_exchange, link.connection)
            if ("exchange", exchange.name) not in link.declared:
                exchange(link.channel).declare()
                link.declared.add(("exchange", exchange.name))
            publish_events(link.producer, exchange, events, self._app.events.stream)
        except Exception as exc:  # noqa: BLE001 - every transport has its own errors
            self._app.events.sent_lost += len(events)
            logger.warning("%d task-sent events were lost: %s", len(events), exc)

    def run(self, work: Callable[[Link], None]) -> None:
        """Run `work` on a borrowed link, with the configured retries."""
        conf = self._app.conf
        self._with_link(work, RetryPolicy(conf.task_publish_retry_policy, conf.task_publish_retry))

    def close(self) -> None:
        """Close every idle link; busy ones are closed when they come back."""
        with self._changed:
            self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the links that nobody uses right now; the next message opens one."""
        with self._changed:
            links, self._free = self._free, []
            self._open -= len(links)
            self._changed.notify_all()
        for link in links:
            link.close()

    def _with_link(self, work: Callable[[Link], None], policy: RetryPolicy) -> None:
        attempt = 0
        while True:
            used = False
            try:
                link = self._take()
                try:
                    used, link.used = link.used, True
                    link.outlet.await_unblocked()  # it would not answer anything before
                    work(link)
                except (ConnectionBlocked, NotTaken):
                    # It stays: what was written on it arrives when the broker goes on, and the
                    # next sender knows before it writes.
                    if link.connection.connected:
                        self._give_back(link)
                    else:
                        self._discard(link, lost=True)
                    raise
                except BaseException:
                    self._discard(link)
                    raise
                self._give_back(link)
                return
            except (ConnectionBlocked, NotTaken):
                raise
            except self._recoverable() as exc:
                # One broken link means that the idle ones, opened before it, are suspect too.
                self.close_idle()
                delay_s = policy.delay_s(attempt)
                if delay_s is None:
                    shown = masked(self._app.write_url)
                    raise OperationalError(
                        f"the message could not be sent to {shown} "
                        f"after {attempt + 1} tries: {type(exc).__name__}: {exc}"
                    ) from exc
                time.sleep(delay_s)
                attempt += 1
            except self._refusals() as exc:
                # It may be about an earlier message: RabbitMQ says so with the next one only.
                if not used:
                    raise
                logger.warning("the broker closed a channel (%s): trying on another one", exc)
                self.close_idle()

    def _recoverable(self) -> tuple[type[BaseException], ...]:
        probe = self._app.connection(self._app.write_url)
        errors = (*probe.recoverable_connection_errors, *probe.recoverable_channel_errors)
        return (*errors, OSError, OperationalError)

    def _refusals(self) -> tuple[type[BaseException], ...]:
        errors: tuple[type[BaseException], ...] = self._app.connection(
            self._app.write_url
        ).channel_errors
        return errors

    def _take(self) -> Link:
        with self._changed:
            began = time.monotonic()
            while not self._free:
                if not self._limit or self._open < self._limit:
                    self._open += 1
                    break
                patience_s = self.blocked_timeout_s
                self._changed.wait(patience_s or None)
                reason = self.alarm.reason
                if reason is not None and time.monotonic() - began >= patience_s:
                    where = masked(self._app.write_url)
                    raise blocked(where, reason, patience_s, written=False)
            else:
                return self._free.pop()
        try:
            return Link(self, self._connection())
        except BaseException:
            self._lost()
            raise

    def _connection(self) -> Connection:
        # Nobody beats for an idle link: the broker would take it for dead.
        connection = self._app.connection(self._app.write_url, heartbeat=0)
        if self.confirms and driver(connection) == "amqp":
            # A broker that does not read is not written to for ever.
            timeout_s = max(self.blocked_timeout_s, WRITE_TIMEOUT_MIN_S)
            connection.transport_options.setdefault("write_timeout", timeout_s)
        return connection

    def _give_back(self, link: Link) -> None:
        with self._changed:
            # Without a pool limit connections are not kept, as the setting promises.
            if self._limit and not self._closed:
                self._free.append(link)
                self._changed.notify()
                return
        self._discard(link)

    def _discard(self, link: Link, *, lost: bool = False) -> None:
        link.close(lost=lost)
        self._lost()

    def _lost(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()
