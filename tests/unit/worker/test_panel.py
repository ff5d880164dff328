"""The panel: whatever a control message holds, nothing is raised, and it is obeyed at most once."""

from __future__ import annotations

import json
import logging
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.worker.parts import Message, idle_worker
from umbel import Umbel
from umbel.app.commands import NoReply
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.control import Request
from umbel.wire.signing import CHALLENGE, sign
from umbel.worker.control import panel as panel_module
from umbel.worker.control.panel import Panel
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.worker import Worker

NODE = "unit@test"
KEY = "a key of sixteen bytes or more"
REPLY_TO = {"exchange": "reply.celery.pidbox", "routing_key": "me"}


class Desk:
    """A worker with its panel, and the answers it gave."""

    def __init__(self, **settings: Any) -> None:
        self.app = Umbel(
            "unit", broker="memory://", backend="disabled://", set_as_current=False, **settings
        )
        self.ran: list[dict[str, Any]] = []

        @self.app.control_command
        def note(state: Any, **arguments: Any) -> dict[str, str]:
            self.ran.append(arguments)
            return {"ok": state.hostname}

        @self.app.control_command(reads=True, aliases=("peep",))
        def peek(state: Any) -> int:
            return 7

        @self.app.control_command
        def boom(state: Any, error: str = "on purpose") -> None:
            raise RuntimeError(error)

        @self.app.control_command
        def leave(state: Any) -> None:
            raise SystemExit(3)

        @self.app.control_command
        def mute(state: Any) -> None:
            raise NoReply

        self.worker: Worker = idle_worker(self.app)
        assert self.worker.panel is not None
        self.panel: Panel = self.worker.panel
        self.answers: list[Any] = []

    def handle(self, message: Message) -> bool:
        return self.panel.handle(message, self._answer)

    def _answer(self, request: Request, value: Any) -> None:
        if request.reply_to is not None:
            self.answers.append(value)

    def ask(self, method: str, arguments: Any = None, **fields: Any) -> Any:
        """The answer to a command, or None."""
        self.answers.clear()
        self.handle(command(method, arguments, **fields))
        return self.answers[0] if self.answers else None

    def close(self) -> None:
        self.worker._aside.shutdown()
        self.worker.inbox.close()
        self.app.close()


def command(
    method: Any, arguments: Any = None, headers: dict[str, Any] | None = None, **fields: Any
) -> Message:
    body = {"method": method, "arguments": arguments or {}, "destination": None, "pattern": None,
            "matcher": None, "ticket": "t", "reply_to": REPLY_TO, **fields}  # fmt: skip
    return Message(
        body=json.dumps(body).encode(), headers={"clock": 1, "expires": 0} | (headers or {})
    )


@pytest.fixture
def make() -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def desk(**settings: Any) -> Desk:
        made.append(Desk(**settings))
        return made[-1]

    yield desk
    for one in made:
        one.close()


@pytest.fixture
def desk(make: Callable[..., Desk]) -> Desk:
    return make()


# -- whom it is for ------------------------------------------------------------------------


def test_a_command_is_answered_and_advances_the_clock_by_one(desk: Desk) -> None:
    before = desk.app.clock.value
    assert desk.ask("ping") == {"ok": "pong"}
    assert desk.app.clock.value == before + 1
    assert desk.panel.handled == 1


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"destination": [NODE]}, True),
        ({"destination": ["other@test"]}, False),
        ({"destination": []}, True),
        ({"pattern": "unit@*", "matcher": "glob"}, True),
        ({"pattern": "other@*", "matcher": "glob"}, False),
        ({"pattern": r"u.it@", "matcher": "pcre"}, True),
        ({"destination": [NODE], "pattern": "other@*", "matcher": "glob"}, True),
    ],
    ids=str,
)
def test_who_is_not_meant_says_nothing_and_counts_all_the_same(
    desk: Desk, fields: dict[str, Any], meant: bool
) -> None:
    before = desk.app.clock.value
    assert desk.ask("note", **fields) == ({"ok": NODE} if meant else None)
    assert len(desk.ran) == int(meant)
    assert desk.app.clock.value == before + 1
    assert not desk.panel.refused


