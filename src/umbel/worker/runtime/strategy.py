"""What a worker does with a message that has just arrived.

`Receiver` is the one barrier between the broker and the worker: whatever a message holds, it
ends in an answer here, counted and logged, and never in an exception of the loop. A `Strategy`
is prepared once per task type and decides for its messages: expired, revoked, not due yet, or
ready to run.

| what is wrong                                   | the message         | the result |
| ----------------------------------------------- | ------------------- | ---------- |
| content type not accepted (pickle) or not known | rejected            | FAILURE    |
| body can not be decoded                         | acknowledged        | FAILURE    |
| too big, too deep, number too large             | rejected            | FAILURE    |
| header missing or ill-typed, eta not a date     | rejected            | FAILURE    |
| neither protocol 2 nor 1                        | rejected            | none       |
| task is not registered                          | rejected            | FAILURE    |
| no message at all (rubbish in a Redis list)     | dropped             | none       |

Rejected means without requeue: to the dead-letter exchange where the queue has one. A FAILURE
is stored where the message told an id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kombu.exceptions import ContentDisallowed, DecodeError

from umbel.app.context import Context
from umbel.app.declaring import parse_rate
from umbel.app.trace import fail
from umbel.broker.tasks.envelopes import TaskEnvelope
from umbel.exceptions import MessageRefused, NotRegistered
from umbel.wire import limits as caps
from umbel.wire.content import ensure_accepted
from umbel.wire.limits import Refusal
from umbel.wire.tasks import HEADER_FIELDS, TaskHeader, read_header, read_v1, user_headers
from umbel.wire.times import parse_time
from umbel.worker.delivery.effects import ACK, REJECT
from umbel.worker.execution.jobs import Job
from umbel.worker.execution.runner import decode_v1
from umbel.worker.runtime.delivery_driver import TaskDelivery
from umbel.worker.runtime.revoked_messages import keep_as_long

if TYPE_CHECKING:
    from umbel.app.task import Task
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.strategy")

# How much the last task weighs in what is expected of the next one of its type.
LEARNING = 0.1


class Receiver:
    """Takes every task message."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.app = worker.app
        self.accept = self.app.accept
        self.limits = self.app.limits
        self.strategies: dict[str, Strategy] = {}

    def __call__(self, message: Any) -> None:
        """The barrier: every message ends in an answer."""
        worker = self.worker
        worker.counters.received += 1
        for hook in worker.on_task_message:
            self._tell(hook, message)
        try:
            if len(message.body) > self.limits.body_bytes:
                raise _too_big(message.body, self.limits)
            if message.content_type not in self.accept:
                ensure_accepted(message.content_type, self.accept)
            task = getattr(message, "task", None)
            if task is None:
                self._receive(message)
            else:
                self._proceed(message, task.headers, _job_of(task))
        except Refusal as refusal:
            self.refuse(message, refusal)
        except Exception as exc:
            # Not foreseen: ours to mend. The message goes to the dead letters, not in circles.
            logger.exception("a message could not be handled")
            self.refuse(message, Refusal(caps.INVALID_TASK, f"{type(exc).__name__}: {exc}"))

    @staticmethod
    def _tell(hook: Callable[[Any], None], message: Any) -> None:
        try:
            hook(message)
        except Exception:
            logger.exception("a hook on task messages failed: %r", hook)

    def _receive(self, message: Any) -> None:
        """A message as kombu hands it out, of which nothing is known."""
        headers, body, decoded = message.headers, message.body, None
        if headers and "task" in headers:
            header = read_header(headers)
        else:
            decoded = self._decode_v1(message, headers, body)
            header = read_v1(decoded)[0]
        self._proceed(message, header, self._job(message, header, headers, body, decoded))

    def _proceed(self, message: Any, header: TaskHeader, job: Job) -> None:
        if job.redelivered and self.worker.deliveries.came_again(message, header):
            return
        strategy = self.strategies.get(header.task) or self._prepare(header.task)
        if strategy is None:
            self._unregistered(message, header, job)
            return
        strategy(message, header, job)

    def _decode_v1(self, message: Any, headers: Any, body: Any) -> Any:
        return decode_v1(
            body,
            message.content_type,
            message.content_encoding or "utf-8",
            compression=headers.get("compression") if headers else None,
            accept=self.accept,
            limits=self.limits,
        )

    def _job(self, message: Any, header: TaskHeader, headers: Any, body: Any, decoded: Any) -> Job:
        info = message.delivery_info
        properties = message.properties
        return Job(
            header.id,
            header.task,
            _own(headers) if decoded is None else dict(headers or {}),
            body if isinstance(body, bytes) else _as_bytes(body),
            message.content_type,
            message.content_encoding or "utf-8",
            info.get("exchange"),
            info.get("routing_key"),
            properties.get("priority", info.get("priority")),
            bool(info.get("redelivered")),
            properties.get("reply_to"),
            properties.get("correlation_id"),
            decoded,
            header if decoded is None else None,
        )

    def _prepare(self, name: str) -> Strategy | None:
        task = self.app.tasks.get(name)
        if task is None:
            return None
        strategy = self.strategies[name] = Strategy(self.worker, task)
        return strategy

    def undecodable(self, message: Any, exc: BaseException) -> None:
        """The transport says that the message is damaged."""
        self.refuse(message, Refusal(caps.UNDECODABLE, f"{type(exc).__name__}: {exc}"))

    # -- answers -----------------------------------------------------------------------

    def refuse(self, message: Any, refusal: Refusal, delivery: TaskDelivery | None = None) -> None:
        """Answer a message that can not be run, and say why."""
        worker = self.worker
        worker.counters.refused[refusal.reason] += 1
        headers = message.headers or {}
        task_id = headers.get("id")
        logger.error(
            "message refused (%s): %s [task %.200r, id %.200r, %d bytes]",
            refusal.reason, refusal.text, headers.get("task"), task_id, _size(message.body),
        )  # fmt: skip

        def settle() -> None:
            if delivery is not None:
                worker.driver.refused(delivery, refusal)
            else:
                how = ACK if refusal.reason == caps.UNDECODABLE else REJECT
                worker.deliveries.settle_message(message, how)

        if isinstance(task_id, str) and refusal.reason != caps.UNKNOWN_MESSAGE:
            worker.aside(partial(self._store_refusal, message, task_id, refusal), settle)
        else:
            settle()

    def _store_refusal(self, message: Any, task_id: str, refusal: Refusal) -> None:
        kinds: dict[str, type[Exception]] = {
            caps.CONTENT_DISALLOWED: ContentDisallowed,
            caps.CONTENT_UNKNOWN: ContentDisallowed,
            caps.UNDECODABLE: DecodeError,
        }
        kind = kinds.get(refusal.reason, MessageRefused)
        properties = message.properties or {}
        request = Context(
            id=task_id,
            reply_to=properties.get("reply_to"),
            correlation_id=properties.get("correlation_id"),
            called_directly=False,
        )
        fail(self.app, None, request, kind(refusal.text))

    def _unregistered(self, message: Any, header: TaskHeader, job: Job) -> None:
        worker = self.worker
        worker.counters.refused["unregistered"] += 1
        logger.error(
            "unregistered task %.200r [id %.200r]: this worker knows %s; "
            "is the module imported, and the name right?",
            header.task, header.id, ", ".join(self.app.tasks.own()) or "no tasks",
        )  # fmt: skip

        def store() -> None:
            request = worker.runner.open_or_empty(job, header)
            fail(self.app, None, request, NotRegistered(header.task))

        def done() -> None:
            if worker.task_events.on:
                worker.task_events.unregistered(header.id, header.task)
            worker.deliveries.settle_message(message, REJECT)

        worker.aside(store, done)


