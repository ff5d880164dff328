"""Receivers on real brokers: nothing that is sent ends them, and nothing is missed in silence."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Exchange, Producer
from kombu.pidbox import Mailbox

from tests.event_mutations import Mutations
from tests.proxy import Proxy
from tests.servers import RabbitMQServer, RedisServer, wait_until
from umbel import Umbel
from umbel.app.events.publisher import event_exchange, publish_events
from umbel.app.events.receiver import WAITING_MAX, Receiver, StopCapture
from umbel.broker.sessions import connections
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.events import encode

WAIT_S = 20.0


def event(number: int = 1, kind: str = "worker-heartbeat", **fields: Any) -> dict[str, Any]:
    told = {"type": kind, "hostname": "w1@test", "pid": 7, "clock": number, "timestamp": 1.5}
    return {**told, "uuid": f"id-{number}", "freq": 2.0, "seq": number, "inc": 9, **fields}


class Broker:
    """A broker with an application on it, and somebody who publishes."""

    def __init__(self, url: str | None, **settings: Any) -> None:
        self.app = Umbel("listening", broker=url, set_as_current=False, **settings)
        self.receivers: list[Receiver] = []
        self.connect()

    def connect(self) -> None:
        self.connection: Connection = self.app.connection()
        self.channel = self.connection.default_channel
        self.exchange: Exchange = event_exchange("celeryev", self.connection)
        self.exchange(self.channel).declare()
        self.producer = Producer(self.channel, auto_declare=False)

    def receiver(self, **options: Any) -> Receiver:
        made = Receiver(self.app, **{"wakeup": False, **options})
        self.receivers.append(made)
        return made

    def tell(self, *events: dict[str, Any]) -> None:
        publish_events(self.producer, self.exchange, events)

    def publish(self, body: Any, **options: Any) -> None:
        chosen = {"content_type": "application/json", "content_encoding": "utf-8", **options}
        self.producer.publish(body, exchange="celeryev", routing_key="worker.x", **chosen)

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.connection.release()
        self.app.close()


@pytest.fixture(params=["redis", "amqp", "memory", "embedded"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """Every kind in turn."""
    kind = request.param
    if kind == "embedded":
        made = Broker(None, embedded_directory=str(tmp_path))
    else:
        made = Broker("memory://" if kind == "memory" else request.getfixturevalue(f"{kind}_url"))
    yield made
    made.close()
    if kind == "embedded":
        connections.leave_embedded()


@pytest.fixture
def served(broker_url: str) -> Iterator[Broker]:
    """Redis and RabbitMQ in turn."""
    made = Broker(broker_url)
    yield made
    made.close()


@pytest.fixture
def in_memory() -> Iterator[Broker]:
    made = Broker("memory://")
    yield made
    made.close()


class Capture:
    """A capture on a thread of its own."""

    def __init__(self, receiver: Receiver, **options: Any) -> None:
        self.receiver = receiver
        self.events: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        receiver.handlers["*"] = self.events.append
        self._thread = threading.Thread(target=self._run, args=(options,), daemon=True)
        self._thread.start()
        assert receiver.wait_ready(WAIT_S)

    def _run(self, options: dict[str, Any]) -> None:
        try:
            self.receiver.capture(**options)
        except BaseException as exc:
            self.error = exc

    def wait(self, count: int) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.events) >= count or self.error, WAIT_S, f"{count} events")
        assert self.error is None
        return self.events

    def stop(self) -> None:
        self.receiver.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        assert self.error is None


# -- capturing -------------------------------------------------------------------------------


def test_what_is_published_once_a_receiver_is_ready_is_captured(broker: Broker) -> None:
    before = time.time()
    with broker.receiver() as receiver:
        broker.tell(event(1))
        broker.tell(event(2, "task-received"), event(3, "task-started"))
        captured = list(receiver.itercapture(limit=3, timeout=WAIT_S))
    for one in captured:
        assert before <= one.pop("local_received") <= time.time()
    assert captured == [event(1), event(2, "task-received"), event(3, "task-started")]
    assert broker.app.clock.value == 4
    assert receiver.gaps == {}


def test_a_limit_ends_a_capture_within_a_batch_and_the_next_one_goes_on(broker: Broker) -> None:
    seen: list[int] = []
    with broker.receiver(handlers={"*": lambda one: seen.append(one["clock"])}) as receiver:
        broker.tell(*(event(number, "task-started") for number in range(1, 6)))
        receiver.capture(limit=2, timeout=WAIT_S)
        assert seen == [1, 2]
        receiver.capture(limit=2, timeout=WAIT_S)
        assert seen == [1, 2, 3, 4]
        broker.tell(event(6))
        receiver.capture(limit=2, timeout=WAIT_S)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_without_a_with_statement_a_capture_opens_and_closes_its_connection(
    broker: Broker,
) -> None:
    receiver = broker.receiver()
    for number in (1, 2):
        capture = Capture(receiver, limit=1, timeout=WAIT_S)
        broker.tell(event(number))
        assert capture.wait(1)[0]["clock"] == number
        capture._thread.join(WAIT_S)
        assert not receiver.wait_ready(0)


def test_two_receivers_of_one_process_hear_everything_each(broker: Broker) -> None:
    with broker.receiver() as first, broker.receiver() as second:
        broker.tell(event(1))
        for receiver in (first, second):
            assert [one["clock"] for one in receiver.itercapture(1, WAIT_S)] == [1]


def test_a_receiver_can_be_told_where_to_connect(broker: Broker) -> None:
    elsewhere = Umbel("other", broker="memory://nowhere", set_as_current=False)
    receiver = Receiver(elsewhere, connection=broker.connection, wakeup=False)
    broker.receivers.append(receiver)
    with receiver:
        broker.tell(event(1))
        assert next(receiver.itercapture(1, WAIT_S))["clock"] == 1
    assert broker.connection.connected


def test_silence_raises_and_what_is_refused_does_not_break_it(broker: Broker) -> None:
    with broker.receiver() as receiver:
        broker.publish(b"no event")
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no event came for 0\.3 s"):
            receiver.capture(timeout=0.3)
        assert 0.3 <= time.monotonic() - began < 2
        assert receiver.counts == {"undecodable": 1}


def test_every_event_begins_the_silence_anew_and_handlers_do_not_count(in_memory: Broker) -> None:
    waited: list[float] = []

    def slow(_: Any) -> None:
        waited.append(time.monotonic())
        threading.Event().wait(0.2)  # longer than the silence that is allowed
        if len(waited) < 4:
            in_memory.tell(event(1))

    with in_memory.receiver(handlers={"*": slow}) as receiver:
        in_memory.tell(event(1))
        with pytest.raises(TimeoutError):
            receiver.capture(timeout=0.15)
    assert len(waited) == 4
    assert time.monotonic() - waited[-1] >= 0.35


def test_a_deadline_bounds_the_whole_capture_and_raises_nothing(broker: Broker) -> None:
    with broker.receiver() as receiver:
        began = time.monotonic()
        receiver.handlers["*"] = lambda _: broker.tell(event(1))  # there is always one more
        broker.tell(event(1))
        receiver.capture(timeout=5, deadline_s=0.4)
        assert 0.4 <= time.monotonic() - began < 3


def test_a_capture_ends_when_another_thread_says_so(broker: Broker) -> None:
    capture = Capture(broker.receiver())
    broker.tell(event(1))
    capture.wait(1)
    capture.stop()
    capture.receiver.capture()  # one that was stopped stays so
    capture.receiver.should_stop = False
    with pytest.raises(TimeoutError):
        capture.receiver.capture(timeout=0.05)


def test_a_second_capture_at_the_same_time_is_refused(in_memory: Broker) -> None:
    capture = Capture(in_memory.receiver())
    with pytest.raises(RuntimeError, match="captures already"):
        capture.receiver.capture()
    capture.stop()


def test_a_receiver_that_is_closed_by_another_thread_hangs_up(served: Broker) -> None:
    capture = Capture(served.receiver())
    capture.receiver.close()
    capture._thread.join(WAIT_S)
    assert not capture._thread.is_alive()
    assert not capture.receiver.wait_ready(0)


# -- handlers --------------------------------------------------------------------------------


def test_an_event_goes_to_the_handler_of_its_type_or_to_that_of_all_others(
    in_memory: Broker,
) -> None:
    seen: list[tuple[str, str]] = []
    handlers = {
        "task-started": lambda one: seen.append(("mine", one["type"])),
        "*": lambda one: seen.append(("all", one["type"])),
    }
    with in_memory.receiver(handlers=handlers) as receiver:
        in_memory.tell(event(1, "task-started"), event(2, "task-failed"))
        receiver.capture(limit=2, timeout=WAIT_S)
    assert seen == [("mine", "task-started"), ("all", "task-failed")]


def test_only_the_types_that_are_asked_for_are_handed_on_and_counted(in_memory: Broker) -> None:
    with in_memory.receiver(types=["task-failed"]) as receiver:
        in_memory.tell(event(1, "task-started"), event(2, "task-failed"), event(3, "task-failed"))
        captured = list(receiver.itercapture(limit=2, timeout=WAIT_S))
    assert [one["clock"] for one in captured] == [2, 3]
    assert receiver.gaps == {}
    assert receiver.clock.value == 4


def test_a_handler_that_fails_is_logged_once_per_kind_and_the_next_event_follows(
    in_memory: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(one: dict[str, Any]) -> None:
        raise (KeyError if one["clock"] == 3 else ValueError)(one["clock"])

    with in_memory.receiver(handlers={"*": fail}) as receiver:
        in_memory.tell(*(event(number, "task-started") for number in range(1, 5)))
        receiver.capture(limit=4, timeout=WAIT_S)
    assert receiver.failed_count == 4
    assert [one.exc_info[0] for one in caplog.records if one.exc_info] == [ValueError, KeyError]


def test_a_handler_ends_a_capture_and_interrupts_go_through(in_memory: Broker) -> None:
    def stop(_: Any) -> None:
        raise StopCapture

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with in_memory.receiver(handlers={"task-a": stop, "task-b": interrupt}) as receiver:
        in_memory.tell(event(1, "task-a"), event(2, "task-b"), event(3, "task-c"))
        receiver.capture(timeout=WAIT_S)
        with pytest.raises(KeyboardInterrupt):
            receiver.capture(timeout=WAIT_S)
        assert next(receiver.itercapture(1, WAIT_S))["type"] == "task-c"


def test_a_state_gets_every_event_before_the_handler_even_when_it_fails(in_memory: Broker) -> None:
    order: list[str] = []

    class Broken:
        def event(self, one: dict[str, Any]) -> None:
            order.append(f"state {one['clock']}")
            raise ValueError

    handlers = {"*": lambda one: order.append(f"handler {one['clock']}")}
    with in_memory.receiver(state=Broken(), handlers=handlers) as receiver:
        in_memory.tell(event(1))
        receiver.capture(limit=1, timeout=WAIT_S)
    assert order == ["state 1", "handler 1"]
    assert receiver.failed_count == 1


# -- what others send ------------------------------------------------------------------------


def test_pickle_is_refused_before_it_is_read(broker: Broker, tmp_path: Path) -> None:
    trap = tmp_path / "trap"

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (trap,))

    with broker.receiver() as receiver:
        broker.publish(
            pickle.dumps(Bomb()),
            content_type="application/x-python-serialize",
            content_encoding="binary",
        )
        broker.tell(event(1))
        receiver.capture(limit=1, timeout=WAIT_S)
    assert receiver.counts == {"content-disallowed": 1}
    assert not trap.exists()


def test_compressed_events_are_read_and_bombs_are_not(broker: Broker) -> None:
    with broker.receiver() as receiver:
        for body in (b"[" * 2**27, json.dumps(event(1)).encode()):
            broker.publish(zlib.compress(body), headers={"compression": "application/x-gzip"})
        assert next(receiver.itercapture(1, WAIT_S))["clock"] == 1
    assert receiver.counts == {"too-big": 1}


def test_a_clock_too_far_ahead_is_refused_and_moves_nothing(broker: Broker) -> None:
    with broker.receiver() as receiver:
        broker.tell(event(5))
        broker.tell(event(6, clock=2**52))
        broker.tell(event(7, "task-sent", clock=2**52))
        broker.tell(event(8, "task-sent", clock=20, sync=True))
        broker.tell(event(9, "custom-x", clock=None))
        captured = list(receiver.itercapture(limit=4, timeout=WAIT_S))
    assert [one["clock"] for one in captured] == [5, 0, 20, 0]
    assert receiver.counts == {"clock-jump": 1}
    assert broker.app.clock.value == 21


def test_what_arrives_together_with_rubbish_is_not_left_behind(redis_url: str) -> None:
    """In one piece: nothing more comes that would wake the receiver up."""
    broker = Broker(redis_url)
    channel, client = broker.channel, broker.channel.client
    topic = channel._get_publish_topic("celeryev", "worker.heartbeat")
    rubbish = [b"no JSON", b"[1]", b'"x"', b"{}", b'{"body": 5, "properties": {}}', b"[" * 100_000]
    with broker.receiver() as receiver, client.pipeline(transaction=True) as pipe:
        for number, bad in enumerate(rubbish, 1):
            message = channel.prepare_message(
                encode(event(number)),
                content_type="application/json",
                content_encoding="utf-8",
                headers={},
            )
            channel._inplace_augment_message(message, "celeryev", "worker.heartbeat")
            pipe.publish(topic, bad)
            pipe.publish(topic, json.dumps(message))
        pipe.execute()
        began = time.monotonic()
        captured = list(receiver.itercapture(limit=len(rubbish), timeout=5))
        assert [one["clock"] for one in captured] == list(range(1, len(rubbish) + 1))
        assert time.monotonic() - began < 2
        assert receiver.counts == {"unreadable": len(rubbish)}
    broker.close()


def test_a_flood_is_handled_as_it_comes_and_not_gathered_first(served: Broker) -> None:
    waiting: list[int] = []
    with served.receiver() as receiver:
        receiver.handlers["*"] = lambda _: waiting.append(len(receiver._waiting))
        for number in range(3 * WAITING_MAX):
            served.tell(event(number))
        receiver.capture(limit=3 * WAITING_MAX, timeout=WAIT_S)
    assert max(waiting) <= WAITING_MAX
    assert receiver.gaps == {}


def test_clusters_that_share_a_redis_by_prefix_do_not_hear_each_other(redis_url: str) -> None:
    ours, theirs = (
        Broker(redis_url, broker_transport_options={"global_keyprefix": prefix})
        for prefix in ("ours:", "theirs:")
    )
    with ours.receiver() as receiver:
        theirs.tell(event(1))
        ours.tell(event(2))
        assert [one["clock"] for one in receiver.itercapture(1, WAIT_S)] == [2]
        with pytest.raises(TimeoutError):
            receiver.capture(timeout=0.1)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("seed", [1])
def test_thousands_of_mutated_messages_end_nothing(served: Broker, seed: int) -> None:
    """Messages, and on Redis whatever can be published without making it a message."""
    mutations = Mutations(random.Random(seed))
    capture = Capture(served.receiver())
    served.app.clock.adjust(1)
    client = getattr(served.channel, "client", None)
    for number in range(3_000):
        body, content_type, encoding, headers = mutations.message()
        if client is not None and number % 3 == 0:
            client.publish(f"/{client.connection_pool.connection_kwargs['db']}.celeryev/x", body)
            continue
        served.publish(body, content_type=content_type, content_encoding=encoding, headers=headers)
        if number % 500 == 0:
            served.tell(event(number, hostname="good@test", clock=2))
    served.tell(event(9_999, hostname="last@test", clock=3))
    wait_until(
        lambda: any(one["hostname"] == "last@test" for one in capture.events) or capture.error,
        60,
        "the good event after all the bad ones",
    )
    capture.stop()
    assert sum(one["hostname"] == "good@test" for one in capture.events) >= 4
    assert capture.receiver.counts.total() > 1_000
    assert capture.receiver.reconnect_count == 0
    assert capture.receiver.counts["unforeseen"] == 0


# -- peers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wakeup", [True, False])
def test_workers_are_asked_for_a_heartbeat_when_wanted(served: Broker, wakeup: bool) -> None:
    asked, other = threading.Event(), threading.Event()
    mailbox = Mailbox("celery", type="fanout", accept=["json"])
    with served.app.connection() as connection:
        node = mailbox(connection).Node("w1@test", channel=connection.channel())
        node.handlers = {"heartbeat": lambda state: asked.set(), "other": lambda state: other.set()}
        consumer = node.listen()
        _drained(connection)  # on Redis that subscribes
        with served.receiver(wakeup=wakeup):
            pass
        mailbox(connection).abcast("other")
        while not other.is_set():
            assert _drained(connection)
        assert asked.is_set() == wakeup
        consumer.cancel()


def _drained(connection: Connection) -> bool:
    try:
        connection.drain_events(timeout=1)
    except TimeoutError:
        return False
    return True


CELERY_IN_INDIA = """
import sys
from celery import Celery
app = Celery(broker=sys.argv[1], set_as_current=False)
with app.connection_for_write() as connection:
    with app.events.Dispatcher(connection, hostname="celery@india") as dispatcher:
        dispatcher.send("worker-heartbeat", freq=2.0)
        dispatcher.send("task-started", uuid="t1")
