"""Delays that RabbitMQ keeps for quorum queues: layout, way there and back, what is in the way."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import celery
import pytest
from kombu import Exchange, Queue

from tests.inside import Inside
from tests.servers import RabbitMQServer, free_port, wait_until
from tests.workers import READY, Program
from umbel import Umbel

BITS = 28


def queue(name: str = "jobs", kind: str = "topic") -> Queue:
    return Queue(
        name,
        Exchange(f"{name}-exchange", type=kind),
        routing_key=f"{name}.key",
        queue_arguments={"x-queue-type": "quorum"},
    )


class Notes:
    """Tasks that write down when and how they came."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, float, dict[str, Any]]] = []

    def __call__(self, app: Umbel) -> None:
        @app.task(name="note", bind=True)
        def note(task: Any, value: Any) -> None:
            self.ran.append((value, time.time(), task.request.delivery_info))

        @app.task(name="again", bind=True, max_retries=5)
        def again(task: Any, countdowns: list[float]) -> None:
            self.ran.append((task.request.retries, time.time(), task.request.delivery_info))
            if task.request.retries < len(countdowns):
                raise task.retry(countdown=countdowns[task.request.retries])

    def values(self) -> list[Any]:
        return [value for value, _, _ in self.ran]


@pytest.fixture
def notes() -> Notes:
    return Notes()


Make = Callable[..., Inside]


@pytest.fixture
def make(notes: Notes) -> Iterator[Make]:
    made: list[Inside] = []

    def inside(url: Any, *queues: Queue, wait: bool = True, **settings: Any) -> Inside:
        chosen = {
            "broker_url": url,
            "result_backend": "disabled://",
            "task_queues": list(queues) or [queue()],
            "task_default_queue": queues[0].name if queues else "jobs",
            **settings,
        }
        made.append(Inside(chosen, notes))
        return made[-1].start(wait=wait)

    yield inside
    for one in made:
        one.close()


def vhost_of(url: str) -> str:
    return url.rsplit("/", 1)[1]


def layout(server: RabbitMQServer, url: str, *names: str) -> list[str]:
    """Queues, exchanges and bindings in the server's own words, without the virtual host."""
    vhost = vhost_of(url)
    binary = f"<<{', '.join(map(str, vhost.encode()))}>>"
    asked = {
        "rabbit_amqqueue": "[name, durable, auto_delete, arguments]",
        "rabbit_exchange": "[name, type, durable, auto_delete, internal, arguments]",
        "rabbit_binding":
            "[source_name, destination_name, destination_kind, routing_key, arguments]",
    }  # fmt: skip
    lines: list[str] = []
    for module, items in asked.items():
        call = f"erpc:call('{server.node}', {module}, info_all, [{binary}, {items}])"
        text = server.evaluate(f'lists:join(10, [io_lib:format("~0p", [I]) || I <- {call}])')
        lines += [f"{module} {line.replace(vhost, 'VHOST')}" for line in text.split("\n")]
    wanted = ("celery_delayed", *names)
    return sorted(line for line in lines if any(name in line for name in wanted))


PEER = """
from celery import Celery
from kombu import Exchange, Queue

app = Celery("peer", broker={url!r}, backend={backend!r})
app.conf.task_queues = [Queue("jobs", Exchange("jobs-exchange", type="topic"),
    routing_key="jobs.key", queue_arguments={{"x-queue-type": "quorum"}})]
app.conf.task_default_queue = "jobs"
app.conf.task_default_exchange = "jobs-exchange"
app.conf.task_default_routing_key = "jobs.key"

@app.task(name="when")
def when():
    import time
    return time.time()
"""


@pytest.fixture
def celery_worker(
    start: Callable[..., Program], tmp_path: Path, redis_url: str
) -> Callable[[str], Program]:
    def started(url: str) -> Program:
        (tmp_path / "peer.py").write_text(PEER.format(url=url, backend=redis_url))
        flags = ["-P", "threads", "-c", "2", "-l", "info", "--without-gossip", "--without-mingle"]
        program = start([sys.executable, "-m", "celery", "-A", "peer", "worker", *flags])
        program.wait_for(READY)
        return program

    return started