def test_nobody_is_answered_who_does_not_wait(desk: Desk) -> None:
    assert desk.ask("note", {"a": 1}, ticket=None, reply_to=None) is None
    assert desk.ran == [{"a": 1}]


def test_an_expired_command_is_refused_and_counted(desk: Desk, caplog: Any) -> None:
    now = time.time()
    assert desk.ask("note", headers={"expires": now - panel_module.EXPIRED_GRACE_S - 1}) is None
    assert desk.ran == []
    assert desk.panel.refused == {"expired": 1}
    assert "note expired 6.0 s ago" in caplog.text
    # Clocks of hosts differ a little.
    assert desk.ask("note", headers={"expires": now - 1}) == {"ok": NODE}
    assert desk.ask("note", headers={"expires": now + 60}) == {"ok": NODE}
    assert len(desk.ran) == 2


# -- commands that fail --------------------------------------------------------------------


def test_an_unknown_command_is_answered_as_peers_do(desk: Desk) -> None:
    assert desk.ask("nosuch") == {"error": "KeyError('nosuch')"}
    assert desk.panel.refused == {"unknown-command": 1}


def test_a_command_that_fails_answers_its_error_and_says_so_to_the_pidbox(
    desk: Desk, caplog: Any
) -> None:
    assert not desk.handle(command("boom"))
    assert desk.answers == [{"error": "RuntimeError('on purpose')"}]
    assert desk.panel.failed == 1
    assert "control command boom failed" in caplog.text
    assert desk.handle(command("ping"))


def test_a_command_that_wants_to_leave_the_process_fails_like_others(desk: Desk) -> None:
    """It would end the thread that listens, and with it all remote control."""
    assert desk.ask("leave") == {"error": "SystemExit(3)"}
    assert desk.ask("ping") == {"ok": "pong"}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("peek", {"unheard": 1}),
        ("boom", {"error": 1, "more": 2}),
        ("query_task", {"ids": 7}),
        ("revoke", {"task_id": 7}),
        ("revoke", {}),
        ("revoke", {"task_id": "a", "signal": "SIGNONE"}),
        ("revoke_by_stamped_headers", {"headers": 7}),
        ("pool_grow", {"n": "many"}),
        ("pool_grow", {"n": -1}),
        ("add_consumer", {}),
        ("cancel_consumer", {"queue": 7}),
        ("pause", {"queue": ""}),
        ("memdump", {"samples": "all"}),
        ("time_limit", {"task_name": "celery.ping", "hard": -1}),
        ("autoscale", {"max": 2}),
        ("pool_restart", {}),
        ("election", {"id": "a", "topic": "task"}),
    ],
    ids=str,
)
def test_wrong_arguments_are_answered_with_an_error(
    desk: Desk, method: str, arguments: dict[str, Any]
) -> None:
    answer = desk.ask(method, arguments)
    assert list(answer) == ["error"]
    assert desk.ask("ping") == {"ok": "pong"}


def test_an_argument_that_nobody_knows_is_no_way_to_the_state(desk: Desk) -> None:
    assert list(desk.ask("peek", {"state": 1})) == ["error"]


def test_an_answer_that_can_not_be_sent_raises_nothing(desk: Desk) -> None:
    def fail(request: Request, value: Any) -> None:
        raise ConnectionResetError("gone")

    assert not desk.panel.handle(command("ping"), fail)
    assert desk.ask("ping") == {"ok": "pong"}


def test_a_command_may_keep_quiet(desk: Desk) -> None:
    assert desk.handle(command("mute"))
    assert desk.answers == []


def test_a_command_for_other_nodes_is_answered_only_to_who_asks_by_name(
    desk: Desk, caplog: Any
) -> None:
    desk.worker.options = WorkerOptions(without_gossip=True)
    caplog.set_level(logging.INFO)
    asked = {"id": "a", "topic": "task", "action": {"task": "t"}}
    assert desk.ask("election", asked) is None
    assert desk.ask("election", asked, pattern="unit@*", matcher="glob") is None
    assert "--without-gossip" in desk.ask("election", asked, destination=[NODE])["error"]
    assert caplog.text == ""
    assert desk.panel.failed == 0


