"""The watchdog: silence that is too long, silence that means nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from umbel.worker.runtime.counters import Counters
from umbel.worker.runtime.errors import ConnectionFailed
from umbel.worker.runtime.watchdog import Watchdog, patience_s


def connection(driver: str = "redis", heartbeats: bool = False) -> Any:
    transport = SimpleNamespace(driver_type=driver, on_readable=lambda *args: args)
    return SimpleNamespace(transport=transport, supports_heartbeats=heartbeats)


def conf(patience: float | None = 30.0, beat: float | None = None) -> Any:
    return SimpleNamespace(worker_watchdog_timeout=patience, broker_heartbeat=beat)


def consumer(can_consume: bool = True, **settings: Any) -> Any:
    qos = SimpleNamespace(can_consume=lambda: can_consume)
    return SimpleNamespace(
        connection=connection(),
        app=SimpleNamespace(conf=conf(**settings)),
        channel=SimpleNamespace(qos=qos),
        worker=SimpleNamespace(counters=Counters()),
        last_sign=0.0,
    )


def test_silence_that_is_too_long_ends_the_connection_and_is_counted() -> None:
    one = consumer()
    watch = Watchdog(one)
    watch.check(one.last_sign + 29)
    assert one.worker.counters.rebuilt_by_watchdog == 0
    with pytest.raises(ConnectionFailed, match="no sign of life for 31 s"):
        watch.check(one.last_sign + 31)
    assert one.worker.counters.rebuilt_by_watchdog == 1


def test_whatever_can_be_read_is_a_sign_of_life() -> None:
    one = consumer()
    Watchdog(one)
    one.last_sign = 0.0
    assert one.connection.transport.on_readable(7) == (7,)
    assert one.last_sign > 0


def test_a_worker_whose_window_is_full_asks_for_nothing_and_hears_nothing() -> None:
    one = consumer(can_consume=False)
    watch = Watchdog(one)
    now = one.last_sign + 1000
    watch.check(now)
    assert one.last_sign == now, "the time counts from when it could hear again"
    assert one.worker.counters.rebuilt_by_watchdog == 0


def test_a_worker_without_a_watchdog_is_patient_for_ever() -> None:
    one = consumer(patience=None)
    Watchdog(one).check(one.last_sign + 10**6)


@pytest.mark.parametrize(
    ("driver", "heartbeats", "patience", "beat", "expected"),
    [
        ("redis", False, 30, None, 30),
        ("redis", False, 30, 10, 10),
        ("redis", False, 30, 120, 30),
        ("amqp", True, 30, 10, 30),
        ("amqp", True, 30, 120, 240),  # the broker speaks only so often
        ("amqp", True, 30, None, None),  # a broker without heartbeats may be silent
        ("memory", False, 30, None, None),
        ("redis", False, None, 10, None),
    ],
)
def test_how_much_silence_is_too_much(
    driver: str,
    heartbeats: bool,
    patience: float | None,
    beat: float | None,
    expected: float | None,
) -> None:
    assert patience_s(conf(patience, beat), connection(driver, heartbeats)) == expected
