"""What a worker counts and holds, for its own decisions and for whoever asks.

Owned by the loop thread. Other threads read numbers and take copies; nothing here is locked.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umbel.worker.request import Request

# Of so many different tasks it is remembered how often they took a pool process with them.
LOSSES_REMEMBERED_MAX = 10_000


class Tally:
    """The numbers of one worker."""

    def __init__(self) -> None:
        self.received = 0
        self.started = 0
        self.finished = 0
        self.by_task: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.reserved: dict[int, Request] = {}  # received, not settled; keyed by id(request)
        self._by_task_id: dict[str, Request] = {}  # the same
        self._repeated: dict[str, list[Request]] = {}  # further messages of an id, sent twice
        self.active: dict[int, Request] = {}  # being executed
        self.losses: OrderedDict[str, int] = OrderedDict()
        self.connections_lost = 0
        self.rebuilt_by_watchdog = 0

    def reserve(self, request: Request) -> None:
        """A request was received."""
        self.reserved[id(request)] = request
        known = self._by_task_id.setdefault(request.header.id, request)
        if known is not request:
            self._repeated.setdefault(request.header.id, []).append(request)

    def release(self, request: Request) -> None:
        """A request is not held any more, if it was."""
        if self.reserved.pop(id(request), None) is None:
            return
        task_id = request.header.id
        known = self._by_task_id.pop(task_id)
        if self._repeated and (others := self._repeated.pop(task_id, None)):
            kept = [one for one in (known, *others) if one is not request]
            self._by_task_id[task_id] = kept[0]
            if kept[1:]:
                self._repeated[task_id] = kept[1:]

    def of(self, task_id: str) -> tuple[Request, ...]:
        """The requests of one task, in constant time."""
        known = self._by_task_id.get(task_id)
        return () if known is None else (known, *self._repeated.get(task_id, ()))

    def lost_again(self, task_id: str) -> int:
        """Count that a pool process died under this task; how often that has happened."""
        count = self.losses.pop(task_id, 0) + 1
        self.losses[task_id] = count
        if len(self.losses) > LOSSES_REMEMBERED_MAX:
            self.losses.popitem(last=False)
        return count
