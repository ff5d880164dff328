"""The consumer: the part of a worker that lives as long as one connection.

Its blueprint starts with a connection and ends in a loop. When the connection is lost all of it
is stopped and started again; the pool and what runs in it stay.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import resource
import time
from typing import TYPE_CHECKING, Any

from kombu import Connection
from kombu import Consumer as KombuConsumer

from umbel.broker.redis.ledger import Ledger
from umbel.broker.sessions.connections import addresses, masked
from umbel.broker.sessions.permanent import permanent, refused_consumer
from umbel.broker.sessions.session import opened
from umbel.broker.tasks.origins import Origins
from umbel.broker.tasks.task_channel import task_channel
from umbel.cluster.backoff import Backoff
from umbel.worker.blueprint import Blueprint
from umbel.worker.runtime.errors import BrokerRefuses, BrokerUnreachable, ConnectionFailed
from umbel.worker.runtime.leaving import Leaving
from umbel.worker.runtime.returns import Returns
from umbel.worker.runtime.steps import CONSUMER_STEPS

if TYPE_CHECKING:
    from umbel.worker.membership.gossip import Gossip
    from umbel.worker.runtime.naming import Naming
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.consumer")

# A broker that comes back is found within the second of these.
RETRY = Backoff(0.5, 3.0)
# Connections that break within so many seconds are rebuilt with growing pauses, after a few.
LASTING_S, SHORT_LIVES_FREE = 1.0, 5
DAMP = Backoff(0.1, 1.6)


class Consumer:
    """Consumes the queues of one worker."""

    connection: Connection | None = None
    channel: Any = None
    tasks: KombuConsumer | None = None
    naming: Naming
    agent: Any = None  # the user's

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.app = worker.app
        # Refused, if at all, before the embedded broker is joined.
        self.blueprint = Blueprint("consumer", [*CONSUMER_STEPS, *self.app.steps["consumer"]])
        probe = self.app.connection()
        self.connection_errors: tuple[type[BaseException], ...] = (
            *probe.connection_errors,
            *probe.channel_errors,
            ConnectionFailed,
        )
        self.returns = Returns(self)
        self.leaving = Leaving(self)
        self.limits_consumers = False  # not the channel, see `worker.deliveries.prefetch`
        self.credit_reported = False
        self.origins = Origins()
        self.failure: BaseException | None = None
        self.lost = False
        self.ledger = Ledger()
        self.last_sign = time.monotonic()  # of life from the broker
        self._short_lives = 0
        self.blueprint.create(self)
        self._connected_before = False

    def run(self) -> None:
        """Consume until the worker is asked to stop."""
        worker = self.worker
        worker.driver.keep_timers()
        while not worker.stop_wanted.is_set():
            self.failure, self.lost = None, False
            began = time.monotonic()
            try:
                self.blueprint.start(self)
            except self.connection_errors as exc:
                self.lost = True
                self._on_lost(exc)
            finally:
                worker.ready_now = False
                if worker.stop_wanted.is_set():
                    self.leaving.begin()
                self.blueprint.stop(self, terminate=worker.cold)
                self.returns.close()
                self.leaving.lift()
            if self.lost:
                self._damp(time.monotonic() - began)
        self._take_leave()

    def _take_leave(self) -> None:
        """The worker stops while it has no connection: what outlived the last one is to end.

        Without a dispatcher it has ended already, with a connection.
        """
        self.lost = False
        for name in ("Heart", "Gossip", "Events") if self.worker.events is not None else ():
            with contextlib.suppress(KeyError):  # switched off
                step = self.blueprint.step(name)
                step.terminate(self) if self.worker.cold else step.stop(self)

    def _on_lost(self, exc: BaseException) -> None:
        self.worker.counters.connections_lost += 1
        self.worker.driver.connection_lost()
        self.returns.connection_lost()
        fatal_if_no_files(exc)
        cause = refused_consumer(exc)
        if cause is not None and not cause.login:
            goes_on = self.worker.consumption.leave_out(cause) or cause.may_pass
            if not goes_on:
                self.give_up(f"{self.url} refuses what this worker needs: {cause}")
        if not self.app.conf.broker_connection_retry:
            raise BrokerUnreachable(
                f"the connection to {self.url} was lost: {_plain(exc)}; "
                "broker_connection_retry is off"
            ) from exc
        known = self.worker.consumer_timeout.explain(exc)
        if known is not None:
            logger.warning("%s", known)
            return
        again = "" if self.worker.stop_wanted.is_set() else ". Reconnecting"
        logger.warning("Connection to %s lost: %s%s", self.url, _plain(exc), again)

    def give_up(self, why: str) -> None:
        """The broker refuses for good; raises `BrokerRefuses`, or lets the caller ask again."""
        if not self.app.conf.broker_channel_error_retry:
            raise BrokerRefuses(why)
        logger.error("%s Connecting again.", why)

    def _damp(self, lived_s: float) -> None:
        """A connection that does not last is not rebuilt as fast as it breaks."""
        if lived_s >= LASTING_S:
            self._short_lives = 0
            return
        self._short_lives += 1
        if self._short_lives > SHORT_LIVES_FREE:
            self.worker.stop_wanted.wait(DAMP.pause_s(self._short_lives - SHORT_LIVES_FREE))

    @property
    def url(self) -> str:
        """The broker's address as it may be shown."""
        return masked(self.app.read_url)

    @property
    def gossip(self) -> Gossip:
        """The worker's view of the other nodes, where steps of Celery look for it."""
        return self.worker.gossip

    def told_queue(self, message: Any) -> str | None:
        """The queue that a message came from, if that can be told without asking the broker."""
        queues = self.app.queues
        return self.origins.told(message, self.tasks, lambda: queues.consumed)

    # -- single queues: may ask the broker, so not while a message is being received ----

    def queue_of(self, message: Any) -> str | None:
        """The queue that a message came from, as far as that can be told."""
        return self.origins.queue_of(message, self.tasks, self.app.queues.consumed)

    def can_rest(self, name: str) -> bool:
        """Whether a queue is still there after a while without consumers."""
        queue = self.app.queues.consumed.get(name)
        if queue is None or self.tasks is None:
            return False
        expires = queue.expires or (queue.queue_arguments or {}).get("x-expires")
        return not (queue.auto_delete or expires)

    def length_of(self, name: str) -> int | None:
        """How many messages lie in this queue, where that is known."""
        return task_channel(self.channel).length_of(name)

    def rest(self, name: str) -> None:
        """Take nothing from this queue until `resume`, or until the connection is another."""
        if self.tasks is not None:
            self.tasks.cancel_by_queue(name)

    def resume(self, name: str) -> None:
        """Take from this queue again, if it is still to be consumed."""
        queue = self.app.queues.consumed.get(name)
        if name in self.worker.consumption.paused:
            return  # somebody wants it to rest longer
        if self.tasks is not None and queue is not None and not self.worker.stop_wanted.is_set():
            self.tasks.add_queue(queue)
            self.tasks.consume()

    # -- connecting --------------------------------------------------------------------

    def connect(self) -> Connection | None:
        """Open a connection, asking again until it works; None when the worker is to stop."""
        conf, worker = self.app.conf, self.worker
        again = self._connected_before
        retry = conf.broker_connection_retry if again else conf.broker_connection_retry_on_startup
        retry = conf.broker_connection_retry if retry is None else retry
        limit = conf.broker_connection_max_retries
        attempt = 0
        while not worker.stop_wanted.is_set():
            worker.last_turn = time.monotonic()  # who waits for a broker is alive
            connection = self.app.connection()
            try:
                opened(connection)
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                fatal_if_no_files(exc)
                attempt += 1
                self._refused(exc, attempt, retry, limit)
                continue
            self._connected_before = True
            return connection
        return None

    def _refused(self, exc: Exception, attempt: int, retry: bool, limit: int | None) -> None:
        cause = permanent(exc)
        alone = len(addresses(self.app.read_url)) == 1  # others may accept us
        if cause is not None and alone and not self._connected_before:
            raise BrokerRefuses(f"cannot connect to {self.url}: {cause}") from None
        if not retry or (limit and attempt > limit) or isinstance(exc, PermissionError):
            raise BrokerUnreachable(
                f"cannot connect to {self.url}: {_plain(exc)} (tried {attempt} times)"
            ) from None
        delay_s = RETRY.pause_s(attempt, random.random())  # noqa: S311 - no secret
        logger.error(
            "Cannot connect to %s (%s). Retrying in %.1f s",
            self.url, _plain(exc) if cause is None else cause, delay_s,
        )  # fmt: skip
        self.worker.stop_wanted.wait(delay_s)


def fatal_if_no_files(exc: BaseException) -> None:
    """Without file descriptors nothing gets better by trying again: say so and end."""
    cause: BaseException | None = exc
    while cause is not None:
        if getattr(cause, "errno", None) in (errno.EMFILE, errno.ENFILE):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise BrokerUnreachable(
                f"too many open files (the limit is {soft}, at most {hard}): raise it with "
                "'ulimit -n', or lower the concurrency"
            ) from exc
        cause = cause.__cause__ or cause.__context__


def _plain(exc: BaseException) -> str:
    text = " ".join(str(exc).split()).rstrip(".")
    return text or type(exc).__name__
