"""`umbel inspect`, `control` and `doctor` on real brokers, with real workers and real processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kombu import Exchange, Producer

from tests import forks
from tests.responders import Responder
from tests.servers import DEFAULT_REDIS, RabbitMQServer, RedisServer, wait_until
from tests.sites import Site
from tests.workers import WorkerProcess, program_environment
from umbel import Umbel
from umbel.app.events.publisher import event_exchange, publish_events
from umbel.cli import main

PONG = {"ok": "pong"}
# For doctor: whatever it meets, it ends well within this.
BOUND_S = 40.0
SHOP = """
from umbel import Umbel
app = Umbel("shop", broker_connection_retry_on_startup=True)

@app.task
def charge(order):
    return order

@app.control_command(reads=True)
def greet(state, name="you"):
    "Say hello."
    return {"hello": name, "from": state.hostname}

@app.control_command
def forget(state, what=()):
    raise ValueError("can not forget \\x1b[2J")
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class CommandLine:
    """`umbel -A probe ...` in this process, for an application on one broker."""

    def __init__(self, app: Umbel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = app
        module = types.ModuleType("probe")
        module.__dict__["app"] = app
        monkeypatch.setitem(sys.modules, "probe", module)

    def run(self, *words: str) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main.run(["-A", "probe", *words])
        assert "Traceback" not in err.getvalue(), err.getvalue()
        return Ran(code, out.getvalue(), err.getvalue())

    def rows(self, *words: str) -> list[list[str]]:
        """The cells of the table, without its titles."""
        ran = self.run(*words)
        assert ran.code == 0, ran.err
        return [line.split() for line in ran.out.splitlines()[1:]]

    def json(self, *words: str) -> Any:
        ran = self.run(*words, "--json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)


class Shell(CommandLine):
    """The same in a process of its own, with the application of a file."""

    def __init__(self, directory: Path, url: str | None) -> None:
        (directory / "shop.py").write_text(SHOP)
        self.directory = directory
        self.env = program_environment(directory)
        if url is not None:
            self.env["UMBEL_BROKER_URL"] = url

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "umbel", "-A", "shop", *words]

    def run(self, *words: str) -> Ran:
        ran = forks.run(self.command(*words), cwd=self.directory, env=self.env)
        assert "Traceback" not in ran.stderr, ran.stderr
        return Ran(ran.returncode, ran.stdout, ran.stderr)


class Diagnosis:
    """What `umbel doctor` said."""

    def __init__(self, line: CommandLine, *words: str) -> None:
        began = time.monotonic()
        ran = line.run("doctor", "--json", *words)
        self.took_s = time.monotonic() - began
        self.code, self.text, self.stderr = ran
        found = json.loads(self.text)
        assert self.code == found["exit_code"]
        self.findings: list[dict[str, Any]] = found["findings"]

    def of(self, check: str) -> list[tuple[str, str]]:
        return [(f["verdict"], f["text"]) for f in self.findings if f["check"] == check]

    def not_fine(self) -> list[tuple[str, str]]:
        return [(f["check"], f["text"]) for f in self.findings if f["verdict"] != "ok"]

    def failed(self) -> list[tuple[str, str]]:
        return [(f["check"], f["text"]) for f in self.findings if f["verdict"] == "fail"]


MakeLine = Callable[..., CommandLine]


@pytest.fixture
def make_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLine]:
    """`make_line(broker, backend)` gives a command line for an application without tasks."""
    apps: list[Umbel] = []

    def make(broker: str, backend: str = "disabled://") -> CommandLine:
        apps.append(Umbel("probe", broker=broker, backend=backend, set_as_current=False))
        return CommandLine(apps[-1], monkeypatch)

    yield make
    for app in apps:
        app.close()


