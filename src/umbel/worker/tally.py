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
        self.active: dict[int, Request] = {}  # being executed
        self.losses: OrderedDict[str, int] = OrderedDict()
        self.connections_lost = 0
        self.rebuilt_by_watchdog = 0

    def lost_again(self, task_id: str) -> int:
        """Count that a pool process died under this task; how often that has happened."""
        count = self.losses.pop(task_id, 0) + 1
        self.losses[task_id] = count
        if len(self.losses) > LOSSES_REMEMBERED_MAX:
            self.losses.popitem(last=False)
        return count
