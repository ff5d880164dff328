"""Secrets stay out of headers, events, logs and replies; callers get the whole result."""

from __future__ import annotations

import json
import re
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
import json
import os
import time

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

@app.task
def give(text):
    return json.loads(text)

@app.task
def fail(text):
    raise OSError(text)

@app.task(bind=True)
def retry(self, text):
    raise self.retry(exc=OSError(text), countdown=0, max_retries=1)

@app.task
def echo(user, password):
    return f"{user}/{password}"

@app.task
def wrong(user, password):
    raise ValueError(f"no user {user} with {password}")

@app.task(redact=True)
def decline(card):
    raise ValueError("card declined: " + card)

@app.task(bind=True)
def progress(self, text):
    more = {"password": text, "from": f"redis://:{text}@h/0"}
    self.send_event("task-progress", token=text, done=0.5, more=more)
    self.update_state(state="PROGRESS", meta={"token": text})
    return self.AsyncResult(self.request.id).result

@app.task
def hold(url, x=None):
    time.sleep(600)

@app.control_command
def reload(state, **_):
    raise OSError("no redis://:" + os.environ["SHOP_SECRET"] + "@h")

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
    urls = {"UMBEL_BROKER_URL": broker_url, "UMBEL_RESULT_BACKEND": redis_url}
    return {**urls, "SHOP_SECRET": SECRET}


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


RETURNED: list[tuple[Any, str]] = [
    ({"user": "bob", "password": SECRET}, "{'user': 'bob', 'password': '**'}"),
    ([{"api_key": SECRET, "n": 1}], "[{'api_key': '**', 'n': 1}]"),
    (f"amqp://bob:{SECRET}@mq:5672//", "'amqp://bob:**@mq:5672//'"),
    (f"login with password={SECRET} worked", "'login with password=** worked'"),
    ({f"redis://:{SECRET}@a": 1}, "{'redis://:**@a': 1}"),
]


def test_a_result_is_redacted_wherever_it_is_shown_and_whole_for_the_caller(
    process: WorkerProcess, watch: Watch, client: Any
) -> None:
    for value, shown in RETURNED:
        sent = client.send_task("shop.give", (json.dumps(value),), argsrepr="(...)")
        assert sent.get(timeout=30) == value
        assert watch.of(sent.id, "task-succeeded")["result"] == shown
        process.wait_for(rf"Task shop.give\[{sent.id}\] succeeded in .+: {re.escape(shown)}")
    assert SECRET not in process.output
    assert SECRET not in json.dumps(watch.events)


RAISED = [
    f"connection to redis://:{SECRET}@h:6379/0 failed",
    f"cannot log in: host=db password={SECRET} user=bob",
    f"refused: {{'token': '{SECRET}', 'n': 1}}",
    f'refused: {{"token": "{SECRET}"}}',
    f"401 for Authorization: Bearer {SECRET}",
    f"User(name='bob', password=SecretStr('{SECRET}'))",
]


@pytest.mark.parametrize("task", ["fail", "retry"])
def test_what_an_exception_tells_is_redacted_and_whole_for_the_caller(
    process: WorkerProcess, watch: Watch, umbel: Umbel, task: str
) -> None:
    for text in RAISED:
        sent = umbel.send_task(f"shop.{task}", (text,), argsrepr="(...)")
        with pytest.raises(OSError, match=re.escape(text)):
            sent.get(timeout=30)
        assert text in sent.traceback
        event = watch.of(sent.id, "task-failed")
        for field in ("exception", "traceback"):
            assert "OSError" in event[field]
            assert "**" in event[field]
        if task == "retry":
            assert "**" in watch.of(sent.id, "task-retried")["exception"]
        process.wait_for(rf"Task shop.{task}\[{sent.id}\] raised unexpected")
    assert SECRET not in process.output
    assert SECRET not in json.dumps(watch.events)