@pytest.fixture
def line(site: Site, make_line: MakeLine) -> CommandLine:
    return make_line(site.broker_url, site.backend_url)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may change or stop."""
    directory = tmp_path / "redis"
    directory.mkdir()
    server = RedisServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.close()


# -- inspect -------------------------------------------------------------------------------------


def test_what_a_worker_holds_is_shown(site: Site, line: CommandLine) -> None:
    site.worker("threads", "-n", "w1@here", concurrency=1)
    running = site.send("wait", "held").id
    site.wait_until_begun("held")
    waiting = site.send("record", "later").id
    planned = site.send("record", "tomorrow", countdown=3600).id

    def held() -> Any:
        answers = {
            m: line.json("inspect", m, "-d", "w1@here")["w1@here"]
            for m in ("reserved", "scheduled")
        }
        return answers if all(len(found) == 1 for found in answers.values()) else None

    wait_until(held, 20, "one task that waits and one that is planned")
    name = "tests.probe_app."
    assert [row[:3] for row in line.rows("inspect", "active")] == [
        ["w1@here", running, f"{name}wait"]
    ]
    assert [row[:3] for row in line.rows("inspect", "reserved")] == [
        ["w1@here", waiting, f"{name}record"]
    ]
    (row,) = line.rows("inspect", "scheduled")
    assert (row[0], row[2], row[3]) == ("w1@here", planned, f"{name}record")
    found = line.rows("inspect", "query_task", running, waiting, planned, "nosuch")
    assert sorted(row[1:3] for row in found) == sorted(
        [[running, "active"], [waiting, "reserved"], [planned, "scheduled"]]
    )
    assert line.json("inspect", "query-task", "nosuch") == {"w1@here": {}}
    site.open_gate("held")


def test_answers_are_those_of_the_workers_in_both_forms(site: Site, line: CommandLine) -> None:
    site.worker("threads", "-n", "w1@here", "-E")
    site.send("add", 1, 2).get(timeout=30)
    client = site.app.control.inspect(timeout=5, limit=1)
    asked = ("-d", "w1@here", "-t", "10")
    assert line.rows("inspect", "ping", *asked) == [["w1@here", "pong"]]
    assert line.json("inspect", "conf", *asked) == client.conf()
    assert line.json("inspect", "active_queues", *asked) == client.active_queues()
    assert line.json("inspect", "registered", "--all", *asked) == client.registered(builtins=True)
    assert line.json("inspect", "stats", *asked)["w1@here"]["total"] == {"tests.probe_app.add": 1}
    for name in ("conf", "stats", "active_queues", "registered", "report"):
        shown = line.run("inspect", name, *asked)
        assert (shown.code, shown.err) == (0, ""), shown
        assert len(shown.out.splitlines()) > 1
        assert all(map(str.isprintable, shown.out.splitlines()))
        assert "guest:guest" not in shown.out


def test_only_those_who_are_meant_are_asked(site: Site, line: CommandLine) -> None:
    for name in ("w1@here", "w2@here"):
        site.worker("threads", "-n", name)
    assert line.rows("inspect", "ping", "-t", "2") == [["w1@here", "pong"], ["w2@here", "pong"]]
    assert line.json("inspect", "ping", "--pattern", "*2@*") == {"w2@here": PONG}
    assert line.json("inspect", "-d", "w1@here", "ping") == {"w1@here": PONG}
    ran = line.run("inspect", "ping", "-d", "w1@here,w3@here")
    assert (ran.code, ran.err) == (69, "umbel: w3@here did not answer within 1 s\n")
    ran = line.run("inspect", "ping", "-d", "w22@here", "-t", "2")
    assert (ran.code, ran.out) == (69, "")
    assert ran.err.endswith("did you mean w2@here?\n")


def test_nobody_is_exit_code_69(site: Site, line: CommandLine) -> None:
    ran = line.run("inspect", "ping", "-t", "0.3")
    assert (ran.code, ran.out, ran.err.count("\n")) == (69, "", 1)
    assert "doctor" in ran.err
    assert "guest:guest" not in ran.err
    ran = line.run("-q", "control", "shutdown", "-t", "0.3")
    assert (ran.code, ran.out, ran.err) == (69, "", "")


@pytest.mark.parametrize("verb", ["inspect", "control"])
def test_a_broker_that_is_not_there_is_one_line(make_line: MakeLine, verb: str) -> None:
    ran = make_line("redis://:hidden@127.0.0.1:1/0").run(
        verb, "heartbeat" if verb == "control" else "ping"
    )
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "redis://:**@127.0.0.1:1/0" in ran.err
    assert "hidden" not in ran.err


# -- control -------------------------------------------------------------------------------------


def test_workers_obey(site: Site, line: CommandLine) -> None:
    process = site.worker("threads", "-n", "w1@here", concurrency=1)
    task = "tests.probe_app.add"

    def said(*words: str) -> str:
        (answer,) = line.json("control", *words, "-d", "w1@here", "-t", "10").values()
        return str(answer["ok"])

    assert said("rate_limit", task, "100/m") == "new rate limit set successfully"
    assert said("time-limit", task, "5", "10") == "time limits set successfully"
    assert said("pool_grow", "2") == "pool will grow"
    assert line.json("inspect", "stats", "-d", "w1@here")["w1@here"]["pool"]["max-concurrency"] == 3
    assert said("add_consumer", "more") == "add consumer more"
    assert said("pause", "celery") == "celery paused"
    sent = site.send("add", 2, 3)
    site.wait_until_waiting(1)
    assert sorted(line.rows("inspect", "queue_lengths", "-d", "w1@here")) == [
        ["w1@here", "celery", "1"],
        ["w1@here", "more", "0"],
    ]
    assert said("resume", "celery") == "celery resumed"
    assert sent.get(timeout=30) == 5
    ran = line.run("control", "shutdown", "-d", "w1@here")
    assert (ran.code, ran.out) == (0, "told to end when their tasks have ended: w1@here\n")
    assert process.wait() == 0


def test_revoked_tasks_do_not_run_and_running_ones_end(site: Site, line: CommandLine) -> None:
    site.worker("prefork", "-n", "w1@here", concurrency=1)
    running = site.send("wait", "held").id
    site.wait_until_begun("held")
    revoked = site.send("record", "never").id
    stamped = site.app.signature("tests.probe_app.record", ("stamped",))
    stamped.stamp(customer="7")
    result = stamped.apply_async()
    assert line.rows("control", "revoke", revoked, "-d", "w1@here") == [
        *[["w1@here", "tasks", f"{{'{revoked}'}}", "flagged", "as", "revoked"]]
    ]
    line.rows("control", "revoke_by_stamped_headers", "customer=7", "-d", "w1@here")
    assert line.json("inspect", "revoked", "-d", "w1@here") == {"w1@here": [revoked]}
    (row,) = line.rows("control", "terminate", "KILL", running, "-d", "w1@here", "-t", "10")
    assert row == ["w1@here", "terminate:", running]
    wait_until(lambda: result.state == "REVOKED", 20, "the stamped task to be dropped")
    assert site.works()
    assert (site.runs("never"), site.runs("stamped")) == (0, 0)


def test_commands_of_the_application(
    site: Site, tmp_path: Path, start_worker: Callable[..., WorkerProcess]
) -> None:
    shop = Shell(tmp_path, site.broker_url)
    env = {"UMBEL_BROKER_URL": site.broker_url}
    start_worker("shop", ["-n", "w1@here", "-P", "threads", "-l", "info"], env=env)
    asked = ("-d", "w1@here", "-t", "10")
    assert shop.json("inspect", "greet", 'name=["bob", 1]', *asked) == {
        "w1@here": {"hello": ["bob", 1], "from": "w1@here"}
    }
    ran = shop.run("control", "forget", "what=all", *asked)
    assert ran == Ran(
        1, "", "umbel: w1@here answered an error: ValueError('can not forget \\x1b[2J')\n"
    )
    ran = shop.run("inspect", "gret")
    assert ran == Ran(2, "", "umbel: unknown command 'gret' of 'inspect': did you mean greet?\n")
    assert "forget" in shop.run("control", "--help").out


class Keyboard:
    """A program with a terminal before it."""

    def __init__(self, line: Shell, *words: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            line.command(*words),
            cwd=line.directory,
            env=line.env | {"TERM": "xterm", "COLUMNS": "100"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.output = ""

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        until = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < until, f"no {text!r} in {self.output!r}"
            self._read()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self, timeout_s: float = 30.0) -> int:
        until = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < until, "it does not end"
            self._read()
        with contextlib.suppress(OSError):
            while self._read():
                pass
        os.close(self._master)
        return int(self.process.returncode)

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 0.1)[0]:
            return False
        try:
            self.output += os.read(self._master, 65_536).decode()
        except OSError:  # the other end is closed
            self.process.wait(10)
            return False
        return True


def test_on_a_terminal_a_shutdown_asks_and_tables_are_drawn(
    redis_site: Site, tmp_path: Path
) -> None:
    line = Shell(tmp_path, redis_site.broker_url)
    process = redis_site.worker("threads", "-n", "w1@here")
    drawn = Keyboard(line, "inspect", "ping", "-d", "w1@here")
    assert drawn.end() == 0
    assert "─" in drawn.output
    refused = Keyboard(line, "control", "shutdown")
    refused.wait_for("have 1 nodes (w1@here) end? [y/N]:")
    refused.type("n\n")
    assert refused.end() == 0
    assert "nobody was told to end" in refused.output
    assert line.json("inspect", "ping", "-d", "w1@here") == {"w1@here": PONG}
    agreed = Keyboard(line, "control", "shutdown")
    agreed.wait_for("[y/N]:")
    agreed.type("y\n")
    assert agreed.end() == 0
    assert process.wait() == 0


# -- doctor --------------------------------------------------------------------------------------


def test_a_healthy_cluster(site: Site, line: CommandLine) -> None:
    for name in ("w1@here", "w2@here"):
        site.worker("threads", "-n", name, "-E")
    found = Diagnosis(line)
    assert (found.code, found.not_fine(), found.stderr) == (0, [], "")
    (nodes,) = found.of("nodes")
    assert nodes[1].startswith("2 answered: w1@here (")
    assert found.of("events") == [("ok", "heartbeats are heard, events of tasks are on")]
    assert found.of("queues") == [("ok", "consumed, with what waits: celery 0")]
    assert found.of("results")[0][0] == "ok"
    kind = "RabbitMQ" if site.broker_url.startswith("amqp") else DEFAULT_REDIS.capitalize()
    assert found.of("broker")[1][1].startswith(f"{kind} ")
    assert "guest:guest" not in found.text
    assert found.took_s < BOUND_S


def test_an_empty_broker(site: Site, line: CommandLine) -> None:
    site.send("add", 1, 2)
    found = Diagnosis(line, "-t", "1")
    assert (found.code, found.stderr) == (69, "")
    assert [check for check, _ in found.failed()] == ["nodes"]
    assert ("warn", "celery: 1 message wait, and nobody consumes it") in found.of("queues")


def test_nodes_that_do_not_obey_or_do_not_beat_are_told(site: Site, line: CommandLine) -> None:
    site.worker(
        "threads",
        "-n",
        "deaf@here",
        "-Q",
        "other",
        settings={"worker_enable_remote_control": False},
    )
    site.worker(
        "threads", "-n", "quiet@here", "-Q", "other", settings={"event_exchange": "elsewhere"}
    )
    for _ in range(3):
        site.send("noop")
    found = Diagnosis(line, "-t", "8")
    assert found.code == 1
    assert found.failed() == [("nodes", "deaf@here sent heartbeats and did not answer")]
    assert found.of("events")[0][1].startswith("quiet@here sent no heartbeat in ")
    assert ("warn", "celery: 3 messages wait, and nobody consumes it") in found.of("queues")
    assert ("ok", "consumed, with what waits: other 0") in found.of("queues")


def test_clocks_and_revocations_that_differ_are_told(site: Site, line: CommandLine) -> None:
    for name in ("w1@here", "w2@here"):
        site.worker("threads", "-n", name, "--without-gossip")
    site.app.control.revoke("x", destination=["w1@here"], reply=True, timeout=10)
    beat = {"type": "worker-heartbeat", "hostname": "ahead@here", "timestamp": time.time() + 3600,
            "clock": 1, "pid": 1, "freq": 60.0, "active": 0, "processed": 0}  # fmt: skip
    over = threading.Event()

    def beat_on() -> None:
        with site.app.connection() as connection:
            exchange = event_exchange("celeryev", connection)
            channel = connection.channel()
            exchange(channel).declare()
            producer = Producer(channel, auto_declare=False)
            while not over.wait(0.2):
                publish_events(producer, exchange, [beat])

    beating = threading.Thread(target=beat_on)
    beating.start()
    try:
        found = Diagnosis(line, "-t", "6")
    finally:
        over.set()
        beating.join()
    assert found.code == 1
    ((verdict, text),) = found.of("clocks")
    assert (verdict, text.startswith("the clock of ahead@here is 3")) == ("fail", True)
    assert found.of("revocations") == [("warn", "1 revoked task, of which w2@here knows not all")]


def test_one_name_for_two_nodes_is_told(
    redis_url: str, make_line: MakeLine, redis_server: RedisServer
) -> None:
    apps = [Umbel("t", broker=redis_url, set_as_current=False) for _ in range(2)]
    twins = [Responder(app, "twin@here") for app in apps]
    try:
        wait_until(lambda: len(apps[0].control.ping(timeout=0.3)) == 2, 20, "both twins to answer")
        found = Diagnosis(make_line(redis_url), "-t", "1")
        assert (found.code, found.failed()) == (
            1,
            [("nodes", "several nodes are called twin@here")],
        )
        ran = make_line(redis_url).run("inspect", "ping")
        assert ran.code == 0
        assert "several nodes answered as twin@here" in ran.err
    finally:
        for twin in twins:
            twin.close()
        for app in apps:
            app.close()


# -- doctor: brokers that are not well -----------------------------------------------------------


def test_an_exchange_that_was_declared_otherwise_is_explained(
    amqp_url: str, make_line: MakeLine
) -> None:
    with Umbel("t", broker=amqp_url, set_as_current=False).connection() as connection:
        channel = connection.channel()
        Exchange("celeryev", type="fanout", durable=True)(channel).declare()
        Exchange("celery.pidbox", type="fanout", durable=False)(channel).declare()
    found = Diagnosis(make_line(amqp_url), "-t", "0.5")
    assert found.code == 1
    texts = dict(found.of("exchanges"))
    assert texts["ok"] == "celery.pidbox is there as it should be"
    assert texts["warn"] == "reply.celery.pidbox is not there yet"
    assert "celeryev was declared otherwise" in texts["fail"]
    assert "received 'topic' but current is 'fanout'" in texts["fail"]


def test_a_rabbitmq_that_is_full_is_told(
    amqp_url: str, rabbitmq_server: RabbitMQServer, make_line: MakeLine
) -> None:
    def limit(share: str) -> None:
        call = rabbitmq_server._call("vm_memory_monitor", "set_vm_memory_high_watermark", share)
        rabbitmq_server.evaluate(f'{call}, ""')

    limit("0.000001")
    try:
        found = Diagnosis(make_line(amqp_url), "-t", "0.5")
    finally:
        limit("0.8")
    assert found.code == 1
    ((verdict, text),) = found.of("memory")
    assert (verdict, text.startswith("the broker takes no messages (")) == ("fail", True)
    assert found.took_s < BOUND_S


def test_a_wrong_password_is_told_without_it(amqp_url: str, make_line: MakeLine) -> None:
    url = amqp_url.replace("guest:guest", "guest:hidden")
    found = Diagnosis(make_line(url))
    assert found.code == 1
    ((check, text),) = found.failed()
    assert check == "broker"
    assert text.startswith("amqp://guest:**@127.0.0.1:")
    assert "hidden" not in found.text


def test_a_redis_that_may_forget_is_told(own_redis: RedisServer, make_line: MakeLine) -> None:
    own_redis.client().config_set("maxmemory", "100mb")
    own_redis.client().config_set("maxmemory-policy", "allkeys-lru")
    found = Diagnosis(make_line(own_redis.url), "-t", "0.5")
    assert (found.code, found.of("memory")[0][0]) == (1, "fail")
    assert "allkeys-lru" in found.of("memory")[0][1]


RIGHTS = {
    "no scripts": (("-eval", "-evalsha"), "broker", "scripts can not be run"),
    "no channels": (("resetchannels",), "exchanges", "nothing can be heard"),
    "no tracking": (("-client|tracking",), "broker", "the server does not tell of changes"),
    "no time": (("-time",), "broker", "the server does not give its time"),
    "no info": (("-info",), "broker", "the server does not let itself be asked"),
}


@pytest.mark.parametrize("case", RIGHTS)
def test_what_a_user_of_redis_may_not_do_is_told(
    own_redis: RedisServer, make_line: MakeLine, case: str
) -> None:
    rules, check, text = RIGHTS[case]
    own_redis.client().execute_command(
        *("ACL", "SETUSER", "shop", "on", ">hidden", "~*", "&*", "+@all", *rules)
    )
    url = f"redis://shop:hidden@127.0.0.1:{own_redis.port}/0"
    found = Diagnosis(make_line(url), "-t", "0.5")
    assert any(one.startswith(text) for _, one in found.of(check)), found.findings
    assert "hidden" not in found.text
    assert found.took_s < BOUND_S


def test_a_broker_that_hangs_does_not_hang_the_doctor(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    own_redis.pause()
    try:
        found = Diagnosis(Shell(tmp_path, own_redis.url))
    finally:
        own_redis.resume()
    assert (found.code, [check for check, _ in found.failed()]) == (1, ["broker"])
    assert "no answer within" in found.failed()[0][1]
    assert found.took_s < BOUND_S


def test_a_rabbitmq_that_hangs_does_not_hang_the_doctor(
    amqp_url: str, rabbitmq_server: RabbitMQServer, tmp_path: Path
) -> None:
    rabbitmq_server.pause()
    try:
        found = Diagnosis(Shell(tmp_path, amqp_url))
    finally:
        rabbitmq_server.resume()
    assert (found.code, [check for check, _ in found.failed()]) == (1, ["broker"])
    assert found.took_s < BOUND_S


def test_the_embedded_broker_is_looked_at_like_any_other(tmp_path: Path) -> None:
    found = Diagnosis(Shell(tmp_path, None), "-t", "0.5")
    assert (found.code, [check for check, _ in found.failed()]) == (69, ["nodes"])
    assert found.of("broker")[0][1].startswith("embedded://")


def test_the_timeout_of_a_command_counts_from_its_beginning(
    amqp_site: Site, tmp_path: Path
) -> None:
    amqp_site.worker("solo")
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(2)\nfrom umbel import Umbel\n"
        f"app = Umbel('slow', broker={amqp_site.broker_url!r}, backend='disabled://')\n"
    )
    command = [sys.executable, "-m", "umbel", "-A", "slow", "inspect", "ping", "--timeout", "4"]
    began = time.monotonic()
    ran = subprocess.run(
        command, cwd=tmp_path, env=program_environment(tmp_path), capture_output=True, check=False
    )
    took_s = time.monotonic() - began
    assert ran.returncode == 0, ran.stderr
    assert 3.5 < took_s < 5.5  # with the start of an interpreter
