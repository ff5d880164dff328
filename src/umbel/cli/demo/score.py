"""Who ran what, and whether it was right."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from umbel.cli.demo.load import Expectation


class Score:
    """Counts results as they are pushed; safe to read while they arrive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Expectation | None] = {}
        self._kind_of: dict[str, str] = {}
        self.sent: Counter[str] = Counter()
        self.right: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.ran: dict[str, Counter[str]] = defaultdict(Counter)
        self.executions = 0
        self.complete = threading.Event()
        self._all_sent = False

    def expect(self, expectations: Iterable[Expectation]) -> list[str]:
        """Add calls; returns the ids to watch."""
        ids: list[str] = []
        with self._lock:
            for expected in expectations:
                self.sent[expected.kind] += 1
                for task_id in expected.ids:
                    self._waiting[task_id] = expected if task_id == expected.id else None
                    self._kind_of[task_id] = expected.kind
                    ids.append(task_id)
        return ids

    def all_sent(self) -> None:
        """Nothing more will be expected."""
        with self._lock:
            self._all_sent = True
            self._check_complete()

    def on_meta(self, meta: dict[str, Any]) -> None:
        """A task has ended."""
        with self._lock:
            task_id = meta["task_id"]
            if task_id not in self._waiting:
                return
            expected = self._waiting.pop(task_id)
            kind = self._kind_of.pop(task_id)
            self.executions += 1
            self.ran[kind][str(meta.get("worker"))] += 1
            if expected is not None:
                if expected.is_met_by(meta):
                    self.right[kind] += 1
                else:
                    self.wrong.append(
                        f"{kind} {task_id}: expected {expected.status} {expected.value!r}, "
                        f"got {meta['status']} {meta['result']!r}"
                    )
            self._check_complete()

    def _check_complete(self) -> None:
        if self._all_sent and not self._waiting:
            self.complete.set()

    @property
    def missing(self) -> int:
        """How many tasks have not ended."""
        return len(self._waiting)

    @property
    def passed(self) -> bool:
        """Whether every call had its right answer."""
        return not self.wrong and not self._waiting and self.right == self.sent
