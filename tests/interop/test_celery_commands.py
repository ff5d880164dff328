"""Celery's own `inspect`, `control` and `status` against our workers: every command, every pool.

One cluster per broker, with a worker of each pool on a queue of its own; it serves all tests. The
programs talk to all of its workers at once. What a command *does* is looked at worker by worker,
with Celery's control API in this process. The last test ends the workers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import permutations
from pathlib import Path
from typing import Any

import billiard.exceptions
import pytest
from celery.worker.control import Panel

from tests.ears import Ears
from tests.interop import reply_shapes as shapes
from tests.interop.celery_shell import APP, CeleryShell, app_environment
from tests.interop.nodes import WAIT_S, Node, marks_url, revoked_for, start
from tests.interop.peers import CELERY, UMBEL, Client, Marks
from tests.interop.reply_shapes import error, misfits, ok
from tests.servers import RedisServer, wait_until
from tests.workers import READY, Program, program_environment

POOLS = ("prefork", "threads", "gevent", "solo")
UNAVAILABLE = 69
LATER_S = 1_000.0
HOUR = "1/h"
PASSWORD = "guest:guest"


@dataclass(frozen=True)
class Cluster:
    """The workers on one broker."""

    broker: str
    settings: dict[str, Any]
    nodes: dict[str, Node]
    scaled: Node  # whose pool may be restarted, and is sized by the autoscaler
    client: Client
    celery: CeleryShell

    def run(self, *arguments: str, to: list[Node] | None = None) -> Any:
        """A command line of Celery's, `--json`; what each node answered."""
        names = [node.name for node in (self.nodes.values() if to is None else to)]
        options = ["--json", "--timeout", f"{WAIT_S}", "--destination", ",".join(names)]
        answer = self.celery(arguments[0], *options, *arguments[1:]).json
        if isinstance(answer, list):  # of `control`
            answer = {name: reply for one in answer for name, reply in one.items()}
        assert sorted(answer) == sorted(names)
        return answer


