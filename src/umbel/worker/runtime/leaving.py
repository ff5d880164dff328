"""A stopping worker does not wait for its broker for ever.

Each answer of a broker is waited for with a bound of its own, but a stop asks several things. So
`Leaving` gives the whole conversation one deadline, `worker_goodbye_timeout`: when it has passed
the sockets are cut, every wait ends at once, and the rest of the stop goes on as after a lost
connection. What was not given back is delivered again: by RabbitMQ at once, on Redis after the
visibility timeout.

The deadline begins when the worker is asked to stop, as its loop may be waiting for an answer at
that moment. Running tasks have all the time that they need: while they run, every turn of the loop
defers the deadline. A loop that does not turn waits for the broker, and does not see the last task
end; so the deadline holds for that wait too. Solo tasks run inside the loop, and have none.

A process that is held up as a whole, by a suspended machine or a debugger, does not hear its broker
either: of such a pause only `PAUSE_MAX_S` counts.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from umbel.broker.sessions.connections import cut

if TYPE_CHECKING:
    from umbel.worker.runtime.consumer import Consumer

logger = logging.getLogger("umbel.consumer")

# What gossip, events and the node's name take at most, when there is nobody to talk to.
RESERVED_S = 3.0
# How often a loop defers its deadline, for how long at least, and how often that is looked at.
DEFER_S, DEFERRED_MIN_S, LOOK_S = 0.25, 2.0, 0.1
PAUSE_MAX_S = 1.0


class Leaving:
    """The deadline of one consumer's last conversation with its broker."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._lock = threading.Lock()
        self._lifted: threading.Event | None = None  # while there is a deadline
        self._left_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether there is a deadline."""
        return self._lifted is not None

    def begin(self) -> None:
        """The worker stops, and from now on only the broker is waited for. From any thread."""
        with self._lock:
            if self._lifted is None:
                self._lifted = threading.Event()
                self._left_s = self._wait_s()
                threading.Thread(
                    target=self._watch, args=(self._lifted,), name="umbel-leaving", daemon=True
                ).start()

    def defer(self) -> None:
        """The loop turns, and tasks still run: the deadline begins anew, if there is one."""
        with self._lock:
            self._left_s = max(self._wait_s(), DEFERRED_MIN_S)

    def lift(self) -> None:
        """Something else is waited for: there is no deadline."""
        with self._lock:
            lifted, self._lifted = self._lifted, None
        if lifted is not None:
            lifted.set()

    def _wait_s(self) -> float:
        whole_s = float(self._consumer.app.conf.worker_goodbye_timeout)
        return max(whole_s - RESERVED_S, whole_s / 2)

    def _watch(self, lifted: threading.Event) -> None:
        looked_at = time.monotonic()
        while not lifted.wait(LOOK_S):
            now = time.monotonic()
            passed_s, looked_at = now - looked_at, now
            with self._lock:
                self._left_s -= min(passed_s, PAUSE_MAX_S)
                over = self._left_s <= 0 and self._lifted is lifted
            if over:
                self._give_up()
                return

    def _give_up(self) -> None:
        connection = self._consumer.connection
        if connection is not None:
            logger.warning(
                "%s does not answer, and this worker leaves without giving its messages back",
                self._consumer.url,
            )
            self._consumer.lost = True  # the next steps need not find out
            cut(connection)
