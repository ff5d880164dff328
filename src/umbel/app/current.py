"""Which application is meant when none is named.

A worker sets its own application as current for the whole process; a client that makes one
application gets that one; with several, the last one made, until `app.set_current()` says
otherwise. The choice is per process: tasks never see another process's application.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

_lock = threading.Lock()
_apps: weakref.WeakSet[Umbel] = weakref.WeakSet()
_current: Umbel | None = None
_shared: list[Callable[[Umbel], object]] = []


def current_app() -> Umbel:
    """The current application; a plain `Umbel('default')` is made when there is none."""
    app = _current
    if app is None:
        from umbel.app.umbel import Umbel

        app = Umbel("default")
    return app


def set_current(app: Umbel) -> None:
    """Make `app` the current application of this process."""
    global _current
    _current = app


def announce(app: Umbel) -> None:
    """A new application learns every shared task, and later those to come."""
    with _lock:
        _apps.add(app)
        pending = list(_shared)
    for register in pending:
        register(app)


def share(register: Callable[[Umbel], object]) -> None:
    """Run `register` for every application there is and every one to come."""
    with _lock:
        _shared.append(register)
        apps = list(_apps)
    for app in apps:
        register(app)
