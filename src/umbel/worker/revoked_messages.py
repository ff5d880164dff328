"""Settles the messages of revoked tasks that this worker holds and has not begun.

A worker holds messages for hours: those of tasks that wait for their eta, for a rate limit or for
a free process. When it learns that such a task is revoked, from a command or from another node, the
message is acknowledged at once. If it were kept until the task is due, a worker that is killed
before that, and has neither a state file nor peers, would run the task after its restart.

Whoever learns of revocations, on whatever thread, adds them here. The loop looks their requests up
by id, `CHUNK` ids in one turn, so that a revoke of very many does not stop it. Revocations of
stamped headers need a look at every request. Tasks that have begun are left alone: ending them is
what `terminate` is for. On a solo worker the loop turns between tasks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from umbel.cluster.revocations import Revocation
from umbel.worker.statedb import StateNotSaved

if TYPE_CHECKING:
    from umbel.worker.request import Request
    from umbel.worker.worker import Worker

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

    def held(self, ids: Iterable[str], *, headers: bool = False) -> list[Request]:
        """What this worker has of these tasks, begun or not. From any thread."""
        tally, matching = self._worker.tally, self._worker.revocations.matching
        found = [request for one in ids for request in tally.of(one)]
        if headers:
            everything = list(tally.reserved.values())
            found += [one for one in everything if matching(one.header.stamps) is not None]
        return found

    def _settle(self) -> None:
        with self._lock:
            ids = {self._ids.popleft() for _ in range(min(CHUNK, len(self._ids)))}
            has_headers, self._has_headers = self._has_headers, False
            self._is_posted = bool(self._ids)
            if self._is_posted:
                self._worker.inbox.post(self._settle)
        worker = self._worker
        waiting = worker.take_waiting(self.held(ids, headers=has_headers))
        for request in waiting:
            request.strategy.discard(request, "revoked")
        if waiting:
            worker.rates.made_room()
            worker.dispatch()


def keep_as_long(worker: Worker, requests: Iterable[Request]) -> None:
    """Let revocations of these requests last as long as their tasks may come up."""
    changed: list[Revocation] = []
    for request in requests:
        if request.eta is not None or request.expires is not None:
            changed += worker.revocations.note_task(
                request.id, _unix(request.eta), _unix(request.expires), worker.wall(),
                request.header.stamps,
            )  # fmt: skip
    try:
        worker.keep_revoked(changed)
    except StateNotSaved as exc:
        logger.error("%s", exc)  # it is known in memory, and the tasks are discarded


def _unix(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
