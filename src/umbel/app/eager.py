"""Running a task in the calling process: `task.apply()` and `task_always_eager`."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from umbel.app.calls import stamps_of
from umbel.app.context import Context, current_request
from umbel.app.results import EagerResult
from umbel.app.spans import tracer_class
from umbel.app.trace import FAILURE, RETRY, Traced, Tracer, traceback_text
from umbel.exceptions import Retry

if TYPE_CHECKING:
    from umbel.app.task import Task

Value = TypeVar("Value")


def run_inline(
    task: Task,
    args: Any,
    kwargs: Any,
    *,
    task_id: str | None = None,
    retries: int = 0,
    throw: bool | None = None,
    link: Any = None,
    link_error: Any = None,
    **options: Any,
) -> EagerResult:
    """Run `task` now, retries included, and return its result as if a worker had run it."""
    app = task.app
    chosen_id = task_id or str(uuid.uuid4())
    given = {**options, "link": link, "link_error": link_error}
    tracer = tracer_class(app)(task, app, socket.gethostname(), eager=True)
    while True:
        request = _request(tracer, chosen_id, tuple(args or ()), dict(kwargs or {}), given)
        request.retries = retries
        traced = execute(tracer, request, request.args, request.kwargs)
        again = traced.value.sig if isinstance(traced.value, Retry) else None
        if traced.state != RETRY or again is None:
            break
        args, kwargs, retries = again.args, again.kwargs, retries + 1
    propagate = app.conf.task_eager_propagates if throw is None else throw
    if propagate and traced.state in (FAILURE, RETRY) and isinstance(traced.value, BaseException):
        raise traced.value
    return EagerResult(
        chosen_id, traced.value, traced.state, traceback=_traceback(traced.value), name=task.name
    )


def _traceback(value: Any) -> str | None:
    """The traceback of an outcome, whole: it is the caller's own."""
    error = value.exc or value if isinstance(value, Retry) else value
    return traceback_text(error) if isinstance(error, BaseException) else None


def _request(
    tracer: Tracer, task_id: str, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> Context:
    task, caller = tracer.task, current_request()
    parent = caller if caller is not None and caller.id is not None else Context()
    hard, soft = (
        options.get(name) if options.get(name) is not None else getattr(task, name)
        for name in ("time_limit", "soft_time_limit")
    )
    return Context(
        id=task_id,
        task=task.name,
        args=args,
        kwargs=kwargs,
        is_eager=True,
        called_directly=False,
        root_id=options.get("root_id") or parent.root_id or parent.id or task_id,
        parent_id=options.get("parent_id") or parent.id,
        group=options.get("group_id"),
        group_index=options.get("group_index"),
        hostname=tracer.hostname,
        callbacks=_as_list(options["link"]),
        errbacks=_as_list(options["link_error"]),
        chain=options.get("chain"),
        headers=options.get("headers"),
        shadow=options.get("shadow"),
        ignore_result=options.get("ignore_result"),
        timelimit=None if hard is None and soft is None else (hard, soft),
        delivery_info={
            "is_eager": True,
            **{name: options.get(name) for name in ("exchange", "routing_key", "priority")},
        },
        replaced_task_nesting=options.get("replaced_task_nesting") or 0,
        stamped_headers=options.get("stamped_headers"),
        stamps=stamps_of(options),
    )


def execute(tracer: Tracer, request: Context, args: Any, kwargs: Any) -> Traced:
    """Run a prepared execution in this thread, whether its body is async or not."""
    if not tracer.task.is_async:
        return tracer(request, args, kwargs)
    return run_coroutine(lambda: tracer.run_async(request, args, kwargs))


def run_coroutine(make: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
    """Run a coroutine to its end, also where this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    context = copy_context()
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(context.run, lambda: asyncio.run(make())).result()


def _as_list(link: Any) -> list[Any] | None:
    if not link:
        return None
    return list(link) if isinstance(link, (list, tuple)) else [link]
