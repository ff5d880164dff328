"""What signals mean to a worker."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest

from tests.servers import wait_until
from umbel.worker.runtime.signals import COLD, WARM, Signals, stacks


class FakeWorker:
    def __init__(self) -> None:
        self.stops: list[bool] = []

    def stop(self, *, cold: bool = False) -> None:
        self.stops.append(cold)


def send(*numbers: int) -> tuple[list[bool], list[str]]:
    worker, said = FakeWorker(), []  # type: ignore[var-annotated]
    with Signals(worker, said.append).installed():
        for number in numbers:
            os.kill(os.getpid(), number)
    return worker.stops, said


@pytest.mark.parametrize(
    ("numbers", "stops", "said"),
    [
        ([signal.SIGTERM], [False], [WARM]),
        ([signal.SIGINT], [False], [WARM]),
        ([signal.SIGTERM, signal.SIGTERM], [False, False], [WARM]),
        ([signal.SIGINT, signal.SIGINT], [False, True], [WARM, COLD]),
        ([signal.SIGTERM, signal.SIGINT], [False, True], [WARM, COLD]),
        ([signal.SIGQUIT], [True], [COLD]),
    ],
)
def test_the_first_signal_is_warm_and_impatience_is_cold(
    numbers: list[int], stops: list[bool], said: list[str]
) -> None:
    assert send(*numbers) == (stops, said)


class LockingWorker(FakeWorker):
    """Holds a plain lock while it stops, and is interrupted right there."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def stop(self, *, cold: bool = False) -> None:
        with self.lock:
            if not cold:
                os.kill(os.getpid(), signal.SIGINT)
            super().stop(cold=cold)


def test_a_signal_within_a_signal_does_not_lock_up() -> None:
    worker = LockingWorker()
    with Signals(worker, lambda text: None).installed():
        with worker.lock:  # what the signal interrupts may hold the lock too
            os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: worker.stops == [False, True], what="both stops")


def test_old_handlers_are_back_afterwards() -> None:
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in watched]
    send(signal.SIGTERM)
    assert [signal.getsignal(number) for number in watched] == before


def test_usr1_writes_the_stacks_to_the_log_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = FakeWorker()
    with caplog.at_level(logging.WARNING, "umbel.worker"), Signals(worker).installed():
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: caplog.records, what="the stacks")
    assert "thread MainThread" in caplog.text
    assert worker.stops == []


def test_stacks_show_where_every_thread_is() -> None:
    assert "test_stacks_show_where_every_thread_is" in stacks()
