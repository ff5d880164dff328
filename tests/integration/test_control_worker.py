"""Workers obey commands: under load, on every pool, at once, and only those that may command."""

from __future__ import annotations

import json
import pickle
import random
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from kombu import Exchange, Producer

from tests.ears import Ears
from tests.inside import Inside
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.sites import Site
from tests.workers import Program
from umbel import Umbel
from umbel.worker import autoscale
from umbel.worker.steps import autoscaler as autoscaler_step

NAME = "inside@test"
POOLS = ["prefork", "threads", "gevent", "asyncio", "solo"]
WAITING = 1_000


# -- under load ----------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
def test_a_ping_is_answered_within_a_second_while_all_is_busy_and_a_thousand_wait(
    site: Site, pool: str
) -> None:
    slots = 1 if pool == "solo" else 2
    worker = site.worker(pool, concurrency=slots)
    if pool == "asyncio":
        busy = [site.send("async_spin", 60) for _ in range(slots)]
    else:
        busy = [site.send("wait", f"busy-{n}") for n in range(slots)]
    control = site.app.control
    wait_until(lambda: len(ask(site, "active") or ()) == slots, 20, "busy slots")
    with ThreadPoolExecutor(4) as pool_:
        list(pool_.map(lambda _: site.send("noop"), range(WAITING)))
    took_s = []
    for _ in range(5):
        began = time.monotonic()
        assert control.ping(timeout=1.0, limit=1), f"no answer after {took_s}"
        took_s.append(time.monotonic() - began)
    assert {one["id"] for one in ask(site, "active")} == {result.id for result in busy}
    assert ask(site, "stats")["umbel"]["finished"] == 0
    worker.kill()


def ask(site: Site, command: str, **arguments: Any) -> Any:
    """The answer of the only worker."""
    replies = site.app.control.broadcast(command, arguments, reply=True, timeout=5, limit=1)
    assert replies is not None
    return next(iter(replies[0].values())) if replies else None


def test_a_thousand_questions_of_twenty_clients_are_answered_each_to_who_asked(
    site: Site,
) -> None:
    names = ["one@test", "two@test"]
    site.worker("threads", "-n", names[0])
    site.worker("solo", "-n", names[1], concurrency=1)
    settings = {"broker": site.broker_url, "backend": "disabled://", "set_as_current": False}
    clients = [Umbel(f"client-{n}", **settings) for n in range(20)]

    def question(number: int) -> list[dict[str, Any]]:
        # What each is answered tells who has asked: tasks that nobody else asks for.
        wanted = [f"nobody-{number}"]
        replies = clients[number % 20].control.broadcast(
            "rate_limit",
            {"task_name": wanted[0], "rate_limit": f"wrong {number}"},
            reply=True,
            destination=names,
            limit=3,
            timeout=60,
        )
        assert replies is not None
        return replies

    try:
        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(question, range(1_000)))
        for number, replies in enumerate(answers):
            own = {"error": f"Invalid rate limit string: 'wrong {number}'"}
            assert sorted(replies, key=str) == [{name: own} for name in names]
        assert not any(client.control.mailbox.counts for client in clients)
    finally:
        for client in clients:
            client.close()


# -- workers in this process ---------------------------------------------------------------

Start = Callable[..., Inside]


