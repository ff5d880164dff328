"""Remote control survives: its connections break, its commands fail, and the next one is obeyed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.inside import Inside
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.sites import Site
from umbel import Umbel
from umbel.cluster.backoff import Backoff
from umbel.worker.control.pidbox import OwnPidbox, Pidbox, ThreadPidbox
from umbel.worker.runtime import consumer as consumer_module

NAME = "inside@test"
BREAKS, FAILURES = 20, 200
FAILS = {"task_id": 7}  # of `revoke`: no id of a task


class Cutter:
    """Breaks the connection on which a node hears commands."""

    def __init__(self, request: pytest.FixtureRequest, kind: str, node: str) -> None:
        self.kind = kind
        self.url: str = request.getfixturevalue(f"{kind}_url")
        self._node = node
        self._last: Any = None
        if kind == "redis":
            server: RedisServer = request.getfixturevalue("redis_server")
            self._db = self.url.rsplit("/", 1)[1]
            self._redis = server.client(int(self._db))
        else:
            self._rabbitmq: RabbitMQServer = request.getfixturevalue("rabbitmq_server")

    def cut(self, times: int) -> None:
        """As soon as there is a new one it is broken too."""
        for number in range(times):
            wait_until(self._cut, 20, f"connection {number} to be broken")

    def _cut(self) -> bool:
        return self._cut_redis() if self.kind == "redis" else self._cut_amqp()

    def _cut_redis(self) -> bool:
        listed = self._redis.client_list(_type="pubsub")
        found = [one["id"] for one in listed if one["db"] == self._db]
        new = [one for one in found if one != self._last]
        if not new:
            return False
        self._last = new[0]
        return bool(self._redis.client_kill_filter(_id=new[0]))

    def _cut_amqp(self) -> bool:
        server, vhost = self._rabbitmq, self.url.rsplit("/", 1)[1]
        resource = f'{{resource, <<"{vhost}">>, queue, <<"{self._node}.celery.pidbox">>}}'
        found = server._call("rabbit_amqqueue", "lookup", resource)
        owner = server._call("rabbit_amqqueue", "info", "Q, [owner_pid]")
        pid = server.evaluate(
            f"case {found} of {{ok, Q}} -> [{{_, Pid}}] = {owner}, pid_to_list(Pid); _ -> [] end"
        )
        if not pid or pid == self._last:
            return False
        self._last = pid
        close = server._call(
            "rabbit_networking", "close_connection", f'list_to_pid("{pid}"), <<"by a test">>'
        )
        server.evaluate(f'catch {close}, ""')
        return True


Make = Callable[..., Cutter]


@pytest.fixture
def cutter(request: pytest.FixtureRequest) -> Make:
    return lambda kind, node=NAME: Cutter(request, kind, node)


# -- in this process: on the loop's connection, and on one of a thread of its own -------------

Start = Callable[..., Inside]


@pytest.fixture
def obeyed() -> list[Any]:
    return []


@pytest.fixture
def start(obeyed: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    made: list[Inside] = []
    # A connection that breaks again and again is rebuilt with pauses: here without.
    monkeypatch.setattr(consumer_module, "DAMP", Backoff(0.01, 0.01))

    def begin(url: str, pool: str, **more: Any) -> Inside:
        def register(app: Umbel) -> None:
            app.task(name="note")(obeyed.append)
            app.task(name="hold")(lambda: HOLD.wait(30))

            @app.control_command
            def note(state: Any, value: Any = None) -> dict[str, Any]:
                obeyed.append(value)
                return {"ok": value}

        settings = {"broker_url": url, "result_backend": "disabled://", **more}
        # Without gossip nothing else subscribes.
        made.append(Inside(settings, register, pool=pool, without_gossip=True))
        return made[-1].start()

    HOLD.clear()
    yield begin
    HOLD.set()
    for inside in made:
        inside.close()


HOLD = threading.Event()
IN_PROCESS = [("threads", Pidbox), ("solo", ThreadPidbox)]


def pidbox_of(inside: Inside) -> Pidbox:
    panel = inside.worker.panel
    assert panel is not None
    assert isinstance(panel.pidbox, Pidbox)
    return panel.pidbox


def ping(app: Umbel, timeout_s: float = 5.0) -> bool:
    return bool(app.control.ping(timeout=timeout_s, limit=1))


@pytest.mark.parametrize("kind", ["redis", "amqp"])
@pytest.mark.parametrize(("pool", "pidbox"), IN_PROCESS)
def test_after_twenty_broken_connections_the_next_command_is_obeyed(
    cutter: Make,
    start: Start,
    obeyed: list[Any],
    kind: str,
    pool: str,
    pidbox: type[Pidbox],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "umbel.control")
    cut = cutter(kind)
    inside = start(cut.url, pool)
    assert type(pidbox_of(inside)) is pidbox
    assert ping(inside.client)
    cut.cut(BREAKS)
    wait_until(lambda: ping(inside.client, 0.5), 20, "an answer")
    assert ping(inside.client)
    box = pidbox_of(inside)
    if isinstance(box, OwnPidbox):
        told = [one.message for one in caplog.records if one.name == "umbel.control"]
        assert sum(one.startswith("Cannot receive control messages") for one in told) >= BREAKS
        assert inside.worker.counters.connections_lost == 0
    else:
        assert inside.worker.counters.connections_lost >= BREAKS
    inside.send("note", 1)
    wait_until(lambda: obeyed == [1], 20, "a task")
    assert inside.stop() == 0


@pytest.mark.parametrize("kind", ["redis", "amqp"])
@pytest.mark.parametrize(("pool", "pidbox"), IN_PROCESS)
def test_after_two_hundred_failing_commands_the_next_is_obeyed(
    request: pytest.FixtureRequest,
    start: Start,
    obeyed: list[Any],
    kind: str,
    pool: str,
    pidbox: type[Pidbox],
) -> None:
    inside = start(request.getfixturevalue(f"{kind}_url"), pool)
    control = inside.client.control
    for _ in range(FAILURES // 4):
        (reply,) = control.broadcast("revoke", FAILS, reply=True, timeout=5, limit=1) or [{}]
        assert "give the id of a task" in reply[NAME]["error"]
    # And as fast as they come, with others between them, none of which is lost or obeyed twice.
    for number in range(FAILURES):
        control.broadcast("revoke", FAILS)
        if number % 2:
            control.broadcast("note", {"value": number})
    assert ping(inside.client)
    wanted = list(range(1, FAILURES, 2))
    wait_until(lambda: len(obeyed) >= len(wanted), what="every command")
    assert sorted(obeyed) == wanted  # two ears at a time may hand on in another order
    panel = inside.worker.panel
    assert panel is not None
    assert panel.failed == FAILURES + FAILURES // 4
    assert pidbox_of(inside).resets >= 1
    assert inside.worker.counters.connections_lost == 0
    inside.send("note", "a task")
    wait_until(lambda: obeyed[-1] == "a task", 20, "a task")


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_a_busy_solo_worker_hears_again_while_its_task_runs(
    cutter: Make, start: Start, kind: str
) -> None:
    cut = cutter(kind)
    inside = start(cut.url, "solo")
    inside.send("hold")
    wait_until(lambda: inside.worker.deliveries.active, what="the task")
    cut.cut(2)
    wait_until(lambda: ping(inside.client, 0.5), 20, "an answer")
    assert inside.worker.deliveries.active
    HOLD.set()
    assert inside.stop() == 0


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_broker_that_restarts_is_heard_again(
    redis_url: str, redis_server: RedisServer, start: Start, pool: str
) -> None:
    inside = start(redis_url, pool)
    redis_server.restart()
    wait_until(lambda: answers_at_all(inside.client), 20, "an answer")
    assert ping(inside.client)


def answers_at_all(app: Umbel) -> bool:
    try:
        return ping(app, 0.5)
    except Exception:  # the client's own connections broke too
        return False


def test_a_worker_whose_broker_is_gone_ends_without_waiting_for_its_pidbox(
    redis_url: str, redis_server: RedisServer, start: Start
) -> None:
    inside = start(redis_url, "solo", broker_heartbeat=2, broker_connection_timeout=0.5)
    redis_server.pause()
    try:
        began = time.monotonic()
        inside.worker.stop(cold=True)
        inside.join(30)
        assert time.monotonic() - began < 15
    finally:
        redis_server.resume()


# -- with greenlets ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_a_greenlet_that_listens_survives_breaks_and_failures(
    cutter: Make, request: pytest.FixtureRequest, kind: str
) -> None:
    site: Site = request.getfixturevalue(f"{kind}_site")
    cut = cutter(kind, "green@test")
    worker = site.worker("gevent", "-n", "green@test", "--without-gossip")
    running = site.send("wait", "running")
    site.wait_until_begun("running")
    assert ping(site.app)
    cut.cut(BREAKS)
    wait_until(lambda: ping(site.app, 0.5), 20, "an answer")
    for _ in range(FAILURES):
        site.app.control.broadcast("revoke", FAILS)
    assert ping(site.app)
    assert ping(site.app)
    site.open_gate("running")
    assert running.get(timeout=30) == "running"
    assert site.works()
    assert worker.stop() == 0
    assert "Traceback" not in worker.output
