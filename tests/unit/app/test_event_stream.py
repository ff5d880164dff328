"""On Redis events are published and kept: monitors get what kombu sends, recorders get it too."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from kombu import Connection, Producer

from tests.servers import RedisServer, wait_until
from umbel import Umbel
from umbel.app.events.publisher import Publisher, event_exchange, publish_events
from umbel.app.events.stream import EventStream
from umbel.wire.events import encode

EVENTS = [
    {"type": "task-received", "hostname": "a@test", "timestamp": 1.5, "uuid": "1", "name": "ä"},
    {"type": "task-started", "hostname": "a@test", "timestamp": 2.5, "uuid": "1"},
]
STREAM = "umbel.events"


@pytest.fixture
def client(redis_url: str, redis_server: RedisServer) -> redis.Redis:
    return redis_server.client(int(redis_url.rsplit("/", 1)[1]))


@pytest.fixture
def app_for(redis_url: str) -> Iterator[Callable[..., Umbel]]:
    made: list[Umbel] = []

    def new(**settings: Any) -> Umbel:
        chosen = {"broker_url": redis_url, "result_backend": "disabled://", **settings}
        made.append(Umbel("stream", set_as_current=False, **chosen))
        return made[-1]

    yield new
    for app in made:
        app.close()


def make_stream(client: redis.Redis, key: str = STREAM) -> None:
    client.xgroup_create(key, "readers", "0", mkstream=True)


def publish(app: Umbel, *batches: list[dict[str, Any]]) -> None:
    publisher = Publisher(app)
    publisher.open()
    try:
        for batch in batches:
            publisher.publish(batch)
    finally:
        publisher.close()


def bodies(client: redis.Redis, key: str = STREAM) -> list[Any]:
    return [fields[b"e"] for _, fields in client.xrange(key)]


@pytest.mark.parametrize("events", [EVENTS, EVENTS[:1]], ids=["several", "one"])
def test_monitors_get_byte_for_byte_what_kombu_publishes(
    redis_url: str, client: redis.Redis, events: list[dict[str, Any]]
) -> None:
    make_stream(client)
    with client.pubsub() as heard, Connection(redis_url) as connection:
        heard.psubscribe("*")
        wait_until(lambda: heard.get_message(timeout=1), 5, "the subscription")
        producer = Producer(connection.default_channel, auto_declare=False)
        exchange = event_exchange("celeryev", connection)
        exchange(connection.default_channel).declare()
        publish_events(producer, exchange, events)
        publish_events(producer, exchange, events, EventStream(STREAM, 100))
        theirs, ours = (heard.get_message(timeout=5) for _ in range(2))
    assert theirs is not None
    assert ours is not None
    assert theirs["channel"] == ours["channel"]
    tag = json.loads(theirs["data"])["properties"]["delivery_tag"]
    our_tag = json.loads(ours["data"])["properties"]["delivery_tag"]
    assert tag != our_tag
    assert ours["data"].replace(our_tag.encode(), tag.encode()) == theirs["data"]
    assert bodies(client) == [encode(events if len(events) > 1 else events[0])]


def test_nothing_is_kept_before_a_recorder_has_made_the_stream(
    app_for: Callable[..., Umbel], client: redis.Redis
) -> None:
    app = app_for()
    publish(app, EVENTS)
    assert not client.exists(STREAM)
    make_stream(client)
    publish(app, EVENTS, EVENTS[:1])
    assert [json.loads(body) for body in bodies(client)] == [EVENTS, EVENTS[0]]


def test_own_events_go_to_the_same_stream(
    app_for: Callable[..., Umbel], client: redis.Redis
) -> None:
    make_stream(client)
    publish(app_for(), [{"type": "worker-elected", "hostname": "a@test", "timestamp": 1.0}])
    (body,) = bodies(client)
    assert json.loads(body)["type"] == "worker-elected"


def test_the_stream_is_bounded(app_for: Callable[..., Umbel], client: redis.Redis) -> None:
    make_stream(client)
    publish(app_for(event_stream_max=100), *[EVENTS[:1]] * 1_000)
    assert 100 <= client.xlen(STREAM) < 400, "the server trims in blocks"


def test_the_prefix_of_all_keys_is_the_streams_too(
    app_for: Callable[..., Umbel], client: redis.Redis
) -> None:
    make_stream(client, f"ours:{STREAM}")
    publish(app_for(broker_transport_options={"global_keyprefix": "ours:"}), EVENTS)
    assert len(bodies(client, f"ours:{STREAM}")) == 1
    assert not client.exists(STREAM)


def test_a_stream_with_an_empty_name_is_none(
    app_for: Callable[..., Umbel], client: redis.Redis
) -> None:
    make_stream(client)
    publish(app_for(event_stream=""), EVENTS)
    assert bodies(client) == []


def test_a_server_that_refuses_the_stream_is_told_of_once_and_monitors_still_hear(
    app_for: Callable[..., Umbel],
    client: redis.Redis,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.set(STREAM, "no stream")
    app = app_for()
    with client.pubsub() as heard, caplog.at_level(logging.WARNING, "umbel.events"):
        heard.psubscribe("*")
        wait_until(lambda: heard.get_message(timeout=1), 5, "the subscription")
        publish(app, EVENTS, EVENTS)
        assert all(heard.get_message(timeout=5) for _ in range(2))
    assert app.events.stream.refused_count == 2
    (record,) = caplog.records
    assert "WRONGTYPE" in record.getMessage()


def test_a_user_without_the_permission_still_sends(
    redis_url: str, client: redis.Redis, app_for: Callable[..., Umbel]
) -> None:
    make_stream(client)
    client.acl_setuser(
        "sender", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"],
        commands=["+@all", "-xadd"],
    )  # fmt: skip
    try:
        app = app_for(broker_url=redis_url.replace("://", "://sender:pw@"))
        publish(app, EVENTS)
        assert app.events.stream.refused_count == 1
        assert bodies(client) == []
    finally:
        client.acl_deluser("sender")


def test_what_is_told_of_sent_tasks_is_kept_as_well(
    app_for: Callable[..., Umbel], client: redis.Redis
) -> None:
    make_stream(client)
    app = app_for(task_send_sent_event=True)
    result = app.send_task("t", (1,))
    (body,) = bodies(client)
    event = json.loads(body)
    assert (event["type"], event["uuid"]) == ("task-sent", result.id)


def test_elsewhere_there_is_no_stream() -> None:
    app = Umbel("memory", broker="memory://", backend="disabled://", set_as_current=False)
    with closing(app), app.connection() as connection:
        assert not app.events.stream.takes(connection.default_channel)
