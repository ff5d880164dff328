"""Keys that live until a time: a bounded table that two nodes can compare and join.

A *life* is (stamp, until): when something was first said, and until when it holds. Two lives of
one key join into the oldest stamp and the latest end. So the order in which nodes hear of a life,
and how often, makes no difference: joining is commutative, associative and idempotent.

A life is dropped when it has ended. Beyond `count_max` those that end first go, the first by name
among equals, and are counted in `evicted`. That choice depends on nothing but the lives, so full
tables agree as well about who stays and until when; only a stamp can be forgotten with its key
and come back younger.

Two tables are compared by their *digests*: keys fall into 256 buckets, and a bucket is told by the
exclusive or of the hashes of its lives, which is kept up to date with every change. Whoever gets a
digest answers with the lives in the buckets that differ: one life that differs among 50,000 costs
a digest of 6 kB and some two hundred lives, instead of megabytes.
"""

from __future__ import annotations

import heapq
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

BUCKET_COUNT: Final = 256
_SUM_BYTES: Final = 8


class Life(NamedTuple):
    """One key, since when it is known, and when it ends: both in unix seconds."""

    key: str
    stamp: float
    until: float


class Lives:
    """See the module's text; `now` is the wall clock's unix seconds everywhere."""

    __slots__ = ("_ends", "_lives", "_next", "_past", "_sums", "count_max", "evicted")

    def __init__(self, count_max: int) -> None:
        assert count_max > 0, f"a table of {count_max} lives holds nothing"
        self.count_max = count_max
        self.evicted = 0
        self._lives: dict[str, Life] = {}
        self._ends: list[tuple[float, str]] = []  # a heap; entries of former ends are skipped
        self._past: OrderedDict[str, None] = OrderedDict()  # keys whose life has ended
        self._sums: dict[int, int] = {}  # of the buckets; those with 0 are left out
        self._next = 0  # the bucket that is told first the next time

    def __len__(self) -> int:
        return len(self._lives)

    def get(self, key: str) -> Life | None:
        """The life of a key; it may have ended and not be dropped yet. Needs no lock."""
        return self._lives.get(key)

    def has_ended(self, key: str) -> bool:
        """Whether a life of this key is known to have ended."""
        return key in self._past

    def all(self) -> list[Life]:
        """Every life, the oldest first."""
        return sorted(self._lives.values(), key=lambda life: (life.stamp, life.key))

    # -- change ------------------------------------------------------------------------

    def join(self, lives: Iterable[Life], now: float) -> list[Life]:
        """Take over what is new in these lives; those that are changed by it and still here."""
        self.purge(now)
        changed = set()
        for life in lives:
            if life.until <= now:
                continue
            known = self._lives.get(life.key)
            if known is not None:
                stamp, until = min(known.stamp, life.stamp), max(known.until, life.until)
                if stamp == known.stamp and until == known.until:
                    continue
                life = Life(life.key, stamp, until)  # noqa: PLW2901 - what the two come to
            self._put(known, life)
            changed.add(life.key)
        while len(self._lives) > self.count_max:
            self._remove(self._pop_first())
            self.evicted += 1
        if len(self._ends) > 2 * len(self._lives) + 64:
            self._ends = [(life.until, life.key) for life in self._lives.values()]
            heapq.heapify(self._ends)
        return [life for life in map(self._lives.get, sorted(changed)) if life is not None]

    def purge(self, now: float) -> list[Life]:
        """Drop what has ended; those lives."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            until, key = heapq.heappop(self._ends)
            life = self._lives.get(key)
            if life is None or life.until != until:
                continue  # it was extended, or is gone
            self._remove(life)
            self._past[key] = None
            ended.append(life)
        while len(self._past) > self.count_max:
            self._past.popitem(last=False)
        return ended

    def _put(self, known: Life | None, life: Life) -> None:
        change = _hash_of(life)
        if known is None:
            self._past.pop(life.key, None)
        else:
            change ^= _hash_of(known)
        self._lives[life.key] = life
        self._add_up(life.key, change)
        if known is None or known.until != life.until:
            heapq.heappush(self._ends, (life.until, life.key))

    def _remove(self, life: Life) -> None:
        del self._lives[life.key]
        self._add_up(life.key, _hash_of(life))

    def _add_up(self, key: str, change: int) -> None:
        bucket = _bucket_of(key)
        total = self._sums.pop(bucket, 0) ^ change
        if total:
            self._sums[bucket] = total

    def _pop_first(self) -> Life:
        while True:
            until, key = heapq.heappop(self._ends)
            life = self._lives.get(key)
            if life is not None and life.until == until:
                return life

    # -- comparison --------------------------------------------------------------------

    def digest(self) -> dict[str, str]:
        """What another node needs to tell in which buckets we differ; ready for JSON."""
        return {f"{bucket:x}": f"{total:x}" for bucket, total in sorted(self._sums.items())}

    def beyond(self, sums: Mapping[int, int], limit: int) -> list[Life]:
        """The lives in the buckets that differ; beyond `limit` whole buckets wait.

        There is always at least one bucket, and the next time it is the turn of the others: so
        nodes that go on comparing come to agree. One that is full may have no use for a bucket
        and differ in it until it has got the others.
        """
        own = self._sums
        differ = {n for n in own.keys() | sums.keys() if own.get(n, 0) != sums.get(n, 0)}
        if not differ:
            return []
        found: dict[int, list[Life]] = {}
        for life in self._lives.values():
            bucket = _bucket_of(life.key)
            if bucket in differ:
                found.setdefault(bucket, []).append(life)
        chosen: list[Life] = []
        first = self._next
        for bucket in sorted(found, key=lambda n: (n - first) % BUCKET_COUNT):
            if chosen and len(chosen) + len(found[bucket]) > limit:
                break
            chosen += found[bucket]
            self._next = bucket + 1
        return chosen


def read_digest(value: Any) -> dict[int, int] | None:
    """The sums of a digest from outside; None when it is none."""
    if type(value) is not dict or len(value) > BUCKET_COUNT:
        return None
    sums: dict[int, int] = {}
    for name, text in value.items():
        bucket, total = _hex(name, 2), _hex(text, 2 * _SUM_BYTES)
        if bucket is None or total is None:
            return None
        sums[bucket] = total
    return sums


def _hex(text: Any, digits_max: int) -> int | None:
    if type(text) is not str or not 0 < len(text) <= digits_max:
        return None
    if not set(text) <= _HEX_DIGITS:
        return None
    return int(text, 16)


_HEX_DIGITS: Final = frozenset("0123456789abcdef")


def _bucket_of(key: str) -> int:
    return zlib.crc32(key.encode()) % BUCKET_COUNT


def _hash_of(life: Life) -> int:
    text = f"{life.stamp!r} {life.until!r} {life.key}"
    return int.from_bytes(blake2b(text.encode(), digest_size=_SUM_BYTES).digest())
