"""Write-once registers: the same promises on every broker, and what each does when it is hurt."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import amqp
import pytest
from kombu import Exchange, Producer, Queue
from kombu.exceptions import OperationalError

from tests.proxy import Proxy
from tests.racers import QUEUE, election_ids, parcel_for, race_threads
from tests.servers import RabbitMQServer, RedisServer, free_port, wait_until
from tests.sizes import size
from tests.workers import Program
from umbel.broker.amqp import bounded
from umbel.broker.embedded.server import EMBEDDED_URL
from umbel.broker.registers import amqp as registers_amqp
from umbel.broker.registers import claims
from umbel.broker.registers.claims import Claim, Register
from umbel.broker.registers.register import MemoryRegister, register_for
from umbel.broker.sessions.connections import connect
from umbel.broker.tasks.batches import Parcel, publish_one

PROCESSES, IDS = 50, size(40, 200)
LONG_S = 20.0
ANYTHING = [
    "0b0d5d5e-8a0c-4e60-9f2a-0d6b7b1b2c3d",
    "wählt ihn!",
    "a'b\"c",
    "line\nbreak\0",
    "*.#",
    "\udcff",
    "x" * claims.ID_CHARS_MAX,
    "x" * 100,
    "x" * 101,
]
TOKENS = [
    "w1@h/1/2/3",
    "celery@ip-172-31-255-255.eu-central-1.compute.internal/12345/1794771703123456/10000",
    "wählt@ихн/1",
    "it's 'me' 100% & you?",
    "w" * 120,
]
_numbers = itertools.count(1)


class Place:
    """A broker, registers on it, and what has arrived in the queue of the parcels."""

    def __init__(self, url: str, prefix: str = "", directory: Path | None = None) -> None:
        self.url = url
        self._options = {"global_keyprefix": prefix} if prefix else {}
        self._directory = directory
        self._opened: list[Any] = []
        self.connection = self.connect()
        self.channel = self.connection.channel()
        self.declare(Queue(QUEUE))

    def connect(self, url: str | None = None) -> Any:
        made = connect(
            url or self.url, directory=self._directory, transport_options=dict(self._options)
        )
        self._opened.append(made)
        return made

    def register(self, url: str | None = None) -> Register:
        made = register_for(self.connect(url))
        assert made is not None
        self._opened.append(made)
        return made

    def declare(self, entity: Any) -> None:
        entity(self.channel).declare()

    def arrived(self, queue: str = QUEUE) -> list[Any]:
        """The messages that are in the queue; they are taken out."""
        found = []
        while (message := Queue(queue)(self.channel).get(no_ack=True)) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        for one in reversed(self._opened):
            one.close()


@pytest.fixture
def redis_place(redis_url: str) -> Iterator[Place]:
    yield from opened(Place(redis_url))


@pytest.fixture
def prefixed_place(redis_url: str) -> Iterator[Place]:
    yield from opened(Place(redis_url, "app1:"))


@pytest.fixture
def embedded_place(tmp_path: Path) -> Iterator[Place]:
    yield from opened(Place(EMBEDDED_URL, directory=tmp_path))


@pytest.fixture
def amqp_place(amqp_url: str) -> Iterator[Place]:
    yield from opened(Place(amqp_url))


@pytest.fixture
def memory_place() -> Iterator[Place]:
    place = Place("memory://")
    place.arrived()
    yield from opened(place)


def opened(place: Place) -> Iterator[Place]:
    yield place
    place.close()


@pytest.fixture(params=["redis", "prefixed", "embedded", "amqp", "memory"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


@pytest.fixture
def new_id() -> Callable[[], str]:
    """Ids that no other test has: what is in memory stays there."""
    return lambda: f"{time.time_ns()}-{next(_numbers)}"


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def bodies(messages: list[Any]) -> list[Any]:
    return [json.loads(message.body) for message in messages]


# -- what holds on every broker ------------------------------------------------------------


def test_who_claims_first_has_won_and_the_others_are_told_who_it_was(
    place: Place, new_id: Callable[[], str]
) -> None:
    id_, one, other = new_id(), place.register(), place.register()
    assert one.winner(id_) is None
    assert one.claim(id_, "w1@h/1") == Claim(True, "w1@h/1", sent=True)
    assert other.claim(id_, "w2@h/2") == Claim(False, "w1@h/1", sent=False)
    assert one.claim(id_, "w3@h/3") == Claim(False, "w1@h/1", sent=False)
    assert other.winner(id_) == one.winner(id_) == "w1@h/1"


def test_asking_for_the_winner_claims_nothing(place: Place, new_id: Callable[[], str]) -> None:
    id_, register = new_id(), place.register()
    assert [register.winner(id_) for _ in range(3)] == [None] * 3
    assert register.claim(id_, "w1").won


def test_the_message_of_the_winner_is_sent_and_nobody_elses(
    place: Place, new_id: Callable[[], str]
) -> None:
    id_, register = new_id(), place.register()
    for token in ("w1", "w2", "w3"):
        register.claim(id_, token, parcel=parcel_for(id_, token))
    assert bodies(place.arrived()) == [[id_, "w1"]]


def test_a_claim_that_is_repeated_wins_again_and_sends_nothing_more(
    place: Place, new_id: Callable[[], str]
) -> None:
    id_, parcel = new_id(), parcel_for("x", "w1")
    for register in (place.register(), place.register()):  # after a break there is another one
        for _ in range(3):
            assert register.claim(id_, "w1", parcel=parcel) == Claim(True, "w1", sent=True)
    assert len(place.arrived()) == 1
    # nor when it was taken meanwhile
    assert place.register().claim(id_, "w1", parcel=parcel).won
    assert place.arrived() == []


@pytest.mark.parametrize("priority", [0, 5, 9])
def test_the_message_is_the_one_that_a_producer_would_have_sent(
    place: Place, new_id: Callable[[], str], priority: int
) -> None:
    id_ = new_id()
    parcel = Parcel(
        json.dumps([[1], {"ä": None}, {}]).encode(),
        {"task": "t", "id": id_, "nested": {"list": [1, None, "ä"]}, "retries": 0},
        {
            "delivery_mode": 2,
            "correlation_id": id_,
            "reply_to": "somebody",
            "priority": priority,
            "expiration": "3600000",
        },
        "application/json",
        "utf-8",
        "",
        QUEUE,
    )
    publish_one(Producer(place.channel, auto_declare=False), parcel)
    (expected,) = place.arrived()
    place.register().claim(id_, "w1", parcel=parcel)
    (found,) = place.arrived()
    assert described(found) == described(expected)


def described(message: Any) -> dict[str, Any]:
    changing = {"delivery_tag", "consumer_tag", "cluster_id"}
    properties = {k: v for k, v in message.properties.items() if k not in changing}
    info = {k: v for k, v in message.delivery_info.items() if k not in changing}
    return {
        "body": message.body,
        "headers": message.headers,
        "type": (message.content_type, message.content_encoding),
        "properties": properties | {"delivery_info": None},
        "delivery_info": info,
    }


def test_a_register_ends_after_its_time_and_reading_does_not_keep_it(
    place: Place, new_id: Callable[[], str]
) -> None:
    id_, register, began = new_id(), place.register(), time.monotonic()
    assert register.claim(id_, "w1", ttl_s=1.0, parcel=parcel_for(id_, "w1")).won
    assert not register.claim(id_, "w2", ttl_s=1.0).won
    wait_until(lambda: register.winner(id_) is None, what="the end of the register")
    assert 0.9 < time.monotonic() - began < 5
    assert register.claim(id_, "w2", ttl_s=1.0).won


def test_claims_may_differ_in_the_time_that_they_want(
    place: Place, new_id: Callable[[], str]
) -> None:
    id_, register = new_id(), place.register()
    assert register.claim(id_, "w1", ttl_s=3600).won
    assert register.claim(id_, "w2", ttl_s=60) == Claim(False, "w1", sent=False)
    assert register.claim(id_, "w1", ttl_s=60).won
    assert register.winner(id_) == "w1"


def test_any_id_has_a_register_of_its_own(place: Place, new_id: Callable[[], str]) -> None:
    register, own = place.register(), new_id()
    ids = [f"{one}{own}"[-claims.ID_CHARS_MAX :] for one in ANYTHING]
    for number, id_ in enumerate(ids):
        assert register.claim(id_, f"w{number}").won
    assert [register.winner(id_) for id_ in ids] == [f"w{number}" for number in range(len(ids))]


@pytest.mark.parametrize("token", TOKENS)
def test_any_name_of_a_winner_is_read_by_the_losers(
    place: Place, new_id: Callable[[], str], token: str
) -> None:
    id_, register = new_id(), place.register()
    assert register.claim(id_, token) == Claim(True, token, sent=True)
    assert register.claim(id_, token).won
    for loser in ("w2", "celery@a-long-name-of-a-loser." + "x" * 100, token[:-1] + "z"):
        assert register.claim(id_, loser) == Claim(False, token, sent=False)
    assert register.winner(id_) == token


def test_what_is_no_id_token_or_time_is_refused_before_anything_is_asked(place: Place) -> None:
    register = place.register()
    for wrong in (("", "w1"), ("x" * 1001, "w1"), ("x", ""), ("x", "w" * 256)):
        with pytest.raises(ValueError, match="characters"):
            register.claim(*wrong)
    with pytest.raises(ValueError, match="lives"):
        register.claim("x", "w1", ttl_s=0)
    assert register.winner("x") is None


def test_a_record_stays_when_its_winner_goes(place: Place, new_id: Callable[[], str]) -> None:
    id_, winner = new_id(), place.register()
    assert winner.claim(id_, "w1").won
    winner.close()
    assert place.register().claim(id_, "w2") == Claim(False, "w1", sent=False)


def test_a_register_is_shared_by_threads(place: Place, new_id: Callable[[], str]) -> None:
    register = place.register()
    ids = [new_id() for _ in range(20)]

    def run(token: str) -> list[Claim]:
        return [register.claim(id_, token, parcel=parcel_for(id_, token)) for id_ in ids]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, [f"w{number}" for number in range(8)]))
    for number in range(len(ids)):
        won = [told[number] for told in found if told[number].won]
        assert len(won) == 1
        assert {told[number].winner for told in found} == {won[0].winner}
    assert sorted(id_ for id_, _ in bodies(place.arrived())) == sorted(ids)


def test_other_transports_have_no_registers(tmp_path: Path) -> None:
    folders = {"data_folder_in": str(tmp_path), "data_folder_out": str(tmp_path)}
    assert register_for(connect("filesystem://", transport_options=folders)) is None


# -- races ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_of_fifty_processes_that_race_for_an_id_one_wins_and_all_know_it(
    kind: str, request: pytest.FixtureRequest, start: Callable[..., Program]
) -> None:
    place: Place = request.getfixturevalue(f"{kind}_place")
    command = [sys.executable, "-m", "tests.racers", place.url, str(PROCESSES), str(IDS)]
    program = start(command)
    assert program.wait(100) == 0, program.output
    told_by_token = json.loads(program.lines[-1])["answers"]
    assert len(told_by_token) == PROCESSES
    check_race(told_by_token, place)


def test_of_fifty_threads_that_race_for_an_id_in_memory_one_wins(memory_place: Place) -> None:
    check_race(race_threads("memory://", PROCESSES, IDS), memory_place)


def check_race(told_by_token: dict[str, Any], place: Place) -> None:
    sent = Counter(map(tuple, bodies(place.arrived())))
    expected = Counter()
    for number, id_ in enumerate(election_ids(IDS)):
        answered = {token: found[number] for token, found in told_by_token.items()}
        winners = [token for token, (won, _) in answered.items() if won]
        assert len(winners) == 1, (id_, winners)
        assert {name for _, name in answered.values()} == set(winners), id_
        expected[id_, winners[0]] += 1
    assert sent == expected


# -- breaks --------------------------------------------------------------------------------


def cut_redis(server: RedisServer, url: str) -> None:
    server.client(int(url.rsplit("/", 1)[1])).client_kill_filter(_type="normal", skipme=True)


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_claims_over_connections_that_are_cut_are_won_or_lost_but_never_doubled(
    kind: str, request: pytest.FixtureRequest, new_id: Callable[[], str]
) -> None:
    place: Place = request.getfixturevalue(f"{kind}_place")
    server: Any = request.getfixturevalue("redis_server" if kind == "redis" else "rabbitmq_server")
    ids, told = [new_id() for _ in range(40)], {}
    done = threading.Event()

    def cut() -> int:
        cuts = 0
        while not done.wait(0.01):
            if kind == "redis":
                cut_redis(server, place.url)
            else:
                server.close_connections("cut by a test")
            cuts += 1
        return cuts

    def run(token: str) -> None:
        register = place.register()
        told[token] = [insist(register, id_, token) for id_ in ids]

    with ThreadPoolExecutor(5) as pool:
        cutting = pool.submit(cut)
        running = [pool.submit(run, f"w{number}@h") for number in range(4)]
        try:
            for one in running:
                one.result(90)
        finally:
            done.set()
        assert cutting.result(LONG_S) > 3
    for number, id_ in enumerate(ids):
        winners = [token for token, found in told.items() if found[number].won]
        assert len(winners) == 1, id_
        assert {found[number].winner for found in told.values()} == set(winners)
    fresh = Place(place.url)
    assert sorted(id_ for id_, _ in bodies(fresh.arrived())) == sorted(ids)
    fresh.close()


def insist(register: Register, id_: str, token: str) -> Claim:
    """Claim until there is an answer, as a worker does."""
    deadline = time.monotonic() + 60
    while True:
        try:
            claim = register.claim(id_, token, parcel=parcel_for(id_, token))
        except OperationalError:
            claim = None
        if claim is not None and claim.sent == claim.won:
            return claim
        assert time.monotonic() < deadline, claim


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for an answer."""
    monkeypatch.setattr(claims, "ANSWER_S", 0.5)
    monkeypatch.setattr(registers_amqp, "PATIENCE_S", 0.3)