class Strategy:
    """Decides for the messages of one task type."""

    def __init__(self, worker: Worker, task: Task) -> None:
        self.worker = worker
        self.task = task
        self.name = task.name
        self.acks_late = bool(task.option("acks_late", "task_acks_late"))
        self.acks_on_failure = bool(
            task.option("acks_on_failure_or_timeout", "task_acks_on_failure_or_timeout")
        )
        requeue_lost = task.option("reject_on_worker_lost", "task_reject_on_worker_lost")
        self.requeue_lost = requeue_lost is not False
        self.tells = bool(task.send_events)
        self.redaction = task.redaction
        self.zone = worker.app.timezone
        plan = worker.plan
        self.hard_s = task.time_limit or plan.time_limit_s
        self.soft_s = task.soft_time_limit or plan.soft_time_limit_s
        self.typical_s: float | None = None  # how long one takes; None before one has ended
        if not worker.app.conf.worker_disable_rate_limits:
            rate = task.rate_limit
            default = worker.app.conf.task_default_rate_limit
            rate = default if rate is None else rate
            worker.deliveries.limits.begin(task.name, parse_rate(rate))

    def __call__(self, message: Any, header: TaskHeader, job: Job) -> None:
        """Take one message of this type."""
        worker = self.worker
        delivery = TaskDelivery(worker.driver, self, message, header, job)
        if header.expires is not None:
            delivery.expires_s = parse_time(header.expires, self.zone).timestamp()
        if header.eta is not None:
            delivery.eta_s = parse_time(header.eta, self.zone).timestamp()
        if header.umbel_clock is not None:
            worker.app.clock.adjust(header.umbel_clock)
        if worker.metrics is not None:
            worker.metrics.received(delivery)
        if logger.isEnabledFor(logging.INFO):
            logger.info("Task %s[%s] received", delivery.name, header.id)
        if worker.revocations.any:
            keep_as_long(worker, (delivery,))
        worker.deliveries.arrived(delivery)

    def took(self, runtime_s: float) -> None:
        """One has ended: the mean of the last ones, so that a pause of the machine weighs little
        and one that takes really long is seen at once."""
        typical_s = self.typical_s
        if typical_s is None:
            self.typical_s = runtime_s
        else:
            self.typical_s = typical_s + (runtime_s - typical_s) * LEARNING

    def limits(self, header: TaskHeader) -> tuple[float | None, float | None]:
        """Soft and hard time limit of one request."""
        given = header.timelimit
        if given is None:
            return self.soft_s, self.hard_s
        hard, soft = given
        return soft or self.soft_s, hard or self.hard_s

    def keeps_result(self, header: TaskHeader) -> bool:
        """Whether the state of this task can be read from the result backend."""
        ignored = header.ignore_result
        if self.task.ignores_result if ignored is None else ignored:
            return False
        return self.worker.app.backend.keeps_results


def _job_of(task: TaskEnvelope) -> Job:
    header, properties = task.headers, task.properties
    address = properties.delivery_info
    return Job(
        header.id,
        header.task,
        {},
        task.body,
        task.content_type,
        task.content_encoding or "utf-8",
        address.exchange,
        address.routing_key,
        properties.priority,
        False,
        properties.reply_to,
        properties.correlation_id,
        None,
        header,
    )


def _own(headers: Any) -> dict[str, Any]:
    if not headers or headers.keys() <= HEADER_FIELDS:
        return {}
    return user_headers(headers)


def _too_big(body: Any, limits: caps.Limits) -> Refusal:
    return Refusal(
        caps.TOO_BIG,
        f"the body has {len(body)} bytes, the limit is {limits.body_bytes}: "
        "send a reference to the data, or raise task_message_max_bytes",
    )


def _size(body: Any) -> int:
    return len(body) if isinstance(body, (bytes, str, memoryview)) else 0


def _as_bytes(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)
