"""Result backends on real servers, with the real Celery as the other side."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import celery
import celery.exceptions
import pytest
import redis
from celery.app.task import Context as CeleryContext

from tests.servers import RedisServer, wait_until
from tests.unit.app.pump import messages, pump, run
from umbel.app.canvas import chain, chord, group
from umbel.app.context import Context
from umbel.app.results import push
from umbel.app.results.redis import RedisBackend
from umbel.app.results.redis_client import make_client
from umbel.app.results.rpc import UNCLAIMED_MAX, RpcBackend
from umbel.app.umbel import Umbel
from umbel.exceptions import BackendError, ChordError

MakeApp = Callable[..., Umbel]


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    made: list[Umbel] = []

    def make(broker: str, backend: str, **settings: Any) -> Umbel:
        app = Umbel("t", broker=broker, backend=backend, set_as_current=False, **settings)
        made.append(app)

        @app.task(name="add")
        def add(x: Any, y: Any = 0) -> Any:
            return x + y

        @app.task(name="total")
        def total(numbers: Any) -> Any:
            return sum(numbers)

        @app.task(name="fail")
        def fail(*_: Any) -> None:
            raise ValueError("bad", 3)

        return app

    yield make
    for app in made:
        app.close()


@pytest.fixture
def app(make_app: MakeApp, redis_url: str) -> Umbel:
    return make_app(redis_url, redis_url)


@pytest.fixture
def peer(redis_url: str) -> Iterator[celery.Celery]:
    made = celery.Celery("peer", broker=redis_url, backend=redis_url, set_as_current=False)

    @made.task(name="add", shared=False)
    def add(x: Any, y: Any = 0) -> Any:
        return x + y

    @made.task(name="total", shared=False)
    def total(numbers: Any) -> Any:
        return sum(numbers)

    yield made
    leave(made)


def leave(peer: celery.Celery) -> None:
    """Let Celery end its subscriptions while the server is still there."""
    peer.backend.result_consumer.stop()
    peer.close()
    gc.collect()


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url)


def reader_of(app: Umbel) -> push.Reader:
    assert isinstance(app.backend, RedisBackend)
    return app.backend._reader


def part(chord_sig: Any, group_id: str, index: int, task_id: str) -> Context:
    return Context(
        id=task_id, task="add", group=group_id, group_index=index, chord=chord_sig,
        called_directly=False,
    )  # fmt: skip


# -- documents on Redis --------------------------------------------------------------------


def test_celery_reads_what_we_store(app: Umbel, peer: celery.Celery) -> None:
    app.backend.store("ok", {"x": [1, None]}, "SUCCESS", request=Context(id="ok"))
    app.backend.store("bad", ValueError("bad", 3), "FAILURE", traceback="tb")
    app.backend.store("part", {"done": 3}, "PROGRESS")
    assert peer.AsyncResult("ok").get(timeout=30) == {"x": [1, None]}
    with pytest.raises(ValueError, match="bad"):
        peer.AsyncResult("bad").get(timeout=30)
    assert peer.AsyncResult("bad").traceback == "tb"
    assert peer.AsyncResult("part").state == "PROGRESS"
    assert peer.AsyncResult("part").info == {"done": 3}


def test_we_read_what_celery_stores(app: Umbel, peer: celery.Celery) -> None:
    peer.backend.store_result("ok", {"x": 1}, "SUCCESS")
    peer.backend.store_result("bad", KeyError("k"), "FAILURE", traceback="tb")
    peer.backend.store_result("gone", celery.exceptions.TaskRevokedError("expired"), "REVOKED")
    assert app.AsyncResult("ok").get(timeout=30) == {"x": 1}
    with pytest.raises(KeyError, match="k"):
        app.AsyncResult("bad").get(timeout=30)
    assert repr(app.AsyncResult("gone").result) == "TaskRevokedError('expired')"


def test_our_document_has_the_keys_and_the_lifetime_of_celerys(
    app: Umbel, peer: celery.Celery, client: redis.Redis
) -> None:
    app.backend.store("a", 3, "SUCCESS", request=Context(id="a", parent_id="p", group="g"))
    request = CeleryContext(id="b", parent_id="p", group="g", children=[])
    peer.backend.store_result("b", 3, "SUCCESS", request=request)
    ours, theirs = (json.loads(client.get(f"celery-task-meta-{i}") or b"") for i in "ab")
    for document in (ours, theirs):
        document.pop("date_done")
        document.pop("task_id")
    assert ours == theirs
    ttls = [client.ttl(f"celery-task-meta-{i}") for i in "ab"]
    assert all(86_390 < ttl <= 86_400 for ttl in ttls)


def test_storing_is_one_script_that_keeps_a_success_and_publishes_the_rest(
    app: Umbel, client: redis.Redis
) -> None:
    heard: Any = client.pubsub()  # type: ignore[no-untyped-call]
    heard.subscribe("celery-task-meta-a")
    assert heard.get_message(timeout=5)
    app.backend.store("a", 1, "SUCCESS")
    app.backend.store("a", ValueError("late"), "FAILURE")
    app.backend.store("b", 1, "SUCCESS")
    message = heard.get_message(timeout=5)
    assert message
    assert message["data"] == client.get("celery-task-meta-a")
    assert heard.get_message(timeout=0.05) is None
    heard.close()
    assert app.AsyncResult("a").get(timeout=1) == 1


def test_a_success_that_celery_stored_is_kept_in_every_form(
    make_app: MakeApp, redis_url: str, peer: celery.Celery, client: redis.Redis
) -> None:
    app = make_app(redis_url, redis_url)
    peer.backend.store_result("plain", 1, "SUCCESS")
    peer.backend.compression = "gzip"
    peer.backend.store_result("packed", 1, "SUCCESS")
    client.set("celery-task-meta-turned", b'{"result": 1, "status": "SUCCESS", "task_id": "x"}')
    client.set("celery-task-meta-rubbish", b"\xff\xfe")
    for task_id in ("plain", "packed", "turned", "rubbish"):
        app.backend.store(task_id, 2, "FAILURE")
    assert [app.AsyncResult(i).state for i in ("plain", "packed", "turned")] == ["SUCCESS"] * 3
    assert app.AsyncResult("rubbish").state == "FAILURE"
    assert app.AsyncResult("packed").get(timeout=1) == 1


def test_prefix_expiry_and_compression_follow_the_settings(
    make_app: MakeApp, redis_url: str, client: redis.Redis
) -> None:
    options = {"global_keyprefix": "shop"}
    app = make_app(
        redis_url, redis_url, result_backend_transport_options=options, result_expires=0,
        result_compression="gzip",
    )  # fmt: skip
    peer = celery.Celery("p", broker=redis_url, backend=redis_url, set_as_current=False)
    peer.conf.result_backend_transport_options = options
    app.backend.store("a", "x" * 100, "SUCCESS")
    assert client.ttl("shop_celery-task-meta-a") == -1
    assert peer.AsyncResult("a").get(timeout=30) == "x" * 100
    assert app.AsyncResult("a").get(timeout=30) == "x" * 100
    leave(peer)


def test_groups_are_saved_as_celery_saves_them(app: Umbel, peer: celery.Celery) -> None:
    app.GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("b")]).save()
    restored = peer.GroupResult.restore("g", backend=peer.backend, app=peer)
    assert [member.id for member in restored.results] == ["a", "b"]
    peer.GroupResult("h", [peer.AsyncResult("c")]).save(backend=peer.backend)
    assert app.backend.restore_group("h") == [["h", None], [[["c", None], None]]]


def test_a_server_that_is_away_is_waited_for_and_then_reported(
    make_app: MakeApp, redis_server: RedisServer
) -> None:
    policy = {"retry_policy": {"max_retries": 2, "interval_start": 0, "interval_step": 0}}
    app = make_app("memory://", "redis://127.0.0.1:1/0", result_backend_transport_options=policy)
    with pytest.raises(BackendError, match=r"127\.0\.0\.1:1"):
        app.backend.store("a", 1, "SUCCESS")
    patient = make_app("memory://", redis_server.url_of(0))
    patient.backend.store("a", 1, "SUCCESS")
    redis_server.kill()
    storing = threading.Thread(target=patient.backend.store, args=("b", 2, "SUCCESS"))
    storing.start()
    redis_server.start()
    storing.join(timeout=20)
    assert patient.AsyncResult("b").get(timeout=30) == 2


# -- push ----------------------------------------------------------------------------------


def test_many_waiters_are_woken_by_push_and_nothing_stays_subscribed(
    app: Umbel, peer: celery.Celery, client: redis.Redis
) -> None:
    ids = [uuid.uuid4().hex for _ in range(300)]
    threads_before = threading.active_count()
    values: dict[str, Any] = {}
    waiting = [
        threading.Thread(target=lambda i=i: values.update({i: app.AsyncResult(i).get(timeout=30)}))
        for i in ids[:20]
    ]
    for thread in waiting:
        thread.start()
    whole = app.GroupResult("g", [app.AsyncResult(i) for i in ids])
    storing = threading.Thread(
        target=lambda: [peer.backend.store_result(i, i, "SUCCESS") for i in reversed(ids)]
    )
    storing.start()
    assert whole.get(timeout=30) == ids
    for thread in (*waiting, storing):
        thread.join(timeout=20)
    assert values == {i: i for i in ids[:20]}
    wait_until(lambda: not client.pubsub_channels("celery-task-meta-*"), what="no subscriptions")
    assert threading.active_count() < threads_before + 10


def test_an_idle_reader_sends_nothing(app: Umbel, client: redis.Redis) -> None:
    app.backend.store("a", 1, "SUCCESS")
    watch = app.backend.watch(["never"], lambda meta: None)
    wait_until(lambda: client.pubsub_channels("celery-task-meta-*"), what="a subscription")
    watch.close()
    wait_until(lambda: not client.pubsub_channels("celery-task-meta-*"), what="none")
    before = client.info("stats")["total_commands_processed"]
    idle_until = time.monotonic() + 0.3
    wait_until(lambda: time.monotonic() > idle_until)
    after = client.info("stats")["total_commands_processed"]
    assert after - before == 1  # this very INFO


def test_a_result_stored_between_subscribing_and_reading_is_not_missed(app: Umbel) -> None:
    for number in range(200):
        task_id = uuid.uuid4().hex
        result = app.AsyncResult(task_id)
        storing = threading.Thread(target=app.backend.store, args=(task_id, number, "SUCCESS"))
        storing.start()
        assert result.get(timeout=30) == number
        storing.join()


def test_waiters_survive_a_restart_of_the_server(
    make_app: MakeApp, redis_server: RedisServer
) -> None:
    app = make_app("memory://", redis_server.url_of(1))
    got: list[Any] = []
    result = app.AsyncResult("after")
    waiting = threading.Thread(target=lambda: got.append(result.get(timeout=30)))
    waiting.start()
    wait_until(lambda: "after" in reader_of(app)._watchers)
    redis_server.restart()
    wait_until(lambda: redis_server.client(1).pubsub_channels("*after"), what="a new subscription")
    app.backend.store("after", 5, "SUCCESS")
    waiting.join(timeout=30)
    assert got == [5]


def test_a_connection_cut_by_the_server_is_made_anew(app: Umbel, client: redis.Redis) -> None:
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(app.AsyncResult("cut").get(timeout=30)))
    waiting.start()
    wait_until(lambda: client.pubsub_channels("*cut"))
    client.client_kill_filter(_type="pubsub")
    app.backend.store("cut", 1, "SUCCESS")
    waiting.join(timeout=20)
    assert got == [1]


def test_a_silent_connection_is_noticed(
    app: Umbel, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "PING_INTERVAL_S", 0.05)
    with app.backend.watch(["quiet"], lambda meta: None):
        wait_until(lambda: client.pubsub_channels("*quiet"))
        before = client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"]
        wait_until(
            lambda: (
                client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"] > before + 2
            ),
            what="pings",
        )


def test_a_forked_child_waits_on_its_own(app: Umbel, client: redis.Redis) -> None:
    app.backend.store("first", 1, "SUCCESS")
    with app.backend.watch(["parent"], lambda meta: None):
        wait_until(lambda: client.pubsub_channels("*parent"))
        pid = os.fork()
        if pid == 0:
            try:
                ok = app.AsyncResult("child").get(timeout=30) == 7
            except BaseException:
                ok = False
            os._exit(0 if ok else 1)
        wait_until(lambda: client.pubsub_channels("*child"), what="the child")
        app.backend.store("child", 7, "SUCCESS")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        got: list[Any] = []
        app.AsyncResult("mine").then(lambda r: got.append(r.result))
        app.backend.store("mine", 8, "SUCCESS")
        wait_until(lambda: got == [8])


def test_waiting_works_under_gevent(redis_url: str) -> None:
    program = """