class CuttingProxy(Proxy):
    """A proxy that can end every connection there is."""

    def cut(self) -> None:
        with self._lock:
            ends = list(self._ways)
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture(params=["redis", "amqp"])
def distant(
    request: pytest.FixtureRequest, hasty: None
) -> Iterator[tuple[Place, CuttingProxy, Register]]:
    """A place, and a register that asks it through a proxy."""
    place: Place = request.getfixturevalue(f"{request.param}_place")
    port = re.search(r":(\d+)/", place.url)
    assert port
    with CuttingProxy(int(port[1])) as proxy:
        register = place.register(place.url.replace(port[0], f":{proxy.port}/"))
        register.winner("connect")
        yield place, proxy, register
        register.close()


def test_a_claim_whose_answer_was_lost_is_asked_again_and_told_that_it_had_won(
    distant: tuple[Place, CuttingProxy, Register], new_id: Callable[[], str]
) -> None:
    place, proxy, register = distant
    id_ = new_id()
    assert proxy.swallow(to_server=False)
    claim = register.claim(id_, "w1", parcel=parcel_for(id_, "w1"))
    assert claim == Claim(True, "w1", sent=True)
    assert bodies(place.arrived()) == [[id_, "w1"]]


def test_a_broker_that_says_nothing_is_given_up_in_bounded_time(
    redis_server: RedisServer, redis_place: Place, hasty: None
) -> None:
    register = redis_place.register()
    register.winner("connect")
    redis_server.pause()
    try:
        began = time.monotonic()
        with pytest.raises(OperationalError, match=r"umbel\.election\.x on redis://"):
            register.claim("x", "w1")
        assert time.monotonic() - began < 5
    finally:
        redis_server.resume()
    assert insist(register, "x", "w1").won


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_is_not_there_is_named_without_its_password(scheme: str) -> None:
    url = f"{scheme}://user:secret@127.0.0.1:{free_port()}/0"
    register = register_for(connect(url))
    assert register is not None
    began = time.monotonic()
    for ask in (lambda: register.claim("x", "w1"), lambda: register.winner("x")):
        with pytest.raises(OperationalError, match=rf"{scheme}://user:\*\*@127") as caught:
            ask()
        assert "secret" not in str(caught.value)
    assert time.monotonic() - began < 5
    register.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_a_record_survives_the_restart_of_its_server(
    kind: str, request: pytest.FixtureRequest, new_id: Callable[[], str]
) -> None:
    place: Place = request.getfixturevalue(f"{kind}_place")
    server: Any = request.getfixturevalue("redis_server" if kind == "redis" else "rabbitmq_server")
    id_, register = new_id(), place.register()
    assert register.claim(id_, "w1", parcel=parcel_for(id_, "w1")).won
    server.restart()
    assert insist(register, id_, "w2") == Claim(False, "w1", sent=False)
    assert insist(register, id_, "w1") == Claim(True, "w1", sent=True)
    fresh = Place(place.url)
    assert bodies(fresh.arrived()) == [[id_, "w1"]]
    fresh.close()


