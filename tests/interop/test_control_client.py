"""Umbel's control client and Celery's workers; Celery's control client and Umbel's replies."""

from __future__ import annotations

import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import celery
import pytest

from tests.interop.peers import CELERY, Marks
from tests.responders import Responder
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.workers import Program
from umbel import Umbel
from umbel.wire.control import Request

LONG_S = 20.0
GONE_S = 15.0
RESULTS = "celery-task-meta-"
NODE = "celery@inspected"


@dataclass(frozen=True)
class Cluster:
    """One Celery worker, an Umbel client, and a look at the broker."""

    kind: str
    settings: dict[str, Any]
    worker: Program
    app: Umbel
    marks: Marks
    entities: Callable[[], set[str]]

    @property
    def inspect(self) -> Any:
        return self.app.control.inspect(destination=[NODE], timeout=LONG_S)


@pytest.fixture(scope="module", params=["redis", "amqp"])
def cluster(
    request: pytest.FixtureRequest,
    own_redis: RedisServer,
    marks: Marks,
    new_settings: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    from tests.interop.peers import start_worker

    settings = new_settings(request.param)
    worker = start_worker(
        CELERY,
        settings,
        marks_url=own_redis.url_of(0),
        cwd=tmp_path_factory.mktemp("inspected"),
        pool="threads",
        name=NODE,
    )
    first = Umbel("first", set_as_current=False, **settings)
    # On Redis it is ready a moment before it hears.
    wait_until(
        lambda: first.control.ping(destination=[NODE], timeout=0.5), LONG_S, "the worker to hear"
    )
    first.close()
    app = Umbel("asker", set_as_current=False, **settings)
    entities = _entities(request, settings["broker_url"], own_redis)
    try:
        yield Cluster(request.param, settings, worker, app, marks, entities)
    finally:
        app.close()
        worker.kill()


def _entities(
    request: pytest.FixtureRequest, url: str, own_redis: RedisServer
) -> Callable[[], set[str]]:
    """What is on the broker, but for results."""
    if url.startswith("amqp"):
        rabbitmq: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
        return lambda: rabbitmq.entities(url)
    return lambda: {one for one in own_redis.entities(url) if not one.startswith(RESULTS)}


# -- an Umbel client and a Celery worker ---------------------------------------------------


def test_a_celery_worker_answers_a_ping(cluster):
    assert cluster.app.control.ping(timeout=LONG_S, limit=1) == [{NODE: {"ok": "pong"}}]
    assert cluster.app.control.ping([NODE], timeout=LONG_S) == [{NODE: {"ok": "pong"}}]
    assert cluster.inspect.ping() == {NODE: {"ok": "pong"}}


def test_a_celery_worker_understands_patterns(cluster):
    for pattern, matcher in (("celery@*", None), ("celery@*", "glob"), ("c.*@insp", "pcre")):
        inspect = cluster.app.control.inspect(
            pattern=pattern, matcher=matcher, limit=1, timeout=LONG_S
        )
        assert inspect.ping() == {NODE: {"ok": "pong"}}
    assert cluster.app.control.inspect(pattern="other@*", timeout=0.5).ping() is None


def test_a_celery_worker_tells_of_itself(cluster):
    inspect = cluster.inspect
    assert inspect.clock()[NODE]["clock"] > 0
    stats = inspect.stats()[NODE]
    assert stats["pid"] == cluster.worker.pid
    assert {"total", "broker", "pool", "rusage", "prefetch_count"} <= stats.keys()
    assert "t.add" in inspect.registered()[NODE]
    assert any("rate_limit" in one or "t." in one for one in inspect.registered("name")[NODE])
    assert inspect.conf()[NODE]["broker_url"]
    assert len(inspect.conf(with_defaults=True)[NODE]) > len(inspect.conf()[NODE])
    assert [queue["name"] for queue in inspect.active_queues()[NODE]] == ["celery"]
    assert "software" in inspect.report()[NODE]["ok"]
    assert inspect.revoked() == {NODE: []}
    assert inspect.hello("other@h", []) == {NODE: {"revoked": [], "clock": ANY_INT}}
    assert inspect.memdump()[NODE] is not None
    assert inspect.memsample()[NODE] is not None
    assert inspect.objgraph()[NODE]


class _AnyInt:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)


ANY_INT = _AnyInt()


