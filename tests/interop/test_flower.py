"""Flower against our workers: every page opens and tells the truth, every button does its work.

One Flower per broker, the real program, and a worker of each pool. The one with processes is sized
by the autoscaler; the others send no events of tasks until Flower asks for them; all pools but
threads may be restarted. Buttons are pressed as the pages press them, over Flower's HTTP interface.
"""

from __future__ import annotations

import html
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import billiard.exceptions
import pytest

from tests.interop.celery_shell import APP, app_environment
from tests.interop.nodes import WAIT_S, Node, marks_url, revoked_for, start
from tests.interop.peers import CELERY, UMBEL, Client, Marks
from tests.servers import RedisServer, free_port, wait_until
from tests.workers import READY, Program

INSPECTED = {"stats", "active_queues", "registered", "scheduled", "active", "reserved", "revoked",
             "conf"}  # fmt: skip
TASK_LISTS = {"scheduled", "active", "reserved", "revoked"}
POOLS = ("prefork", "threads", "gevent", "solo")


class Page(NamedTuple):
    """What came back."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        assert self.status == 200, self
        return json.loads(self.text)

    @property
    def plain(self) -> str:
        """The text of an HTML page as a reader sees it."""
        assert self.status == 200, self
        return html.unescape(self.text)


@dataclass(frozen=True)
class Flower:
    """A running Flower, and the workers that it shows."""

    broker: str
    port: int
    program: Program
    by_pool: dict[str, Node]

    @property
    def nodes(self) -> list[Node]:
        return list(self.by_pool.values())

    @property
    def prefork(self) -> Node:
        return self.by_pool["prefork"]

    def get(self, path: str, **query: Any) -> Page:
        return self._open(path, query, "GET")

    def press(self, path: str, **query: Any) -> Page:
        """Press a button."""
        return self._open(f"/api{path}", query, "POST")

    def _open(self, path: str, query: dict[str, Any], method: str) -> Page:
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(url, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return Page(answer.status, answer.read().decode())
        except urllib.error.HTTPError as failure:
            with failure:
                return Page(failure.code, failure.read().decode())

    def task(self, task_id: str) -> dict[str, Any]:
        """What Flower knows of a task; empty when nothing."""
        page = self.get(f"/api/task/info/{task_id}")
        return page.json if page.status == 200 else {}

    def wait_for_task(self, task_id: str, state: str) -> dict[str, Any]:
        """Wait until Flower has heard that a task is in this state."""
        found: dict[str, Any] = {}

        def is_known() -> bool:
            found.update(self.task(task_id))
            return found.get("state") == state

        wait_until(is_known, WAIT_S, f"Flower to show {task_id} as {state}")
        return found

    def refreshed(self, node: Node) -> dict[str, Any]:
        """All that Flower finds out about one worker, asked anew."""
        answer = self.get("/api/workers", refresh=1, workername=node.name).json
        assert set(answer) == {node.name}
        return dict(answer[node.name])


@pytest.fixture(scope="module", params=["redis", "amqp"])
def flower(
    request: pytest.FixtureRequest,
    own_redis: RedisServer,
    marks: Marks,
    new_settings: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Flower]:
    settings = new_settings(request.param)
    client = Client(CELERY, **settings)
    programs: dict[str, Program] = {}
    port = free_port()

    def hire(pool: str, *arguments: str, **more: Any) -> Node:
        programs[pool] = start(
            UMBEL,
            {**settings, **more},
            marks_url(own_redis),
            tmp_path_factory.mktemp("worker"),
            *("-P", pool, "-n", f"{pool}@test", "-Q", pool, *arguments),
        )
        return Node(f"{pool}@test", pool, pool, programs[pool], client, marks)

    try:
        nodes = {
            "prefork": hire("prefork", "-E", "--autoscale", "2,1", worker_pool_restarts=True),
            "threads": hire("threads", "-c", "1"),
            "gevent": hire("gevent", "-c", "1", worker_pool_restarts=True),
            "solo": hire("solo", worker_pool_restarts=True),
        }
        programs["flower"] = Program(
            [sys.executable, "-m", "celery", "-A", APP, "flower",
             "--address=127.0.0.1", f"--port={port}"],
            cwd=tmp_path_factory.mktemp("flower"),
            env={**app_environment(settings), "FLOWER_UNAUTHENTICATED_API": "true"},
        )  # fmt: skip
        for node in nodes.values():
            node.worker.wait_for(READY)
        programs["flower"].wait_for("Visit me at")
        made = Flower(request.param, port, programs["flower"], nodes)
        wait_until(lambda: _is_complete(made), WAIT_S, "Flower to know all workers")
        yield made
    finally:
        client.close()
        for program in programs.values():
            program.kill()


def _is_complete(flower: Flower) -> bool:
    """Whether all workers were heard and have answered; Flower's time-out is short."""
    if len(flower.get("/api/workers", status=1).json) < len(POOLS):
        return False
    known = flower.get("/api/workers").json
    wanted = INSPECTED - TASK_LISTS
    if all(wanted <= set(known.get(node.name, ())) for node in flower.nodes):
        return True
    flower.get("/api/workers", refresh=1)
    return False


