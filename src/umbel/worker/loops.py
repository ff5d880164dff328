"""The two loops of a consumer.

*asynloop* waits on kombu's hub for whatever comes first: the broker's socket, a timer, or the
inbox. *synloop* is for transports that can only block and for green pools: it drains messages
with a time-out and looks at timers and inbox in between, often while something runs, seldom
when nothing does.

Both stop in two moves. On a warm stop they give back what is not running and keep turning until
the last running task has been settled; on a cold one they leave at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from umbel.worker.errors import ConnectionFailed
from umbel.worker.steps.tasks import TasksStep

if TYPE_CHECKING:
    from umbel.worker.consumer import Consumer

logger = logging.getLogger("umbel.loop")

IDLE_TURN_S = 1.0
BUSY_TURN_S = 0.02
# So many messages that are waiting already are taken before timers and inbox are looked at.
BURST = 16


def asynloop(consumer: Consumer) -> None:
    """Consume on the hub."""
    worker = consumer.worker
    hub, connection = worker.hub, consumer.connection
    assert connection is not None
    errors = consumer.connection_errors
    hub.propagate_errors = errors
    connection.transport.register_with_event_loop(connection.connection, hub)
    _watch_heartbeat(consumer)
    hub.add_reader(worker.inbox.fileno(), worker.inbox.run)
    worker.became_ready()
    loop = hub.create_loop()
    draining = False
    try:
        while True:
            worker.last_turn = time.monotonic()
            _check(consumer)
            if worker.stop_wanted.is_set():
                if not draining:
                    draining = _drain(consumer)
                if worker.cold or not worker.busy:
                    return
            else:
                TasksStep.apply_prefetch(consumer)
            # All that are due: the hub alone fires ten and then waits.
            if len(worker.timer):
                _fire_timers(worker.timer)
            try:
                _take(consumer)
                next(loop)
            except StopIteration:
                loop = hub.create_loop()
            except errors:
                raise
            except Exception as exc:  # noqa: BLE001 - the barrier of the loop
                _dropped(exc)
                loop = hub.create_loop()
    finally:
        _reset_hub(worker)


def synloop(consumer: Consumer) -> None:
    """Consume by draining with a time-out."""
    worker, connection = consumer.worker, consumer.connection
    assert connection is not None
    errors, drain = consumer.connection_errors, connection.drain_events
    worker.became_ready()
    draining = False
    while True:
        worker.last_turn = time.monotonic()
        _check(consumer)
        if len(worker.inbox):
            worker.inbox.run()
        wait_s = _fire_timers(worker.timer) if len(worker.timer) else IDLE_TURN_S
        if worker.stop_wanted.is_set():
            if not draining:
                draining = _drain(consumer)
            if worker.cold or not worker.busy:
                return
        else:
            TasksStep.apply_prefetch(consumer)
        turn_s = BUSY_TURN_S if worker.busy or len(worker.inbox) else IDLE_TURN_S
        try:
            drain(timeout=0 if _take(consumer) else min(turn_s, wait_s))
            for _ in range(BURST):
                drain(timeout=0)
        except TimeoutError:
            pass
        except errors:
            raise
        except Exception as exc:  # noqa: BLE001 - the barrier of the loop
            _dropped(exc)


def _take(consumer: Consumer) -> int:
    taker = consumer.taker
    return 0 if taker is None or consumer.worker.stop_wanted.is_set() else taker.fill()


def _check(consumer: Consumer) -> None:
    failure = consumer.failure
    if failure is not None:
        raise ConnectionFailed(str(failure)) from failure


def _drain(consumer: Consumer) -> bool:
    worker = consumer.worker
    worker.ready_now = False
    if worker.cold:
        logger.warning("cold shutdown: running tasks are stopped")
        # Before their messages go back, where another worker may begin them.
        worker.pool.terminate()
        return True
    running = len(worker.tally.active)
    logger.warning("warm shutdown: %d running tasks may end", running)
    if consumer.tasks is not None:
        consumer.tasks.cancel()
    worker.give_back()
    return True


def _dropped(exc: Exception) -> None:
    # A message so broken that the transport could not even wrap it. The next one is unharmed.
    logger.error("a message from the broker could not be read and was dropped", exc_info=exc)


def _fire_timers(timer: Any) -> float:
    for wait_s, entry in timer:
        if entry is None:
            return IDLE_TURN_S if wait_s is None else float(wait_s)
        timer.apply_entry(entry)
    return IDLE_TURN_S


def _watch_heartbeat(consumer: Consumer) -> None:
    connection, hub = consumer.connection, consumer.worker.hub
    assert connection is not None
    interval_s = connection.get_heartbeat_interval() if connection.supports_heartbeats else 0
    if interval_s:
        rate = consumer.app.conf.broker_heartbeat_checkrate
        hub.call_repeatedly(interval_s / rate, connection.heartbeat_check, rate)


def _reset_hub(worker: Any) -> None:
    hub = worker.hub
    with contextlib.suppress(Exception):
        hub.reset()
