"""The consumer: the part of a worker that lives as long as one connection.

Its blueprint starts with a connection and ends in a loop. When the connection is lost all of it
is stopped and started again; the pool and what runs in it stay.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from typing import TYPE_CHECKING, Any

from kombu import Connection
from kombu import Consumer as KombuConsumer

from umbel.broker.connections import masked
from umbel.worker.blueprint import Blueprint
from umbel.worker.errors import BrokerUnreachable, ConnectionFailed
from umbel.worker.steps import CONSUMER_STEPS

if TYPE_CHECKING:
    from umbel.broker.taking import Taker
    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.consumer")

RETRY_MIN_S, RETRY_MAX_S = 1.0, 32.0


class Consumer:
    """Consumes the queues of one worker."""

    connection: Connection | None = None
    channel: Any = None
    tasks: KombuConsumer | None = None
    taker: Taker | None = None

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.app = worker.app
        probe = self.app.connection()
        self.connection_errors: tuple[type[BaseException], ...] = (
            *probe.connection_errors,
            *probe.channel_errors,
            ConnectionFailed,
        )
        self.failure: BaseException | None = None
        self.blueprint = Blueprint("consumer", [*CONSUMER_STEPS, *self.app.steps["consumer"]])
        self.blueprint.create(self)
        self._connected_before = False

    def run(self) -> None:
        """Consume until the worker is asked to stop."""
        worker = self.worker
        while not worker.stop_wanted.is_set():
            try:
                self.failure = None
                self.blueprint.start(self)
            except self.connection_errors as exc:
                if getattr(exc, "errno", None) == errno.EMFILE:
                    raise
                if not self.app.conf.broker_connection_retry:
                    raise BrokerUnreachable(
                        f"the connection to {self.url} was lost: {exc}; "
                        "broker_connection_retry is off"
                    ) from exc
                logger.warning("connection to %s lost: %s; reconnecting", self.url, _plain(exc))
                worker.deliveries_void()
            finally:
                worker.ready_now = False
                self.blueprint.stop(self)

    @property
    def url(self) -> str:
        """The broker's address as it may be shown."""
        return masked(self.app.read_url)

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
                connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                connection.close()
                attempt += 1
                self._refused(exc, attempt, retry, limit)
                continue
            self._connected_before = True
            return connection
        return None

    def _refused(self, exc: Exception, attempt: int, retry: bool, limit: int | None) -> None:
        permanent = (PermissionError,) if not isinstance(exc, ConnectionError) else ()
        if not retry or (limit and attempt > limit) or isinstance(exc, permanent):
            raise BrokerUnreachable(
                f"cannot connect to {self.url}: {_plain(exc)} (tried {attempt} times)"
            ) from None
        ceiling_s = min(RETRY_MIN_S * 2 ** min(attempt - 1, 10), RETRY_MAX_S)
        delay_s = random.uniform(ceiling_s / 2, ceiling_s)  # noqa: S311 - no secret
        logger.error(
            "cannot connect to %s: %s; trying again in %.1f s", self.url, _plain(exc), delay_s
        )
        self.worker.stop_wanted.wait(delay_s)


def _plain(exc: BaseException) -> str:
    text = " ".join(str(exc).split())
    return text or type(exc).__name__
