"""What a worker counts, for its own decisions and for whoever asks.

Written by the loop thread. Other threads read numbers; nothing here is locked.
"""

from __future__ import annotations

from collections import Counter


class Counters:
    """The numbers of one worker."""

    def __init__(self) -> None:
        self.received = 0
        self.started = 0
        self.finished = 0
        self.by_task: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.connections_lost = 0
        self.rebuilt_by_watchdog = 0
