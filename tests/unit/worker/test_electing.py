"""The carrier: what may be elected, what a claim sends, and who runs a handler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from tests.unit.worker.parts import idle_worker
from umbel import Umbel
from umbel.broker.registers.claims import Claim
from umbel.cluster import election_words as elect
from umbel.worker.membership.electing import FAILING_MAX, REFUSALS_MAX, Carrier, NotForElection
from umbel.worker.runtime.worker import Worker

QUEUE = "celery"
BAD_REQUESTS: list[tuple[str, Any, Any, Any]] = [
    ("no id", None, "task", {"task": "t"}),
    ("an empty id", "", "task", {"task": "t"}),
    ("an id that is no text", 7, "task", {"task": "t"}),
    ("an id that is too long", "x" * 201, "task", {"task": "t"}),
    ("an id of too many bytes", "ä" * 150, "task", {"task": "t"}),
    ("an id without a form on the wire", "\ud800", "task", {"task": "t"}),
    ("no topic", "id", None, {"task": "t"}),
    ("an unknown topic", "id", "nobody-knows", {"task": "t"}),
    ("a topic that is no text", "id", ["task"], {"task": "t"}),
    ("a topic that is a mapping", "id", {"task": 1}, {"task": "t"}),
    ("no action", "id", "task", None),
    ("an action that is no signature", "id", "task", [1, 2]),
    ("a signature without a task", "id", "task", {"args": []}),
    ("a task that is no text", "id", "task", {"task": 3}),
    ("arguments that are no list", "id", "task", {"task": "t", "args": "abc"}),
    ("options that are no mapping", "id", "task", {"task": "t", "options": [1]}),
    ("an impossible countdown", "id", "task", {"task": "t", "options": {"countdown": "soon"}}),
    ("an impossible queue", "id", "task", {"task": "t", "options": {"queue": {"a": 1}}}),
    ("an impossible exchange", "id", "task",
     {"task": "t", "options": {"exchange": [1], "routing_key": 4}}),
    ("an unknown serializer", "id", "task", {"task": "t", "options": {"serializer": "pickel"}}),
    ("headers that are none", "id", "task", {"task": "t", "options": {"headers": 4}}),
    ("arguments that the task does not take", "id", "task", {"task": "known", "args": [1, 2, 3]}),
    ("a chain", "id", "task",
     {"task": "celery.chain", "kwargs": {"tasks": [{"task": "t"}]}, "subtask_type": "chain"}),
    ("a group", "id", "task",
     {"task": "celery.group", "kwargs": {"tasks": [{"task": "t"}]}, "subtask_type": "group"}),
]  # fmt: skip


class Desk:
    """A carrier, and what it sends."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.app = worker.app
        self.carrier = Carrier(worker)

    def claim(self, id_: str, action: Any, *, topic: str = "task", token: str = "w/1/1/1") -> Any:
        return self.carrier.claim(elect.Claim(id_, topic, action, token))

    def sent(self) -> list[dict[str, Any]]:
        """The headers of every task message that waits."""
        found = []
        with self.app.connection() as connection:
            queue = self.app.queues.find(QUEUE)(connection.channel())
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                found.append(message.headers)
        return found


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(**settings: Any) -> Desk:
        chosen = {"broker_url": "memory://", "result_backend": "disabled://", **settings}
        app = Umbel("a", set_as_current=False, **chosen)
        app.task(name="known")(lambda x=0: x)
        made.append(Desk(idle_worker(app)))
        return made[-1]

    yield make
    for one in made:
        one.carrier.close()
        one.sent()  # the memory of one process is that of all tests
        one.app.close()


# -- what may be elected -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id_", "topic", "action"), [row[1:] for row in BAD_REQUESTS], ids=[r[0] for r in BAD_REQUESTS]
)
def test_what_nobody_could_carry_out_is_refused_before_anybody_is_asked(
    desk: Callable[..., Desk], id_: Any, topic: Any, action: Any
) -> None:
    with pytest.raises(NotForElection):
        desk().carrier.check(id_, topic, action)


def test_a_signature_may_leave_out_what_has_a_default(desk: Callable[..., Desk]) -> None:
    one = desk()
    for action in ({"task": "t"}, {"task": "known"}, {"task": "t", "args": None, "options": None}):
        one.carrier.check("short", "task", action)
    assert one.claim("short", {"task": "t"}) == elect.Claimed("short", True, "w/1/1/1")
    (headers,) = one.sent()
    assert (headers["task"], headers["id"]) == ("t", "short")


def test_election_allow_names_tasks_and_patterns(desk: Callable[..., Desk]) -> None:
    one = desk(election_allow=["shop.*", "known"])
    for name in ("shop.close", "known"):
        one.carrier.check("id", "task", {"task": name})
    for name in ("shopping", "unknown", "SHOP.close"):
        with pytest.raises(NotForElection, match=f"'{name}' is not in election_allow"):
            one.carrier.check("id", "task", {"task": name})
    nobody = desk(election_allow=[])
    with pytest.raises(NotForElection):
        nobody.carrier.check("id", "task", {"task": "known"})


def test_topics_are_those_that_have_a_handler(desk: Callable[..., Desk]) -> None:
    one = desk(election_allow=[])
    with pytest.raises(NotForElection, match=r"known are task$"):
        one.carrier.check("id", "rotate", 1)
    one.app.election_handler("rotate")(lambda action: None)
    one.carrier.check("id", "rotate", None)


# -- claims --------------------------------------------------------------------------------


