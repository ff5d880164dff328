"""What a broker refuses for good: a queue is left out, or the worker ends and says what to do."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Queue

from tests.inside import Inside
from tests.servers import RabbitMQServer, RedisServer, free_port, wait_until
from tests.workers import ROOT, Program, WorkerProcess, ready, run_umbel
from umbel import Umbel
from umbel.cli.errors import REFUSED

APP = """
import os
from kombu import Exchange, Queue
from umbel import Umbel

app = Umbel("shop", broker=os.environ["BROKER"], backend="disabled://")
jobs = Exchange("celery_jobs")
app.conf.task_queues = [Queue(n, jobs, routing_key=n) for n in os.environ["QUEUES"].split(",")]


@app.task
def note(value):
    print("ran", value, flush=True)
"""


class Shop:
    """An application in a file, its worker, and commands about it."""

    def __init__(self, directory: Path, start: Callable[..., WorkerProcess]) -> None:
        (directory / "shop.py").write_text(APP)
        self.directory, self._start = directory, start
        self.env: dict[str, str] = {}

    def worker(self, url: str, queues: str, *args: str, wait: bool = True) -> WorkerProcess:
        self.env = {"BROKER": url, "QUEUES": queues}
        command = ["-P", "threads", "-c", "1", "-l", "info", *args]
        return self._start("shop", command, cwd=self.directory, env=self.env, wait=wait)

    def run(self, *args: str) -> Program:
        return run_umbel(["-A", "shop", *args], cwd=self.directory, env=self.env)

    def send(self, queue: str, value: str) -> None:
        sent = self.run("call", "shop.note", value, "--queue", queue)
        assert sent.process.returncode == 0, sent.output


@pytest.fixture
def shop(tmp_path: Path, start_worker: Callable[..., WorkerProcess]) -> Shop:
    return Shop(tmp_path, start_worker)


@pytest.fixture
def odd_queue(
    request: pytest.FixtureRequest, broker_url: str, redis_server: RedisServer
) -> tuple[str, str]:
    """A queue named `odd` that cannot be consumed as it is declared; the broker, and its reason."""
    if broker_url.startswith("redis"):
        redis_server.client(int(broker_url.rsplit("/", 1)[1])).set("odd", "in use")
        return broker_url, "WRONGTYPE"
    server: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
    with server.connection(broker_url.rsplit("/", 1)[1]) as connection:
        connection.channel().queue_declare("odd", durable=False, auto_delete=False)
    return broker_url, "inequivalent arg 'durable' for queue 'odd'"


def test_a_queue_that_the_broker_refuses_does_not_stop_the_others_and_is_reported(
    shop: Shop, odd_queue: tuple[str, str]
) -> None:
    url, reason = odd_queue
    port = free_port()
    worker = shop.worker(url, "celery,odd", "--health-port", str(port))
    line = worker.wait_for(r"Queue odd is left out: .*").string
    assert reason in line
    shop.send("celery", '"one"')
    worker.wait_for("ran one")
    assert worker.output.count("is left out") == 1
    assert "lost" not in worker.output
    status, answer = ready(port)
    assert (status, answer["ready"], list(answer["refused_queues"])) == (503, False, ["odd"])
    stats = json.loads(shop.run("inspect", "stats", "--json").output)
    (node,) = stats.values()
    assert reason in node["umbel"]["refused_queues"]["odd"]
    assert "does not let" in shop.run("status").output
    found = shop.run("doctor")
    assert (found.process.returncode, "consume odd" in found.output) == (1, True), found.output


def test_a_worker_ends_when_the_broker_refuses_all_of_its_queues(
    shop: Shop, odd_queue: tuple[str, str]
) -> None:
    url, reason = odd_queue
    worker = shop.worker(url, "odd", wait=False)
    assert worker.wait() == REFUSED
    (line,) = [line for line in worker.lines if "refuses every queue" in line]
    assert reason in line


@pytest.fixture
def restricted(rabbitmq_server: RabbitMQServer, amqp_url: str) -> Callable[..., str]:
    """A user with the given permissions; returns the URL for it."""
    vhost = amqp_url.rsplit("/", 1)[1]

    def make(configure: str = ".*", write: str = ".*", read: str = ".*") -> str:
        rabbitmq_server.add_user(
            "low", "secret", configure=configure, write=write, read=read, vhost=vhost
        )
        return amqp_url.replace("guest:guest", "low:secret")

    return make


def test_a_queue_that_may_be_declared_and_not_read_is_left_out(
    shop: Shop, restricted: Callable[..., str]
) -> None:
    url = restricted(read="^(?!odd$).*$")
    worker = shop.worker(url, "celery,odd", wait=False)
    line = worker.wait_for(r"Queue odd is left out: .*").string
    assert "access to queue 'odd'" in line
    assert "permissions" in line
    worker.wait_until_ready()
    shop.send("celery", '"one"')
    worker.wait_for("ran one")


@contextlib.contextmanager
def trouble(kind: str, server: RabbitMQServer, vhost: str) -> Iterator[Queue]:
    """A queue named `odd` that cannot be declared at the moment."""
    jobs = Exchange("celery_jobs")
    with server.connection(vhost) as other:
        if kind == "locked":
            other.channel().queue_declare("odd", durable=True, exclusive=True, auto_delete=False)
        elif kind == "too many":
            other.channel().queue_declare("celery", durable=True, auto_delete=False)
            server.limit_queues(vhost, 1)
        elif kind == "no exchange":
            jobs = Exchange("missing", passive=True)
        yield Queue("odd", jobs, routing_key="odd")


@pytest.mark.parametrize("kind", ["locked", "too many", "no exchange"])
def test_a_queue_that_cannot_be_declared_now_does_not_stop_the_others(
    amqp_url: str, rabbitmq_server: RabbitMQServer, kind: str
) -> None:
    noted = Noted()
    with trouble(kind, rabbitmq_server, amqp_url.rsplit("/", 1)[1]) as odd:
        queues = [Queue("celery", Exchange("celery_jobs"), routing_key="celery"), odd]
        settings: dict[str, Any] = {"broker_url": amqp_url, "result_backend": "disabled://"}
        settings["task_queues"] = queues
        settings["worker_enable_remote_control"] = False  # its queue would be one too many
        inside = Inside(settings, noted, without_gossip=True, without_mingle=True).start()
        try:
            inside.send("note", 1, queue="celery")
            wait_until(lambda: noted.ran == [1], what="the task")
            assert list(inside.worker.refused_queues) == ["odd"]
            assert inside.worker.counters.connections_lost == 0
        finally:
            inside.close()


def test_a_worker_waits_for_its_only_queue_while_another_connection_has_it(
    amqp_url: str, rabbitmq_server: RabbitMQServer
) -> None:
    noted = Noted()
    settings: dict[str, Any] = {"broker_url": amqp_url, "result_backend": "disabled://"}
    with trouble("locked", rabbitmq_server, amqp_url.rsplit("/", 1)[1]) as odd:
        inside = Inside({**settings, "task_queues": [odd]}, noted).start(wait=False)
        wait_until(lambda: inside.worker.counters.connections_lost > 2, what="tries")
    try:
        inside.wait_until_ready()
        inside.send("note", 1, queue="odd")
        wait_until(lambda: noted.ran == [1], what="the task")
    finally:
        inside.close()


@contextlib.contextmanager
def unreadable(kind: str, server: RabbitMQServer, vhost: str) -> Iterator[Queue]:
    """A queue named `odd` that can be declared and cannot be consumed at the moment."""
    odd = Queue("odd", Exchange("celery_jobs"), routing_key="odd")
    with server.connection(vhost) as other:
        channel = other.channel()
        if kind == "exclusive consumer":
            channel.queue_declare("odd", durable=True, auto_delete=False)
            channel.basic_consume("odd", exclusive=True)
        elif kind == "locked":
            channel.queue_declare("odd", durable=True, exclusive=True, auto_delete=False)
        yield Queue("odd", no_declare=True) if kind in ("locked", "missing") else odd


def make_readable(server: RabbitMQServer, vhost: str) -> None:
    """There is a queue named `odd`, and nobody has it for himself."""
    with server.connection(vhost) as other:
        channel = other.channel()
        channel.queue_declare("odd", durable=True, auto_delete=False)
        channel.exchange_declare("celery_jobs", "direct", durable=True, auto_delete=False)
        channel.queue_bind("odd", "celery_jobs", "odd")


@pytest.mark.parametrize("kind", ["exclusive consumer", "locked", "missing"])
def test_a_queue_that_cannot_be_consumed_now_does_not_stop_the_others(
    amqp_url: str, rabbitmq_server: RabbitMQServer, kind: str
) -> None:
    noted, vhost = Noted(), amqp_url.rsplit("/", 1)[1]
    settings: dict[str, Any] = {"broker_url": amqp_url, "result_backend": "disabled://"}
    celery = Queue("celery", Exchange("celery_jobs"), routing_key="celery")
    with unreadable(kind, rabbitmq_server, vhost) as odd:
        inside = Inside({**settings, "task_queues": [odd, celery]}, noted).start(wait=False)
        try:
            inside.send("note", 1, queue="celery")
            wait_until(lambda: noted.ran == [1], what="the task")
            consumption, counters = inside.worker.consumption, inside.worker.counters
            assert list(consumption.refused_queues) == ["odd"]
            lost = counters.connections_lost
            inside.call(consumption._ask_again)
            assert list(consumption.refused_queues) == ["odd"]
            inside.break_connection()
            assert list(consumption.refused_queues) == ["odd"]
            assert counters.connections_lost == lost + 1  # the one that was broken here
        except BaseException:
            inside.close()
            raise
    try:
        make_readable(rabbitmq_server, vhost)
        for n in range(3):
            inside.client.send_task("note", (n,), exchange="celery_jobs", routing_key="odd")
        inside.call(consumption._ask_again)
        assert consumption.refused_queues == {}
        wait_until(lambda: len(noted.ran) >= 4, what="the tasks")
        assert sorted(noted.ran[1:]) == [0, 1, 2]
        assert counters.connections_lost == lost + 1
    finally:
        inside.close()


@pytest.mark.parametrize("names", [["odd"], ["odd", "even"]])
def test_a_worker_waits_while_others_consume_all_of_its_queues_exclusively(
    amqp_url: str, rabbitmq_server: RabbitMQServer, names: list[str]
) -> None:
    noted = Noted()
    settings: dict[str, Any] = {"broker_url": amqp_url, "result_backend": "disabled://"}
    jobs = Exchange("celery_jobs")
    settings["task_queues"] = [Queue(name, jobs, routing_key=name) for name in names]
    with rabbitmq_server.connection(amqp_url.rsplit("/", 1)[1]) as other:
        for name in names:
            channel = other.channel()
            channel.queue_declare(name, durable=True, auto_delete=False)
            channel.basic_consume(name, exclusive=True)
        inside = Inside(settings, noted).start(wait=False)
        wait_until(lambda: inside.worker.counters.connections_lost > 4, what="tries")
    try:
        inside.wait_until_ready()
        inside.call(inside.worker.consumption._ask_again)
        assert inside.worker.is_ready()
        for name in names:
            inside.send("note", name, queue=name)
        wait_until(lambda: sorted(noted.ran) == sorted(names), what="the tasks")
    finally:
        inside.close()


@pytest.mark.parametrize("kind", ["exclusive consumer", "missing"])
def test_adding_or_resuming_a_queue_that_cannot_be_consumed_keeps_the_connection(
    amqp_url: str, rabbitmq_server: RabbitMQServer, kind: str
) -> None:
    noted, vhost = Noted(), amqp_url.rsplit("/", 1)[1]
    settings: dict[str, Any] = {"broker_url": amqp_url, "result_backend": "disabled://"}
    inside = Inside(settings, noted).start()
    names = {"exchange": "celery_jobs", "exchange_type": "direct", "routing_key": "odd"}
    more = {"no_declare": True} if kind == "missing" else {}

    def add() -> None:
        inside.worker.consumption.add("odd", **names, **more)

    try:
        consumption = inside.worker.consumption
        with unreadable(kind, rabbitmq_server, vhost):
            with pytest.raises(ValueError, match=r"queue odd cannot be consumed: .* queue 'odd'"):
                inside.call(add)
            assert "odd" not in inside.app.queues.consumed
            assert consumption.refused_queues == {}
        make_readable(rabbitmq_server, vhost)
        inside.call(add)
        assert inside.call(lambda: consumption.pause("odd"))
        rabbitmq_server.delete_queue("odd", vhost)
        with unreadable(kind, rabbitmq_server, vhost):
            assert inside.call(lambda: consumption.resume("odd"))
            assert list(consumption.refused_queues) == ["odd"]
            assert consumption._timer is not None  # it is tried again
        make_readable(rabbitmq_server, vhost)
        inside.call(consumption._ask_again)
        inside.send("note", 1, queue="odd")
        wait_until(lambda: noted.ran == [1], what="the task")
        assert inside.worker.counters.connections_lost == 0
    finally:
        inside.close()


def wrong_addresses(redis: str, amqp: str) -> dict[str, tuple[str, str]]:
    """What is wrong, the address, and what the last line names."""
    server = redis.rpartition("/")[0]
    return {
        "redis password": (redis.replace("redis://", "redis://nobody:wrong@"), "password"),
        "redis database": (f"{server}/99999", "database"),
        "amqp password": (amqp.replace("guest:guest", "guest:wrong"), "password"),
        "amqp virtual host": (f"{amqp}-no-such", "virtual host"),
    }


@pytest.mark.parametrize("what", wrong_addresses("redis://h/0", "amqp://guest:guest@h/v"))
def test_a_worker_that_may_not_log_in_ends_with_a_line_and_its_own_code(
    shop: Shop, redis_url: str, amqp_url: str, what: str
) -> None:
    url, word = wrong_addresses(redis_url, amqp_url)[what]
    worker = shop.worker(url, "celery", wait=False)
    assert worker.wait() == REFUSED
    (line,) = [line for line in worker.lines if "CRITICAL" in line]
    assert word in line
    assert "wrong" not in line.replace("WRONGPASS", "")
    assert "Traceback" not in worker.output


@pytest.fixture
def acl(redis_server: RedisServer, redis_url: str) -> Iterator[Callable[[list[str]], str]]:
    """A Redis user with these rules; returns the URL for it."""
    client = redis_server.client()

    def make(rules: list[str]) -> str:
        client.execute_command("ACL", "SETUSER", "low", "reset", "on", ">secret", *rules)
        return redis_url.replace("redis://", "redis://low:secret@")

    yield make
    client.execute_command("ACL", "DELUSER", "low")


def test_a_redis_that_runs_no_scripts_ends_the_worker_with_the_way_out(
    shop: Shop, acl: Callable[[list[str]], str]
) -> None:
    url = acl(["~*", "&*", "+@all", "-@scripting"])
    worker = shop.worker(url, "celery", wait=False)
    assert worker.wait() == REFUSED
    (line,) = [line for line in worker.lines if "CRITICAL" in line]
    assert "evalsha" in line
    assert "ACL SETUSER" in line
    assert worker.output.count("Connected to") == 1


def test_a_worker_that_may_ask_again_goes_on_when_the_broker_was_changed(
    acl: Callable[[list[str]], str], redis_server: RedisServer
) -> None:
    noted = Noted()
    url = acl(["~*", "&*", "+@all", "-@scripting"])
    settings = {"broker_url": url, "result_backend": "disabled://"}
    inside = Inside({**settings, "broker_channel_error_retry": True}, noted).start(wait=False)
    try:
        wait_until(lambda: inside.worker.counters.connections_lost > 2, what="tries")
        redis_server.client().execute_command("ACL", "SETUSER", "low", "+@all")
        inside.wait_until_ready()
        inside.send("note", 1)
        wait_until(lambda: noted.ran == [1], what="the task")
    finally:
        inside.close()


class Noted:
    def __init__(self) -> None:
        self.ran: list[Any] = []

    def __call__(self, app: Umbel) -> None:
        @app.task(name="note")
        def note(value: Any) -> None:
            self.ran.append(value)


def test_a_refused_queue_is_consumed_once_the_broker_lets_it(
    odd_queue: tuple[str, str], redis_server: RedisServer, rabbitmq_server: RabbitMQServer
) -> None:
    url, _ = odd_queue
    noted = Noted()
    jobs = Exchange("celery_jobs")
    queues = [Queue(name, jobs, routing_key=name) for name in ("celery", "odd", "more")]
    settings = {"broker_url": url, "result_backend": "disabled://", "task_queues": queues}
    inside = Inside(settings, noted).start()
    try:
        consumption = inside.worker.consumption
        assert list(consumption.refused_queues) == ["odd"]
        inside.break_connection()
        assert list(consumption.refused_queues) == ["odd"]
        with pytest.raises(ValueError, match="queue odd cannot be consumed"):
            inside.call(
                lambda: consumption.add(
                    "odd", exchange="celery_jobs", exchange_type="direct", routing_key="odd"
                )
            )
        assert inside.call(lambda: consumption.pause("celery"))
        place = url.rsplit("/", 1)[1]
        if url.startswith("redis"):
            redis_server.client(int(place)).delete("odd")
        else:
            rabbitmq_server.delete_queue("odd", place)
        inside.call(consumption._ask_again)
        assert consumption.refused_queues == {}
        assert inside.worker.is_ready()
        inside.send("note", "at last", queue="odd")
        wait_until(lambda: noted.ran == ["at last"], what="the task")
        assert inside.worker.counters.connections_lost == 1  # the one that was broken above
    finally:
        inside.close()


def test_a_worker_that_was_connected_waits_for_its_login_to_work_again(
    acl: Callable[[list[str]], str], redis_server: RedisServer
) -> None:
    noted = Noted()
    url = acl(["~*", "&*", "+@all"])
    inside = Inside({"broker_url": url, "result_backend": "disabled://"}, noted).start()
    try:
        client = redis_server.client()
        client.execute_command("ACL", "SETUSER", "low", "resetpass", ">another")
        client.execute_command("CLIENT", "KILL", "USER", "low")
        wait_until(lambda: not inside.worker.ready_now, what="the loss")
        client.execute_command("ACL", "SETUSER", "low", ">secret")
        inside.wait_until_ready()
        inside.send("note", 1)
        wait_until(lambda: noted.ran == [1], what="the task")
    finally:
        inside.close()


def test_events_that_the_broker_refuses_are_reported_once_and_stop_no_task(
    rabbitmq_server: RabbitMQServer, amqp_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with rabbitmq_server.connection(amqp_url.rsplit("/", 1)[1]) as connection:
        connection.channel().exchange_declare("celeryev", "headers", durable=True)
    noted = Noted()
    inside = Inside({"broker_url": amqp_url, "result_backend": "disabled://"}, noted).start()
    try:
        inside.send("note", 1)
        wait_until(lambda: noted.ran == [1], what="the task")

        def reports() -> list[str]:
            return [line for line in caplog.messages if "inequivalent arg 'type'" in line]

        lines = wait_until(reports, what="the report")
        assert all("or delete it there" in line for line in lines)
        assert len(lines) == len({line.split(":")[0] for line in lines}), lines
    finally:
        inside.close()


DEPLOYING = (ROOT / "docs" / "deploying.md").read_text()


@pytest.fixture(params=["redis", "amqp"])
def least(request: pytest.FixtureRequest) -> str:
    """The address for a user with the rights that docs/deploying.md lists, and no others."""
    if request.param == "redis":
        found = re.search(r"ACL SETUSER shop on '>PASSWORD' (.+)", DEPLOYING)
        assert found is not None
        make = request.getfixturevalue("acl")
        return str(make(shlex.split(found[1])))
    found = re.search(r"set_permissions shop '([^']+)' '([^']+)' '([^']+)'", DEPLOYING)
    assert found is not None
    return str(request.getfixturevalue("restricted")(*found.groups()))


def test_the_rights_that_the_docs_list_are_enough(least: str, shop: Shop) -> None:
    worker = shop.worker(least, "celery", "-E", "-n", "one@h")
    other = shop.worker(least, "celery", "-E", "-n", "two@h")
    shop.send("celery", '"one"')
    wait_until(lambda: "ran one" in worker.output + other.output, what="the task")
    asked = shop.run("inspect", "ping")
    assert asked.process.returncode == 0
    assert "one@h" in asked.output
    assert "two@h" in asked.output
    app = Umbel("client", broker=least, backend="disabled://", set_as_current=False)
    app.signature("shop.note", ("elected",)).election()
    wait_until(lambda: "ran elected" in worker.output + other.output, what="the elected task")
    app.close()
    assert shop.run("status").process.returncode == 0
    lines = [*worker.lines, *other.lines]
    assert [one for one in lines if "WARNING" in one and ": ran " not in one] == []
    assert [worker.stop(), other.stop()] == [0, 0]
