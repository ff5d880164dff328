"""One worker per node name: who comes second ends, and the first one notices nothing."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ears import Ears
from tests.inside import Inside
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.sites import Site
from tests.workers import READY, Program
from umbel import Umbel
from umbel.broker.embedded.server import EMBEDDED_URL
from umbel.broker.sessions import names
from umbel.worker.runtime.steps import connection as connection_step

TWIN = "twin@test"
NAME = "inside@test"
KEY = f"umbel.node.{NAME}"
REFUSAL = rf"a worker with the node name {TWIN} is running already: give this one a name of its own"


def exits_as_second(twin: Program) -> None:
    assert twin.wait() == 2
    lines = [line for line in twin.lines if "node name" in line]
    assert len(lines) == 1
    assert re.search(REFUSAL, lines[0])
    assert "Traceback" not in twin.output
    assert [line for line in twin.lines if "ERROR" in line or "WARNING" in line] == []
    assert not re.search(READY, twin.lines[-1])


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_the_second_of_one_name_ends_and_the_first_is_not_disturbed(site: Site, pool: str) -> None:
    first = site.worker(pool, "-n", TWIN, "--heartbeat-interval", "0.3")
    site.send("wait", "busy")
    site.wait_until_begun("busy")
    told = len(first.lines)
    with Ears(site.broker_url) as ears:
        exits_as_second(site.worker("threads", "-n", TWIN, wait=False))
        ears.wait_for("worker-heartbeat", 2)
        assert {event["pid"] for event in ears.events} == {first.pid}
    assert site.app.control.ping(timeout=5, limit=1) == [{TWIN: {"ok": "pong"}}]
    assert not [line for line in first.lines[told:] if "ERROR" in line or "WARNING" in line]
    site.open_gate("busy")
    assert site.works()
    assert first.stop() == 0


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "asyncio", "solo"])
def test_the_second_of_one_name_logs_nothing_but_why_it_ends(redis_site: Site, pool: str) -> None:
    redis_site.worker("threads", "-n", TWIN)
    for _ in range(3):  # which children have died by then is a matter of chance
        exits_as_second(redis_site.worker(pool, "-n", TWIN, wait=False, concurrency=4))


@pytest.mark.parametrize(
    ("kind", "pool"), [("redis", "threads"), ("amqp", "threads"), ("amqp", "solo")]
)
def test_of_three_that_start_at_a_time_one_stays(
    request: pytest.FixtureRequest, kind: str, pool: str
) -> None:
    site: Site = request.getfixturevalue(f"{kind}_site")
    started = [site.worker(pool, "-n", TWIN, wait=False) for _ in range(3)]
    wait_until(lambda: len([p for p in started if p.process.poll() is None]) == 1, 30, "one worker")
    (left,) = [one for one in started if one.process.poll() is None]
    left.wait_until_ready()
    for one in started:
        if one is not left:
            exits_as_second(one)
    assert len(site.app.control.ping(timeout=1)) == 1
    assert site.works()


def test_the_name_of_one_that_was_killed_is_taken_over(site: Site) -> None:
    first = site.worker("threads", "-n", TWIN)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = site.worker("threads", "-n", TWIN)
    assert site.app.control.ping(timeout=5, limit=1) == [{TWIN: {"ok": "pong"}}]
    assert second.stop() == 0


CELERY = """
    from celery import Celery
    app = Celery("peer", broker={url!r})
