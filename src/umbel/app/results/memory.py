"""Results inside one process: for the memory transport, and for tests.

Everything with the same address in one process shares one store, as everything on the memory
transport shares its queues. Documents are kept in their encoded form, so that what comes back
is what a real backend would give. Bounded: past `DOCUMENTS_MAX` the oldest are dropped.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from umbel.app.results import chords
from umbel.app.results.backend import Backend
from umbel.app.results.watching import OnMeta, Watch, Watchers
from umbel.exceptions import ChordError

if TYPE_CHECKING:
    from umbel.app.context import Context
    from umbel.app.umbel import Umbel

DOCUMENTS_MAX = 100_000


@dataclass(slots=True)
class Chord:
    """The parts of one chord that have ended."""

    size: int | None = None
    joined: int = 0
    parts: dict[str, tuple[float, int, bytes]] = field(default_factory=dict)
    done: bool = False


class Store:
    """What one address holds."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.documents: OrderedDict[str, tuple[float | None, bytes]] = OrderedDict()
        self.final: set[str] = set()
        self.groups: OrderedDict[str, Any] = OrderedDict()
        self.chords: OrderedDict[str, Chord] = OrderedDict()
        self.watchers = Watchers()

    def trim(self) -> None:
        """Drop the oldest of each kind beyond the bound."""
        while len(self.documents) > DOCUMENTS_MAX:
            task_id, _ = self.documents.popitem(last=False)
            self.final.discard(task_id)
        for kept in (self.groups, self.chords):
            while len(kept) > DOCUMENTS_MAX:
                kept.popitem(last=False)


class MemoryBackend(Backend):
    """Keeps results in this process."""

    supports_chords = True
    stores: ClassVar[dict[str, Store]] = {}

    def __init__(self, app: Umbel, url: str) -> None:
        super().__init__(app, url)
        self._store = self.stores.setdefault(url, Store())

    def store(
        self,
        task_id: str,
        result: Any,
        state: str,
        *,
        traceback: str | None = None,
        request: Context | None = None,
    ) -> None:
        """Keep the document and tell the watchers."""
        codec, kept = self.codec, self._store
        raw = codec.stored(task_id, result, state, traceback, request)
        ttl = self.app.conf.result_expires
        seconds = ttl.total_seconds() if hasattr(ttl, "total_seconds") else ttl
        with kept.lock:
            if task_id in kept.final:
                return
            kept.documents[task_id] = (time.monotonic() + seconds if seconds else None, raw)
            if state == "SUCCESS":
                kept.final.add(task_id)
            kept.trim()
        if task_id in kept.watchers:
            kept.watchers.deliver(codec.read(raw, task_id))

    def get_many(self, task_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The documents that have not expired."""
        now = time.monotonic()
        found = {}
        for task_id in task_ids:
            expires, raw = self._store.documents.get(task_id, (None, None))
            fresh = raw if expires is None or expires > now else None
            found[task_id] = self.codec.read(fresh, task_id)
        return found

    def forget(self, task_id: str) -> None:
        """Drop the document."""
        with self._store.lock:
            self._store.documents.pop(task_id, None)
            self._store.final.discard(task_id)

    def watch(self, task_ids: Iterable[str], on_meta: OnMeta, *, every: bool = False) -> Watch:
        """Watch; what is there already is told before this returns."""
        ids = list(task_ids)
        watch = self._store.watchers.add(ids, on_meta, every)
        for meta in self.get_many(ids).values():
            if meta["status"] != "PENDING":
                self._store.watchers.deliver(meta)
        return watch

    def cleanup(self) -> None:
        """Drop what has expired."""
        now = time.monotonic()
        with self._store.lock:
            gone = [i for i, (at, _) in self._store.documents.items() if at and at <= now]
            for task_id in gone:
                self.forget(task_id)

    # -- groups and chords -------------------------------------------------------------

    def save_group(self, group_id: str, result: Any) -> None:
        """Keep the group."""
        with self._store.lock:
            self._store.groups[group_id] = self.codec.dumps({"result": result})
            self._store.trim()

    def restore_group(self, group_id: str) -> Any:
        """The saved result tuple, or None."""
        raw = self._store.groups.get(group_id)
        return None if raw is None else self.codec.loads(raw)["result"]

    def delete_group(self, group_id: str) -> None:
        """Drop the saved group."""
        self._store.groups.pop(group_id, None)

    def start_chord(self, group_id: str, size: int) -> None:
        """Set the number of parts."""
        with self._store.lock:
            self._store.chords[group_id] = Chord(size=size)
            self._store.trim()

    def add_to_chord(self, group_id: str, count: int = 1) -> None:
        """Raise the number of parts."""
        with self._store.lock:
            self._store.chords.setdefault(group_id, Chord()).joined += count

    def chord_part(self, request: Context, state: str, result: Any) -> None:
        """Record the part; the last one sends the body."""
        if not request.group or not request.id:
            return
        index = request.group_index
        raw = self.codec.part(request.id, state, result)
        with self._store.lock:
            chord = self._store.chords.setdefault(request.group, Chord())
            place = float("inf") if index is None else float(index)
            chord.parts.setdefault(f"{request.id}:{index}", (place, len(chord.parts), raw))
            complete = chord.size is not None and len(chord.parts) >= chord.size + chord.joined
            if chord.done or not complete:
                return
            chord.done = True
        parts = [part for _, _, part in sorted(chord.parts.values())]
        chord.parts.clear()
        try:
            values = chords.joined(self, parts, self.restore_group(request.group))
        except ChordError as exc:
            chords.fail_body(self, request, exc)
        else:
            chords.send_body(self, request, values)

    def after_fork(self) -> None:
        """The child has a copy of the store, and nobody who waits."""
        self._store.lock = threading.RLock()
        self._store.watchers = Watchers()
