"""The control client: what it sends, how long it waits, and whose replies it takes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import ANY

import pytest
from kombu.exceptions import OperationalError
from kombu.transport.memory import Transport
from msgspec.structs import replace

from tests.responders import SILENCE, Responder
from tests.servers import wait_until
from umbel import Umbel
from umbel.app.control import DuplicateNodenameWarning, collector, mailbox
from umbel.app.control.inspection import flatten_reply
from umbel.app.control.mailbox import CAST_SETTLE_S
from umbel.app.trust import Trust
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.control import Request
from umbel.wire.signing import (
    CHALLENGE,
    LISTENING_S,
    REPLY,
    Distrust,
    Nonces,
    check_signature,
    verify,
)

KEY = "sixteen bytes, or more of them"
LONG_S = 10.0


@pytest.fixture
def new_app() -> Iterator[Callable[..., Umbel]]:
    apps: list[Umbel] = []

    def make(**settings: Any) -> Umbel:
        app = Umbel("t", broker="memory://", set_as_current=False, **settings)
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.close()


@pytest.fixture
def app(new_app: Callable[..., Umbel]) -> Umbel:
    return new_app()


@pytest.fixture
def node(new_app: Callable[..., Umbel]) -> Iterator[Responder]:
    with Responder(new_app(), "w1@h") as responder:
        yield responder


@pytest.fixture
def other(new_app: Callable[..., Umbel]) -> Iterator[Responder]:
    with Responder(new_app(), "w2@h") as responder:
        yield responder


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def inbox_queues() -> list[str]:
    """The reply queues that the in-process broker still leads to."""
    table = Transport.global_state.exchanges.get("reply.celery.pidbox", {}).get("table", [])
    return [queue for _, _, queue in table]


def held(node: Responder) -> Request:
    node.wait_until_holding()
    return node.seen[-1][0]


# -- what is sent --------------------------------------------------------------------------

COMMANDS: list[tuple[str, Callable[[Any], Any], str, dict[str, Any]]] = [
    ("revoke", lambda c: c.revoke("a"), "revoke",
     {"task_id": "a", "terminate": False, "signal": "SIGTERM"}),
    ("revoke-many", lambda c: c.revoke(("a", "b"), terminate=True, signal="SIGKILL"), "revoke",
     {"task_id": ["a", "b"], "terminate": True, "signal": "SIGKILL"}),
    ("terminate", lambda c: c.terminate("a"), "revoke",
     {"task_id": "a", "terminate": True, "signal": "SIGTERM"}),
    ("stamps", lambda c: c.revoke_by_stamped_headers({"k": ["v"]}), "revoke_by_stamped_headers",
     {"headers": {"k": ["v"]}, "terminate": False, "signal": "SIGTERM"}),
    ("rate_limit", lambda c: c.rate_limit("t", "10/m"), "rate_limit",
     {"task_name": "t", "rate_limit": "10/m"}),
    ("time_limit", lambda c: c.time_limit("t", soft=1, hard=2), "time_limit",
     {"task_name": "t", "soft": 1, "hard": 2}),
    ("pool_grow", lambda c: c.pool_grow(2), "pool_grow", {"n": 2}),
    ("pool_shrink", lambda c: c.pool_shrink(), "pool_shrink", {"n": 1}),
    ("pool_restart", lambda c: c.pool_restart(["m"], reload=True), "pool_restart",
     {"modules": ["m"], "reload": True, "reloader": None}),
    ("autoscale", lambda c: c.autoscale(8, 2), "autoscale", {"max": 8, "min": 2}),
    ("add_consumer", lambda c: c.add_consumer("q", options={"durable": False}), "add_consumer",
     {"queue": "q", "exchange": None, "exchange_type": "direct", "routing_key": None,
      "durable": False}),
    ("cancel_consumer", lambda c: c.cancel_consumer("q"), "cancel_consumer", {"queue": "q"}),
    ("pause", lambda c: c.pause("q"), "pause", {"queue": "q", "stamp": ANY}),
    ("resume", lambda c: c.resume("q"), "resume", {"queue": "q", "stamp": ANY}),
    ("enable_events", lambda c: c.enable_events(), "enable_events", {}),
    ("disable_events", lambda c: c.disable_events(), "disable_events", {}),
    ("heartbeat", lambda c: c.heartbeat(), "heartbeat", {}),
    ("election", lambda c: c.election("i", "task", {"task": "t"}), "election",
     {"id": "i", "topic": "task", "action": {"task": "t"}}),
    ("shutdown", lambda c: c.shutdown(), "shutdown", {}),
    ("own", lambda c: c.broadcast("mine", {"a": 1}, b=2), "mine", {"a": 1, "b": 2}),
]  # fmt: skip


@pytest.mark.parametrize("to", [{"destination": ["w1@h"]}, {"pattern": "w*"}])
def test_a_pause_for_some_carries_no_time(app, node, to):
    app.control.pause("q", **to)
    app.control.resume("q")
    wait_until(lambda: len(node.seen) == 2, what="the commands")
    sent = [json.loads(body)["arguments"] for body, *_ in node.raw]
    assert sent[0] == {"queue": "q"}
    assert abs(sent[1]["stamp"] - time.time()) < LONG_S


@pytest.mark.parametrize(
    ("call", "method", "arguments"),
    [row[1:] for row in COMMANDS],
    ids=[row[0] for row in COMMANDS],
)
def test_a_command_goes_out_with_its_arguments_and_asks_for_no_reply(
    app, node, call, method, arguments
):
    assert call(app.control) is None
    wait_until(lambda: node.seen, what="the command")
    body = json.loads(node.raw[0][0])
    if method.startswith("revoke"):
        assert abs(body["arguments"].pop("stamp") - time.time()) < 10
    assert body == {
        "method": method,
        "arguments": arguments,
        "destination": None,
        "pattern": None,
        "matcher": None,
    }


QUESTIONS: list[tuple[Callable[[Any], Any], str, dict[str, Any]]] = [
    (lambda i: i.ping(), "ping", {}),
    (lambda i: i.clock(), "clock", {}),
    (lambda i: i.active(safe=True), "active", {"safe": True}),
    (lambda i: i.reserved(), "reserved", {}),
    (lambda i: i.scheduled(), "scheduled", {}),
    (lambda i: i.query_task("a", "b"), "query_task", {"ids": ["a", "b"]}),
    (lambda i: i.query_task(["a"]), "query_task", {"ids": ["a"]}),
    (lambda i: i.revoked(), "revoked", {}),
    (lambda i: i.registered("rate_limit"), "registered", {"taskinfoitems": ["rate_limit"]}),
    (lambda i: i.registered(builtins=True), "registered",
     {"taskinfoitems": [], "builtins": True}),
    (lambda i: i.stats(), "stats", {}),
    (lambda i: i.conf(), "conf", {"with_defaults": False}),
    (lambda i: i.active_queues(), "active_queues", {}),
    (lambda i: i.queue_lengths(), "queue_lengths", {}),
    (lambda i: i.queue_lengths("q"), "queue_lengths", {"queues": ["q"]}),
    (lambda i: i.report(), "report", {}),
    (lambda i: i.memsample(), "memsample", {}),
    (lambda i: i.memdump(5), "memdump", {"samples": 5}),
    (lambda i: i.objgraph("Task", 3, 4), "objgraph", {"num": 3, "max_depth": 4, "type": "Task"}),
    (lambda i: i.hello("w9@h", ["a"]), "hello", {"from_node": "w9@h", "revoked": ["a"]}),
]  # fmt: skip


def test_every_question_is_asked_as_peers_ask_it(app, node):
    inspect = app.control.inspect(limit=1, timeout=LONG_S)
    for ask, method, arguments in QUESTIONS:
        node.handlers[method] = lambda _, method=method: f"the answer to {method}"
        assert ask(inspect) == {"w1@h": f"the answer to {method}"}
        request, _ = node.seen[-1]
        assert (request.method, request.arguments) == (method, arguments)


def test_every_request_moves_the_clock_by_one_and_carries_it(app, node):
    before = app.clock.value
    app.control.ping(limit=1, timeout=LONG_S)
    app.control.heartbeat()
    app.control.inspect(limit=1, timeout=LONG_S).ping()
    assert app.clock.value == before + 3
    wait_until(lambda: len(node.seen) == 3, what="three requests")
    assert [headers["clock"] for _, headers in node.seen] == [before + 1, before + 2, before + 3]


def test_a_request_expires_when_nobody_waits_any_more(app, node):
    app.control.ping(limit=1, timeout=7.0)
    _, headers = node.seen[-1]
    assert headers["expires"] == pytest.approx(time.time() + 7.0, abs=2.0)


def test_a_command_without_reply_outlives_the_time_out_that_nobody_waits_for(app, node):
    app.control.revoke("a")
    wait_until(lambda: node.seen, what="the command")
    _, headers = node.seen[-1]
    assert headers["expires"] == pytest.approx(time.time() + 300, abs=5.0)


def test_only_the_nodes_that_are_named_are_asked(app, node, other):
    assert app.control.ping(destination=["w2@h"], timeout=LONG_S) == [{"w2@h": {"ok": "pong"}}]
    pattern = app.control.inspect(pattern="w[12]@*", limit=2, timeout=LONG_S)
    assert set(pattern.ping()) == {"w1@h", "w2@h"}
    pattern = app.control.inspect(pattern="w(1|3)", matcher="pcre", limit=1, timeout=LONG_S)
    assert set(pattern.ping()) == {"w1@h"}
    assert len(node.seen) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"destination": "w1@h"}, "write \\['name@host'\\]"),
        ({"destination": [1]}, "list of node names"),
        ({"pattern": "(", "matcher": "pcre"}, "can not be matched"),
        ({"pattern": "a", "matcher": "sql"}, "choose glob or pcre"),
        ({"timeout": None}, "number of seconds"),
        ({"timeout": float("inf")}, "number of seconds"),
        ({"timeout": -1}, "number of seconds"),
    ],
)
def test_what_can_not_be_meant_is_refused_before_anything_is_sent(app, node, options, text):
    with pytest.raises(ValueError, match=text):
        app.control.broadcast("ping", reply=True, **options)
    assert app.control.ping(limit=1, timeout=LONG_S)
    assert node.methods() == ["ping"]


# -- how long it waits, and for whom -------------------------------------------------------


def test_nobody_there_is_none_after_the_time_out(app):
    began = time.monotonic()
    assert app.control.inspect(timeout=0.2).ping() is None
    assert app.control.ping(timeout=0.2) == []
    assert 0.4 <= time.monotonic() - began < 2.0


def test_the_time_out_is_one_deadline_however_many_replies_come(app, node, background):
    node.hold()
    began = time.monotonic()
    call = background(app.control.ping, timeout=0.6)
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    request = held(node)
    while not ended.wait(0.05):
        node.reply(request, 1)
    assert len(call.result()) > 3
    assert time.monotonic() - began < 1.6


def test_limit_counts_replies_to_this_request_only(app, node, background):
    node.hold()
    call = background(app.control.broadcast, "echo", {"n": 1}, reply=True, limit=1, timeout=LONG_S)
    request = held(node)
    for ticket in ("of somebody else", None):
        node.reply(replace(request, ticket=ticket), "stale")
    node.let_go()
    assert call.result(LONG_S) == [{"w1@h": {"n": 1}}]
    assert app.control.mailbox.counts["stale"] == 2


def test_a_reply_to_a_call_that_has_ended_is_dropped_and_counted(app, node):
    node.handlers["slow"] = lambda _: SILENCE
    assert app.control.broadcast("slow", reply=True, timeout=0.1) == []
    late = node.seen[-1][0]
    node.reply(late, "late")
    assert app.control.ping(limit=1, timeout=LONG_S) == [{"w1@h": {"ok": "pong"}}]
    wait_until(lambda: app.control.mailbox.counts["stale"] == 1, what="the late reply")


def test_a_call_ends_when_every_named_node_has_answered(app, node, other):
    began = time.monotonic()
    replies = app.control.ping(destination=["w1@h", "w2@h", "w2@h"], timeout=LONG_S)
    assert sorted(name for reply in replies for name in reply) == ["w1@h", "w2@h"]
    assert time.monotonic() - began < LONG_S / 2


def test_two_answers_of_one_node_do_not_stand_for_another_one(app, node, background):
    node.hold()
    call = background(app.control.ping, destination=["w1@h", "gone@h"], timeout=0.5)
    request = held(node)
    node.reply(request, 1)
    node.reply(request, 2)
    assert call.result(LONG_S) == [{"w1@h": 1}, {"w1@h": 2}]


def test_two_nodes_of_one_name_are_warned_of():
    replies = [{"w1@h": 1}, {"w2@h": 2}, {"w1@h": 3}]
    with pytest.warns(DuplicateNodenameWarning, match="several nodes answered as w1@h: give"):
        assert flatten_reply(replies) == {"w1@h": 3, "w2@h": 2}


def test_each_reply_is_given_to_the_callback_at_once(app, node, other, background):
    came: list[dict[str, Any]] = []
    other.hold()
    call = background(app.control.ping, limit=2, timeout=LONG_S, callback=came.append)
    wait_until(lambda: came == [{"w1@h": {"ok": "pong"}}], what="the first reply")
    assert not call.done()
    other.let_go()
    assert call.result(LONG_S) == came


def test_a_callback_that_raises_ends_its_call_and_no_other(app, node):
    def fail(_: Any) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        app.control.ping(timeout=LONG_S, callback=fail)
    assert app.control.ping(limit=1, timeout=LONG_S)


def test_a_reply_that_can_not_be_read_is_dropped_and_counted(app, node, background, caplog):
    node.hold()
    call = background(app.control.ping, limit=1, timeout=LONG_S)
    request = held(node)
    assert request.reply_to is not None
    node.reply(request, "x", serializer="msgpack")
    node.let_go()
    assert call.result(LONG_S) == [{"w1@h": {"ok": "pong"}}]
    assert app.control.mailbox.counts["content-disallowed"] == 1
    assert "a reply was dropped" in caplog.text


# -- life ----------------------------------------------------------------------------------


def test_closing_leaves_no_queue_behind(app, node):
    app.control.ping(limit=1, timeout=LONG_S)
    assert len(inbox_queues()) == 1
    app.close()
    assert inbox_queues() == []
    assert app.control.ping(limit=1, timeout=LONG_S), "it can be used again"


def test_a_client_that_asks_no_more_leaves_no_queue_behind(app, node, monkeypatch):
    monkeypatch.setattr(collector, "LINGER_S", 0.05)
    app.control.ping(limit=1, timeout=LONG_S)
    wait_until(lambda: inbox_queues() == [], what="the queue to go")
    assert app.control.ping(limit=1, timeout=LONG_S), "it can be used again"


def test_a_call_that_waits_is_told_when_the_application_is_closed(app, node, background):
    node.hold()
    call = background(app.control.ping, timeout=LONG_S * 3)
    held(node)
    app.close()
    with pytest.raises(OperationalError, match=r"memory://.*application was closed"):
        call.result(LONG_S)


def test_calls_of_many_threads_share_one_queue(app, node):
    with ThreadPoolExecutor(20) as pool:
        calls = [
            pool.submit(
                app.control.broadcast, "echo", {"n": n}, reply=True, limit=1, timeout=LONG_S
            )
            for n in range(100)
        ]
        assert [call.result() for call in calls] == [[{"w1@h": {"n": n}}] for n in range(100)]
    assert len(inbox_queues()) == 1


def test_a_connection_that_is_given_is_used_and_left_open(app, node):
    with app.connection() as connection:
        inspect = app.control.inspect(connection=connection, limit=1, timeout=LONG_S)
        assert inspect.ping() == {"w1@h": {"ok": "pong"}}
        assert app.control.broadcast("echo", connection=connection) is None
        wait_until(lambda: node.methods() == ["ping", "echo"], what="both requests")
    assert inbox_queues() == []


def test_purge_removes_what_waits(app):
    for _ in range(3):
        app.send_task("t.add", (1, 2), ignore_result=True)
    assert app.control.purge() == 3
    assert app.control.purge() == 0


# -- settings ------------------------------------------------------------------------------


def test_a_cluster_has_its_own_exchange(app, node, new_app):
    apart = new_app(control_exchange="apart")
    with Responder(new_app(control_exchange="apart"), "w9@h") as far:
        assert apart.control.ping(limit=1, timeout=LONG_S) == [{"w9@h": {"ok": "pong"}}]
        assert node.seen == []
        assert len(far.seen) == 1


def test_exclusive_and_durable_do_not_go_together(new_app):
    app = new_app(control_queue_durable=True)
    with pytest.raises(ImproperlyConfigured, match="switch one of them off"):
        app.control.ping()


@pytest.mark.parametrize("mode", ["optional", "required"])
def test_commands_are_signed_with_the_shared_key(new_app, node, mode):
    since = time.time()
    app = new_app(control_signing=mode, control_signing_key=KEY)
    assert app.control.ping(limit=1, timeout=LONG_S), "who knows no signatures answers all the same"
    body, headers, content_type = node.raw[-1]
    options: Any = {"exchange": "celery.pidbox", "content_type": content_type}
    nonces = Nonces(since=since)
    verify(body, headers, KEY.encode(), time.time(), nonces, **options)
    with pytest.raises(Distrust):
        verify(body, headers, KEY.encode(), time.time(), nonces, **options)
    with pytest.raises(Distrust):
        verify(body + b" ", headers, KEY.encode(), time.time(), Nonces(since=since), **options)


def test_commands_are_not_signed_unless_asked_for(new_app, node):
    app = new_app(control_signing_key=KEY)
    app.control.ping(limit=1, timeout=LONG_S)
    assert set(node.raw[-1][1]) == {"clock", "expires", "umbel_sent_at"}


# -- signed replies ------------------------------------------------------------------------


def sealing(app: Umbel) -> Callable[[Any, str], Any]:
    """What a node with the settings of this application makes of its replies."""
    return lambda reply, exchange: Trust(app).signed(reply, exchange, REPLY)


def test_a_wrongly_signed_reply_is_dropped_and_a_copy_of_a_right_one_too(
    new_app, node, background, caplog
):
    app = new_app(control_signing="optional", control_signing_key=KEY)
    stranger = new_app(control_signing="optional", control_signing_key="x" * 16)
    right = sealing(app)
    node.hold()
    call = background(app.control.broadcast, "echo", reply=True, timeout=LONG_S, limit=3)
    request = held(node)
    node.reply(request, "forged", signed=sealing(stranger))
    sealed: list[Any] = []

    def keep(reply: Any, exchange: str) -> Any:
        sealed.append(right(reply, exchange))
        return sealed[-1]

    node.reply(request, "right", signed=keep)
    node.reply(request, "copy", signed=lambda reply, exchange: sealed[0])
    node.reply(request, "another", signed=right)
    node.reply(request, "unsigned")
    assert [one["w1@h"] for one in call.result(LONG_S)] == ["right", "another", "unsigned"]
    counts = app.control.mailbox.counts
    assert (counts["bad-signature"], counts["replayed"]) == (1, 1)
    assert "a reply of w1@h was dropped (bad-signature)" in caplog.text


@pytest.mark.parametrize(("mode", "heard"), [("off", 2), ("optional", 2), ("required", 1)])
def test_a_node_acts_on_unsigned_replies_only_where_signing_is_not_required(
    new_app, node, background, mode, heard
):
    app = new_app(control_signing=mode, control_signing_key=KEY)
    node.hold()
    call = background(
        app.control.mailbox.call, "echo", {}, timeout_s=LONG_S, limit=heard, signed_only=True
    )
    request = held(node)
    node.reply(request, "unsigned")
    node.reply(request, "signed", signed=sealing(app))
    found = [one["w1@h"] for one in call.result(LONG_S)]
    assert found == ["unsigned", "signed"][-heard:]


def test_a_challenge_is_answered_once_and_only_if_it_is_signed(new_app, node, background):
    app = new_app(control_signing="required", control_signing_key=KEY)
    node.hold()
    call = background(app.control.broadcast, "echo", {"n": 1}, reply=True, timeout=LONG_S, limit=2)
    request = held(node)
    unsigned = {"error": "prove it", CHALLENGE: "forged", LISTENING_S: 60.0}
    node.reply(request, unsigned)
    challenge = {"error": "prove it", CHALLENGE: "c" * 32, LISTENING_S: 60.0}
    node.reply(request, challenge, signed=sealing(app))
    wait_until(lambda: len(node.seen) == 2, what="the answer to the challenge")
    proof, headers = node.seen[1]
    assert headers[CHALLENGE] == "c" * 32
    assert (proof.ticket, proof.arguments, proof.destination) == (
        request.ticket, {"n": 1}, ("w1@h",)
    )  # fmt: skip
    body, raw_headers, _ = node.raw[1]
    assert raw_headers["umbel_nonce"] != node.raw[0][1]["umbel_nonce"]
    check_signature(body, raw_headers, KEY.encode(), exchange="celery.pidbox")
    node.reply(request, challenge, signed=sealing(app))
    assert [one["w1@h"] for one in call.result(LONG_S)] == [unsigned, challenge]
    assert len(node.seen) == 2


def test_a_node_that_was_not_there_when_a_command_was_sent_gets_no_proof(
    new_app, node, background, monkeypatch
):
    monkeypatch.setattr(mailbox, "LISTENING_SLACK_S", 0.0)
    app = new_app(control_signing="required", control_signing_key=KEY)
    node.hold()
    call = background(app.control.broadcast, "echo", reply=True, timeout=LONG_S, limit=2)
    request = held(node)
    late = {"error": "prove it", CHALLENGE: "c" * 32, LISTENING_S: 0.0}
    node.reply(request, late, signed=sealing(app))
    odd = {"error": "prove it", CHALLENGE: "c" * 32}
    node.reply(request, odd, signed=sealing(app))
    assert [one["w1@h"] for one in call.result(LONG_S)] == [late, odd]
    assert len(node.seen) == 1


def test_casts_are_forgotten_after_a_while(new_app, node, monkeypatch):
    monkeypatch.setattr(mailbox, "CAST_PROOF_S", 0.0)
    app = new_app(control_signing="required", control_signing_key=KEY)
    for number in range(5):
        app.control.broadcast("echo", {"n": number})
        assert len(app.control.mailbox._calls) == 1


def test_a_command_without_reply_has_an_address_for_challenges_where_signing_is_required(
    new_app, node
):
    app = new_app(control_signing="required", control_signing_key=KEY)
    node.hold()
    app.control.broadcast("echo", {"n": 1})
    request = held(node)
    assert request.reply_to is not None
    challenge = {"error": "prove it", CHALLENGE: "c" * 32, LISTENING_S: 60.0}
    node.reply(request, challenge, signed=sealing(app))
    wait_until(lambda: len(node.seen) == 2, what="the answer to the challenge")
    assert node.seen[1][1][CHALLENGE] == "c" * 32
    began = time.monotonic()
    app.control.close()
    assert time.monotonic() - began < LONG_S
    plain = new_app()
    plain.control.broadcast("echo", {"n": 2})
    node.wait_until_holding(3)
    assert node.seen[-1][0].reply_to is None


def test_who_closes_right_after_a_command_waits_for_challenges_for_a_moment(new_app):
    app = new_app(control_signing="required", control_signing_key=KEY)
    app.control.close()
    began = time.monotonic()
    app.control.broadcast("echo", {"n": 1})
    app.control.close()
    assert time.monotonic() - began >= CAST_SETTLE_S
    began = time.monotonic()
    app.control.close()
    assert time.monotonic() - began < CAST_SETTLE_S


@pytest.mark.parametrize("key", [None, "short"])
def test_signing_needs_a_key_that_is_long_enough(new_app, key):
    app = new_app(control_signing="required", control_signing_key=key)
    with pytest.raises(ImproperlyConfigured, match="control_signing_key has") as caught:
        app.control.revoke("a")
    assert "short" not in str(caught.value)