# -- Redis ---------------------------------------------------------------------------------


def test_on_redis_keys_have_the_prefix_and_an_expiry(
    redis_server: RedisServer, prefixed_place: Place
) -> None:
    client = redis_server.client(int(prefixed_place.url.rsplit("/", 1)[1]))
    parcel = parcel_for("el", "w1")
    prefixed_place.register().claim(
        "el", "w1", parcel=parcel._replace(properties={**parcel.properties, "priority": 7})
    )
    assert client.get("app1:umbel.election.el") == b"w1"
    assert 86_390_000 < int(client.pttl("app1:umbel.election.el")) <= 86_400_000
    assert client.llen("app1:jobs\x06\x166") == 1


def test_on_redis_what_can_not_be_sent_is_not_claimed(
    redis_server: RedisServer, redis_place: Place
) -> None:
    client = redis_server.client(int(redis_place.url.rsplit("/", 1)[1]))
    client.set("not-a-list", "x")
    register = redis_place.register()
    with pytest.raises(OperationalError, match="WRONGTYPE"):
        register.claim("el", "w1", parcel=parcel_for("el", "w1", "not-a-list"))
    unbound = parcel_for("el", "w1")._replace(exchange="nowhere", routing_key="x")
    with pytest.raises(OperationalError, match="no queue is bound to exchange 'nowhere'"):
        register.claim("el", "w1", parcel=unbound)
    assert register.winner("el") is None