def test_a_command_of_the_application_goes_before_ours_and_aliases_work(
    make: Callable[..., Desk],
) -> None:
    desk = make()
    assert desk.ask("peep") == 7
    assert desk.ask("dump_active") == []
    with pytest.raises(ImproperlyConfigured, match="two control commands are called 'peek'"):
        desk.app.control_command(lambda state: 1, name="peek")
    desk.app.control_command(lambda state: "mine", name="ping")
    own = idle_worker(desk.app)
    assert own.panel is not None
    own.panel.handle(command("ping"), desk._answer)
    assert desk.answers[-1] == "mine"
    own._aside.shutdown()
    own.inbox.close()


# -- permissions ---------------------------------------------------------------------------


def test_read_only_looks_and_changes_nothing(make: Callable[..., Desk], caplog: Any) -> None:
    desk = make(control_allow="read-only")
    for method in ("ping", "active", "stats", "conf", "revoked", "registered", "peek", "report"):
        answer = desk.ask(method)
        assert not isinstance(answer, dict) or "error" not in answer, method
    caplog.set_level(logging.WARNING)
    for method in ("note", "revoke", "shutdown", "pool_grow", "rate_limit", "add_consumer",
                   "enable_events", "pause", "terminate", "autoscale", "election"):  # fmt: skip
        expected = f"{method} is not allowed here: control_allow is 'read-only'"
        assert desk.ask(method, {"task_id": "a"}) == {"error": expected}
    assert desk.ran == []
    assert not desk.worker.revocations.any
    assert not desk.worker.stop_wanted.is_set()
    assert desk.panel.refused["denied"] == 11
    assert "control message refused (denied): note is not allowed here" in caplog.text


def test_a_list_allows_what_it_names_by_any_of_its_names(make: Callable[..., Desk]) -> None:
    desk = make(control_allow=["ping", "peep", "dump_active"])
    assert desk.ask("ping") == {"ok": "pong"}
    assert desk.ask("peek") == 7
    assert desk.ask("active") == []
    assert list(desk.ask("note")) == ["error"]
    assert list(desk.ask("stats")) == ["error"]


def test_a_client_learns_of_a_refusal_only_if_it_waits(make: Callable[..., Desk]) -> None:
    desk = make(control_allow=["ping"])
    assert desk.ask("note", ticket=None, reply_to=None) is None
    assert desk.panel.refused == {"denied": 1}


# -- signing -------------------------------------------------------------------------------


def signed(
    message: Message, *, key: str = KEY, now: float | None = None, nonce: str = "n"
) -> Message:
    message.headers = sign(
        message.body,
        message.headers,
        key.encode(),
        time.time() if now is None else now,
        nonce,
        exchange="celery.pidbox",
    )
    return message


def required(make: Callable[..., Desk]) -> Desk:
    desk = make(control_signing="required", control_signing_key=KEY)
    desk.panel._nonces.since -= 1_000  # it has been listening for long
    return desk


def test_what_is_signed_is_obeyed_once(make: Callable[..., Desk]) -> None:
    desk = required(make)
    message = signed(command("note"))
    assert desk.handle(message)
    assert desk.answers == [{"ok": NODE}]
    desk.handle(message)
    assert len(desk.ran) == 1
    assert desk.answers == [{"ok": NODE}]
    assert desk.panel.refused == {"replayed": 1}


def alter_body(message: Message) -> None:
    message.body = message.body.replace(b'"note"', b'"peek"')


def alter_expires(message: Message) -> None:
    message.headers = {**message.headers, "expires": time.time() + 999}


