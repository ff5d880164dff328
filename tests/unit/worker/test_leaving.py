"""The deadline of a worker's last conversation with its broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import wait_until
from tests.unit.worker.parts import idle_worker
from umbel import Umbel
from umbel.worker.runtime.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    app = Umbel(
        "unit", broker="memory://", backend="disabled://", set_as_current=False,
        worker_goodbye_timeout=1.0,
    )  # fmt: skip
    made = idle_worker(app)
    made.consumer.connection = app.connection()
    yield made
    made.consumer.leaving.lift()
    made._aside.shutdown()
    made.inbox.close()
    app.close()


def test_a_loop_that_waits_for_an_answer_when_the_stop_is_asked_for_is_cut_off(
    worker: Worker,
) -> None:
    worker.stop()  # and no loop turns that could begin to leave
    wait_until(lambda: worker.consumer.lost, 5, "the connection to be given up")


def test_running_tasks_have_no_deadline(worker: Worker) -> None:
    worker.deliveries.in_pool = 1
    worker.stop()
    assert not worker.consumer.leaving.has_begun
    worker.deliveries.in_pool = 0
    worker.consumer.leaving.begin()
    worker.consumer.leaving.lift()
    assert not worker.consumer.lost
