"""DelayedDelivery: lets RabbitMQ keep the eta of tasks on quorum queues."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from umbel.broker.sessions.connections import addresses, driver, masked
from umbel.broker.sessions.session import opened
from umbel.broker.tasks import delayed
from umbel.cluster.backoff import Backoff
from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from kombu import Connection

    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.options import WorkerOptions

logger = logging.getLogger("umbel.consumer")

RETRY = Backoff(1.0, 10.0)


class DelayedDeliveryStep(Step):
    """Declares the ladder of queues on the broker; until that works the worker is not ready."""

    name = "DelayedDelivery"
    requires = ("Tasks",)

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """On where a quorum queue is declared and nobody switched the detection off."""
        if not app.conf.worker_detect_quorum_queues:
            return "worker_detect_quorum_queues"
        return "" if delayed.any_quorum(app.queues.values()) else "no quorum queue"

    def start(self, parent: Consumer) -> None:
        """Declare on the broker that we are connected to, then on those we may fail over to."""
        connection = parent.connection
        if connection is None or driver(connection) != "amqp":
            return
        queues = list(parent.app.queues.consumed.values())
        for name in delayed.unsupported(queues):
            logger.warning(
                "queue %s has a direct exchange, which can not delay messages: tasks with an eta "
                "wait in the worker; give the queue a topic exchange",
                name,
            )
        self._declare_here(parent, connection, queues)
        self._declare_elsewhere(parent.app, connection.as_uri(), queues)

    def _declare_here(self, parent: Consumer, connection: Connection, queues: list[Any]) -> None:
        kind = parent.app.conf.broker_native_delayed_delivery_queue_type
        stop, attempt = parent.worker.stop_wanted, 0
        while not stop.is_set():
            try:
                delayed.declare(connection, queues, kind)
                return
            except connection.connection_errors:
                raise
            except Exception as exc:  # noqa: BLE001 - said in full, and tried again
                attempt += 1
                pause_s = RETRY.pause_s(attempt)
                logger.error(
                    "delayed delivery can not be set up on %s: %s; this worker is not ready. "
                    "Delete the queues celery_delayed_* if they were declared otherwise, or set "
                    "worker_detect_quorum_queues=False to let tasks with an eta wait in the "
                    "worker. Trying again in %.0f s",
                    parent.url, exc, pause_s,
                )  # fmt: skip
                parent.worker.last_turn = time.monotonic()  # it waits for its broker: alive
                stop.wait(pause_s)

    @staticmethod
    def _declare_elsewhere(app: Umbel, current: str, queues: list[Any]) -> None:
        # Nobody consumes there now: a queue that ends with its consumer would never end.
        lasting = [queue for queue in queues if not (queue.auto_delete or queue.exclusive)]
        for url in addresses(app.read_url):
            connection = app.connection(url)
            if connection.as_uri() == current:
                continue
            try:
                with opened(connection):
                    for queue in lasting:
                        queue(connection.default_channel).declare()
                    kind = app.conf.broker_native_delayed_delivery_queue_type
                    delayed.declare(connection, lasting, kind)
            except Exception as exc:  # noqa: BLE001 - said in full
                # Declared when we fail over to it; until then its clients lack it.
                logger.warning("delayed delivery is not set up on %s: %s", masked(url), exc)