"""


def test_events_of_celery_in_another_time_zone_keep_their_unix_time(served: Broker) -> None:
    with served.receiver() as receiver:
        began = time.time()
        subprocess.run(
            [sys.executable, "-c", CELERY_IN_INDIA, served.app.conf.broker_url],
            env={"TZ": "Asia/Kolkata", "PATH": ""},
            check=True,
            timeout=60,
        )
        captured = list(receiver.itercapture(limit=2, timeout=WAIT_S))
        ended = time.time()
    assert [one["utcoffset"] for one in captured] == [-5.5, -5.5]
    for one in captured:
        assert began <= one["timestamp"] <= one["local_received"] <= ended


IN_GEVENT = """
from gevent import monkey; monkey.patch_all()
import sys, gevent
from umbel import Umbel
app = Umbel("green", broker=sys.argv[1], set_as_current=False)
from umbel.app.events.receiver import Receiver
turns = 0
def count():
    global turns
    while True:
        turns += 1
        gevent.sleep(0.01)
counter = gevent.spawn(count)
with Receiver(app) as receiver:
    print("ready", flush=True)
    for event in receiver.itercapture(limit=3, timeout=20):
        print("event", event["clock"], flush=True)
    before = turns
    receiver.capture(deadline_s=0.5)
    print("others ran" if turns > before + 5 else f"blocked {before} {turns}", flush=True)
