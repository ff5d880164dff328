"""Settles the messages of revoked tasks that this worker holds and has not begun.

A worker holds messages for hours: those of tasks that wait for their eta, for a rate limit or for
a free process. When it learns that such a task is revoked, from a command or from another node, the
message is acknowledged at once. If it were kept until the task is due, a worker that is killed
before that, and has neither a state file nor peers, would run the task after its restart.

Whoever learns of revocations, on whatever thread, adds them here. The loop looks up their
deliveries by id, `CHUNK` ids in one turn, so that a revoke of very many does not stop it.
Revocations of stamped headers need a look at every delivery. Tasks that have begun are left alone:
ending them is what `terminate` is for. On a solo worker the loop turns between tasks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from umbel.cluster.revocations import Revocation
from umbel.worker.runtime.statedb import StateNotSaved

if TYPE_CHECKING:
    from umbel.worker.runtime.delivery_driver import TaskDelivery
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.worker")

# A larger number settles a bulk revoke in fewer turns of the loop, which then take longer.
CHUNK = 500


class RevokedMessages:
    """What one worker has learned to be revoked and has not looked for yet."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._ids: deque[str] = deque()
        self._has_headers = False
        self._is_posted = False

    def add(self, ids: Iterable[str], *, headers: bool = False) -> None:
        """These ids are revoked, and stamped headers if `headers` is true. From any thread."""
        with self._lock:
            self._ids.extend(ids)
            self._has_headers = self._has_headers or headers
            is_due = bool(self._ids or self._has_headers) and not self._is_posted
            self._is_posted = self._is_posted or is_due
        if is_due:
            self._worker.inbox.post(self._settle)

    def _settle(self) -> None:
        with self._lock:
            ids = {self._ids.popleft() for _ in range(min(CHUNK, len(self._ids)))}
            has_headers, self._has_headers = self._has_headers, False
            self._is_posted = bool(self._ids)
            if self._is_posted:
                self._worker.inbox.post(self._settle)
        worker = self._worker
        held = worker.deliveries.held_of(ids, headers=has_headers)
        worker.deliveries.discard_waiting(held, "revoked")


def keep_as_long(worker: Worker, deliveries: Iterable[TaskDelivery]) -> None:
    """Let revocations of these deliveries last as long as their tasks may come up."""
    changed: list[Revocation] = []
    for delivery in deliveries:
        if delivery.eta_s is not None or delivery.expires_s is not None:
            changed += worker.revocations.note_task(
                delivery.id,
                delivery.eta_s,
                delivery.expires_s,
                worker.wall(),
                delivery.header.stamps,
            )
    try:
        worker.keep_revoked(changed)
    except StateNotSaved as exc:
        logger.error("%s", exc)  # it is known in memory, and the tasks are discarded