def alter_kind(message: Message) -> None:
    message.content_type = "application/x-yaml"


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda m: m, "unsigned"),
        (lambda m: signed(m, key="another key of sixteen bytes"), "bad-signature"),
        (lambda m: signed(m, now=time.time() - 31), "out-of-time"),
        (lambda m: signed(m, now=time.time() + 31), "out-of-time"),
        (lambda m: alter_body(signed(m)) or m, "bad-signature"),
        (lambda m: alter_expires(signed(m)) or m, "bad-signature"),
        (lambda m: alter_kind(signed(m)) or m, "content-disallowed"),
    ],
    ids=["unsigned", "another-key", "old", "early", "body", "expires", "content-type"],
)
def test_what_is_not_signed_right_is_neither_obeyed_nor_answered(
    make: Callable[..., Desk], prepare: Any, reason: str, caplog: Any
) -> None:
    desk = required(make)
    assert desk.handle(prepare(command("note")))
    assert (desk.ran, desk.answers) == ([], [])
    assert desk.panel.refused == {reason: 1}
    assert f"control message refused ({reason})" in caplog.text
    assert KEY not in caplog.text


def test_what_was_signed_before_the_start_is_not_obeyed(make: Callable[..., Desk]) -> None:
    desk = make(control_signing="required", control_signing_key=KEY)
    desk.handle(signed(command("note"), now=time.time() - 5))
    assert desk.ran == []
    assert desk.panel.refused == {"out-of-time": 1}


def test_optional_signing_refuses_only_wrong_signatures(make: Callable[..., Desk]) -> None:
    desk = make(control_signing="optional", control_signing_key=KEY)
    assert desk.ask("note") == {"ok": NODE}
    desk.handle(signed(command("note")))
    desk.handle(signed(command("note"), key="another key of sixteen bytes"))
    assert len(desk.ran) == 2
    assert desk.panel.refused == {"bad-signature": 1}


def fresh(make: Callable[..., Desk]) -> Desk:
    """A worker that has just started and believes only signed messages."""
    return make(control_signing="required", control_signing_key=KEY)


def challenged(desk: Desk) -> str:
    """The challenge that was answered last."""
    return str(desk.answers[-1][CHALLENGE])


def test_a_worker_that_has_just_started_wants_a_proof_that_a_command_is_new(
    make: Callable[..., Desk],
) -> None:
    desk = fresh(make)
    desk.handle(signed(command("note")))
    assert desk.ran == []
    assert "may be a copy" in desk.answers[0]["error"]
    proof = command("note", {"n": 1}, headers={CHALLENGE: challenged(desk)})
    desk.handle(signed(proof, nonce="another"))
    assert desk.ran == [{"n": 1}]
    assert desk.answers[-1] == {"ok": NODE}
    desk.handle(proof)
    assert len(desk.ran) == 1
    assert desk.panel.refused == {"replayed": 1}
    assert desk.panel.challenged == 1


def test_what_only_looks_needs_no_proof(make: Callable[..., Desk]) -> None:
    desk = fresh(make)
    desk.handle(signed(command("peek")))
    assert desk.answers == [7]


def test_a_command_whose_sender_can_not_be_asked_is_refused_at_the_start(
    make: Callable[..., Desk], caplog: Any
) -> None:
    desk = fresh(make)
    assert desk.handle(signed(command("note", reply_to=None, ticket=None)))
    assert (desk.ran, desk.answers) == ([], [])
    assert desk.panel.refused == {"unproven": 1}
    assert "note may be a copy of a command" in caplog.text


def test_who_seems_to_have_signed_before_the_start_may_prove_that_it_did_not(
    make: Callable[..., Desk],
) -> None:
    desk = fresh(make)
    desk.handle(signed(command("note"), now=time.time() - 20))
    proof = command("note", headers={CHALLENGE: challenged(desk)})
    desk.handle(signed(proof, now=time.time() - 20, nonce="another"))
    assert len(desk.ran) == 1


def test_the_challenge_of_one_worker_is_no_proof_to_another(make: Callable[..., Desk]) -> None:
    one, other = fresh(make), fresh(make)
    one.handle(signed(command("note")))
    proof = command("note", headers={CHALLENGE: challenged(one)})
    other.handle(signed(proof, nonce="another"))
    assert other.ran == []