@pytest.fixture(params=POOLS)
def node(request: pytest.FixtureRequest, flower: Flower) -> Node:
    return flower.by_pool[request.param]


# -- pages -----------------------------------------------------------------------------------


def test_all_workers_answer_what_flower_asks(flower: Flower) -> None:
    told = flower.get("/api/workers", refresh=1).json
    for node in flower.nodes:
        known = told[node.name]
        assert set(known) - TASK_LISTS == INSPECTED - TASK_LISTS | {"timestamp"}
        assert known["stats"]["pid"] == node.worker.pid
        assert [queue["name"] for queue in known["active_queues"]] == [node.queue]
        assert {"t.add", "t.gate"} <= set(known["registered"])
        assert "result_backend" in known["conf"]
    assert flower.get("/api/workers", status=1).json == {n.name: True for n in flower.nodes}


def test_the_list_of_workers_shows_that_they_are_online(flower: Flower) -> None:
    page = flower.get("/workers").plain
    rows = {row["hostname"]: row for row in flower.get("/workers", json=1).json["data"]}
    for node in flower.nodes:
        assert node.name in page
        row = rows[node.name]
        assert row["status"] is True
        assert row["pid"] == node.worker.pid
        assert row["sw_ident"] == "py-umbel"
        assert len(row["loadavg"]) == 3
        assert row["active"] == 0


def test_the_page_of_a_worker_shows_what_it_has(flower: Flower, node: Node) -> None:
    later = node.send("add", 1, countdown=1_000)
    node.wait_until_known(later.id, "scheduled")
    revoked = f"revoked-{node.marks.name()}"
    node.control("revoke", task_id=revoked)
    with node.busy() as running:
        waiting = []
        if node.pool in (
            "threads",
            "gevent",
        ):  # prefork grows, solo takes nothing while it runs one
            waiting = [node.send("add", 5, kwargs={"y": 6})]
            node.wait_until_known(waiting[0].id, "reserved")
        known = flower.refreshed(node)
        assert set(known) >= INSPECTED
        assert [task["id"] for task in known["active"]] == [running.id]
        assert [task["request"]["id"] for task in known["scheduled"]] == [later.id]
        assert [task["id"] for task in known["reserved"]] == [task.id for task in waiting]
        page = flower.get(f"/worker/{node.name}").plain
    for shown in (running.id, later.id, revoked, *(task.id for task in waiting)):
        assert shown in page
    for shown in ("t.gate", "t.flaky", "result_backend", "Prefetch Count", str(node.worker.pid)):
        assert shown in page
    assert "Umbel.worker.execution.pools" in page  # Flower writes words large
    assert f'id="worker-cancel-consumer-{node.queue}"' in page
    assert 'id="task-timeout-soft-t.sleep"' in page


