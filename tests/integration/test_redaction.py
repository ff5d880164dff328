"""Secrets of arguments stay out of headers, events and logs, whoever sends them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import celery
import pytest

from tests.servers import wait_until
from tests.workers import WorkerProcess
from umbel import Umbel

SECRET = "hunter2-Zq"
SHOP = """
from umbel import Umbel

app = Umbel("shop")

@app.task
def login(user, password, **more):
    return f"welcome {user}"

@app.task(redact=True)
def charge(card, amount):
    return f"{card} has paid"

@app.task(redact=("iban",))
def pay(iban, amount):
    return amount

@app.task(redact=False)
def show(token):
    return "shown"

@app.task(bind=True, max_retries=0)
def again(self, password, **more):
    raise self.retry(countdown=0)
"""


class Watch:
    """The task events of a broker, as they come."""

    def __init__(self, app: Umbel) -> None:
        self.events: list[dict[str, Any]] = []
        self._receiver = app.events.Receiver(handlers={"*": self.events.append}, wakeup=False)
        self._thread = threading.Thread(target=self._receiver.capture, daemon=True)
        self._thread.start()
        assert self._receiver.wait_ready(20)

    def of(self, task_id: str, kind: str) -> dict[str, Any]:
        """Wait for an event of a task."""

        def find() -> list[dict[str, Any]]:
            found = list(self.events)
            return [e for e in found if e.get("uuid") == task_id and e["type"] == kind]

        wait_until(find, 20, f"{kind} of {task_id}")
        return find()[0]

    def texts(self, task_id: str) -> tuple[str, str]:
        event = self.of(task_id, "task-received")
        return event["args"], event["kwargs"]

    def close(self) -> None:
        self._receiver.close()
        self._thread.join(10)


@pytest.fixture
def environment(broker_url: str, redis_url: str) -> dict[str, str]:
    return {"UMBEL_BROKER_URL": broker_url, "UMBEL_RESULT_BACKEND": redis_url}


@pytest.fixture
def process(
    environment: dict[str, str], worker: Callable[..., WorkerProcess], tmp_path: Path
) -> WorkerProcess:
    (tmp_path / "shop.py").write_text(SHOP)
    return worker("shop", ["-P", "threads", "-c", "2", "-E", "-l", "debug"], env=environment)


@pytest.fixture
def umbel(broker_url: str, redis_url: str) -> Iterator[Umbel]:
    with Umbel("client", broker=broker_url, backend=redis_url, set_as_current=False) as app:
        yield app


@pytest.fixture
def watch(umbel: Umbel) -> Iterator[Watch]:
    watch = Watch(umbel)
    yield watch
    watch.close()


@pytest.fixture(params=["umbel", "celery"])
def client(
    request: pytest.FixtureRequest, umbel: Umbel, broker_url: str, redis_url: str
) -> Iterator[Any]:
    if request.param == "umbel":
        yield umbel
        return
    with celery.Celery("client", broker=broker_url, backend=redis_url, set_as_current=False) as app:
        yield app


def test_events_and_logs_of_a_worker_tell_no_secret_of_any_client(
    process: WorkerProcess, watch: Watch, client: Any
) -> None:
    calls: list[tuple[str, Any, Any, tuple[str, str]]] = [
        ("login", ("bob", SECRET), {}, ("('bob', '**')", "{}")),
        ("login", ("bob",), {"password": SECRET}, ("('bob',)", "{'password': '**'}")),
        (
            "login",
            ("bob", None),
            {"extra": [{"api_key": SECRET, "n": 1}]},
            ("('bob', None)", "{'extra': [{'api_key': '**', 'n': 1}]}"),
        ),
        ("charge", (SECRET, 5), {}, ("(**)", "{}")),
        ("charge", (), {"card": SECRET, "amount": 5}, ("()", "{**}")),
        ("pay", (SECRET, 5), {}, ("('**', 5)", "{}")),
    ]
    for name, args, kwargs, texts in calls:
        sent = client.send_task(f"shop.{name}", args, kwargs)
        assert sent.get(timeout=30) is not None
        assert watch.texts(sent.id) == texts
        result = watch.of(sent.id, "task-succeeded")["result"]
        assert (result == "'**'") == (name == "charge")
    failed = client.send_task("shop.again", (SECRET,), {"token": SECRET})
    assert "args:('**',) kwargs:{'token': '**'}" in watch.of(failed.id, "task-failed")["exception"]
    assert SECRET not in json.dumps(watch.events)
    process.wait_for(r"Task shop.again\[.+ raised unexpected")
    assert SECRET not in process.output


def test_a_task_may_show_everything(process: WorkerProcess, watch: Watch, client: Any) -> None:
    sent = client.send_task("shop.show", (SECRET,))
    assert watch.texts(sent.id) == (f"({SECRET!r},)", "{}")


def test_a_senders_own_words_win(process: WorkerProcess, watch: Watch, client: Any) -> None:
    words = {"argsrepr": "(somebody, ***)", "kwargsrepr": "{***}"}
    sent = client.send_task("shop.login", ("bob", SECRET), {"token": SECRET}, **words)
    assert watch.texts(sent.id) == ("(somebody, ***)", "{***}")


def test_a_message_that_makes_no_sense_tells_no_secret(
    process: WorkerProcess, umbel: Umbel, watch: Watch
) -> None:
    bodies = [
        [{"password": SECRET}, {}, {}],
        [{"password": SECRET}],
        {"password": SECRET},
        [[], [{"token": SECRET}], {}],
    ]
    with umbel.connection() as connection, connection.Producer() as producer:
        for number, body in enumerate(bodies):
            texts = {"argsrepr": repr(body), "kwargsrepr": "{}", "lang": "py"}
            producer.publish(
                json.dumps(body),
                routing_key="celery",
                headers={"task": "shop.login", "id": f"bad-{number}", **texts},
                content_type="application/json",
                content_encoding="utf-8",
            )
    for number in range(len(bodies)):
        process.wait_for(rf"message refused .+'bad-{number}'")
        assert watch.texts(f"bad-{number}") == ("(**)", "{}")
    assert SECRET not in process.output
    assert SECRET not in json.dumps(watch.events)


def test_the_message_in_the_broker_has_texts_without_secrets_and_the_whole_body(
    umbel: Umbel, tmp_path: Path
) -> None:
    @umbel.task(name="shop.login")
    def login(user: str, password: str) -> None: ...

    login.delay("bob", SECRET)
    umbel.send_task("unknown.here", ("positional",), {"token": SECRET})
    login.apply_async(("bob", SECRET), argsrepr=f"('bob', {SECRET!r})")
    with umbel.connection() as connection, connection.SimpleQueue("celery") as queue:
        messages = [queue.get(timeout=30) for _ in range(3)]
        for message in messages:
            message.ack()
    texts = [(m.headers["argsrepr"], m.headers["kwargsrepr"]) for m in messages]
    assert texts == [
        ("('bob', '**')", "{}"),
        ("('positional',)", "{'token': '**'}"),
        (f"('bob', {SECRET!r})", "{}"),
    ]
    assert all(SECRET in json.dumps(message.payload) for message in messages)
