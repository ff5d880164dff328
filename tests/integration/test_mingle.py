"""A worker that starts, or is connected again, knows what the others know, and soon."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil
import pytest

from tests.inside import Inside
from tests.integration import neighbours
from tests.proxy import CHUNK, Proxy
from tests.responders import SILENCE, Responder
from tests.servers import wait_until
from tests.sites import Site
from tests.unit.worker.parts import idle_worker
from tests.workers import ROOT, Program, WorkerProcess
from umbel import Umbel
from umbel.cluster import mingle
from umbel.worker.runtime.worker import Worker

# Far below the window of a second; a busy machine takes some of it.
EARLY_S = 0.8
NEIGHBOURS, REVOKED = 20, 50_000
NEIGHBOURS_PROGRAM = "tests/integration/neighbours.py"
WIRE_BYTES_MAX = 5 * 10**6
# Two seconds on a quiet machine.
JOIN_S = 10.0


@dataclass
class Joined:
    """What came of mingling."""

    done: mingle.Done | None
    took_s: float
    worker: Worker

    @property
    def revoked(self) -> set[str]:
        return set(self.worker.revocations.ids())


class Joiner:
    """A worker that does nothing but mingle, in this process."""

    def __init__(self, url: str, name: str = "joiner@test", **settings: Any) -> None:
        chosen = {"broker_url": url, "result_backend": "disabled://", **settings}
        self.app = Umbel("joiner", set_as_current=False, **chosen)
        self.worker = idle_worker(self.app, hostname=name)

    def join(self) -> Joined:
        with self.app.connection() as connection:
            connection.connect()
            began = time.monotonic()
            done = self.worker.mingling.run(connection)
            return Joined(done, time.monotonic() - began, self.worker)

    def close(self) -> None:
        self.app.close()


@pytest.fixture
def joiner() -> Iterator[Callable[..., Joiner]]:
    made: list[Joiner] = []

    def make(url: str, *args: Any, **settings: Any) -> Joiner:
        made.append(Joiner(url, *args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(site: Site, command: str, node: str, **arguments: Any) -> Any:
    replies = site.app.control.broadcast(
        command, arguments, destination=[node], reply=True, timeout=10
    )
    assert replies, f"{node} does not answer {command}"
    return replies[0][node]


def settled(site: Site, node: str) -> None:
    """Wait until a node can tell who is there."""

    def tells() -> bool:
        return "nodes" in ask(site, "hello", node, from_node="nobody@test", revoked=[], digest={})

    wait_until(tells, 10, f"{node} to know the others")


# -- how long it takes -----------------------------------------------------------------------


def test_who_is_alone_waits_for_nobody(site: Site, joiner: Callable[..., Joiner]) -> None:
    alone = joiner(site.broker_url).join()
    assert alone.done is None
    assert alone.took_s < EARLY_S


def test_who_comes_after_a_killed_worker_waits_for_nobody(
    site: Site, joiner: Callable[..., Joiner]
) -> None:
    killed = site.worker("solo", "-n", "killed@test", concurrency=1)
    killed.kill()
    wait_until(lambda: not site.app.control.ping(timeout=0.2), 10, "the broker to notice")
    alone = joiner(site.broker_url).join()
    assert alone.took_s < EARLY_S


@pytest.mark.parametrize("differ", [False, True], ids=["who-agree", "who-know-more"])
def test_it_ends_when_all_have_answered_and_takes_over_clock_and_revocations(
    site: Site, joiner: Callable[..., Joiner], differ: bool
) -> None:
    names = ["one@test", "two@test"]
    for name in names:
        site.worker("threads", "-n", name, concurrency=1)
    if differ:
        for name in names:  # each of the two knows something that the other one does not
            ask(site, "revoke", name, task_id=[f"only-{name}"])
    clocks = [ask(site, "clock", name)["clock"] for name in names]
    for name in names:
        settled(site, name)
    joined = joiner(site.broker_url).join()
    assert joined.done is not None
    assert sorted(joined.done.answered) == names
    assert joined.done.silent == ()
    assert joined.took_s < EARLY_S
    assert joined.worker.app.clock.value > max(clocks)
    if differ:
        assert joined.revoked == {f"only-{name}" for name in names}
        for name in names:  # and passes it on, or they find out by themselves
            wait_until(lambda one=name: len(ask(site, "revoked", one)) == 2, 20, "both to know")


def test_nobody_waits_longer_than_the_window_for_who_does_not_answer(
    site: Site, joiner: Callable[..., Joiner]
) -> None:
    with Responder(site.app, "mute@test", {"hello": lambda _: SILENCE}):
        joined = joiner(site.broker_url).join()
    assert joined.took_s < mingle.WINDOW_S + EARLY_S
    assert joined.done is not None
    assert joined.done.answered == ()


def test_answers_of_any_shape_are_survived(site: Site, joiner: Callable[..., Joiner]) -> None:
    shapes: list[Any] = [
        None, 7, "text", [], {}, {"revoked": 7}, {"revoked": [None, 3, "", "fine-1"]},
        {"clock": -1, "revoked": {"fine-2": None}}, {"clock": 2**70}, {"digest": 4},
        {"digest": {"tasks": {"zz": "x"}, "headers": {}}, "told": {"packed": "%%%"}},
        {"digest": {"tasks": {}, "headers": {}}, "told": {"packed": "AAAA"}},
        {"digest": {"tasks": {}, "headers": {}}, "told": [1], "nodes": {"a": 1}},
        {"digest": {"tasks": {}, "headers": {}}, "nodes": [None, 7, "shape-0@test"]},
        {"error": "on purpose"},
    ]  # fmt: skip
    with ExitStack() as stack:
        for number, shape in enumerate(shapes):
            answer = {"hello": lambda _, value=shape: value}
            stack.enter_context(Responder(site.app, f"shape-{number}@test", answer))
        one = joiner(site.broker_url)
        before = one.app.clock.value
        joined = one.join()
    assert {"fine-1", "fine-2"} >= joined.revoked
    assert before < one.app.clock.value < before + 1_000
    assert joined.took_s < mingle.LIMIT_S + EARLY_S


# -- what is learned -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [["a", "b"], {"a": [81.4, "a"], "b": [82.1, "b"]}],
    ids=["a-list-of-5.7", "a-mapping-of-5.6"],
)
def test_what_celery_workers_tell_is_taken_and_they_are_told_ours(
    site: Site, joiner: Callable[..., Joiner], told: Any
) -> None:
    greeted: list[dict[str, Any]] = []

    def hello(arguments: dict[str, Any]) -> Any:
        greeted.append(arguments)
        return {"revoked": told, "clock": 4_711}

    one = joiner(site.broker_url)
    one.worker.revocations.revoke("ours", time.time())
    with Responder(site.app, "celery@test", {"hello": hello}):
        joined = one.join()
    assert joined.revoked == {"a", "b", "ours"}
    assert one.app.clock.value > 4_711
    assert greeted[0]["from_node"] == "joiner@test"
    assert greeted[0]["revoked"] == [], "a greeting to all carries no ids"
    assert "ours" in greeted[-1]["revoked"]


def test_a_celery_worker_that_starts_is_told_everything(site: Site) -> None:
    site.worker("threads", "-n", "one@test", concurrency=1)
    ask(site, "revoke", "one@test", task_id=["known"])
    reply = ask(site, "hello", "one@test", from_node="celery@test", revoked=["new"])
    assert set(reply) == {"revoked", "clock"}
    assert set(reply["revoked"]) == {"known", "new"}
    assert set(ask(site, "revoked", "one@test")) == {"known", "new"}
    assert ask(site, "hello", "one@test", from_node="one@test", revoked=[]) is None


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_worker_that_starts_skips_what_was_revoked_before_it_was_there(
    site: Site, pool: str
) -> None:
    site.worker("threads", "-n", "old@test", "-Q", "elsewhere", concurrency=1)
    revoked = site.send("record", "revoked")
    fine = site.send("record", "fine")
    ask(site, "revoke", "old@test", task_id=[revoked.id])
    ask(site, "revoke_by_stamped_headers", "old@test", headers={"team": ["red"]})
    stamped = site.send("record", "stamped", stamped_headers=["team"], team=["red"])
    worker = site.worker(pool, "-n", "new@test", concurrency=1)
    assert fine.get(timeout=30) == 1
    for result in (revoked, stamped):
        wait_until(lambda one=result: one.state == "REVOKED", 20, "it to be skipped")
    assert site.order() == ["fine"]
    worker.wait_for(r"mingle: 1 nodes answered")


def test_a_worker_that_is_connected_again_catches_up(site: Site) -> None:
    site.worker("threads", "-n", "other@test", "-Q", "elsewhere", concurrency=1)
    settings = {"broker_url": site.broker_url, "result_backend": site.backend_url}
    inside = Inside(settings, lambda app: None).start()
    try:
        # Told to the other one only: as if this one had been away just then.
        ask(site, "revoke", "other@test", task_id=["missed"])
        assert "missed" not in inside.worker.revocations
        began = time.monotonic()
        inside.break_connection()
        took_s = time.monotonic() - began
        assert "missed" in inside.worker.revocations, "before it takes tasks again"
        assert took_s < mingle.WINDOW_S + 2 * EARLY_S
    finally:
        inside.stop()
        inside.close()


def test_a_broken_greeting_does_not_end_the_exchange_of_later_ones(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.worker("threads", "-n", "other@test", "-Q", "elsewhere", concurrency=1)
    settings = {"broker_url": site.broker_url, "result_backend": site.backend_url}
    failed = threading.Event()

    def fail_once(worker: Worker) -> None:
        mailbox = worker.app.control.mailbox
        real = mailbox.call

        def call(command: str, *args: Any, **options: Any) -> Any:
            if command == "hello" and not failed.is_set():
                failed.set()
                raise RuntimeError("on purpose")
            return real(command, *args, **options)

        mailbox.call = call  # type: ignore[method-assign]

    caplog.set_level(logging.WARNING)
    inside = Inside(settings, lambda app: None, prepare=fail_once).start()
    try:
        assert "mingling failed" in caplog.text
        ask(site, "revoke", "other@test", task_id=["missed"])
        wait_until(lambda: "missed" in inside.worker.revocations, 20, "the heartbeats to tell")
    finally:
        inside.stop()
        inside.close()


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_node_that_missed_a_revoke_learns_it_within_a_few_heartbeats(
    site: Site, pool: str
) -> None:
    names = ["one@test", "two@test", "three@test"]
    for name in names:
        site.worker(pool, "-n", name, concurrency=1)
    ask(site, "revoke", "one@test", task_id=["missed"])
    ask(site, "revoke_by_stamped_headers", "three@test", headers={"team": ["red"]})

    def digest(name: str) -> Any:
        greeting = {"from_node": "nobody@test", "revoked": [], "digest": {}}
        return ask(site, "hello", name, **greeting)["digest"]

    def agree() -> bool:
        if any(ask(site, "revoked", name) != ["missed"] for name in names):
            return False
        return digest(names[0]) == digest(names[1]) == digest(names[2])  # of the headers, too

    wait_until(agree, 20, "all to know both")
    stamped = site.send("record", "stamped", stamped_headers=["team"], team=["red"])
    wait_until(lambda: stamped.state == "REVOKED", 20, "it to be skipped")
    assert site.runs("stamped") == 0


# -- many ------------------------------------------------------------------------------------


class Meter(Proxy):
    """Counts what passes."""

    passed_bytes = 0

    def _pass_on(self, source: Any) -> None:
        way = self._ways.get(source)
        if way is None:
            return
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(CHUNK)
        self.passed_bytes += len(data)
        try:
            assert data
            way.sink.sendall(data)
        except (AssertionError, OSError):
            self._end(way)

    def of(self, url: str) -> str:
        """The same broker, through here."""
        parts = urlsplit(url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self.port}"))


def test_fifty_thousand_revocations_of_twenty_neighbours_are_learned_for_less_than_5_mb(
    site: Site, start: Callable[..., Program]
) -> None:
    port, now = urlsplit(site.broker_url).port, time.time()
    assert port is not None
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(port))
        url = meter.of(site.broker_url)
        command = [NEIGHBOURS_PROGRAM, url, NEIGHBOURS, REVOKED, now]
        crowd = start([sys.executable, *map(str, command)], cwd=ROOT)
        crowd.wait_for("ready")
        one = Joiner(url)
        stack.callback(one.close)
        before = meter.passed_bytes
        joined = one.join()
        passed = meter.passed_bytes - before  # on the way to the broker and on the way from it
        print(f"{passed / 1e6:.2f} MB in {joined.took_s:.2f} s")
        assert joined.done is not None
        if joined.took_s >= mingle.LIMIT_S:  # a machine that busy: heartbeats lead to the rest
            one.join()
    expected = neighbours.revoked_by(REVOKED, now)
    found = {life.key: life.stamp for life in joined.worker.revocations.all()}
    assert found == expected, "which, and since when"
    assert sorted(joined.done.answered) == sorted(neighbours.names(NEIGHBOURS))
    assert passed < WIRE_BYTES_MAX
    assert joined.took_s < JOIN_S


def connection_count(worker: WorkerProcess) -> int:
    """To its broker and its result backend."""
    return len(psutil.Process(worker.pid).net_connections("tcp"))


def test_mingling_leaves_no_connection_open(site: Site) -> None:
    """Two nodes have the same ones, though the first had nobody to greet.

    The last ones are opened after a worker is ready, so both are counted at the same time.
    """
    first = site.worker("threads", "-n", "one@h")
    second = site.worker("threads", "-n", "two@h")
    second.wait_for("mingle: 1 nodes answered")
    wait_until(
        lambda: connection_count(second) <= connection_count(first), 5, "as many as the first has"
    )
