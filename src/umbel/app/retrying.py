"""`self.retry(...)`: the call that is being executed is sent once more, for later.

The message is like the one that is being executed, its id included; only the number of retries
and the time differ, and what the caller changes. It goes where the first one went unless another
queue or exchange is named.

The state RETRY is stored before the message is sent: the next run may end, and store its outcome,
before the run that sent it has ended.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any, NoReturn

from kombu.exceptions import OperationalError

from umbel.exceptions import Reject, Retry

if TYPE_CHECKING:
    from umbel.app.canvas import Signature
    from umbel.app.context import Context
    from umbel.app.task import Task

logger = logging.getLogger("umbel.task")


def retry(
    task: Task,
    args: Any,
    kwargs: Any,
    *,
    exc: BaseException | None,
    throw: bool,
    eta: Any,
    countdown: float | None,
    max_retries: int | None,
    **options: Any,
) -> Retry:
    """Send the call again and raise (or with `throw=False` return) the outcome `Retry`."""
    request = task.request
    if request.called_directly:
        _reraise(exc)
    limit = task.max_retries if max_retries is None else max_retries
    if not eta and countdown is None:
        countdown = task.default_retry_delay
    args, kwargs = _arguments(task, request, args, kwargs)
    cause = exc if exc is not None else sys.exc_info()[1]
    retries = request.retries + 1
    if limit is not None and retries > limit:
        if exc is not None:
            raise exc
        rules = task.redaction
        raise task.MaxRetriesExceededError(
            f"Can't retry {task.name}[{request.id}] args:{rules.args_repr(args)} "
            f"kwargs:{rules.kwargs_repr(kwargs)}",
            task_args=args,
            task_kwargs=kwargs,
        ) from cause
    changes = {**options, "countdown": countdown, "eta": eta, "retries": retries}
    again = signature_again(task, request, args, kwargs, changes)
    outcome = Retry(exc=cause, when=eta or countdown, is_eager=request.is_eager, sig=again)
    if not request.is_eager:
        outcome.clock = task.app.clock.forward()
        _store(task, request, outcome)
        _send(task, again)
    if throw:
        raise outcome
    return outcome


def signature_again(
    task: Task, request: Context, args: Any, kwargs: Any, changes: Mapping[str, Any]
) -> Signature:
    """The signature of a message like the one being executed, with these changes."""
    options = resend_options(request)
    chosen = {name: value for name, value in changes.items() if value is not None}
    if "queue" in chosen or "exchange" in chosen:
        # Another address, not a part of the one that the message had.
        options.pop("exchange", None)
        options.pop("routing_key", None)
    return task.signature(
        request.args if args is None else args,
        request.kwargs if kwargs is None else kwargs,
        **{**options, **chosen},
    )


def _arguments(task: Task, request: Context, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What a retry does not say is kept from the call, where it still fits what is said."""
    before, named = tuple(request.args or ()), dict(request.kwargs or {})
    if args is None and kwargs is None:
        return before, named
    kinds = {name: p.kind for name, p in task.parameters.parameters.items()}
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    positional = [name for name, kind in kinds.items() if kind in by_place]
    if kwargs is None:
        given = set(positional[: len(args)])
        return args, {name: value for name, value in named.items() if name not in given}
    if args is not None:
        return args, kwargs
    kept, rest = list(before), dict(kwargs)
    for place, name in enumerate(positional[: len(kept)]):
        if name in rest and kinds[name] is Parameter.POSITIONAL_OR_KEYWORD:
            kept[place] = rest.pop(name)
    return tuple(kept), rest


def _store(task: Task, request: Context, outcome: Retry) -> None:
    from umbel.app.trace import RETRY, traceback_text

    outcome.is_stored = True
    ignored = request.ignore_result
    if request.id is None or (task.ignores_result if ignored is None else ignored):
        return
    cause = outcome.cause
    text = traceback_text(cause)
    try:
        task.app.backend.store(request.id, cause, RETRY, traceback=text, request=request)
    except Exception:
        logger.exception("task %s[%s]: its retry was not recorded", task.name, request.id)


def _send(task: Task, again: Signature) -> None:
    try:
        again.apply_async(add_to_parent=False)
    except OperationalError as failure:
        if task.option("acks_late", "task_acks_late"):
            raise Reject(failure, requeue=True) from failure
        raise


def _reraise(exc: BaseException | None) -> NoReturn:
    if exc is not None:
        raise exc
    current = sys.exc_info()[1]
    if current is not None:
        raise current
    raise Retry("Task can be retried", None)


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
