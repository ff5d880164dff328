"""Sending on real brokers: outages, failover, forks, threads, exchanges."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from amqp.exceptions import NotFound
from kombu import Connection, Exchange, Queue
from kombu.common import Broadcast
from kombu.exceptions import OperationalError

from tests.integration.sending import PATIENT, QUICK, ids
from tests.servers import RabbitMQServer, RedisServer, free_port, wait_until
from tests.unit.app.pump import messages
from umbel import Umbel
from umbel.app.routes import direct_queue
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.worker import Worker

# -- outages -------------------------------------------------------------------------------


def test_a_broker_that_is_down_is_named_without_its_password(
    make_sender: Callable[..., Umbel],
) -> None:
    ports = [free_port(), free_port()]
    app = make_sender([f"redis://:hunter2@127.0.0.1:{port}/0" for port in ports])
    with pytest.raises(OperationalError) as caught:
        app.send_task("t", retry_policy=QUICK)
    text = str(caught.value)
    assert "hunter2" not in text
    assert all(f"127.0.0.1:{port}" in text for port in ports)
    assert "after 3 tries" in text


def test_a_wrong_password_is_not_shown_either(
    make_sender: Callable[..., Umbel], rabbitmq_server: RabbitMQServer
) -> None:
    app = make_sender(f"amqp://guest:hunter2@127.0.0.1:{rabbitmq_server.port}//")
    with pytest.raises(Exception, match="ACCESS_REFUSED") as caught:
        app.send_task("t", retry=False)
    shown = [str(caught.value), repr(caught.value), str(caught.value.__cause__)]
    assert not any("hunter2" in text for text in shown)


def test_a_message_waits_for_a_broker_that_comes_up(
    make_sender: Callable[..., Umbel], idle_redis: RedisServer
) -> None:
    app = make_sender(idle_redis.url)
    starter = threading.Thread(target=idle_redis.start)
    starter.start()
    app.send_task("t", task_id="i", retry_policy=PATIENT)
    starter.join()
    assert ids(app) == ["i"]


def test_a_message_survives_a_restart_of_the_broker(
    make_sender: Callable[..., Umbel], idle_redis: RedisServer
) -> None:
    idle_redis.start()
    app = make_sender(idle_redis.url)
    app.send_task("t", task_id="before")
    idle_redis.stop()
    starter = threading.Thread(target=idle_redis.start)
    starter.start()
    app.send_task("t", task_id="after", retry_policy=PATIENT)
    starter.join()
    assert ids(app) == ["before", "after"]


def test_a_message_is_sent_on_a_fresh_connection_when_rabbitmq_closed_the_old_ones(
    make_sender: Callable[..., Umbel], amqp_url: str, rabbitmq_server: RabbitMQServer
) -> None:
    app = make_sender(amqp_url)
    app.send_task("t", task_id="before")
    rabbitmq_server.close_connections()
    app.send_task("t", task_id="after")
    app.send_many([app.signature("t", task_id=f"many-{n}") for n in range(3)])
    assert ids(app) == ["before", "after", "many-0", "many-1", "many-2"]


@pytest.mark.parametrize("dead", [1, 2, 4])
def test_the_first_broker_that_answers_gets_the_message(
    make_sender: Callable[..., Umbel], redis_url: str, dead: int
) -> None:
    broken = [f"redis://127.0.0.1:{free_port()}/0" for _ in range(dead)]
    app = make_sender([*broken, redis_url])
    app.send_task("t", task_id="i", retry=False)
    assert ids(make_sender(redis_url)) == ["i"]
    together = make_sender(";".join([*broken, redis_url]))
    together.send_task("t", task_id="j", retry=False)
    assert ids(make_sender(redis_url)) == ["j"]


def test_rabbitmq_is_failed_over_to_as_well(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    app = make_sender([f"amqp://guest:guest@127.0.0.1:{free_port()}//", amqp_url])
    app.send_task("t", task_id="i", retry=False)
    assert ids(make_sender(amqp_url)) == ["i"]


def test_nobody_has_to_beat_for_an_idle_link(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    app = make_sender(amqp_url, broker_heartbeat=60)
    seen: list[Any] = []
    app.publisher.run(lambda link: seen.append(link.connection.connection.heartbeat))
    assert seen == [0]
    assert app.connection().heartbeat == 60


# -- processes and threads -----------------------------------------------------------------


def in_child(work: Callable[[], None]) -> None:
    """Run in a forked child; what it raises fails the test."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of the tests
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(15)  # a child that hangs is ended
        text = "ok"
        try:
            work()
        except BaseException as exc:
            text = f"{type(exc).__name__}: {exc}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "ok"
    os.waitpid(pid, 0)


