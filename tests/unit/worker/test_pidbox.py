"""How long a control message can have waited unread, as far as the pidbox can tell."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.unit.worker.parts import idle_worker
from umbel import Umbel
from umbel.worker.control.pidbox import Pidbox


@pytest.fixture
def pidbox() -> Iterator[Pidbox]:
    app = Umbel("unit", broker="memory://", backend="disabled://", set_as_current=False)
    worker = idle_worker(app)
    assert worker.panel is not None
    box = Pidbox(app, worker.plan.hostname, worker.panel)
    with app.connection() as connection:
        box.start(connection)
        yield box
        box.stop()
    worker._aside.shutdown()
    worker.inbox.close()
    app.close()


def waited_s(pidbox: Pidbox, looked_ago_s: float, opened_ago_s: float) -> float | None:
    now = time.monotonic()
    pidbox.panel._worker.turn_before = now - looked_ago_s
    pidbox._opened_at = now - opened_ago_s
    return pidbox.waited_s()


def test_a_message_came_after_the_last_look_for_messages(pidbox: Pidbox) -> None:
    assert waited_s(pidbox, looked_ago_s=20.0, opened_ago_s=60.0) == pytest.approx(20.0, abs=1.0)


def test_a_message_came_after_the_queue_was_opened(pidbox: Pidbox) -> None:
    assert waited_s(pidbox, looked_ago_s=60.0, opened_ago_s=20.0) == pytest.approx(20.0, abs=1.0)


def test_nobody_knows_where_a_queue_may_hold_what_was_sent_before_it_was_opened(
    pidbox: Pidbox,
) -> None:
    pidbox._keeps = True
    assert waited_s(pidbox, looked_ago_s=60.0, opened_ago_s=20.0) is None
    assert waited_s(pidbox, looked_ago_s=20.0, opened_ago_s=60.0) == pytest.approx(20.0, abs=1.0)
