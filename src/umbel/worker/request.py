"""One task message in a worker, from receipt until it is settled.

A request owns its message: it acknowledges or rejects it exactly once, on the loop thread, and
never after the connection that brought it is gone (then it is *void*: the broker has taken the
message back and will deliver it again; a running request adopts that delivery, see `salvage`). It
is the pool's watcher of its own execution; what the
pool reports is carried over to the loop thread first.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from umbel.app.trace import fail
from umbel.broker.task_channel import put_back
from umbel.exceptions import (
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)
from umbel.wire.limits import Refusal
from umbel.wire.reprs import safe_repr
from umbel.worker.runner import UNDECODABLE
from umbel.worker.salvage import ACK, FINAL, REJECT

if TYPE_CHECKING:
    from datetime import datetime

    from umbel.app.context import Context
    from umbel.wire.tasks import TaskHeader
    from umbel.worker.jobs import Job, JobResult
    from umbel.worker.strategy import Strategy

logger = logging.getLogger("umbel.request")

# A late-acknowledged task whose process dies goes back to its queue. One that takes a process
# of this worker with it so many times is taken for the cause and fails instead.
LOSSES_MAX = 10


def logs_results() -> bool:
    """Whether the result of a task will be written into the log."""
    return logger.isEnabledFor(logging.INFO)


class Request:
    """See the module's text."""

    __slots__ = (
        "accepted_at",
        "dropped",
        "era",
        "eta",
        "expires",
        "header",
        "job",
        "message",
        "name",
        "owed",
        "pid",
        "queue",
        "received_at",
        "settled",
        "strategy",
        "timer",
        "void",
        "worker",
    )

    def __init__(self, strategy: Strategy, message: Any, header: TaskHeader, job: Job) -> None:
        self.strategy = strategy
        self.worker = strategy.worker
        self.message = message
        self.header = header
        self.job = job
        self.name = header.shadow or header.task
        self.era = 0  # of the prefetch window, while it waits
        self.eta: datetime | None = None
        self.expires: datetime | None = None
        self.timer: Any = None
        self.pid: int | None = None
        self.queue: str | None = None  # that it came from, where events tell it
        self.received_at: float | None = None  # where it is measured
        self.accepted_at: float | None = None
        self.settled = False
        self.void = False
        self.owed = False  # counted as a debt of the prefetch window
        self.dropped = False  # ended because its delivery is void: it will run again

    @property
    def id(self) -> str:
        """The id of the task."""
        return self.header.id

    def __repr__(self) -> str:
        return f"<Request: {self.name}[{self.id}]>"

    def context(self) -> Context:
        """The request as duties outside of the pool see it; without body where it is bad."""
        return self.worker.runner.open_or_empty(self.job, self.header)

    # -- settling ----------------------------------------------------------------------

    def ack(self) -> None:
        """The message is done with."""
        if not self.settled:
            self._settle(ACK, self.message.ack)

    def ack_copied(self) -> None:
        """The message is not needed: a copy of it is in its queue, to be run."""
        self._settle("copied", self.message.ack)

    def reject(self, requeue: bool) -> None:
        """The message goes back to the queue, or to where dead messages go."""
        how = "requeue" if requeue else REJECT
        self._settle(how, partial(self.message.reject, requeue=requeue))

    def give_back(self) -> None:
        """The message, of which nothing was run, goes back to its place in the queue."""
        self._settle("return", partial(put_back, self.message))

    def _settle(self, how: str, call: Callable[[], None]) -> None:
        if self.settled:
            return
        self.settled = True
        salvage = self.worker.salvage
        if self.void:
            salvage.remember(self.header, how)
            return
        try:
            call()
        except self.worker.connection_errors as exc:
            self.void = True
            logger.warning(
                "%s of %s[%s] did not reach the broker: %s", how, self.name, self.id, exc
            )
            salvage.failed(exc, self.message, call)
            salvage.remember(self.header, how)
        else:
            recent = salvage.recent
            if recent is not None and how in FINAL:
                recent.append((how, self.header, monotonic()))

    def settle_failure(self) -> None:
        """A failed task: early ones were acknowledged before, late ones as the options say."""
        if self.strategy.acks_on_failure:
            self.ack()
        else:
            self.reject(requeue=False)
            if self.worker.task_events.on:
                self.worker.task_events.rejected(self, requeue=False)

    # -- what the pool reports, on the loop thread -------------------------------------

    def unfit(self, exc: Exception) -> None:
        """The pool can not take it."""
        self._end(self._on_unfit, exc)

    def soft_limit(self, limit_s: float) -> None:
        """The soft time limit has passed."""
        logger.warning("Soft time limit (%ss) exceeded for %s[%s]", limit_s, self.name, self.id)

    def hard_limit(self, limit_s: float) -> None:
        """The hard time limit has passed."""
        self._end(self._on_hard_limit, limit_s)

    def lost(self, reason: str) -> None:
        """The process died."""
        self._end(self._on_lost, reason)

    def terminated(self, signum: int) -> None:
        """Somebody ended it."""
        self._end(self._on_terminated, signum)

    def accepted(self, pid: int, when: float) -> None:
        """Execution begins."""
        self.worker.tally.active[id(self)] = self
        self._began(pid, when)

    def ran(self, pid: int, when: float, result: JobResult) -> None:
        """Execution began, and ended by itself."""
        try:
            self._began(pid, when)
        finally:
            self.finished(result)

    def _began(self, pid: int, when: float) -> None:
        self.pid, self.accepted_at = pid, when
        worker = self.worker
        worker.tally.started += 1
        if worker.task_events.on:
            worker.task_events.started(self, when)
        if worker.metrics is not None:
            worker.metrics.started(self, when)
        if not self.strategy.acks_late:
            self.ack()

    def finished(self, result: JobResult) -> None:
        """Execution ended by itself."""
        worker = self.worker
        try:
            self.strategy.took(result.runtime_s)
            if result.clock > worker.app.clock.value:
                worker.app.clock.adjust(result.clock)
            if worker.task_events.on:
                worker.task_events.finished(self, result)
            if worker.metrics is not None:
                worker.metrics.finished(self, result.state, result.runtime_s)
            self._answer(result)
        finally:
            worker.released(self)

    def _answer(self, result: JobResult) -> None:
        """Settle the message as the result says."""
        state = result.state
        if state == "SUCCESS":
            self.ack()
            if logger.isEnabledFor(logging.INFO):
                logger.info(
                    "Task %s[%s] succeeded in %.6fs: %s",
                    self.name, self.id, result.runtime_s, result.text,
                )  # fmt: skip
        elif state == "FAILURE":
            self.settle_failure()
            logger.error(
                "Task %s[%s] raised unexpected: %s\n%s",
                self.name, self.id, result.text, result.traceback,
            )  # fmt: skip
        elif state == "RETRY":
            self.ack()
            logger.info("Task %s[%s] retry: %s", self.name, self.id, result.text)
        elif state == "IGNORED":
            self.ack()
            logger.info("Task %s[%s] ignored", self.name, self.id)
        elif state == "REJECTED":
            self.reject(result.requeue)
            logger.warning("Task %s[%s] rejected: %s", self.name, self.id, result.text)
        else:
            assert state == UNDECODABLE, f"unknown result {state!r}"
            refusal = Refusal(result.detail, result.text)
            self.worker.receiver.refuse(self.message, refusal, request=self)

    def _end(self, how: Callable[..., None], *said: Any) -> None:
        """Whatever comes of it, the pool is done with the request."""
        try:
            how(*said)
        finally:
            self.worker.released(self)

    def _on_unfit(self, exc: Exception) -> None:
        logger.error("task %s[%s] could not be started", self.name, self.id, exc_info=exc)
        self.fail(exc)

    def _on_hard_limit(self, limit_s: float) -> None:
        logger.error("Hard time limit (%ss) exceeded for %s[%s]", limit_s, self.name, self.id)
        self.fail(TimeLimitExceeded(limit_s))

    def _on_lost(self, reason: str) -> None:
        strategy = self.strategy
        again = strategy.acks_late and strategy.requeue_lost
        if again and self.worker.tally.lost_again(self.id) <= LOSSES_MAX:
            logger.error(
                "Task %s[%s]: its process ended with %s; it goes back to its queue",
                self.name, self.id, reason,
            )  # fmt: skip
            self.reject(requeue=True)
            if self.worker.metrics is not None:
                self.worker.metrics.finished(self, "REQUEUED")
            if self.worker.task_events.on:
                self.worker.task_events.rejected(self, requeue=True)
        else:
            logger.error("Task %s[%s]: its process ended with %s", self.name, self.id, reason)
            self.fail(WorkerLostError(f"Worker exited prematurely: {reason}."))

    def _on_terminated(self, signum: int) -> None:
        if not self.dropped:
            name = signal.Signals(signum).name
            logger.warning("Task %s[%s] terminated (%s)", self.name, self.id, name)
            self.revoke("terminated", signum)
        elif self.worker.metrics is not None:
            self.worker.metrics.finished(self, "CANCELLED")

    # -- results without an execution -------------------------------------------------

    def revoke(self, why: str, signum: int | None = None) -> None:
        """Store REVOKED (`revoked`, `expired` or `terminated`) and acknowledge."""

        def done() -> None:
            self.ack()
            if self.worker.task_events.on:
                self.worker.task_events.revoked(self, why, signum)

        if self.worker.metrics is not None:
            self.worker.metrics.finished(self, "REVOKED")
        self.worker.aside(partial(self._store_revoked, why), done)

    def _store_revoked(self, why: str) -> None:
        request = self.context()
        ignored = request.ignore_result
        if not (self.strategy.task.ignores_result if ignored is None else ignored):
            self.worker.app.backend.store(
                self.id, TaskRevokedError(why), "REVOKED", request=request
            )
        if request.chord:
            self.worker.app.backend.chord_part(request, "REVOKED", TaskRevokedError(why))

    def fail(self, exc: Exception) -> None:
        """Store FAILURE and settle the message as a failed one."""

        def done() -> None:
            if self.worker.task_events.on:
                text = self.strategy.redaction.text(safe_repr(exc))
                self.worker.task_events.failed(self, text, "")
            self.settle_failure()

        if self.worker.metrics is not None:
            self.worker.metrics.finished(self, "FAILURE")
        self.worker.aside(partial(self._store_failure, exc), done)

    def _store_failure(self, exc: Exception) -> None:
        fail(self.worker.app, self.strategy.task, self.context(), exc)
