"""The test tools themselves: servers that can be relied on to be there, and to be gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from kombu import Connection

from tests.servers import LOCAL_PORTS, RabbitMQServer, RedisServer, free_port, wait_until
from tests.workers import ROOT, Program, program_environment


def test_no_socket_gets_a_free_port_for_its_own_end() -> None:
    low, high = map(int, LOCAL_PORTS.read_text().split())
    ports = [free_port() for _ in range(100)]
    assert not [port for port in ports if low <= port <= high]
    assert len(set(ports)) == 100


def test_a_message_goes_through_the_broker(broker_url: str) -> None:
    with Connection(broker_url) as connection:
        queue = connection.SimpleQueue("letters")
        queue.put({"answer": 42})
        message = queue.get(timeout=30)
        message.ack()
        queue.close()
    assert message.payload == {"answer": 42}


def test_every_test_gets_a_redis_database_of_its_own(
    redis_server: RedisServer, redis_url: str
) -> None:
    db = int(redis_url.rsplit("/", 1)[1])
    assert redis_server.client(db).dbsize() == 0
    redis_server.client(db).set("left", "behind")
    assert redis_server.client(db + 1).get("left") is None


def test_redis_keeps_its_data_when_it_is_killed_and_restarted(
    redis_server: RedisServer, redis_url: str
) -> None:
    db = int(redis_url.rsplit("/", 1)[1])
    redis_server.client(db).set("key", "kept")
    redis_server.kill()
    assert not redis_server.answers()
    redis_server.restart()
    assert redis_server.client(db).get("key") == b"kept"


def test_rabbitmq_tells_what_is_in_its_queues(
    rabbitmq_server: RabbitMQServer, amqp_url: str
) -> None:
    vhost = amqp_url.rsplit("/", 1)[1]
    with Connection(amqp_url) as connection:
        connection.SimpleQueue("a queue").put("x")
        wait_until(lambda: rabbitmq_server.queue_length("a queue", vhost) == 1, what="the message")
    assert rabbitmq_server.queue_names(vhost) == ["a queue"]
    assert rabbitmq_server.queue_names("/") == []
    rabbitmq_server.delete_queue("a queue", vhost)
    assert rabbitmq_server.queue_names(vhost) == []


def test_rabbitmq_keeps_its_data_when_it_is_killed_and_restarted(
    rabbitmq_server: RabbitMQServer, amqp_url: str
) -> None:
    vhost = amqp_url.rsplit("/", 1)[1]
    with Connection(amqp_url, transport_options={"confirm_publish": True}) as connection:
        connection.SimpleQueue("durable").put("x")
    rabbitmq_server.kill()
    assert not rabbitmq_server.answers()
    rabbitmq_server.restart()
    assert rabbitmq_server.queue_length("durable", vhost) == 1


def test_rabbitmq_closes_its_connections_on_request(
    rabbitmq_server: RabbitMQServer, amqp_url: str
) -> None:
    with Connection(amqp_url) as connection:
        connection.connect()
        rabbitmq_server.close_connections()
        with pytest.raises(connection.connection_errors):
            connection.drain_events(timeout=10)


def test_a_line_of_a_program_can_be_waited_for(start: Callable[..., Program]) -> None:
    program = start([sys.executable, "-c", "print('port 17'); input()"])
    assert program.wait_for(r"port (\d+)")[1] == "17"
    assert program.wait() == 1
    assert "EOFError" in program.output


def test_waiting_ends_when_the_line_cannot_come_any_more(start: Callable[..., Program]) -> None:
    program = start([sys.executable, "-c", "print('good bye')"])
    with pytest.raises(AssertionError, match=r"(?s)ended without a line like 'ready'.*good bye"):
        program.wait_for("ready")


def test_a_program_gets_signals_and_is_killed_with_its_children(
    start: Callable[..., Program],
) -> None:
    source = (
        "import signal, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('signalled', flush=True))\n"
        "print('child', child.pid, flush=True)\n"
        "while True: signal.pause()\n"
    )
    program = start([sys.executable, "-c", source])
    child = psutil.Process(int(program.wait_for(r"child (\d+)")[1]))
    program.signal(signal.SIGUSR1)
    program.wait_for("signalled")
    program.kill()
    assert program.process.returncode == -signal.SIGKILL
    wait_until(lambda: _is_gone(child), what="the child to end")


def test_nothing_outlives_a_test_run_that_is_killed(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    source = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from tests.servers import RedisServer\n"
        f"server = RedisServer(Path({str(tmp_path)!r}))\n"
        "server.start()\n"
        "print('server', server.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # Not a `Program`: this one must die alone.
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=program_environment(ROOT),
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout.split()[1])
    wait_until(lambda: not psutil.pid_exists(pid) or _is_gone(psutil.Process(pid)))


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
