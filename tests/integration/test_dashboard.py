"""The dashboard on real brokers: what it hears, what it asks, what it changes; and its command."""

from __future__ import annotations

import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import RedisServer, free_port, wait_until
from tests.sites import QUEUE
from tests.sites import Site as Cluster
from tests.workers import Program, run_umbel
from umbel.dashboard.identity import Identity
from umbel.dashboard.pages import cluster, queues, tasks
from umbel.dashboard.settings import Settings
from umbel.dashboard.site import Site

ADMIN = Identity("admin", "127.0.0.1")


@pytest.fixture
def seen(site: Cluster, tmp_path: Path) -> Iterator[Site]:
    made = Site(site.app, Settings(password="long enough", audit=tmp_path / "audit.jsonl"))
    made.start()
    wait_until(lambda: made.live.is_connected, 20, "the events to be heard")
    yield made
    made.stop()


def test_nodes_tasks_and_queues_are_seen_and_a_queue_is_paused(site: Cluster, seen: Site) -> None:
    site.worker("threads", "-n", "w1@test", "-E")
    assert site.works()

    def node() -> Any:
        found = {one["name"]: one for one in cluster.facts(seen, {})["nodes"]}
        one = found.get("w1@test")
        return one if one and one["pool_size"] else None

    row = wait_until(node, 20, "the node's answer")
    assert (row["state"], row["pool_size"], row["queues"]) == ("online", 2, [QUEUE])
    wait_until(lambda: tasks.facts(seen, {"q": "state:success"})["count"] == 1, 10, "its task")

    assert "1 node did so" in seen.gate.carry_out(ADMIN, "pause", {"queue": QUEUE})
    sent = site.send("add", 1, 2)

    def queue() -> Any:
        found = {one["name"]: one for one in queues.facts(seen, {})["queues"]}
        one = found.get(QUEUE)
        return one if one and one["paused"] and one["length"] == 1 else None

    wait_until(queue, 20, "the paused queue")
    assert not sent.ready()
    seen.gate.carry_out(ADMIN, "resume", {"queue": QUEUE})
    assert sent.get(timeout=20) == 3
    stages = [entry.stage for entry in reversed(seen.audit.latest())]
    assert stages == ["asked", "done", "asked", "done"]


def test_a_task_that_reports_progress_is_found_among_those_that_run(
    site: Cluster, seen: Site
) -> None:
    site.worker("prefork", "-n", "w1@test", "-E", settings={"task_send_sent_event": True})
    site.app.conf.task_send_sent_event = True
    sent = site.send("report_and_wait", "t1")
    site.wait_until_begun("t1")

    def found(query: str) -> list[tuple[str, str]]:
        facts = tasks.facts(seen, {"q": query})
        assert facts["error"] == ""
        return [(task["uuid"], task["state"]) for task in facts["tasks"]]

    wait_until(lambda: found("state:running") == [(sent.id, "PROGRESS")], 20, "the task to run")
    assert found("state:progress") == [(sent.id, "PROGRESS")]
    assert found("state:waiting") == []
    error = tasks.facts(seen, {"q": "state:bogus"})["error"]
    assert error.startswith("unknown state 'bogus': use one of failed")
    assert error.endswith("PROGRESS")
    site.open_gate("t1")
    assert sent.get(timeout=20) == "done"
    wait_until(lambda: found("state:done") == [(sent.id, "SUCCESS")], 20, "its end")
    assert found("state:running") == found("state:progress") == []
    (node,) = cluster.facts(seen, {})["nodes"]
    assert (node["state"], node["processed"] is not None) == ("online", True)
    # What was sent last stands first, though a client's clock says nothing.
    site.send("wait", "t2")
    site.wait_until_begun("t2")
    late = site.send("noop", countdown=600)
    wait_until(lambda: len(found("")) == 3, 20, "all tasks")
    shown = [task["timestamp"] for task in tasks.facts(seen, {})["tasks"]]
    assert shown == sorted(shown, reverse=True)
    assert found("")[0][0] == late.id
    site.open_gate("t2")


def test_a_node_that_sends_no_events_is_said_to_be_silent(
    redis_site: Cluster, tmp_path: Path
) -> None:
    made = Site(redis_site.app, Settings())
    made.start()
    try:
        wait_until(lambda: made.live.is_connected, 20, "the events to be heard")
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        redis_site.worker("threads", "-n", "loud@test", "-E")
        redis_site.worker("threads", "-n", "quiet@test", *quiet)
        made.live.state.clear()  # whatever it has said when it started

        def states() -> dict[str, str]:
            return {one["name"]: one["state"] for one in cluster.facts(made, {})["nodes"]}

        wanted = {"loud@test": "online", "quiet@test": "silent"}
        wait_until(lambda: states() == wanted, 30, "both to be told apart")
        remarks = [one["text"] for one in cluster.facts(made, {})["remarks"]]
        assert any("quiet@test answers, but sends no events" in text for text in remarks)
    finally:
        made.stop()


def test_a_broker_that_was_away_is_heard_again(
    redis_site: Cluster, redis_server: RedisServer, tmp_path: Path
) -> None:
    made = Site(redis_site.app, Settings())
    made.start()
    try:
        wait_until(lambda: made.live.is_connected, 20, "the events to be heard")
        redis_site.worker("threads", "-n", "w1@test", "-E")
        redis_server.kill()
        wait_until(lambda: made.live.condition, 20, "the loss to be noticed")
        assert "gone" in made.live.condition
        assert cluster.facts(made, {})["condition"]
        assert queues.facts(made, {})["queues"] is not None
        redis_server.start()
        wait_until(lambda: not made.live.condition, 30, "the broker to be heard")
        before = made.live.version
        wait_until(lambda: made.live.version > before, 20, "events")
    finally:
        made.stop()


# -- the command -------------------------------------------------------------------------------


def test_the_command_serves_and_ends_in_order(
    redis_url: str, start: Callable[..., Program], tmp_path: Path
) -> None:
    port = free_port()
    program = start(
        [sys.executable, "-m", "umbel", "-A", "tests.probe_app", "-b", redis_url, "dashboard",
         "--port", str(port), "--prefix", "/umbel"],
        env={"PROBE_URL": redis_url},
    )  # fmt: skip
    program.wait_for(f"http://127.0.0.1:{port}/umbel/")
    page = f"http://127.0.0.1:{port}/umbel/"
    wait_until(lambda: _answers(page), 30, "the page")
    # Somebody looks on when it ends.
    with urllib.request.urlopen(f"{page}live/cluster", timeout=20) as stream:
        assert stream.readline().startswith(b"retry")
        program.signal(signal.SIGTERM)
        assert program.wait(20) == 0
    assert "Traceback" not in program.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "refusing to serve on 0.0.0.0 without authentication"),
        (["--password-file", "nowhere"], "cannot read the password from nowhere"),
        (["--prefix", "umbel"], "give a path such as /umbel"),
        (["--proxy-header", "X-User"], "give them with --proxy-address"),
    ],
)
def test_what_would_be_unsafe_or_can_not_work_is_refused(
    tmp_path: Path, words: list[str], said: str
) -> None:
    ran = run_umbel(["-A", "tests.probe_app", "-b", "memory://", "dashboard", *words], cwd=tmp_path)
    assert ran.process.returncode == 2
    assert said in ran.output
    assert len(ran.lines) == 1


def test_an_address_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        ran = run_umbel(
            ["-A", "tests.probe_app", "-b", "memory://", "dashboard", "--port", port], cwd=tmp_path
        )
    assert ran.process.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in ran.output


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
