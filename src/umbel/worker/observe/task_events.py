"""What a worker tells of its tasks.

Asked at every turn of a task's life, so `on` is a plain attribute: when nobody wants to know,
telling costs one look at it. The clock of `task-started` is set aside when the task is handed to
the pool and travels with the job: whatever the task sends then has a greater one, even before the
pool's word that it has begun comes back.
"""

from __future__ import annotations

from time import monotonic, time
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from umbel.wire.event_forms import TaskReceived, TaskStarted, TaskSucceeded
from umbel.wire.reprs import safe_repr
from umbel.wire.tasks import DELIVERY_COUNT

if TYPE_CHECKING:
    from umbel.app.events.dispatcher import Dispatcher
    from umbel.worker.execution.jobs import Job, JobResult
    from umbel.worker.runtime.delivery_driver import TaskDelivery
    from umbel.worker.runtime.worker import Worker

TRACEBACK_CHARS_MAX = 16_000


class TaskEvents:
    """The `task-*` events of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.on = False
        self._events: Dispatcher | None = None
        self._version: str | UnsetType = worker.app.conf.worker_code_version or UNSET

    def refresh(self) -> None:
        """Look whether task events are wanted: the dispatcher came, went, or was told."""
        self._events = events = self._worker.events
        self.on = events is not None and events.sends("task")

    def _put(
        self, kind: str, request: TaskDelivery, fields: dict[str, Any], clock: int | None = None
    ) -> None:
        events = self._events
        if events is not None and request.policy.tells:
            events.put(kind, fields, clock)

    def received(self, request: TaskDelivery) -> None:
        """A message became a request: it will run, now or later."""
        events, strategy, header = self._events, request.policy, request.header
        if events is None or not strategy.tells:
            return
        args, kwargs = strategy.redaction.event_reprs(header, self._open, request.job)
        job, by = request.job, events.stamper
        message = request.message
        try:
            queue = message.queue  # of our transport for Redis: no call for each task
        except AttributeError:
            queue = self._worker.consumer.told_queue(message)
        request.queue = queue
        redelivered: bool | UnsetType = UNSET
        deliveries: int | UnsetType = UNSET
        if job.redelivered:
            redelivered, deliveries = True, _deliveries(message)
        seq, clock = by.count()
        events.keep(
            TaskReceived(
                by.hostname, by.pid, by.utcoffset, clock, time(), seq, by.inc,
                header.id, request.name, args, kwargs, header.root_id or header.id,
                header.parent_id, header.retries or 0, header.eta, header.expires,
                queue or UNSET, header.group or UNSET, redelivered, deliveries, len(job.body),
            )
        )  # fmt: skip

    def started(self, request: TaskDelivery, when: float) -> None:
        """The pool has begun, at `when` of the monotonic clock."""
        events = self._events
        if events is None or not request.policy.tells:
            return
        ago_s = monotonic() - when  # first: whoever is held up in between must not begin too early
        began = time() - ago_s
        by = events.stamper
        seq, clock = by.count(request.job.clock or None)
        events.keep(
            TaskStarted(
                by.hostname, by.pid, by.utcoffset, clock, began, seq, by.inc, request.header.id,
                request.queue or UNSET, self._version,
            )
        )  # fmt: skip

    def finished(self, request: TaskDelivery, result: JobResult) -> None:
        """The task's code has ended by itself."""
        state, events = result.state, self._events
        if state == "SUCCESS":
            if events is None or not request.policy.tells:
                return
            by = events.stamper
            seq, clock = by.count()
            events.keep(
                TaskSucceeded(
                    by.hostname, by.pid, by.utcoffset, clock, time(), seq, by.inc,
                    request.header.id, result.text, result.runtime_s, _or_unset(result.cpu_s),
                    _or_unset(result.memory_peak_bytes), _or_unset(result.chord_id),
                )
            )  # fmt: skip
        elif state == "FAILURE":
            self.failed(request, result.text, result.traceback, result)
        elif state == "RETRY":
            fields = _failure(request, result.text, result.traceback, result)
            self._put("task-retried", request, fields, result.clock or None)
        elif state == "REJECTED":
            self.rejected(request, result.requeue)

    def failed(
        self, request: TaskDelivery, exception: str, traceback: str, result: JobResult | None = None
    ) -> None:
        """It failed, in its code (then with its result) or around it."""
        self._put("task-failed", request, _failure(request, exception, traceback, result))

    def revoked(self, request: TaskDelivery, why: str, signum: int | None) -> None:
        """It will not run, or was ended: `revoked`, `expired` or `terminated`."""
        fields = {
            "uuid": request.header.id,
            "terminated": why == "terminated",
            "signum": signum,
            "expired": why == "expired",
        }
        self._put("task-revoked", request, fields)

    def rejected(self, request: TaskDelivery, requeue: bool) -> None:
        """Its message was rejected."""
        self._put("task-rejected", request, {"uuid": request.header.id, "requeue": requeue})

    def cancelled(self, request: TaskDelivery) -> None:
        """It was ended because its message will be delivered again."""
        self._put("task-cancelled", request, {"uuid": request.header.id})

    def unregistered(self, uuid: str, name: str) -> None:
        """A message asked for a task that this worker does not know."""
        events = self._events
        if events is not None:
            exception = f"NotRegistered({safe_repr(name, 200)})"
            events.put("task-failed", {"uuid": uuid, "exception": exception, "traceback": ""})

    def _open(self, job: Job) -> tuple[Any, Any]:
        body = self._worker.runner.open(job)[1]
        return body.args, body.kwargs


def _failure(
    request: TaskDelivery, exception: str, traceback: str, result: JobResult | None = None
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "uuid": request.header.id,
        "exception": exception,
        "traceback": traceback[-TRACEBACK_CHARS_MAX:],
    }
    if result is not None:
        for name in ("cpu_s", "memory_peak_bytes", "chord_id"):
            value = getattr(result, name)
            if value is not None:
                fields[name] = value
    return fields


def _or_unset(value: Any) -> Any:
    return UNSET if value is None else value


def _deliveries(message: Any) -> int | UnsetType:
    """How often a message was delivered before, where the broker counts."""
    count = (message.headers or {}).get(DELIVERY_COUNT)
    return count if type(count) is int and count >= 0 else UNSET