def test_tasks_are_listed_with_name_state_and_runtime(flower: Flower, node: Node) -> None:
    # Flower asks for the events of tasks every five seconds.
    wait_until(lambda: flower.task(_ran(node)), WAIT_S, "events of tasks")
    good = node.send("add", 20, kwargs={"y": 22})
    bad = node.send("fail", 1)
    known = flower.wait_for_task(good.id, "SUCCESS")
    failed = flower.wait_for_task(bad.id, "FAILURE")
    assert (known["name"], known["worker"], known["result"]) == ("t.add", node.name, "42")
    assert (known["args"], known["kwargs"]) == ("(20,)", "{'y': 22}")
    assert 0 < known["runtime"] < WAIT_S
    assert known["received"] <= known["started"] <= known["succeeded"]
    assert (failed["name"], failed["exception"]) == ("t.fail", "ValueError('bad', 3)")
    assert "Traceback" in failed["traceback"]

    rows = {row["uuid"]: row for row in _table(flower)}
    assert {good.id, bad.id} <= set(rows)
    row = rows[good.id]
    assert (row["name"], row["state"], row["worker"]) == ("t.add", "SUCCESS", node.name)
    assert row["runtime"] == known["runtime"]
    listed = flower.get("/api/tasks", workername=node.name, taskname="t.fail").json
    assert listed[bad.id]["state"] == "FAILURE"
    page = flower.get(f"/task/{good.id}").plain
    for shown in (good.id, "t.add", "SUCCESS", node.name, "42"):
        assert shown in page
    page = flower.get(f"/task/{bad.id}").plain
    assert "ValueError('bad', 3)" in page
    assert flower.get("/tasks").status == 200


def _ran(node: Node) -> str:
    sent = node.send("add", 1)
    sent.get(timeout=WAIT_S)
    return str(sent.id)


def _table(flower: Flower) -> list[dict[str, Any]]:
    """What the page of tasks asks for when it is opened."""
    query = {"draw": 1, "start": 0, "length": 1000, "search[value]": "", "order[0][column]": 0,
             "columns[0][data]": "name", "order[0][dir]": "asc"}  # fmt: skip
    return list(flower.get("/tasks/datatable", **query).json["data"])


def test_tasks_can_be_looked_for(flower: Flower) -> None:
    node = flower.prefork
    sent = node.send("size", "needle")
    flower.wait_for_task(sent.id, "SUCCESS")
    query = {"draw": 1, "start": 0, "length": 10, "order[0][column]": 0, "columns[0][data]": "name"}
    for search in ("needle", "state:SUCCESS needle", f"{sent.id}"):
        found = flower.get("/tasks/datatable", **query, **{"search[value]": search}).json
        assert [row["uuid"] for row in found["data"]] == [sent.id], search


def test_a_task_that_is_sent_by_flower_runs(flower: Flower, node: Node) -> None:
    url = f"http://127.0.0.1:{flower.port}/api/task/apply/t.add"
    body = json.dumps({"args": [3, 4], "queue": node.queue, "timeout": WAIT_S}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=WAIT_S) as answer:
        told = json.load(answer)
    assert (told["state"], told["result"]) == ("SUCCESS", 7)
    kept = flower.get(f"/api/task/result/{told['task-id']}").json
    assert (kept["state"], kept["result"]) == ("SUCCESS", 7)


def test_the_page_of_the_broker_shows_the_queues_of_our_workers(flower: Flower) -> None:
    page = flower.get("/broker").plain
    if flower.broker == "redis":  # RabbitMQ would tell through its management plugin
        assert all(node.queue in page for node in flower.nodes)
        lengths = flower.get("/api/queues/length").json["active_queues"]
        assert {"name": "threads", "messages": 0} in lengths


def test_metrics_tell_of_our_workers_and_tasks(flower: Flower) -> None:
    sent = flower.prefork.send("echo", 1)
    flower.wait_for_task(sent.id, "SUCCESS")
    page = flower.get("/metrics").plain
    for node in flower.nodes:
        assert f'flower_worker_online{{worker="{node.name}"}} 1.0' in page
        assert f'worker_number_of_currently_executing_tasks{{worker="{node.name}"}}' in page
    labels = 'task="t.echo",type="task-succeeded",worker="prefork@test"'
    assert f"flower_events_total{{{labels}}} 1.0" in page
    assert 'flower_task_runtime_seconds_count{task="t.echo",worker="prefork@test"} 1.0' in page


