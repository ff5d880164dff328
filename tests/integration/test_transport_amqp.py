"""Both AMQP transports keep the same promises, on a real broker: ours and py-amqp's."""

from __future__ import annotations

import datetime as dt
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import amqp
import pytest
from amqp.exceptions import (
    ConnectionForced,
    ConsumerCancelled,
    MessageNacked,
    NotFound,
    PreconditionFailed,
)
from kombu import Connection, Consumer, Exchange, Producer, Queue

from tests.proxy import Proxy
from tests.servers import RabbitMQServer, wait_until
from tests.sizes import size
from umbel.broker.amqp.batches import Nacked, Unroutable, publish, publish_one
from umbel.broker.amqp.channel import ACKS_MAX, BufferedChannel
from umbel.broker.sessions import connections
from umbel.broker.tasks.batches import Parcel

LONG_S = 20.0
OURS = "umbel"

Connect = Callable[..., Connection]


@pytest.fixture(params=[OURS, "pyamqp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(kind: str, amqp_url: str) -> Iterator[Connect]:
    """Opens connections of the one kind or the other."""
    made: list[Connection] = []

    def open_one(url: str = amqp_url, **options: Any) -> Connection:
        made.append(connections.connect(url, amqp_transport=kind, **options))
        made[-1].connect()
        return made[-1]

    yield open_one
    for connection in made:
        connections.hang_up(connection, lost=True)


class Taker:
    """Consumes a queue, and keeps what comes."""

    def __init__(
        self, connection: Connection, queue: Queue | str, *, prefetch: int = 0, **options: Any
    ) -> None:
        self.connection = connection
        self.channel: Any = connection.channel()
        self.messages: list[Any] = []
        if isinstance(queue, str):
            queue = Queue(queue, durable=True)
        self.consumer = Consumer(self.channel, [queue], on_message=self.messages.append, **options)
        if prefetch:
            self.consumer.qos(prefetch_count=prefetch, apply_global=True)
        if hasattr(self.channel, "gather_acks"):
            self.channel.gather_acks()
        self.consumer.consume()

    def take(self, count: int) -> list[Any]:
        """The next messages, so many."""
        deadline = time.monotonic() + LONG_S
        while len(self.messages) < count:
            assert time.monotonic() < deadline, f"{len(self.messages)} of {count} came"
            self.connection.drain_events(timeout=LONG_S)
        taken, self.messages[:] = self.messages[:count], self.messages[count:]
        return taken

    def expect_silence(self) -> None:
        with pytest.raises(TimeoutError):
            self.connection.drain_events(timeout=0.2)
        assert not self.messages


def fill(connection: Connection, queue: Queue | str, bodies: Any, **options: Any) -> None:
    """Put messages into a queue; the broker has them when this returns."""
    if isinstance(queue, str):
        queue = Queue(queue, durable=True)
    with connection.channel() as channel:
        queue(channel).declare()
        producer = Producer(channel, auto_declare=False)
        channel.confirm_select()
        for body in bodies:
            producer.publish(body, routing_key=queue.name, serializer="json", **options)
        wait_until(
            lambda: queue(channel).queue_declare(passive=True).message_count >= len(bodies),
            LONG_S,
            "the messages to be there",
        )


def numbers(messages: list[Any]) -> list[Any]:
    return [message.decode() for message in messages]


def settle(connection: Connection) -> None:
    """Everything that was said before has been heard when this returns."""
    with connection.channel():
        pass


# -- deliveries --------------------------------------------------------------------------


class Dribble(Proxy):
    """Passes on a few bytes at a time."""

    def _accept(self) -> None:
        super()._accept()
        for way in self._ways.values():
            way.sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _read(self, source: socket.socket) -> bytes:
        return source.recv(37)


def test_messages_come_in_order(connect: Connect) -> None:
    count = size(2_000, 10_000)
    fill(connect(), "q", range(count))
    taker = Taker(connect(), "q", prefetch=300)
    came = []
    for _ in range(count):
        (message,) = taker.take(1)
        came.append(message)
        message.ack()
    assert numbers(came) == list(range(count))
    taker.channel.close()
    assert connect().channel().queue_declare("q", passive=True).message_count == 0


def test_messages_come_in_small_segments(connect: Connect, amqp_url: str) -> None:
    count = size(500, 10_000)
    fill(connect(), "q", range(count))
    port = urlsplit(amqp_url).port
    assert port is not None
    with Dribble(port) as proxy:
        taker = Taker(connect(amqp_url.replace(f":{port}/", f":{proxy.port}/")), "q")
        assert numbers(taker.take(count)) == list(range(count))


def test_priorities_are_respected(connect: Connect) -> None:
    queue = Queue("q", max_priority=5)
    with connect().channel() as channel:
        queue(channel).declare()
        producer = Producer(channel)
        for number in range(60):
            producer.publish(number, routing_key="q", serializer="json", priority=number % 6)
    taker = Taker(connect(), queue)
    priorities = [message.properties["priority"] for message in taker.take(60)]
    assert priorities == sorted(priorities, reverse=True)


def test_the_window_is_respected_and_acks_open_it(
    connect: Connect, amqp_url: str, rabbitmq_server: RabbitMQServer
) -> None:
    fill(connect(), "q", range(50))
    taker = Taker(connect(), "q", prefetch=7)
    first = taker.take(7)
    taker.expect_silence()
    assert rabbitmq_server.unacknowledged("q", urlsplit(amqp_url).path[1:]) == 7
    for message in first[:3]:
        message.ack()
    assert numbers(taker.take(3)) == [7, 8, 9]
    taker.expect_silence()
    taker.consumer.qos(prefetch_count=20, apply_global=True)
    assert len(taker.take(13)) == 13
    taker.expect_silence()


def test_what_was_not_acknowledged_comes_again_after_a_cut(connect: Connect) -> None:
    fill(connect(), "q", range(10))
    cut = connect()
    taker = Taker(cut, "q")
    taken = taker.take(10)
    assert not any(message.delivery_info["redelivered"] for message in taken)
    for message in taken[:4]:
        message.ack()
    getattr(taker.channel, "flush_acks", int)()
    settle(cut)
    taken[4].ack()  # perhaps not written any more
    cut.collect()
    with pytest.raises((*cut.connection_errors, AttributeError)):
        taken[5].ack()
    again = Taker(connect(), "q")
    came = again.take(5)
    assert numbers(came) in ([5, 6, 7, 8, 9], [4, 5, 6, 7, 8])
    assert all(message.delivery_info["redelivered"] for message in came)


@pytest.mark.parametrize("seed", range(size(2, 10)))
def test_exactly_what_is_not_settled_comes_again(connect: Connect, seed: int) -> None:
    dice = random.Random(seed)
    count = 400
    fill(connect(), "q", range(count))
    connection = connect()
    taker = Taker(connection, "q")
    # Settled nearly in order, a few much later, every tenth never.
    order = sorted(range(count), key=lambda n: n + dice.random() * (300 if n % 7 == 0 else 20))
    left = set(dice.sample(range(count), count // 10))
    taken = taker.take(count)
    for number in order:
        if number in left:
            continue
        step = dice.random()
        if step < 0.05:
            taken[number].reject(requeue=False)
        else:
            taken[number].ack()
        if step > 0.97:
            _look(connection)
        elif step > 0.95:
            getattr(taker.channel, "flush_acks", int)()
    getattr(taker.channel, "flush_acks", int)()
    settle(connection)
    connection.collect()
    again = Taker(connect(), "q")
    assert set(numbers(again.take(len(left)))) == left
    again.expect_silence()


def test_consumers_with_and_without_acks_share_a_channel(connect: Connect) -> None:
    publisher = connect()
    fill(publisher, "a", range(20))
    fill(publisher, "b", range(20))
    connection = connect()
    taker = Taker(connection, "a")
    free: list[Any] = []
    without = Consumer(
        taker.channel, [Queue("b", durable=True)], on_message=free.append, no_ack=True
    )
    without.consume()
    taken = taker.take(20)
    wait_until(lambda: len(free) == 20 or connection.drain_events(timeout=LONG_S), LONG_S, "all")
    for message in reversed(taken[:-1]):
        message.ack()
    for message in free:
        message.ack()  # which means nothing
    taker.channel.close()
    assert numbers(Taker(connect(), "a").take(1)) == [19]


def test_single_messages_are_fetched_and_acknowledged(connect: Connect) -> None:
    fill(connect(), "q", range(3))
    channel = connect().channel()
    queue = Queue("q", durable=True)(channel)
    first, second = queue.get(), queue.get(no_ack=True)
    assert numbers([first, second]) == [0, 1]
    first.ack()
    third = queue.get()
    assert queue.get() is None
    third.requeue()
    assert numbers([queue.get()]) == [2]
    channel.close()


def test_what_is_recovered_comes_again_and_is_acknowledged(connect: Connect) -> None:
    fill(connect(), "q", range(5))
    taker = Taker(connect(), "q")
    taken = taker.take(5)
    taken[1].ack()
    taker.channel.basic_recover(requeue=True)
    again = taker.take(4)
    assert sorted(numbers(again)) == [0, 2, 3, 4]
    for message in again:
        message.ack()
    taker.channel.close()
    assert connect().channel().queue_declare("q", passive=True).message_count == 0


def test_fanout_reaches_everybody(connect: Connect) -> None:
    exchange = Exchange("f", type="fanout")
    queues = [Queue(f"f{number}", exchange) for number in range(3)]
    takers = [Taker(connect(), queue) for queue in queues]
    producer = Producer(connect().channel(), exchange)
    for number in range(10):
        producer.publish(number, serializer="json")
    for taker in takers:
        assert numbers(taker.take(10)) == list(range(10))


# -- contents ----------------------------------------------------------------------------


def test_bodies_of_all_sizes_arrive_whole(connect: Connect) -> None:
    channel = connect().channel()
    Queue("q")(channel).declare()
    bodies = [
        b"",
        b"x",
        bytes(131_064),
        bytes(131_065),
        random.Random(1).randbytes(10 * 2**20),
        b"end",
    ]
    for body in bodies:
        channel.basic_publish(amqp.Message(body, content_encoding="binary"), "", "q")
    taker = Taker(connect(), "q", prefetch=2)
    for body in bodies:
        (message,) = taker.take(1)
        assert (message.body or b"") == body
        message.ack()
    taker.expect_silence()


def test_text_is_decoded_by_its_encoding(connect: Connect) -> None:
    channel = connect().channel()
    Queue("q")(channel).declare()
    for body, encoding in (
        (b"\xc3\xbc", "utf-8"),
        (b"\xfc", "latin-1"),
        (b"\xfc", "utf-8"),
        (b"x", "no"),
    ):
        channel.basic_publish(amqp.Message(body, content_encoding=encoding), "", "q")
    assert [m.body for m in Taker(connect(), "q").take(4)] == ["ü", "ü", b"\xfc", b"x"]


def test_headers_of_every_type_arrive(connect: Connect, amqp_url: str) -> None:
    headers = {
        "text": "ü", "empty": "", "bytes": b"\xff\xfe", "true": True, "false": False,
        "small": -5, "large": 2**40, "float": 0.5, "decimal": Decimal("1.25"), "nothing": None,
        "when": dt.datetime(2026, 11, 16, 10), "list": [1, "a", None, [True], {"x": 1}],  # noqa: DTZ001
        "table": {"inner": {"deep": 1, "none": None}}, "no list": [], "no table": {},
    }  # fmt: skip
    raw = {
        b"b": (b"b\xff", -1), b"B": (b"B\xff", 255), b"u": (b"u\xff\xff", 65_535),
        b"I": (b"I" + struct.pack(">i", -3), -3), b"i": (b"i" + struct.pack(">I", 3), 3),
        b"l": (b"l" + struct.pack(">q", -9), -9), b"f": (b"f" + struct.pack(">f", 0.25), 0.25),
        b"d": (b"d" + struct.pack(">d", 2.5), 2.5), b"x": (b"x\0\0\0\2\0\1", b"\0\1"),
        b"V": (b"V", None), b"t": (b"t\1", True), b"S": (b"S\0\0\0\1s", "s"),
    }  # fmt: skip
    items = b"".join(bytes((1,)) + name + value for name, (value, _) in raw.items())
    connection = connections.connect(amqp_url)
    channel = connection.channel()
    Queue("q")(channel).declare()
    properties = {
        "message_id": "m",
        "timestamp": 2**33,
        "type": "t",
        "app_id": "a",
        "user_id": "guest",
    }
    for _ in range(2):
        channel.basic_publish(
            amqp.Message(b"x", application_headers=headers, **properties), "", "q"
        )
        frames = [channel.writer.address("", "q")]
        channel.writer.add(frames, b"\x20\0" + struct.pack(">I", len(items)) + items, b"x", 131_072)
        connection.connection.write_frames(b"".join(frames))
    messages = Taker(connect(), "q").take(4)
    connection.close()
    for written, by_hand in (messages[:2], messages[2:]):
        assert written.headers == headers
        assert {key: written.properties[key] for key in properties} == properties
        assert by_hand.headers == {name.decode(): value for name, (_, value) in raw.items()}


# -- errors ------------------------------------------------------------------------------


def test_a_missing_queue_closes_its_channel_only(connect: Connect) -> None:
    fill(connect(), "q", range(4))
    connection = connect()
    taker = Taker(connection, "q", prefetch=2)
    taker.take(2)
    other = connection.channel()
    with pytest.raises(NotFound):
        other.queue_declare("missing", passive=True)
    other.queue_declare("made")
    publisher = connection.channel()
    publisher.basic_publish(amqp.Message(b"x"), "no-such-exchange", "q")
    with pytest.raises(NotFound):
        publisher.queue_declare("made", passive=True)
    publisher.basic_publish(amqp.Message(b"x"), "", "made")
    assert wait_until(lambda: other.basic_get("made"), LONG_S, "the message").body == b"x"


def test_an_ack_too_many_closes_the_channel(connect: Connect) -> None:
    fill(connect(), "q", range(6))
    connection = connect()
    taker = Taker(connection, "q")
    taken = taker.take(6)
    for message in taken[1:4]:
        message.ack()
    taker.channel.basic_ack(taken[1].delivery_tag)
    with pytest.raises(PreconditionFailed):
        connection.drain_events(timeout=LONG_S)
    # What was acknowledged before is; the numbers of the channel begin anew.
    taker.messages.clear()
    taker.consumer.revive(taker.channel)
    again = taker.take(3)
    assert numbers(again) == [0, 4, 5]
    for message in again:
        message.ack()
    taker.channel.close()
    assert connect().channel().queue_declare("q", passive=True).message_count == 0


def test_a_broker_that_closes_the_connection_is_an_error(
    connect: Connect, rabbitmq_server: RabbitMQServer
) -> None:
    connection = connect()
    port = connection.connection.sock.getsockname()[1]
    rabbitmq_server.close_connections(ports=[port])
    with pytest.raises(ConnectionForced):
        connection.drain_events(timeout=LONG_S)
    assert not connection.connected


def test_a_deleted_queue_cancels_its_consumer(connect: Connect) -> None:
    fill(connect(), "q", range(1))
    taker = Taker(connect(), "q")
    taker.take(1)[0].ack()
    connect().channel().queue_delete("q")
    with pytest.raises(ConsumerCancelled):
        taker.connection.drain_events(timeout=LONG_S)


def test_a_cut_is_seen_while_waiting_and_while_publishing(connect: Connect, amqp_url: str) -> None:
    port = urlsplit(amqp_url).port
    assert port is not None
    proxy = Proxy(port)
    try:
        url = amqp_url.replace(f":{port}/", f":{proxy.port}/")
        waiting, publishing = connect(url), connect(url)
        channel = publishing.channel()
    finally:
        proxy.close()
    with pytest.raises(waiting.connection_errors):
        waiting.drain_events(timeout=LONG_S)
    many = [amqp.Message(bytes(100_000))] * 50
    with pytest.raises(publishing.connection_errors):
        [channel.basic_publish(message, "", "q") for message in many]


def test_a_broker_short_of_memory_says_so(
    connect: Connect, rabbitmq_server: RabbitMQServer
) -> None:
    connection = connect()
    said: list[str] = []
    connection.connection.on_blocked = lambda reason: said.append("blocked")
    connection.connection.on_unblocked = lambda: said.append("unblocked")
    channel = connection.channel()
    Queue("q")(channel).declare()
    call = rabbitmq_server._call("vm_memory_monitor", "set_vm_memory_high_watermark", "{}")
    rabbitmq_server.evaluate(call.replace("{}", "0.00001") + ', ""')
    try:
        wait_until(lambda: _publish_and_look(connection, channel, said), LONG_S, "blocked")
    finally:
        rabbitmq_server.evaluate(call.replace("{}", "0.8") + ', ""')
    wait_until(lambda: _look(connection) or "unblocked" in said, LONG_S, "unblocked")
    assert said == ["blocked", "unblocked"]


def _publish_and_look(connection: Connection, channel: Any, said: list[str]) -> bool:
    if not said:
        channel.basic_publish(amqp.Message(b"x"), "", "q")
    _look(connection)
    return bool(said)


def _look(connection: Connection) -> None:
    try:
        connection.drain_events(timeout=0.05)
    except TimeoutError:
        return


# -- time --------------------------------------------------------------------------------


def test_a_wait_ends_in_time_whatever_else_comes(connect: Connect) -> None:
    connection = connect(heartbeat=2)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.3)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0)
    assert 0.29 < time.monotonic() - began < 2


def test_heartbeats_keep_a_quiet_connection_and_their_absence_is_noticed(
    connect: Connect, amqp_url: str
) -> None:
    port = urlsplit(amqp_url).port
    assert port is not None
    with Proxy(port) as proxy:
        connection = connect(amqp_url.replace(f":{port}/", f":{proxy.port}/"), heartbeat=1)
        until = time.monotonic() + 3.5  # RabbitMQ gives up after two or three
        while time.monotonic() < until:
            _look(connection)
            connection.heartbeat_check()
        settle(connection)
        proxy.swallow(to_server=False)
        with pytest.raises(ConnectionForced, match="heartbeats missed"):
            wait_until(lambda: _look(connection) or connection.heartbeat_check(), 10, "an error")


# -- publishing --------------------------------------------------------------------------


def test_what_goes_nowhere_and_must_not_is_returned(connect: Connect) -> None:
    connection = connect(transport_options={"confirm_publish": True})
    channel = connection.channel()
    returned: list[Any] = []
    channel.events["basic_return"].add(lambda exc, *rest: returned.append((exc, *rest)))
    channel.basic_publish(amqp.Message(b"x", correlation_id="1"), "", "nowhere", mandatory=True)
    ((exc, exchange, routing_key, message),) = returned
    assert (exc.reply_code, exchange, routing_key) == (312, "", "nowhere")
    assert (message.body, message.properties["correlation_id"]) == (b"x", "1")


def test_a_full_queue_refuses(connect: Connect) -> None:
    connection = connect(transport_options={"confirm_publish": True})
    channel = connection.channel()
    _full_queue(channel).declare()
    for _ in range(2):
        channel.basic_publish(amqp.Message(b"x"), "", "full")
    with pytest.raises(MessageNacked):
        channel.basic_publish(amqp.Message(b"x"), "", "full")
    assert channel.basic_get("full") is not None


def _full_queue(channel: Any) -> Any:
    arguments = {"x-overflow": "reject-publish"}
    return Queue("full", max_length=2, queue_arguments=arguments)(channel)


def parcels(count: int, queue: str = "q", body: bytes = b"%d") -> list[Parcel]:
    return [
        Parcel(
            body % number, {"id": str(number), "task": "add", "eta": None},
            {"correlation_id": str(number)}, "application/json", "utf-8", "", queue,
        )
        for number in range(count)
    ]  # fmt: skip


def test_a_batch_arrives_in_order_between_single_messages(connect: Connect, kind: str) -> None:
    connection = connect()
    channel = connection.channel()
    Queue("q")(channel).declare()
    count = 1_250 if kind == OURS else 50
    single = Parcel(b"-1", {}, {}, "application/json", "utf-8", "", "q")
    told = []
    for _ in range(3):
        publish_one(channel, single)
        told += list(publish(channel, parcels(count)))
    publish_one(channel, single)
    assert told == ([500, 1_000, count] * 3 if kind == OURS else [count] * 3)
    expected = [-1, *range(count)] * 3 + [-1]
    came = Taker(connect(), "q").take(len(expected))
    assert numbers(came) == expected
    assert came[1].headers == {"id": "0", "task": "add", "eta": None}
    assert came[1].properties["correlation_id"] == "0"
    assert came[1].properties["delivery_mode"] == 2


def test_a_batch_of_large_messages_arrives(connect: Connect) -> None:
    channel = connect().channel()
    Queue("q")(channel).declare()
    body = b'"' + b"x" * 300_000 + b'%d"'
    list(publish(channel, parcels(8, body=body)))
    taken = Taker(connect(), "q").take(8)
    assert [message.body[-2] for message in taken] == list("01234567")
    assert {len(message.body) for message in taken} == {300_003}


# -- ours only ---------------------------------------------------------------------------


class Gate(Proxy):
    """Takes nothing while it is shut, as a broker does that is busy or short of memory."""

    def __init__(self, target_port: int) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        super().__init__(target_port)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # or it takes all

    def _read(self, source: socket.socket) -> bytes:
        self.is_open.wait(LONG_S)
        return super()._read(source)


@pytest.fixture
def ours(amqp_url: str) -> Iterator[Connect]:
    made: list[Connection] = []

    def open_one(url: str = amqp_url, **options: Any) -> Connection:
        made.append(connections.connect(url, **options))
        made[-1].connect()
        return made[-1]

    yield open_one
    for connection in made:
        connections.hang_up(connection, lost=True)


def test_a_batch_that_is_refused_in_part_says_which(ours: Connect) -> None:
    channel = ours().channel()
    _full_queue(channel).declare()
    Queue("q")(channel).declare()
    batch = parcels(6)
    for number in (1, 2, 3, 5):
        batch[number] = batch[number]._replace(routing_key="full")
    with pytest.raises(Nacked, match="2 of 6 messages were refused by the broker: 3, 5") as raised:
        list(publish(channel, batch))
    assert (raised.value.indexes, raised.value.written) == ([3, 5], 6)
    assert channel.queue_declare("q", passive=True).message_count == 2
    assert list(publish(channel, parcels(3))) == [3]  # and goes on


def test_a_batch_that_goes_nowhere_in_part_says_which(ours: Connect) -> None:
    channel = ours().channel()
    Queue("q")(channel).declare()
    batch = parcels(1_500)
    for number in (1_001, 1_007):
        batch[number] = batch[number]._replace(routing_key="nowhere")
    told = publish(channel, batch, mandatory=True)
    assert next(told) == 500
    with pytest.raises(
        Unroutable, match=r"2 of 1500 messages were returned .*1001, 1007"
    ) as raised:
        list(told)
    assert raised.value.indexes == [1_001, 1_007]
    assert list(publish(channel, parcels(3))) == [3]


def test_a_batch_that_is_refused_and_goes_nowhere_in_part_names_all_of_them(ours: Connect) -> None:
    channel = ours().channel()
    _full_queue(channel).declare()
    Queue("q")(channel).declare()
    batch = parcels(8)
    for number in (1, 2, 3, 5):
        batch[number] = batch[number]._replace(routing_key="full")
    batch[6] = batch[6]._replace(routing_key="nowhere")
    with pytest.raises(Nacked) as raised:
        list(publish(channel, batch, mandatory=True))
    assert raised.value.indexes == [3, 5, 6]
    assert list(publish(channel, parcels(3))) == [3]


def test_a_broker_that_takes_nothing_for_a_while_is_not_lost(ours: Connect, amqp_url: str) -> None:
    port = urlsplit(amqp_url).port
    assert port is not None
    with Gate(port) as gate:
        channel = ours(amqp_url.replace(f":{port}/", f":{gate.port}/")).channel()
        Queue("q")(channel).declare()
        channel.confirm_select()
        gate.is_open.clear()
        # Longer than the kernel waits by what py-amqp tells it: a second, and then another try.
        threading.Timer(3, gate.is_open.set).start()
        more_than_buffers_hold = parcels(16, body=b'"' + b"x" * 2**20 + b'%d"')
        assert list(publish(channel, more_than_buffers_hold)) == [16]
        assert channel.queue_declare("q", passive=True).message_count == 16


def test_a_batch_to_a_missing_exchange_is_a_channel_error(ours: Connect) -> None:
    channel = ours().channel()
    Queue("q")(channel).declare()
    batch = [parcel._replace(exchange="missing") for parcel in parcels(5)]
    with pytest.raises(NotFound):
        list(publish(channel, batch))
    assert list(publish(channel, parcels(5))) == [5]
    assert channel.queue_declare("q", passive=True).message_count == 5


def test_gathered_acks_are_few_frames_and_written_before_anything_else(
    ours: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.broker.amqp.channel.ACK_S", 60)
    fill(ours(), "q", range(600))
    connection = ours()
    taker = Taker(connection, "q")
    assert isinstance(taker.channel, BufferedChannel)
    taken = taker.take(600)
    established, written = connection.connection, []
    write = established.write_frames
    established.write_frames = lambda data: (written.append(len(data)), write(data))[1]

    def acknowledge(first: int, last: int) -> list[int]:
        """Bytes of each write; a frame has 21."""
        for message in taken[first:last]:
            message.ack()
        told, written[:] = written[:], []
        return told

    assert acknowledge(0, 100) == []  # nobody waits
    taker.channel.flush_acks()
    assert acknowledge(101, 101 + ACKS_MAX) == [21, 21 * ACKS_MAX]  # but not for more than that
    assert acknowledge(300, 310) == []
    taken[310].reject(requeue=False)
    assert acknowledge(311, 320) == [21 * 10]
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)
    assert acknowledge(400, 405) == [21 * 9]  # before that waited
    taken[100].ack()
    connection.close()
    expected = {*range(101 + ACKS_MAX, 300), *range(320, 400), *range(405, 600)}
    again = Taker(ours(), "q")
    assert set(numbers(again.take(len(expected)))) == expected
    again.expect_silence()


def test_the_oldest_ack_does_not_wait_for_long(ours: Connect) -> None:
    fill(ours(), "q", range(3))
    connection = ours()
    taken = Taker(connection, "q").take(3)
    channel: Any = taken[0].channel
    taken[0].ack()
    channel._oldest_at -= 1  # as if it were a second ago
    taken[1].ack()
    assert len(channel._ledger) == 0


def test_a_message_that_can_not_be_read_is_handed_to_the_consumer(ours: Connect) -> None:
    connection = ours()
    channel: Any = connection.channel()
    Queue("q")(channel).declare()
    stamp = b"\1aT" + b"\x7f" + b"\xff" * 7
    frames = [channel.writer.address("", "q")]
    channel.writer.add(frames, b"\x20\0" + struct.pack(">I", len(stamp)) + stamp, b"x", 131_072)
    connection.connection.write_frames(b"".join(frames))
    fill(connection, "q", [1])
    refused: list[Any] = []

    def refuse(message: Any, exc: BaseException) -> None:
        refused.append(exc)
        message.reject()

    taker = Taker(ours(), "q", on_decode_error=refuse)
    assert numbers(taker.take(1)) == [1]
    assert "can not be read" in str(refused[0])
    taker.channel.close()
    assert channel.queue_declare("q", passive=True).message_count == 1  # the other one


def test_whoever_handles_what_was_read_does_not_miss_heartbeats(ours: Connect) -> None:
    """They lie behind it in the socket, which is not read meanwhile."""
    fill(ours(), "q", range(20))
    connection = ours(heartbeat=10)
    established = connection.connection
    Taker(connection, "q")
    wait_until(established.has_input, LONG_S, "messages")
    for _ in range(3):
        connection.heartbeat_check()
        established.last_heartbeat_received -= 15  # as if a task had taken so long
        connection.drain_events(timeout=LONG_S)
    connection.heartbeat_check()
    established.last_heartbeat_received -= 25
    with pytest.raises(ConnectionForced):
        connection.heartbeat_check()


def test_the_setting_and_clones_choose_the_transport(amqp_url: str) -> None:
    for chosen, module in (
        ("umbel", "umbel.broker.amqp.transport"),
        ("pyamqp", "kombu.transport.pyamqp"),
    ):
        connection = connections.connect(amqp_url, amqp_transport=chosen)
        assert type(connection.transport).__module__ == module
        assert type(connection.clone().transport).__module__ == module
        assert connection.transport.driver_name == "py-amqp"
        secure = connections.connect(amqp_url.replace("amqp:", "amqps:"), amqp_transport=chosen)
        assert type(secure.transport).__name__ == "SSLTransport"
        assert type(secure.transport).__module__ == module


def test_a_stream_that_breaks_ends_the_connection_and_is_no_hang(ours: Connect) -> None:
    connection = ours()
    established = connection.connection
    established.reader.feed(b"\1\0\1\0\0\0\1\0\0")
    for _ in range(2):
        with pytest.raises(connection.connection_errors) as raised:
            connection.drain_events(timeout=1)
        assert isinstance(raised.value, amqp.exceptions.UnexpectedFrame)
    with pytest.raises(amqp.exceptions.UnexpectedFrame):
        connection.transport.on_readable(established, None)
