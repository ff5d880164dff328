"""Umbel: a worker cluster for background tasks that speaks Celery's wire formats.

The public surface is what this module exports; everything else may move between versions.
Names are resolved on first use, so that `import umbel` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from umbel.version import __version__

_EXPORTS = {
    "Umbel": "umbel.app.umbel",
    "Task": "umbel.app.task",
    "shared_task": "umbel.app.shared",
    "current_app": "umbel.app.current",
    "current_task": "umbel.app.context",
    "Signature": "umbel.app.canvas",
    "signature": "umbel.app.canvas",
    "chain": "umbel.app.canvas",
    "group": "umbel.app.canvas",
    "chord": "umbel.app.canvas",
    "xmap": "umbel.app.canvas",
    "xstarmap": "umbel.app.canvas",
    "chunks": "umbel.app.canvas",
    "AsyncResult": "umbel.app.results",
    "ConnectionBlocked": "umbel.broker.sessions.errors",
    "GroupResult": "umbel.app.results",
    "Nacked": "umbel.broker.sessions.errors",
    "Unroutable": "umbel.broker.sessions.errors",
}

__all__ = [
    "AsyncResult",
    "ConnectionBlocked",
    "GroupResult",
    "Nacked",
    "Signature",
    "Task",
    "Umbel",
    "Unroutable",
    "__version__",
    "chain",
    "chord",
    "chunks",
    "current_app",
    "current_task",
    "group",
    "shared_task",
    "signature",
    "xmap",
    "xstarmap",
]

if TYPE_CHECKING:
    # From the submodules: their names are those of what they hold.
    from umbel.app.canvas.chain import chain
    from umbel.app.canvas.chord import chord
    from umbel.app.canvas.group import group
    from umbel.app.canvas.maps import chunks, xmap, xstarmap
    from umbel.app.canvas.signature import Signature, signature
    from umbel.app.context import current_task
    from umbel.app.current import current_app
    from umbel.app.results import AsyncResult, GroupResult
    from umbel.app.shared import shared_task
    from umbel.app.task import Task
    from umbel.app.umbel import Umbel
    from umbel.broker.sessions.errors import ConnectionBlocked, Nacked, Unroutable


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'umbel' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
