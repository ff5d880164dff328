"""Our AMQP transport in loops that wait: kombu's event loop, gevent's, and with TLS between.

What was read from the socket is not seen by a poller any more. Nothing may lie in the buffer until
the next message comes.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from kombu import Connection, Consumer, Queue
from kombu.asynchronous import Hub

from tests.servers import wait_until
from umbel.broker.amqp.batches import publish
from umbel.broker.amqp.connection import EVENTS_MAX
from umbel.broker.sessions import connections
from umbel.broker.tasks.batches import Parcel

LONG_S = 20.0


def fill(url: str, count: int, body: bytes = b"%d") -> None:
    with connections.connect(url) as connection:
        channel = connection.channel()
        Queue("q")(channel).declare()
        parcels = [
            Parcel(body % n, {"id": str(n)}, {}, "application/json", "utf-8", "", "q")
            for n in range(count)
        ]
        assert list(publish(channel, parcels))[-1] == count


class TLSProxy:
    """Ends TLS in front of a broker that has none."""

    def __init__(self, directory: Path, target_port: int) -> None:
        key, certificate = directory / "key.pem", directory / "certificate.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
                *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(key), "-out", str(certificate)),
            ],
            check=True,
            capture_output=True,
        )
        self.certificate = str(certificate)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                client = self._context.wrap_socket(plain, server_side=True)
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for ends in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._pass_on, args=ends, daemon=True)
                    thread.start()
                    self._threads.append(thread)

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)


@pytest.fixture(params=["plain", "tls"])
def opened(
    request: pytest.FixtureRequest, amqp_url: str, tmp_path: Path
) -> Iterator[Callable[..., Connection]]:
    made: list[Any] = []
    options: dict[str, Any] = {}
    url = amqp_url
    if request.param == "tls":
        port = urlsplit(amqp_url).port
        assert port is not None
        proxy = TLSProxy(tmp_path, port)
        url = amqp_url.replace("amqp://", "amqps://").replace(f":{port}/", f":{proxy.port}/")
        options["ssl"] = {"ca_certs": proxy.certificate, "cert_reqs": ssl.CERT_REQUIRED}

    def open_one(**more: Any) -> Connection:
        made.append(connections.connect(url, **options, **more))
        made[-1].connect()
        return made[-1]

    yield open_one
    for connection in made:
        connections.hang_up(connection, lost=True)
    if request.param == "tls":
        proxy.close()


class Turning:
    """A hub that consumes the queue, and how its turns went."""

    def __init__(self, connection: Connection, *, prefetch: int = 0) -> None:
        self.connection = connection
        self.channel: Any = connection.channel()
        self.came: list[Any] = []
        self.hub = Hub()
        self.vain_polls = 0  # that waited to the end and saw nothing
        self._poll = self.hub.poller.poll
        self.hub.poller.poll = self._counting_poll
        self.on_message: Callable[[Any], None] = self.came.append
        self.consumer = Consumer(self.channel, [Queue("q")], on_message=self._on_message)
        if prefetch:
            self.consumer.qos(prefetch_count=prefetch, apply_global=True)
        self.channel.gather_acks()
        self.consumer.consume()
        connection.transport.register_with_event_loop(connection.connection, self.hub)

    def _counting_poll(self, timeout: float) -> Any:
        events = self._poll(timeout)
        self.vain_polls += not events
        return events

    def _on_message(self, message: Any) -> None:
        self.on_message(message)

    def until(self, condition: Callable[[], Any]) -> int:
        """How many turns that takes."""
        deadline, turns = time.monotonic() + LONG_S, 0
        while not condition():
            assert time.monotonic() < deadline, f"in vain: {len(self.came)} came"
            self.hub.run_once()
            turns += 1
        return turns

    def close(self) -> None:
        self.connection.transport.unregister_from_event_loop(self.connection.connection, self.hub)
        self.hub.close()


def test_the_loop_gets_everything_without_waiting(
    opened: Callable[..., Connection], amqp_url: str
) -> None:
    fill(amqp_url, 1_000)
    turning = Turning(opened())
    turns = turning.until(lambda: len(turning.came) == 1_000)
    # Far less than a turn for each, and none that waited while something was left over.
    assert turns < 1_000 / 4
    assert turning.vain_polls == 0
    assert [m.decode() for m in turning.came] == list(range(1_000))
    turning.close()


def test_a_turn_handles_a_bounded_number_of_messages(
    opened: Callable[..., Connection], amqp_url: str
) -> None:
    fill(amqp_url, 500)
    turning = Turning(opened())
    seen: list[int] = []

    def count() -> bool:
        seen.append(len(turning.came))
        return len(turning.came) == 500

    turning.until(count)
    steps = [later - before for before, later in itertools.pairwise(seen)]
    # The socket and what was left over, in one turn.
    assert max(steps) <= 2 * EVENTS_MAX
    turning.close()


def test_slow_messages_are_handled_one_a_turn(
    opened: Callable[..., Connection], amqp_url: str
) -> None:
    """As with a pool that runs its tasks in the loop: what else is due is not put off."""
    fill(amqp_url, 10)
    turning = Turning(opened())
    wait_until(turning.connection.connection.has_input, LONG_S, "messages")
    most, before = 0, 0

    def slow(message: Any) -> None:
        turning.came.append(message)
        time.sleep(0.01)

    def count() -> bool:
        nonlocal most, before
        most, before = max(most, len(turning.came) - before), len(turning.came)
        return before == 10

    turning.on_message = slow
    turning.until(count)
    assert most <= 2
    turning.close()


def test_what_comes_with_the_answer_to_something_else_is_not_left_lying(
    opened: Callable[..., Connection], amqp_url: str
) -> None:
    fill(amqp_url, 200)
    turning = Turning(opened(), prefetch=1)
    turning.until(lambda: len(turning.came) == 1)
    for round_number in range(5):
        # The window is opened, and the messages come before the next answer, in one chunk.
        turning.consumer.qos(prefetch_count=2 + 20 * (round_number + 1), apply_global=True)
        expected = 2 + 20 * (round_number + 1)
        turning.channel.queue_declare("q", passive=True)
        wait_until(partial(_sees_all, turning, expected), LONG_S, "the window to be full")
        turning.until(lambda n=expected: len(turning.came) == n)
    assert turning.vain_polls == 0
    turning.close()


def _sees_all(turning: Turning, expected: int) -> bool:
    """Ask questions until the broker has sent all; what comes before each answer is handled."""
    turning.channel.queue_declare("q", passive=True)
    return len(turning.came) >= expected or turning.connection.connection.has_input()


def test_acks_are_written_before_the_loop_waits(
    opened: Callable[..., Connection], amqp_url: str
) -> None:
    fill(amqp_url, 400)
    turning = Turning(opened(), prefetch=10)

    def take(message: Any) -> None:
        turning.came.append(message)
        message.ack()

    turning.on_message = take
    turning.until(lambda: len(turning.came) == 400)
    assert turning.vain_polls == 0
    turning.hub.call_soon(lambda: None)
    turning.until(lambda: not turning.connection.connection.gathering)
    turning.connection.collect()
    with connections.connect(amqp_url) as other:
        wait_until(
            lambda: other.channel().queue_declare("q", passive=True).consumer_count == 0,
            LONG_S,
            "the broker to notice",
        )
        assert other.channel().queue_declare("q", passive=True).message_count == 0
    turning.hub.close()


def test_an_error_of_a_message_leaves_the_others(
    opened: Callable[..., Connection], amqp_url: str
) -> None:
    fill(amqp_url, 100)
    turning = Turning(opened())

    def fail(message: Any) -> None:
        turning.came.append(message)
        if len(turning.came) % 10 == 0:
            raise ValueError("no good")

    turning.on_message = fail
    failed = 0
    while len(turning.came) < 100:
        try:
            turning.hub.run_once()
        except ValueError:
            failed += 1
            turning.hub._loop = None
    assert failed == 10
    assert turning.vain_polls == 0
    turning.close()


def test_large_messages_pass(opened: Callable[..., Connection], amqp_url: str) -> None:
    fill(amqp_url, 6, b'"' + b"x" * 2_000_000 + b'%d"')
    turning = Turning(opened(), prefetch=2)

    def take(message: Any) -> None:
        turning.came.append(len(message.body))
        message.ack()

    turning.on_message = take
    turning.until(lambda: len(turning.came) == 6)
    assert turning.came == [2_000_003] * 6
    turning.close()


def test_descriptors_are_closed_with_the_connection(
    opened: Callable[..., Connection], amqp_url: str
) -> None:
    fill(amqp_url, 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        turning = Turning(opened())
        turning.close()
        turning.connection.close()
    wait_until(
        lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 12, LONG_S, "them to close"
    )  # the proxy has some of its own


GEVENT = """
from gevent import monkey; monkey.patch_all()
import sys, time, gevent
from kombu import Consumer, Queue
from umbel.broker.sessions import connections
from umbel.broker.amqp.connection import BufferedConnection

