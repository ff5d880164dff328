"""Executing one task body: what happens around it, in which order, and what comes out.

The texts of an outcome are for logs and events and hold no secrets (`wire.redaction`). What is
stored for the caller, and what hooks get, is whole.

A `Tracer` is prepared once per task type and used for every execution of it, in whichever
pool. It calls the body, tells the outcomes apart (success, failure, retry, ignore, reject),
does the duties of wire-format order, and returns a `Traced`. It never raises an ordinary
exception: an error in a duty, a hook or the result backend becomes a failure that says so.

Order after a success: callbacks, chain, stored result, chord part. After a failure: stored
failure, chord part, the rest of the chain failed, errbacks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple

from umbel.app import duties
from umbel.app.context import Context, Frame, current_frame
from umbel.app.replacing import ReplacedInline
from umbel.app.task import FailureInfo, Task
from umbel.exceptions import Ignore, Reject, Retry
from umbel.wire.masking import MASK

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.task")

SUCCESS, FAILURE, RETRY = "SUCCESS", "FAILURE", "RETRY"
IGNORED, REJECTED, STARTED = "IGNORED", "REJECTED", "STARTED"
TRACEBACK_CHARS_MAX = 64_000
CAUSES_MAX = 20


class Traced(NamedTuple):
    """The outcome of one execution."""

    state: str
    value: Any  # the return value, or the exception
    text: str  # bounded repr of it, for logs and events: without secrets
    traceback: str = ""  # likewise
    requeue: bool = False
    clock: int = 0  # set aside for the event of it, where something was sent after it


def _nothing() -> None:
    """The default of what runs right after the body."""


class Tracer:
    """Executes one task type."""

    def __init__(
        self,
        task: Task,
        app: Umbel,
        hostname: str,
        *,
        eager: bool = False,
        after_body: Callable[[], None] = _nothing,
        ended_by: tuple[type[BaseException], ...] = (),
    ) -> None:
        """`ended_by`: what a pool raises in a job that it has reported itself; not recorded."""
        self.task = task
        self.app = app
        self.hostname = hostname
        self.after_body = after_body
        self.ended_by = ended_by
        self.eager = eager
        self.run = task.run if type(task).__call__ is Task.__call__ else task.__call__
        self.stores = not eager or bool(app.conf.task_store_eager_result)
        self.track_started = bool(task.option("track_started", "task_track_started"))
        self.errors_always = bool(
            task.option("store_errors_even_if_ignored", "task_store_errors_even_if_ignored")
        )
        self.ignores_result = task.ignores_result
        self.begins = self.track_started or _overridden(task, "before_start")
        self.redaction = task.redaction
        self.before_start = _overridden(task, "before_start")
        self.on_success = _overridden(task, "on_success")
        self.after_return = _overridden(task, "after_return")
        self.hooks = self.on_success or self.after_return

    def __call__(self, request: Context, args: Any, kwargs: Any) -> Traced:
        """Run a plain function."""
        token = current_frame.set(Frame(self.task, request, current_frame.get()))
        try:
            try:
                if self.begins:
                    self._begin(request, args, kwargs)
                value = self.run(*args, **kwargs)
                if type(value) is CoroutineType:
                    value = _finished(value)  # a plain function around an `async def`
                self.after_body()
            except self.ended_by:
                raise
            except BaseException as exc:
                self.after_body()
                if self._is_the_callers(exc):
                    raise
                return self._raised(request, args, kwargs, exc)
            return self._returned(request, args, kwargs, value)
        finally:
            current_frame.reset(token)

    async def run_async(self, request: Context, args: Any, kwargs: Any) -> Traced:
        """Run an `async def`; what blocks around it is done in a thread."""
        token = current_frame.set(Frame(self.task, request, current_frame.get()))
        try:
            try:
                if self.begins:
                    await asyncio.to_thread(self._begin, request, args, kwargs)
                value = await self.run(*args, **kwargs)
                self.after_body()
            except self.ended_by:
                raise
            except BaseException as exc:
                if isinstance(exc, asyncio.CancelledError) and _is_cancelled_from_outside():
                    raise
                self.after_body()
                if self._is_the_callers(exc):
                    raise
                return await asyncio.to_thread(self._raised, request, args, kwargs, exc)
            if self._is_idle(request):
                return self._returned(request, args, kwargs, value)
            return await asyncio.to_thread(self._returned, request, args, kwargs, value)
        finally:
            current_frame.reset(token)

    def _is_the_callers(self, exc: BaseException) -> bool:
        # Ctrl-C and exit() in a task that runs inline are meant for the program around it.
        return self.eager and isinstance(exc, (KeyboardInterrupt, SystemExit, GeneratorExit))

    # -- the parts ---------------------------------------------------------------------

    def _is_idle(self, request: Context) -> bool:
        # Nothing to send or store: not worth a thread.
        return not (
            self._keeps(request)
            or request.chord
            or request.chain
            or request.callbacks
            or self.hooks
        )

    def _keeps(self, request: Context) -> bool:
        ignored = request.ignore_result
        return self.stores and not (self.ignores_result if ignored is None else ignored)

    def _begin(self, request: Context, args: Any, kwargs: Any) -> None:
        if self.track_started and self._keeps(request):
            started = {"pid": os.getpid(), "hostname": self.hostname}
            self.app.backend.store(_id(request), started, STARTED, request=request)
        if self.before_start:
            self.task.before_start(_id(request), args, kwargs)

    def _returned(self, request: Context, args: Any, kwargs: Any, value: Any) -> Traced:
        sent = False
        try:
            if request.callbacks or request.chain:
                duties.on_success(self.app, self.task, request, value)
            sent = True
            if self._keeps(request):
                self.app.backend.store(_id(request), value, SUCCESS, request=request)
            if request.chord:
                self.app.backend.chord_part(request, SUCCESS, value)
        except Exception as exc:  # noqa: BLE001 - becomes the outcome
            # The body ran; what follows it did not. The caller must not wait for ever.
            return self.failed(request, args, kwargs, exc, chain_sent=sent)
        if self.hooks:
            self._succeeded(request, args, kwargs, value)
        if not request._told:
            return Traced(SUCCESS, value, "")
        chars_max = self.task.resultrepr_maxsize
        return Traced(SUCCESS, value, self.redaction.result_repr(value, chars_max, args, kwargs))

    def _succeeded(self, request: Context, args: Any, kwargs: Any, value: Any) -> None:
        # The outcome is recorded and the next tasks are on their way: a hook can not undo that.
        try:
            if self.on_success:
                self.task.on_success(value, _id(request), args, kwargs)
            if self.after_return:
                self.task.after_return(SUCCESS, value, _id(request), args, kwargs, None)
        except Exception:
            if self.eager:
                raise
            logger.exception("task %s[%s]: a hook failed", self.task.name, request.id)

    def _raised(self, request: Context, args: Any, kwargs: Any, exc: BaseException) -> Traced:
        if isinstance(exc, ReplacedInline):
            return self._returned(request, args, kwargs, exc.value)
        if isinstance(exc, Ignore):
            return Traced(IGNORED, exc, "")
        if isinstance(exc, Reject):
            text = self.redaction.error_repr(exc.reason, self.redaction.secrets_of(args, kwargs))
            return Traced(REJECTED, exc, text, requeue=exc.requeue)
        if isinstance(exc, Retry):
            return self._retried(request, args, kwargs, exc)
        return self.failed(request, args, kwargs, exc)

    def _retried(self, request: Context, args: Any, kwargs: Any, outcome: Retry) -> Traced:
        cause = outcome.cause
        text = traceback_text(cause)
        try:
            if self._keeps(request) and not outcome.is_stored:
                self.app.backend.store(_id(request), cause, RETRY, traceback=text, request=request)
            self.task.on_retry(cause, _id(request), args, kwargs, FailureInfo(cause, text))
        except Exception:
            logger.exception("task %s[%s]: its retry was not recorded", self.task.name, request.id)
        shown = self._shown(cause, text, args, kwargs)
        return Traced(RETRY, outcome, *shown, clock=outcome.clock)

    def failed(
        self,
        request: Context,
        args: Any,
        kwargs: Any,
        exc: BaseException,
        *,
        chain_sent: bool = False,
    ) -> Traced:
        """Record a failure, and whatever follows from it; steps that were sent go on."""
        text = traceback_text(exc)
        task_id = _id(request)
        try:
            if self.stores and (self._keeps(request) or self.errors_always):
                self.app.backend.store(task_id, exc, FAILURE, traceback=text, request=request)
            if request.chord:
                self.app.backend.chord_part(request, FAILURE, exc)
            if chain_sent and request.errbacks:
                duties.call_errbacks(self.app, request, exc, text)
            elif not chain_sent and (request.chain or request.errbacks):
                duties.on_failure(self.app, self.task, request, exc, text)
            self.task.on_failure(exc, task_id, args, kwargs, FailureInfo(exc, text))
        except Exception:
            logger.exception(
                "task %s[%s]: its failure was not fully recorded", self.task.name, task_id
            )
        if self.after_return:
            try:
                info = FailureInfo(exc, text)
                self.task.after_return(FAILURE, exc, task_id, args, kwargs, info)
            except Exception:
                logger.exception("task %s[%s]: after_return failed", self.task.name, request.id)
        return Traced(FAILURE, exc, *self._shown(exc, text, args, kwargs))

    def _shown(self, exc: BaseException, text: str, args: Any, kwargs: Any) -> tuple[str, str]:
        """The texts of an error and its traceback that logs and events may have."""
        rules = self.redaction
        if rules.hides_all:
            return rules.error_repr(exc), bare_traceback(exc)
        secrets = rules.secrets_of(args, kwargs)
        return rules.error_repr(exc, secrets), rules.text(last_lines(text), secrets)


def fail(
    app: Umbel, task: Task | None, request: Context, exc: BaseException, text: str = ""
) -> None:
    """Record a failure that happened outside of the body: a limit, a lost process, bad input.

    Raises what the backend raises; the caller decides whether that is worth a retry.
    """
    ignored = request.ignore_result
    keeps = not (task.ignores_result if ignored is None and task is not None else ignored)
    errors_always = task is not None and task.option(
        "store_errors_even_if_ignored", "task_store_errors_even_if_ignored"
    )
    if keeps or errors_always:
        app.backend.store(_id(request), exc, FAILURE, traceback=text or None, request=request)
    if request.chord:
        app.backend.chord_part(request, FAILURE, exc)
    if request.chain or request.errbacks:
        duties.on_failure(app, task, request, exc, text)
    if task is not None:
        task.on_failure(exc, _id(request), request.args, request.kwargs, FailureInfo(exc, text))


def _is_cancelled_from_outside() -> bool:
    # A body may also end in a cancellation of its own making, which is a failure of it.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _overridden(task: Task, method: str) -> bool:
    # By its class, or on the instance by an annotation.
    return getattr(getattr(task, method), "__func__", None) is not getattr(Task, method)


def _finished(coroutine: Any) -> Any:
    from umbel.app.eager import run_coroutine

    async def finish() -> Any:
        return await coroutine

    return run_coroutine(finish)


def _id(request: Context) -> str:
    assert request.id is not None, "an execution always has an id"
    return request.id


def traceback_text(exc: BaseException) -> str:
    """The traceback of an error, whatever its class does."""
    try:
        return "".join(traceback.format_exception(exc))
    except Exception:  # noqa: BLE001 - the text of an error is not worth another one
        # An exception class of the user's may fail to show itself.
        return f"{type(exc).__name__} (its traceback cannot be shown)\n"


def bare_traceback(exc: BaseException) -> str:
    """The traceback of an error and its causes, without their messages."""
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = exc
    while cause is not None and id(cause) not in seen and len(seen) < CAUSES_MAX:
        seen.add(id(cause))
        frames = "".join(traceback.format_tb(cause.__traceback__))
        head = "Traceback (most recent call last):\n" if frames else ""
        parts.append(f"{head}{frames}{type(cause).__name__}: {MASK}\n")
        hidden = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or hidden
    return "\nThe error above led to this one:\n\n".join(reversed(parts))


def last_lines(text: str) -> str:
    """The end of a traceback, not more than anybody is shown."""
    if len(text) <= TRACEBACK_CHARS_MAX:
        return text
    # Half a word could be the end of a secret whose name was cut off.
    end = text[-TRACEBACK_CHARS_MAX:]
    return end.partition("\n")[2] or end.partition(" ")[2]
