"""What events do not tell: pools, prefetch, who consumes what, and how long queues are.

A thread asks while somebody looks (`want`), and rests otherwise. Nodes are asked for `stats` and
`active_queues` every `NODES_S`, the broker for lengths every `QUEUES_S`. What can not be asked is
left as it was, and `trouble` says why; ages tell how old an answer is. Lengths are kept for some
minutes, so that a queue's growth is a number and a small picture.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kombu import Connection, Queue

from umbel.app.control.inspection import flatten_reply
from umbel.broker.sessions.connections import hang_up
from umbel.broker.sessions.session import opened
from umbel.broker.tasks.lengths import lengths_of
from umbel.dashboard.live.oldest import Oldest, oldest_of
from umbel.wire.secret_texts import mask_addresses

if TYPE_CHECKING:
    from umbel.dashboard.live.source import Live

logger = logging.getLogger("umbel.dashboard")

NODES_S: Final = 4.0
QUEUES_S: Final = 1.0
ANSWER_S: Final = 1.0
LOOK_AROUND: Final = 4
WANTED_S: Final = 30.0
SAMPLES_MAX: Final = 60
QUEUES_MAX: Final = 500
NODES_MAX: Final = 5_000
RATE_S: Final = 10.0


@dataclass(slots=True)
class NodeAnswer:
    """What a node answered, and when."""

    asked_s: float
    pool_size: int | None = None
    prefetch: int | None = None
    uptime_s: float | None = None
    clock: int | None = None
    paused: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()


class Sample(NamedTuple):
    """What was seen of a queue at one time."""

    at_s: float
    length: int
    sent: int  # messages whose sending was heard, ever


@dataclass(slots=True)
class QueueFacts:
    """What is known of a queue."""

    name: str
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    known: bool = True  # whether the broker told a length the last time
    oldest: Oldest | None = None

    @property
    def length(self) -> int | None:
        """How many messages wait; None where nobody can tell."""
        return self.samples[-1].length if self.samples and self.known else None

    def rates(self) -> tuple[float | None, float | None]:
        """By how many messages a second it grew lately, and how many were sent to it."""
        last = self.samples[-1] if self.samples and self.known else None
        for then in self.samples:
            if last is not None and 0 < last.at_s - then.at_s <= RATE_S:
                passed_s = last.at_s - then.at_s
                return (last.length - then.length) / passed_s, (last.sent - then.sent) / passed_s
        return None, None


class Polling:
    """See the module's text. Questions from any thread."""

    def __init__(self, live: Live, clock: Callable[[], float] = time.monotonic) -> None:
        self._live, self._app, self._clock = live, live.app, clock
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeAnswer] = {}
        self._queues: dict[str, QueueFacts] = {}
        self._wanted_until = 0.0
        self._asked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umbel-polling", daemon=True)
        self._nodes_at = self._queues_at = 0.0
        self._asked_count = 0
        self._connection: Connection | None = None  # for the questions to the broker
        self.trouble = ""

    # -- life --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; nothing is asked before somebody looks."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stopping.set()
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_S + 2.0)

    def want(self) -> None:
        """Somebody looks: ask for a while."""
        self._wanted_until = self._clock() + WANTED_S
        self._asked.set()

    def hurry(self) -> None:
        """Something was changed: ask anew at once."""
        self._nodes_at = self._queues_at = 0.0
        self.want()

    # -- answers -----------------------------------------------------------------------

    def nodes(self) -> dict[str, NodeAnswer]:
        """The last answer of each node."""
        with self._lock:
            return dict(self._nodes)

    def queues(self) -> dict[str, QueueFacts]:
        """The queues that are known."""
        with self._lock:
            return dict(self._queues)

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            now = self._clock()
            if now >= self._wanted_until:
                self._hang_up()
                self._asked.clear()
                if self._clock() >= self._wanted_until:
                    self._asked.wait()
                continue
            if now >= self._nodes_at:
                self._nodes_at = now + NODES_S
                self._try(self.ask_nodes)
            if now >= self._queues_at:
                self._queues_at = now + QUEUES_S
                self._try(self.ask_queues)
            self._stopping.wait(0.1)
        self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            hang_up(connection, lost=True)

    def _try(self, ask: Callable[[], None]) -> None:
        try:
            ask()
            self.trouble = ""
        except Exception as exc:  # noqa: BLE001 - a broker on its way down can raise anything
            self.trouble = mask_addresses(f"{type(exc).__name__}: {exc}")
            logger.debug("asking failed: %s", self.trouble)
            self._hang_up()
            self._nodes_at = self._queues_at = self._clock() + 2.0

    def ask_nodes(self) -> None:
        """Ask all nodes for their pools and queues."""
        now = self._clock()
        # Nobody is waited for once all have answered that are known; now and then one looks for
        # more, as a node that sends no events shows in no other way.
        known = max(len(self._live.state.alive_workers()), len(self.nodes()))
        limit = None if self._asked_count % LOOK_AROUND == 1 else known or None
        self._asked_count += 1
        found: dict[str, NodeAnswer] = {}
        before = self.nodes()
        for command in ("stats", "active_queues"):
            replies = self._app.control.broadcast(
                command, reply=True, timeout=ANSWER_S, limit=limit
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of two nodes with one name one is shown
                answers = flatten_reply(replies or [])
            for name, answer in list(answers.items())[:NODES_MAX]:
                # Of what a busy node has no time to answer the last answer holds.
                old = before.get(str(name)) or NodeAnswer(now)
                one = found.setdefault(str(name), replace(old, asked_s=now))
                if command == "stats":
                    _take_stats(one, answer)
                else:
                    one.queues = _names(answer)
        with self._lock:
            kept = {
                name: one for name, one in self._nodes.items() if now - one.asked_s < 5 * NODES_S
            }
            self._nodes = {**kept, **found}

    def ask_queues(self) -> None:
        """Ask the broker how long the queues are."""
        names = self._names()
        if self._connection is None:
            self._connection = opened(self._app.connection())
        lengths = lengths_of(self._connection, [Queue(name) for name in names])
        with closing(self._connection.channel()) as channel:
            firsts = {
                name: oldest_of(channel, name) if lengths.get(name) else None for name in names
            }
        with self._live.lock:
            sent = {name: rate.total for name, rate in self._live.figures.queues.items()}
        now = self._clock()
        with self._lock:
            for name in names:
                facts = self._queues.setdefault(name, QueueFacts(name))
                length = lengths.get(name)
                facts.known, facts.oldest = length is not None, firsts[name]
                if length is not None:
                    facts.samples.append(Sample(now, length, sent.get(name, 0)))

    def _names(self) -> list[str]:
        with self._live.lock:
            sent = [name for name in self._live.figures.queues if name != "(others)"]
        consumed = [name for one in self.nodes().values() for name in one.queues]
        own = list(self._app.queues.consumed)
        return list(dict.fromkeys([*own, *sorted(consumed), *sorted(sent)]))[:QUEUES_MAX]


def _take_stats(one: NodeAnswer, answer: Any) -> None:
    if not isinstance(answer, Mapping):
        return
    pool, own = answer.get("pool"), answer.get("umbel")
    if isinstance(pool, Mapping):
        one.pool_size = _whole(pool.get("max-concurrency"))
    one.prefetch = _whole(answer.get("prefetch_count"))
    one.uptime_s = _whole(answer.get("uptime"))
    clock = answer.get("clock")
    one.clock = _whole(int(clock) if isinstance(clock, str) and clock.isdecimal() else clock)
    if isinstance(own, Mapping) and isinstance(own.get("paused"), list):
        one.paused = tuple(name for name in own["paused"] if isinstance(name, str))[:QUEUES_MAX]


def _names(answer: Any) -> tuple[str, ...]:
    if not isinstance(answer, list):
        return ()
    names = (one.get("name") for one in answer if isinstance(one, Mapping))
    return tuple(name for name in names if isinstance(name, str) and name)[:QUEUES_MAX]


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None
