"""Messages that go back behind the others of their queue: unchanged, never lost, not elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue

from tests.servers import RabbitMQServer, wait_until
from umbel.broker.sessions.connections import connect
from umbel.broker.tasks import tail
from umbel.broker.tasks.tail import Copier, copy_of, sibling
from umbel.broker.tasks.task_channel import task_channel

PROPERTIES = {
    "priority": 4,
    "delivery_mode": 2,
    "correlation_id": "the task",
    "reply_to": "somebody",
    "expiration": 3600,
    "headers": {
        "task": "t",
        "id": "1",
        "nested": {"list": [1, None, "ä/\\"]},
        "compression": "zlib",
    },
    "content_type": "application/json",
    "content_encoding": "utf-8",
}


class Taking:
    """A consumer of some queues that keeps what it gets."""

    def __init__(self, url: str, *queues: Queue) -> None:
        self.connection: Connection = connect(url)
        self.channel = self.connection.channel()
        task_channel(self.channel).leave_compressed()
        self.seen: list[Any] = []
        self.consumer = Consumer(self.channel, list(queues), on_message=self.seen.append)
        self.consumer.consume()

    def send(self, body: bytes, queue: str, **options: Any) -> None:
        with self.connection.channel() as channel, self.connection.Producer(channel) as producer:
            producer.publish(body, exchange="", routing_key=queue, **options)

    def take(self, count: int) -> list[Any]:
        """The next messages."""
        while len(self.seen) < count:
            self.connection.drain_events(timeout=10)
        taken, self.seen[:count] = self.seen[:count], []
        return taken

    def close(self) -> None:
        self.connection.close()


Make = Callable[..., Taking]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Taking] = []

    def start(url: str, *queues: Queue) -> Taking:
        made.append(Taking(url, *queues))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def copier_of() -> Iterator[Callable[[Taking], Copier]]:
    made: list[Copier] = []

    def start(taking: Taking) -> Copier:
        made.append(Copier(lambda: sibling(taking.connection)))
        return made[-1]

    yield start
    for one in made:
        one.close()


def facts(message: Any) -> dict[str, Any]:
    """What has to stay as it was."""
    return {
        "body": message.body,
        "headers": message.headers,
        "type": (message.content_type, message.content_encoding),
        "properties": {
            key: value
            for key, value in message.properties.items()
            if key not in ("delivery_info", "delivery_tag")
        },
    }


# -- RabbitMQ ------------------------------------------------------------------------------

CopierOf = Callable[[Taking], Copier]


def give_back(copier: Copier, messages: list[Any], queue: str) -> list[bool]:
    copies = [copy_of(message, queue) for message in messages]
    done, failure = copier.publish([copy for copy in copies if copy is not None])
    assert failure is None
    for message, one in zip(messages, done, strict=True):
        if one:
            message.ack()
    return done


def test_a_copy_is_what_was_sent_and_lies_behind_the_others(
    amqp_url: str, make: Make, copier_of: CopierOf
) -> None:
    jobs = Queue("jobs", max_priority=9)
    taking = make(amqp_url, jobs)
    taking.consumer.qos(prefetch_count=2, apply_global=True)
    for number in range(3):
        taking.send(b'{"n": %d}' % number, "jobs", **PROPERTIES)
    first = taking.take(2)
    before = facts(first[0])
    assert give_back(copier_of(taking), first, "jobs") == [True, True]
    again = taking.take(1)
    again[0].ack()
    again += taking.take(2)
    assert [json.loads(message.body)["n"] for message in again] == [2, 0, 1]
    assert facts(again[1]) == before
    assert before["properties"]["priority"] == 4
    assert before["properties"]["expiration"] == "3600000"
    assert before["properties"]["delivery_mode"] == 2
    assert before["headers"] == PROPERTIES["headers"]


def test_a_copy_for_a_queue_that_is_gone_is_told_apart(
    amqp_url: str, make: Make, copier_of: CopierOf
) -> None:
    taking = make(amqp_url, Queue("jobs"), Queue("others"))
    taking.send(b"a", "jobs")
    taking.send(b"b", "others")
    messages = sorted(taking.take(2), key=lambda message: message.delivery_info["routing_key"])
    copies = [copy_of(messages[0], "nowhere"), copy_of(messages[1], "others")]
    assert copier_of(taking).publish([c for c in copies if c]) == ([False, True], None)


def test_a_full_queue_that_refuses_copies_keeps_its_messages(
    amqp_url: str, make: Make, copier_of: CopierOf
) -> None:
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    taking = make(amqp_url, Queue("jobs", queue_arguments=full))
    taking.consumer.qos(prefetch_count=1, apply_global=True)
    taking.send(b"a", "jobs")
    message = taking.take(1)[0]
    taking.send(b"b", "jobs")
    assert give_back(copier_of(taking), [message], "jobs") == [False]


@pytest.mark.parametrize(
    "options", [{"headers": {"CC": ["others"]}}, {"user_id": "guest"}], ids=["cc", "user"]
)
def test_a_message_whose_copy_would_go_elsewhere_has_none(
    amqp_url: str, make: Make, options: dict[str, Any]
) -> None:
    taking = make(amqp_url, Queue("jobs"))
    taking.send(b"a", "jobs", **options)
    assert copy_of(taking.take(1)[0], "jobs") is None


def test_a_broker_that_takes_no_copies_is_not_waited_for_and_acknowledging_goes_on(
    rabbitmq_server: RabbitMQServer,
    amqp_url: str,
    make: Make,
    copier_of: CopierOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail, "CONFIRM_TIMEOUT_S", 1.0)
    taking = make(amqp_url, Queue("jobs"))
    for number in range(5):
        taking.send(b"%d" % number, "jobs")
    messages = taking.take(5)
    copies = [copy for message in messages if (copy := copy_of(message, "jobs"))]
    node = rabbitmq_server.node
    watermark = f"erpc:call('{node}', vm_memory_monitor, set_vm_memory_high_watermark, [~s]), \"\""
    rabbitmq_server.evaluate(watermark.replace("~s", "0.00001"))
    try:
        done, failure = copier_of(taking).publish(copies)
        assert done == [False] * 5
        assert isinstance(failure, Exception)
        for message in messages:
            message.ack()
        vhost = amqp_url.rsplit("/", 1)[1]
        wait_until(lambda: rabbitmq_server.unacknowledged("jobs", vhost) == 0, what="the acks")
    finally:
        rabbitmq_server.evaluate(watermark.replace("~s", "0.8"))
    wait_until(lambda: rabbitmq_server.queue_length("jobs", vhost) <= 1, what="what was copied")


# -- Redis ---------------------------------------------------------------------------------


def test_a_moved_message_is_the_same_text_behind_the_others(redis_url: str, make: Make) -> None:
    taking = make(redis_url, Queue("jobs"))
    for number in range(2):
        taking.send(b'{"n": %d}' % number, "jobs", **PROPERTIES)
    client = taking.channel.client
    step = next(key for key in client.keys("jobs*"))
    before = client.lrange(step, 0, -1)
    assert len(before) == 2
    taking.consumer.qos(prefetch_count=1, apply_global=True)
    first = taking.take(1)
    taking.consumer.qos(prefetch_count=2, apply_global=True)
    assert taking.channel.move(first) == [True]
    assert client.lrange(step, 0, -1) == before[::-1]
    assert client.hlen("unacked") == client.zcard("unacked_index") == 0
    again = taking.take(2)
    assert [json.loads(message.body)["n"] for message in again] == [1, 0]
    assert facts(again[1]) == facts(first[0])


def test_a_message_that_somebody_else_has_restored_is_not_there_twice(
    redis_url: str, make: Make
) -> None:
    taking = make(redis_url, Queue("jobs"))
    taking.send(b"1", "jobs")
    message = taking.take(1)[0]
    taking.channel.qos.restore_by_tag(message.delivery_tag)
    assert taking.channel.move([message]) == [True]
    assert taking.channel.client.llen("jobs") == 1


def test_a_message_that_came_another_way_is_left_alone(redis_url: str, make: Make) -> None:
    taking = make(redis_url, Queue("others"))
    taking.send(b"1", "jobs")
    message = Queue("jobs")(taking.channel).get()
    assert taking.channel.move([message]) == [False]
    assert taking.channel.client.llen("jobs") == 0
    message.reject(requeue=True)
    assert taking.channel.client.llen("jobs") == 1