# -- buttons ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_the_pool_is_grown_and_shrunk(flower: Flower, pool: str) -> None:
    node = flower.by_pool[pool]
    pressed = flower.press(f"/worker/pool/grow/{node.name}", n=2)
    assert pressed.json == {"message": f"Growing '{node.name}' worker's pool by 2"}
    with node.busy(), node.busy(), node.busy():
        assert flower.refreshed(node)["stats"]["pool"]["max-concurrency"] == 3
    pressed = flower.press(f"/worker/pool/shrink/{node.name}", n=2)
    assert pressed.json == {"message": f"Shrinking '{node.name}' worker's pool by 2"}
    assert flower.refreshed(node)["stats"]["pool"]["max-concurrency"] == 1
    pressed = flower.press(f"/worker/pool/shrink/{node.name}", n=5)
    assert pressed.status == 403
    assert "at least one must stay" in pressed.text


def test_a_pool_of_one_says_that_it_can_not_grow(flower: Flower) -> None:
    name = flower.by_pool["solo"].name
    for button in ("grow", "shrink"):
        pressed = flower.press(f"/worker/pool/{button}/{name}", n=1)
        assert pressed.status == 403
        assert "solo" in pressed.text


def test_the_autoscaler_is_set(flower: Flower) -> None:
    node = flower.prefork
    pressed = flower.press(f"/worker/pool/autoscale/{node.name}", min=2, max=3)
    assert pressed.json == {"message": f"Autoscaling '{node.name}' worker (min=2, max=3)"}
    stats = flower.refreshed(node)["stats"]
    assert (stats["autoscaler"]["min"], stats["autoscaler"]["max"]) == (2, 3)
    assert stats["pool"]["max-concurrency"] == 2
    assert flower.press(f"/worker/pool/grow/{node.name}").status == 403
    assert flower.press(f"/worker/pool/autoscale/{node.name}", min=1, max=2).status == 200
    for other in set(flower.nodes) - {node}:
        pressed = flower.press(f"/worker/pool/autoscale/{other.name}", min=2, max=3)
        assert pressed.status == 403
        assert "Autoscale not enabled" in pressed.text


@pytest.mark.parametrize("pool", ["gevent", "solo"])
def test_a_pool_without_processes_is_restarted(flower: Flower, pool: str) -> None:
    node = flower.by_pool[pool]
    pressed = flower.press(f"/worker/pool/restart/{node.name}")
    assert pressed.json == {"message": f"Restarting '{node.name}' worker's pool"}
    assert node.send("add", 1, 2).get(timeout=WAIT_S) == 3


def test_the_pool_is_restarted(flower: Flower) -> None:
    node = flower.prefork
    before = set(flower.refreshed(node)["stats"]["pool"]["processes"])
    pressed = flower.press(f"/worker/pool/restart/{node.name}")
    assert pressed.json == {"message": f"Restarting '{node.name}' worker's pool"}
    wait_until(
        lambda: not before & set(flower.refreshed(node)["stats"]["pool"]["processes"]),
        WAIT_S,
        "other processes",
    )
    pressed = flower.press(f"/worker/pool/restart/{flower.by_pool['threads'].name}")
    assert pressed.status == 403
    assert "Pool restarts not enabled" in pressed.text


def test_a_queue_is_added_and_cancelled(flower: Flower, node: Node) -> None:
    queue = f"{node.queue}-more"
    pressed = flower.press(f"/worker/queue/add-consumer/{node.name}", queue=queue)
    assert pressed.json == {"message": f"add consumer {queue}"}
    assert node.send("add", 1, 2, queue=queue).get(timeout=WAIT_S) == 3
    queues = flower.refreshed(node)["active_queues"]
    assert [one["name"] for one in queues] == [node.queue, queue]
    pressed = flower.press(f"/worker/queue/cancel-consumer/{node.name}", queue=queue)
    assert pressed.json == {"message": f"no longer consuming from {queue}"}
    assert [one["name"] for one in flower.refreshed(node)["active_queues"]] == [node.queue]


