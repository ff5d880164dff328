"""Every exception that Umbel raises on purpose.

Two families matter on the wire. Outcomes (`Ignore`, `Reject`, `Retry`) are raised inside a
task to steer what happens to its message; errors (`NotRegistered`, `TimeLimitExceeded`, ...)
become the stored result of a task. Stored errors carry a module name that existing clients
can resolve: `wire.failures` maps each class here to the name its peers know.
"""

from __future__ import annotations

import builtins
from datetime import datetime
from typing import Any


class UmbelError(Exception):
    """Base of the errors that are not outcomes of a task."""


class ImproperlyConfigured(UmbelError):
    """A setting, option or URL is wrong; the text names it, its value and the way out."""


class BackendError(UmbelError):
    """The result backend could not do what was asked."""


class SecurityError(UmbelError):
    """A stored result asked for something that must never be done."""


class AlreadyRegistered(UmbelError):
    """Two different functions claim one task name."""


class QueueNotFound(UmbelError, KeyError):
    """A task was routed to a queue that is not declared and may not be created."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NotRegistered(KeyError, UmbelError):
    """The task name is not known here."""

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TimeoutError(UmbelError, builtins.TimeoutError):  # noqa: A001 - the name callers expect
    """A result was not there in time; the task itself goes on."""


class TaskError(UmbelError):
    """Base of the errors that end a task."""


class TaskRevokedError(TaskError):
    """The task was revoked, or it expired, before it ran."""


class ChordError(TaskError):
    """A part of a chord failed, so its body was not run."""


class MessageRefused(TaskError):
    """The message of the task breaks a rule: too big, too deep, or not a task at all."""


class NotForElection(TaskError, ValueError):
    """Nobody can be elected for this; the text says why."""


class MaxRetriesExceededError(TaskError):
    """The task asked for one retry more than it may have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.task_args = kwargs.pop("task_args", [])
        self.task_kwargs = kwargs.pop("task_kwargs", {})
        super().__init__(*args, **kwargs)


class SoftTimeLimitExceeded(Exception):
    """Raised inside a task when its soft time limit has passed; it may clean up and go on."""

    def __str__(self) -> str:
        return f"SoftTimeLimitExceeded{self.args!r}"


class TimeLimitExceeded(Exception):
    """The hard time limit of a task has passed and the task was ended."""

    def __str__(self) -> str:
        return f"TimeLimitExceeded{self.args!r}"


class WorkerLostError(Exception):
    """The process that ran a task died before the task ended."""


class Terminated(Exception):
    """A task was ended by a signal because somebody asked for it."""


class TaskOutcome(Exception):
    """Base of what a task raises to steer its own message; not an error."""


class Ignore(TaskOutcome):
    """Store no state for this task: somebody else will."""


class Reject(TaskOutcome):
    """Give the message back to the broker (only for late-acknowledged tasks)."""

    def __init__(self, reason: object = None, requeue: bool = False) -> None:
        self.reason = reason
        self.requeue = requeue
        super().__init__(reason, requeue)

    def __repr__(self) -> str:
        return f"reject requeue={self.requeue}: {self.reason}"


class Retry(TaskOutcome):
    """The task will be tried again; `exc` is the cause, `when` the time or delay."""

    def __init__(
        self,
        message: str | None = None,
        exc: BaseException | None = None,
        when: float | datetime | None = None,
        is_eager: bool = False,
        sig: Any = None,
    ) -> None:
        self.message = message
        self.exc = exc
        self.when = when
        self.is_eager = is_eager
        self.sig = sig
        self.clock = 0  # when it was decided, before the call was sent again
        self.is_stored = False  # as the state of the task
        super().__init__(message, exc, when)

    @property
    def cause(self) -> BaseException:
        """What is stored as the reason: the error if there is one, else this outcome."""
        return self if self.exc is None else self.exc

    def humanize(self) -> str:
        """The delay in words."""
        if isinstance(self.when, (int, float)):
            return f"in {self.when}s"
        return f"at {self.when}"

    def __str__(self) -> str:
        if self.message:
            return self.message
        if self.exc is not None:
            return f"Retry {self.humanize()}: {self.exc!r}"
        return f"Retry {self.humanize()}"