"""


def test_a_receiver_works_among_greenlets(served: Broker, start: Callable[..., Any]) -> None:
    program = start([sys.executable, "-c", IN_GEVENT, served.app.conf.broker_url])
    program.wait_for("ready", 30)
    for number in (1, 2, 3):
        served.tell(event(number))
    program.wait_for("event 3", 30)
    program.wait_for("others ran", 30)
    assert program.wait(30) == 0


# -- breaks ----------------------------------------------------------------------------------


def test_a_lost_connection_is_made_anew_and_what_is_missing_shows(
    served: Broker, request: pytest.FixtureRequest
) -> None:
    capture = Capture(served.receiver())
    served.tell(event(1))
    capture.wait(1)
    _cut(served, request)
    wait_until(lambda: capture.receiver.reconnect_count, WAIT_S, "the break to be noticed")
    assert capture.receiver.wait_ready(WAIT_S)
    served.connection.collect()
    served.connect()
    served.tell(event(4))
    capture.wait(2)
    assert capture.receiver.gaps == {("w1@test", 9): ((2, 3),)}
    served.tell(event(3))
    capture.wait(3)
    assert capture.receiver.gaps == {("w1@test", 9): ((2, 2),)}
    capture.stop()


def _cut(broker: Broker, request: pytest.FixtureRequest) -> None:
    if broker.app.conf.broker_url.startswith("redis"):
        server: RedisServer = request.getfixturevalue("redis_server")
        server.client().execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    else:
        rabbit: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
        rabbit.close_connections()


def test_a_receiver_that_starts_before_its_broker_waits_for_it(redis_server: RedisServer) -> None:
    redis_server.stop()
    try:
        app = Umbel("early", broker=redis_server.url_of(200), set_as_current=False)
        receiver = Receiver(app, wakeup=False)
        with pytest.raises(TimeoutError):
            receiver.capture(timeout=0.3)
        receiver.capture(deadline_s=0.3)
        with receiver:
            assert not receiver.wait_ready(0)
            redis_server.start()
            broker = Broker(redis_server.url_of(200))
            capture = Capture(receiver)
            broker.tell(event(1))
            capture.wait(1)
            capture.stop()
            broker.close()
        app.close()
    finally:
        if redis_server.process is None:
            redis_server.start()


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_a_broker_that_went_silent_is_noticed(kind: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("redis_server" if kind == "redis" else "rabbitmq_server")
    url: str = request.getfixturevalue(f"{kind}_url")
    with Proxy(server.port) as proxy:
        through = Broker(
            url.replace(str(server.port), str(proxy.port)),
            broker_heartbeat=1,
            broker_transport_options={"health_check_interval": 1} if kind == "redis" else {},
        )
        capture = Capture(through.receiver())
        through.tell(event(1))
        capture.wait(1)
        proxy.swallow(to_server=False)
        wait_until(lambda: capture.receiver.reconnect_count, WAIT_S, "the silence to be noticed")
        assert capture.receiver.wait_ready(WAIT_S)
        direct = Broker(url)
        direct.tell(event(2))
        capture.wait(2)
        capture.stop()
        direct.close()
        through.app.close()
        through.connection.collect()


def test_a_receiver_leaves_nothing_behind(broker: Broker, request: pytest.FixtureRequest) -> None:
    def left() -> list[str]:
        url = broker.app.conf.broker_url
        if url.startswith("amqp"):
            rabbit: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
            return [name for name in rabbit.queue_names(url.rsplit("/", 1)[1]) if "ev." in name]
        if url.startswith("memory"):
            return [name for name in broker.channel.queues if "ev." in name]
        return [bytes(key).decode() for key in broker.channel.client.keys("_kombu.binding.*ev")]

    with broker.receiver() as receiver:
        assert left()
        broker.tell(event(1))
        receiver.capture(limit=1, timeout=WAIT_S)
    wait_until(lambda: not left(), what="the queue to go")
    broker.tell(event(2))
    assert not left()


def test_an_impossible_queue_is_refused_at_once() -> None:
    app = Umbel("x", broker="memory://", set_as_current=False, event_queue_durable=True)
    with pytest.raises(ImproperlyConfigured, match="event_queue_durable"):
        Receiver(app).capture(timeout=1)
    app.close()