def test_the_layout_is_the_one_of_celery_peers_and_delays_cross(
    amqp_url: str,
    rabbitmq_server: RabbitMQServer,
    celery_worker: Callable[[str], Program],
    make: Make,
    redis_url: str,
) -> None:
    server = rabbitmq_server
    other_url = server.add_vhost("peers-own")
    try:
        celery_worker(other_url)
        inside = make(amqp_url)
        ours, theirs = (layout(server, url, "jobs") for url in (amqp_url, other_url))
        assert ours == theirs
        check_ladder(ours)
        assert inside.stop() == 0
        # Our client, their worker.
        client = Umbel(
            "client",
            broker=other_url,
            backend=redis_url,
            set_as_current=False,
            task_queues=[queue()],
            task_default_queue="jobs",
        )
        sent = time.time()
        result = client.send_task("when", countdown=2)
        wait_until(lambda: server.queue_length("celery_delayed_1", "peers-own") == 1, 1.5)
        assert 2 <= result.get(timeout=30) - sent < 5
        client.close()
    finally:
        server.delete_vhost("peers-own")


def check_ladder(lines: list[str]) -> None:
    """As the wire format says, read once more from the lines."""
    text = "\n".join(lines)
    for n in range(BITS):
        own = f'<<"celery_delayed_{n}">>'
        (line,) = [x for x in lines if x.startswith("rabbit_amqqueue") and f"queue,{own}}}" in x]
        after = f"celery_delayed_{n - 1}" if n else "celery_delayed_delivery"
        for expected in (
            "{durable,true}",
            "{auto_delete,false}",
            rf'<<"x-message-ttl">>,\w+,{2**n * 1000}\}}',
            rf'<<"x-dead-letter-exchange">>,longstr,<<"{after}">>',
            r'<<"x-dead-letter-strategy">>,longstr,<<"at-least-once">>',
            r'<<"x-overflow">>,longstr,<<"reject-publish">>',
            r'<<"x-queue-type">>,longstr,<<"quorum">>',
        ):
            assert re.search(expected, line), (expected, line)
        stars = "*." * (BITS - 1 - n)
        for target, kind, bit in ((f"celery_delayed_{n}", "queue", 1), (after, "exchange", 0)):
            assert (
                f'rabbit_binding [{{source_name,{own}}},{{destination_name,<<"{target}">>}},'
                f'{{destination_kind,{kind}}},{{routing_key,<<"{stars}{bit}.#">>}}'
            ) in text
    for source, target, kind in (
        ("celery_delayed_delivery", "jobs-exchange", "exchange"),
        ("jobs-exchange", "jobs", "queue"),
    ):
        assert (
            f'{{source_name,<<"{source}">>}},{{destination_name,<<"{target}">>}},'
            f'{{destination_kind,{kind}}},{{routing_key,<<"#.jobs.key">>}}'
        ) in text
    assert len([x for x in lines if x.startswith("rabbit_exchange") and "topic" in x]) == BITS + 2


def test_delays_are_kept_by_the_broker_and_run_on_time(
    amqp_url: str, rabbitmq_server: RabbitMQServer, make: Make, notes: Notes
) -> None:
    second = queue("other")
    inside = make(amqp_url, queue(), second)
    vhost, counters = vhost_of(amqp_url), inside.worker.counters
    began = time.time()
    due = {"countdown": began + 2, "eta": began + 3.4, "other": began + 2, "short": began + 0.7}
    eta = datetime.fromtimestamp(due["eta"], UTC)
    inside.send("note", "countdown", countdown=2)
    inside.send("note", "eta", eta=eta)
    inside.send("note", "other", countdown=2, queue="other")
    levels = [rabbitmq_server.queue_length(f"celery_delayed_{n}", vhost) for n in range(3)]
    assert levels == [0, 3, 0]
    assert counters.received == 0
    inside.send("note", "short", countdown=0.7)
    wait_until(
        lambda: inside.worker.deliveries.prefetch.held == 1, what="the one that is too short"
    )
    # An hour is not for the worker to hold.
    inside.send("note", "never", eta=datetime.now(UTC) + timedelta(hours=1))
    wait_until(lambda: len(notes.ran) == 4, 20, "the tasks")
    for value, when, info in notes.ran:
        assert -0.01 <= when - due[value] < 1.5, value
        if value == "short":
            assert info["exchange"] == "jobs-exchange"
        else:
            # Where it left the ladder: at 3 seconds, or at 2, also if sending took a while.
            assert info["exchange"] in {"celery_delayed_delivery", "celery_delayed_0"}
            assert re.fullmatch(r"([01]\.){28}(jobs|other)\.key", info["routing_key"])
    assert counters.received == 4
    assert inside.worker.deliveries.prefetch.window == inside.worker.deliveries.prefetch.base


