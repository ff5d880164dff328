"""Tasks: consumes the task queues."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import Any

from kombu import Consumer

from umbel.broker import delayed, leases
from umbel.broker.connections import driver
from umbel.broker.messages import leave_compressed
from umbel.worker.blueprint import Step
from umbel.worker.delivery.prefetch import AMQP_WINDOW_MAX, Limit

logger = logging.getLogger("umbel.consumer")

LEASE_RENEWAL_MAX_S = 60.0


class TasksStep(Step):
    """Declares the queues and prepares a consumer of them."""

    name = "Tasks"
    requires = ("Connection",)

    def start(self, parent: Any) -> None:
        """Prepare to consume; the window is set first, so that the broker never sends too much."""
        worker = parent.worker
        channel = parent.channel = parent.connection.channel()
        leave_compressed(channel)
        _prepare(channel, parent)
        worker.driver.connection_back(channel)
        worker.consumption.declare()
        parent.tasks = Consumer(
            channel,
            queues=worker.consumption.queues,
            on_message=worker.receiver,
            on_decode_error=worker.receiver.undecodable,
            accept=None,
            no_ack=False,
            auto_declare=False,
        )
        is_amqp = driver(parent.connection) == "amqp"
        prefetch = worker.deliveries.prefetch
        prefetch.window_max = AMQP_WINDOW_MAX if is_amqp else None
        prefetch.forget_sent()
        parent.limits_consumers = False
        self.apply_prefetch(parent)
        self._keep_leases(parent)
        worker.consumer_timeout.begin(parent)

    @staticmethod
    def consume(parent: Any) -> None:
        """Ask for messages: when the loop begins, so that a worker which is not ready has none."""
        parent.tasks.consume()
        parent.worker.consumption.report_consumed()

    @staticmethod
    def _keep_leases(parent: Any) -> None:
        """What we hold must not be given to somebody else because it takes long."""
        channel, worker = parent.channel, parent.worker
        term_s = leases.lease_s(channel)
        if term_s is None:
            return

        def renew() -> None:
            held = worker.deliveries.unsettled()
            leases.renew(channel, (one.message.delivery_tag for one in held))

        worker.timer.call_repeatedly(min(term_s / 3, LEASE_RENEWAL_MAX_S), renew)

    @staticmethod
    def apply_prefetch(parent: Any) -> None:
        """Tell the broker how many messages we want at once."""
        prefetch = parent.worker.deliveries.prefetch
        # Messages that arrive while the broker is told may change the window again.
        while prefetch.is_due:
            prefetch.apply(partial(_ask_for, parent))

    def stop(self, parent: Any) -> None:
        """Consume no more and close the channel, which gives back what is not acknowledged."""
        tasks, parent.tasks = parent.tasks, None
        channel, parent.channel = parent.channel, None
        parent.worker.consumer_timeout.end()
        parent.worker.consumption.end()
        if parent.lost:
            return  # there is nobody to say it to, and the answer could be waited for in vain
        if hasattr(channel, "flush_acks"):
            with contextlib.suppress(Exception):
                channel.flush_acks()
        if tasks is not None:
            with contextlib.suppress(Exception):
                tasks.cancel()
        if channel is not None:
            with contextlib.suppress(Exception):
                channel.close()
            if getattr(channel, "is_lost", False):
                parent.lost = True  # the other steps need not find out, one after the other


def _prepare(channel: Any, parent: Any) -> None:
    """What channels are told that can do more than they must."""
    if hasattr(channel, "auto_decode"):  # of bodies, on AMQP: who receives them takes bytes
        channel.auto_decode = False
    if hasattr(channel, "use"):
        channel.use(parent.ledger)
    if hasattr(channel, "receiver"):  # kombu's consumer would only pass them on
        channel.receiver = parent.worker.receiver
    if not parent.worker.inline:
        if hasattr(channel, "gather_acks"):
            channel.gather_acks()
    elif hasattr(channel, "send_acks_at_once"):  # a task runs there before the loop turns
        channel.send_acks_at_once()


def _ask_for(parent: Any, limit: Limit) -> None:
    """Set how many messages may be here: for the channel, at any time, or for its consumers.

    Quorum queues accept limits of consumers only. These hold for consumers made later, so they are
    made anew; so they are when a limit of theirs is lifted.
    """
    tasks, prefetch = parent.tasks, parent.worker.deliveries.prefetch
    if hasattr(parent.channel, "slack"):  # more than this many need not be here
        parent.channel.slack = max(0, prefetch.base - prefetch.concurrency)
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


def _any_quorum(parent: Any) -> bool:
    conf, queues = parent.app.conf, parent.app.queues
    return conf.worker_detect_quorum_queues and delayed.any_quorum(queues.consumed.values())
