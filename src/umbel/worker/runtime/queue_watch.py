"""How long the queues of a worker are, for its heartbeats.

A thread of its own asks the broker over a connection of its own, so that neither the loop nor the
heartbeats wait for an answer; a heartbeat takes the last one, if it is not too old. It asks only
while task events go out (`-E`), and only brokers that can tell: Redis and RabbitMQ.

Each worker asks for its own queues, since no other worker need have the same. It asks every
`EVERY_S`, and less often in a big cluster: up to `FEW` workers ask at that pace, and more of them
share it, so that all together ask the broker once in two seconds, until each is as slow as
`RAREST_S`. A queue that many workers consume is reported by all of them in turn.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from umbel.broker.sessions.connections import driver, hang_up
from umbel.broker.tasks.lengths import lengths_of
from umbel.wire.event_fields import QUEUE_LENGTHS_MAX

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.events")

EVERY_S: Final = 10.0
RAREST_S: Final = 60.0
FEW: Final = 5
FIRST_S: Final = 0.5  # after the start
TELLING: Final = frozenset({"redis", "amqp"})


class QueueWatch:
    """Asks while it runs; `lengths` may be read by any thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: Any = None
        self._answer: tuple[float, dict[str, int]] | None = None  # until when it holds, and what

    @property
    def lengths(self) -> dict[str, int] | None:
        """The last answer; None when there is none, or it is too old."""
        answer = self._answer
        return answer[1] if answer is not None and time.monotonic() < answer[0] else None

    def start(self) -> None:
        """Begin to ask."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="umbel-queue-lengths", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; an answer that is under way is not waited for."""
        self._stopping.set()

    def _run(self) -> None:
        pause_s = FIRST_S
        while not self._stopping.wait(pause_s):
            pause_s = self._pace_s()
            try:
                self._ask(pause_s)
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                logger.debug("The lengths of queues are not known: %s", exc)
                self._let_go(lost=True)
        self._let_go()

    def _ask(self, pause_s: float) -> None:
        worker = self._worker
        if not worker.task_events.on:
            self._let_go()
            return
        if self._connection is None:
            # Nothing reads from this connection, so nobody would see the broker's heartbeats.
            self._connection = worker.app.connection(heartbeat=0)
            if driver(self._connection) not in TELLING:
                self._stopping.set()
                return
        queues = list(worker.app.queues.consumed.values())[:QUEUE_LENGTHS_MAX]
        found = lengths_of(self._connection, queues)
        known = {name: length for name, length in found.items() if length is not None}
        self._answer = (time.monotonic() + 2 * pause_s, known) if known else None

    def _let_go(self, *, lost: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            hang_up(connection, lost=lost)

    def _pace_s(self) -> float:
        count = self._worker.gossip.membership.established_count + 1  # 1 without gossip
        return min(RAREST_S, EVERY_S * max(1.0, count / FEW))