def test_a_celery_worker_tells_of_its_tasks(cluster):
    gate = cluster.marks.name()
    running = cluster.app.send_task("t.gate", (gate,))
    waiting = cluster.app.send_task("t.add", (1, 2), countdown=600)
    cluster.marks.wait(f"{gate}:reached")
    inspect = cluster.inspect
    wait_until(lambda: inspect.scheduled()[NODE], what="the task with an eta")
    assert [task["id"] for task in inspect.active()[NODE]] == [running.id]
    assert [task["id"] for task in inspect.active(safe=True)[NODE]] == [running.id]
    assert [task["request"]["id"] for task in inspect.scheduled()[NODE]] == [waiting.id]
    assert inspect.reserved() == {NODE: []}
    found = inspect.query_task(running.id, waiting.id, "unknown")[NODE]
    assert {task_id: state for task_id, (state, _) in found.items()} == {
        running.id: "active",
        waiting.id: "scheduled",
    }
    replies = cluster.app.control.revoke([waiting.id], reply=True, limit=1, timeout=LONG_S)
    assert replies == [{NODE: {"ok": f"tasks {{{waiting.id!r}}} flagged as revoked"}}]
    assert inspect.revoked() == {NODE: [waiting.id]}
    cluster.marks.open(gate)
    running.get(timeout=LONG_S)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda c, **o: c.rate_limit("t.add", "100/s", **o), "new rate limit set successfully"),
        (lambda c, **o: c.rate_limit("t.add", 0, **o), "rate limit disabled successfully"),
        (lambda c, **o: c.time_limit("t.add", soft=60, hard=70, **o), "time limits set"),
        (lambda c, **o: c.add_consumer("more", **o), "add consumer more"),
        (lambda c, **o: c.cancel_consumer("more", **o), "no longer consuming from more"),
        (lambda c, **o: c.enable_events(**o), "task events enabled"),
        (lambda c, **o: c.disable_events(**o), "task events disabled"),
        (lambda c, **o: c.terminate("unknown", **o), "terminate: tasks unknown"),
        (lambda c, **o: c.revoke_by_stamped_headers({"k": "v"}, **o), "headers"),
    ],
)
def test_a_celery_worker_obeys(cluster, call, answer):
    (reply,) = call(cluster.app.control, reply=True, destination=[NODE], timeout=LONG_S)
    assert reply[NODE]["ok"].startswith(answer)


def test_the_errors_of_a_celery_worker_come_back(cluster):
    options: Any = {"reply": True, "destination": [NODE], "timeout": LONG_S}
    control = cluster.app.control
    assert control.broadcast("nosuch", **options) == [{NODE: {"error": "KeyError('nosuch')"}}]
    assert control.rate_limit("nosuch", 1, **options) == [{NODE: {"error": "unknown task"}}]
    assert "error" in control.autoscale(4, 2, **options)[0][NODE]
    assert "error" in control.pool_restart(**options)[0][NODE]


def test_a_command_without_reply_is_obeyed_too(cluster):
    cluster.app.control.revoke("some-id")
    wait_until(lambda: "some-id" in cluster.inspect.revoked()[NODE], what="the revocation")


def test_a_hundred_calls_at_a_time_get_their_own_answers(cluster):
    def ask(number: int) -> Any:
        return cluster.inspect.registered(f"attribute_{number}", "name")

    with ThreadPoolExecutor(20) as pool:
        for answer in pool.map(ask, range(100)):
            assert "t.add [name=t.add]" in answer[NODE]
    assert not cluster.app.control.mailbox.counts


# -- what is left behind -------------------------------------------------------------------


def test_a_client_that_is_closed_leaves_nothing(cluster):
    before = cluster.entities()
    app = Umbel("short", set_as_current=False, **cluster.settings)
    assert app.control.ping(limit=1, timeout=LONG_S)
    app.close()
    wait_until(lambda: cluster.entities() <= before, what="everything to go")


ASKS_AND_WAITS = """
    import sys
    from umbel import Umbel

    app = Umbel("killed", broker=sys.argv[1])
    app.control.ping(timeout=60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["soon", "late"])
def test_a_client_killed_before_a_celery_worker_replies_leaves_nothing(
    cluster, start, own_redis, moment
):
    """The worker sets no expiry on anything, and may reply long after the client's death."""
    cluster.app.close()  # no other client keeps anything alive
    url = cluster.settings["broker_url"]
    with Responder(cluster.app, "witness@h") as witness:
        wait_until(lambda: cluster.app.control.ping(["witness@h"]), what="the witness")
        cluster.app.close()
        before = cluster.entities()
        witness.hold()
        cluster.worker.signal(signal.SIGSTOP)
        try:
            client = start([sys.executable, "-c", textwrap.dedent(ASKS_AND_WAITS), url])
            witness.wait_until_holding()
            assert cluster.entities() > before
            client.kill()
            killed = time.monotonic()
            if moment == "late":
                wait_until(lambda: cluster.entities() <= before, GONE_S, "everything to go")
        finally:
            cluster.worker.signal(signal.SIGCONT)
        if cluster.kind == "redis" and moment == "soon":
            queue = f"{witness.seen[-1][0].reply_to.routing_key}.reply.celery.pidbox"
            broker = own_redis.client(int(url.rsplit("/", 1)[1]))
            wait_until(lambda: broker.llen(queue) == 2, what="the reply that nobody will read")
            assert broker.pttl(queue) > 0
        else:
            assert cluster.inspect.ping(), "the worker is back, and replied to the dead one first"
            cluster.app.close()
        left_s = max(GONE_S - (time.monotonic() - killed), 1.0)
        wait_until(lambda: cluster.entities() <= before, left_s, "everything to go")


