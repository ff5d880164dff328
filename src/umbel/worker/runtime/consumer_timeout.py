"""RabbitMQ's consumer timeout: how long a message may stay unacknowledged.

A message that was not acknowledged within `consumer_timeout` makes RabbitMQ close the channel, and
deliver everything that was unacknowledged on it again. It looks once a minute, and does not report
the limit beforehand. So the limit of a queue is its argument `x-consumer-timeout`, or else what the
server has named when it closed a channel, the setting `broker_consumer_timeout`, or RabbitMQ's
default. All consumed queues share a channel: the smallest limit counts.

| a message whose task                | before the limit                                        |
| ----------------------------------- | ------------------------------------------------------- |
| waits: eta, rate limit, a busy pool | goes back behind the others of its queue (`returns`) at |
|                                     | `RETURN_AT` of the limit, and comes again               |
| runs, acknowledged early            | is acknowledged already                                 |
| runs, acknowledged late             | nothing helps: the channel is closed. The task goes on, |
|                                     | and adopts the delivery that follows (`delivery`)        |

The age of a delivery is not measured: delivery tags count up, so it is enough to note the highest
one at regular times.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from kombu import Queue

from umbel.broker.sessions.connections import driver

if TYPE_CHECKING:
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.consumer")

DEFAULT_S: Final = 1800.0
# A part of the limit: to copy a message takes up to seconds, and may have to be repeated.
RETURN_AT: Final = 0.6
LOOKS: Final = 20
LOOK_MIN_S, LOOK_MAX_S = 0.05, 30.0
NAMED_MAX: Final = 10
ARGUMENT: Final = "x-consumer-timeout"

_CLOSED = re.compile(
    r"delivery acknowledgement on channel \d+ timed out"
    r"(?:\. Timeout value used: (?P<ms>\d{1,12}) ms)?"
)


class ConsumerTimeout:
    """What one worker knows of the limit, and does about it. On the loop thread."""

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._clock = clock
        self._named_s: float | None = None  # by the server
        self._warned = False
        self._marks: deque[tuple[float, int]] = deque()  # times, and the highest tags then
        self._old_tag = 0
        self._timer: Any = None

    @property
    def limit_s(self) -> float | None:
        """Seconds until the channel is closed; None if there is no limit."""
        usual_s = self._named_s or self._worker.app.conf.broker_consumer_timeout
        usual_s = DEFAULT_S if usual_s is None else usual_s
        queues = self._worker.app.queues.consumed.values()
        limits = [_argument_s(queue) or usual_s for queue in queues]
        return min((limit for limit in limits if limit), default=None)

    def begin(self, consumer: Consumer) -> None:
        """A connection is there: give back in time what waits, and warn of tasks that take long."""
        self._marks.clear()
        self._old_tag = 0
        limit_s = self.limit_s
        if limit_s is None or consumer.connection is None or driver(consumer.connection) != "amqp":
            return
        if not self._warned:
            self._warned = True
            self._warn(limit_s)
        every_s = min(max(limit_s / LOOKS, LOOK_MIN_S), LOOK_MAX_S)
        arguments = (consumer.channel, limit_s)
        self._timer = self._worker.timer.call_repeatedly(every_s, self._look, arguments)

    def end(self) -> None:
        """The channel is closed."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def explain(self, exc: BaseException) -> str | None:
        """A line for the log, if the channel was closed because of the limit."""
        found = _CLOSED.search(str(getattr(exc, "reply_text", None) or exc))
        if found is None:
            return None
        limit_s = self.limit_s or 0.0
        if found["ms"]:
            limit_s = self._named_s = int(found["ms"]) / 1000
        running = [
            f"{request.name}[{request.id}]"
            for request in self._worker.deliveries.active.values()
            if not request.settled
        ]
        return (
            "RabbitMQ closed the channel: a message was not acknowledged within "
            f"{limit_s:g} s (consumer_timeout). Reconnecting. Tasks that run go on and "
            f"take their messages over when they are delivered again: {_some(running)}"
        )

    def _look(self, channel: Any, limit_s: float) -> None:
        """Give back what waits for too long."""
        worker, now = self._worker, self._clock()
        own = [
            request
            for request in worker.deliveries.unsettled()
            if request.message.channel is channel
        ]
        marks = self._marks
        while marks and marks[0][0] <= now - limit_s * RETURN_AT:
            self._old_tag = marks.popleft()[1]
        if own:
            marks.append((now, max(request.message.delivery_tag for request in own)))
        old = [request for request in own if request.message.delivery_tag <= self._old_tag]
        if old:
            worker.deliveries.return_waiting(old)

    def _warn(self, limit_s: float) -> None:
        """Late-acknowledged tasks may run longer than the limit."""
        app, plan = self._worker.app, self._worker.plan
        long = []
        for name in app.tasks.own():
            task = app.tasks[name]
            if task.option("acks_late", "task_acks_late"):
                most_s = task.time_limit or plan.time_limit_s
                if most_s is None:
                    long.append(f"{name} (no time limit)")
                elif most_s > limit_s:
                    long.append(f"{name} (up to {most_s:g} s)")
        if long:
            logger.warning(
                "RabbitMQ takes messages back that are not acknowledged within %g s "
                "(consumer_timeout%s). Tasks that are acknowledged late and may take longer: %s. "
                "Another worker may then run them too: give them time limits, or raise "
                "consumer_timeout on the server and broker_consumer_timeout here.",
                limit_s,
                "" if self._is_known() else "; RabbitMQ does not report it, its default is assumed",
                _some(long),
            )

    def _is_known(self) -> bool:
        queues = self._worker.app.queues.consumed.values()
        return self._worker.app.conf.broker_consumer_timeout is not None or any(
            _argument_s(queue) is not None for queue in queues
        )


def _argument_s(queue: Queue) -> float | None:
    value = (queue.queue_arguments or {}).get(ARGUMENT)
    return value / 1000 if isinstance(value, int) and value > 0 else None


def _some(names: Iterable[str]) -> str:
    known = list(names)
    more = len(known) - NAMED_MAX
    return ", ".join(known[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "") or "none"
