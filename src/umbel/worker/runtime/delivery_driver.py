"""Carries out what the machine of `umbel.worker.delivery` decides.

A `TaskDelivery` is the pool's watcher of its own execution, called on the loop thread.
`DeliveryDriver` is the effects of the machine: it settles messages, hands jobs to the pool, stores
results on the side thread, logs, and sends events.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, cast

from umbel.app.declaring import parse_rate
from umbel.app.trace import fail
from umbel.broker.tasks.task_channel import put_back, task_channel
from umbel.exceptions import BackendError, TaskRevokedError, TimeLimitExceeded, WorkerLostError
from umbel.wire import limits as caps
from umbel.wire.limits import Refusal
from umbel.wire.reprs import safe_repr
from umbel.wire.times import parse_time
from umbel.worker.delivery.effects import ACK, COPIED, REJECT, REQUEUE, RETURN, Delivery, Timer
from umbel.worker.delivery.machine import Deliveries
from umbel.worker.delivery.prefetch import Prefetch
from umbel.worker.delivery.states import MessageState, State
from umbel.worker.execution.pools.base import Submission
from umbel.worker.execution.runner import UNDECODABLE

if TYPE_CHECKING:
    from datetime import datetime

    from umbel.app.context import Context
    from umbel.wire.tasks import TaskBody, TaskHeader
    from umbel.worker.execution.jobs import Job, JobResult
    from umbel.worker.runtime.strategy import Strategy
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.request")
worker_logger = logging.getLogger("umbel.worker")
rates_logger = logging.getLogger("umbel.rates")

_RECEIVED, _OURS = State.RECEIVED, MessageState.OURS
_SETTLE: dict[str, Callable[[Any], object]] = {
    ACK: methodcaller("ack"),
    REJECT: methodcaller("reject", requeue=False),
    REQUEUE: methodcaller("reject", requeue=True),
    RETURN: put_back,
    COPIED: methodcaller("ack"),
}


class TaskDelivery(Delivery):
    """A delivery with its job, as the pool, events and commands see it."""

    __slots__ = ("accepted_at", "driver", "job", "name", "pid", "queue", "received_at")

    policy: Strategy

    def __init__(
        self, driver: DeliveryDriver, strategy: Strategy, message: Any, header: TaskHeader,
        job: Job,
    ) -> None:  # fmt: skip
        # Not through `super().__init__`, for speed: one is made for every message.
        self.policy, self.message, self.header = strategy, message, header
        self.redelivered = job.redelivered
        self.eta_s = self.expires_s = self.timer = None
        self.state, self.message_state = _RECEIVED, _OURS
        self.era = 0
        self.owed = self.cancelled = False
        self.driver = driver
        self.job = job
        self.name = header.shadow or header.task
        self.pid: int | None = None
        self.queue: str | None = None  # that it came from, where events say it
        self.received_at: float | None = None  # where it is measured
        self.accepted_at: float | None = None

    @property
    def eta(self) -> datetime | None:
        """When it may begin, as its sender wrote it."""
        text = self.header.eta
        return None if text is None else parse_time(text, self.policy.zone)

    def __repr__(self) -> str:
        return f"<TaskDelivery: {self.name}[{self.id}]>"

    # -- what the pool reports, on the loop thread -------------------------------------

    def accepted(self, pid: int, when: float) -> None:
        """Execution begins."""
        self.driver.began(self, pid, when)

    def finished(self, result: JobResult) -> None:
        """Execution ended by itself."""
        self.driver.ended(self, result)

    def ran(self, pid: int, when: float, result: JobResult) -> None:
        """Execution began, and ended by itself."""
        try:
            self.driver.began(self, pid, when)
        finally:
            self.driver.ended(self, result)

    def unfit(self, exc: Exception) -> None:
        """The pool cannot take it."""
        self.driver.unfit(self, exc)

    def soft_limit(self, limit_s: float) -> None:
        """The soft time limit has passed."""
        logger.warning("Soft time limit (%ss) exceeded for %s[%s]", limit_s, self.name, self.id)

    def hard_limit(self, limit_s: float) -> None:
        """The hard time limit has passed."""
        self.driver.hard_limit(self, limit_s)

    def lost(self, reason: str) -> None:
        """The process died."""
        self.driver.lost(self, reason)

    def terminated(self, signum: int) -> None:
        """Somebody ended it."""
        self.driver.terminated(self, signum)


class DeliveryDriver:
    """The machine of one worker, and its effects."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._app = worker.app
        self.hostname = worker.plan.hostname
        self._lasting: list[Any] = []  # timers that outlive connections
        plan, conf = worker.plan, worker.app.conf
        self.machine: Deliveries[TaskDelivery] = Deliveries(
            self,
            Prefetch(plan.concurrency, plan.prefetch_multiplier, conf.worker_eta_task_limit),
            worker.revocations,
            parked_max=conf.worker_parked_task_limit,
            clock=time.monotonic,
            wall=time.time,
            is_stopping=worker.stop_wanted.is_set,
        )

    def set_rate_limit(self, name: str, rate: str | float | None) -> None:
        """Limit a task type, or lift its limit with 0 or None; ValueError for a bad rate."""
        self.machine.limits.set(name, parse_rate(rate))

    # -- messages ------------------------------------------------------------------------

    def settle(self, message: Any, how: str) -> bool:
        """Settle a message; false if its connection turned out to be lost."""
        try:
            _SETTLE[how](message)
        except self._worker.connection_errors as exc:
            headers = message.headers or {}
            worker_logger.warning(
                "Cannot settle the message of task %.200s[%.200s] (%s): %s",
                headers.get("task"), headers.get("id"), how, exc,
            )  # fmt: skip
            self.connection_broken(exc, message)
            return False
        return True

    def connection_broken(self, exc: BaseException, message: Any) -> None:
        """Settling a message found the connection broken: rebuild it, unless that was done."""
        consumer = self._worker.consumer
        if message.channel is consumer.channel:
            consumer.failure = exc

    def adopt(self, message: Any) -> None:
        """Let a message of a lost connection be settled on the present one."""
        task_channel(self._worker.consumer.channel).adopt(message)

    def put_back(self, message: Any) -> None:
        """Give a message of a lost connection back to its queue, as the next to be delivered."""
        task_channel(self._worker.consumer.channel).put_back(message)

    def return_behind(self, delivery: TaskDelivery) -> None:
        """Give a message back behind the others of its queue."""
        self._worker.consumer.returns.add(delivery)

    def connection_lost(self) -> None:
        """The connection is gone."""
        worker, conf = self._worker, self._app.conf
        task_channel(worker.consumer.channel).disown()
        self.machine.connection_lost(
            cancel=conf.worker_cancel_long_running_tasks_on_connection_loss
            and not worker.pool.blocks_loop,
            reduce=conf.worker_enable_prefetch_count_reduction,
        )

    def connection_back(self, channel: Any) -> None:
        """There is a new channel."""
        self.machine.connection_back(tied=task_channel(channel).lease_s is None)

    # -- the pool ------------------------------------------------------------------------

    def fill_pool(self, ready: Iterator[TaskDelivery]) -> None:
        """Hand deliveries to the pool, as many as it has room for."""
        self._worker.pool.fill(self._submissions(ready))

    def _submissions(self, ready: Iterator[TaskDelivery]) -> Iterator[Submission]:
        forward, by_task = self._app.clock.forward, self._worker.counters.by_task
        measured = self._worker.task_events.on
        told = measured or logger.isEnabledFor(logging.INFO)
        for delivery in ready:
            strategy, header, job = delivery.policy, delivery.header, delivery.job
            job.clock = forward()
            job.told = told
            if measured:
                job.measured = strategy.tells
            by_task[header.task] += 1
            soft_s, hard_s = strategy.limits(header)
            yield job, delivery, soft_s, hard_s, strategy.typical_s

    def recall(self) -> Sequence[TaskDelivery]:
        """Take deliveries that have not begun out of the pool, oldest first."""
        return cast("list[TaskDelivery]", self._worker.pool.recall())

    def cancel(self, delivery: TaskDelivery) -> None:
        """End a running task whose message will be delivered again."""
        worker_logger.warning(
            "Task %s[%s] is cancelled: its message will be delivered again",
            delivery.name, delivery.id,
        )  # fmt: skip
        if self._worker.task_events.on:
            self._worker.task_events.cancelled(delivery)
        self._worker.pool.cancel(delivery.id, signal.SIGTERM)

    # -- what the pool has reported; on the loop thread ------------------------------------

    def began(self, delivery: TaskDelivery, pid: int, when: float) -> None:
        """Its code begins, at `when` of the monotonic clock."""
        worker = self._worker
        delivery.pid, delivery.accepted_at = pid, when
        worker.counters.started += 1
        if worker.task_events.on:
            worker.task_events.started(delivery, when)
        if worker.metrics is not None:
            worker.metrics.started(delivery, when)
        self.machine.began(delivery)

    def ended(self, delivery: TaskDelivery, result: JobResult) -> None:
        """Its code has ended by itself."""
        worker, state = self._worker, result.state
        worker.counters.finished += 1
        try:
            delivery.policy.took(result.runtime_s)
            if result.clock > self._app.clock.value:
                self._app.clock.adjust(result.clock)
            if worker.task_events.on:
                worker.task_events.finished(delivery, result)
            if worker.metrics is not None:
                worker.metrics.finished(delivery, state, result.runtime_s)
        finally:
            if state == "SUCCESS":
                self.machine.ended(delivery, ACK)
            else:
                self._ended_otherwise(delivery, result)
        if state == "SUCCESS" and logger.isEnabledFor(logging.INFO):
            logger.info(
                "Task %s[%s] succeeded in %.6fs: %s",
                delivery.name, delivery.id, result.runtime_s, result.text,
            )  # fmt: skip

    def _ended_otherwise(self, delivery: TaskDelivery, result: JobResult) -> None:
        worker, state = self._worker, result.state
        if state == UNDECODABLE:
            self.machine.failed(delivery)
            refusal = Refusal(result.detail, result.text)
            worker.receiver.refuse(delivery.message, refusal, delivery)
            return
        how = ACK
        if state == "FAILURE":
            how = self.machine.how_failed(delivery)
            if how == REJECT and worker.task_events.on:
                worker.task_events.rejected(delivery, requeue=False)
        elif state == "REJECTED":
            how = REQUEUE if result.requeue else REJECT
        self.machine.ended(delivery, how)
        self._log_end(delivery, result)

    @staticmethod
    def _log_end(delivery: TaskDelivery, result: JobResult) -> None:
        name, state = (delivery.name, delivery.id), result.state
        if state == "FAILURE":
            logger.error(
                "Task %s[%s] raised unexpected: %s\n%s", *name, result.text, result.traceback
            )
        elif state == "RETRY":
            logger.info("Task %s[%s] retry: %s", *name, result.text)
        elif state == "REJECTED":
            logger.warning("Task %s[%s] rejected: %s", *name, result.text)
        else:
            assert state == "IGNORED", f"unknown result {state!r}"
            logger.info("Task %s[%s] ignored", *name)

    def unfit(self, delivery: TaskDelivery, exc: Exception) -> None:
        """The pool could not take it."""
        self._worker.counters.finished += 1
        logger.error("task %s[%s] could not be started", delivery.name, delivery.id, exc_info=exc)
        self._failed(delivery, exc)

    def hard_limit(self, delivery: TaskDelivery, limit_s: float) -> None:
        """Its hard time limit has passed."""
        self._worker.counters.finished += 1
        logger.error(
            "Hard time limit (%ss) exceeded for %s[%s]", limit_s, delivery.name, delivery.id
        )
        self._failed(delivery, TimeLimitExceeded(limit_s))

    def lost(self, delivery: TaskDelivery, reason: str) -> None:
        """Its process died."""
        worker = self._worker
        worker.counters.finished += 1
        if not self.machine.child_lost(delivery):
            logger.error(
                "Task %s[%s]: its process ended with %s", delivery.name, delivery.id, reason
            )
            self._failed(delivery, WorkerLostError(f"Worker exited prematurely: {reason}."))
            return
        logger.error(
            "Task %s[%s]: its process ended with %s; it goes back to its queue",
            delivery.name, delivery.id, reason,
        )  # fmt: skip
        if worker.metrics is not None:
            worker.metrics.finished(delivery, "REQUEUED")
        if worker.task_events.on:
            worker.task_events.rejected(delivery, requeue=True)

    def terminated(self, delivery: TaskDelivery, signum: int) -> None:
        """Somebody ended it."""
        self._worker.counters.finished += 1
        if self.machine.terminated(delivery, signum):
            name = signal.Signals(signum).name
            logger.warning("Task %s[%s] terminated (%s)", delivery.name, delivery.id, name)
        elif self._worker.metrics is not None:
            self._worker.metrics.finished(delivery, "CANCELLED")

    # -- results that are stored here ---------------------------------------------------

    def _failed(self, delivery: TaskDelivery, exc: Exception) -> None:
        """Store FAILURE and settle the message as that of a failed task."""
        worker = self._worker

        def done() -> None:
            how = self.machine.how_failed(delivery)
            if worker.task_events.on:
                text = delivery.policy.redaction.text(safe_repr(exc))
                worker.task_events.failed(delivery, text, "")
                if how == REJECT:
                    worker.task_events.rejected(delivery, requeue=False)
            self.machine.stored(delivery, how)

        if worker.metrics is not None:
            worker.metrics.finished(delivery, "FAILURE")
        self.machine.failed(delivery)
        worker.aside(
            lambda: fail(self._app, delivery.policy.task, self.context(delivery), exc), done
        )

    def refused(self, delivery: TaskDelivery, refusal: Refusal) -> None:
        """The refusal of its body is stored."""
        worker = self._worker
        how = ACK if refusal.reason == caps.UNDECODABLE else REJECT
        if worker.task_events.on:
            worker.task_events.failed(delivery, refusal.text, "")
            if how == REJECT:
                worker.task_events.rejected(delivery, requeue=False)
        self.machine.stored(delivery, how)

    def store_revoked(self, delivery: TaskDelivery, why: str, signum: int | None) -> None:
        """Store REVOKED, then acknowledge the message."""
        worker = self._worker

        def done() -> None:
            self.machine.stored(delivery, ACK)
            if worker.task_events.on:
                worker.task_events.revoked(delivery, why, signum)

        if signum is None:
            logger.info("Discarding %s task: %s[%s]", why, delivery.name, delivery.id)
        if worker.metrics is not None:
            worker.metrics.finished(delivery, "REVOKED")
        worker.aside(partial(self._store_revoked, delivery, why), done)

    def _store_revoked(self, delivery: TaskDelivery, why: str) -> None:
        request, backend = self.context(delivery), self._app.backend
        ignored = request.ignore_result
        if not (delivery.policy.task.ignores_result if ignored is None else ignored):
            backend.store(delivery.id, TaskRevokedError(why), "REVOKED", request=request)
        if request.chord:
            backend.chord_part(request, "REVOKED", TaskRevokedError(why))

    def context(self, delivery: TaskDelivery) -> Context:
        """The request as it is seen outside of the pool; without body where that is bad."""
        return self._worker.runner.open_or_empty(delivery.job, delivery.header)

    def open_body(self, delivery: TaskDelivery) -> TaskBody:
        """The decoded body; raises `Refusal`."""
        return self._worker.runner.open(delivery.job)[1]

    def read_states(self, ids: Sequence[str], then: Callable[[dict[str, Any]], None]) -> None:
        """Read the stored states of tasks on the side thread."""
        states: dict[str, dict[str, Any]] = {}

        def read() -> None:
            try:
                states.update(self._app.backend.get_many(ids))
            except BackendError as exc:
                worker_logger.warning(
                    "The stored states of %d tasks cannot be read, so they run unless this worker "
                    "knows that they are revoked: %s", len(ids), exc,
                )  # fmt: skip

        self._worker.aside(read, lambda: then(states))

    # -- logs and events -----------------------------------------------------------------

    def received(self, delivery: TaskDelivery) -> None:
        """It will run, now or later."""
        events = self._worker.task_events
        if events.on:
            events.received(delivery)

    def states_are_late(self, patience_s: float) -> None:
        """The result backend has not answered in this time."""
        worker_logger.warning(
            "The result backend has not answered for %g s: tasks run unless this worker knows that "
            "they are revoked", patience_s,
        )  # fmt: skip

    def surplus_returned(self, parked_max: int) -> None:
        """More tasks wait for rate limits than may be parked."""
        rates_logger.warning(
            "More than %d tasks wait for rate limits: the others go back behind the other tasks of "
            "their queues. If this lasts, give these tasks a queue and a worker of their own, or "
            "raise worker_parked_task_limit",
            parked_max,
        )

    def already_settled(self, header: TaskHeader, how: str) -> None:
        """A message came again whose task has ended."""
        worker_logger.info(
            "Task %s[%s] was delivered again and is not run again: its message is settled (%s)",
            header.task, header.id, how,
        )  # fmt: skip

    def adopted(self, delivery: TaskDelivery) -> None:
        """The message of a running task came again."""
        worker_logger.info(
            "Task %s[%s] was delivered again and goes on: its message is adopted",
            delivery.name, delivery.id,
        )  # fmt: skip

    # -- timers --------------------------------------------------------------------------

    def call_after(self, wait_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Call something later, on the loop thread."""
        return _Timer(self._worker.timer.call_after(wait_s, call, args))

    def keep_timers(self) -> None:
        """What is set before the first connection, by steps of users for example, outlives it."""
        self._lasting = [scheduled[2] for scheduled in self._worker.timer.queue]

    def drop_timers(self) -> None:
        """The lost transport and what it brought set timers; a new one sets its own."""
        timer = self._worker.timer
        kept = [
            (eta, priority, entry)
            for eta, priority, entry in timer.queue
            if any(entry is one for one in self._lasting)
        ]
        timer.clear()
        for eta, priority, entry in kept:
            timer.enter_at(entry, eta, priority)

    # -- single queues -------------------------------------------------------------------

    def queue_of(self, message: Any) -> str | None:
        """The queue that a message came from, as far as that is known."""
        return self._worker.consumer.queue_of(message)

    def origin_of(self, message: Any) -> object:
        """Equal for messages that came from one queue in one way."""
        info = message.delivery_info
        return tuple(info.get(name) for name in ("consumer_tag", "exchange", "routing_key"))

    def can_rest(self, queue: str) -> bool:
        """Whether a queue is still there after a while without consumers."""
        return self._worker.consumer.can_rest(queue)

    def rest(self, queue: str) -> None:
        """Consume a queue no longer, until `resume`."""
        self._worker.consumer.rest(queue)

    def resume(self, queue: str) -> None:
        """Consume a queue again."""
        self._worker.consumer.resume(queue)

    def length_of(self, queue: str) -> int | None:
        """How many messages are in a queue; None while messages are on their way back to it."""
        consumer = self._worker.consumer
        return None if consumer.returns.pending else consumer.length_of(queue)


class _Timer:
    """A timer of the hub. Its entry stays in the schedule until its time has come."""

    __slots__ = ("_entry",)

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def cancel(self) -> None:
        """Do not call it, and let go of what it was to be called with."""
        self._entry.cancel()
        self._entry.args = ()
