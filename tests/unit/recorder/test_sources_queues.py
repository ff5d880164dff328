"""RabbitMQ and the memory of a process as sources: one queue that outlives recorders."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from celery import Celery

from tests.servers import RabbitMQServer, wait_until
from umbel import Umbel
from umbel.recorder.sources import source_for
from umbel.recorder.sources.messages import Message
from umbel.recorder.sources.queues import QUEUE, QueueSource

App = Callable[..., Umbel]


@pytest.fixture
def new_app() -> Iterator[App]:
    made: list[Umbel] = []

    def new(url: str) -> Umbel:
        app = Umbel("queues", broker=url, backend="disabled://", set_as_current=False)
        if url == "memory://":
            app.conf.event_exchange = f"celeryev-{time.time_ns()}"  # all tests share the memory
        made.append(app)
        return app

    yield new
    for app in made:
        app.close()


@pytest.fixture(params=["amqp", "memory"])
def app(request: pytest.FixtureRequest, new_app: App) -> Umbel:
    return new_app(
        "memory://" if request.param == "memory" else request.getfixturevalue("amqp_url")
    )


@pytest.fixture
def open_source() -> Iterator[Callable[..., QueueSource]]:
    made: list[QueueSource] = []

    def new(app: Umbel, **options: Any) -> QueueSource:
        name = QUEUE if app.read_url != "memory://" else f"{QUEUE}-{app.conf.event_exchange}"
        source = QueueSource(app, "one", **{"queue": name, **options})
        source.open()
        made.append(source)
        return source

    yield new
    for source in made:
        source.close()


def send(app: Umbel, *uuids: str) -> None:
    """One message for each; what a dispatcher sends alone."""
    with app.events.Dispatcher("a@test") as dispatcher:
        for uuid in uuids:
            dispatcher.send("worker-note", uuid=uuid)


def taken(source: QueueSource, count: int) -> list[Message]:
    found: list[Message] = []
    wait_until(lambda: found.extend(source.poll(0.05)) or len(found) >= count, 10, "messages")
    assert len(found) == count
    return found


def uuids(messages: list[Message]) -> list[str]:
    return [json.loads(message.body)["uuid"] for message in messages]


def test_what_is_told_is_taken_in_order_on_both_exchanges(
    app: Umbel, open_source: Callable[..., QueueSource]
) -> None:
    source = open_source(app)
    with app.events.Dispatcher("a@test") as dispatcher:
        dispatcher.send("worker-online")
        dispatcher.send("worker-revocation", ids=["1"])
    kinds = [json.loads(message.body)["type"] for message in taken(source, 2)]
    assert kinds == ["worker-online", "worker-revocation"]


def test_what_is_not_acknowledged_comes_again_and_the_rest_does_not(
    app: Umbel, open_source: Callable[..., QueueSource]
) -> None:
    source = open_source(app)
    send(app, "a", "b", "c", "d")
    found = taken(source, 4)
    assert uuids(found) == ["a", "b", "c", "d"]
    tokens = [message.token for message in found]
    source.acknowledge([tokens[1], tokens[0], None, tokens[3]])  # a and b in one go, d alone
    source.close()
    assert uuids(taken(open_source(app), 1)) == ["c"]


def test_tokens_of_a_lost_connection_are_void(
    amqp_url: str, new_app: App, open_source: Callable[..., QueueSource]
) -> None:
    app = new_app(amqp_url)
    source = open_source(app)
    send(app, "a", "b")
    old = taken(source, 2)
    source.hang_up()
    source.acknowledge([message.token for message in old])
    source.open()
    again = taken(source, 2)
    source.acknowledge([message.token for message in old])  # would be those of others now
    source.hang_up()
    source.open()
    assert uuids(taken(source, 2)) == uuids(again) == ["a", "b"]


def test_no_more_comes_than_may_be_unacknowledged(
    app: Umbel, open_source: Callable[..., QueueSource]
) -> None:
    source = open_source(app, prefetch=3)
    send(app, *"abcde")
    found = taken(source, 3)
    assert source.is_exhausted
    assert source.poll(0.1) == []
    source.acknowledge([message.token for message in found])
    assert not source.is_exhausted
    assert uuids(taken(source, 2)) == ["d", "e"]


def test_what_is_told_while_no_recorder_runs_waits_and_several_share_it(
    amqp_url: str, new_app: App, open_source: Callable[..., QueueSource]
) -> None:
    app = new_app(amqp_url)
    open_source(app).close()
    send(app, *"abcdefgh")
    one, two = open_source(app, prefetch=4), open_source(app, prefetch=4)
    assert sorted(uuids(taken(one, 4) + taken(two, 4))) == list("abcdefgh")
    assert one.lag() == 0


def test_the_queue_is_a_bounded_quorum_queue(
    amqp_url: str,
    new_app: App,
    open_source: Callable[..., QueueSource],
    rabbitmq_server: RabbitMQServer,
) -> None:
    open_source(new_app(amqp_url))
    arguments = queue_arguments(rabbitmq_server, amqp_url.rsplit("/", 1)[1])
    for wanted in ("quorum", "x-max-length", "x-max-length-bytes", "drop-head"):
        assert wanted in arguments


def queue_arguments(server: RabbitMQServer, vhost: str) -> str:
    found = server._call(
        "rabbit_amqqueue", "lookup", f'{{resource, <<"{vhost}">>, queue, <<"{QUEUE}">>}}'
    )
    return server.evaluate(
        f'{{ok, Q}} = {found}, io_lib:format("~p", '
        f"[{server._call('amqqueue', 'get_arguments', 'Q')}])"
    )


def test_a_queue_of_another_kind_is_used_and_said_so(
    amqp_url: str,
    new_app: App,
    open_source: Callable[..., QueueSource],
    rabbitmq_server: RabbitMQServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rabbitmq_server.connection(amqp_url.rsplit("/", 1)[1]) as connection:
        connection.channel().queue_declare(QUEUE, durable=True, auto_delete=False)
    app = new_app(amqp_url)
    with caplog.at_level(logging.WARNING, "umbel.recorder"):
        source = open_source(app)
    assert "not the quorum queue" in caplog.text
    send(app, "a")
    assert uuids(taken(source, 1)) == ["a"]


def test_a_queue_that_is_deleted_is_a_connection_error_and_is_made_anew(
    amqp_url: str,
    new_app: App,
    open_source: Callable[..., QueueSource],
    rabbitmq_server: RabbitMQServer,
) -> None:
    app = new_app(amqp_url)
    source = open_source(app)
    rabbitmq_server.delete_queue(QUEUE, amqp_url.rsplit("/", 1)[1])
    with pytest.raises(ConnectionError):
        wait_until(lambda: source.poll(0.1), 10)
    source.open()
    send(app, "a")
    assert uuids(taken(source, 1)) == ["a"]


def test_celerys_events_come_by_the_same_queue(
    amqp_url: str, new_app: App, open_source: Callable[..., QueueSource]
) -> None:
    source = open_source(new_app(amqp_url))
    with closing(Celery("peer", broker=amqp_url, set_as_current=False)) as peer:
        with peer.connection() as connection:
            peer.events.Dispatcher(connection, hostname="theirs@test").send("worker-online")
        (message,) = taken(source, 1)
    event = json.loads(message.body)
    assert (event["hostname"], event["type"]) == ("theirs@test", "worker-online")
    assert not message.unnumbered_only


def test_a_broker_that_is_not_there_is_a_connection_error(new_app: App) -> None:
    source = source_for(new_app("amqp://guest:guest@127.0.0.1:1//"), "one")
    assert isinstance(source, QueueSource)
    with pytest.raises(ConnectionError):
        source.open()
    with pytest.raises(ConnectionError):
        source.poll(0)
    source.acknowledge([(1, 1)])
    source.close()
