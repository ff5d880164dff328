"""`autoretry_for`: listed exceptions become retries with exponential back-off."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from umbel.cluster.backoff import Backoff
from umbel.exceptions import Ignore, Reject, Retry

if TYPE_CHECKING:
    from umbel.app.task import Task


def backoff_s(factor: float, retries: int, maximum_s: float, jitter: bool) -> float:
    """`factor * 2**retries`, bounded, and with jitter anything from zero up to that."""
    delay_s = Backoff(factor, maximum_s).pause_s(retries + 1)
    return random.uniform(0, delay_s) if jitter else delay_s  # noqa: S311 - no secret


def add_autoretry(task: Task) -> None:
    """Wrap the body of `task` when it has `autoretry_for`."""
    if not task.autoretry_for:
        return
    body = task.run
    task.run = _wrap(task, body)  # type: ignore[method-assign]


def _wrap(task: Task, body: Callable[..., Any]) -> Callable[..., Any]:
    passed: tuple[type[BaseException], ...] = (Ignore, Reject, Retry, *task.dont_autoretry_for)
    caught = tuple(task.autoretry_for)

    if inspect.iscoroutinefunction(body):

        @functools.wraps(body)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            try:
                return await body(*args, **kwargs)
            except passed:
                raise
            except caught as exc:
                raise _retry(task, exc) from exc

        return run_async

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return body(*args, **kwargs)
        except passed:
            raise
        except caught as exc:
            raise _retry(task, exc) from exc

    return run


def _retry(task: Task, exc: BaseException) -> Retry:
    options = dict(task.retry_kwargs)
    if task.retry_backoff:
        options["countdown"] = backoff_s(
            float(task.retry_backoff), task.request.retries, task.retry_backoff_max,
            task.retry_jitter,
        )  # fmt: skip
    return task.retry(exc=exc, **options)