def test_on_redis_a_key_of_somebody_else_is_left_alone(
    redis_server: RedisServer, redis_place: Place
) -> None:
    client = redis_server.client(int(redis_place.url.rsplit("/", 1)[1]))
    client.lpush("umbel.election.el", "x")
    with pytest.raises(OperationalError, match="WRONGTYPE"):
        redis_place.register().claim("el", "w1", parcel=parcel_for("el", "w1"))
    assert client.lrange("umbel.election.el", 0, -1) == [b"x"]
    assert redis_place.arrived() == []


@pytest.mark.parametrize("kind", ["redis", "amqp", "memory"])
def test_a_message_for_an_exchange_goes_to_the_queues_that_are_bound_to_it(
    kind: str, request: pytest.FixtureRequest, new_id: Callable[[], str]
) -> None:
    place: Place = request.getfixturevalue(f"{kind}_place")
    direct, topic = Exchange("shop", type="direct"), Exchange("shop.topic", type="topic")
    place.declare(Queue("money", direct, routing_key="charge"))
    place.declare(Queue("ships", direct, routing_key="ship"))
    place.declare(Queue("all", topic, routing_key="order.#"))
    place.declare(Queue("gone", topic, routing_key="*.gone"))
    register, one, other = place.register(), new_id(), new_id()
    to_direct = parcel_for(one, "w1")._replace(exchange="shop", routing_key="charge")
    to_topic = parcel_for(other, "w1")._replace(exchange="shop.topic", routing_key="order.new")
    assert register.claim(one, "w1", parcel=to_direct).sent
    assert register.claim(other, "w1", parcel=to_topic).sent
    found = {queue: bodies(place.arrived(queue)) for queue in ("money", "ships", "all", "gone")}
    assert found == {"money": [[one, "w1"]], "ships": [], "all": [[other, "w1"]], "gone": []}