class Tasks:
    """What the tasks of a worker in this process did."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.hold = threading.Event()
        self.holding = threading.Event()
        self.commands: list[Any] = []

    def register(self, app: Umbel) -> None:
        @app.task(name="note")
        def note(value: Any = None) -> None:
            self.ran.append(value)

        @app.task(name="hold")
        def hold() -> None:
            self.holding.set()
            self.hold.wait(30)

        @app.task(name="burn")
        def burn() -> None:
            self.holding.set()
            while not self.hold.is_set():
                sum(range(1_000))

        @app.task(name="spin")
        def spin(seconds: float) -> str:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(0.005)
            return "to the end"

        @app.control_command
        def count(state: Any, **arguments: Any) -> dict[str, int]:
            self.commands.append(arguments)
            return {"ok": len(self.commands)}

        @app.control_command
        def stall(state: Any) -> str:
            self.holding.set()
            self.hold.wait(30)
            return "late"


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture
def start(tasks: Tasks) -> Iterator[Start]:
    made: list[Inside] = []

    def begin(url: str, backend: str = "disabled://", **options: Any) -> Inside:
        settings = {
            "broker_url": url,
            "result_backend": backend,
            **options.pop("settings", {}),
        }
        made.append(Inside(settings, tasks.register, **options))
        return made[-1].start()

    yield begin
    tasks.hold.set()
    for inside in made:
        inside.close()


def tell(inside: Inside, command: str, **arguments: Any) -> Any:
    """What the worker answers; None when it does not."""
    replies = inside.client.control.broadcast(command, arguments, reply=True, timeout=5, limit=1)
    return replies[0][NAME] if replies else None


def silent(inside: Inside, command: str, **arguments: Any) -> bool:
    """Whether nothing is answered, while the worker answers others."""
    control = inside.client.control
    return control.broadcast(command, arguments, reply=True, timeout=0.3, limit=1) == []


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_what_can_be_asked_is_answered_while_tasks_run_wait_and_are_held(
    broker_url: str, start: Start, tasks: Tasks, pool: str
) -> None:
    inside = start(broker_url, pool=pool, concurrency=1)
    running = inside.send("hold")
    assert tasks.holding.wait(20)
    if pool != "solo":  # whose loop takes the next message when the task has ended
        waiting, held = inside.send("note", 1), inside.send("note", countdown=3_600)
        wait_until(lambda: len(inside.worker.tally.reserved) == 3, what="three tasks")
    inspect = inside.client.control.inspect(timeout=5, limit=1)
    (active,) = inspect.active()[NAME]
    assert active["id"] == running.id
    assert abs(active["time_start"] - time.time()) < 20
    assert active["worker_pid"] == inside.worker.pid
    assert inspect.stats()[NAME]["total"] == {"hold": 1}
    assert inspect.registered()[NAME] == ["burn", "hold", "note", "spin"]
    assert inspect.clock()[NAME]["clock"] > 0
    assert [queue["name"] for queue in inspect.active_queues()[NAME]] == ["celery"]
    assert inspect.memsample()[NAME].endswith("MB")
    assert inspect.memdump()[NAME].count("MB") >= 2
    assert "umbel" in inspect.report()[NAME]["ok"]
    assert inspect.conf()[NAME]["result_backend"] == "disabled://"
    assert "guest:guest" not in json.dumps([inspect.conf(), inspect.stats(), inspect.report()])
    if pool != "solo":
        assert [one["id"] for one in inspect.reserved()[NAME]] == [waiting.id]
        assert [one["request"]["id"] for one in inspect.scheduled()[NAME]] == [held.id]
        found = inspect.query_task(running.id, waiting.id, held.id, "nowhere")[NAME]
        assert {key: value[0] for key, value in found.items()} == {
            running.id: "active",
            waiting.id: "reserved",
            held.id: "scheduled",
        }
        assert inspect.queue_lengths()[NAME] == {"celery": 0}


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_tasks_that_never_wait_do_not_keep_commands_waiting(
    redis_url: str, start: Start, tasks: Tasks, pool: str
) -> None:
    inside = start(redis_url, pool=pool)
    assert tell(inside, "ping") == {"ok": "pong"}
    for _ in range(2):
        inside.send("burn")
    assert tasks.holding.wait(20)
    for _ in range(3):
        assert inside.client.control.ping(timeout=1.0, limit=1)
    tasks.hold.set()


def test_task_events_are_switched_on_and_off(broker_url: str, start: Start, tasks: Tasks) -> None:
    inside = start(broker_url)
    with Ears(broker_url) as ears:

        def run() -> str:
            count = len(tasks.ran)
            result = inside.send("note")
            wait_until(lambda: len(tasks.ran) > count, what="the task")
            return str(result.id)

        silent_before = run()
        assert tell(inside, "enable_events") == {"ok": "task events enabled"}
        assert tell(inside, "enable_events") == {"ok": "task events already enabled"}
        told = run()
        ears.wait_for("task-succeeded", uuid=told)
        assert tell(inside, "disable_events") == {"ok": "task events disabled"}
        assert tell(inside, "disable_events") == {"ok": "task events already disabled"}
        silent_after = run()
        beats = len(ears.of("worker-heartbeat"))
        assert tell(inside, "heartbeat") is None
        ears.wait_for("worker-heartbeat", beats + 1)
        heard = {event.get("uuid") for event in ears.events}
        assert told in heard
        assert not {silent_before, silent_after} & heard


def test_a_paused_queue_waits_until_it_is_resumed(
    broker_url: str, start: Start, tasks: Tasks
) -> None:
    inside = start(broker_url)
    assert tell(inside, "pause", queue="celery") == {"ok": "celery paused"}
    inside.send("note", "paused")
    inside.break_connection()
    assert tell(inside, "queue_lengths") == {"celery": 1}
    assert tell(inside, "pause", queue="other") == {"ok": "other is not consumed here"}
    assert tell(inside, "ping") == {"ok": "pong"}
    assert tasks.ran == []
    assert tell(inside, "resume", queue="celery") == {"ok": "celery resumed"}
    assert tell(inside, "resume", queue="celery") == {"ok": "celery was not paused here"}
    wait_until(lambda: tasks.ran == ["paused"], what="the task")


def test_queues_that_are_added_and_cancelled_stay_so_over_a_break(
    broker_url: str, start: Start, tasks: Tasks
) -> None:
    inside = start(broker_url)

    def consumed() -> set[str]:
        return {queue["name"] for queue in tell(inside, "active_queues")}

    assert tell(inside, "add_consumer", queue="more") == {"ok": "add consumer more"}
    inside.send("note", "more", queue="more")
    wait_until(lambda: tasks.ran == ["more"], what="a task of the new queue")
    assert tell(inside, "cancel_consumer", queue="celery") == {
        "ok": "no longer consuming from celery"
    }
    assert consumed() == {"more"}
    inside.break_connection()
    assert consumed() == {"more"}
    inside.send("note", "left", queue="celery")
    inside.send("note", "again", queue="more")
    wait_until(lambda: tasks.ran == ["more", "again"], what="a task of the new queue")
    assert tell(inside, "add_consumer", queue="celery") == {"ok": "add consumer celery"}
    wait_until(lambda: tasks.ran[2:] == ["left"], what="the task that waited")
    assert consumed() == {"celery", "more"}


def test_a_queue_that_the_broker_refuses_does_no_harm(
    amqp_url: str, start: Start, tasks: Tasks, rabbitmq_server: RabbitMQServer
) -> None:
    inside = start(amqp_url)
    with rabbitmq_server.connection(amqp_url.rsplit("/", 1)[1]) as connection:
        connection.channel().queue_declare("taken", durable=False, auto_delete=True)
        connection.channel().exchange_declare("topical", "topic", durable=True)
        for wrong in (
            {"queue": "taken"},
            {"queue": "x", "exchange": "topical"},
            {"queue": "amq.reserved"},
            {"queue": "x", "exchange_type": "bogus"},
            {"queue": "q" * 300},
            {"queue": "x", "queue_arguments": {"x-max-priority": "high"}},
        ):
            assert list(tell(inside, "add_consumer", **wrong)) == ["error"], wrong
    inside.send("note", 1)
    wait_until(lambda: tasks.ran == [1], what="a task")
    inside.break_connection()
    assert [queue["name"] for queue in tell(inside, "active_queues")] == ["celery"]
    assert inside.worker.tally.connections_lost == 1


def test_limits_apply_at_once(broker_url: str, redis_url: str, start: Start, tasks: Tasks) -> None:
    inside = start(broker_url, redis_url, concurrency=2)
    assert inside.send("spin", 0).get(timeout=30) == "to the end"
    assert tell(inside, "time_limit", task_name="spin", soft=0.1, hard=None) == {
        "ok": "time limits set successfully"
    }
    result = inside.send("spin", 20)
    assert "SoftTimeLimitExceeded" in repr(result.get(timeout=10, propagate=False))
    tell(inside, "time_limit", task_name="spin", soft=None, hard=None)
    assert inside.send("spin", 0.3).get(timeout=30) == "to the end"

    assert tell(inside, "rate_limit", task_name="note", rate_limit="1/h") == {
        "ok": "new rate limit set successfully"
    }
    for number in range(20):
        inside.send("note", number)
    wait_until(lambda: inside.worker.rates.parked_count == 19, what="tasks that are parked")
    assert tasks.ran == [0]
    assert tell(inside, "rate_limit", task_name="note", rate_limit=0) == {
        "ok": "rate limit disabled successfully"
    }
    wait_until(lambda: sorted(tasks.ran) == list(range(20)), what="every task")


def test_the_pool_grows_and_shrinks_when_it_is_told_to(
    redis_url: str, start: Start, tasks: Tasks
) -> None:
    inside = start(redis_url, concurrency=1)
    for _ in range(3):
        inside.send("hold")
    wait_until(lambda: len(tell(inside, "active")) == 1, what="one task")
    assert tell(inside, "pool_grow", n=2) == {"ok": "pool will grow"}
    wait_until(lambda: len(tell(inside, "active")) == 3, what="three tasks")
    assert tell(inside, "stats")["pool"]["max-concurrency"] == 3
    assert tell(inside, "pool_shrink", n=2) == {"ok": "pool will shrink"}
    assert tell(inside, "stats")["prefetch_count"] == 4
    assert "at least one must stay" in tell(inside, "pool_shrink", n=1)["error"]
    tasks.hold.set()


def test_the_pool_follows_the_work_also_over_a_break(
    redis_url: str, start: Start, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler_step, "LOOK_S", 0.05)
    monkeypatch.setattr(autoscale.Autoscaler.__init__, "__defaults__", (0.2, time.monotonic))
    inside = start(redis_url, autoscale=(4, 1), concurrency=1)

    def size() -> int:
        return int(tell(inside, "stats")["autoscaler"]["current"])

    assert size() == 1
    for _ in range(6):
        inside.send("hold")
    wait_until(lambda: size() == 4, what="a pool of four")
    assert "set by the autoscaler" in tell(inside, "pool_grow", n=1)["error"]
    tasks.hold.set()
    wait_until(lambda: size() == 1, what="a pool of one")
    inside.break_connection()
    assert tell(inside, "autoscale", max=3, min=2) == {"ok": "autoscale now max=3 min=2"}
    assert size() == 2
    tasks.hold.clear()
    for _ in range(6):
        inside.send("hold")
    wait_until(lambda: size() == 3, what="a pool of three")
    assert "1 <= min <= max" in tell(inside, "autoscale", max=1, min=2)["error"]


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_worker_is_told_to_stop_and_ends_warm(
    broker_url: str, start: Start, tasks: Tasks, pool: str
) -> None:
    inside = start(broker_url, pool=pool)
    inside.send("hold")
    assert tasks.holding.wait(20)
    assert silent(inside, "shutdown")
    assert inside.alive
    tasks.hold.set()
    assert inside.join() == 0
    assert inside.worker.tally.finished == 1


def test_a_busy_solo_worker_says_that_it_will_obey_and_does(
    broker_url: str, start: Start, tasks: Tasks
) -> None:
    inside = start(broker_url, pool="solo")
    inside.send("hold")
    assert tasks.holding.wait(20)
    assert tell(inside, "count", n=1) == {
        "ok": "count will be carried out when the worker's loop turns again"
    }
    assert tasks.commands == []
    tasks.hold.set()
    wait_until(lambda: tasks.commands == [{"n": 1}], what="the command")
    assert tell(inside, "count") == {"ok": 2}


# -- who may command -----------------------------------------------------------------------


def test_a_worker_that_may_only_be_looked_at_changes_nothing(
    broker_url: str, start: Start, tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    inside = start(broker_url, settings={"control_allow": "read-only"})
    assert tell(inside, "ping") == {"ok": "pong"}
    refusal = "is not allowed here: control_allow is 'read-only'"
    for command in ("count", "shutdown", "revoke", "pool_grow", "cancel_consumer"):
        assert tell(inside, command, queue="celery") == {"error": f"{command} {refusal}"}
    assert tasks.commands == []
    assert "control message refused (denied): count is not allowed here" in caplog.text
    assert tell(inside, "stats")["umbel"]["control_refused"] == {"denied": 5}
    inside.send("note", 1)
    wait_until(lambda: tasks.ran == [1], what="a task")


class Eavesdropper:
    """Somebody who reaches the broker: hears control messages, and sends what he likes."""

    def __init__(self, url: str) -> None:
        self.app = Umbel("eve", broker=url, backend="disabled://", set_as_current=False)
        self.connection = self.app.connection()
        channel = self.connection.channel()
        self.exchange = Exchange("celery.pidbox", type="fanout", durable=False)
        self.exchange(channel).declare()
        self._producer = Producer(channel, self.exchange, auto_declare=False)

    def send(self, body: bytes, content_type: Any = "application/json", headers: Any = None,
             content_encoding: str = "utf-8") -> None:  # fmt: skip
        self._producer.publish(
            body,
            content_type=content_type,
            content_encoding=content_encoding,
            headers=headers or {},
            routing_key="",
        )

    def close(self) -> None:
        self.connection.close()
        self.app.close()


@pytest.fixture
def eve(broker_url: str) -> Iterator[Eavesdropper]:
    made = Eavesdropper(broker_url)
    yield made
    made.close()


def refusals(inside: Inside) -> dict[str, int]:
    panel = inside.worker.panel
    assert panel is not None
    return dict(panel.refused)


def test_where_signing_is_required_only_who_has_the_key_commands(
    broker_url: str, start: Start, tasks: Tasks, eve: Eavesdropper
) -> None:
    heard: list[Any] = []
    settings = {"control_signing": "required", "control_signing_key": "k" * 16}
    inside = start(broker_url, settings=settings, without_gossip=True)
    panel = inside.worker.panel
    assert panel is not None
    original = panel.handle

    def listen(message: Any, answer: Any) -> bool:
        heard.append(message)
        return original(message, answer)

    panel.handle = listen  # type: ignore[method-assign]
    assert tell(inside, "count", n=1) == {"ok": 1}
    body, headers = heard[0].body, dict(heard[0].headers)
    body = body.encode() if isinstance(body, str) else bytes(body)
    plain = {"method": "count", "arguments": {"n": 2}}
    eve.send(json.dumps(plain).encode())
    eve.send(body, headers=headers)
    eve.send(body.replace(b'"n":1', b'"n":9').replace(b'"n": 1', b'"n": 9'), headers=headers)
    eve.send(body, headers={**headers, "umbel_signed_at": time.time() - 31})
    wait_until(lambda: sum(refusals(inside).values()) >= 4, what="four refusals")
    assert refusals(inside) == {"unsigned": 1, "replayed": 1, "bad-signature": 2}
    assert tell(inside, "count", n=3) == {"ok": 2}
    assert tasks.commands == [{"n": 1}, {"n": 3}]
    stranger = Umbel("stranger", broker=broker_url, backend="disabled://", set_as_current=False)
    assert stranger.control.ping(timeout=0.3) == []
    stranger.close()


def test_a_command_that_expired_on_its_way_is_not_obeyed(
    broker_url: str, start: Start, tasks: Tasks, eve: Eavesdropper
) -> None:
    inside = start(broker_url)
    body = json.dumps({"method": "count", "arguments": {}}).encode()
    eve.send(body, headers={"expires": time.time() - 60})
    eve.send(body, headers={"expires": time.time() + 60})
    wait_until(lambda: tasks.commands == [{}], what="the one that is in time")
    assert refusals(inside) == {"expired": 1}


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_rubbish_on_the_control_exchange_harms_nobody(
    broker_url: str, start: Start, tasks: Tasks, eve: Eavesdropper, pool: str
) -> None:
    inside = start(broker_url, pool=pool)
    dice = random.Random(5)
    good = {
        "method": "count",
        "arguments": {"n": 1},
        "destination": [NAME],
        "ticket": "t",
        "reply_to": {"exchange": "celery", "routing_key": "c"},
    }
    whole = json.dumps(good).encode()
    kinds = ["application/json", "application/x-python-serialize", "application/x-yaml",
             "application/x-msgpack", "application/data", "nonsense", ""]  # fmt: skip
    eve.send(pickle.dumps(("os.system", "false")), kinds[1], content_encoding="binary")
    for headers in ({"compression": "application/x-gzip"}, {"expires": "soon"}, {"clock": "x"}):
        eve.send(whole[:-1], headers=headers)
    eve.send(b"[" * 50_000)
    eve.send(json.dumps({**good, "arguments": {"a": "x" * 2_000_000}}).encode())
    for number in range(300):
        mangled = bytearray(whole)
        for _ in range(dice.randint(0, 5)):
            at = dice.randrange(len(mangled))
            mangled[at : at + dice.randint(0, 4)] = dice.randbytes(dice.randint(0, 4))
        kind = dice.choice(kinds)
        encoding = dice.choice(["utf-8", "binary", "nonsense", "utf-16"])
        eve.send(bytes(mangled), kind, {"n": number}, encoding)
    if broker_url.startswith("redis"):  # what no client of kombu's would send
        client = redis.Redis.from_url(broker_url)
        for word in (b"", b"\xff", b"[1]", b"null", b"{}", b'{"body": 7, "properties": []}'):
            client.publish(f"/{broker_url.rsplit('/', 1)[1]}.celery.pidbox", word)
        client.close()
    assert tell(inside, "ping") == {"ok": "pong"}
    assert inside.worker.tally.connections_lost == 0
    inside.send("note", "alive")
    wait_until(lambda: tasks.ran == ["alive"], what="a task")
    assert tell(inside, "unheard_of") == {"error": "KeyError('unheard_of')"}
    assert "TypeError" in tell(inside, "stall", more=1)["error"]
    assert inside.stop() == 0


# -- clients that are gone -----------------------------------------------------------------

ASKS = """
    import sys
    from umbel import Umbel
    from umbel.broker import reply_lists

    reply_lists.TABLE_EXPIRES_S = 1.0  # ten in earnest
    app = Umbel("killed", broker=sys.argv[1], control_queue_expires=1.0)
    app.control.broadcast("stall", reply=True, timeout=60)