def test_a_task_that_is_retried_keeps_its_address_and_its_key_does_not_grow(
    amqp_url: str, make: Make, notes: Notes
) -> None:
    inside = make(amqp_url, broker_native_delayed_delivery_queue_type="classic")
    sent = time.time()
    inside.send("again", [2, 0, 1.2, 2])
    held: list[int] = []
    prefetch = inside.worker.deliveries.prefetch
    wait_until(lambda: held.append(prefetch.held) or len(notes.ran) == 5, 20, "all retries")
    assert notes.values() == [0, 1, 2, 3, 4]
    assert time.time() - sent >= 5.2
    # Less than a second of each is waited for in the worker, the rest on the broker.
    gaps_s = [b - a for (_, a, _), (_, b, _) in pairwise(notes.ran)]
    assert gaps_s == pytest.approx([2, 0, 1.2, 2], abs=0.8)
    assert sum(held) < len(held) / 2, "they were held by the worker"
    keys = [info["routing_key"] for _, _, info in notes.ran]
    assert keys[0] == "jobs.key"
    assert all(re.fullmatch(r"([01]\.){28}jobs\.key", key) for key in keys[1:])
    assert inside.worker.counters.received == 5
    wait_until(lambda: not inside.worker.deliveries.reserved, what="nothing left over")


def test_a_celery_clients_delay_arrives_at_our_worker(
    amqp_url: str, make: Make, notes: Notes
) -> None:
    make(amqp_url, broker_native_delayed_delivery_queue_type="classic")
    peer = celery.Celery("peer", broker=amqp_url, set_as_current=False)
    peer.conf.task_queues = [queue()]
    peer.conf.task_default_queue = "jobs"
    try:
        due = time.time() + 1
        peer.send_task("note", ("from a peer",), countdown=1)
        wait_until(lambda: notes.ran, 20, "the task")
    finally:
        peer.close()
    (value, when, info) = notes.ran[0]
    assert (value, info["exchange"]) == ("from a peer", "celery_delayed_delivery")
    assert 0 <= when - due < 3


def test_a_delay_that_is_sent_before_any_worker_was_there_is_not_lost(
    amqp_url: str, make: Make, notes: Notes, rabbitmq_server: RabbitMQServer
) -> None:
    client = Umbel(
        "client",
        broker=amqp_url,
        backend="disabled://",
        set_as_current=False,
        task_queues=[queue()],
        task_default_queue="jobs",
        broker_native_delayed_delivery_queue_type="classic",
    )
    client.send_task("note", ("early",), countdown=1)
    client.close()
    vhost = vhost_of(amqp_url)
    wait_until(lambda: rabbitmq_server.queue_length("jobs", vhost) == 1, 10, "the delay to end")
    make(amqp_url, broker_native_delayed_delivery_queue_type="classic")
    wait_until(lambda: notes.values() == ["early"], what="the task")