# -- RabbitMQ ------------------------------------------------------------------------------


def test_on_rabbitmq_nothing_is_left_but_the_register_and_its_mark(
    rabbitmq_server: RabbitMQServer, amqp_place: Place
) -> None:
    vhost = amqp_place.url.rsplit("/", 1)[1]
    register = amqp_place.register()
    register.claim("el", "w1", parcel=parcel_for("el", "w1"))
    register.claim("el", "w2")
    register.winner("other")
    assert set(rabbitmq_server.queue_names(vhost)) == {QUEUE, "umbel.election.el"}
    assert rabbitmq_server.queue_length("umbel.election.el", vhost) == 1


@pytest.mark.parametrize("chars", [1, 60, 120, 200])
def test_on_rabbitmq_long_names_of_everything_decide_nothing(
    rabbitmq_server: RabbitMQServer, chars: int
) -> None:
    vhost = "v" * chars
    place = Place(rabbitmq_server.add_vhost(vhost))
    try:
        register, token = place.register(), "w" * 255
        assert register.claim("x" * 64, token) == Claim(True, token, sent=True)
        assert register.claim("x" * 64, token).won
        lost = register.claim("x" * 64, "v" + token[1:])
        assert (lost.won, lost.sent) == (False, False)
        # It is told as far as there is room for it.
        assert lost.winner == register.winner("x" * 64)
        assert len(lost.winner) >= (40 if chars <= 60 else 0)
    finally:
        place.close()
        rabbitmq_server.delete_vhost(vhost)