"""


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_a_client_killed_between_request_and_reply_leaves_nothing(
    kind: str,
    request: pytest.FixtureRequest,
    start: Start,
    tasks: Tasks,
    tmp_path: Any,
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    entities = entities_of(kind, url, request)
    inside = start(url)
    assert tell(inside, "ping") == {"ok": "pong"}
    inside.client.control.close()
    wait_until(lambda: not [one for one in entities() if "reply" in one], 15, "our own to go")
    before = entities()
    client = Program([sys.executable, "-c", textwrap.dedent(ASKS), url], cwd=tmp_path)
    try:
        assert tasks.holding.wait(20)
        assert entities() > before
    finally:
        client.kill()
    tasks.hold.set()
    wait_until(lambda: entities() <= before, 15, "everything to go")
    assert tell(inside, "ping") == {"ok": "pong"}


def entities_of(kind: str, url: str, request: pytest.FixtureRequest) -> Callable[[], set[str]]:
    if kind == "amqp":
        server: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
        return lambda: set(server.queue_names(url.rsplit("/", 1)[1]))
    redis_server: RedisServer = request.getfixturevalue("redis_server")
    client = redis_server.client(int(url.rsplit("/", 1)[1]))

    def find() -> set[str]:
        found = set()
        for key in client.keys("*"):
            found.add(key.decode())
            if client.type(key) == b"set":
                found |= {f"{key.decode()}: {member!r}" for member in client.smembers(key)}
        return found

    return find