# -- both clients say the same -------------------------------------------------------------

SAID_ALIKE: list[Callable[[Any], Any]] = [
    lambda c: c.ping(timeout=0.2),
    lambda c: c.ping(destination=["a@h"], timeout=0.2),
    lambda c: c.inspect(timeout=0.2).active(),
    lambda c: c.inspect(timeout=0.2).reserved(),
    lambda c: c.inspect(timeout=0.2).scheduled(),
    lambda c: c.inspect(timeout=0.2).query_task("a", "b"),
    lambda c: c.inspect(timeout=0.2).registered("rate_limit"),
    lambda c: c.inspect(timeout=0.2).stats(),
    lambda c: c.inspect(timeout=0.2).conf(),
    lambda c: c.inspect(timeout=0.2).active_queues(),
    lambda c: c.inspect(timeout=0.2).memdump(),
    lambda c: c.inspect(timeout=0.2).objgraph(),
    lambda c: c.inspect(timeout=0.2).hello("w@h", ["a"]),
    lambda c: c.inspect(pattern="a*", matcher="glob", timeout=0.2).clock(),
    lambda c: c.revoke("a"),
    lambda c: c.revoke(["a", "b"], terminate=True, signal="SIGKILL"),
    lambda c: c.terminate("a", destination=["a@h"]),
    lambda c: c.revoke_by_stamped_headers({"k": ["v"]}),
    lambda c: c.rate_limit("t", "10/m"),
    lambda c: c.time_limit("t", soft=1, hard=2),
    lambda c: c.pool_grow(2),
    lambda c: c.pool_shrink(),
    lambda c: c.pool_restart(),
    lambda c: c.autoscale(8, 2),
    lambda c: c.add_consumer("q", options={"durable": False}),
    lambda c: c.cancel_consumer("q"),
    lambda c: c.enable_events(),
    lambda c: c.disable_events(),
    lambda c: c.heartbeat(),
    lambda c: c.election("i", "task", {"task": "t"}),
    lambda c: c.shutdown(),
]


@pytest.fixture(params=["redis", "amqp"])
def quiet_settings(request: pytest.FixtureRequest, new_settings: Callable[..., Any]) -> Any:
    return new_settings(request.param)


@pytest.fixture
def celery_app(quiet_settings: dict[str, Any]) -> Iterator[Any]:
    app = celery.Celery("peer", set_as_current=False)
    app.conf.update(quiet_settings)
    yield app
    app.close()


@pytest.fixture
def node(quiet_settings: dict[str, Any]) -> Iterator[Responder]:
    app = Umbel("node", set_as_current=False, **quiet_settings)
    with Responder(app, "a@h") as responder:
        probe = Umbel("probe", set_as_current=False, **quiet_settings)
        wait_until(lambda: probe.control.ping(timeout=0.3, limit=1), what="the node to answer")
        probe.close()
        responder.seen.clear()
        yield responder
    app.close()


def test_both_clients_send_the_same_messages(celery_app, quiet_settings, node):
    app = Umbel("client", set_as_current=False, **quiet_settings)
    for call in SAID_ALIKE:
        heard = []
        for control in (celery_app.control, app.control):
            count = len(node.seen)
            call(control)
            wait_until(lambda count=count: len(node.seen) > count, what="the request")
            heard.append(_essence(node.seen[-1][0]))
        assert heard[0] == heard[1]
    app.close()


def _essence(request: Request) -> Any:
    asks = request.reply_to is not None
    # Ours tell when something was revoked, which Celery's workers ignore.
    arguments = {name: value for name, value in request.arguments.items() if name != "stamp"}
    return (request.method, arguments, request.destination, request.pattern,
            request.matcher, asks, request.ticket is not None)  # fmt: skip


def test_a_celery_client_takes_replies_of_ours(celery_app, node):
    assert celery_app.control.ping(limit=1, timeout=LONG_S) == [{"a@h": {"ok": "pong"}}]
    inspect = celery_app.control.inspect(destination=["a@h"], timeout=LONG_S)
    node.handlers["stats"] = lambda _: {"total": {}}
    assert inspect.stats() == {"a@h": {"total": {}}}
    assert node.dropped == 0


def test_clients_of_both_kinds_do_not_disturb_each_other(celery_app, quiet_settings, node):
    app = Umbel("client", set_as_current=False, **quiet_settings)
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(_ask_often, app.control)
        theirs = pool.submit(_ask_often, celery_app.control)
        assert ours.result() == theirs.result() == 20
    app.close()


def _ask_often(control: Any) -> int:
    return sum(
        control.broadcast("echo", {"n": n}, reply=True, limit=1, timeout=LONG_S)
        == [{"a@h": {"n": n}}]
        for n in range(20)
    )
