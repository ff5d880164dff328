"""The control client on real brokers: breaks, crowds, and what is left behind (nothing)."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Consumer, Producer
from kombu.exceptions import OperationalError
from kombu.pidbox import Mailbox as KombuMailbox

from tests.proxy import Proxy
from tests.responders import SILENCE, Responder
from tests.servers import RabbitMQServer, RedisServer, free_port, wait_until
from tests.workers import Program
from umbel import Umbel
from umbel.app.control import collector
from umbel.app.control.mailbox import mailboxes_for
from umbel.broker.broadcast import reply_lists
from umbel.broker.broadcast.replies import open_inbox, publish_reply
from umbel.broker.embedded.server import EMBEDDED_URL
from umbel.wire.control import (
    ReplyTo,
    Request,
    leased_exchange_name,
    read_request,
    write_request,
)

LONG_S = 40.0
GONE_S = 15.0
WITH_KEYPREFIX = {"broker_transport_options": {"global_keyprefix": "app1:"}}


class Place:
    """A broker with clients and nodes, and a look at what they left there."""

    def __init__(self, url: str | None, list_entities: Callable[[], set[str]], **settings: Any):
        self.url = url
        self.entities = list_entities
        self._settings = settings
        self._closed: list[Any] = []

    def app(self, url: str | None = None, **settings: Any) -> Umbel:
        chosen = {**self._settings, **settings}
        app = Umbel("t", broker=url or self.url, set_as_current=False, **chosen)
        self._closed.append(app)
        return app

    def node(self, hostname: str = "w1@h", **settings: Any) -> Responder:
        made = Responder(self.app(**settings), hostname)
        self._closed.append(made)
        # Redis subscribes some time after it was told to.
        probe = self.app(**settings)
        wait_until(
            lambda: probe.control.ping([hostname], timeout=0.3), what=f"{hostname} to answer"
        )
        probe.close()
        made.seen.clear()
        made.raw.clear()
        return made

    def close(self) -> None:
        for one in reversed(self._closed):
            one.close()


@pytest.fixture
def redis_place(redis_url: str, redis_server: RedisServer) -> Iterator[Place]:
    place = Place(redis_url, lambda: redis_server.entities(redis_url))
    yield place
    place.close()


@pytest.fixture
def amqp_place(amqp_url: str, rabbitmq_server: RabbitMQServer) -> Iterator[Place]:
    place = Place(amqp_url, lambda: rabbitmq_server.entities(amqp_url))
    yield place
    place.close()


@pytest.fixture
def embedded_place(tmp_path: Path) -> Iterator[Place]:
    place = Place(EMBEDDED_URL, set, embedded_directory=str(tmp_path))
    yield place
    place.close()


@pytest.fixture(params=["redis", "amqp"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


class CuttingProxy(Proxy):
    """A proxy that can end every connection there is."""

    def cut(self) -> int:
        with self._lock:
            ends = list(self._ways)
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return len(ends)


@pytest.fixture
def proxy(place: Place) -> Iterator[CuttingProxy]:
    assert place.url is not None
    with CuttingProxy(port_of(place.url)) as made:
        yield made


def port_of(url: str) -> int:
    found = re.search(r":(\d+)/", url)
    assert found
    return int(found[1])


def through(proxy: Proxy, url: str | None) -> str:
    assert url is not None
    return url.replace(f":{port_of(url)}/", f":{proxy.port}/")


# -- asking --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["redis", "amqp", "embedded"])
def test_nodes_answer_on_every_broker(kind, request):
    place: Place = request.getfixturevalue(f"{kind}_place")
    first, second, app = place.node("w1@h"), place.node("w2@h"), place.app()
    replies = app.control.ping(limit=2, timeout=LONG_S)
    assert sorted(name for reply in replies for name in reply) == ["w1@h", "w2@h"]
    big = {"text": "é" * 300_000}
    inspect = app.control.inspect(destination=["w2@h"], timeout=LONG_S)
    assert inspect._request("echo", **big) == {"w2@h": big}
    assert (len(first.seen), len(second.seen)) == (1, 2)


def test_the_second_call_finds_the_inbox_open_and_is_quick(place):
    place.node()
    app = place.app()
    app.control.ping(limit=1, timeout=LONG_S)
    took = []
    for _ in range(5):
        began = time.monotonic()
        assert app.control.ping(limit=1, timeout=LONG_S)
        took.append(time.monotonic() - began)
    assert min(took) < 0.1


def test_the_deadline_holds_while_stale_replies_come(place, background):
    node, app = place.node(), place.app()
    node.handlers["silent"] = lambda _: SILENCE
    app.control.broadcast("silent", reply=True, timeout=0.1)
    stale = node.seen[-1][0]
    began, ended = time.monotonic(), threading.Event()
    call = background(app.control.broadcast, "silent", reply=True, timeout=0.8, limit=1)
    call.add_done_callback(lambda _: ended.set())
    while not ended.wait(0.05):
        node.reply(stale, "stale")
    assert call.result() == []
    assert time.monotonic() - began < 2.0
    assert app.control.mailbox.counts["stale"] > 3


def test_a_client_that_is_alone_hears_nobody(place):
    assert place.app().control.inspect(timeout=0.2).ping() is None


def test_a_key_prefix_is_put_before_everything(redis_place):
    node = redis_place.node(**WITH_KEYPREFIX)
    app = redis_place.app(**WITH_KEYPREFIX)
    assert app.control.ping(limit=1, timeout=LONG_S) == [{"w1@h": {"ok": "pong"}}]
    assert all(name.startswith("app1:") for name in redis_place.entities())
    app.close()
    node.close()
    assert not any("reply" in name for name in redis_place.entities())


def test_a_server_that_does_not_tell_of_changes_is_asked(redis_place, redis_server):
    client = redis_server.client()
    rules = ("on", ">secret", "~*", "&*", "+@all", "-client|tracking")
    client.execute_command("ACL", "SETUSER", "plain", *rules)
    try:
        node = redis_place.node()
        url = redis_place.url.replace("redis://", "redis://plain:secret@")
        app = redis_place.app(url)
        assert app.control.ping(limit=1, timeout=LONG_S) == [{"w1@h": {"ok": "pong"}}]
        assert len(node.seen) == 1
    finally:
        client.execute_command("ACL DELUSER plain")


# -- queues --------------------------------------------------------------------------------


def test_the_reply_queue_on_rabbitmq_is_declared_as_peers_declare_it(amqp_place, rabbitmq_server):
    amqp_place.node()
    app = amqp_place.app()
    app.control.ping(limit=1, timeout=LONG_S)
    (name,) = [one for one in amqp_place.entities() if ".reply." in one]
    assert re.fullmatch(r"[0-9a-f-]{36}\.reply\.celery\.pidbox", name)
    vhost = amqp_place.url.rsplit("/", 1)[1]
    (shown,) = re.findall(r"\{.*\}", queue_info(rabbitmq_server, vhost, name), re.DOTALL)
    assert '<<"x-expires">>,signedint,10000' in shown
    assert '<<"x-message-ttl">>,signedint,300000' in shown
    assert "{auto_delete,true}" in shown
    assert "{durable,false}" in shown
    assert "{exclusive,true}" in shown


def queue_info(server: RabbitMQServer, vhost: str, name: str) -> str:
    text = f'<<"{name}">>'
    resource = f'{{resource, <<"{vhost}">>, queue, {text}}}'
    found = server._call("rabbit_amqqueue", "lookup", resource)
    info = server._call(
        "rabbit_amqqueue", "info", "Q, [auto_delete, durable, exclusive, arguments]"
    )
    shown = server.evaluate(f'{{ok, Q}} = {found}, io_lib:format("~p", [{info}])')
    return re.sub(r"\s+", "", shown)


def test_a_client_that_is_closed_leaves_nothing(place):
    place.node()
    before = place.entities()
    app = place.app()
    app.control.ping(limit=1, timeout=LONG_S)
    assert place.entities() > before
    app.close()
    wait_until(lambda: place.entities() <= before, what="everything to go")


def test_a_client_that_asks_no_more_leaves_nothing(place, monkeypatch):
    monkeypatch.setattr(collector, "LINGER_S", 0.05)
    place.node()
    before = place.entities()
    app = place.app()
    app.control.ping(limit=1, timeout=LONG_S)
    wait_until(lambda: place.entities() <= before, what="everything to go")
    assert app.control.ping(limit=1, timeout=LONG_S)


ASKS_AND_WAITS = """
    import sys
    from umbel import Umbel

    app = Umbel("killed", broker=sys.argv[1])
    app.control.ping(timeout=60)