from gevent import monkey; monkey.patch_all()
import gevent, sys
from umbel.app.umbel import Umbel
app = Umbel("g", broker="memory://", backend=sys.argv[1])
ids = [str(i) for i in range(20)]
waiting = [gevent.spawn(lambda i=i: app.AsyncResult(i).get(timeout=30)) for i in ids]
gevent.sleep(0.1)
for i in ids:
    app.backend.store(i, i, "SUCCESS")
gevent.joinall(waiting, timeout=10)
assert [w.value for w in waiting] == ids, [w.value for w in waiting]
app.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, redis_url], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_no_limit_of_connections_is_no_limit(make_app: MakeApp, redis_url: str) -> None:
    app = make_app("memory://", redis_url, redis_max_connections=None)
    pool = make_client(app, redis_url).connection_pool
    taken = [pool.get_connection() for _ in range(150)]  # redis-py takes None for a hundred
    pool.disconnect()
    assert len(taken) == 150


def test_threads_wait_for_a_connection_where_there_is_a_limit(
    make_app: MakeApp, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app("memory://", redis_url, redis_max_connections=5)
    count = 100
    together = threading.Barrier(count)

    def store(number: int) -> None:
        together.wait(30)
        app.backend.store(f"task-{number}", number, "SUCCESS")

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(count) as pool:
        list(pool.map(store, range(count)))
    assert caplog.messages == []
    assert [app.AsyncResult(f"task-{n}").result for n in range(count)] == list(range(count))


def test_results_on_redis_can_be_awaited(app: Umbel, client: redis.Redis) -> None:
    async def main() -> list[Any]:
        async with asyncio.timeout(20):
            waits = [asyncio.ensure_future(app.AsyncResult(str(i))._await()) for i in range(20)]
            await asyncio.to_thread(
                wait_until, lambda: len(client.pubsub_channels("celery-task-meta-*")) == 20
            )
            for i in range(20):
                await asyncio.to_thread(app.backend.store, str(i), i, "SUCCESS")
            return await asyncio.gather(*waits)

    assert asyncio.run(main()) == list(range(20))


# -- chords on Redis -----------------------------------------------------------------------


def test_a_chord_on_redis_runs_its_body_once_with_ordered_results(
    app: Umbel, client: redis.Redis
) -> None:
    result = chord([app.tasks["add"].s(i) for i in range(5)], app.signature("total")).apply_async()
    parts = messages(app)
    for message in (*reversed(parts), *parts):
        run(app, message)
    assert [task for task, _ in pump(app)] == ["total"]
    assert result.get(timeout=30) == 10
    left = [str(key) for key in client.keys("celery-taskset-meta-*")]
    assert [key.rpartition(".")[2].strip("'") for key in left] == ["c"]
    assert client.get(f"celery-taskset-meta-{result.parent.id}.c") == b"done"


def test_nested_compositions_work_on_redis(app: Umbel) -> None:
    add, total = app.tasks["add"], app.tasks["total"]
    inner = chord([add.s(1), add.s(2) | add.s(10)], total.s())
    result = chain(
        add.s(1, 1), group(add.s(1), add.s(2), inner), total.s(), add.s(100)
    ).apply_async()
    pump(app)
    # 3 + 4 + (3 + 14) = 24
    assert result.get(timeout=30) == 124
    nested = chord([add.s(1) | group(add.s(1), add.s(2)), add.s(9)], app.signature("echo"))
    nested.apply_async()
    (first, second) = messages(app)
    run(app, first)
    run(app, second)
    rest = messages(app)
    for message in rest:
        run(app, message)
    (body,) = messages(app)
    assert json.loads(body.body)[0] == [[[2, 3], 9]]


def test_a_failed_part_stores_celerys_chord_error(app: Umbel, peer: celery.Celery) -> None:
    parts = [app.tasks["add"].s(1), app.tasks["fail"].s().set(task_id="f1")]
    result = chord(parts, app.signature("total")).apply_async()
    pump(app)
    with pytest.raises(ChordError) as ours:
        result.get(timeout=30)
    with pytest.raises(celery.exceptions.ChordError) as theirs:
        peer.AsyncResult(result.id).get(timeout=30)
    expected = "Dependency f1 raised ValueError('bad', 3)"
    assert str(ours.value) == str(theirs.value) == expected


@pytest.mark.parametrize("ours", [(0, 1), (0, 2), (2,), (0, 1, 2), ()])
def test_celery_and_we_finish_parts_of_one_chord(
    app: Umbel, peer: celery.Celery, ours: tuple[int, ...]
) -> None:
    body = app.signature("total").set(task_id="body")
    app.backend.start_chord("gid", 3)
    for index in range(3):
        if index in ours:
            app.backend.chord_part(part(body, "gid", index, f"t{index}"), "SUCCESS", index)
        else:
            request = CeleryContext(
                id=f"t{index}", group="gid", group_index=index, chord=dict(body)
            )
            peer.backend.on_chord_part_return(request, "SUCCESS", index)
    (message,) = messages(app)
    assert message.headers["id"] == "body"
    assert json.loads(message.body)[0] == [[0, 1, 2]]


def test_parts_of_an_older_celery_are_counted(app: Umbel, client: redis.Redis) -> None:
    """The older way: ZADD and ZCOUNT in a pipeline, without .d and .c."""
    body = app.signature("total").set(task_id="body")
    app.backend.chord_part(part(body, "gid", 2, "t2"), "SUCCESS", 2)
    client.zadd("celery-taskset-meta-gid.j", {b'[1, "t0", "SUCCESS", 0]': 0})
    client.set("celery-taskset-meta-gid.s", 3)
    app.backend.chord_part(part(body, "gid", 1, "t1"), "SUCCESS", 1)
    (message,) = messages(app)
    assert json.loads(message.body)[0] == [[0, 1, 2]]


def test_a_celery_chord_signature_is_applied_by_us(app: Umbel, peer: celery.Celery) -> None:
    add, total = peer.tasks["add"], peer.tasks["total"]
    theirs = celery.chain(
        add.s(1, 1), celery.group(add.s(1), add.s(2)), total.s(), add.s(10), app=peer
    )
    result = theirs.apply_async()
    pump(app)
    assert result.get(timeout=30) == 17
    assert app.AsyncResult(result.id).get(timeout=30) == 17


def test_the_claim_of_a_worker_that_died_is_taken_over(app: Umbel, client: redis.Redis) -> None:
    body = app.signature("total").set(task_id="body")
    app.backend.start_chord("gid", 2)
    app.backend.chord_part(part(body, "gid", 0, "t0"), "SUCCESS", 0)
    client.set("celery-taskset-meta-gid.c", "somebody-dead", px=300)
    started = time.monotonic()
    # The part was recorded by the dead one, and is delivered again while its claim still lives.
    app.backend.chord_part(part(body, "gid", 1, "t1"), "SUCCESS", 1)
    assert time.monotonic() - started >= 0.25
    assert [m.headers["id"] for m in messages(app)] == ["body"]
    app.backend.chord_part(part(body, "gid", 1, "t1"), "SUCCESS", 1)
    assert messages(app) == []


def test_many_threads_finish_a_chord_once(app: Umbel) -> None:
    body = app.signature("total").set(task_id="body")
    for number in range(10):
        group_id = f"g{number}"
        app.backend.start_chord(group_id, 8)
        finishing = [
            threading.Thread(
                target=app.backend.chord_part,
                args=(part(body, group_id, i % 8, f"t{i % 8}"), "SUCCESS", i % 8),
            )
            for i in range(16)
        ]
        for thread in finishing:
            thread.start()
        for thread in finishing:
            thread.join()
        assert len(messages(app)) == 1


def test_parts_that_join_a_running_chord_are_waited_for(app: Umbel) -> None:
    body = app.signature("total").set(task_id="body")
    app.backend.start_chord("gid", 1)
    app.backend.add_to_chord("gid", 1)
    app.backend.chord_part(part(body, "gid", 0, "t0"), "SUCCESS", 1)
    assert messages(app) == []
    app.backend.chord_part(part(body, "gid", None, "t1"), "SUCCESS", 2)  # type: ignore[arg-type]
    (message,) = messages(app)
    assert json.loads(message.body)[0] == [[1, 2]]


# -- RPC -----------------------------------------------------------------------------------


def test_a_result_comes_back_through_the_broker(make_app: MakeApp, amqp_url: str) -> None:
    client = make_app(amqp_url, "rpc://")
    worker = make_app(amqp_url, "rpc://")
    plain, failing = client.tasks["add"].delay(1, 2), client.tasks["fail"].delay()
    steps = chain(client.tasks["add"].s(1, 1), client.tasks["add"].s(5)).apply_async()
    pump(worker)
    assert plain.get(timeout=30) == 3
    assert steps.get(timeout=30) == 7
    assert steps.parent.get(timeout=30) == 2
    with pytest.raises(ValueError, match="bad"):
        failing.get(timeout=30)
    assert plain.state == "SUCCESS"

    async def awaited() -> Any:
        async with asyncio.timeout(10):
            return await client.AsyncResult(plain.id)

    assert asyncio.run(awaited()) == 3


def test_celery_and_we_answer_each_other_by_rpc(make_app: MakeApp, amqp_url: str) -> None:
    app = make_app(amqp_url, "rpc://")
    peer = celery.Celery("peer", broker=amqp_url, backend="rpc://", set_as_current=False)
    theirs = peer.send_task("add", (1, 2))
    pump(app)
    assert theirs.get(timeout=30) == 3
    mine = app.tasks["add"].delay(2, 3)
    (message,) = messages(app)
    request = CeleryContext(
        id=mine.id, reply_to=message.properties["reply_to"], correlation_id=mine.id, children=[]
    )
    peer.backend.store_result(mine.id, 5, "SUCCESS", request=request)
    assert mine.get(timeout=30) == 5
    peer.backend.result_consumer._connection.close()
    leave(peer)


def test_the_reply_queue_is_declared_as_celery_declares_it(
    make_app: MakeApp, amqp_url: str
) -> None:
    app = make_app(amqp_url, "rpc://")
    app.backend.before_send(("x",))
    with app.connection() as connection:
        # Another set of flags would be refused by the broker.
        connection.channel().queue_declare(
            queue=app.backend.reply_to, durable=True, auto_delete=True, exclusive=False,
            arguments={"x-expires": 86_400_000},
        )  # fmt: skip


def test_a_reply_consumer_that_lost_its_connection_comes_back(
    make_app: MakeApp, amqp_url: str, rabbitmq_server: Any
) -> None:
    client = make_app(amqp_url, "rpc://")
    worker = make_app(amqp_url, "rpc://")
    result = client.tasks["add"].delay(1, 1)
    backend = client.backend
    assert isinstance(backend, RpcBackend)
    assert backend._consumer is not None
    ready = backend._consumer._session.ready
    rabbitmq_server.close_connections()
    wait_until(lambda: not ready.is_set(), what="the loss to be noticed")
    backend.before_send(("x",))
    pump(worker)
    assert result.get(timeout=30) == 2


def test_replies_that_nobody_claims_are_bounded_and_counted(
    make_app: MakeApp, redis_url: str
) -> None:
    backend = make_app(redis_url, "rpc://").backend
    assert isinstance(backend, RpcBackend)
    for number in range(UNCLAIMED_MAX + 5):
        body = b'{"status":"SUCCESS","result":1,"task_id":"%d"}' % number
        backend._received(str(number), body, "application/json", "utf-8")
    assert len(backend._documents) == UNCLAIMED_MAX
    assert backend.dropped_count == 5
    assert backend.get_meta("0")["status"] == "PENDING"
    assert backend.get_meta(str(UNCLAIMED_MAX))["status"] == "SUCCESS"


def test_rpc_works_over_a_redis_broker_too(make_app: MakeApp, redis_url: str) -> None:
    client, worker = make_app(redis_url, "rpc://"), make_app(redis_url, "rpc://")
    result = client.tasks["add"].delay(1, 2)
    pump(worker)
    assert result.get(timeout=30) == 3


# -- revoke --------------------------------------------------------------------------------


def test_revoke_is_a_broadcast_that_celerys_mailbox_understands(
    app: Umbel, peer: celery.Celery
) -> None:
    seen: list[Any] = []
    with peer.connection() as connection:
        node = peer.control.mailbox.Node("listener@here", channel=connection.channel())
        node.handlers["revoke"] = lambda _, **arguments: seen.append(arguments)
        node.listen(callback=node.handle_message)
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.1)  # this is what subscribes
        app.GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("b")]).revoke(terminate=True)
        while not seen:
            connection.drain_events(timeout=5)
    assert seen[0].pop("stamp") == pytest.approx(time.time(), abs=60)
    assert seen == [{"task_id": ["a", "b"], "terminate": True, "signal": "SIGTERM"}]
