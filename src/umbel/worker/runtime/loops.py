"""The two loops of a consumer.

*asynloop* waits on kombu's hub for whatever comes first: the broker's socket, a timer, or the
inbox. *synloop* is for transports that can only block and for green pools: it drains messages
with a timeout and looks at timers and inbox in between. Where the transport can be woken
(`wake_on`) the inbox ends a wait; elsewhere the loop turns often while something runs.

Both stop in two moves. On a warm stop they give back what is not running and keep turning until
the last running task has been settled; on a cold one they leave at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from umbel.broker.sessions.connections import driver
from umbel.broker.sessions.probes import probe_for
from umbel.worker.runtime.errors import ConnectionFailed
from umbel.worker.runtime.leaving import DEFER_S
from umbel.worker.runtime.steps.tasks import TasksStep
from umbel.worker.runtime.watchdog import LOOKS, Watchdog, questioning

if TYPE_CHECKING:
    from umbel.worker.runtime.consumer import Consumer

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
    watch = Watchdog(consumer)
    window, ticks = _Window(consumer), set(hub.on_tick)
    TasksStep.consume(consumer)
    hub.on_tick.add(window.tell)
    hub.on_tick.add(worker.deliveries.dispatch)
    connection.transport.register_with_event_loop(connection.connection, hub)
    _watch_heartbeat(consumer)
    hub.add_reader(worker.inbox.fileno(), worker.inbox.run)
    worker.became_ready()
    loop = hub.create_loop()
    draining = False
    try:
        while True:
            worker.turn_before, worker.last_turn = worker.last_turn, time.monotonic()
            _check(consumer)
            if worker.stop_wanted.is_set():
                draining = draining or _drain(consumer)
                if _is_over(worker):
                    return
            else:
                window.tell()
            # All that are due: the hub alone fires ten and then waits.
            _fire_timers(worker.timer, errors)
            watch.check(worker.last_turn)
            try:
                next(loop)
            except StopIteration:
                loop = hub.create_loop()
            except errors:
                raise
            except Exception as exc:  # noqa: BLE001 - the barrier of the loop
                _dropped(exc)
                loop = hub.create_loop()
    finally:
        hub.on_tick &= ticks
        _reset_hub(worker)


class _Window:
    """Tells the broker the window when nothing else is arriving, or after a few turns.

    Asked before every wait of the hub too: it handles messages just before it waits.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        assert consumer.connection is not None
        self._local = driver(consumer.connection) != "amqp"  # a number of ours
        self._turns = 0

    def tell(self) -> None:
        worker = self._consumer.worker
        if not worker.deliveries.prefetch.is_due or worker.stop_wanted.is_set():
            return
        self._turns += 1
        if self._local or self._turns > BURST or not worker.hub.poller.poll(0):
            self._turns = 0
            TasksStep.apply_prefetch(self._consumer)


def synloop(consumer: Consumer) -> None:
    """Consume by draining with a time-out."""
    worker, connection = consumer.worker, consumer.connection
    assert connection is not None
    errors, drain = consumer.connection_errors, connection.drain_events
    # What draining does before it waits must be done before other waits, too.
    flush = getattr(connection.connection, "flush_acks", lambda: None)
    wake_on = getattr(connection.transport, "wake_on", None)
    if wake_on is not None:
        wake_on(worker.inbox.fileno())
    busy_turn_s = BUSY_TURN_S if wake_on is None else IDLE_TURN_S
    TasksStep.consume(consumer)
    _watch_heartbeat(consumer)
    worker.became_ready()
    draining = False
    while True:
        worker.turn_before, worker.last_turn = worker.last_turn, time.monotonic()
        _check(consumer)
        if len(worker.inbox):
            worker.inbox.run()
        wait_s = _fire_timers(worker.timer, errors)
        worker.deliveries.dispatch()
        if worker.stop_wanted.is_set():
            draining = draining or _drain(consumer)
            if _is_over(worker):
                return
        else:
            TasksStep.apply_prefetch(consumer)
        turn_s = busy_turn_s if worker.busy or len(worker.inbox) else IDLE_TURN_S
        try:
            if worker.saturated:
                flush()
                worker.inbox.wait(min(turn_s, wait_s))
                turn_s = 0
            drain(timeout=min(turn_s, wait_s))
            for _ in range(BURST):
                drain(timeout=0)
        except TimeoutError:
            pass
        except errors:
            raise
        except Exception as exc:  # noqa: BLE001 - the barrier of the loop
            _dropped(exc)


def _is_over(worker: Any) -> bool:
    worker.check_patience()
    if worker.cold:
        # Before their messages go back, where another worker may begin them.
        worker.pool.terminate()
        return True
    return not worker.busy


def _check(consumer: Consumer) -> None:
    failure = consumer.failure
    if failure is not None:
        raise ConnectionFailed(str(failure)) from failure


def _drain(consumer: Consumer) -> bool:
    worker = consumer.worker
    worker.ready_now = False
    if worker.cold:
        logger.warning("cold shutdown: running tasks are stopped")
        return True
    running = len(worker.deliveries.active)
    if worker.soft_until is None:
        logger.warning("warm shutdown: %d running tasks may end", running)
    else:
        left_s = max(0.0, worker.soft_until - time.monotonic())
        logger.warning("soft shutdown: %d running tasks have %.1f s to end", running, left_s)
        worker.timer.call_after(left_s, worker.check_patience)
    consumer.leaving.begin()
    if consumer.tasks is not None:
        consumer.tasks.cancel()
    worker.deliveries.give_back()
    if worker.busy:
        consumer.leaving.defer()
        worker.timer.call_repeatedly(DEFER_S, consumer.leaving.defer)
    return True


def _dropped(exc: Exception) -> None:
    # A message so broken that the transport could not even wrap it. The next one is unharmed.
    logger.error("a message from the broker could not be read and was dropped", exc_info=exc)


def _fire_timers(timer: Any, errors: tuple[type[BaseException], ...]) -> float:
    """Run all that is due; how long until the next, at most an idle turn."""
    if not len(timer):
        return IDLE_TURN_S
    for wait_s, entry in timer:
        if entry is None:
            return IDLE_TURN_S if wait_s is None else float(wait_s)
        try:
            entry()
        except errors:
            raise
        except Exception:
            logger.exception("a timer's work failed")
    return IDLE_TURN_S


def _watch_heartbeat(consumer: Consumer) -> None:
    connection = consumer.connection
    assert connection is not None
    interval_s = connection.get_heartbeat_interval() if connection.supports_heartbeats else 0
    if interval_s:
        rate = consumer.app.conf.broker_heartbeat_checkrate
        consumer.worker.timer.call_repeatedly(
            interval_s / rate, connection.heartbeat_check, (rate,)
        )
        probe = probe_for(connection, consumer.channel)
        if probe is not None:
            look = questioning(consumer, probe)
            consumer.worker.timer.call_repeatedly(interval_s / LOOKS, look)


def _reset_hub(worker: Any) -> None:
    hub = worker.hub
    with contextlib.suppress(Exception):
        hub.reset()
