"""Commands that change the limits of a task type."""

from __future__ import annotations

from typing import Any

from umbel.worker.control.commands.registry import command
from umbel.worker.control.panel import CommandState


@command
def rate_limit(
    state: CommandState, task_name: Any = None, rate_limit: Any = None, **_: Any
) -> dict[str, str]:
    """Let so many tasks of a type begin per second, minute or hour; 0 lifts the limit."""
    task = state.app.tasks.get(task_name) if isinstance(task_name, str) else None
    try:
        # Checked first: a wrong limit is told also for an unknown task.
        from umbel.app.declaring import parse_rate

        parse_rate(rate_limit)
    except (ValueError, TypeError):
        return {"error": f"Invalid rate limit string: {rate_limit!r}"}
    if task is None:
        return {"error": "unknown task"}
    state.worker.driver.set_rate_limit(task_name, rate_limit)
    task.rate_limit = rate_limit
    if not rate_limit:
        return {"ok": "rate limit disabled successfully"}
    return {"ok": "new rate limit set successfully"}


@command(anywhere=True)
def time_limit(
    state: CommandState, task_name: Any = None, hard: Any = None, soft: Any = None, **_: Any
) -> dict[str, str]:
    """Give the tasks of a type so many seconds; null or 0 lifts a limit."""
    task = state.app.tasks.get(task_name) if isinstance(task_name, str) else None
    if task is None:
        return {"error": "unknown task"}
    hard_s, soft_s = _seconds("hard", hard), _seconds("soft", soft)
    task.time_limit, task.soft_time_limit = hard_s, soft_s
    strategy = state.worker.receiver.strategies.get(task_name)
    if strategy is not None:
        plan = state.worker.plan
        strategy.hard_s = hard_s or plan.time_limit_s
        strategy.soft_s = soft_s or plan.soft_time_limit_s
    return {"ok": "time limits set successfully"}


def _seconds(name: str, value: Any) -> float | None:
    if value is None or value in ("", 0):  # from a command line nothing can only be said as 0
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} time limit {value!r}: give seconds, or nothing") from None
    if not 0 < seconds < 10**9:
        raise ValueError(f"{name} time limit {value!r}: give seconds above 0, or nothing")
    return seconds
