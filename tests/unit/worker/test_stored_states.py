"""Whether a stored state keeps a message from being started."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.unit.worker.parts import Message, finish_asides, idle_worker, task_message
from umbel import Umbel
from umbel.exceptions import BackendError, TaskRevokedError
from umbel.worker.delivery import stored
from umbel.worker.delivery.stored import is_revoked
from umbel.worker.runtime.worker import Worker

STORED = datetime(2026, 11, 18, 12, tzinfo=UTC)


def document(why: str = "revoked", **fields: Any) -> dict[str, Any]:
    result = TaskRevokedError(why)
    return {"status": "REVOKED", "result": result, "date_done": STORED.isoformat(), **fields}


def sent(after_s: float) -> int:
    return int((STORED.timestamp() + after_s) * 1000)


@pytest.mark.parametrize(
    ("meta", "sent_ms", "revoked"),
    [
        (document(), sent(-60), True),
        (document("terminated"), sent(-60), True),
        (document("expired"), sent(-60), False),
        (document(status="FAILURE"), sent(-60), False),
        (document(result=None), sent(-60), False),
        (document(result=ValueError("revoked")), sent(-60), False),
        (document(), sent(120), True),  # the sender's clock may be ahead
        (document(), sent(3600), False),  # sent again on purpose
        (document(date_done=STORED), sent(3600), False),
        (document(date_done=STORED.replace(tzinfo=None).isoformat()), sent(3600), False),
        (document(), None, True),  # by a client of Celery
        (document(), "soon", True),
        (document(date_done=None), sent(3600), True),
        (document(date_done="at noon"), sent(3600), True),
        ({"status": "PENDING", "result": None}, sent(-60), False),
    ],
)
def test_only_a_revocation_that_came_after_the_message_counts(
    meta: dict[str, Any], sent_ms: Any, revoked: bool
) -> None:
    assert is_revoked(meta, sent_ms) is revoked


@pytest.mark.parametrize(("why", "revoked"), [("revoked", True), ("expired", False)])
def test_a_document_that_a_celery_worker_has_stored_is_understood(
    app: Umbel, why: str, revoked: bool
) -> None:
    stored = (
        b'{"status": "REVOKED", "result": {"exc_type": "TaskRevokedError", "exc_message": ["%b"], '
        b'"exc_module": "celery.exceptions"}, "traceback": null, "children": [], '
        b'"date_done": "2026-11-18T12:00:00.123456+00:00", "task_id": "one"}'
    )
    assert is_revoked(app.backend.codec.read(stored % why.encode(), "one"), None) is revoked


@pytest.fixture
def app() -> Umbel:
    app = Umbel("unit", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.task(name="plain")(lambda: None)
    app.task(name="ignored", ignore_result=True)(lambda: None)
    return app


@pytest.fixture
def worker(app: Umbel) -> Iterator[Worker]:
    worker = idle_worker(app)
    worker.stop_wanted.set()  # nothing is dispatched: requests stay where a test can see them
    yield worker
    worker._aside.shutdown()
    worker.inbox.close()
    app.close()


def receive(worker: Worker, name: str, *, redelivered: bool = False, **fields: Any) -> Message:
    message = task_message(name, **fields)
    message.delivery_info["redelivered"] = redelivered
    worker.receiver(message)
    return message


def revoked_before(worker: Worker, name: str, **how: Any) -> Message:
    """A message whose task was revoked when nobody who is left was there."""
    message = task_message(name, **{key: how[key] for key in how if key != "redelivered"})
    message.delivery_info["redelivered"] = how.get("redelivered", False)
    worker.app.backend.store(message.headers["id"], TaskRevokedError("revoked"), "REVOKED")
    worker.receiver(message)
    return message


def in_s(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


@pytest.mark.parametrize("how", [{"redelivered": True}, {"eta": in_s(-60)}, {"eta": in_s(600)}])
def test_a_message_that_may_have_waited_elsewhere_is_judged_by_its_stored_state(
    worker: Worker, how: dict[str, Any]
) -> None:
    window = worker.deliveries.prefetch.window
    revoked = revoked_before(worker, "plain", **how)
    finish_asides(worker)
    finish_asides(worker)
    assert revoked.fate == ["ack"]
    assert (worker.deliveries.prefetch.window, worker.deliveries.reserved) == (window, {})
    receive(worker, "plain", **how)
    finish_asides(worker)
    due_later = how.get("eta", "") > in_s(0)
    assert (worker.deliveries.prefetch.held, len(worker.deliveries.ready)) == (
        (1, 0) if due_later else (0, 1)
    )


@pytest.mark.parametrize(
    ("name", "how"),
    [("plain", {}), ("ignored", {"redelivered": True}), ("ignored", {"eta": in_s(-1)})],
)
def test_other_messages_are_not_asked_about(worker: Worker, name: str, how: dict[str, Any]) -> None:
    revoked_before(worker, name, **how)
    assert len(worker.deliveries.ready) == 1
    assert not worker.busy


def test_a_backend_that_fails_keeps_nothing_from_running(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise BackendError("gone")

    monkeypatch.setattr(worker.app.backend, "get_many", fail)
    receive(worker, "plain", redelivered=True)
    finish_asides(worker)
    assert len(worker.deliveries.ready) == 1
    assert "gone" in caplog.text


def test_many_messages_are_asked_about_together_and_each_is_answered(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "CHUNK", 4)
    backend = worker.app.backend
    asked: list[int] = []
    get_many = backend.get_many

    def count(ids: Any) -> Any:
        asked.append(len(ids))
        return get_many(ids)

    monkeypatch.setattr(backend, "get_many", count)
    messages = [receive(worker, "plain", redelivered=True) for _ in range(10)]
    for _ in range(4):
        finish_asides(worker)
    assert asked == [1, 4, 4, 1]
    assert [request.message for request in worker.deliveries.ready] == messages
    assert worker.deliveries.prefetch.held == 0


def test_a_request_that_was_given_back_meanwhile_is_left_alone(worker: Worker) -> None:
    message = revoked_before(worker, "plain", redelivered=True)
    worker.deliveries.give_back()
    finish_asides(worker)
    assert message.fate == ["requeue"]
    assert worker.deliveries.prefetch.held == 0


def test_messages_that_come_behind_one_that_is_asked_about_do_not_overtake_it(
    worker: Worker,
) -> None:
    messages = [
        receive(worker, "plain", redelivered=True),
        receive(worker, "plain"),
        receive(worker, "ignored", redelivered=True),
        receive(worker, "plain", redelivered=True),
        receive(worker, "ignored"),
    ]
    assert not worker.deliveries.ready
    for _ in range(2):
        finish_asides(worker)
    messages.append(receive(worker, "plain"))
    assert [request.message for request in worker.deliveries.ready] == messages
    assert (
        worker.deliveries.prefetch.held,
        worker.deliveries.stored_states.line_count,
        worker.busy,
    ) == (0, 0, False)


def test_one_that_waits_for_its_eta_is_overtaken(worker: Worker) -> None:
    receive(worker, "plain", eta=in_s(600))
    message = receive(worker, "plain")
    assert [request.message for request in worker.deliveries.ready] == [message]


def test_a_backend_that_is_silent_is_not_waited_for_any_longer(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    backend = worker.app.backend
    get_many = backend.get_many

    def get_late(ids: Any) -> Any:
        assert answers.wait(20)
        return get_many(ids)

    monkeypatch.setattr(backend, "get_many", get_late)
    revoked = revoked_before(worker, "plain", eta=in_s(600))
    messages = [receive(worker, "plain", redelivered=True), receive(worker, "plain")]
    assert not worker.deliveries.ready
    worker.deliveries.stored_states._give_up(next(iter(worker.deliveries.reserved.values())))
    messages.append(receive(worker, "plain", redelivered=True))
    assert [request.message for request in worker.deliveries.ready] == messages
    assert worker.deliveries.prefetch.held == 1
    answers.set()
    for _ in range(2):
        finish_asides(worker)
    assert revoked.fate == ["ack"], "it was still there when the answer came"
    assert worker.deliveries.prefetch.held == worker.deliveries.stored_states.line_count == 0
    assert revoked_before(worker, "plain", redelivered=True).fate == []
    for _ in range(2):
        finish_asides(worker)
    assert len(worker.deliveries.ready) == 3
