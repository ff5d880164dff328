"""What follows the end of a task: callbacks, the rest of its chain, errbacks.

After a success the callbacks go out with the return value, several plain ones as one group,
then the next step of the chain with the rest of it. After a failure every step that will now
never run gets the same failure under its own id, and reports it to the chord that it belongs
to; then the errbacks are called. The caller stores the task's own result and reports its own
chord part, in the order that peers expect.

A callback or chain step that cannot be sent raises, so that the task does not count as done.
An errback that fails is logged: the failure it was called for is what matters.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from umbel.app.canvas import Signature, chain, chord, group, signature
from umbel.app.canvas.signature import as_list
from umbel.app.context import Context

if TYPE_CHECKING:
    from umbel.app.task import Task
    from umbel.app.umbel import Umbel

logger = logging.getLogger(__name__)


def on_success(app: Umbel, task: Task | None, request: Context, retval: Any) -> None:
    """Send the callbacks and the next step of the chain."""
    lineage = {"parent_id": request.id, "root_id": request.root_id or request.id}
    callbacks = [signature(one, app=app) for one in request.callbacks or ()]
    plain = [one for one in callbacks if not isinstance(one, group)]
    if len(plain) > 1:
        callbacks = [*(one for one in callbacks if isinstance(one, group)), group(plain, app=app)]
    for callback in callbacks:
        _send(request, callback, (retval,), lineage)
    if request.chain:
        *rest, following = request.chain
        step = signature(following, app=app)
        _send(request, step, (retval,), {**lineage, "chain": rest} if rest else lineage)


def on_failure(
    app: Umbel,
    task: Task | None,
    request: Context,
    exc: BaseException,
    traceback_text: str | None,
    state: str = "FAILURE",
) -> None:
    """Fail the rest of the chain, then call the errbacks."""
    fail_steps(app, request.chain or (), exc, traceback_text, state)
    if request.errbacks:
        call_errbacks(app, request, exc, traceback_text)


def fail_steps(
    app: Umbel,
    steps: Iterable[Any],
    exc: BaseException,
    traceback_text: str | None = None,
    state: str = "FAILURE",
) -> None:
    """Give the failure to every step that will not run."""
    for step in steps:
        fail_signature(app, signature(step, app=app), exc, traceback_text, state)


def fail_signature(
    app: Umbel,
    sig: Signature,
    exc: BaseException,
    traceback_text: str | None = None,
    state: str = "FAILURE",
    *,
    errbacks: bool = False,
) -> None:
    """Store the failure of a call that will not run, in every part that somebody may wait for."""
    inner: Iterable[Any] = ()
    if isinstance(sig, (chain, group)):
        inner = sig.tasks
    elif isinstance(sig, chord):
        inner = [sig.body] if sig.body is not None else []
    for part in inner:
        fail_signature(app, part, exc, traceback_text, state, errbacks=errbacks)
    context = _context_of(sig)
    if not isinstance(sig, (chain, group, chord)) and context.id is not None:
        if not context.ignore_result:
            app.backend.store(context.id, exc, state, traceback=traceback_text, request=context)
        if context.chord:
            app.backend.chord_part(context, state, exc)
        if errbacks and context.errbacks:
            call_errbacks(app, context, exc, traceback_text)
    fail_steps(app, context.chain or (), exc, traceback_text, state)


def call_errbacks(
    app: Umbel, request: Context, exc: BaseException, traceback_text: str | None
) -> None:
    """Call the errbacks that take the failure itself; send the others the failed task's id."""
    by_id = []
    for errback in (signature(one, app=app) for one in request.errbacks or ()):
        if _takes_failure(errback):
            try:
                _run_here(errback, request, exc, traceback_text)
            except Exception:
                logger.exception("errback %r of task %s failed", errback.task, request.id)
        else:
            by_id.append(errback)
    if not by_id:
        return
    sent = by_id[0] if len(by_id) == 1 else group(by_id, app=app)
    lineage = {"parent_id": request.id, "root_id": request.root_id or request.id}
    try:
        _send(request, sent, (request.id,), lineage)
    except Exception:
        logger.exception("the errbacks of task %s could not be sent", request.id)


def _send(request: Context, sig: Signature, args: Any, options: dict[str, Any]) -> None:
    if request.is_eager:
        sig.apply(args, **options)
    else:
        sig.apply_async(args, **options)


def _takes_failure(errback: Signature) -> bool:
    """Whether it is registered here and takes more than one argument."""
    if errback.subtask_type:
        return False
    task = errback.registered()
    if task is None:
        return False
    try:
        parameters = inspect.signature(task.run).parameters.values()
    except (TypeError, ValueError):
        return False
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [
        p for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in errback.kwargs
    ]  # fmt: skip
    stored = 0 if errback.immutable else len(errback.args)
    return open_ended or len(positional) - stored > 1


def _run_here(
    errback: Signature, request: Context, exc: BaseException, traceback_text: str | None
) -> None:
    answer = errback(request, exc, traceback_text)
    if inspect.iscoroutine(answer):
        asyncio.run(answer)


def _context_of(sig: Signature) -> Context:
    options = sig.options
    return Context(
        id=options.get("task_id"),
        task=sig.task,
        args=sig.args,
        kwargs=sig.kwargs,
        group=options.get("group_id"),
        group_index=options.get("group_index"),
        chord=options.get("chord"),
        chain=options.get("chain"),
        callbacks=as_list(options.get("link")),
        errbacks=as_list(options.get("link_error")),
        root_id=options.get("root_id"),
        parent_id=options.get("parent_id"),
        reply_to=options.get("reply_to"),
        ignore_result=options.get("ignore_result"),
        stamped_headers=options.get("stamped_headers"),
        called_directly=False,
    )