def test_a_secret_argument_is_hidden_where_a_result_or_an_error_repeats_it(
    process: WorkerProcess, watch: Watch, umbel: Umbel
) -> None:
    echoed = umbel.send_task("shop.echo", ("bob", SECRET))
    assert echoed.get(timeout=30) == f"bob/{SECRET}"
    assert watch.of(echoed.id, "task-succeeded")["result"] == "'bob/**'"
    wrong = umbel.send_task("shop.wrong", ("bob",), {"password": SECRET})
    with pytest.raises(ValueError, match=SECRET):
        wrong.get(timeout=30)
    event = watch.of(wrong.id, "task-failed")
    assert event["exception"] == "ValueError('no user bob with **')"
    assert event["traceback"].endswith("ValueError: no user bob with **\n")
    process.wait_for(rf"shop.wrong\[{wrong.id}\] raised unexpected")
    assert SECRET not in process.output


def test_a_task_that_hides_all_hides_its_errors_and_keeps_their_kind_and_place(
    process: WorkerProcess, watch: Watch, umbel: Umbel
) -> None:
    sent = umbel.send_task("shop.decline", (SECRET,))
    with pytest.raises(ValueError, match="declined"):
        sent.get(timeout=30)
    event = watch.of(sent.id, "task-failed")
    assert event["exception"] == "ValueError('**')"
    assert "in decline" in event["traceback"]
    assert event["traceback"].endswith("\nValueError: **\n")
    process.wait_for(rf"shop.decline\[{sent.id}\] raised unexpected")
    for text in (process.output, json.dumps(watch.events)):
        assert SECRET not in text


def test_events_of_a_tasks_own_making_and_its_states_tell_no_secret(
    process: WorkerProcess, watch: Watch, umbel: Umbel
) -> None:
    sent = umbel.send_task("shop.progress", (SECRET,), argsrepr="(...)")
    assert sent.get(timeout=30) == {"token": SECRET}  # what update_state kept, for the caller
    event = watch.of(sent.id, "task-progress")
    assert (event["token"], event["done"]) == ("**", 0.5)
    assert event["more"] == {"password": "**", "from": "redis://:**@h/0"}
    assert SECRET not in json.dumps(watch.events)
    assert SECRET not in process.output


def test_questions_about_tasks_are_answered_without_secrets(
    process: WorkerProcess, umbel: Umbel
) -> None:
    url = f"redis://:{SECRET}@h/0"
    sent = [
        umbel.send_task("shop.hold", (url,), {"x": f"password={SECRET}"}),
        umbel.send_task("shop.hold", (url,), {"x": {"token": SECRET}}),
        umbel.send_task("shop.hold", (url,), {"x": 1}),  # waits for a free thread
        umbel.send_task("shop.hold", (url,), countdown=600),
    ]
    inspect = umbel.control.inspect(timeout=20, limit=1)
    wait_until(lambda: len(next(iter((inspect.active() or {"": ""}).values()))) == 2, 30, "two run")
    wait_until(lambda: any((inspect.reserved() or {}).values()), 30, "one waits")
    wait_until(lambda: any((inspect.scheduled() or {}).values()), 30, "one is scheduled")
    replies = [
        inspect.active(), inspect.reserved(), inspect.scheduled(),
        inspect.query_task([one.id for one in sent]),
    ]  # fmt: skip
    assert "redis://:**@h/0" in json.dumps(replies)
    assert SECRET not in json.dumps(replies)
    (reply,) = umbel.control.broadcast("reload", reply=True, timeout=20, limit=1)
    assert list(reply.values()) == [{"error": "OSError('no redis://:**@h')"}]
    assert SECRET not in process.output


def test_the_event_of_a_sender_tells_no_secret(watch: Watch, umbel: Umbel) -> None:
    umbel.conf.task_send_sent_event = True
    url = f"https://bob:{SECRET}@host/path"
    sent = umbel.send_task("far.away", (url, 2), {"text": f"pin: {SECRET}", "token": SECRET})
    event = watch.of(sent.id, "task-sent")
    assert event["args"] == "('https://bob:**@host/path', 2)"
    assert event["kwargs"] == "{'text': 'pin: **', 'token': '**'}"


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