def test_without_a_challenge_nobody_is_asked_what_is_not_allowed(
    make: Callable[..., Desk],
) -> None:
    desk = make(control_signing="required", control_signing_key=KEY, control_allow=["ping"])
    desk.handle(signed(command("note")))
    assert "not allowed here" in desk.answers[0]["error"]
    assert desk.panel.challenged == 0


@pytest.mark.parametrize("key", [None, "short"])
def test_a_worker_without_a_key_does_not_start_where_it_needs_one(
    make: Callable[..., Desk], key: Any
) -> None:
    with pytest.raises(ImproperlyConfigured, match="control_signing_key has"):
        make(control_signing="required", control_signing_key=key)


# -- times ---------------------------------------------------------------------------------


class Pidbox:
    """Tells how long messages can have waited."""

    def __init__(self, waited_s: float) -> None:
        self._waited_s = waited_s

    def waited_s(self) -> float:
        return self._waited_s


@pytest.mark.parametrize("shift_s", [-7_200.0, -30.0, 0.0, 7_200.0])
def test_the_time_of_a_command_is_taken_as_our_clock_would_show_it(
    desk: Desk, shift_s: float
) -> None:
    now = time.time() + shift_s
    headers = {"expires": now + 1, "umbel_sent_at": now}
    queue = f"paused{shift_s}"
    desk.ask("pause", {"queue": queue, "stamp": now - 0.5}, headers=headers)
    stamp, paused = desk.worker.gossip.node.pauses.told()[queue]
    assert stamp == pytest.approx(time.time() - 0.5, abs=0.4)
    assert paused is True


def test_a_command_of_a_client_that_tells_no_send_time_is_taken_as_it_is(desk: Desk) -> None:
    stamp = time.time() - 7_200
    desk.ask("pause", {"queue": "celery", "stamp": stamp})
    assert desk.worker.gossip.node.pauses.told() == {"celery": [stamp, True]}
    assert desk.ask("pause", {"queue": "celery", "stamp": True}, headers={"umbel_sent_at": 5.0})[
        "error"
    ]


@pytest.mark.parametrize("shift_s", [-7_200.0, 0.0, 7_200.0])
def test_a_stalled_worker_refuses_what_has_expired_meanwhile(desk: Desk, shift_s: float) -> None:
    desk.panel.pidbox = Pidbox(waited_s=60.0)
    sent_at = time.time() + shift_s - 30
    headers = {"expires": sent_at + 1, "umbel_sent_at": sent_at}
    assert desk.ask("note", headers=headers) is None
    assert desk.panel.refused == {"expired": 1}
    headers = {"expires": sent_at + 300, "umbel_sent_at": sent_at}
    assert desk.ask("note", headers=headers) == {"ok": NODE}, "it is worth it for five minutes"


def test_whoever_goes_by_our_clock_or_by_that_of_the_nodes_is_in_time(desk: Desk) -> None:
    desk.worker.wall.shift_s = -7_200.0  # this host's clock is ahead
    assert desk.ask("note", headers={"expires": time.time() + 1}) == {"ok": NODE}
    assert desk.ask("note", headers={"expires": time.time() - 7_199}) == {"ok": NODE}
    assert desk.ask("note", headers={"expires": time.time() - 7_210}) is None


# -- rubbish -------------------------------------------------------------------------------