def test_a_forked_child_publishes_on_a_connection_of_its_own(
    make_sender: Callable[..., Umbel], broker_url: str
) -> None:
    app = make_sender(broker_url)
    app.send_task("t", task_id="parent-1")
    publisher, oid, origin = app.publisher, app.oid, app.origin
    links: list[Any] = []
    publisher.run(links.append)

    def child() -> None:
        assert app.oid != oid
        assert app.origin != origin
        for n in range(3):
            app.send_task("t", task_id=f"child-{n}", retry=False)
        assert app.publisher is not publisher

    in_child(child)
    app.send_task("t", task_id="parent-2", retry=False)
    publisher.run(links.append)
    assert links[0] is links[1]
    assert sorted(ids(app)) == ["child-0", "child-1", "child-2", "parent-1", "parent-2"]


def test_a_child_that_is_forked_while_threads_publish_is_not_blocked(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url, broker_pool_limit=1)
    app.send_task("t")  # modules are loaded before: Python's own import locks survive no fork
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            app.send_task("t")

    threads = [threading.Thread(target=publish) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for n in range(5):
            in_child(lambda n=n: app.send_task("t", task_id=f"child-{n}") and None)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert {f"child-{n}" for n in range(5)} <= set(ids(app))


def test_twenty_threads_send_two_hundred_messages_each_over_few_links(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url, broker_pool_limit=4)
    client = redis.Redis.from_url(redis_url)
    db = int(redis_url.rsplit("/", 1)[1])
    sent: list[list[str]] = [[] for _ in range(20)]
    most: list[int] = []

    def publish(number: int) -> None:
        for n in range(200):
            sent[number].append(app.send_task("t", task_id=f"{number}-{n}").id)
            if number == 0 and n % 20 == 0:
                most.append(app.publisher._open)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connections = [one for one in client.client_list() if int(one["db"]) == db]
    raw = client.lrange("celery", 0, -1)
    client.close()
    found = [json.loads(one)["headers"]["id"] for one in reversed(raw)]
    assert Counter(found) == Counter(one for ids in sent for one in ids)
    assert max(most) <= 4
    # kombu opens two per link; the others are the test's.
    assert len(connections) <= 2 * 4 + 2
    for ids_of_thread in sent:
        assert [one for one in found if one in set(ids_of_thread)] == ids_of_thread


# -- exchanges and lifetimes ---------------------------------------------------------------


def test_a_topic_exchange_brings_a_message_to_every_queue_whose_key_matches(
    make_sender: Callable[..., Umbel], broker_url: str
) -> None:
    topic = Exchange("media", type="topic")
    app = make_sender(
        broker_url,
        task_queues=[
            Queue("video", topic, routing_key="video.#"),
            Queue("all", topic, routing_key="#"),
            Queue("image", topic, routing_key="image.*"),
        ],
    )
    for queue in ("video", "all", "image"):
        app.send_task("declares", queue=queue, routing_key="nothing.matches.this")
    for queue in ("video", "all", "image"):
        messages(app, queue)
    app.send_task("t", task_id="v", exchange="media", routing_key="video.mp4")
    app.send_task("t", task_id="i", exchange="media", routing_key="image.png")
    found = {queue: ids(app, queue) for queue in ("video", "all", "image")}
    assert found == {"video": ["v"], "all": ["v", "i"], "image": ["i"]}


def test_an_exchange_of_a_declared_queue_is_there_before_it_is_published_to(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    topic = Exchange("media", type="topic")
    app = make_sender(
        amqp_url, task_queues=[Queue("celery"), Queue("video", topic, routing_key="#")]
    )
    app.send_task("t", exchange="media", routing_key="video.mp4")
    app.send_task("t", task_id="after")
    assert ids(app) == ["after"]


def test_an_exchange_that_is_not_there_harms_no_later_message(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    app = make_sender(amqp_url, broker_pool_limit=1)
    for n in range(5):
        with pytest.raises(NotFound, match=r"no exchange 'no\.such'"):
            app.send_task("t", exchange="no.such", routing_key="k")
        app.send_task("t", task_id=f"i{n}")
    assert ids(app) == [f"i{n}" for n in range(5)]


def test_a_channel_that_was_closed_over_another_message_is_replaced(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    app = make_sender(amqp_url, broker_pool_limit=1)

    def spoil(link: Any) -> None:
        link.producer.publish("x", exchange="no.such", routing_key="k")
        # RabbitMQ closes the channel over it, and says so to whoever listens next.
        assert select.select([link.connection.connection.sock], [], [], 10)[0]

    app.publisher.run(spoil)
    app.send_task("t", task_id="i")
    assert ids(app) == ["i"]


def test_a_lifetime_of_months_does_not_break_the_channel(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    app = make_sender(amqp_url)
    app.send_task("t", task_id="long", expires=timedelta(days=365))
    app.send_task("t", task_id="weeks", expires=timedelta(days=49))
    app.send_task("t", task_id="after")
    assert ids(app) == ["long", "weeks", "after"]


def test_a_queue_with_priorities_hands_out_the_highest_first_on_rabbitmq(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    app = make_sender(amqp_url, task_queue_max_priority=10)
    for priority in (1, 9, 5):
        app.send_task("t", task_id=f"p{priority}", priority=priority)
    assert ids(app) == ["p9", "p5", "p1"]


def test_a_transient_message_is_marked_as_such(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    app = make_sender(amqp_url, task_default_delivery_mode="transient")
    app.send_task("t")
    app.send_task("t", delivery_mode=2)
    modes = [message.properties["delivery_mode"] for message in messages(app)]
    assert modes == [1, 2]


# -- to a worker ---------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Workers that run in threads of this process until the test ends."""
    running: list[tuple[Worker, threading.Thread]] = []

    def start_worker(app: Umbel, name: str) -> Worker:
        options = WorkerOptions(hostname=name, pool="threads", concurrency=2)
        worker = Worker(app, options)
        thread = threading.Thread(target=worker.run)
        thread.start()
        running.append((worker, thread))
        wait_until(lambda: worker.ready_now, 20, f"{name} to be ready")
        return worker

    yield start_worker
    for worker, _ in running:
        worker.stop()
    for _, thread in running:
        thread.join(20)
        assert not thread.is_alive()


def test_a_worker_with_a_queue_of_its_own_is_reached_by_name(
    broker_url: str, redis_url: str, make_sender: Callable[..., Umbel], start: Callable[..., Worker]
) -> None:
    results = {"backend": redis_url}
    names = []
    for name in ("one", "two"):
        app = make_sender(broker_url, worker_direct=True, **results)

        @app.task(bind=True, name="who")
        def who(self: Any) -> str:
            return str(self.request.hostname)

        names.append(start(app, name).plan.hostname)
    client = make_sender(broker_url, **results)
    for name in names * 2:
        by_queue = client.send_task("who", queue=direct_queue(name))
        by_key = client.send_task("who", exchange="C.dq2", routing_key=name)
        assert (by_queue.get(timeout=30), by_key.get(timeout=30)) == (name, name)


def test_a_broadcast_reaches_every_worker(
    broker_url: str, make_sender: Callable[..., Umbel], start: Callable[..., Worker]
) -> None:
    heard: list[str] = []
    settings: Callable[[], dict[str, Any]] = lambda: {  # noqa: E731 - queues belong to one app
        "task_queues": [Queue("celery"), Broadcast("announce")],
        "task_routes": {"hear": {"queue": "announce", "exchange": "announce"}},
    }
    for name in ("one", "two"):
        app = make_sender(broker_url, **settings())

        @app.task(bind=True, name="hear")
        def hear(self: Any) -> None:
            heard.append(self.request.hostname.partition("@")[0])

        start(app, name)
    client = make_sender(broker_url, **settings())
    if broker_url.startswith("redis"):
        # What is published before the workers have subscribed is heard by nobody.
        with redis.Redis.from_url(broker_url) as server:
            wait_until(
                lambda: sum(c["psub"] != "0" for c in server.client_list()) >= 2,
                what="both workers to listen",
            )
    client.send_task("hear")
    wait_until(lambda: len(heard) == 2, 20, "both workers to hear it")
    assert sorted(heard) == ["one", "two"]
    if broker_url.startswith("amqp"):
        with Connection(broker_url) as connection:
            exchange = Exchange("announce", type="fanout")
            exchange(connection.channel()).declare(passive=True)


def test_a_message_can_be_compressed_and_expire_and_be_late(
    broker_url: str, redis_url: str, make_sender: Callable[..., Umbel], start: Callable[..., Worker]
) -> None:
    app = make_sender(broker_url, backend=redis_url, accept_content=["json", "msgpack"])

    @app.task(name="echo")
    def echo(x: Any) -> Any:
        return x

    start(app, "echoes")
    big = uuid.uuid4().hex * 2000
    assert echo.apply_async((big,), compression="gzip").get(timeout=30) == big
    assert (
        echo.apply_async((big,), compression="bzip2", serializer="msgpack").get(timeout=30) == big
    )
    late = echo.apply_async((1,), countdown=0.3)
    gone = echo.apply_async((1,), expires=-10)
    assert late.get(timeout=30) == 1
    if broker_url.startswith("redis"):
        wait_until(lambda: gone.state == "REVOKED", 20, "the expired task to be revoked")
