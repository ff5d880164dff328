"""Workers obey only who may command, survive rubbish, and keep nothing of clients that die."""

from __future__ import annotations

import json
import pickle
import random
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.inside import Inside
from tests.integration.commanded import NAME, Start, Tasks, tell
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.strangers import Stranger
from tests.workers import Program
from umbel import Umbel


def test_a_worker_that_may_only_be_looked_at_changes_nothing(
    broker_url: str, commanded: Start, tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    inside = commanded(broker_url, settings={"control_allow": "read-only"})
    assert tell(inside, "ping") == {"ok": "pong"}
    refusal = "is not allowed here: control_allow is 'read-only'"
    for command in ("count", "shutdown", "revoke", "pool_grow", "cancel_consumer"):
        assert tell(inside, command, queue="celery") == {"error": f"{command} {refusal}"}
    assert tasks.commands == []
    assert "control message refused (denied): count is not allowed here" in caplog.text
    assert tell(inside, "stats")["umbel"]["control_refused"] == {"denied": 5}
    inside.send("note", 1)
    wait_until(lambda: tasks.ran == [1], what="a task")


@pytest.fixture
def eve(broker_url: str) -> Iterator[Stranger]:
    made = Stranger(broker_url)
    yield made
    made.close()


def refusals(inside: Inside) -> dict[str, int]:
    panel = inside.worker.panel
    assert panel is not None
    return dict(panel.refused)


def test_where_signing_is_required_only_who_has_the_key_commands(
    broker_url: str, commanded: Start, tasks: Tasks, eve: Stranger
) -> None:
    heard: list[Any] = []
    settings = {"control_signing": "required", "control_signing_key": "k" * 16}
    inside = commanded(broker_url, settings=settings, without_gossip=True)
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
    broker_url: str, commanded: Start, tasks: Tasks, eve: Stranger
) -> None:
    inside = commanded(broker_url)
    body = json.dumps({"method": "count", "arguments": {}}).encode()
    eve.send(body, headers={"expires": time.time() - 60})
    eve.send(body, headers={"expires": time.time() + 60})
    wait_until(lambda: tasks.commands == [{}], what="the one that is in time")
    assert refusals(inside) == {"expired": 1}


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_rubbish_on_the_control_exchange_harms_nobody(
    broker_url: str, commanded: Start, tasks: Tasks, eve: Stranger, pool: str
) -> None:
    inside = commanded(broker_url, pool=pool)
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
    assert inside.worker.counters.connections_lost == 0
    inside.send("note", "alive")
    wait_until(lambda: tasks.ran == ["alive"], what="a task")
    assert tell(inside, "unheard_of") == {"error": "KeyError('unheard_of')"}
    assert "TypeError" in tell(inside, "stall", more=1)["error"]
    assert inside.stop() == 0


# -- clients that are gone -----------------------------------------------------------------

ASKS = """
    import sys
    from umbel import Umbel
    from umbel.broker.broadcast import reply_lists

    reply_lists.TABLE_EXPIRES_S = 1.0  # ten in earnest
    app = Umbel("killed", broker=sys.argv[1], control_queue_expires=1.0)
    app.control.broadcast("stall", reply=True, timeout=60)
"""


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_a_client_killed_between_request_and_reply_leaves_nothing(
    kind: str,
    request: pytest.FixtureRequest,
    commanded: Start,
    tasks: Tasks,
    tmp_path: Any,
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    servers = {"amqp": "rabbitmq_server", "redis": "redis_server"}
    server: RedisServer | RabbitMQServer = request.getfixturevalue(servers[kind])

    def entities() -> set[str]:
        return server.entities(url)

    inside = commanded(url)
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
