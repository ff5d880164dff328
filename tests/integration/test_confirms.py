"""What RabbitMQ was given: confirmed, refused, unroutable, or not taken because of an alarm."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from tests.integration.sending import PATIENT, ids
from tests.proxy import Proxy
from tests.servers import RabbitMQServer, wait_until
from tests.sites import Site
from umbel import ConnectionBlocked, Nacked, Umbel, Unroutable
from umbel.app.canvas import chain

MakeSender = Callable[..., Umbel]
both_transports = pytest.mark.parametrize("transport", ["umbel", "pyamqp"])


def vhost_of(url: str) -> str:
    return url.rsplit("/", 1)[1]


class Call(threading.Thread):
    """A call on a thread of its own, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._work()
        except Exception as exc:
            self.outcome = exc

    def result(self, timeout_s: float = 20.0) -> Any:
        self.join(timeout_s)
        assert not self.is_alive(), f"it took longer than {timeout_s:g} s"
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def until_blocked(app: Umbel) -> ConnectionBlocked:
    """Send until the broker has blocked the connection; what the sender gets then."""
    for _ in range(1000):
        try:
            app.send_task("t")
        except ConnectionBlocked as exc:
            return exc
    raise AssertionError("the connection was not blocked")


# -- alarms ------------------------------------------------------------------------------------


SENDER = """
import os, sys
from kombu.exceptions import OperationalError
from umbel import Umbel
app = Umbel("s", broker=sys.argv[1], backend="disabled://", broker_blocked_connection_timeout=0.1)
app.send_task("before")
print("ready", flush=True)
sys.stdin.readline()
returned = 1
for number in range(30):
    try:
        app.send_task("t", (number,))
    except OperationalError:
        continue
    returned += 1
print(returned, flush=True)
os._exit(0)
"""


def test_a_call_that_returned_under_a_memory_alarm_has_arrived(
    amqp_url: str, rabbitmq_server: RabbitMQServer
) -> None:
    """Also if its process ends before the alarm does."""
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER, amqp_url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sender.stdin is not None
    assert sender.stdout is not None
    with sender:
        assert sender.stdout.readline() == "ready\n"
        with rabbitmq_server.memory_alarm():
            sender.stdin.write("go\n")
            sender.stdin.flush()
            returned = int(sender.stdout.readline())
            assert sender.wait(20) == 0
    rabbitmq_server.close_connections()
    assert rabbitmq_server.queue_length("celery", vhost_of(amqp_url)) >= returned


@both_transports
def test_an_alarm_that_lasts_is_an_error_that_says_what_to_do(
    make_sender: MakeSender, amqp_url: str, rabbitmq_server: RabbitMQServer, transport: str
) -> None:
    app = make_sender(
        amqp_url,
        broker_amqp_transport=transport,
        broker_blocked_connection_timeout=0.5,
        task_publish_retry_policy=PATIENT,  # which is for connections that break
    )
    app.send_task("before")
    with rabbitmq_server.memory_alarm():
        error = until_blocked(app)
        assert isinstance(error, OperationalError)
        assert "low on memory" in str(error)
        assert "broker_blocked_connection_timeout" in str(error)
        began = time.monotonic()
        with pytest.raises(ConnectionBlocked, match="was not sent"):
            app.send_task("t")
        assert time.monotonic() - began < 5
        with pytest.raises(ConnectionBlocked, match="low on memory"):
            app.control.broadcast("nothing")


