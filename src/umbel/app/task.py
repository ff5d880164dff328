"""A task: a function with a name, options, and ways to call it elsewhere.

`Task` instances are made by `@app.task`; users may give a subclass of their own with `base=`.
Options are class attributes, None meaning "as the settings say", which is looked up when it
is needed, so that settings changed after the decorator still count. One instance serves all
threads; what belongs to one execution is in `self.request`.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from umbel.app.canvas.signature import Signature
from umbel.app.context import Context, current_frame, current_request
from umbel.exceptions import ImproperlyConfigured, MaxRetriesExceededError, Retry
from umbel.wire.redaction import Redaction, Switch

if TYPE_CHECKING:
    from umbel.app.results import AsyncResult, EagerResult
    from umbel.app.results.backend import Backend
    from umbel.app.umbel import Umbel

_DIRECT = Context()
# So many ways to call one task are remembered as right.
SHAPES_MAX = 64


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
    # What is hidden in headers, events, logs and replies: True all, False nothing, names these as
    # well.
    redact: Switch = None
    _redaction: Redaction | None = None

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
        own = self.ignore_result  # asked for every call
        return bool(self.app.conf.task_ignore_result if own is None else own)

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
        # A plain function around an `async def` may run it itself, so it is called as it is.
        return inspect.iscoroutinefunction(self.run)

    @cached_property
    def parameters(self) -> inspect.Signature:
        """What the body can be called with."""
        return inspect.signature(self.run)

    @property
    def redaction(self) -> Redaction:
        """What of its arguments, results and errors may be shown."""
        names, switch, known = self.app.conf.task_redact_names, self.redact, self._redaction
        if known is None or known.names is not names or known.switch is not switch:
            known = self._redaction = Redaction(names, switch, self._signature(), self._rules_of)
        return known

    def _signature(self) -> inspect.Signature | None:
        try:
            return self.parameters
        except (TypeError, ValueError):  # a callable that does not tell
            return None

    def _rules_of(self, name: str) -> Redaction | None:
        task = self.app.tasks.get(name)
        return None if task is None else task.redaction

    def check_arguments(self, args: Any, kwargs: Any) -> None:
        """Raise TypeError when the body can not be called with these arguments."""
        # How many there are and what they are called decides, whatever their values.
        plain = type(args) in (tuple, list) and type(kwargs) is dict
        shape = (len(args), *kwargs) if plain else None
        if shape in self._shapes:
            return
        try:
            self.parameters.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.name}{self.parameters}: {exc}") from None
        if shape is not None and len(self._shapes) < SHAPES_MAX:
            self._shapes.add(shape)

    @cached_property
    def _shapes(self) -> set[tuple[Any, ...]]:
        """Of arguments that were found to fit."""
        return set()

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
        return self.app.send(self.name, args, kwargs, options, self, self.ignores_result)

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

    def AsyncResult(self, task_id: str) -> AsyncResult:
        """A handle on the result of an earlier call."""
        return self.app.AsyncResult(task_id)

    # -- signatures --------------------------------------------------------------------

    def signature(self, args: Any = None, *more: Any, **options: Any) -> Signature:
        """A call that is not made yet."""
        options.setdefault("app", self.app)
        return Signature(self.name, args, *more, **options)

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
        from umbel.app.retrying import retry

        return retry(
            self, args, kwargs, exc=exc, throw=throw, eta=eta, countdown=countdown,
            max_retries=max_retries, **options,
        )  # fmt: skip

    def signature_from_request(
        self,
        request: Context | None = None,
        args: Any = None,
        kwargs: Any = None,
        **changes: Any,
    ) -> Signature:
        """The signature that sends the current call, with these changes, once more."""
        from umbel.app.retrying import signature_again

        request = self.request if request is None else request
        return signature_again(self, request, args, kwargs, changes)

    def replace(self, sig: Any, visitor: Any = None) -> Any:
        """Let `sig` take the place of this task: its id, its callbacks, its chain and chord.

        Does not return: it raises `Ignore`, which ends the task here. Run inline, the value of
        the replacement is the value of the task.
        """
        from umbel.app.replacing import replace

        return replace(self, sig)

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:
        """Let `sig` join the chord that this task is a part of; with `lazy`, send it yourself."""
        request = self.request
        if not request.chord or request.group is None:
            raise ValueError(f"{self.name} is not part of a chord: nothing can join it")
        sig.set(
            group_id=request.group,
            group_index=request.group_index,
            chord=request.chord,
            root_id=request.root_id,
        )
        sig.freeze()
        self.backend.add_to_chord(request.group, 1)
        return sig if lazy else sig.delay()

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

    def send_event(
        self,
        type_: str,
        retry: bool = True,
        retry_policy: Mapping[str, Any] | None = None,
        *,
        blind: bool = False,
        utcoffset: Callable[[], float] | float | None = None,
        **fields: Any,
    ) -> None:
        """Tell monitors something about the task that runs, such as `task-progress`.

        Never waits and never fails; see `Dispatcher.send`, also for the options. Fields with secret
        names, and secrets in texts, show as '**' (`redact`).
        """
        request = self.request
        dispatcher = self.app.events.default_dispatcher(request.hostname)
        told = self.redaction.fields(fields)
        dispatcher.send(type_, blind, utcoffset, retry, retry_policy, uuid=request.id, **told)

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
        """Runs last, after a success or a failure."""

    def __repr__(self) -> str:
        return f"<@task: {self.name} of {getattr(self.app, 'main', None)}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"a task can not be pickled: send its name, {self.name!r}, instead")


def _direct_frame(task: Task, args: Any, kwargs: Any, outer: Any) -> Any:
    from umbel.app.context import Frame

    overridden = type(task).__call__ is not Task.__call__
    if overridden and outer is not None and outer.task is task and outer.request.id is not None:
        return outer  # super().__call__() from within an execution keeps its request
    return Frame(task, Context(args=args, kwargs=kwargs), outer)


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
