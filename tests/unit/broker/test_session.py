"""Holding connections: failover, what is logged of an outage, pauses, stopping, hanging up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError
from redis.exceptions import NoPermissionError

from tests.proxy import Proxy
from tests.servers import free_port, wait_until
from umbel.broker.sessions import connections, session
from umbel.broker.sessions.connections import BrokerConnection, connect, driver, hang_up
from umbel.broker.sessions.permanent import ASK_AGAIN_S
from umbel.broker.sessions.session import Outage, Session, opened, opening
from umbel.cluster.backoff import Backoff

logger = logging.getLogger("umbel.test")
FAST = Backoff(0.001, 0.01)
# Nobody waits for it to the end.
ENDLESS = Backoff(10_000.0, 10_000.0)


def away() -> str:
    """The address of a broker that is not there."""
    return f"redis://127.0.0.1:{free_port()}/0"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger.name)
    return caplog


def words(log: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [one.message for one in log.records if (one.name, one.levelno) == (logger.name, level)]


# -- opening -----------------------------------------------------------------------------------


def test_the_first_broker_of_the_list_that_answers_is_taken() -> None:
    connection = opened(connect([away(), away(), "memory://"]))
    assert connection.connected
    assert driver(connection) == "memory"
    hang_up(connection)


def test_every_broker_of_the_list_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    establish = BrokerConnection._establish_connection

    def count(self: Connection) -> object:
        tried.append(self.as_uri())
        return establish(self)

    monkeypatch.setattr(BrokerConnection, "_establish_connection", count)
    urls = [away(), away(), away()]
    with pytest.raises(OperationalError, match="refused"):
        opened(connect(urls))
    assert [urlsplit(uri).port for uri in tried] == [urlsplit(url).port for url in urls]


def fail(connection: Connection, failure: Exception, proxy: Proxy | None = None) -> None:
    with opening(connection):
        connection.channel()
        if proxy is not None:
            assert proxy.swallow(to_server=True) == proxy.swallow(to_server=False) == 1
        raise failure


@pytest.mark.parametrize("lost", [True, False], ids=["the connection", "a channel"])
def test_what_fails_during_preparation_hangs_up(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    told: list[bool] = []

    def note(connection: Connection, *, lost: bool = False) -> None:
        told.append(lost)
        hang_up(connection, lost=lost)

    monkeypatch.setattr(session, "hang_up", note)
    connection = connect("memory://")
    failure = ConnectionError if lost else connection.channel_errors[0]
    with pytest.raises(failure):
        fail(connection, failure("no"))
    assert not connection.connected
    assert told == [lost]


def test_closing_after_a_loss_waits_for_nobody(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "GOODBYE_S", 60.0)
    port = urlsplit(amqp_url).port
    assert port is not None
    began = time.monotonic()
    with Proxy(port) as proxy:
        connection = connect(amqp_url.replace(str(port), str(proxy.port), 1))
        with pytest.raises(ConnectionError):
            fail(connection, ConnectionError("a heartbeat did not come"), proxy)
    assert time.monotonic() - began < 30


# -- outages -----------------------------------------------------------------------------------


def test_an_outage_is_told_once_and_so_is_its_end(log: pytest.LogCaptureFixture) -> None:
    outage = Outage(logger, "receive words", FAST)
    outage.over()  # before there was one
    for _ in range(2):
        for number in range(3):
            outage.failure(ConnectionError(f"failure {number}"))
        outage.over()
        outage.over()
    (first, second), later = words(log, logging.WARNING), words(log, logging.DEBUG)
    assert first.startswith("Cannot receive words: ConnectionError: failure 0. Retrying in 0.0 s")
    assert second.startswith("Cannot receive words: ConnectionError: failure 0.")
    assert len(later) == 4
    assert words(log, logging.INFO) == ["Can receive words again"] * 2


def test_the_pauses_of_an_outage_grow_and_the_next_outage_begins_anew() -> None:
    outage = Outage(logger, "x", Backoff(1.0, 4.0), dice=lambda: 1.0)
    exc = ConnectionError("gone")
    assert [outage.failure(exc) for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    outage.over()
    assert outage.failure(exc) == 1.0


def test_a_broker_that_refuses_for_good_is_asked_once_a_minute(
    log: pytest.LogCaptureFixture,
) -> None:
    pause_s = Outage(logger, "receive words").failure(NoPermissionError("no channel for you"))
    assert pause_s == ASK_AGAIN_S
    (said,) = words(log, logging.WARNING)
    assert "no channel for you. Give the user the permissions" in said
    assert said.endswith("(ACL SETUSER). Retrying in 60.0 s")


def test_what_is_no_news_is_not_told_and_neither_is_its_end(log: pytest.LogCaptureFixture) -> None:
    outage = Outage(logger, "receive words", FAST)
    outage.failure(ConnectionError("gone"), is_news=False)
    outage.failure(ConnectionError("gone"))
    outage.over()
    assert not words(log, logging.WARNING)
    assert not words(log, logging.INFO)


# -- sessions ----------------------------------------------------------------------------------


class Reader:
    """Takes what is put into a queue, in a session."""

    def __init__(self, url: str, backoff: Backoff = FAST) -> None:
        self.heard: list[object] = []
        self.connections: list[Connection] = []
        outage = Outage(logger, "receive words", backoff)
        self.session = Session(lambda: connect(url), self.use, outage, name="reader")

    def use(self, connection: Connection, session: Session) -> None:
        self.connections.append(connection)
        queue = connection.SimpleQueue("words")
        session.began()
        while not session.stopping.is_set():
            try:
                message = queue.get(timeout=0.05)
            except queue.Empty:
                continue
            self.heard.append(message.payload)
            message.ack()

    def ended(self) -> bool:
        return not self.session._thread.is_alive()


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    port = urlsplit(redis_url).port
    assert port is not None
    with Proxy(port) as made:
        yield made


def say(url: str, word: str) -> None:
    with connect(url) as connection, connection.SimpleQueue("words") as queue:
        queue.put(word)


def test_a_session_outlives_its_connections(
    redis_url: str, proxy: Proxy, log: pytest.LogCaptureFixture
) -> None:
    port = urlsplit(redis_url).port
    reader = Reader(redis_url.replace(str(port), str(proxy.port), 1))
    reader.session.start()
    reader.session.start()  # it has begun: nothing happens
    assert reader.session.ready.wait(10)
    say(redis_url, "one")
    wait_until(lambda: reader.heard == ["one"], what="the first word")
    proxy.refuse(True)
    proxy.cut()
    wait_until(lambda: len(words(log, logging.DEBUG)) > 3, what="some tries in vain")
    assert not reader.session.ready.is_set()
    assert reader.session.failure is not None
    proxy.refuse(False)
    assert reader.session.ready.wait(10)
    assert reader.session.failure is None
    say(redis_url, "two")
    wait_until(lambda: reader.heard == ["one", "two"], what="the second word")
    reader.session.stop(10)
    assert reader.ended()
    assert len(words(log, logging.WARNING)) == 1
    assert words(log, logging.INFO) == ["Can receive words again"]
    assert not any(connection.connected for connection in reader.connections)
    assert not reader.session.ready.is_set()


def test_a_stop_ends_a_pause_at_once(log: pytest.LogCaptureFixture) -> None:
    reader = Reader(away(), ENDLESS)
    reader.session.start()
    wait_until(lambda: words(log, logging.WARNING), what="the first failure")
    reader.session.stop(30)
    assert reader.ended()
    assert not reader.connections


def test_what_fails_because_of_the_stop_is_no_news(log: pytest.LogCaptureFixture) -> None:
    def use(connection: Connection, session: Session) -> None:
        session.stopping.wait(10)
        raise ConnectionError("cut off in the middle")

    one = Session(lambda: connect("memory://"), use, Outage(logger, "x", ENDLESS), name="one")
    one.start()
    one.stop(30)
    assert not one._thread.is_alive()
    assert not log.records


def test_a_connection_that_is_opened_after_the_stop_is_closed_unused() -> None:
    may_connect, made = threading.Event(), connect("memory://")

    def late() -> Connection:
        may_connect.wait(10)
        return made

    used: list[Connection] = []
    one = Session(late, lambda c, _: used.append(c), Outage(logger, "x", ENDLESS), name="one")
    one.start()
    one.stop(0)
    may_connect.set()
    one.stop(10)
    assert not one._thread.is_alive()
    assert not used
    assert not made.connected


def test_a_session_that_never_began_can_be_stopped() -> None:
    reader = Reader("memory://")
    reader.session.stop(10)
    assert reader.session.stopping.is_set()