@pytest.fixture(scope="module", params=["redis", "amqp"])
def cluster(
    request: pytest.FixtureRequest,
    own_redis: RedisServer,
    marks: Marks,
    new_settings: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    settings = new_settings(request.param)
    client = Client(CELERY, **settings)
    shell = CeleryShell(settings, tmp_path_factory.mktemp("celery"))
    programs: dict[str, Program] = {}

    def hire(name: str, pool: str, more: dict[str, Any], *arguments: str) -> Node:
        programs[name] = start(
            UMBEL,
            {**settings, **more},
            marks_url(own_redis),
            tmp_path_factory.mktemp("worker"),
            *("-P", pool, "-n", f"{name}@test", "-Q", name, *arguments),
        )
        return Node(f"{name}@test", pool, name, programs[name], client, marks)

    try:
        nodes = {pool: hire(pool, pool, {}, "-c", "1") for pool in POOLS}
        several = {"broker_url": [settings["broker_url"]] * 2, "worker_pool_restarts": True}
        scaled = hire("scaled", "prefork", several, "--autoscale", "3,1")
        for program in programs.values():
            program.wait_for(READY)
        yield Cluster(request.param, settings, nodes, scaled, client, shell)
    finally:
        shell.close()
        client.close()
        for program in programs.values():
            program.kill()


@pytest.fixture(params=POOLS)
def node(request: pytest.FixtureRequest, cluster: Cluster) -> Node:
    return cluster.nodes[request.param]


# -- looking ---------------------------------------------------------------------------------


def inspections(pool: str, tasks: list[str]) -> dict[str, tuple[list[str], Any]]:
    """Every `inspect` command: its arguments on the command line, and the shape of its answer."""
    arguments = {"query_task": tasks, "conf": ["yes"], "memdump": ["3"]}
    table = {**shapes.INSPECT, "stats": shapes.stats(pool)}
    return {name: (arguments.get(name, []), shape) for name, shape in table.items()}


@contextmanager
def occupied(node: Node) -> Iterator[list[str]]:
    """One task runs, one waits, one is scheduled and one revoked; their ids."""
    revoked = f"revoked-{node.marks.name()}"
    later = node.send("add", 3, countdown=LATER_S)
    node.wait_until_known(later.id, "scheduled")
    with node.busy() as running:
        waiting = node.send("add", 1, kwargs={"y": 2})
        if node.pool != "solo":  # which takes nothing while it runs a task
            node.wait_until_known(waiting.id, "reserved")
        node.control("revoke", task_id=revoked)
        yield [running.id, waiting.id, later.id, revoked]


def names_of(kind: str) -> set[str]:
    """The commands that Celery's programs know."""
    return {name for name, meta in Panel.meta.items() if meta.type == kind and meta.visible}


def test_every_inspect_command_is_answered_in_celerys_shape(cluster: Cluster) -> None:
    wrong: list[str] = []
    with ExitStack() as stack:
        tasks = [task for n in cluster.nodes.values() for task in stack.enter_context(occupied(n))]
        asked = {pool: inspections(pool, tasks) for pool in POOLS}
        assert set(asked["solo"]) == names_of("inspect")
        for command, (arguments, _) in asked["solo"].items():
            replies = cluster.run("inspect", command, *arguments)
            for pool, node in cluster.nodes.items():
                shape = asked[pool][command][1]
                wrong += misfits(replies[node.name], shape, f"{node.name} {command}")
    assert not wrong


def test_the_shapes_are_those_of_a_celery_worker(
    cluster: Cluster, own_redis: RedisServer, marks: Marks, tmp_path: Path
) -> None:
    """The table is checked too; and the worker takes over what ours know to be revoked."""
    revoked = f"revoked-{marks.name()}"
    cluster.nodes["threads"].control("revoke", task_id=revoked)
    arguments = ("-P", "prefork", "-c", "1", "-n", "celery@test", "-Q", CELERY, "--without-gossip")
    with start(CELERY, cluster.settings, marks_url(own_redis), tmp_path, *arguments) as worker:
        worker.wait_for(READY)
        node = Node("celery@test", "prefork", CELERY, worker, cluster.client, marks)
        # On Redis it is ready a moment before it hears.
        asked = cluster.client.app.control.inspect(destination=[node.name], timeout=0.2)
        wait_until(asked.ping, WAIT_S, "an answer of the Celery worker")
        wrong: list[str] = []
        with occupied(node) as tasks:
            for command, (more, shape) in inspections("prefork", tasks).items():
                reply = cluster.run("inspect", command, *more, to=[node])[node.name]
                wrong += misfits(reply, shape, command)
        assert not wrong
        assert "mingle: sync with 5 nodes" in worker.output
        assert revoked in node.inspect("revoked")


def test_status_prints_every_node(cluster: Cluster, tmp_path: Path) -> None:
    """The program as a shell starts it, from its own file."""
    program = Path(sys.executable).parent / "celery"
    environment = program_environment(tmp_path) | app_environment(cluster.settings)
    names = {node.name for node in (*cluster.nodes.values(), cluster.scaled)}
    ran = subprocess.run(
        [program, "-A", APP, "status", "-t", "2"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran
    assert all(f"{name}: OK" in ran.stdout for name in names), ran
    assert f"{len(names)} nodes online." in ran.stdout


def test_inspect_prints_tables_of_tasks(cluster: Cluster) -> None:
    node = cluster.nodes["threads"]
    with node.busy() as running:
        ran = cluster.celery("inspect", "active", "-d", node.name, "-t", f"{WAIT_S}")
    assert ran.code == 0
    assert f"->  {node.name}: OK\n    * " in ran.output
    assert running.id in ran.output
    assert "1 node online." in ran.output


def test_inspect_tells_what_runs_and_what_waits(node: Node) -> None:
    with occupied(node) as (running, waiting, later, revoked):
        (active,) = node.inspect("active")
        (scheduled,) = [one for one in node.inspect("scheduled") if one["request"]["id"] == later]
        states = node.inspect("query_task", running, waiting, later, "unknown")
        if node.pool != "solo":
            (reserved,) = node.inspect("reserved")
            assert (reserved["id"], reserved["args"], reserved["kwargs"]) == (
                waiting,
                [1],
                {"y": 2},
            )
            assert (reserved["time_start"], reserved["worker_pid"]) == (None, None)
            assert reserved["acknowledged"] is False
            assert states.pop(waiting) == ["reserved", reserved]
        assert (active["id"], active["name"], active["type"]) == (running, "t.gate", "t.gate")
        assert active["acknowledged"] is True
        assert active["hostname"] == node.name
        assert active["delivery_info"]["routing_key"] == node.queue
        assert abs(time.time() - active["time_start"]) < WAIT_S
        assert (active["worker_pid"] == node.worker.pid) == (node.pool != "prefork")
        (safe,) = node.inspect("active", safe=True)
        assert (safe["args"], safe["kwargs"]) == (f"({active['args'][0]!r},)", "{}")
        left_s = datetime.fromisoformat(scheduled["eta"]).timestamp() - time.time()
        assert LATER_S - WAIT_S < left_s < LATER_S
        assert {task: state for task, (state, _) in states.items()} == {
            running: "active", later: "scheduled",
        }  # fmt: skip
        assert revoked in node.inspect("revoked")


def test_inspect_tells_of_the_worker_itself(node: Node, cluster: Cluster) -> None:
    before = node.inspect("stats")
    clock = node.inspect("clock")["clock"]
    node.send("echo").get(timeout=WAIT_S)
    after = node.inspect("stats")
    assert after["total"]["t.echo"] == before["total"].get("t.echo", 0) + 1
    assert after["pid"] == node.worker.pid
    assert int(after["clock"]) > clock >= int(before["clock"])
    assert after["pool"]["max-concurrency"] == 1
    assert after["pool"]["implementation"].endswith(f"{node.pool.capitalize()}Pool")
    assert after["broker"]["transport"] == {"redis": "redis", "amqp": "amqp"}[cluster.broker]
    assert [queue["name"] for queue in node.inspect("active_queues")] == [node.queue]
    registered = node.inspect("registered")
    assert registered == sorted(registered)
    assert {"t.add", "t.gate"} <= set(registered)
    assert not [name for name in registered if name.startswith("celery.")]
    assert "t.auto [max_retries=3]" in node.inspect("registered", "max_retries", "__module__")
    assert node.inspect("conf")["result_backend"] == cluster.settings["result_backend"]
    assert "task_serializer" not in node.inspect("conf")
    assert node.inspect("conf", with_defaults=True)["task_serializer"] == "json"
    assert "umbel" in node.inspect("report")["ok"]
    samples = len(node.inspect("memdump", samples=1000).splitlines())
    node.inspect("memsample")
    assert len(node.inspect("memdump", samples=1000).splitlines()) == samples + 2


def test_nodes_are_chosen_by_pattern(cluster: Cluster) -> None:
    asked = cluster.client.app.control.inspect(
        timeout=WAIT_S, limit=1, pattern="s[ao]lo@*", matcher="glob"
    )
    assert asked.ping() == {"solo@test": {"ok": "pong"}}
    asked = cluster.client.app.control.inspect(
        timeout=WAIT_S, limit=2, pattern="(solo|gevent)@.+", matcher="pcre"
    )
    assert sorted(asked.ping()) == ["gevent@test", "solo@test"]


def test_answers_hold_no_password(cluster: Cluster) -> None:
    """One worker has several addresses of the broker, all of them with a password."""
    told = json.dumps(
        [
            cluster.run("inspect", command, to=[cluster.scaled])
            for command in ("stats", "conf", "report")
        ]
    )
    assert "alternates" in told
    assert PASSWORD not in told


# -- telling ---------------------------------------------------------------------------------


def controls(node: Node) -> dict[str, list[tuple[list[str], Any]]]:
    """Every `control` command but `shutdown`: arguments on the command line, and the answer."""
    solo = node.pool == "solo"
    sizeless = error(r"ValueError\(.*solo.*\)")
    return {
        "add_consumer": [(["extra"], ok("add consumer extra")),
                         (["other", "away", "topic", "key.#"], ok("add consumer other"))],
        "cancel_consumer": [(["extra"], ok("no longer consuming from extra")),
                            (["other"], ok("no longer consuming from other")),
                            (["unheard-of"], ok("no longer consuming from unheard-of"))],
        "autoscale": [(["4", "2"], error(r"ValueError\('Autoscale not enabled'\)"))],
        "disable_events": [([], ok("task events already disabled"))],
        "enable_events": [([], ok("task events enabled")), ([], ok("task events already enabled"))],
        "heartbeat": [([], None)],
        "pool_grow": [(["2"], sizeless if solo else ok("pool will grow"))],
        "pool_shrink": [(["2"], error(r"ValueError\(.*\)") if solo else ok("pool will shrink")),
                        (["50"], error(r"ValueError\(.*at least one must stay.*\)"))],
        "pool_restart": [([], error(r"ValueError\('Pool restarts not enabled'\)"))],
        "rate_limit": [(["t.size", "10/m"], ok("new rate limit set successfully")),
                       (["t.size", "often"], error("Invalid rate limit string: .*")),
                       (["t.size", ""], ok("rate limit disabled successfully")),
                       (["t.none", "1/s"], error("unknown task"))],
        "time_limit": [(["t.size", "5", "10"], ok("time limits set successfully")),
                       (["t.size", "5.5"], ok("time limits set successfully")),
                       (["t.size", "0", "0"], ok("time limits set successfully")),
                       (["t.none", "5"], error("unknown task"))],
        "revoke": [(["a"], ok(r"tasks \{'a'\} flagged as revoked")),
                   (["a", "b"], ok(r"tasks \{'[ab]', '[ab]'\} flagged as revoked"))],
        "terminate": [(["SIGKILL", "a", "b"], ok("terminate: tasks unknown")),
                      (["SIGNONE", "a"], error(r".*SIGNONE.*"))],
        "revoke_by_stamped_headers": [
            (["k=v", "l=w"],
             ok(r"headers \{'k': 'v', 'l': 'w'\} flagged as revoked, but not terminated"))],
        "election": [([], (None, error(".+")))],  # without an id there is nothing to decide
    }  # fmt: skip


def test_every_control_command_is_answered_in_celerys_words(cluster: Cluster) -> None:
    asked = {name: controls(node) for name, node in cluster.nodes.items()}
    assert set(asked["solo"]) | {"shutdown"} == names_of("control")
    wrong: list[str] = []
    for command, calls in asked["solo"].items():
        for number, (arguments, _) in enumerate(calls):
            replies = cluster.run("control", command, *arguments)
            for name, node in cluster.nodes.items():
                shape = asked[name][command][number][1]
                wrong += misfits(replies[node.name], shape, f"{name} {command} {arguments}")
    cluster.run("control", "disable_events")
    assert not wrong


def test_a_worker_consumes_another_queue_while_it_is_told_to(node: Node) -> None:
    queue = f"{node.queue}-more"
    assert node.control("add_consumer", queue=queue) == {"ok": f"add consumer {queue}"}
    assert [one["name"] for one in node.inspect("active_queues")] == [node.queue, queue]
    assert node.send("add", 1, 2, queue=queue).get(timeout=WAIT_S) == 3

    told = node.control("cancel_consumer", queue=queue)
    assert told == {"ok": f"no longer consuming from {queue}"}
    assert [one["name"] for one in node.inspect("active_queues")] == [node.queue]
    left = node.send("add", 1, 2, queue=queue)
    assert node.send("add", 2, 3).get(timeout=WAIT_S) == 5
    assert left.state == "PENDING"
    node.control("add_consumer", queue=queue)
    assert left.get(timeout=WAIT_S) == 3
    node.control("cancel_consumer", queue=queue)


def test_the_last_queue_can_be_cancelled_too(node: Node) -> None:
    node.control("cancel_consumer", queue=node.queue)
    assert node.inspect("active_queues") == []
    sent = node.send("add", 4, 5)
    node.control("add_consumer", queue=node.queue)
    assert sent.get(timeout=WAIT_S) == 9


def test_a_queue_that_can_not_be_declared_is_refused_and_does_no_harm(node: Node) -> None:
    """RabbitMQ closes the channel over an exchange that exists as another type."""
    control = {"queue": f"{node.queue}-wrong", "exchange": "celeryev", "exchange_type": "direct"}
    reply = node.control("add_consumer", **control)
    if node.client.app.conf.broker_url.startswith("amqp"):
        assert not misfits(reply, error(r".*PRECONDITION_FAILED.*"))
        assert [one["name"] for one in node.inspect("active_queues")] == [node.queue]
    assert node.send("add", 4, 5).get(timeout=WAIT_S) == 9
    node.control("cancel_consumer", queue=control["queue"])


def test_a_rate_limit_holds_from_now_on(node: Node) -> None:
    assert node.control("rate_limit", task_name="t.now", rate_limit=HOUR) == {
        "ok": "new rate limit set successfully"
    }
    assert f"t.now [rate_limit={HOUR}]" in node.inspect("registered")
    first, second = node.send("now"), node.send("now")
    first.get(timeout=WAIT_S)
    node.wait_until_known(second.id, "reserved")
    assert node.send("add", 1, 1).get(timeout=WAIT_S) == 2
    assert not second.ready()

    node.control("rate_limit", task_name="t.now", rate_limit=0)
    second.get(timeout=WAIT_S)


def test_a_time_limit_holds_from_now_on(node: Node) -> None:
    node.control("time_limit", task_name="t.sleep", soft=0.1, hard=60)
    soft = node.send("sleep", 60)
    with pytest.raises(billiard.exceptions.SoftTimeLimitExceeded):
        soft.get(timeout=WAIT_S)
    node.control("time_limit", task_name="t.sleep", hard=0.1)
    hard = node.send("sleep", 60)
    with pytest.raises(billiard.exceptions.TimeLimitExceeded):
        hard.get(timeout=WAIT_S)
    node.control("time_limit", task_name="t.sleep", soft=0, hard=0)  # all that a program can say
    assert node.send("sleep", 0.3).get(timeout=WAIT_S) == "slept"


def test_a_revoked_task_does_not_run(node: Node) -> None:
    marks, mark = node.marks, node.marks.name()
    with node.busy():
        waiting = [node.send("mark", kwargs={"mark": mark}) for _ in range(3)]
        if node.pool != "solo":
            node.wait_until_known(waiting[2].id, "reserved")
        ids = [result.id for result in waiting]
        told = node.control("revoke", task_id=ids[:2])
        shown = {f"tasks {{'{a}', '{b}'}} flagged as revoked" for a, b in permutations(ids[:2])}
        assert told["ok"] in shown
        # Before their turn comes.
        assert [revoked_for(result) for result in waiting[:2]] == ["revoked", "revoked"]
    waiting[2].get(timeout=WAIT_S)
    assert [one["id"] for one in marks.all(mark)] == [ids[2]]
    assert set(ids[:2]) <= set(node.inspect("revoked"))


def test_tasks_that_are_not_due_are_revoked(cluster: Cluster, marks: Marks) -> None:
    mark, nodes = marks.name(), cluster.nodes.values()
    later = [node.send("mark", kwargs={"mark": mark}, countdown=1.5) for node in nodes]
    for node, sent in zip(nodes, later, strict=True):
        node.wait_until_known(sent.id, "scheduled")
    after = [node.send("echo", countdown=1.5) for node in nodes]
    for sent in later:
        cluster.client.app.control.revoke(sent.id)  # nobody waits for an answer
    assert [revoked_for(sent) for sent in later] == ["revoked"] * len(later)
    for sent in after:
        sent.get(timeout=WAIT_S)
    assert marks.count(mark) == 0


def test_a_running_task_is_terminated(node: Node) -> None:
    with Ears(node.client.app.conf.broker_url) as ears:
        node.control("enable_events")
        running = node.send("sleep", 60)
        node.wait_until_known(running.id, "active")
        told = node.control("terminate", signal="SIGKILL", task_id=running.id)
        assert told == {"ok": f"terminate: {running.id}"}
        assert revoked_for(running) == "terminated"
        (event,) = ears.wait_for("task-revoked", uuid=running.id)
        assert (event["terminated"], event["expired"], event["signum"]) == (True, False, 9)
        node.control("disable_events")
    assert node.send("add", 1, 2).get(timeout=WAIT_S) == 3


def test_a_task_is_terminated_wherever_it_is_on_its_way(node: Node) -> None:
    """In the queue, taken, handed to the pool, or running: in none of these does it get away."""
    for number in range(24):
        task_id = f"{node.queue}-{number}-{node.marks.name()}"
        sent = node.send("sleep", 60, task_id=task_id)
        for _ in range(number % 4):  # a moment later each
            node.inspect("ping")
        node.client.app.control.revoke(task_id, terminate=True)
        assert revoked_for(sent) in {"revoked", "terminated"}
    wait_until(lambda: not node.inspect("active"), WAIT_S, "an idle worker")


def test_tasks_are_revoked_by_their_stamps(node: Node) -> None:
    mark, customer = node.marks.name(), node.marks.name()

    def stamped(task: str, *args: Any, **kwargs: Any) -> Any:
        signature = node.client.s(task, *args, **kwargs)
        signature.stamp(customer=customer)
        return signature.apply_async(queue=node.queue)

    running = stamped("sleep", 60)
    node.wait_until_known(running.id, "active")
    waiting = stamped("mark", mark=mark)
    other = {"unlike": "any"}
    told = node.control("revoke_by_stamped_headers", headers=other, terminate=True)
    assert told == {"ok": f"headers {other} were not terminated"}
    given = {"customer": customer}
    told = node.control("revoke_by_stamped_headers", headers=given)
    assert told == {"ok": f"headers {given} flagged as revoked, but not terminated"}
    assert node.inspect("query_task", running.id)[running.id][0] == "active"
    told = node.control("revoke_by_stamped_headers", headers=other, terminate=True)
    assert told == {"ok": f"headers {other} were not terminated"}
    told = node.control("revoke_by_stamped_headers", headers=given, terminate=True)
    assert not misfits(told, ok(rf"headers .*customer.*{customer}.* revoked"))
    assert [revoked_for(running), revoked_for(waiting)] == ["terminated", "revoked"]
    assert node.marks.count(mark) == 0


def test_task_events_are_switched_on_and_off(node: Node) -> None:
    with Ears(node.client.app.conf.broker_url) as ears:
        told = node.control("enable_events")
        first = node.send("add", 1, 1)
        first.get(timeout=WAIT_S)
        ears.wait_for("task-succeeded", uuid=first.id)
        assert told == {"ok": "task events enabled"}
        assert node.control("disable_events") == {"ok": "task events disabled"}
        silent = node.send("add", 2, 2)
        silent.get(timeout=WAIT_S)
        assert node.control("disable_events") == {"ok": "task events already disabled"}
        node.control("enable_events")
        last = node.send("add", 3, 3)
        ears.wait_for("task-succeeded", uuid=last.id)
        assert not [event for event in ears.events if event.get("uuid") == silent.id]
        node.control("disable_events")


def test_a_heartbeat_is_sent_when_it_is_asked_for(node: Node) -> None:
    with Ears(node.client.app.conf.broker_url, routing_key="worker.heartbeat") as ears:
        count = 10  # more than come by themselves
        for _ in range(count):
            assert node.control("heartbeat") is None
        ears.wait_for("worker-heartbeat", count, hostname=node.name)


def test_a_pool_grows_and_shrinks(node: Node) -> None:
    if node.pool == "solo":
        pytest.skip("runs one task at a time by nature")
    window = node.inspect("stats")["prefetch_count"]
    with node.busy():
        assert node.control("pool_grow", n=1) == {"ok": "pool will grow"}
        with node.busy():
            assert len(node.inspect("active")) == 2
            stats = node.inspect("stats")
            assert stats["pool"]["max-concurrency"] == 2
            assert stats["prefetch_count"] > window
            assert node.control("pool_shrink", n=1) == {"ok": "pool will shrink"}
    stats = node.inspect("stats")
    assert (stats["pool"]["max-concurrency"], stats["prefetch_count"]) == (1, window)
    if node.pool == "prefork":
        wait_until(
            lambda: len(node.inspect("stats")["pool"]["processes"]) == 1, WAIT_S, "one child"
        )
    with node.busy():
        waiting = node.send("add", 1, 1)
        node.wait_until_known(waiting.id, "reserved")
    assert waiting.get(timeout=WAIT_S) == 2


def test_a_command_that_fails_keeps_no_other_from_being_answered(node: Node) -> None:
    for _ in range(5):
        assert not misfits(node.control("no_such_command"), error(r"KeyError\('no_such_command'\)"))
        assert not misfits(node.control("ping", unforeseen=1), {"ok": "pong"})
        assert not misfits(node.control("pool_grow", n="many"), error(r"ValueError\(.*many.*\)"))
    assert node.inspect("ping") == {"ok": "pong"}
    assert node.send("add", 1, 2).get(timeout=WAIT_S) == 3


# -- a worker that is sized by the autoscaler, and whose pool may be restarted ---------------


def test_the_autoscaler_is_told_its_bounds(cluster: Cluster) -> None:
    scaled = cluster.scaled
    told = cluster.run("control", "autoscale", "4", "2", to=[scaled])
    assert told == {scaled.name: {"ok": "autoscale now max=4 min=2"}}
    stats = scaled.inspect("stats")
    assert not misfits(stats["autoscaler"], shapes.AUTOSCALER)
    assert (stats["autoscaler"]["max"], stats["autoscaler"]["min"]) == (4, 2)
    assert stats["pool"]["max-concurrency"] == 2
    told = cluster.run("control", "autoscale", "1", "1", to=[scaled])
    assert told == {scaled.name: {"ok": "autoscale now max=1 min=1"}}
    assert scaled.inspect("stats")["pool"]["max-concurrency"] == 1
    told = cluster.run("control", "autoscale", "3", "0", to=[scaled])
    assert told == {scaled.name: {"ok": "autoscale now max=3 min=1"}}  # one is the least there is
    for command in ("pool_grow", "pool_shrink"):
        reply = cluster.run("control", command, "1", to=[scaled])[scaled.name]
        assert not misfits(reply, error(".*autoscale.*"))


def test_the_autoscaler_follows_the_work(cluster: Cluster) -> None:
    scaled = cluster.scaled
    scaled.control("autoscale", max=3, min=1)
    with scaled.busy(), scaled.busy(), scaled.busy():
        assert scaled.inspect("stats")["autoscaler"]["current"] == 3


def test_a_pool_is_restarted(cluster: Cluster) -> None:
    scaled = cluster.scaled
    before = set(scaled.inspect("stats")["pool"]["processes"])
    told = cluster.run("control", "pool_restart", to=[scaled])
    assert told == {scaled.name: {"ok": "reload started"}}
    wait_until(
        lambda: not before & set(scaled.inspect("stats")["pool"]["processes"]),
        WAIT_S,
        "other processes",
    )
    assert scaled.send("add", 1, 2).get(timeout=WAIT_S) == 3


# -- the end -----------------------------------------------------------------------------------


def test_shutdown_ends_workers_when_their_tasks_have_ended(cluster: Cluster) -> None:
    nodes = [*cluster.nodes.values(), cluster.scaled]
    names = ",".join(node.name for node in nodes)
    mark = cluster.scaled.marks.name()
    running = [node.send("gate", mark) for node in nodes]
    for _ in nodes:
        cluster.scaled.marks.wait(f"{mark}:reached")
    ran = cluster.celery("control", "shutdown", "-d", names, "-t", "0.2")
    assert ran.code == UNAVAILABLE  # shutdown is not answered
    for node in nodes:
        if node.pool != "solo":  # whose loop stands still
            node.worker.wait_for("warm shutdown")
    for _ in nodes:
        cluster.scaled.marks.open(mark)
    assert [result.get(timeout=WAIT_S) for result in running] == ["through"] * len(nodes)
    assert [node.worker.wait() for node in nodes] == [0] * len(nodes)
