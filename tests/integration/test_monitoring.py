"""What users see stays right under load: no false alarm, and every true one.

A cluster of prefork workers does everything that once made monitors lie: tasks that report progress
from pool processes, retries, failures, children, `task_send_sent_event`, elections, and a worker
that is killed. Meanwhile a recorder writes the log, a dashboard listens, and it is asked all the
time; `umbel status` is asked now and then. At the end Spark builds the tables. Everywhere exactly
one worker is lost, the killed one, with the tasks that it ran, and nothing else is wrong.

Some seconds on Redis; `make soak` does it for ten minutes on both brokers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.servers import free_port, wait_until
from tests.sites import APP, QUEUE, Site
from tests.sizes import FULL, size
from tests.workers import Program, WorkerProcess, run_umbel
from umbel.app.results import AsyncResult
from umbel.pipeline.reading import Tables

LOAD_S = size(8, 600)
BROKERS = ("redis", "amqp") if FULL else ("redis",)
NAMES = tuple(f"w{number}@test" for number in range(4))
KILLED = NAMES[2]
DOOMED = "doomed"  # a queue that only the killed one consumes, and the task in it
LIVING = frozenset(NAMES) - {KILLED}
SETTINGS = {"task_send_sent_event": True}
UNDER_WAY_MAX = 60
ELECTION_S = 2.0
LOOK_S = 0.3
BUILD_S = size(400, 1_200)
JAVA = {} if FULL else {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}  # short-lived
ENDED = frozenset({"SUCCESS", "FAILURE"})

Row = dict[str, Any]


@dataclass(slots=True)
class Load:
    """What was sent, and what has not come back."""

    site: Site
    by_name: Counter[str] = field(default_factory=Counter)
    elections: int = 0
    under_way: list[AsyncResult] = field(default_factory=list)
    _election_at: float = 0.0

    def go_on(self, until: float) -> None:
        """Send work for a while, no faster than it is done."""
        while time.monotonic() < until:
            self._round()
            wait_until(self._has_room, 60, "tasks to end")

    def _round(self) -> None:
        number = sum(self.by_name.values())
        self._send("report_steps", 5)
        self._send("retry_until", f"again-{number}", 2)
        self._send("send_child", number)
        self._send("fail")
        if time.monotonic() >= self._election_at:
            self._election_at = time.monotonic() + ELECTION_S
            self.elect()

    def _send(self, task: str, *args: Any, **options: Any) -> AsyncResult:
        self.by_name[task] += 1
        self.under_way.append(self.site.send(task, *args, **options))
        return self.under_way[-1]

    def _has_room(self) -> bool:
        self.under_way = [one for one in self.under_way if not one.ready()]
        return len(self.under_way) < UNDER_WAY_MAX

    def doom(self) -> str:
        """Send a task that runs in the killed worker when that happens; its id."""
        sent = self._send("report_and_wait", DOOMED, queue=DOOMED)
        self.site.wait_until_begun(DOOMED)
        return sent.id

    def unended(self) -> set[str]:
        """The tasks that have no result."""
        return {one.id for one in self.under_way if not one.ready()}

    def elect(self) -> None:
        """One election of a task, one of a handler."""
        self.elections += 2
        self.site.app.signature(f"{APP}.noop").election()
        self.site.app.control.election(f"note-{self.elections}", "note", f"note-{self.elections}")


class Watch:
    """Looks at the dashboard again and again, and keeps whatever it should not have shown."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.looks = 0
        self.alarms: list[str] = []
        self.states: dict[str, list[str]] = {}  # of each node, without repetitions
        self.progress_seen = 0
        self.killed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def get(self, path: str, **query: str) -> Any:
        address = f"{self.url}api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)

    def nodes(self) -> dict[str, Row]:
        return {node["name"]: node for node in self.get("cluster")["nodes"]}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except Exception as exc:
                self.alarms.append(f"{type(exc).__name__}: {exc}")

    def _look(self) -> None:
        killed, cluster = self.killed, self.get("cluster")
        self.looks += 1
        if {node["name"] for node in cluster["nodes"]} != set(NAMES):
            self.alarms.append(f"nodes {[node['name'] for node in cluster['nodes']]}")
        for node in cluster["nodes"]:
            self._look_at(node, killed)
        self.alarms += [remark["text"] for remark in cluster["remarks"]]
        totals = cluster["totals"]
        wrong = {name: totals[name] for name in ("missing", "refused", "disagreements")}
        if any(wrong.values()):
            self.alarms.append(f"totals {wrong}")
        elections = self.get("elections")["elections"]
        self.alarms += [str(one) for one in elections if one["verdict"] == "disagreement"]
        running = self.get("tasks", q="state:running")
        if running["error"]:
            self.alarms.append(running["error"])
        self.progress_seen += sum(task["state"] == "PROGRESS" for task in running["tasks"])

    def _look_at(self, node: Row, killed: bool) -> None:
        name, state = node["name"], node["state"]
        seen = self.states.setdefault(name, [])
        if not seen or seen[-1] != state:
            seen.append(state)
        if name == KILLED and killed:
            return
        figures = {key: node[key] for key in ("active", "processed", "load", "pid")}
        if state != "online" or None in figures.values() or not node["task_events"]:
            self.alarms.append(f"{name} is {state}: {figures}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the log and the tables are, and how commands are run there."""

    directory: Path
    environment: dict[str, str]

    def umbel(self, *arguments: str, timeout_s: float = 60.0) -> str:
        ran = run_umbel(
            ["-A", APP, *arguments], cwd=self.directory, env=self.environment, timeout_s=timeout_s
        )
        assert ran.process.poll() == 0, ran.output
        return ran.output

    def rows(self, table: str) -> list[Row]:
        with Tables(str(self.directory / "tables")) as tables:
            return tables.ask(f"SELECT * FROM {table}")

    def status(self) -> dict[str, Row]:
        """What `umbel status` says; its remarks are lines of their own."""
        said = self.umbel("status", "--json", "--timeout", "5")
        found = json.loads(said[: said.rindex("}") + 1])
        assert said[said.rindex("}") + 1 :].strip() == "", said
        return {node["hostname"]: node for node in found["nodes"]}


@pytest.mark.timeout(LOAD_S + BUILD_S + 200)
@pytest.mark.parametrize("kind", BROKERS)
def test_dashboard_status_and_history_show_the_killed_worker_and_no_false_alarm(
    request: pytest.FixtureRequest, start: Callable[..., Program], tmp_path: Path, kind: str
) -> None:
    site: Site = request.getfixturevalue(f"{kind}_site")
    site.app.conf.update(SETTINGS)
    place = Place(tmp_path, {**site.environment(SETTINGS), **JAVA})
    command = [sys.executable, "-m", "umbel", "-A", APP]
    recorder = start([*command, "record", "--log", "log"], env=place.environment)
    recorder.wait_for("takes events from the broker")
    port = free_port()
    dashboard = start(
        [*command, "dashboard", "--port", str(port), "--tables", str(tmp_path / "tables")],
        env=place.environment,
    )
    dashboard.wait_for(f"http://127.0.0.1:{port}/")
    watch = Watch(f"http://127.0.0.1:{port}/")
    workers = {}
    for name in NAMES:
        queues = f"{QUEUE},{DOOMED}" if name == KILLED else QUEUE
        options = ("-E", "-n", name, "-Q", queues)
        workers[name] = site.worker("prefork", *options, settings=SETTINGS)
    wait_until(lambda: _has_figures(watch.nodes()), 30, "the figures of all workers")
    load = Load(site)
    watch.start()
    work(load, place, LOAD_S / 2, frozenset(NAMES))
    doomed = load.doom()
    wait_until(lambda: runs_on(watch, doomed) == KILLED, 30, "the doomed task to be seen")
    kill(workers[KILLED], watch)
    work(load, place, LOAD_S / 2, LIVING)
    wait_until(lambda: is_idle(site, watch.nodes()), 60, "all work to be done")
    watch.stop()
    check_dashboard(watch, load)
    load.elect()  # and is open when the log ends, or not: no failure in either case
    assert recorder.stop() == 0
    place.umbel("history", "build", "--log", "log", "--tables", "tables", timeout_s=BUILD_S)
    check_history(place, load)
    check_losses(place, load, doomed)
    check_report(place, watch)
    for name in LIVING:
        assert workers[name].stop() == 0
        assert not re.search(r"(ERROR|CRITICAL).*(lost|event)", workers[name].output)
        lost = re.findall(r"(\S+@test) was lost", workers[name].output)
        assert lost == [KILLED], workers[name].output[-2_000:]


def _has_figures(nodes: dict[str, Row]) -> bool:
    return nodes.keys() == set(NAMES) and all(
        node["processed"] is not None and node["pool_size"] for node in nodes.values()
    )


def work(load: Load, place: Place, seconds: float, alive: frozenset[str]) -> None:
    """Have the cluster work, and look at its status all the while."""
    until = time.monotonic() + seconds

    def look() -> None:
        check_status(place.status(), alive)
        while time.monotonic() < until:
            check_status(place.status(), alive)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        load.go_on(until)
        looking.result()


def kill(worker: WorkerProcess, watch: Watch) -> None:
    """Kill the worker and all its processes at once, as the system does when memory is short."""
    watch.killed = True
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    wait_until(lambda: watch.nodes()[KILLED]["state"] == "lost", 30, "the loss to be seen")


def runs_on(watch: Watch, task_id: str) -> str | None:
    """Which worker runs a task, as the dashboard shows it."""
    tasks = watch.get("tasks", q=f"id:{task_id} state:running")["tasks"]
    return str(tasks[0]["worker"]) if tasks else None


def is_idle(site: Site, nodes: dict[str, Row]) -> bool:
    return site.waiting() == 0 and all(nodes[name]["active"] == 0 for name in LIVING)


def check_status(found: dict[str, Row], names: frozenset[str]) -> None:
    assert {name for name, node in found.items() if node["state"] == "alive"} == names
    for name in names:
        node = found[name]
        figures = {key: node[key] for key in ("pid", "active", "processed", "load")}
        assert None not in figures.values(), (name, figures)
        assert (node["answered"], node["task_events"], node["lost"]) == (True, True, 0)
    assert found.keys() - names <= {KILLED}


def check_dashboard(watch: Watch, load: Load) -> None:
    assert watch.alarms == []
    assert watch.looks > LOAD_S / 2
    assert watch.progress_seen > 0
    assert watch.states == {name: ["online"] for name in LIVING} | {KILLED: ["online", "lost"]}
    elections = watch.get("elections")["elections"]
    assert [one for one in elections if one["verdict"] != "decided"] == []
    assert watch.get("elections")["known"] == min(load.elections, 500)


def check_history(place: Place, load: Load) -> None:
    workers = place.rows("workers")
    assert {row["hostname"]: row["status"] for row in workers} == {
        **dict.fromkeys(LIVING, "online"), KILLED: "lost",
    }  # fmt: skip
    assert len(workers) == len(NAMES), "one life each"
    assert {row["events_missing"] for row in workers} == {0}
    assert place.rows("clock_audit") == []
    assert place.rows("gaps") == []
    elections = place.rows("elections")
    # The last two were requested while the recorder was stopped.
    assert load.elections - 2 <= len(elections) <= load.elections
    failed = [row for row in elections if row["verdict"] not in ("exactly once", "open")]
    assert failed == []
    check_tasks(place.rows("tasks"), load)


def check_losses(place: Place, load: Load, doomed: str) -> None:
    """What the killed worker ran is lost, all of it, and nothing else."""
    attempts = place.rows("attempts")
    lost = [row for row in attempts if row["outcome"] == "LOST" or row["missing"]]
    assert {row["worker"] for row in lost} == {KILLED}
    assert {row["reason"] for row in lost if row["outcome"] == "LOST"} == {"worker lost"}
    assert doomed in {row["uuid"] for row in lost}
    running = {row["name"] for row in attempts if row["outcome"] == "RUNNING"}
    assert running <= {f"{APP}.noop"}, "of the election that was held last"
    states = {row["uuid"]: row["state"] for row in place.rows("tasks")}
    assert doomed in load.unended()
    assert {task for task in load.unended() if states[task] in ENDED} == set()


def check_tasks(tasks: list[Row], load: Load) -> None:
    """Every task is there once, and has ended as it should unless the killed worker had it."""
    sent = {f"{APP}.{name}": count for name, count in load.by_name.items()}
    found = Counter(row["name"] for row in tasks)
    assert {name: found[name] for name in sent} == sent
    ended = [row for row in tasks if row["state"] in ENDED]
    assert {row["worker"] for row in tasks if row["state"] not in ENDED} <= {KILLED, None}
    for row in ended:
        failed = row["name"] == f"{APP}.fail"
        assert row["state"] == ("FAILURE" if failed else "SUCCESS"), row
        if row["name"] == f"{APP}.retry_until":
            assert (row["retries"], row["attempts"] >= 3) == (2, True), row
        assert row["queue_wait"] is not None, row
    parents = {row["uuid"] for row in ended if row["name"] == f"{APP}.send_child"}
    children = {row["parent"] for row in tasks if row["name"] == f"{APP}.add"}
    assert parents <= children
    assert len(ended) > 0.8 * len(tasks)


def check_report(place: Place, watch: Watch) -> None:
    place.umbel("history", "report", "--tables", "tables", "-o", "report.html")
    report = (place.directory / "report.html").read_text()
    tiles = re.findall(r'<div class="tile( alarm)?"><b>(.*?)</b><span>(.*?)</span>', report)
    alarms = {label for alarm, _, label in tiles if alarm}
    assert alarms == {"failed", "nodes, 1 lost"}  # tasks fail on purpose
    assert ("", "0", "events missing") in tiles
    (elections,) = [value for _, value, label in tiles if label.startswith("elections")]
    once, over = elections.split(" / ")
    assert once == over
    totals = watch.get("history")["totals"]
    assert (totals["nodes"], totals["lives"], totals["lost"]) == (len(NAMES), len(NAMES), 1)
    assert (totals["missing"], totals["once"]) == (0, totals["elections"] - totals["open"])
