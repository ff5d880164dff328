"""Running a task in the calling process: `task.apply()` and `task_always_eager`."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from umbel.app.context import Context
from umbel.app.results import EagerResult
from umbel.app.trace import RETRY, SUCCESS, Traced, Tracer
from umbel.exceptions import Retry

if TYPE_CHECKING:
    from umbel.app.task import Task


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
    args = tuple(args or ())
    kwargs = dict(kwargs or {})
    request = Context(
        id=chosen_id,
        task=task.name,
        args=args,
        kwargs=kwargs,
        retries=retries,
        is_eager=True,
        called_directly=False,
        root_id=options.get("root_id") or chosen_id,
        parent_id=options.get("parent_id"),
        hostname=socket.gethostname(),
        callbacks=_as_list(link),
        errbacks=_as_list(link_error),
        chain=options.get("chain"),
        headers=options.get("headers"),
        ignore_result=options.get("ignore_result", False),
        delivery_info={"is_eager": True, "exchange": None, "routing_key": None, "priority": None},
        stamped_headers=options.get("stamped_headers"),
        stamps=options.get("stamps"),
    )
    traced = execute(Tracer(task, app, str(request.hostname), eager=True), request, args, kwargs)
    if traced.state == RETRY:
        outcome = traced.value
        if isinstance(outcome, Retry) and outcome.sig is not None:
            again = outcome.sig
            return task.apply(
                again.args, again.kwargs, link, link_error, chosen_id, retries + 1, throw, **options
            )
    propagate = app.conf.task_eager_propagates if throw is None else throw
    if propagate and traced.state != SUCCESS and isinstance(traced.value, BaseException):
        raise traced.value
    return EagerResult(
        chosen_id, traced.value, traced.state, traceback=traced.traceback or None, name=task.name
    )


def execute(tracer: Tracer, request: Context, args: Any, kwargs: Any) -> Traced:
    """Run a prepared execution in this thread, whether its body is async or not."""
    if not tracer.task.is_async:
        return tracer(request, args, kwargs)
    return run_coroutine(lambda: tracer.run_async(request, args, kwargs))


def run_coroutine(make: Callable[[], Coroutine[Any, Any, Traced]]) -> Traced:
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