def test_on_rabbitmq_a_queue_of_somebody_else_is_left_alone(amqp_place: Place) -> None:
    for number, options in enumerate(
        ({}, {"expires": 60.0}, {"durable": False}, {"queue_arguments": {"x-max-priority": 3}})
    ):
        amqp_place.declare(Queue(f"umbel.election.el{number}", **options))
        register = amqp_place.register()
        with pytest.raises(OperationalError, match=r"no register"):
            register.claim(f"el{number}", "w1", parcel=parcel_for("el", "w1"))
    assert amqp_place.arrived() == []


def test_on_rabbitmq_a_winner_whose_message_nobody_takes_is_told_and_may_send_it_later(
    amqp_place: Place,
) -> None:
    register, parcel = amqp_place.register(), parcel_for("el", "w1", "later")
    for _ in range(2):
        claim = register.claim("el", "w1", parcel=parcel)
        assert (claim.won, claim.winner, claim.sent) == (True, "w1", False)
        assert "NO_ROUTE" in claim.reason
    amqp_place.declare(Queue("later"))
    for _ in range(2):
        assert register.claim("el", "w1", parcel=parcel) == Claim(True, "w1", sent=True)
    assert bodies(amqp_place.arrived("later")) == [["el", "w1"]]


def test_on_rabbitmq_a_queue_that_is_full_is_said_and_tried_again(amqp_place: Place) -> None:
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    amqp_place.declare(Queue("full", queue_arguments=full))
    register = amqp_place.register()
    assert register.claim("el1", "w1", parcel=parcel_for("el1", "w1", "full")).sent
    parcel = parcel_for("el2", "w1", "full")
    assert not register.claim("el2", "w1", parcel=parcel).sent
    assert bodies(amqp_place.arrived("full")) == [["el1", "w1"]]
    assert register.claim("el2", "w1", parcel=parcel).sent
    assert bodies(amqp_place.arrived("full")) == [["el2", "w1"]]