def test_a_rate_limit_is_set(flower: Flower, node: Node) -> None:
    pressed = flower.press("/task/rate-limit/t.now", workername=node.name, ratelimit="7/m")
    assert pressed.json == {"message": "new rate limit set successfully"}
    assert "t.now [rate_limit=7/m]" in flower.refreshed(node)["registered"]
    pressed = flower.press("/task/rate-limit/t.now", workername=node.name, ratelimit="0")
    assert pressed.status == 200
    for sent in [node.send("now") for _ in range(3)]:
        sent.get(timeout=WAIT_S)
    pressed = flower.press("/task/rate-limit/t.now", workername=node.name, ratelimit="often")
    assert pressed.status == 403
    assert "Invalid rate limit string" in pressed.text


def test_time_limits_are_set(flower: Flower, node: Node) -> None:
    pressed = flower.press("/task/timeout/t.sleep", workername=node.name, soft=0.2)
    assert pressed.json == {"message": "time limits set successfully"}
    with pytest.raises(billiard.exceptions.SoftTimeLimitExceeded):
        node.send("sleep", 60).get(timeout=WAIT_S)
    pressed = flower.press("/task/timeout/t.sleep", workername=node.name, hard=0.2)
    assert pressed.status == 200
    with pytest.raises(billiard.exceptions.TimeLimitExceeded):
        node.send("sleep", 60).get(timeout=WAIT_S)
    assert flower.press("/task/timeout/t.sleep", workername=node.name).status == 200


@pytest.mark.parametrize("pool", ["threads", "gevent", "solo"])
def test_a_waiting_task_is_revoked(flower: Flower, pool: str) -> None:
    node = flower.by_pool[pool]
    with node.busy():
        waiting = node.send("mark", kwargs={"mark": node.marks.name()})
        if pool != "solo":  # there it is still in the queue
            node.wait_until_known(waiting.id, "reserved")
        pressed = flower.press(f"/task/revoke/{waiting.id}")
        assert pressed.json == {"message": f"Revoked '{waiting.id}'"}
        assert revoked_for(waiting) == "revoked"
    flower.wait_for_task(waiting.id, "REVOKED")
    assert waiting.id in flower.refreshed(node)["revoked"]


def test_a_running_task_is_terminated(flower: Flower, node: Node) -> None:
    running = node.send("sleep", 60)
    flower.wait_for_task(running.id, "STARTED")
    pressed = flower.press(f"/task/revoke/{running.id}", terminate="true", signal="SIGKILL")
    assert pressed.json == {"message": f"Revoked '{running.id}'"}
    assert revoked_for(running) in {"terminated", "revoked"}  # the other worker says this
    flower.wait_for_task(running.id, "REVOKED")
    wait_until(lambda: not node.inspect("active"), WAIT_S, "its end")


def test_a_task_is_aborted(flower: Flower, node: Node) -> None:
    with node.busy() as running:
        assert flower.press(f"/task/abort/{running.id}").status == 200
        assert flower.get(f"/api/task/result/{running.id}").json["state"] == "ABORTED"


def test_no_page_has_failed(flower: Flower) -> None:
    """Flower logs what it could not show; what is refused on purpose is no traceback."""
    assert "Traceback" not in flower.program.output
    assert "Failed to extract error reason" not in flower.program.output


def test_workers_are_shut_down(flower: Flower) -> None:
    for node in flower.nodes:
        pressed = flower.press(f"/worker/shutdown/{node.name}")
        assert pressed.json == {"message": "Shutting down!"}
    assert [node.worker.wait() for node in flower.nodes] == [0] * len(POOLS)
    wait_until(
        lambda: not any(flower.get("/api/workers", status=1).json.values()), WAIT_S, "good-byes"
    )
