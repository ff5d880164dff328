"""Tasks: consumes the task queues."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from kombu import Consumer as KombuConsumer

from umbel.broker.sessions.connections import driver
from umbel.broker.tasks import delayed
from umbel.broker.tasks.task_channel import TaskChannel, task_channel
from umbel.worker.blueprint import Step
from umbel.worker.delivery.prefetch import AMQP_WINDOW_MAX, Limit

if TYPE_CHECKING:
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.consumer")

LEASE_RENEWAL_MAX_S = 60.0


class TasksStep(Step):
    """Declares the queues and prepares a consumer of them."""

    name = "Tasks"
    requires = ("Connection",)

    def start(self, parent: Consumer) -> None:
        """Prepare to consume; the window is set first, so that the broker never sends too much."""
        worker, connection = parent.worker, parent.connection
        assert connection is not None
        parent.channel = connection.channel()
        channel = task_channel(parent.channel)
        channel.leave_compressed()
        # Where tasks run on the loop, one runs before the loop turns.
        channel.take_tasks(worker.receiver, parent.ledger, acks_at_once=worker.pool.blocks_loop)
        worker.driver.connection_back(parent.channel)
        worker.consumption.declare()
        parent.tasks = KombuConsumer(
            parent.channel,
            queues=worker.consumption.queues,
            on_message=worker.receiver,
            on_decode_error=worker.receiver.undecodable,
            accept=None,
            no_ack=False,
            auto_declare=False,
        )
        is_amqp = driver(connection) == "amqp"
        worker.deliveries.prefetch.window_max = AMQP_WINDOW_MAX if is_amqp else None
        worker.deliveries.prefetch.forget_sent()
        parent.limits_consumers = False
        self.apply_prefetch(parent)
        self._keep_leases(worker, channel)
        worker.consumer_timeout.begin(parent)

    @staticmethod
    def consume(parent: Consumer) -> None:
        """Ask for messages: when the loop begins, so that a worker which is not ready has none."""
        assert parent.tasks is not None
        parent.tasks.consume()
        parent.worker.consumption.report_consumed()

    @staticmethod
    def _keep_leases(worker: Worker, channel: TaskChannel) -> None:
        """What we hold must not be given to another worker because it takes long."""

        def renew() -> None:
            held = worker.deliveries.unsettled()
            channel.renew(one.message.delivery_tag for one in held)

        if channel.lease_s is not None:
            interval_s = min(channel.lease_s / 3, LEASE_RENEWAL_MAX_S)
            worker.timer.call_repeatedly(interval_s, renew)

    @staticmethod
    def apply_prefetch(parent: Consumer) -> None:
        """Tell the broker how many messages we want at once."""
        prefetch = parent.worker.deliveries.prefetch
        # Messages that arrive while the broker is told may change the window again.
        while prefetch.is_due:
            prefetch.apply(partial(_ask_for, parent))

    def stop(self, parent: Consumer) -> None:
        """Consume no more and close the channel, which gives back what is not acknowledged."""
        tasks, parent.tasks = parent.tasks, None
        channel, parent.channel = parent.channel, None
        parent.worker.consumer_timeout.end()
        parent.worker.consumption.end()
        if parent.lost:
            return  # nobody is there to answer
        closing = task_channel(channel)
        with contextlib.suppress(Exception):
            closing.flush_acks()
        if tasks is not None:
            with contextlib.suppress(Exception):
                tasks.cancel()
        if channel is not None:
            with contextlib.suppress(Exception):
                channel.close()
        if closing.is_lost:
            parent.lost = True  # the other steps need not find out, one after the other


def _ask_for(parent: Consumer, limit: Limit) -> None:
    """Set how many messages may be here: for the channel, at any time, or for its consumers.

    Quorum queues accept limits of consumers only. These hold for consumers made later, so they are
    made anew; so they are when a limit of theirs is lifted.
    """
    tasks, prefetch = parent.tasks, parent.worker.deliveries.prefetch
    assert tasks is not None
    task_channel(parent.channel).slack = max(0, prefetch.base - prefetch.concurrency)
    quorum = _any_quorum(parent)
    per_consumer = limit.per_consumer or quorum
    anew = per_consumer or parent.limits_consumers
    running = anew and any(tasks.consuming_from(queue) for queue in tasks.queues)
    if running:
        tasks.cancel()
    if anew:
        tasks.qos(prefetch_count=limit.count if per_consumer else 0)
    if not quorum:
        tasks.qos(prefetch_count=0 if per_consumer else limit.count, apply_global=True)
    if running:
        tasks.consume()
    parent.limits_consumers = per_consumer
    if limit.per_consumer and not parent.credit_reported:
        parent.credit_reported = True
        logger.warning(
            "This worker holds more than %d messages that wait for their eta or a rate limit, the "
            "most that AMQP can express as a prefetch count. It goes on with a limit for each "
            "consumer. Set worker_eta_task_limit to hold fewer.",
            AMQP_WINDOW_MAX - prefetch.own,
        )


def _any_quorum(parent: Consumer) -> bool:
    conf, queues = parent.app.conf, parent.app.queues
    return conf.worker_detect_quorum_queues and delayed.any_quorum(queues.consumed.values())