def test_a_direct_exchange_can_not_delay_and_the_worker_says_so(
    amqp_url: str, make: Make, notes: Notes, caplog: pytest.LogCaptureFixture
) -> None:
    inside = make(
        amqp_url, queue("plain", "direct"), broker_native_delayed_delivery_queue_type="classic"
    )
    told = [r.getMessage() for r in caplog.records if "can not delay messages" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("queue plain has a direct exchange")
    due = time.time() + 1.2
    inside.send("note", "default exchange", countdown=1.2)
    inside.send(
        "note", "by name", countdown=1.2, exchange="plain-exchange", routing_key="plain.key"
    )
    wait_until(lambda: inside.worker.deliveries.prefetch.held == 2, 1, "both in the worker")
    wait_until(lambda: len(notes.ran) == 2, what="the tasks")
    assert all(0 <= when - due < 1 for _, when, _ in notes.ran)


def test_a_worker_that_can_not_set_delays_up_is_not_ready_and_says_why(
    amqp_url: str,
    make: Make,
    notes: Notes,
    rabbitmq_server: RabbitMQServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    vhost = vhost_of(amqp_url)
    with rabbitmq_server.connection(vhost) as connection:
        connection.channel().queue_declare("celery_delayed_27", durable=True, auto_delete=False)
    inside = make(amqp_url, wait=False)
    said = "delayed delivery can not be set up"

    def errors() -> list[str]:
        return [r.getMessage() for r in caplog.records if said in r.getMessage()]

    wait_until(errors, 20, "the reason")
    assert "celery_delayed_27" in errors()[0]
    assert "this worker is not ready" in errors()[0]
    assert "worker_detect_quorum_queues=False" in errors()[0]
    peer = Umbel(
        "plain",
        broker=amqp_url,
        backend="disabled://",
        set_as_current=False,
        task_queues=[queue()],
        task_default_queue="jobs",
    )
    peer.send_task("note", ("waits",))
    peer.close()
    wait_until(lambda: len(errors()) == 2, 20, "the second try")
    worker = inside.worker
    assert (worker.ready_now, worker.is_ready(), worker.is_live(5)) == (False, False, True)
    assert rabbitmq_server.queue_length("jobs", vhost) == 1, "it took what it does not run"
    assert notes.ran == []
    rabbitmq_server.delete_queue("celery_delayed_27", vhost)
    inside.wait_until_ready()
    wait_until(lambda: notes.values() == ["waits"], what="the task")
    assert worker.counters.connections_lost == 0
    assert inside.stop() == 0


def test_a_worker_that_waits_for_its_delays_can_be_stopped(
    amqp_url: str, make: Make, rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    with rabbitmq_server.connection(vhost_of(amqp_url)) as connection:
        connection.channel().queue_declare("celery_delayed_27", durable=True, auto_delete=False)
    inside = make(amqp_url, wait=False)
    wait_until(lambda: "delayed delivery can not be set up" in caplog.text, 20, "the reason")
    assert inside.stop() == 0
    assert inside.worker.ready_now is False


def test_brokers_to_fail_over_to_are_prepared_and_a_dead_one_is_told(
    amqp_url: str,
    make: Make,
    rabbitmq_server: RabbitMQServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    second = rabbitmq_server.add_vhost("second")
    dead = f"amqp://guest:secret@127.0.0.1:{free_port()}/third"
    try:
        make([amqp_url, second, dead], broker_native_delayed_delivery_queue_type="classic")
        with rabbitmq_server.connection("second") as connection:
            connection.channel().queue_declare("celery_delayed_27", passive=True)
        told = [r.getMessage() for r in caplog.records if "is not set up on" in r.getMessage()]
        assert len(told) == 1
        assert "secret" not in told[0]
    finally:
        rabbitmq_server.delete_vhost("second")


def test_nothing_is_declared_where_no_queue_is_a_quorum_queue(
    amqp_url: str, make: Make, notes: Notes, rabbitmq_server: RabbitMQServer
) -> None:
    plain = Queue("plain", Exchange("plain-exchange", type="topic"), routing_key="plain.key")
    inside = make(amqp_url, plain)
    inside.send("note", "held", countdown=1.2)
    wait_until(lambda: inside.worker.deliveries.prefetch.held == 1, 1, "it in the worker")
    wait_until(lambda: notes.values() == ["held"], what="the task")
    names = rabbitmq_server.queue_names(vhost_of(amqp_url))
    own = ("celeryev.", "inside@test.celery.pidbox")  # of gossip and remote control
    assert [name for name in names if not name.startswith(own)] == ["plain"]
