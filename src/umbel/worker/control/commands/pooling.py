"""Commands that change the pool."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from umbel.worker.control.commands.registry import command
from umbel.worker.control.panel import CommandState

GROW_MAX = 10_000


@command
def pool_grow(state: CommandState, n: Any = 1, **_: Any) -> dict[str, str]:
    """Run so many more tasks at a time."""
    if state.worker.autoscaler is not None:
        return {"error": "pool size is set by the autoscaler: use autoscale"}
    state.worker.grow(_count(n))
    return {"ok": "pool will grow"}


@command
def pool_shrink(state: CommandState, n: Any = 1, **_: Any) -> dict[str, str]:
    """Run so many fewer tasks at a time."""
    if state.worker.autoscaler is not None:
        return {"error": "pool size is set by the autoscaler: use autoscale"}
    state.worker.shrink(_count(n))
    return {"ok": "pool will shrink"}


@command
def autoscale(
    state: CommandState,
    max: Any = None,  # noqa: A002 - the name on the wire
    min: Any = None,  # noqa: A002
    **_: Any,
) -> dict[str, str]:
    """Set the bounds between which the autoscaler chooses the size of the pool."""
    autoscaler = state.worker.autoscaler
    if autoscaler is None:
        raise ValueError("Autoscale not enabled")
    most, least = autoscaler.update(
        None if max is None else _count(max),
        None if min is None else _count(min, 0) or 1,  # one always stays, as Celery's 0 means
    )
    return {"ok": f"autoscale now max={most} min={least}"}


@command
def pool_restart(
    state: CommandState, modules: Any = None, reload: Any = False, reloader: Any = None, **_: Any
) -> dict[str, str]:
    """Replace what runs tasks, each part when its task has ended; load modules before."""
    if not state.app.conf.worker_pool_restarts:
        raise ValueError("Pool restarts not enabled")
    for name in _names(modules):
        module = importlib.import_module(name)
        if reload:
            importlib.reload(module)
    state.worker.pool.restart()
    return {"ok": "reload started"}


def _count(given: Any, least: int = 1) -> int:
    try:
        count = int(given)
    except (TypeError, ValueError):
        raise ValueError(f"{given!r} is not a number: give how many") from None
    if not least <= count <= GROW_MAX:
        raise ValueError(f"{count} is out of range: give {least} to {GROW_MAX}")
    return count


def _names(modules: Any) -> Iterable[str]:
    if modules is None:
        return ()
    return [modules] if isinstance(modules, str) else list(modules)
