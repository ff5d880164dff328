"""A stopping worker does not wait for its broker for ever.

Each answer of a broker is waited for with a bound of its own, but a stop asks several things. So
`Leaving` gives the whole conversation one deadline, `worker_goodbye_timeout`: when it has passed
the sockets are cut, every wait ends at once, and the rest of the stop goes on as after a lost
connection. What was not given back is delivered again: by RabbitMQ at once, on Redis after the
visibility timeout.

The deadline begins when the worker is asked to stop, as its loop may be waiting for an answer at
that moment. Running tasks have all the time that they need: the deadline is lifted while they run,
and begins anew when the last one has ended.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from umbel.broker.connections import cut

if TYPE_CHECKING:
    from umbel.worker.consumer import Consumer

logger = logging.getLogger("umbel.consumer")

# What gossip, events and the node's name take at most, when there is nobody to talk to.
RESERVED_S = 3.0


class Leaving:
    """The deadline of one consumer's last conversation with its broker."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """The worker stops, and from now on only the broker is waited for. From any thread."""
        with self._lock:
            if self._timer is None:
                whole_s = self._consumer.app.conf.worker_goodbye_timeout
                wait_s = max(whole_s - RESERVED_S, whole_s / 2)
                self._timer = threading.Timer(wait_s, self._give_up)
                self._timer.daemon = True
                self._timer.start()

    def lift(self) -> None:
        """Something else is waited for: there is no deadline."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _give_up(self) -> None:
        connection = self._consumer.connection
        if connection is not None:
            logger.warning(
                "%s does not answer, and this worker leaves without giving its messages back",
                self._consumer.url,
            )
            self._consumer.lost = True  # the next steps need not find out
            cut(connection)
