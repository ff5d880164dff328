"""Who waits for which task, and telling them.

A `Watch` is one caller's interest in the ends of some tasks. `Watchers` maps task ids to
watches; the thread that learns of a result calls `deliver`. Callbacks run on that thread, one
at a time, outside of any lock: they must be quick, and one that raises is logged and harms
nobody else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

from umbel.wire.results import READY_STATES

logger = logging.getLogger(__name__)

OnMeta = Callable[[dict[str, Any]], None]


class Watch:
    """The interest of one caller; closing it twice does no harm."""

    __slots__ = ("_watchers", "every", "ids", "on_meta")

    def __init__(
        self, watchers: Watchers, ids: Iterable[str], on_meta: OnMeta, every: bool
    ) -> None:
        self._watchers = watchers
        self.ids = set(ids)
        self.on_meta = on_meta
        self.every = every

    def close(self) -> None:
        """No more callbacks begin after this returns; one that runs may still end."""
        self._watchers.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Watchers:
    """All watches of one backend in one process."""

    def __init__(self, changed: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, list[Watch]] = {}
        self._changed = changed

    def add(self, ids: Iterable[str], on_meta: OnMeta, every: bool = False) -> Watch:
        """Begin to watch; every id is reported once when it ends, and before that if `every`."""
        watch = Watch(self, ids, on_meta, every)
        with self._lock:
            for task_id in watch.ids:
                self._by_id.setdefault(task_id, []).append(watch)
        return watch

    def remove(self, watch: Watch) -> None:
        """End a watch."""
        with self._lock:
            left = [task_id for task_id in watch.ids if self._drop(task_id, watch)]
            watch.ids.clear()
        if left and self._changed is not None:
            self._changed()

    def wanted(self) -> set[str]:
        """The ids that somebody waits for."""
        with self._lock:
            return set(self._by_id)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._by_id

    def deliver(self, meta: dict[str, Any]) -> None:
        """Tell whoever waits for this task; a final state ends their interest in it."""
        task_id, final = meta["task_id"], meta["status"] in READY_STATES
        with self._lock:
            told = [w for w in self._by_id.get(task_id, ()) if final or w.every]
            if final:
                for watch in told:
                    watch.ids.discard(task_id)
                self._by_id.pop(task_id, None)
        for watch in told:
            try:
                watch.on_meta(meta)
            except Exception:
                logger.exception("a callback waiting for task %s failed", task_id)

    def _drop(self, task_id: str, watch: Watch) -> bool:
        watches = self._by_id.get(task_id)
        if watches is None or watch not in watches:
            return False
        watches.remove(watch)
        if not watches:
            del self._by_id[task_id]
            return True
        return False
