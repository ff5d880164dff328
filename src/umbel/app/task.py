"""A task: a function with a name, options, and ways to call it elsewhere.

`Task` instances are made by `@app.task`; users may give a subclass of their own with `base=`.
Options are class attributes, None meaning "as the settings say", which is looked up when it
is needed, so that settings changed after the decorator still count. One instance serves all
threads; what belongs to one execution is in `self.request`.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from umbel.app.context import Context, current_frame, current_request
from umbel.exceptions import ImproperlyConfigured, MaxRetriesExceededError, Reject, Retry

if TYPE_CHECKING:
    from umbel.app.canvas import Signature
    from umbel.app.results import AsyncResult, EagerResult
    from umbel.app.results.backend import Backend
    from umbel.app.umbel import Umbel

_DIRECT = Context()


class Task:
    """Base of all tasks."""

    app: Umbel
    name: str = ""
    abstract: ClassVar[bool] = True

    # Calling defaults.
    queue: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    priority: int | None = None
    serializer: str | None = None
    compression: str | None = None
    expires: Any = None
    delivery_mode: Any = None
    typing: bool = True

    # What the worker does with it.
    acks_late: bool | None = None
    acks_on_failure_or_timeout: bool | None = None
    reject_on_worker_lost: bool | None = None
    rate_limit: str | float | None = None
    time_limit: float | None = None
    soft_time_limit: float | None = None
    ignore_result: bool | None = None
    store_errors_even_if_ignored: bool | None = None
    track_started: bool | None = None
    send_events: bool = True

    # Retries.
    max_retries: int | None = 3
    default_retry_delay: float = 180
    autoretry_for: tuple[type[BaseException], ...] = ()
    dont_autoretry_for: tuple[type[BaseException], ...] = ()
    retry_kwargs: ClassVar[Mapping[str, Any]] = {}
    retry_backoff: bool | float = False
    retry_backoff_max: float = 600
    retry_jitter: bool = True

    # Errors of these types are part of the task's contract: logged without a traceback.
    throws: tuple[type[BaseException], ...] = ()
    resultrepr_maxsize: int = 1024

    MaxRetriesExceededError = MaxRetriesExceededError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The body of the task."""
        raise ImproperlyConfigured(f"task {self.name!r} has no body: define run()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the body here and now, as a plain function."""
        outer = current_frame.get()
        token = current_frame.set(_direct_frame(self, args, kwargs, outer))
        try:
            return self.run(*args, **kwargs)
        finally:
            current_frame.reset(token)

    # -- what the settings say ---------------------------------------------------------

    def option(self, name: str, setting: str) -> Any:
        """The task's own option `name`, or else the setting."""
        own = getattr(self, name)
        return getattr(self.app.conf, setting) if own is None else own

    @property
    def ignores_result(self) -> bool:
        """Whether no result is kept."""
        return bool(self.option("ignore_result", "task_ignore_result"))

    @property
    def request(self) -> Context:
        """The call that is being executed here; a bare one outside of an execution."""
        frame = current_frame.get()
        while frame is not None:
            if frame.task is self:
                return frame.request
            frame = frame.outer
        return _DIRECT

    @property
    def backend(self) -> Backend:
        """Where results are kept."""
        return self.app.backend

    @cached_property
    def is_async(self) -> bool:
        """Whether the body is an `async def`."""
        return inspect.iscoroutinefunction(inspect.unwrap(self.run))

    @cached_property
    def _parameters(self) -> inspect.Signature:
        return inspect.signature(self.run)

    def check_arguments(self, args: Any, kwargs: Any) -> None:
        """Raise TypeError when the body can not be called with these arguments."""
        try:
            self._parameters.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.name}{self._parameters}: {exc}") from None

    # -- calling -----------------------------------------------------------------------

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Send the task with these arguments."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        link: Any = None,
        link_error: Any = None,
        **options: Any,
    ) -> AsyncResult:
        """Send the task; returns at once with a handle on its result.

        Raises `kombu.exceptions.OperationalError` when the broker can not be reached.
        """
        if task_id is not None:
            options["task_id"] = task_id
        if link is not None:
            options["link"] = link
        if link_error is not None:
            options["link_error"] = link_error
        if self.typing:
            self.check_arguments(args or (), kwargs or {})
        if self.app.conf.task_always_eager:
            return self.apply(args, kwargs, **options)
        return self.app.send(self.name, args, kwargs, options, self)

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        link: Any = None,
        link_error: Any = None,
        task_id: str | None = None,
        retries: int = 0,
        throw: bool | None = None,
        **options: Any,
    ) -> EagerResult:
        """Run the task here, as a worker would, and return its result."""
        from umbel.app.eager import run_inline

        return run_inline(
            self, args, kwargs, task_id=task_id, retries=retries, throw=throw,
            link=link, link_error=link_error, **options,
        )  # fmt: skip

    def AsyncResult(self, task_id: str) -> AsyncResult:  # noqa: N802 - the name callers know
        """A handle on the result of an earlier call."""
        return self.app.AsyncResult(task_id)

    # -- signatures --------------------------------------------------------------------

    def signature(self, args: Any = None, *more: Any, **options: Any) -> Signature:
        """A call that is not made yet."""
        options.setdefault("app", self.app)
        return self.app.signature(self.name, args, *more, **options)

    subtask = signature

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """`signature` with the arguments written as in a call."""
        return self.signature(args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> Signature:
        """Like `s`, but the result of the task before is not passed in."""
        return self.signature(args, kwargs, immutable=True)

    def map(self, it: Any) -> Signature:
        """One message that calls the task for every item."""
        from umbel.app.canvas import xmap

        return xmap(self.s(), it, app=self.app)

    def starmap(self, it: Any) -> Signature:
        """Like `map`, every item being a list of arguments."""
        from umbel.app.canvas import xstarmap

        return xstarmap(self.s(), it, app=self.app)

    def chunks(self, it: Any, n: int) -> Signature:
        """The items in messages of `n` each."""
        from umbel.app.canvas import chunks

        return chunks(self.s(), it, n, app=self.app)

    # -- inside an execution -----------------------------------------------------------

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Retry:
        """Send this call again for later and raise `Retry`.

        Past the limit, `exc` is raised instead, or else `MaxRetriesExceededError`. When the
        message can not be sent, a late-acknowledged one goes back to its queue; an early one
        fails with the broker's error.
        """
        request = self.request
        if request.called_directly:
            self._reraise(exc)
        limit = self.max_retries if max_retries is None else max_retries
        if not eta and countdown is None:
            countdown = self.default_retry_delay
        signature = self.signature_from_request(
            request, args, kwargs, countdown=countdown, eta=eta, **options
        )
        cause = exc if exc is not None else sys.exc_info()[1]
        if limit is not None and request.retries + 1 > limit:
            if exc is not None:
                raise exc
            raise MaxRetriesExceededError(
                f"Can't retry {self.name}[{request.id}] args:{request.args} "
                f"kwargs:{request.kwargs}",
                task_args=request.args,
                task_kwargs=request.kwargs,
            ) from cause
        outcome = Retry(exc=cause, when=eta or countdown, is_eager=request.is_eager, sig=signature)
        if not request.is_eager:
            self._resend(signature)
        if throw:
            raise outcome
        return outcome

    def _resend(self, signature: Signature) -> None:
        from kombu.exceptions import OperationalError

        try:
            signature.apply_async(add_to_parent=False)
        except OperationalError as failure:
            if self.option("acks_late", "task_acks_late"):
                raise Reject(failure, requeue=True) from failure
            raise

    def _reraise(self, exc: BaseException | None) -> NoReturn:
        if exc is not None:
            raise exc
        current = sys.exc_info()[1]
        if current is not None:
            raise current
        raise Retry("Task can be retried", None)

    def signature_from_request(
        self,
        request: Context | None = None,
        args: Any = None,
        kwargs: Any = None,
        **changes: Any,
    ) -> Signature:
        """The signature that sends the current call once more."""
        request = self.request if request is None else request
        options = {**resend_options(request), **{k: v for k, v in changes.items() if v is not None}}
        options["retries"] = request.retries + 1
        return self.signature(
            request.args if args is None else args,
            request.kwargs if kwargs is None else kwargs,
            **options,
        )

    def replace(self, sig: Any, visitor: Any = None) -> Any:
        """Let `sig` take the place of this task: its id, its callbacks, its chain and chord.

        Does not return (it raises `Ignore`), except when the task runs inline: then it returns
        the value of the replacement.
        """
        from umbel.app.replacing import replace

        return replace(self, sig)

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:
        """Let `sig` join the chord that this task is a part of."""
        request = self.request
        if not request.chord or request.group is None:
            raise ValueError(f"{self.name} is not part of a chord: nothing can join it")
        self.backend.add_to_chord(request.group, 1)
        joined = sig.clone().set(
            group_id=request.group, chord=request.chord, root_id=request.root_id
        )
        return joined.freeze() if lazy else joined.delay()

    def update_state(
        self, task_id: str | None = None, state: str | None = None, meta: Any = None, **_: Any
    ) -> None:
        """Store a state of the user's own, with `meta` as its result."""
        request = self.request
        if state is None:
            raise ValueError(f"update_state of {self.name} needs a state, such as 'PROGRESS'")
        target = task_id or request.id
        if target is None:
            raise ValueError(f"update_state of {self.name} outside of an execution needs a task_id")
        self.backend.store(target, meta, state, request=request)

    # -- hooks -------------------------------------------------------------------------

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Runs in the pool before the body."""

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Runs after a success."""

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Runs after a failure."""

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Runs when the task will be tried again."""

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        """Runs last, whatever the outcome."""

    def __repr__(self) -> str:
        return f"<@task: {self.name} of {getattr(self.app, 'main', None)}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"a task can not be pickled: send its name, {self.name!r}, instead")


def _direct_frame(task: Task, args: Any, kwargs: Any, outer: Any) -> Any:
    from umbel.app.context import Frame

    if outer is not None and outer.task is task and outer.request.id is not None:
        return outer  # super().__call__() from within an execution keeps its request
    return Frame(task, Context(args=args, kwargs=kwargs), outer)


def resend_options(request: Context) -> dict[str, Any]:
    """The calling options that make a message like the one being executed."""
    hard, soft = request.timelimit or (None, None)
    delivery = request.delivery_info or {}
    options = {
        "task_id": request.id,
        "root_id": request.root_id,
        "parent_id": request.parent_id or request.id,
        "group_id": request.group,
        "group_index": request.group_index,
        "shadow": request.shadow,
        "chord": request.chord,
        "chain": request.chain,
        "link": request.callbacks,
        "link_error": request.errbacks,
        "expires": request.expires,
        "soft_time_limit": soft,
        "time_limit": hard,
        "headers": request.headers,
        "retries": request.retries,
        "reply_to": request.reply_to,
        "ignore_result": request.ignore_result,
        "replaced_task_nesting": request.replaced_task_nesting,
        "stamped_headers": request.stamped_headers,
        "stamps": request.stamps,
        "origin": request.origin,
        "exchange": delivery.get("exchange"),
        "routing_key": delivery.get("routing_key"),
        "priority": delivery.get("priority"),
    }
    return {key: value for key, value in options.items() if value is not None}


class FailureInfo:
    """What the failure hooks get about an exception: itself and its traceback as text."""

    def __init__(self, exc: BaseException, text: str | None = None) -> None:
        self.exception = exc
        self.type = type(exc)
        self.traceback = text if text is not None else "".join(traceback.format_exception(exc))

    def __str__(self) -> str:
        return self.traceback


def add_to_caller(result: Any) -> None:
    """A task that sends tasks remembers them as its children."""
    caller = current_request()
    if caller is not None and caller.id is not None:
        caller.children.append(result)
