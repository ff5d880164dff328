"""Our messages next to those that the real Celery publishes for the same call, key by key."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import celery
import pytest
import redis
from kombu import Connection, Exchange, Queue

import umbel
from tests.servers import RedisServer
from umbel import Umbel

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00")
QUEUES = ("celery", "video", "fresh")
STEPS = ("", "\x06\x163", "\x06\x166", "\x06\x169")


def settings() -> dict[str, Any]:
    return {
        "task_queues": [
            Queue("celery", Exchange("celery"), routing_key="celery"),
            Queue("video", Exchange("media", type="topic"), routing_key="video.#"),
        ],
        "task_routes": {"shop.routed": {"queue": "video", "routing_key": "video.mp4"}},
    }


def declare(app: Any, kind: Any) -> SimpleNamespace:
    """The same tasks in both applications, and the words to combine them."""
    # Celery would make them known to every application of the process.
    own = {"shared": False} if kind is celery else {}

    @app.task(name="shop.add", **own)
    def add(x: Any, y: Any = 0) -> None:
        """Is never run."""

    @app.task(name="shop.total", **own)
    def total(numbers: Any) -> None:
        """Is never run."""

    @app.task(name="shop.routed", priority=4, time_limit=60, soft_time_limit=50, **own)
    def routed() -> None:
        """Is never run."""

    @app.task(name="shop.quiet", ignore_result=True, serializer="yaml", expires=500, **own)
    def quiet() -> None:
        """Is never run."""

    return SimpleNamespace(
        app=app, add=add, total=total, routed=routed, quiet=quiet,
        chain=kind.chain, group=kind.group, chord=kind.chord, signature=kind.signature,
    )  # fmt: skip


# -- what was published --------------------------------------------------------------------


def taken_redis(url: str) -> list[dict[str, Any]]:
    client = redis.Redis.from_url(url)
    found = []
    for key in [f"{queue}{step}" for queue in QUEUES for step in STEPS]:
        while (raw := client.rpop(key)) is not None:
            envelope = json.loads(raw)
            envelope["key"] = key
            body = base64.b64decode(envelope.pop("body"))
            envelope["body"] = readable(body, envelope["content-type"], envelope["headers"])
            assert len(envelope["properties"].pop("delivery_tag")) == 36
            found.append(envelope)
    client.close()
    return found


def taken_amqp(url: str) -> list[dict[str, Any]]:
    found = []
    with Connection(url) as connection:
        channel = connection.channel()
        for queue in QUEUES:
            try:
                raw = super(type(channel), channel).basic_get(queue, no_ack=True)
            except connection.channel_errors:
                channel = connection.channel()
                continue
            while raw is not None:
                properties = dict(raw.properties)
                headers = properties.pop("application_headers")
                found.append(
                    {
                        "headers": headers,
                        "properties": properties,
                        "to": [raw.delivery_info["exchange"], raw.delivery_info["routing_key"]],
                        "body": readable(as_bytes(raw.body), properties["content_type"], headers),
                    }
                )
                raw = super(type(channel), channel).basic_get(queue, no_ack=True)
    return found


def as_bytes(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)


def readable(body: bytes, content_type: str, headers: dict[str, Any]) -> Any:
    if headers.get("compression") == "application/x-gzip":
        body = zlib.decompress(body)
    if content_type == "application/json":
        return json.loads(body)
    if content_type == "application/x-yaml":
        import yaml

        return yaml.safe_load(body)
    return body.hex()


def comparable(found: list[dict[str, Any]]) -> Any:
    """The messages with ids in place of the random ones and without the moment of sending.

    Celery gives no priority where it means 0 and its calls go to a named queue; it writes nulls
    into the options of signatures, and the id of a chord's header into its body, to no effect.
    It shows signatures as dictionaries.
    """
    for message in found:
        message["properties"].setdefault("priority", 0)
        message["body"] = without_noise(message["body"])
        shown = message["headers"]["kwargsrepr"].replace("Signature({", "{").replace("})", "}")
        message["headers"]["kwargsrepr"] = shown
        for name in ("eta", "expires"):
            value = message["headers"].get(name)
            if value is not None:
                left = datetime.fromisoformat(value) - datetime.now(UTC)
                message["headers"][name] = f"in about {round(left.total_seconds() / 5) * 5} s"
        lifetime = message["properties"].get("expiration")
        if lifetime is not None:
            assert isinstance(lifetime, str)
            message["properties"]["expiration"] = f"about {round(int(lifetime) / 5000) * 5} s"
    text = json.dumps(found, sort_keys=True)
    names: dict[str, str] = {}
    text = UUID.sub(lambda match: names.setdefault(match[0], f"uuid-{len(names)}"), text)
    return json.loads(TIME.sub("some time", text))


def without_noise(value: Any, inside: str = "") -> Any:
    if isinstance(value, list):
        return [without_noise(item, inside) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: without_noise(item, name) for name, item in value.items()}
    if inside == "options":
        kept = {name: item for name, item in kept.items() if item is not None}
    if inside == "chord" and "options" in kept:
        kept["options"].pop("group_id", None)
    return kept


# -- both sides ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["redis", "amqp"])
def sides(
    request: pytest.FixtureRequest, redis_server: RedisServer
) -> Iterator[tuple[SimpleNamespace, SimpleNamespace, Callable[[], Any]]]:
    backend = broker = redis_server.url_of(251)
    redis_server.client(251).flushdb()
    take = taken_redis
    if request.param == "amqp":
        broker = request.getfixturevalue("rabbitmq_server").add_vhost("side-by-side")
        take = taken_amqp
    ours = Umbel("shop", broker=broker, backend=backend, set_as_current=False, **settings())
    theirs = celery.Celery("shop", broker=broker, backend=backend, set_as_current=False)
    theirs.conf.update(settings())
    # Nobody waits for results here; Celery would subscribe to each, and not hang up.
    for name in ("on_task_call", "add_pending_result", "remove_pending_result"):
        setattr(theirs.backend, name, lambda *_, **__: None)
    yield declare(ours, umbel), declare(theirs, celery), lambda: comparable(take(broker))
    ours.close()
    theirs.backend.client.connection_pool.disconnect()
    theirs.close()


Call = Callable[[SimpleNamespace], Any]
SOON = datetime.now(UTC) + timedelta(hours=2)
CALLS: dict[str, Call] = {
    "plain": lambda k: k.add.delay(1, 2),
    "keywords": lambda k: k.add.apply_async((1,), {"y": {"deep": [1, {"er": [1, [2, [3]]]}]}}),
    "no arguments": lambda k: k.quiet.delay(),
    "text": lambda k: k.add.delay("ü" * 200, b"bytes"),
    "extended types": lambda k: k.add.delay(SOON, SOON.date()),
    "task id": lambda k: k.add.apply_async((1, 2), task_id="my-id"),
    "countdown": lambda k: k.add.apply_async((1, 2), countdown=30),
    "no countdown": lambda k: k.add.apply_async((1, 2), countdown=0),
    "eta": lambda k: k.add.apply_async((1, 2), eta=SOON),
    "expires in seconds": lambda k: k.add.apply_async((1, 2), expires=90.5),
    "expires at a time": lambda k: k.add.apply_async((1, 2), expires=SOON),
    "queue": lambda k: k.add.apply_async((1, 2), queue="fresh"),
    "topic queue": lambda k: k.add.apply_async((1, 2), queue="video"),
    "topic key": lambda k: k.add.apply_async((1, 2), queue="video", routing_key="video.avi"),
    "exchange and key": lambda k: [
        k.add.apply_async((1, 2), queue="video"),
        k.add.apply_async((1, 2), exchange="media", routing_key="video.x"),
    ],
    "route and attributes": lambda k: k.routed.delay(),
    "priority": lambda k: k.add.apply_async((1, 2), priority=7),
    "links": lambda k: k.add.apply_async(
        (1, 2), link=k.add.s(5), link_error=[k.total.si(1), k.add.s(2)]
    ),
    "headers": lambda k: k.add.apply_async((1, 2), headers={"tenant": "blue", "n": 1}),
    "compression": lambda k: k.add.apply_async((1, "x" * 500), compression="gzip"),
    "limits": lambda k: k.add.apply_async((1, 2), time_limit=10, soft_time_limit=5),
    "shadow": lambda k: k.add.apply_async((1, 2), shadow="add for blue"),
    "ignored result": lambda k: k.add.apply_async((1, 2), ignore_result=True),
    "reply to": lambda k: k.add.apply_async((1, 2), reply_to="somewhere"),
    "msgpack": lambda k: k.add.apply_async((1, 2), serializer="msgpack"),
    "unknown task by name": lambda k: k.app.send_task("far.away", (1,), {"k": 2}),
    "known task by name": lambda k: k.app.send_task("shop.add", (1, 2)),
    "lineage": lambda k: k.add.apply_async((1, 2), root_id="r", parent_id="p"),
    "stamps": lambda k: k.add.s(1, 2).stamp(colour="blue").apply_async(),
    "signature": lambda k: k.add.s(2).set(queue="fresh", priority=3).apply_async((1,)),
    "chain": lambda k: k.chain(k.add.s(1, 1), k.add.s(2), k.add.s(3)).apply_async(),
    "group": lambda k: k.group([k.add.s(1, 1), k.add.s(2, 2)]).apply_async(),
    "chord": lambda k: k.chord([k.add.s(1, 1), k.add.s(2, 2)], k.total.s()).apply_async(),
    "chord in a chain": lambda k: k.chain(
        k.add.s(1, 1), k.group([k.add.s(1), k.add.s(2)]), k.total.s(), k.add.s(7)
    ).apply_async(),
    "chain in a chord": lambda k: k.chord(
        [k.chain(k.add.s(1, 1), k.add.s(2)), k.add.s(3)], k.total.s()
    ).apply_async(),
    "map": lambda k: k.add.map([1, 2]).apply_async(),
    "starmap": lambda k: k.add.starmap([(1, 1), (2, 2)]).apply_async(),
    "chunks": lambda k: k.add.chunks([(1, 1), (2, 2), (3, 3)], 2).apply_async(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_message_is_what_celery_would_have_sent(call: Call, sides: Any) -> None:
    ours, theirs, taken = sides
    ours.app.send_task("declares", queue="video")
    taken()
    call(theirs)
    expected = taken()
    assert expected
    call(ours)
    assert differences(taken(), expected) == []


# What we add, and peers ignore.
OWN_HEADERS = {"umbel_clock", "umbel_sent"}


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            line
            for key in sorted((ours.keys() | theirs.keys()) - OWN_HEADERS)
            for line in differences(
                ours.get(key, "absent"), theirs.get(key, "absent"), f"{path}.{key}"
            )
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            line
            for place, pair in enumerate(zip(ours, theirs, strict=True))
            for line in differences(*pair, f"{path}[{place}]")
        ]
    return [] if ours == theirs else [f"{path}: {ours!r} is not {theirs!r}"]
