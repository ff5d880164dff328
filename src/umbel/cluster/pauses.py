"""Which queues nobody takes messages from, as far as this node knows.

A pause, and its end, are told by broadcast with the wall-clock time at which the client gave the
command. Of two words about a queue the later one holds; of two of the same moment the pause does.
So all nodes come to the same answer, in whatever order they hear of it, and whoever starts, or was
away, takes over what the others know when it greets them (`cluster.mingle`).

The end of a pause is kept as well, or a node that was away when it was told would bring the pause
back. There is a word for at most `count_max` queues: those that were spoken of last. Forgetting the
oldest keeps the law, as nobody takes up a word that is older than all the others when full.

What others tell is checked, and never raises; what is refused is counted in `counts`:

| what                        | taken as                                |
| --------------------------- | --------------------------------------- |
| `{queue: [stamp, paused]}`  | joined with what is known               |
| a stamp `SKEW_MAX_S` ahead  | now: its clock is wrong                 |
| a word of any other shape   | nothing                                 |
| more than `READ_COUNT_MAX`  | nothing beyond                          |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

# Raising it lets more queues be paused at a time; each takes some 50 bytes of every greeting.
COUNT_MAX: Final = 1_000
READ_COUNT_MAX: Final = 10_000
SKEW_MAX_S: Final = 300.0
NAME_BYTES_MAX: Final = 255
_TIME_MAX: Final = 2.0**53

# Why something was refused or changed: the keys of `Pauses.counts`.
NOT_PAUSES: Final = "not-pauses"
BAD_QUEUE: Final = "bad-queue"
BAD_WORD: Final = "bad-word"
STAMP_AHEAD: Final = "stamp-ahead"
TOO_MANY: Final = "too-many"


class Word(NamedTuple):
    """What was last said of a queue; the greater one holds."""

    stamp: float
    paused: bool


class Pauses:
    """See the module's text. Not for several threads at a time."""

    __slots__ = ("_count_max", "_words", "counts")

    def __init__(self, count_max: int = COUNT_MAX) -> None:
        assert count_max > 0
        self.counts: Counter[str] = Counter()
        self._count_max = count_max
        self._words: dict[str, Word] = {}

    # -- questions ---------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._words)

    def get(self, queue: str) -> Word | None:
        """The last word about a queue."""
        return self._words.get(queue)

    def is_paused(self, queue: str) -> bool:
        """Whether nobody is to take messages from it."""
        word = self._words.get(queue)
        return word is not None and word.paused

    def told(self) -> dict[str, list[Any]]:
        """Everything, in the form in which it is told."""
        return {queue: list(word) for queue, word in self._words.items()}

    def summary(self) -> str:
        """Equal for equal knowledge, empty for none."""
        if not self._words:
            return ""
        return blake2b(_encode(self._words), digest_size=4).hexdigest()

    # -- changes -----------------------------------------------------------------------

    def say(self, queue: str, stamp: Any, paused: bool, now: float) -> bool:
        """Somebody pauses or resumes a queue: whether that is the last word about it now."""
        word = self._read([stamp, paused], now)
        if word is None or not is_queue(queue):
            raise ValueError(f"queue {queue!r:.300}, stamp {stamp!r:.100}: a name and a time")
        self._join({queue: word})
        return self._words.get(queue) == word

    def merge(self, told: Any, now: float) -> dict[str, bool]:
        """Take over what another node tells; the queues for which another word holds now."""
        if not isinstance(told, Mapping):
            self.counts[NOT_PAUSES] += 1
            return {}
        if len(told) > READ_COUNT_MAX:
            self.counts[TOO_MANY] += len(told) - READ_COUNT_MAX
        words: dict[str, Word] = {}
        for queue, given in islice(told.items(), READ_COUNT_MAX):
            word = self._read(given, now)
            if not is_queue(queue):
                self.counts[BAD_QUEUE] += 1
            elif word is None:
                self.counts[BAD_WORD] += 1
            else:
                words[queue] = word
        return self._join(words)

    def _read(self, given: Any, now: float) -> Word | None:
        if not isinstance(given, (list, tuple)) or len(given) != 2:
            return None
        stamp, paused = given
        if type(stamp) not in (int, float) or type(paused) is not bool:
            return None
        if not 0 < stamp < _TIME_MAX or not math.isfinite(stamp):
            return None
        if stamp > now + SKEW_MAX_S:
            self.counts[STAMP_AHEAD] += 1
            stamp = now
        return Word(float(stamp), paused)

    def _join(self, words: Mapping[str, Word]) -> dict[str, bool]:
        known = self._words
        newer = {
            queue: word
            for queue, word in words.items()
            if queue not in known or word > known[queue]
        }
        known.update(newer)
        excess = len(known) - self._count_max
        if excess > 0:
            self.counts[TOO_MANY] += excess
            for queue in sorted(known, key=lambda one: (known[one].stamp, one))[:excess]:
                del known[queue]
                newer.pop(queue, None)
        return {queue: word.paused for queue, word in newer.items()}


def is_queue(name: Any) -> bool:
    """Whether this can be the name of a queue."""
    try:
        return isinstance(name, str) and 0 < len(name.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False


_encode = msgspec.json.Encoder(order="deterministic").encode