def test_the_first_claim_sends_the_task_and_the_others_learn_the_winner(
    desk: Callable[..., Desk],
) -> None:
    one, other = desk(), desk()
    action = {"task": "known", "args": [4], "kwargs": {}, "options": {"task_id": "another"}}
    assert one.claim("first", action) == elect.Claimed("first", True, "w/1/1/1")
    assert other.claim("first", action, token="w/2/2/2").winner == "w/1/1/1"
    assert one.claim("first", action).won, "asked again it has still won"
    (headers,) = one.sent()
    assert headers["id"] == "first", "the election's id is the task's"


def test_a_claim_that_can_never_be_made_is_given_up(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    one = desk()
    told = one.claim("never", {"task": "known", "args": [1, 2, 3]})
    assert told == elect.Claimed("never", False, None), "somebody else may still do it"
    assert "election never" in caplog.text
    assert one.sent() == []
    assert desk().claim("never", {"task": "known"}).won, "nothing was claimed"


def test_a_register_that_can_not_be_reached_is_asked_again() -> None:
    app = Umbel(
        "a", broker="redis://127.0.0.1:1/0", backend="disabled://", set_as_current=False,
        task_publish_retry=False, broker_connection_timeout=0.2,
    )  # fmt: skip
    one = Desk(idle_worker(app))
    try:
        assert isinstance(one.claim("away", {"task": "t"}), elect.ClaimFailed)
    finally:
        one.carrier.close()
        app.close()


class Broken:
    """A register that fails in one way."""

    def __init__(self, failure: Exception | Claim) -> None:
        self.failure = failure

    def claim(self, *args: Any, **options: Any) -> Claim:
        if isinstance(self.failure, Exception):
            raise OperationalError("the register can not be asked") from self.failure
        return self.failure

    def winner(self, election_id: str) -> str | None:
        return None

    def close(self) -> None:
        """Nothing."""


UNSENT = Claim(True, "w/1/1/1", sent=False, reason="the broker still has a connection")
UNROUTABLE = Claim(True, "w/1/1/1", sent=False, reason="Basic.publish: (312) NO_ROUTE")


@pytest.mark.parametrize(
    ("failure", "gives_up"),
    [
        (ConnectionResetError("gone"), False),
        (TimeoutError("no answer"), False),
        (UNSENT, False),
        (UNROUTABLE, True),
        (RuntimeError("WRONGTYPE: no list"), True),
        (OperationalError("no queue is bound"), True),
    ],
    ids=str,
)
def test_what_the_broker_refuses_is_given_up_and_what_it_does_not_answer_is_not(
    desk: Callable[..., Desk],
    caplog: pytest.LogCaptureFixture,
    failure: Any,
    gives_up: bool,
) -> None:
    one = desk()
    one.carrier._register = Broken(failure)
    told = [one.claim("id", {"task": "t"}) for _ in range(REFUSALS_MAX)]
    assert all(isinstance(answer, elect.ClaimFailed) for answer in told[:-1])
    if gives_up:
        assert told[-1] == elect.Claimed("id", False, None)
    else:
        assert isinstance(told[-1], elect.ClaimFailed)
    assert caplog.text.count("no claim yet") == 1, "said once"
    assert caplog.text.count("given up") == gives_up


def test_many_that_fail_are_not_remembered_for_ever(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.carrier._register = Broken(ConnectionResetError("gone"))
    for number in range(FAILING_MAX + 100):
        one.claim(f"id-{number}", None, topic="other")
    assert len(one.carrier._failing) == FAILING_MAX


def test_without_registers_there_are_no_elections(desk: Callable[..., Desk], tmp_path: Any) -> None:
    folders = dict.fromkeys(("data_folder_in", "data_folder_out", "control_folder"), str(tmp_path))
    one = desk(broker_url="filesystem://", broker_transport_options=folders)
    assert one.claim("none", {"task": "t"}) == elect.Claimed("none", False, None)


# -- handlers ------------------------------------------------------------------------------


def test_a_handler_runs_aside_and_in_order_and_what_it_raises_is_contained(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    one = desk()
    gate, done = threading.Event(), threading.Event()
    seen: list[Any] = []

    @one.app.election_handler("slow")
    def slow(action: Any) -> None:
        gate.wait(10)
        seen.append((action, threading.current_thread()))

    @one.app.election_handler("bad")
    def bad(action: Any) -> None:
        seen.append((action, threading.current_thread()))
        raise SystemExit("on purpose")

    @one.app.election_handler("last")
    def last(action: Any) -> None:
        seen.append((action, threading.current_thread()))
        done.set()

    for number, topic in enumerate(("slow", "bad", "last")):
        one.carrier.act(elect.Act(str(number), topic, number))
    assert seen == [], "whoever decides does not wait for it"
    gate.set()
    assert done.wait(10)
    assert [action for action, _ in seen] == [0, 1, 2]
    assert threading.current_thread() not in {thread for _, thread in seen}
    assert "the handler of 'bad' failed" in caplog.text


def test_the_end_waits_for_a_handler_that_runs(desk: Callable[..., Desk]) -> None:
    one = desk()
    began, gate = threading.Event(), threading.Event()
    ended: list[Any] = []

    @one.app.election_handler("slow")
    def slow(action: Any) -> None:
        began.set()
        gate.wait(10)
        ended.append(action)

    one.carrier.act(elect.Act("id", "slow", 1))
    assert began.wait(10)
    threading.Timer(0.1, gate.set).start()
    one.carrier.close()
    assert ended == [1]


def test_a_topic_whose_handler_is_gone_is_said(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    desk().carrier.act(elect.Act("id", "gone", None))
    assert "no handler of topic 'gone'" in caplog.text