"""


def test_a_celery_worker_of_the_same_name_is_found(
    site: Site, start: Callable[..., Program], tmp_path: Path
) -> None:
    (tmp_path / "peer.py").write_text(textwrap.dedent(CELERY.format(url=site.broker_url)))
    flags = ["-P", "solo", "-n", TWIN, "-l", "info", "--without-gossip", "--without-mingle"]
    peer = start([sys.executable, "-m", "celery", "-A", "peer", "worker", *flags])
    peer.wait_for(READY)
    exits_as_second(site.worker("threads", "-n", TWIN, wait=False))
    assert site.app.control.ping(timeout=5, limit=1) == [{TWIN: {"ok": "pong"}}]
    assert peer.stop() == 0
    site.worker("threads", "-n", TWIN)


# -- with workers in this process ----------------------------------------------------------

Start = Callable[..., Inside]


@pytest.fixture
def start_inside() -> Iterator[Start]:
    made: list[Inside] = []

    def begin(url: str, *, wait: bool = True, settings: Any = (), **options: Any) -> Inside:
        def tasks(app: Umbel) -> None:
            app.task(name="hold")(lambda: HOLD.wait(20))
            app.task(name="note")(NOTED.set)

        chosen = {"broker_url": url, "result_backend": "disabled://", **dict(settings)}
        made.append(Inside(chosen, tasks, **options))
        return made[-1].start(wait=wait)

    HOLD.clear()
    NOTED.clear()
    yield begin
    HOLD.set()
    for inside in made:
        inside.close()


HOLD, NOTED = threading.Event(), threading.Event()


def pings(inside: Inside, timeout_s: float = 5.0) -> bool:
    return inside.client.control.ping(timeout=timeout_s, limit=1) == [{NAME: {"ok": "pong"}}]


def refused(inside: Inside) -> bool:
    wait_until(lambda: not inside.alive, 20, "the second to end")
    return isinstance(inside.error, names.NodeNameTaken)


def database(server: RedisServer, url: str) -> Any:
    return server.client(int(url.rsplit("/", 1)[1]))


def test_the_lease_is_renewed_while_the_only_thread_of_work_is_busy(
    redis_url: str, redis_server: RedisServer, start_inside: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "LEASE_S", 0.6)
    monkeypatch.setattr(names, "RENEW_S", 0.1)
    client = database(redis_server, redis_url)
    inside = start_inside(redis_url, pool="solo")
    token = client.get(KEY)
    inside.send("hold")
    wait_until(lambda: inside.worker.deliveries.active, what="the task")
    began = time.monotonic()
    left_s = []
    wait_until(
        lambda: (
            left_s.append(client.pttl(KEY)) or time.monotonic() - began > 1.0  # type: ignore[func-returns-value]
        ),
        what="more than a lease",
    )
    assert min(left_s) > 0
    assert client.get(KEY) == token
    HOLD.set()
    assert inside.stop() == 0
    assert not client.exists(KEY)


def test_a_worker_that_obeys_no_commands_keeps_its_name_too(
    redis_url: str, start_inside: Start
) -> None:
    deaf = {"worker_enable_remote_control": False}
    first = start_inside(redis_url, settings=deaf)
    assert refused(start_inside(redis_url, settings=deaf, wait=False))
    assert first.worker.ready_now


def test_the_name_is_claimed_again_when_redis_lost_its_data(
    redis_url: str, redis_server: RedisServer, start_inside: Start
) -> None:
    client = database(redis_server, redis_url)
    inside = start_inside(redis_url)
    token = client.get(KEY)
    client.flushdb()
    wait_until(lambda: client.get(KEY) == token, what="the name")
    inside.break_connection()
    assert client.get(KEY) == token
    assert pings(inside)


def test_a_name_that_somebody_took_over_is_an_error_in_the_log_and_no_end(
    redis_url: str,
    redis_server: RedisServer,
    start_inside: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(names, "RENEW_S", 0.1)
    client = database(redis_server, redis_url)
    inside = start_inside(redis_url)
    token = client.get(KEY)
    client.set(KEY, "somebody", px=1_000)
    wait_until(lambda: "another worker has taken over the node name" in caplog.text, what="a line")
    assert client.get(KEY) == b"somebody"
    wait_until(lambda: client.get(KEY) == token, what="the name, when the other one is gone")
    assert caplog.text.count("has taken over the node name") == 1
    assert pings(inside)
    client.set(KEY, "somebody")
    assert inside.stop() == 0
    assert client.get(KEY) == b"somebody", "it was not ours to delete"


def test_names_are_kept_under_the_prefix_of_all_keys(
    redis_url: str, redis_server: RedisServer, start_inside: Start
) -> None:
    settings = {"broker_transport_options": {"global_keyprefix": "app1:"}}
    client = database(redis_server, redis_url)
    start_inside(redis_url)
    start_inside(redis_url, settings=settings)  # another cluster
    assert client.exists(KEY, f"app1:{KEY}") == 2
    assert refused(start_inside(redis_url, settings=settings, wait=False))


def test_a_server_that_forbids_the_key_does_not_keep_a_worker_from_working(
    redis_url: str,
    redis_server: RedisServer,
    start_inside: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = redis_server.client()
    keys = ("~celery*", "~_kombu*", "~unacked*", "~umbel.reply*", "~*.pidbox*")
    client.execute_command("ACL", "SETUSER", "some", "on", ">x", *keys, "&*", "+@all")
    try:
        inside = start_inside(redis_url.replace("redis://", "redis://some:x@"))
        assert f"whether the name {NAME} is free can not be told" in caplog.text
        inside.send("note")
        assert NOTED.wait(20)
        assert inside.stop() == 0
    finally:
        client.execute_command("ACL DELUSER some")


def test_the_embedded_broker_keeps_names_too(start_inside: Start, tmp_path: Path) -> None:
    settings = {"embedded_directory": str(tmp_path)}
    first = start_inside(EMBEDDED_URL, settings=settings)
    assert refused(start_inside(EMBEDDED_URL, settings=settings, wait=False))
    assert pings(first)


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_queue_of_a_connection_that_does_not_answer_only_delays_commands(
    amqp_url: str,
    rabbitmq_server: RabbitMQServer,
    start_inside: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pool: str,
) -> None:
    monkeypatch.setattr(names, "PATIENCE_S", 0.1)
    monkeypatch.setattr(names, "ASK_S", 0.1)
    with rabbitmq_server.connection(amqp_url.rsplit("/", 1)[1]) as ghost:
        arguments = {"x-message-ttl": 300_000, "x-expires": 10_000}
        ghost.channel().queue_declare(
            f"{NAME}.celery.pidbox", exclusive=True, auto_delete=True, arguments=arguments
        )
        inside = start_inside(amqp_url, pool=pool)
        assert "belongs to a connection that does not answer" in caplog.text
        inside.send("note")
        assert NOTED.wait(20)
    wait_until(lambda: pings(inside, 0.3), what="an answer")
    assert inside.worker.counters.connections_lost == 0


def test_our_own_former_connection_is_no_other_worker(
    amqp_url: str,
    start_inside: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is gone without a word, and the broker goes on holding the queue for it."""
    inside = start_inside(amqp_url)
    ghosts: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(connection_step, "hang_up", lambda old, **_: ghosts.append(old))
        inside.break_connection()
    assert len(ghosts) == 1
    assert "belongs to another connection" in caplog.text
    for _ in range(4):  # the broker gives every other one to the connection that is gone
        inside.send("note")
    assert NOTED.wait(20)
    assert not pings(inside, 0.1)
    ghosts[0].close()
    wait_until(lambda: pings(inside, 0.3), what="an answer")
    assert inside.worker.counters.connections_lost == 1
    assert inside.stop() == 0


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_queues_that_any_connection_may_use_are_asked_as_well(
    amqp_url: str, start_inside: Start, pool: str
) -> None:
    settings = {"control_queue_exclusive": False}
    first = start_inside(amqp_url, settings=settings, pool=pool)
    assert refused(start_inside(amqp_url, settings=settings, wait=False))
    assert pings(first)


def test_a_free_name_is_claimed_without_a_question(
    broker_url: str, start_inside: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(self: Any, *args: Any, **options: Any) -> list[Any]:
        asked.append(args)
        return []

    monkeypatch.setattr("umbel.app.control.control.Control.ping", ask)
    for _ in range(2):
        assert start_inside(broker_url).stop() == 0
    assert asked == []


def test_a_broker_that_breaks_while_the_name_is_claimed_is_asked_again(
    broker_url: str, start_inside: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[str] = []
    for kind in (names.LeasedName, names.LockedName):

        def claim(self: Any, *args: Any, original: Any = kind.claim) -> bool:
            claims.append(self.hostname)
            done = bool(original(self, *args))
            if len(claims) == 1:
                self.release()
                raise ConnectionResetError("broken by a test")
            return done

        monkeypatch.setattr(kind, "claim", claim)
    inside = start_inside(broker_url)
    assert claims == [NAME, NAME]
    assert pings(inside)