turns = 0
def ticking():
    global turns
    while True:
        turns += 1
        gevent.sleep(0.005)
gevent.spawn(ticking)
connection = connections.connect(sys.argv[1], heartbeat=5)
channel = connection.channel()
assert isinstance(connection.connection, BufferedConnection)
came = []
def take(message):
    came.append(message.decode())
    message.ack()
channel.gather_acks()
consumer = Consumer(channel, [Queue("q")], on_message=take)
consumer.qos(prefetch_count=50)
consumer.consume()
while len(came) < 500:
    connection.drain_events(timeout=5)
assert came == list(range(500)), came
before, began = turns, time.monotonic()
for timeout in (0, 0.3):
    try:
        connection.drain_events(timeout=timeout)
    except TimeoutError:
        pass
    else:
        raise AssertionError("something came")
assert turns - before > 10, "the others stood still"
assert time.monotonic() - began < 3
connection.close()
print("whole")
"""


def test_greenlets_wait_without_stopping_the_others(amqp_url: str) -> None:
    fill(amqp_url, 500)
    done = subprocess.run(
        [sys.executable, "-c", GEVENT, amqp_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "whole\n", done.stderr
    with connections.connect(amqp_url) as connection:
        assert connection.channel().queue_declare("q", passive=True).message_count == 0