def test_an_alarm_that_passes_is_waited_for_and_logged_once(
    make_sender: MakeSender,
    amqp_url: str,
    rabbitmq_server: RabbitMQServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_sender(amqp_url, broker_blocked_connection_timeout=30)
    caplog.set_level(logging.INFO, "umbel")

    def lines(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    app.send_task("before")
    with rabbitmq_server.memory_alarm():
        calls = [Call(lambda: app.send_task("t")) for _ in range(5)]
        wait_until(lambda: lines("low on memory") == 1, what="the reason in the log")
        assert all(call.is_alive() for call in calls)
    for call in calls:
        call.result()
    assert len(ids(app)) == 6
    assert (lines("low on memory"), lines("takes messages again")) == (1, 1)
    app.send_task("after")
    assert (lines("low on memory"), lines("takes messages again")) == (1, 1)


def test_a_batch_that_is_too_big_for_the_sockets_is_not_stuck_in_an_alarm(
    make_sender: MakeSender, amqp_url: str, rabbitmq_server: RabbitMQServer
) -> None:
    app = make_sender(amqp_url, broker_blocked_connection_timeout=1)
    app.send_task("before")
    batch = [app.signature("t", ("x" * 100_000,)) for _ in range(400)]
    other = make_sender(amqp_url, broker_blocked_connection_timeout=1)
    other.send_task("before")
    with rabbitmq_server.memory_alarm():
        with pytest.raises(OperationalError, match="low on memory") as error:
            Call(lambda: app.send_many(batch)).result(15)
        assert isinstance(error.value.__cause__, ConnectionBlocked)
        with pytest.raises(ConnectionBlocked):
            Call(lambda: other.send_task("t", ("x" * 40_000_000,))).result(15)


def test_who_waits_for_a_connection_of_the_pool_is_told_of_the_alarm_too(
    make_sender: MakeSender, amqp_url: str, rabbitmq_server: RabbitMQServer
) -> None:
    app = make_sender(amqp_url, broker_pool_limit=1, broker_blocked_connection_timeout=1)
    app.send_task("before")
    with rabbitmq_server.memory_alarm():
        until_blocked(app)
        began = time.monotonic()
        for call in [Call(lambda: app.send_task("t")) for _ in range(8)]:
            with pytest.raises(ConnectionBlocked):
                call.result(10)
        assert time.monotonic() - began < 5, "one after the other they would take 8 s"


def test_without_confirms_a_call_returns_at_once(
    make_sender: MakeSender, amqp_url: str, rabbitmq_server: RabbitMQServer
) -> None:
    app = make_sender(amqp_url, broker_transport_options={"confirm_publish": False})
    app.send_task("before")
    with rabbitmq_server.memory_alarm():
        for _ in range(10):
            Call(lambda: app.send_task("t")).result(5)
    wait_until(
        lambda: rabbitmq_server.queue_length("celery", vhost_of(amqp_url)) == 11,
        what="the messages, once the alarm is over",
    )


def test_what_a_worker_sends_waits_for_the_end_of_an_alarm(
    amqp_site: Site, rabbitmq_server: RabbitMQServer
) -> None:
    worker = amqp_site.worker("prefork")
    first = amqp_site.app.signature("tests.probe_app.wait", ("first",))
    following = amqp_site.app.signature("tests.probe_app.add", ("ly",))
    result = chain(first, following).apply_async()
    amqp_site.wait_until_begun("first")
    with rabbitmq_server.memory_alarm():
        amqp_site.open_gate("first")
        worker.wait_for("low on memory")
    assert result.get(timeout=30) == "firstly"


# -- refused -----------------------------------------------------------------------------------


@both_transports
def test_a_message_that_a_full_queue_refuses_is_an_error_for_its_sender(
    make_sender: MakeSender, amqp_url: str, transport: str
) -> None:
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    queue = Queue("full", Exchange("full"), "full", queue_arguments=full)
    app = make_sender(amqp_url, broker_amqp_transport=transport, task_queues=[queue])
    app.send_task("t", queue="full")
    with pytest.raises(Nacked) as error:
        app.send_task("t", queue="full")
    assert isinstance(error.value, OperationalError)
    with pytest.raises(Nacked):
        app.send_many([app.signature("t", queue="full") for _ in range(3)])
    assert len(ids(app, "full")) == 1
    app.send_task("t", queue="full")
    assert len(ids(app, "full")) == 1, "the connection is as good as before"


# -- unroutable --------------------------------------------------------------------------------


@both_transports
def test_a_queue_that_was_deleted_meanwhile_is_declared_again(
    make_sender: MakeSender, amqp_url: str, rabbitmq_server: RabbitMQServer, transport: str
) -> None:
    app = make_sender(amqp_url, broker_amqp_transport=transport)
    app.send_task("before")
    rabbitmq_server.delete_queue("celery", vhost_of(amqp_url))
    app.send_task("t")
    assert len(ids(app)) == 1
    rabbitmq_server.delete_queue("celery", vhost_of(amqp_url))
    sent = app.send_many(
        [app.signature("t", queue="other" if n % 3 else "celery") for n in range(9)]
    )
    assert set(ids(app)) | set(ids(app, "other")) == {one.id for one in sent}


@both_transports
def test_a_message_that_reaches_no_queue_is_an_error_unless_it_is_for_whoever_listens(
    make_sender: MakeSender, amqp_url: str, transport: str
) -> None:
    app = make_sender(amqp_url, broker_amqp_transport=transport)
    with pytest.raises(Unroutable, match="nowhere") as error:
        app.send_task("t", exchange=Exchange("direct-one", "direct"), routing_key="nowhere")
    assert isinstance(error.value, OperationalError)
    with pytest.raises(Unroutable, match="nowhere"):
        app.send_task("t", exchange="", routing_key="nowhere")
    app.send_task("t", exchange=Exchange("fanout-one", "fanout"), routing_key="")


# -- cut ---------------------------------------------------------------------------------------


def test_a_message_whose_confirm_was_cut_off_is_sent_again_with_the_same_id(
    make_sender: MakeSender, amqp_url: str, rabbitmq_server: RabbitMQServer
) -> None:
    vhost = vhost_of(amqp_url)
    with Proxy(rabbitmq_server.port) as proxy:
        app = make_sender(f"amqp://guest:guest@127.0.0.1:{proxy.port}/{vhost}")
        app.send_task("before")
        proxy.swallow(to_server=False)
        task_id = str(uuid.uuid4())
        call = Call(lambda: app.send_task("t", task_id=task_id))
        wait_until(lambda: rabbitmq_server.queue_length("celery", vhost) == 2, what="the message")
        assert call.is_alive(), "it was not confirmed"
        proxy.cut()
        call.result()
        assert ids(app)[1:] == [task_id, task_id]
        app.close()