class Surprise:
    """What a careless reader of pickles would run."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was read",))


@pytest.mark.parametrize(
    "changes",
    [
        {"body": b""},
        {"body": None},
        {"body": 7},
        {"body": b"[1, 2]"},
        {"body": b"null"},
        {"body": b'{"method": null}'},
        {"body": b'{"method": 7}'},
        {"body": b'{"method": ""}'},
        {"body": b'{"method": "note", "arguments": [1]}'},
        {"body": b'{"method": "note", "destination": "unit@test"}'},
        {"body": b'{"method": "note", "pattern": "a(?=b)", "matcher": "pcre"}'},
        {"body": b'{"method": "note", "pattern": "(", "matcher": "pcre"}'},
        {"body": b'{"method": "note", "reply_to": "celery"}'},
        {"body": b'{"method": "note", "ticket": 7}'},
        {"body": b"[" * 100_000},
        {"body": pickle.dumps(Surprise()), "content_type": "application/x-python-serialize"},
        {"body": b"{}", "content_type": None},
        {"body": b"{}", "content_type": 7},
        {"content_encoding": 7, "body": b"\xff\xfe"},
        {"headers": None, "body": b"{"},
        {"headers": 7, "body": b"{"},
        {"headers": {"expires": "soon"}},
        {"headers": {"expires": float("inf")}},
        {"headers": {"compression": "nosuch"}},
        {"headers": {"compression": "application/x-gzip"}},
    ],
    ids=lambda changes: repr(changes)[:60],
)
def test_what_is_no_control_message_is_refused_and_counted(
    desk: Desk, changes: dict[str, Any]
) -> None:
    message = command("note")
    for name, value in changes.items():
        setattr(message, name, value)
    assert desk.handle(message)
    assert (desk.ran, desk.answers) == ([], [])
    assert desk.panel.refused.total() == 1
    assert desk.ask("ping") == {"ok": "pong"}


def test_a_pattern_that_would_run_away_is_decided_at_once(desk: Desk) -> None:
    began = time.monotonic()
    for pattern in ("(a+)+$", "(.*)*x", "((u|n|i|t)+)+!"):
        assert desk.ask("note", pattern=pattern, matcher="pcre") is None
    assert time.monotonic() - began < 1


def test_mangled_messages_do_no_harm(desk: Desk) -> None:
    dice = random.Random(20)
    whole = command("note", {"a": [1, {"b": None}]}, destination=[NODE]).body
    for _ in range(500):
        mangled = bytearray(whole)
        for _ in range(dice.randint(1, 6)):
            at = dice.randrange(len(mangled))
            mangled[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
        message = command("note")
        message.body = bytes(mangled)
        message.content_type = dice.choice(["application/json", "application/x-yaml", "x", None])
        desk.handle(message)
    assert desk.panel.failed == 0
    assert desk.ask("ping") == {"ok": "pong"}


# -- beside the loop -----------------------------------------------------------------------


def test_a_command_that_changes_something_is_carried_to_the_loop(desk: Desk) -> None:
    desk.panel.loop_thread = threading.get_ident()
    ran_on: list[int] = []
    desk.panel._commands.command(lambda state: ran_on.append(threading.get_ident()), name="where")
    beside = threading.Thread(target=desk.handle, args=(command("where"),))
    beside.start()
    deadline = time.monotonic() + 10
    while beside.is_alive() and time.monotonic() < deadline:
        if len(desk.worker.inbox):
            desk.worker.inbox.run()
    assert ran_on == [threading.get_ident()]
    assert desk.answers == [None]


def test_a_loop_that_stands_still_is_not_waited_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel_module, "LOOP_PATIENCE_S", 0.01)
    desk.panel.loop_thread = -1  # some other thread, inside of a task
    assert desk.ask("note") == {"ok": "note will be carried out when the worker's loop turns again"}
    assert desk.ran == []
    assert desk.ask("ping") == {"ok": "pong"}, "it needs no loop"
    desk.worker.inbox.run()
    assert desk.ran == [{}]


def test_a_command_that_fails_on_the_loop_is_answered_beside_it(desk: Desk) -> None:
    desk.panel.loop_thread = -1
    turning = threading.Event()

    def turn() -> None:
        while not turning.wait(0.001):
            desk.worker.inbox.run()

    loop = threading.Thread(target=turn)
    loop.start()
    try:
        assert desk.ask("boom") == {"error": "RuntimeError('on purpose')"}
        assert desk.ask("leave") == {"error": "SystemExit(3)"}
        assert desk.ask("note") == {"ok": NODE}
    finally:
        turning.set()
        loop.join()
