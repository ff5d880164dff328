"""Interrupting a thread from outside, and taking it back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.pools.interrupts import Guard
from umbel.worker.execution.pools.steering import steered

# In a process of its own: what this guards against makes it stand still.
TRACED = """
import sys
from umbel.worker.execution.pools.interrupts import Guard

guard = Guard()
guard.arm()
guard._sent = KeyError  # came, and is not raised yet
guard.disarm()
sys.settrace(lambda *_: None)

def traced():
    return "began"

print(traced())
"""


def test_after_an_interrupt_was_taken_back_traced_functions_begin() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=20, check=False
    )
    assert "began" in run.stdout, run.stderr


def test_what_is_taken_back_is_not_raised_later() -> None:
    guard = Guard()
    guard.arm()
    with guard._lock:
        guard._sent = SoftTimeLimitExceeded  # sent from another thread, not raised yet
    guard.disarm_soft()
    guard.disarm()
    assert guard._sent is None
    assert sum(number for number in range(1_000)) == 499_500


def test_an_interrupt_hits_a_running_job_only() -> None:
    guard, armed, done = Guard(), threading.Event(), threading.Event()
    caught: list[type[BaseException]] = []

    def run() -> None:
        guard.arm()
        try:
            armed.set()
            while not done.is_set():
                pass
        except KeyError as exc:
            caught.append(type(exc))
        guard.disarm()

    thread = threading.Thread(target=run)
    thread.start()
    armed.wait()
    assert guard.interrupt(KeyError)
    thread.join(10)
    done.set()
    assert caught == [KeyError]
    assert not guard.interrupt(KeyError), "the job has ended"


def test_a_steered_coroutine_that_nobody_waits_for_any_more_is_closed_once() -> None:
    class Item:
        task = interrupt = None

    async def waits() -> None:
        await asyncio.sleep(0)

    coroutine = waits()
    driven = steered(coroutine, Item())
    driven.send(None)
    coroutine.close()  # as the collector may do first
    driven.close()
