"""Batches on real brokers: round trips, parts, order, and what is said when a part fails."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from tests.integration.sending import PATIENT, QUICK, ids
from tests.messages import written
from tests.servers import RedisServer
from umbel import Umbel
from umbel.app.publish import BatchNotSent, RetryPolicy
from umbel.broker.tasks import outlets


def commands(client: redis.Redis) -> Counter[str]:
    stats = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()})


def test_a_batch_is_one_round_trip_on_redis(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url)
    app.send_task("t")
    client = redis.Redis.from_url(redis_url)
    before = commands(client)
    app.send_many([app.signature("t", (n,), task_id=f"i{n}") for n in range(300)])
    spent = commands(client) - before
    spent.pop("info", None)
    client.close()
    assert spent == {"lpush": 1}
    assert ids(app)[1:] == [f"i{n}" for n in range(300)]


def test_a_message_of_a_batch_is_like_one_that_is_sent_alone(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url)
    client = redis.Redis.from_url(redis_url)
    options: list[dict[str, Any]] = [
        {}, {"priority": 7}, {"expires": 4000}, {"queue": "fresh"}, {"compression": "gzip"},
        {"headers": {"own": "ü"}}, {"serializer": "msgpack"}, {"delivery_mode": 1},
    ]  # fmt: skip

    def pushed() -> list[Any]:
        found = []
        for key in sorted(client.keys("celery*")) + sorted(client.keys("fresh*")):
            while (raw := client.rpop(key)) is not None:
                envelope = json.loads(raw)
                envelope["properties"].pop("delivery_tag")
                for name in ("expires", "umbel_clock", "umbel_sent"):
                    envelope["headers"].pop(name)
                found.append((key, envelope))
        return found

    for n, one in enumerate(options):
        app.send_task("t", ("ü", n), task_id=f"i{n}", **one)
    alone = pushed()
    app.send_many([app.signature("t", ("ü", n), task_id=f"i{n}", **one)
                   for n, one in enumerate(options)])  # fmt: skip
    together = pushed()
    assert len(alone) == len(options)
    assert ms_alone(app, client) == ["1009", "4035", "0"]
    for (_, mine), (_, theirs) in zip(together, alone, strict=True):
        for envelope in (mine, theirs):
            if "expiration" in envelope["properties"]:
                assert 3_990_000 < int(envelope["properties"].pop("expiration")) <= 4_000_000
    assert together == alone
    client.close()


def ms_alone(app: Umbel, client: redis.Redis) -> list[str]:
    """The lifetimes on the wire of messages that were sent one by one."""
    for milliseconds in (1009, 4035, 0):
        message = written("t", expires_in_s=(milliseconds + 0.5) / 1000)
        to = app.router.destination({})
        parcel = message._replace(exchange=to.exchange, routing_key=to.routing_key)
        app.publisher.send(parcel, to, RetryPolicy({}, enabled=False))
    raw = [client.rpop("celery") for _ in range(3)]
    return [json.loads(one)["properties"]["expiration"] for one in raw]


def test_a_batch_for_several_lists_is_one_transaction_on_redis(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url)
    app.send_many([app.signature("t"), app.signature("t", queue="fresh")])
    client = redis.Redis.from_url(redis_url)
    before = commands(client)
    app.send_many(
        [app.signature("t", queue=queue, priority=n % 4 * 3) for n in range(100)
         for queue in ("celery", "fresh")]
    )  # fmt: skip
    spent = commands(client) - before
    spent.pop("info", None)
    lengths = [client.llen(f"celery{step}") for step in ("", "\x06\x163", "\x06\x166", "\x06\x169")]
    client.close()
    assert spent == {"multi": 1, "lpush": 8, "exec": 1}
    assert lengths == [26, 25, 25, 25]


def test_a_single_message_is_one_command_on_redis(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url)
    app.send_task("t")
    client = redis.Redis.from_url(redis_url)
    before = commands(client)
    for _ in range(5):
        app.send_task("t", priority=7)
    spent = commands(client) - before
    spent.pop("info", None)
    client.close()
    assert spent == {"lpush": 5}


def test_a_header_that_has_no_form_sends_nothing_of_a_batch(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url)
    bad = app.signature("t", headers={"x": object()})
    with pytest.raises(TypeError, match="object"):
        app.send_many([*(app.signature("t") for _ in range(600)), bad])
    assert ids(app) == []


def test_a_copy_for_each_queue_has_a_tag_of_its_own(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    topic = Exchange("media", type="topic")
    app = make_sender(
        redis_url,
        task_queues=[Queue(name, topic, routing_key="#") for name in ("one", "two")],
        task_default_queue="one",
    )
    for queue in ("one", "two"):
        app.send_task("declares", queue=queue)
    with redis.Redis.from_url(redis_url) as client:
        client.delete("one", "two")
        app.send_many([app.signature("t", task_id=f"i{n}") for n in range(3)])
        app.send_task("t", task_id="i3")
        raw = [json.loads(one) for name in ("one", "two") for one in client.lrange(name, 0, -1)]
    assert Counter(one["headers"]["id"] for one in raw) == {f"i{n}": 2 for n in range(4)}
    assert len({one["properties"]["delivery_tag"] for one in raw}) == 8


def test_a_queue_that_expires_is_kept_by_what_is_sent_to_it(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url, task_queues=[Queue("celery"), Queue("fleeting", expires=60)])
    with redis.Redis.from_url(redis_url) as client:
        app.send_task("t", queue="fleeting")
        assert 0 < client.pttl("fleeting") <= 60_000
        client.persist("fleeting")
        app.send_many([app.signature("t", queue="fleeting") for _ in range(3)])
        assert 0 < client.pttl("fleeting") <= 60_000
        assert client.llen("fleeting") == 4


def test_keys_have_the_prefix_that_is_set(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url, broker_transport_options={"global_keyprefix": "mine:"})
    app.send_task("t", task_id="a")
    app.send_many([app.signature("t", task_id="b"), app.signature("t", task_id="c", queue="d")])
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("mine:celery") == 2
        assert client.llen("mine:d") == 1
    assert ids(app) == ["a", "b"]


class Breaking:
    """Stops a server before the second part of a batch is pushed."""

    def __init__(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts = 0
        push = outlets._Part.push

        def pushed(part: Any, client: Any) -> None:
            self.parts += 1
            if self.parts == 2:
                server.stop()
            push(part, client)

        monkeypatch.setattr(outlets._Part, "push", pushed)


def test_a_batch_that_fails_half_way_says_how_much_was_sent(
    make_sender: Callable[..., Umbel], idle_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_redis.start()
    app = make_sender(idle_redis.url, task_publish_retry_policy=QUICK)
    app.send_task("t", task_id="before")
    Breaking(idle_redis, monkeypatch)
    with pytest.raises(OperationalError, match="of 1200 messages the first 500 were sent") as error:
        app.send_many([app.signature("t", task_id=f"i{n}") for n in range(1200)])
    assert isinstance(error.value, BatchNotSent)
    assert (error.value.sent, error.value.total) == (500, 1200)
    idle_redis.start()
    assert ids(app) == ["before", *(f"i{n}" for n in range(500))]


def test_a_batch_goes_on_where_it_was_interrupted(
    make_sender: Callable[..., Umbel], idle_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_redis.start()
    app = make_sender(idle_redis.url, task_publish_retry_policy=PATIENT)
    breaking = Breaking(idle_redis, monkeypatch)
    stopped = idle_redis.stop

    def restarted() -> None:
        stopped()
        threading.Thread(target=idle_redis.start).start()

    monkeypatch.setattr(idle_redis, "stop", restarted)
    app.send_many([app.signature("t", task_id=f"i{n}") for n in range(1200)])
    monkeypatch.undo()
    assert breaking.parts > 3
    assert ids(app) == [f"i{n}" for n in range(1200)]


def test_big_messages_go_in_smaller_parts(
    make_sender: Callable[..., Umbel], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "PART_BYTES_MAX", 10_000)
    app = make_sender(redis_url)
    app.send_task("t")
    client = redis.Redis.from_url(redis_url)
    before = commands(client)
    app.send_many([app.signature("t", ("x" * 3000,), task_id=f"i{n}") for n in range(20)])
    spent = commands(client) - before
    client.close()
    assert 4 <= spent["lpush"] <= 20
    assert ids(app)[1:] == [f"i{n}" for n in range(20)]


def test_twenty_threads_send_batches_over_few_links(
    make_sender: Callable[..., Umbel], redis_url: str
) -> None:
    app = make_sender(redis_url, broker_pool_limit=3)

    def publish(number: int) -> None:
        for batch in range(4):
            app.send_many(
                [app.signature("t", task_id=f"{number}-{batch * 50 + n}") for n in range(50)]
            )

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = ids(app)
    for number in range(20):
        own = [one for one in found if one.startswith(f"{number}-")]
        assert own == [f"{number}-{n}" for n in range(200)]


def test_a_batch_goes_out_in_order_on_rabbitmq(
    make_sender: Callable[..., Umbel], amqp_url: str
) -> None:
    app = make_sender(amqp_url)
    app.send_many([app.signature("t", (n,), task_id=f"i{n}") for n in range(300)])
    assert ids(app) == [f"i{n}" for n in range(300)]


def test_a_batch_may_go_to_several_queues_and_exchanges(
    make_sender: Callable[..., Umbel], broker_url: str
) -> None:
    topic = Exchange("media", type="topic")
    app = make_sender(
        broker_url,
        task_queues=[Queue("celery"), Queue("video", topic, routing_key="video.#")],
    )
    app.send_many(
        [
            app.signature("t", task_id="a"),
            app.signature("t", task_id="b", queue="video", routing_key="video.mp4"),
            app.signature("t", task_id="c", queue="fresh"),
            app.signature("t", task_id="d"),
        ]
    )
    assert (ids(app), ids(app, "video"), ids(app, "fresh")) == (["a", "d"], ["b"], ["c"])


def test_a_bad_argument_sends_nothing_of_a_batch(
    make_sender: Callable[..., Umbel], broker_url: str
) -> None:
    app = make_sender(broker_url)
    app.send_task("t", task_id="before")
    with pytest.raises(TypeError):
        app.send_many([app.signature("t", (1,)), app.signature("t", (object(),))])
    assert ids(app) == ["before"]
