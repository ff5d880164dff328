"""Which executions are measured: those of tasks that take long enough for it to be worth it."""

from __future__ import annotations

import time

from tests.unit.worker.parts import task_message
from umbel import Umbel
from umbel.worker.execution.jobs import Job
from umbel.worker.execution.runner import MEASURED_MIN_S, Runner


def test_only_tasks_that_take_their_time_are_measured() -> None:
    app = Umbel("measured", broker="memory://", backend="disabled://", set_as_current=False)
    taking = {"s": 0.0}

    @app.task(name="work")
    def work() -> None:
        time.sleep(taking["s"])

    runner = Runner(app, "unit@here", "prefork")

    def cost(seconds: float, *, measured: bool = True) -> float | None:
        taking["s"] = seconds
        sent = task_message("work")
        job = Job(
            sent.headers["id"], "work", sent.headers, sent.body, sent.content_type,
            sent.content_encoding, measured=measured,
        )  # fmt: skip
        return runner(job).cpu_s

    long_s = 2 * MEASURED_MIN_S
    assert cost(long_s) is not None
    assert cost(long_s, measured=False) is None
    assert cost(0.0) is None
    assert cost(long_s) is None  # the one before was short: its beginning was not noted
    assert cost(long_s) is not None