def test_on_rabbitmq_an_exchange_that_is_not_there_is_said(amqp_place: Place) -> None:
    register = amqp_place.register()
    claim = register.claim("el", "w1", parcel=parcel_for("el", "w1")._replace(exchange="nowhere"))
    assert (claim.won, claim.sent) == (True, False)
    assert "no exchange 'nowhere'" in claim.reason
    assert register.claim("el", "w1", parcel=parcel_for("el", "w1")).sent


@pytest.fixture
def at_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Do something once, right before a transaction is committed."""

    def arrange(act: Callable[[], Any]) -> None:
        todo = [act]

        def commit(channel: Any) -> Any:
            if todo:
                todo.pop()()
            return amqp.Channel.tx_commit(channel)

        monkeypatch.setattr(bounded.BoundedChannel, "tx_commit", commit, raising=False)

    return arrange


@pytest.mark.parametrize("distant", ["amqp"], indirect=True)
def test_on_rabbitmq_a_commit_whose_answer_was_lost_is_not_made_twice(
    distant: tuple[Place, CuttingProxy, Register], at_commit: Callable[..., None]
) -> None:
    place, proxy, register = distant
    at_commit(lambda: proxy.swallow(to_server=False))
    claim = register.claim("el", "w1", parcel=parcel_for("el", "w1"))
    assert claim == Claim(True, "w1", sent=True)
    assert bodies(place.arrived()) == [["el", "w1"]]


@pytest.mark.parametrize("distant", ["amqp"], indirect=True)
def test_on_rabbitmq_nothing_is_sent_again_while_the_first_may_still_arrive(
    distant: tuple[Place, CuttingProxy, Register], at_commit: Callable[..., None]
) -> None:
    place, proxy, register = distant
    at_commit(lambda: proxy.swallow(to_server=True))
    claim = register.claim("el", "w1", parcel=parcel_for("el", "w1"))
    assert (claim.won, claim.winner, claim.sent) == (True, "w1", False)
    assert "still has a connection" in claim.reason
    assert place.arrived() == []
    proxy.cut()  # now the broker knows that nothing more comes
    assert insist(place.register(), "el", "w1") == Claim(True, "w1", sent=True)
    assert bodies(place.arrived()) == [["el", "w1"]]


def test_on_rabbitmq_a_broker_that_reads_late_gets_no_message_twice(
    rabbitmq_server: RabbitMQServer, amqp_place: Place, hasty: None
) -> None:
    node = rabbitmq_server.node
    watermark = f"erpc:call('{node}', vm_memory_monitor, set_vm_memory_high_watermark, [~s]), \"\""
    register, parcel = amqp_place.register(), parcel_for("el", "w1")
    rabbitmq_server.evaluate(watermark.replace("~s", "0.00001"))
    try:
        for _ in range(2):
            claim = register.claim("el", "w1", parcel=parcel)
            assert (claim.won, claim.sent) == (True, False)
            assert amqp_place.register().claim("el", "w2").winner == "w1"
    finally:
        rabbitmq_server.evaluate(watermark.replace("~s", "0.8"))
    assert insist(register, "el", "w1") == Claim(True, "w1", sent=True)
    vhost = amqp_place.url.rsplit("/", 1)[1]
    assert rabbitmq_server.queue_length("umbel.election.el", vhost) == 1
    assert bodies(amqp_place.arrived()) == [["el", "w1"]]


# -- memory --------------------------------------------------------------------------------


def test_in_memory_only_so_many_registers_are_kept(
    memory_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.broker.registers.register.ENTRIES_MAX", 3)
    now = [0.0]
    register = MemoryRegister(memory_place.connection, clock=lambda: now[0])
    monkeypatch.setattr(register._entries, "held", {})
    assert register.claim("short", "w", ttl_s=1).won
    for number in range(2):
        assert register.claim(f"el{number}", "w", ttl_s=60).won
    now[0] = 2.0
    assert register.claim("el2", "w", ttl_s=60).won  # in the place of what has ended
    assert [register.winner(f"el{number}") for number in range(3)] == ["w"] * 3
    assert register.claim("el3", "w", ttl_s=60).won  # in the place of the oldest
    assert register.winner("el0") is None
    assert len(register._entries.held) == 3
