"""Which tasks are revoked: by id, or by a stamp that they carry.

A revocation has the wall-clock time of the original revoke, which travels with it from node to
node, and a life (`cluster.lives`). The life is at least `expires_s` from the revoke on. It is
longer where somebody knows that the task is due later: a node that holds the message of a revoked
task, or gets it, notes its eta and expiry, and the revocation lasts `expires_s` beyond the one and
up to the other. So a revoke of a task that is due tomorrow still holds tomorrow. Revoking again
keeps the oldest time and starts a new `expires_s`.

Revocations of stamped headers work the same way. Their key is the JSON text of `[name, value]`.
Values are equal as JSON, and numbers as numbers: 1, 1.0 and true are one value.

What comes from others is bounded and never raises; what is refused is counted in `counts`:

| from            | what                            | taken as                                     |
| --------------- | ------------------------------- | -------------------------------------------- |
| our own kind    | `{key: [stamp, until]}`         | joined; see `cluster.lives` for the laws     |
| the same        | a stamp `SKEW_MAX_S` ahead      | now: its clock is wrong                      |
| the same        | an end beyond `LIFE_MAX_S`      | `LIFE_MAX_S` from now                        |
| whoever revokes | a stamp `SKEW_MAX_S` from now   | now: its clock is wrong                      |
| a Celery worker | ids, or `{id: [monotonic, id]}` | revoked now, the first time that we see them |

The last row needs a memory: Celery workers stamp ids anew whenever they hear of them, and would
otherwise hand them back to us after their end, for ever. An id whose life has ended here is not
taken from a Celery worker again, as long as we remember it (`count_max` of them).

Between nodes of our own kind digests go first, then only what differs; Celery workers get the list
of all ids. Where there are more than `count_max` those that end first go, which may be the newest
one: then all others hold longer. Every method that changes something returns what it changed, so
that whoever keeps revocations on disk can write them through.

`id in revocations` takes constant time. `any` is false while there is nothing to look up, and
may stay true until the next purge after the last one has ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from umbel.cluster.lives import Life, Lives, read_digest

TASK: Final = "task"
HEADER: Final = "header"

# Raising it keeps revocations of tasks that wait long without an eta, for memory: some 400 bytes
# each. The two are what Celery's workers keep to.
EXPIRES_S: Final = 10_800.0
COUNT_MAX: Final = 50_000
HEADER_COUNT_MAX: Final = 5_000

SKEW_MAX_S: Final = 300.0
LIFE_MAX_S: Final = 366 * 86_400.0
KEY_CHARS_MAX: Final = 1_000
READ_COUNT_MAX: Final = 100_000
# So many lives go into one answer, some megabyte; what is left goes into the next one.
DIFFERENCE_COUNT_MAX: Final = 10_000
_STAMP_VALUES_MAX: Final = 1_000  # that one task may carry and have looked up
_TIME_MAX: Final = 2.0**53

# Why something was refused or changed: the keys of `Revocations.counts`.
BAD_ID: Final = "bad-id"
BAD_HEADER: Final = "bad-header"
BAD_LIFE: Final = "bad-life"
BAD_DIGEST: Final = "bad-digest"
NOT_REVOCATIONS: Final = "not-revocations"
TOO_MANY: Final = "too-many"
STAMP_AHEAD: Final = "stamp-ahead"


class Revocation(NamedTuple):
    """One revocation as it is kept and told: `kind` is `task` or `header`."""

    kind: str
    key: str
    stamp: float
    until: float


class Revocations(Container[str]):
    """What this node knows to be revoked. Threads share it through the lock that they give it."""

    __slots__ = ("_clock", "_headers", "_lock", "_tasks", "any", "counts", "expires_s")

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        lock: AbstractContextManager[Any] | None = None,
        expires_s: float = EXPIRES_S,
        count_max: int = COUNT_MAX,
        header_count_max: int = HEADER_COUNT_MAX,
    ) -> None:
        self.expires_s = expires_s
        self.any = False
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._lock: AbstractContextManager[Any] = nullcontext() if lock is None else lock
        self._tasks = Lives(count_max)
        self._headers = Lives(header_count_max)

    # -- questions ---------------------------------------------------------------------

    def __contains__(self, task_id: object) -> bool:
        life = self._tasks.get(task_id)  # type: ignore[arg-type]
        return life is not None and life.until > self._clock()

    def __len__(self) -> int:
        """How many ids and headers; some may have ended since the last change."""
        return len(self._tasks) + len(self._headers)

    def revokes(self, task_id: str, stamps: Mapping[str, Any] | None = None) -> bool:
        """Whether a task with this id and these stamps must not run."""
        return task_id in self or (bool(stamps) and self.matching(stamps) is not None)

    def matching(self, stamps: Any) -> dict[str, Any] | None:
        """The stamp for which a task is revoked, as {name: value}; None when it is not."""
        if not self._headers:
            return None
        now = self._clock()
        for key, name, value in _stamp_keys(stamps):
            life = self._headers.get(key)
            if life is not None and life.until > now:
                return {name: value}
        return None

    def ids(self) -> list[str]:
        """Every revoked id, the oldest first: what Celery workers are told."""
        with self._lock:
            self._purge(self._clock())
            return [life.key for life in self._tasks.all()]

    def headers(self) -> dict[str, list[Any]]:
        """The revoked values of each stamped header."""
        with self._lock:
            self._purge(self._clock())
            lives = self._headers.all()
        found: dict[str, list[Any]] = {}
        for life in lives:
            name, value = msgspec.json.decode(life.key)
            found.setdefault(name, []).append(value)
        return found

    def all(self) -> list[Revocation]:
        """Everything, for whoever keeps it."""
        with self._lock:
            self._purge(self._clock())
            return [
                *(Revocation(TASK, *life) for life in self._tasks.all()),
                *(Revocation(HEADER, *life) for life in self._headers.all()),
            ]

    @property
    def evicted(self) -> int:
        """How many were dropped before their end, because there were too many."""
        return self._tasks.evicted + self._headers.evicted

    # -- changes -----------------------------------------------------------------------

    def revoke(
        self, task_ids: str | Iterable[str], now: float, stamp: Any = None
    ) -> list[Revocation]:
        """Somebody revokes these tasks; `stamp` is when, by that one's wall clock, if it is told.

        All who hear of it then have the same time, and have nothing to exchange.
        """
        given = [task_ids] if isinstance(task_ids, str) else task_ids
        at = self._moment(stamp, now)
        until = at + self.expires_s
        lives = [Life(key, at, until) for key in given if self._is_id(key)]
        return self._join(lives, [], now)

    def revoke_headers(self, headers: Any, now: float, stamp: Any = None) -> list[Revocation]:
        """Somebody revokes what carries these stamps: {name: value or values} or ["name=value"]."""
        if isinstance(headers, (list, tuple)):
            headers = _parted(headers)
        if not isinstance(headers, Mapping) or not headers:
            self.counts[BAD_HEADER] += 1
            return []
        lives: list[Life] = []
        at = self._moment(stamp, now)
        until = at + self.expires_s
        for name, value in headers.items():
            for one in _values(value):
                key = _header_key(name, one)
                if key is None:
                    self.counts[BAD_HEADER] += 1
                elif len(lives) >= READ_COUNT_MAX:
                    self.counts[TOO_MANY] += 1
                else:
                    lives.append(Life(key, at, until))
        return self._join([], lives, now)

    def note_task(
        self,
        task_id: str,
        eta: float | None,
        expires: float | None,
        now: float,
        stamps: Mapping[str, Any] | None = None,
    ) -> list[Revocation]:
        """A message was seen: what revokes it lasts as long as the task may come up."""
        until = max(-math.inf if eta is None else eta + self.expires_s, expires or -math.inf)
        if not until > now:
            return []
        until = min(until, now + LIFE_MAX_S)
        with self._lock:
            self._purge(now)
            task = self._tasks.get(task_id)
            tasks = [] if task is None else [task._replace(until=until)]
            found = [self._headers.get(key) for key, _, _ in _stamp_keys(stamps)]
            headers = [life._replace(until=until) for life in found if life is not None]
            return self._joined(tasks, headers, now)

    def purge(self, now: float) -> int:
        """Drop what has ended; how many."""
        with self._lock:
            return self._purge(now)

    # -- from others -------------------------------------------------------------------

    def merge(self, told: Any, now: float) -> list[Revocation]:
        """Take over what a node of our own kind tells: an answer of its `difference`."""
        if type(told) is not dict:
            self.counts[NOT_REVOCATIONS] += 1
            return []
        tasks = self._read(told.get("tasks"), self._is_id)
        headers = self._read(told.get("headers"), self._is_header_key)
        return self._join(
            [self._clamped(life, now) for life in tasks],
            [self._clamped(life, now) for life in headers],
            now,
        )

    def merge_ids(self, told: Any, now: float) -> list[Revocation]:
        """Take over what a Celery worker tells: a list of ids, or a mapping whose keys are ids."""
        if not isinstance(told, (list, tuple, dict)):
            self.counts[NOT_REVOCATIONS] += 1
            return []
        keys = list(told)
        if len(keys) > READ_COUNT_MAX:
            self.counts[TOO_MANY] += len(keys) - READ_COUNT_MAX
            keys = keys[-READ_COUNT_MAX:]  # the newest come last
        keys = [key for key in keys if self._is_id(key)]
        until = now + self.expires_s
        with self._lock:
            self._purge(now)
            tasks = self._tasks
            unknown = [k for k in keys if tasks.get(k) is None and not tasks.has_ended(k)]
            return self._joined([Life(key, now, until) for key in unknown], [], now)

    def restore(self, kept: Iterable[tuple[Any, Any, Any, Any]], now: float) -> list[Revocation]:
        """Take over what was kept here before: (kind, key, stamp, until) each.

        Its times are our own and stand, even where the wall clock is behind them: machines that
        start without the right time get it later.
        """
        told: dict[str, dict[Any, Any]] = {TASK: {}, HEADER: {}}
        for kind, key, stamp, until in kept:
            if kind in told:
                told[kind][key] = [stamp, until]
            else:
                self.counts[BAD_LIFE] += 1
        tasks = self._read(told[TASK], self._is_id)
        headers = self._read(told[HEADER], self._is_header_key)
        return self._join(list(tasks), list(headers), now)

    def _read(self, told: Any, is_key: Callable[[Any], bool]) -> Iterator[Life]:
        if told is None:
            return
        if type(told) is not dict:
            self.counts[NOT_REVOCATIONS] += 1
            return
        if len(told) > READ_COUNT_MAX:
            self.counts[TOO_MANY] += len(told) - READ_COUNT_MAX
        for key, times in islice(told.items(), READ_COUNT_MAX):
            if not is_key(key):
                continue
            if type(times) not in (list, tuple) or len(times) != 2 or not all(map(_is_time, times)):
                self.counts[BAD_LIFE] += 1
                continue
            yield Life(key, *map(float, times))

    def _moment(self, stamp: Any, now: float) -> float:
        """When a revoke was made; now, where the sender does not say, or its clock is wrong.

        A clock that is behind would make the revocation end early, one that is ahead late.
        """
        if not _is_time(stamp):
            return now
        if stamp > now + SKEW_MAX_S:
            self.counts[STAMP_AHEAD] += 1
            return now
        return now if stamp < now - min(SKEW_MAX_S, self.expires_s) else float(stamp)

    def _clamped(self, life: Life, now: float) -> Life:
        key, stamp, until = life
        if stamp > now + SKEW_MAX_S:
            self.counts[STAMP_AHEAD] += 1
            stamp = now
        return Life(key, stamp, min(max(until, stamp + self.expires_s), now + LIFE_MAX_S))

    def _is_id(self, key: Any) -> bool:
        if _is_text(key):
            return True
        self.counts[BAD_ID] += 1
        return False

    def _is_header_key(self, key: Any) -> bool:
        if _is_text(key) and _is_canonical(key):
            return True
        self.counts[BAD_HEADER] += 1
        return False

    # -- comparison with nodes of our own kind -----------------------------------------

    def digest(self) -> dict[str, Any]:
        """What is known here, in a few kilobytes; ready for JSON."""
        with self._lock:
            self._purge(self._clock())
            return {"tasks": self._tasks.digest(), "headers": self._headers.digest()}

    def agrees(self, digest: Any) -> bool:
        """Whether the sender of that digest knows exactly what we know."""
        return self.digest() == digest

    def difference(self, digest: Any, limit: int = DIFFERENCE_COUNT_MAX) -> dict[str, Any]:
        """What the sender of that digest may not know, for its `merge`; ready for JSON.

        Two nodes that merge each other's differences until they agree do so after one round each,
        or after some more where a difference was beyond the limit.
        """
        told: dict[str, Any] = {}
        with self._lock:
            self._purge(self._clock())
            for name, lives in (("tasks", self._tasks), ("headers", self._headers)):
                sums = read_digest(digest.get(name)) if type(digest) is dict else None
                if sums is None:
                    self.counts[BAD_DIGEST] += 1
                    continue
                found = lives.beyond(sums, limit)
                told[name] = {life.key: [life.stamp, life.until] for life in found}
        return told

    # -- with the lock held ------------------------------------------------------------

    def _join(self, tasks: list[Life], headers: list[Life], now: float) -> list[Revocation]:
        with self._lock:
            return self._joined(tasks, headers, now)

    def _joined(self, tasks: list[Life], headers: list[Life], now: float) -> list[Revocation]:
        changed = [
            *(Revocation(TASK, *life) for life in self._tasks.join(tasks, now)),
            *(Revocation(HEADER, *life) for life in self._headers.join(headers, now)),
        ]
        self.any = bool(self._tasks) or bool(self._headers)
        return changed

    def _purge(self, now: float) -> int:
        ended = len(self._tasks.purge(now)) + len(self._headers.purge(now))
        if ended:
            self.any = bool(self._tasks) or bool(self._headers)
        return ended


def _is_text(key: Any) -> bool:
    if type(key) is not str or not 0 < len(key) <= KEY_CHARS_MAX:
        return False
    try:
        key.encode()
    except UnicodeEncodeError:
        return False  # half of a surrogate pair: it has no form on the wire or on disk
    return True


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _TIME_MAX


def _parted(texts: Iterable[Any]) -> dict[str, list[str]]:
    """`["name=value", ...]`, as command lines send it."""
    found: dict[str, list[str]] = {}
    for text in texts:
        if isinstance(text, str) and "=" in text:
            name, _, value = text.partition("=")
            found.setdefault(name, []).append(value)
    return found


def _values(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple, set, frozenset)) else (value,)


def _stamp_keys(stamps: Any) -> Iterator[tuple[str, str, Any]]:
    """Key, name and value of each stamp of a task, up to a bound."""
    if not isinstance(stamps, Mapping):
        return
    pairs = ((name, one) for name, value in stamps.items() for one in _values(value))
    for name, value in islice(pairs, _STAMP_VALUES_MAX):
        key = _header_key(name, value)
        if key is not None:
            yield key, name, value


def _header_key(name: Any, value: Any) -> str | None:
    """The key of a header's value; None when it can have none."""
    if type(name) is not str or not name or value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    try:
        key = msgspec.json.encode([name, value], order="deterministic").decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return key if len(key) <= KEY_CHARS_MAX else None


def _is_canonical(key: str) -> bool:
    try:
        pair = msgspec.json.decode(key)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False
    return type(pair) is list and len(pair) == 2 and _header_key(*pair) == key