"""


@pytest.mark.parametrize("moment", ["soon", "late"])
def test_a_client_killed_between_request_and_reply_leaves_nothing(place, start, moment):
    node = place.node()
    before = place.entities()
    node.hold()
    client: Program = start([sys.executable, "-c", textwrap.dedent(ASKS_AND_WAITS), place.url])
    node.wait_until_holding()
    client.kill()
    killed = time.monotonic()
    if moment == "late":
        wait_until(lambda: place.entities() <= before, GONE_S, "everything to go")
        node.let_go()
        assert place.entities() <= before, "the late reply made something"
    else:
        node.let_go()
    wait_until(
        lambda: place.entities() <= before, GONE_S - (time.monotonic() - killed), "all to go"
    )


def test_a_reply_after_the_death_of_a_client_is_not_sent(redis_place, redis_server):
    node = redis_place.node()
    gone = Request(
        method="ping", ticket="t", reply_to=ReplyTo(leased_exchange_name("celery"), "nobody")
    )
    before = redis_place.entities()
    assert not node.reply(gone, 1)
    assert redis_place.entities() == before


def test_living_clients_sweep_away_what_dead_ones_left(redis_place, redis_server, monkeypatch):
    """Also the list that a worker which sets no expiry has made again."""
    client = redis_server.client(int(redis_place.url.rsplit("/", 1)[1]))
    table = f"_kombu.binding.{leased_exchange_name('celery')}"
    dead = [f"dead{number}.reply.celery.pidbox" for number in range(5)]
    client.sadd(table, *(f"k\x06\x16\x06\x16{queue}" for queue in dead))
    client.lpush(dead[0], "late")
    client.lpush("somebody", "else's")
    monkeypatch.setattr(reply_lists, "SWEEP_S", 0.1)
    redis_place.node()
    app = redis_place.app()
    app.control.ping(limit=1, timeout=LONG_S)
    wait_until(lambda: client.scard(table) == 1, what="the dead to be swept")
    assert not client.exists(*dead)
    assert client.exists("somebody")


def test_nobody_is_asked_to_reply_into_a_task_queue(place):
    node = place.node()
    for exchange in ("celery", "", "amq.direct", "reply.other.pidbox"):
        request = Request(method="ping", ticket="t", reply_to=ReplyTo(exchange, "celery"))
        assert not node.reply(request, {"task": "evil"})


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_a_client_of_kombu_takes_our_replies_and_its_queue_gets_an_expiry(
    kind, request, redis_server
):
    place: Place = request.getfixturevalue(f"{kind}_place")
    node = place.node()
    with Connection(place.url) as connection:
        mailbox = KombuMailbox("celery", type="fanout", serializer="json", queue_expires=10.0)(
            connection
        )
        assert mailbox.multi_call("ping", timeout=LONG_S, limit=1) == [{"w1@h": {"ok": "pong"}}]
        if kind == "redis":
            channel = connection.default_channel
            mailbox.reply_queue(channel).declare()
            to = ReplyTo(mailbox.reply_exchange.name, mailbox.oid)
            request_ = Request(method="ping", ticket="t", reply_to=to)
            assert node.reply(request_, 1)
            client = redis_server.client(int(place.url.rsplit("/", 1)[1]))
            assert 0 < client.pttl(mailbox.reply_queue.name) <= 10_000
            channel.queue_delete(mailbox.reply_queue.name)
            assert not node.reply(request_, 1)
            assert not client.exists(mailbox.reply_queue.name)


def test_replies_sent_while_requests_are_delivered_do_not_pile_up(amqp_place):
    """py-amqp would deliver the next request inside of each reply, until the stack is full."""
    count, app = 2_000, amqp_place.app()
    mailboxes = mailboxes_for(app)
    answered, depth, deepest = 0, 0, 0
    connection, other = app.connection(heartbeat=0), app.connection(heartbeat=0)

    def answer(message: Any) -> None:
        nonlocal answered, depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        request = read_request(
            message.body, message.content_type, message.content_encoding, message.headers,
            accept=app.accept,
        )  # fmt: skip
        assert publish_reply(channel, request, "w1@h", {"ok": "pong"})
        answered += 1
        depth -= 1

    with connection, other, connection.channel() as channel:
        inbox = open_inbox(other, mailboxes, "me")
        queue = mailboxes.node_queue("w1@h")(channel)
        queue.declare()
        written = write_request(Request(method="ping", ticket="t", reply_to=inbox.reply_to))
        producer = Producer(channel)
        for _ in range(count):
            producer.publish(
                written.body, exchange=queue.exchange.name, routing_key="", headers=written.headers,
                content_type=written.content_type, content_encoding=written.content_encoding,
            )  # fmt: skip
        with Consumer(channel, [queue], on_message=answer, no_ack=True, accept=None):
            while answered < count:
                connection.drain_events(timeout=LONG_S)
        received = 0
        while received < count:
            found = inbox.wait(LONG_S)
            assert found
            received += len(found)
        inbox.close()
    assert deepest == 1


# -- crowds --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_calls_of_twenty_clients_get_exactly_their_own_replies(place):
    clients, calls_each = 20, 50
    nodes = {place.node(name).hostname for name in ("w1@h", "w2@h")}
    apps = [place.app() for _ in range(clients)]
    begin = threading.Barrier(clients * calls_each)

    def ask(number: int) -> list[dict[str, Any]]:
        begin.wait(60)
        replies = apps[number % clients].control.broadcast(
            "echo", {"number": number}, reply=True, limit=3, destination=sorted(nodes), timeout=60
        )
        assert replies is not None
        return replies

    with ThreadPoolExecutor(clients * calls_each) as pool:
        results = list(pool.map(ask, range(clients * calls_each)))
    for number, replies in enumerate(results):
        found = {name: value for reply in replies for name, value in reply.items()}
        assert found == {name: {"number": number} for name in nodes}
        assert len(replies) == len(nodes)
    assert all(not app.control.mailbox.counts for app in apps)


def test_a_forked_child_has_an_inbox_of_its_own(place, start):
    program = """
        import os, sys
        from umbel import Umbel

        app = Umbel("forks", broker=sys.argv[1])
        control = app.control
        assert control.ping(limit=1, timeout=20)
        child = os.fork()
        assert control.ping(limit=1, timeout=20), os.getpid()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            assert control.ping(limit=1, timeout=20)
            print("both were answered", flush=True)
        app.close()
        os._exit(0)
    """
    node = place.node()
    start([sys.executable, "-c", textwrap.dedent(program), place.url]).wait_for("both were")
    keys = [request.reply_to.routing_key for request, _ in node.seen]
    assert len(keys) == 4
    assert len(set(keys)) == 2


# -- trouble -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_is_away_is_named_without_its_password(scheme):
    url = f"{scheme}://user:secret@127.0.0.1:{free_port()}/0"
    app = Umbel("t", broker=url, set_as_current=False, task_publish_retry=False)
    shown = re.escape(url.replace("secret", "**"))
    began = time.monotonic()
    with pytest.raises(OperationalError, match=f"replies can not be received from {shown}"):
        app.control.ping(timeout=1)
    with pytest.raises(OperationalError, match=f"could not be sent to {shown}"):
        app.control.revoke("a")
    assert time.monotonic() - began < 10
    app.close()


def test_a_reply_is_received_after_the_connection_broke(place, proxy, background, request):
    node, app = place.node(), place.app(through(proxy, place.url))
    node.hold()
    call = background(app.control.ping, limit=1, timeout=LONG_S)
    node.wait_until_holding()
    asked = node.seen[-1][0]
    assert proxy.cut()
    if place.url.startswith("amqp"):
        # The queue went with the connection and comes back with the next.
        queue = f"{asked.reply_to.routing_key}.reply.celery.pidbox"
        wait_until(lambda: queue not in place.entities(), what="the queue to go")
        server = request.getfixturevalue("rabbitmq_server")
        where = ("reply.celery.pidbox", place.url.rsplit("/", 1)[1])
        wait_until(lambda: queue in server.bound_queues(*where), what="the queue to come back")
    node.let_go()
    assert call.result(LONG_S) == [{"w1@h": {"ok": "pong"}}]


def test_a_broker_that_goes_for_good_ends_the_call(place, background):
    node = place.node()
    proxy = CuttingProxy(port_of(place.url))
    app = place.app(through(proxy, place.url))
    node.hold()
    call = background(app.control.ping, timeout=60)
    node.wait_until_holding()
    proxy.close()
    with pytest.raises(OperationalError, match="replies can not be received from"):
        call.result(LONG_S)


def test_a_broker_that_says_nothing_more_holds_nobody_beyond_the_deadline(place, proxy, background):
    node, app = place.node(), place.app(through(proxy, place.url))
    node.hold()
    began = time.monotonic()
    call = background(app.control.ping, timeout=2.0)
    node.wait_until_holding()
    proxy.swallow(to_server=False)
    proxy.swallow(to_server=True)
    node.let_go()
    assert call.result(LONG_S) == []
    assert time.monotonic() - began < 4.0


def test_a_restart_of_the_broker_is_survived(redis_place, redis_server, background):
    app = redis_place.app()
    node = redis_place.node()
    assert app.control.ping(limit=1, timeout=LONG_S)
    node.close()
    redis_server.restart()
    redis_place.node("w2@h")
    wait_until(lambda: _answers(app), LONG_S, "an answer after the restart")


def _answers(app: Umbel) -> bool:
    with contextlib.suppress(OperationalError):
        return bool(app.control.ping(limit=1, timeout=1.0))
    return False


def test_on_redis_a_call_ends_when_every_node_that_heard_it_has_answered(redis_place):
    nodes = [redis_place.node(f"w{number}@h") for number in range(3)]
    app = redis_place.app()
    began = time.monotonic()
    replies = app.control.ping(timeout=LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert sorted(name for reply in replies for name in reply) == [n.hostname for n in nodes]
    for node in nodes:
        node.close()
    began = time.monotonic()
    wait_until(lambda: app.control.ping(timeout=LONG_S) == [], LONG_S, "nobody to answer")
    assert time.monotonic() - began < LONG_S / 2


def test_opening_the_inbox_is_part_of_the_deadline(amqp_place, monkeypatch):
    amqp_place.node()
    app = amqp_place.app()
    ready = app.control.mailbox._ready

    def slowly(collector):
        found = ready(collector)
        threading.Event().wait(0.6)
        return found

    monkeypatch.setattr(app.control.mailbox, "_ready", slowly)
    began = time.monotonic()
    assert app.control.ping(timeout=1.5) == [{"w1@h": {"ok": "pong"}}]
    assert 1.5 <= time.monotonic() - began < 2.0
