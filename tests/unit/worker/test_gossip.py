"""Gossip: who is there, told once; elections fed with what was heard; nothing harmful gets in."""

from __future__ import annotations

import itertools
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.servers import wait_until
from tests.unit.worker.parts import Message, idle_worker
from umbel import Umbel
from umbel.app.events.dispatcher import Dispatcher
from umbel.cluster import node as node_machine
from umbel.cluster.clock import FIRST_MAX
from umbel.cluster.election import ACTION_BYTES_MAX
from umbel.cluster.election_words import Claimed
from umbel.cluster.membership import ESTABLISHED_S, FREQ_UNKNOWN_S, GRACE_S, SIGNS_MIN
from umbel.cluster.node import FREQ_TIMES_MAX, NODES_FULL
from umbel.cluster.refusals import WAIT_S
from umbel.wire.signing import EVENT, REQUEST, sign
from umbel.worker.membership import gossip as gossiping
from umbel.worker.membership.electing import NotForElection
from umbel.worker.membership.gossip import Gossip

OWN = "unit@test"
INTERVAL_S = 2.0
ACTION = {"task": "known", "args": [1], "kwargs": {}, "options": {}}
_exchanges = itertools.count(1)


class Time:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """Gossip without its thread: a test hands it what it hears, and lets time pass."""

    def __init__(self, **settings: Any) -> None:
        chosen = {
            "broker_url": "memory://", "result_backend": "disabled://",
            "event_exchange": f"celeryev-unit-{next(_exchanges)}",  # memory is shared by all tests
            **settings,
        }  # fmt: skip
        self.app = Umbel("node", set_as_current=False, **chosen)
        self.app.task(name="known")(lambda x=0: x)
        self.worker = idle_worker(self.app)
        self.worker.events = self.events = Dispatcher(self.app, OWN, groups={"worker"})
        self.time = Time()
        self.gossip = Gossip(self.worker, self.time)
        self.gossip.take_part()
        self.gossip._inlet._listener = object()  # type: ignore[assignment] # as if it listened
        self.seen: list[tuple[str, str]] = []
        for name in ("join", "leave", "lost"):
            callbacks: set[Any] = getattr(self.gossip.on, f"node_{name}")
            callbacks.add(lambda node, word=name: self.seen.append((word, node.hostname)))
        self._seq = itertools.count(1)

    def hear(self, kind: str, hostname: str = "peer@test", **fields: Any) -> None:
        event = {
            "type": kind, "hostname": hostname, "timestamp": time.time(), "pid": 7,
            "clock": next(self._seq), "utcoffset": 0, **fields,
        }  # fmt: skip
        self.hear_raw(json.dumps(event))

    def beat(self, hostname: str = "peer@test", **fields: Any) -> None:
        self.hear("worker-heartbeat", hostname, **{"freq": INTERVAL_S, "inc": 1, **fields})

    def elect(self, id_: str, hostname: str = "peer@test", **fields: Any) -> None:
        chosen = {"id": id_, "topic": "task", "action": ACTION, "cver": 2, "inc": 1, **fields}
        self.hear("worker-elect", hostname, **chosen)

    def hear_raw(self, body: Any, **fields: Any) -> None:
        self.gossip._on_message(Message(body=body, **fields))

    def pass_time(self, seconds: float, *, beating: str = "", step_s: float = 0.25) -> None:
        """Turns of the thread; one node may go on beating."""
        for number in range(int(seconds / step_s)):
            self.time.now += step_s
            if beating and number % int(INTERVAL_S / step_s) == 0:
                self.beat(beating)
            self.gossip.turn()

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """What waits to be published, or was: nobody empties this buffer but a test."""
        return [event for event in self.events._buffer if event["type"] == kind]

    def close(self) -> None:
        self.gossip._inlet._listener = None
        self.gossip.stop()
        self.app.close()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []
    # What is sent stays where a test can see it.
    monkeypatch.setattr(Dispatcher, "start", lambda self: None)

    def make(**settings: Any) -> Node:
        made.append(Node(**settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- who is there ----------------------------------------------------------------------------


def test_a_node_joins_once_per_life_and_goes_once(node: Callable[..., Node]) -> None:
    one = node()
    for kind in ("worker-online", "worker-online", "worker-heartbeat"):
        one.hear(kind, freq=INTERVAL_S, inc=1)
    assert one.seen == [("join", "peer@test")]
    one.hear("worker-offline", inc=1)
    one.beat(inc=1)  # it was on its way
    one.hear("worker-online", inc=2)
    assert one.seen == [("join", "peer@test"), ("leave", "peer@test"), ("join", "peer@test")]


def test_a_silent_node_is_lost_after_two_heartbeats_and_joins_when_it_is_back(
    node: Callable[..., Node],
) -> None:
    one = node(worker_gossip_interval=0.5)
    one.beat()
    one.pass_time(2 * INTERVAL_S - 0.5)
    assert one.seen == [("join", "peer@test")]
    one.pass_time(1.5)
    assert one.seen[1:] == [("lost", "peer@test")]
    one.beat()
    assert one.seen[2:] == [("join", "peer@test")]


def test_a_long_way_from_making_to_listening_is_no_stall(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    one = node(worker_gossip_interval=0.5)
    one.time.now += 30  # a broker to wait for, nodes to mingle with
    one.gossip.take_part()
    one.beat()
    one.pass_time(2 * INTERVAL_S + 1)
    assert one.seen == [("join", "peer@test"), ("lost", "peer@test")]
    assert "could not hear" not in caplog.text


@pytest.mark.parametrize("interval_s", [0.5, 5.0, 20.0])
def test_losses_are_looked_for_as_often_as_the_setting_says(
    node: Callable[..., Node], interval_s: float
) -> None:
    one = node(worker_gossip_interval=interval_s)
    one.pass_time(interval_s + 0.5, beating="peer@test")
    one.beat("silent@test")
    ages = []
    for _ in range(400):
        one.pass_time(0.25)
        ages.append(one.time.now)
        if ("lost", "silent@test") in one.seen:
            break
    assert ("lost", "silent@test") in one.seen
    assert ages[-1] - ages[0] <= 2 * INTERVAL_S + interval_s + 0.5


def test_who_was_held_up_accuses_nobody_before_it_has_read_what_came(
    node: Callable[..., Node],
) -> None:
    one = node(worker_gossip_interval=0.5)
    one.beat()
    one.pass_time(1)
    one.time.now += 60  # the process was stopped
    one.gossip.turn()
    one.beat()
    one.pass_time(2)
    assert one.seen == [("join", "peer@test")]
    one.pass_time(GRACE_S + 2 * INTERVAL_S + 2)
    assert one.seen[1:] == [("lost", "peer@test")], "in earnest"


def test_who_is_not_connected_accuses_nobody(node: Callable[..., Node]) -> None:
    one = node(worker_gossip_interval=0.5)
    one.beat()
    listener, one.gossip._inlet._listener = one.gossip._inlet._listener, None
    one.pass_time(60)
    assert one.seen == [("join", "peer@test")]
    one.gossip._inlet._listener = listener
    one.pass_time(GRACE_S - 1)  # the other one has to find its broker again, too
    one.beat()
    one.pass_time(10, beating="peer@test")
    assert one.seen == [("join", "peer@test")]


def test_who_does_not_hear_itself_accuses_nobody(node: Callable[..., Node]) -> None:
    one = node(worker_gossip_interval=0.25)
    one.events.beat(INTERVAL_S, dict)
    one.beat("early@test")
    one.pass_time(INTERVAL_S - 0.25)
    one.beat(OWN)  # comes back from the broker, which then stands still
    one.pass_time(60)
    assert one.seen == [("join", "early@test")]
    one.beat(OWN)
    one.pass_time(INTERVAL_S, beating=OWN)
    one.beat("early@test")  # its connection had to be made anew
    one.pass_time(20, beating=OWN)
    assert one.seen == [("join", "early@test"), ("lost", "early@test")], "in earnest"


def test_a_callback_that_fails_is_contained_and_the_others_are_told(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    one = node()

    def fail(peer: Any) -> None:
        raise SystemExit("on purpose") if peer.hostname == "a@test" else ValueError("on purpose")

    one.gossip.on.node_join.add(fail)
    one.beat("a@test")
    one.beat("b@test")
    assert one.seen == [("join", "a@test"), ("join", "b@test")]
    assert caplog.text.count("a callback about nodes failed") == 2


def test_its_own_events_move_the_clock_and_are_not_another_node(node: Callable[..., Node]) -> None:
    one = node()
    before = one.app.clock.value
    one.beat(OWN, clock=before + 10_000)
    assert one.app.clock.value == before + 1
    assert one.seen == []
    assert len(one.gossip.membership) == 0


def test_every_clock_that_is_heard_is_witnessed(node: Callable[..., Node]) -> None:
    one = node()
    for kind in ("worker-heartbeat", "worker-elect-ack", "worker-anything"):
        clock = one.app.clock.value + 100
        one.hear(kind, clock=clock, id="x")
        assert one.app.clock.value == clock + 1
    one.elect("one", clock=one.app.clock.value + 100)
    assert one.app.clock.value >= 400
    before = one.app.clock.value
    one.hear("worker-heartbeat", clock=None)
    assert one.app.clock.value == before + 1, "one without a clock moves it too"


@pytest.mark.parametrize(
    "clock", [-1, 2**53, 10**30, "7", 1.5, True, [], {}, FIRST_MAX + 10**9, 2**53 - 1]
)
def test_a_forged_clock_is_counted_and_moves_nothing(node: Callable[..., Node], clock: Any) -> None:
    one = node()
    one.beat("real@test", clock=50)
    before = one.app.clock.value
    one.hear("worker-heartbeat", "forged@test", clock=clock, inc=1)
    one.elect("forged", "forged@test", clock=clock)
    assert one.app.clock.value == before
    # Of one whose clock is a number, but too far ahead, only the clock is not believed.
    heard = clock in (FIRST_MAX + 10**9, 2**53 - 1)
    assert one.seen == [("join", "real@test"), *([("join", "forged@test")] if heard else [])]
    assert sum(one.gossip.counts.values()) == 2
    assert one.sent("worker-elect") == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", "[]]", "7", "null", '"worker-online"', '{"type": "worker-online"}',
     "[[[]]]", "{}", json.dumps({"type": "worker-online", "hostname": 7, "timestamp": 1})],
)  # fmt: skip
def test_what_can_not_be_read_is_counted(node: Callable[..., Node], body: Any) -> None:
    one = node()
    one.hear_raw(body)
    assert sum(one.gossip.counts.values()) == 1
    assert one.seen == []
    one.hear_raw(body, content_type="application/x-python-serialize", content_encoding="binary")
    one.hear_raw(body, headers=7, content_type=7)
    assert sum(one.gossip.counts.values()) == 3
    one.gossip._on_rubbish(ValueError("no message at all"))
    assert one.gossip.counts["unreadable"] == 1


def test_what_is_refused_is_logged_once_per_kind_with_a_sample_and_without_secrets(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    one = node()
    good = {"type": "worker-heartbeat", "hostname": "good@test", "timestamp": 1.0, "clock": 1}
    bad = {**good, "hostname": "bad\nERROR @test", "clock": "x", "password": "hunter2"}
    for _ in range(3):
        one.hear_raw(json.dumps([good, bad]))
        one.hear_raw(b"\xff redis://user:hunter2@host/0", headers={"hostname": "odd@test"})
        one.gossip._on_rubbish(ValueError("\x1b[31m"))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == len(caplog.records) == 3
    assert not any("hunter2" in line or "\n" in line or "\x1b" in line for line in lines)
    assert lines[0].startswith(
        "An event was refused (bad-clock), sent by 'bad\\nERROR @test': {'type': 'worker-heartbeat'"
    )
    assert "'clock': 'x', 'password': '**'" in lines[0]
    assert "(undecodable), sent by odd@test: b'\\xff redis://" in lines[1]
    assert "(unreadable): ValueError('" in lines[2]
    assert one.gossip.counts == {"bad-clock": 3, "undecodable": 3, "unreadable": 3}
    assert one.seen == [("join", "good@test")]


def test_a_huge_event_that_is_refused_is_logged_in_one_short_line(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    one = node()
    one.hear("worker-heartbeat", clock="x" * 100_000, hostname="y" * 900)
    (record,) = caplog.records
    assert len(record.getMessage()) < 1_000


def test_an_event_that_is_not_foreseen_is_logged_once(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node()
    monkeypatch.setattr(one.gossip, "_hear", lambda event: event["nothing"])
    for _ in range(3):
        one.beat()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert one.gossip.counts == {"unforeseen": 3}


def test_names_in_the_log_stay_on_their_line(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = node()
    one.beat("x\nERROR @test")
    one.hear("worker-offline", "x\nERROR @test", inc=1)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["'x\\nERROR @test' joined", "'x\\nERROR @test' left"]


def test_events_of_tasks_and_of_others_are_none_of_its_business(node: Callable[..., Node]) -> None:
    one = node()
    before = one.app.clock.value
    one.hear("task-sent", uuid="a", clock=before + 500)
    one.hear("flower-started")
    assert one.app.clock.value == before
    assert one.seen == []
    assert not one.gossip.counts


# -- who is believed -------------------------------------------------------------------------

KEY = "sixteen bytes, or more of them"
REQUIRED = {"control_signing": "required", "control_signing_key": KEY}


def signed_beat(
    one: Node, hostname: str, *, nonce: str = "n", now: float | None = None, **form: Any
) -> Message:
    """A heartbeat that was signed, with this node's key unless `form` says otherwise."""
    event = {
        "type": "worker-heartbeat", "hostname": hostname, "timestamp": time.time(), "pid": 7,
        "clock": 500, "utcoffset": 0, "freq": INTERVAL_S, "inc": 1,
    }  # fmt: skip
    body = json.dumps(event).encode()
    chosen = {
        "key": KEY.encode(), "exchange": one.app.conf.event_exchange, "purpose": EVENT, **form,
    }  # fmt: skip
    at = time.time() if now is None else now
    return Message(body=body, headers=sign(body, {}, now=at, nonce=nonce, **chosen))


def test_where_signing_is_required_an_unsigned_event_is_only_displayed(
    node: Callable[..., Node],
) -> None:
    one = node(**REQUIRED)
    clock = one.app.clock.value
    one.beat("ghost@test", clock=500, revoked="abc")
    one.hear("worker-offline", "ghost2@test")
    one.elect("forged", "ghost@test")
    assert (one.seen, one.sent("worker-elect")) == ([], [])
    assert one.app.clock.value == clock
    assert len(one.gossip.membership) == 0
    assert one.gossip.unsigned_names() == ["ghost@test"]
    assert one.gossip.counts["unsigned"] == 3
    one.pass_time(3 * INTERVAL_S)
    assert one.gossip.unsigned_names() == []


def test_a_signed_event_is_believed_once(node: Callable[..., Node]) -> None:
    one = node(**REQUIRED)
    beat = signed_beat(one, "peer@test")
    one.gossip._on_message(beat)
    assert one.seen == [("join", "peer@test")]
    assert one.app.clock.value > 500
    one.pass_time(2 * INTERVAL_S + 6)
    assert one.seen[-1] == ("lost", "peer@test")
    one.gossip._on_message(beat)
    assert one.seen[-1] == ("lost", "peer@test"), "a recorded heartbeat keeps nobody alive"
    assert one.gossip.counts["replayed"] == 1


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"key": b"another key of sixteen bytes"}, "bad-signature"),
        ({"purpose": REQUEST}, "bad-signature"),
        ({"exchange": "celeryev-of-others"}, "bad-signature"),
        ({"now": time.time() - 100}, "out-of-time"),
    ],
)
@pytest.mark.parametrize("mode", ["optional", "required"])
def test_what_is_signed_wrongly_is_not_even_displayed(
    node: Callable[..., Node], mode: str, form: dict[str, Any], reason: str
) -> None:
    one = node(control_signing=mode, control_signing_key=KEY)
    one.gossip._on_message(signed_beat(one, "peer@test", **form))
    assert one.seen == []
    assert one.gossip.unsigned_names() == []
    assert one.gossip.counts == {reason: 1}


def test_own_events_come_back_signed(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node(**REQUIRED)
    one.beat(OWN)
    assert one.gossip.node._echo_at is None, "anybody can send in our name"
    one.gossip._on_message(signed_beat(one, OWN))
    assert one.gossip.node._echo_at is not None


# -- how often -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own_s", "bound_s"), [(2.0, FREQ_UNKNOWN_S), (40.0, FREQ_TIMES_MAX * 40.0)]
)
def test_an_interval_is_believed_up_to_a_few_times_our_own(
    node: Callable[..., Node], own_s: float, bound_s: float
) -> None:
    one = node(worker_heartbeat_interval=own_s, worker_gossip_interval=0.5)
    one.beat("slow@test", freq=86_400)
    one.pass_time(2 * bound_s - 1)
    assert one.seen == [("join", "slow@test")]
    one.pass_time(2)
    assert one.seen == [("join", "slow@test"), ("lost", "slow@test")]


def test_in_a_big_cluster_longer_intervals_are_believed(node: Callable[..., Node]) -> None:
    one, others, freq_s = node(worker_gossip_interval=0.5), 1_999, 80.0
    for number in range(others):
        one.beat(f"n{number}@test", freq=freq_s)
    one.pass_time(2 * freq_s - 1, step_s=0.5)
    assert len(one.gossip.membership) == others


@pytest.mark.parametrize(("others", "times"), [(1, 1), (49, 1), (99, 2), (499, 10)])
def test_above_fifty_nodes_each_beats_more_slowly_in_proportion(
    node: Callable[..., Node], others: int, times: float
) -> None:
    one = node(worker_gossip_interval=0.5)
    one.events.beat(INTERVAL_S, dict)
    for _ in range(SIGNS_MIN):
        assert one.events.beat_interval_s == INTERVAL_S, "they were not heard for long"
        for number in range(others):
            one.beat(f"n{number}@test", freq=60)
        one.pass_time(ESTABLISHED_S / (SIGNS_MIN - 1))
    assert one.events.beat_interval_s == pytest.approx(INTERVAL_S * times, rel=0.03)
    per_second = (others + 1) / (one.events.beat_interval_s or 1)
    assert per_second <= NODES_FULL / INTERVAL_S
    for number in range(others):
        one.hear("worker-offline", f"n{number}@test", inc=1)
    one.pass_time(1)
    assert one.events.beat_interval_s == INTERVAL_S, "when they are gone it is as before"


# -- elections -------------------------------------------------------------------------------


def test_an_election_is_stood_for_claimed_and_told(node: Callable[..., Node]) -> None:
    one = node()
    one.gossip.request("one", "task", ACTION)
    (event,) = one.sent("worker-elect")
    assert {name: event[name] for name in ("id", "topic", "action", "cver")} == {
        "id": "one", "topic": "task", "action": ACTION, "cver": 2
    }  # fmt: skip
    assert (event["hostname"], event["inc"]) == (OWN, one.events.stamper.inc)
    one.gossip.request("one", "task", ACTION)
    one.pass_time(1)
    assert one.gossip.view()["decided"]["one"]["winner"] == OWN
    (told,) = one.sent("worker-elected")
    assert (told["id"], told["winner"]) == ("one", OWN)
    one.gossip.request("one", "task", ACTION)
    one.elect("one")
    one.pass_time(1)
    assert len(one.sent("worker-elect")) == 1, "what is decided is not opened again"


def test_who_gives_up_tells_nobody_that_it_is_decided(node: Callable[..., Node]) -> None:
    one = node()
    one.gossip.carrier.claim = lambda effect: Claimed(effect.id, won=False)  # type: ignore[method-assign]
    one.gossip.request("one", "task", ACTION)
    one.pass_time(1)
    assert one.gossip.view()["decided"]["one"]["winner"] is None
    assert one.sent("worker-elected") == []


def test_hearing_a_candidate_is_as_good_as_hearing_the_request(node: Callable[..., Node]) -> None:
    one = node()
    one.elect("one")
    assert [event["id"] for event in one.sent("worker-elect")] == ["one"]
    assert one.gossip.view()["open"]["one"]["candidates"] == ["peer@test", OWN]
    one.pass_time(1)
    assert "one" in one.gossip.view()["open"], "the other one ranks first"
    one.hear("worker-offline", inc=1)
    one.pass_time(0.5)
    assert one.gossip.view()["decided"]["one"]["winner"] == OWN, "who left is not waited for"


@pytest.mark.parametrize(
    "fields",
    [
        {"topic": "nobody-knows"}, {"action": None}, {"action": [1]}, {"action": {"task": 7}},
        {"action": {"task": "forbidden"}}, {"action": {"task": "known", "args": [1, 2, 3]}},
        {"action": {"task": "known", "options": {"countdown": []}}}, {"topic": None}, {"id": ""},
        {"id": 7}, {"id": "x" * 300}, {"cver": 0}, {"cver": "2"}, {"cver": None}, {"pid": None},
        {"topic": "t" * 300}, {"id": ["one"]}, {"action": {"task": "known", "subtask_type": "group",
                                                          "kwargs": {"tasks": []}}},
    ],
)  # fmt: skip
def test_a_candidacy_that_makes_no_sense_here_is_counted_and_opens_nothing(
    node: Callable[..., Node], fields: dict[str, Any]
) -> None:
    one = node(election_allow=["known"])
    one.elect("one", **fields)
    view = one.gossip.view()
    assert view["open"] == {}
    assert sum(view["refused"].values()) == 1
    assert one.sent("worker-elect") == []
    one.gossip.request("next", "task", ACTION)
    one.pass_time(1)
    assert one.gossip.view()["decided"]["next"]["winner"] == OWN


def test_a_hundred_thousand_ids_take_no_more_memory_than_a_thousand(
    node: Callable[..., Node],
) -> None:
    one = node()
    for number in range(3_000):
        one.elect(f"id-{number}", action={"task": f"task-{number}"})
    elections = one.gossip.node.elections
    sizes = elections.sizes() if elections is not None else {}
    assert sizes["ids"] <= 1_000
    assert one.gossip.view()["counts"]["too-many"] >= 2_000
    for number in range(5_000):
        one.elect(f"bad-{number}", topic="nobody-knows")
    assert one.gossip.view()["refused"]["not-for-election"] == 5_000


def test_a_node_that_does_not_stand_says_so_only_to_spare_a_celery_worker(
    node: Callable[..., Node],
) -> None:
    one = node(election_allow=[])
    with pytest.raises(NotForElection, match="election_allow"):
        one.gossip.request("alone", "task", ACTION)
    assert one.sent("worker-elect") == [], "among our own kind nobody needs it"
    one.hear("worker-heartbeat", "celery@test", freq=2.0, sw_ident="py-celery")
    for _ in range(2):
        with pytest.raises(NotForElection):
            one.gossip.request("asked", "task", ACTION)
    one.elect("heard", "celery@test", cver=1)
    one.elect("echo", "peer@test", cver=2)
    stood = one.sent("worker-elect")
    assert [event["id"] for event in stood] == ["asked", "heard"]
    assert all(event["clock"] > one.app.clock.value for event in stood), "behind all others"
    assert one.gossip.view()["open"] == {}
    one.hear("worker-offline", "celery@test")
    with pytest.raises(NotForElection):
        one.gossip.request("afterwards", "task", ACTION)
    assert len(one.sent("worker-elect")) == 2


def test_a_request_that_nobody_stands_for_fails_once_and_stays_refused(
    node: Callable[..., Node],
) -> None:
    one = node(election_allow=[], result_backend="cache+memory://")
    id_ = str(uuid.uuid4())
    for _ in range(2):
        with pytest.raises(NotForElection, match="election_allow"):
            one.gossip.request(id_, "task", ACTION)
    one.pass_time(WAIT_S - 0.5)
    assert list(one.gossip.view()["declined"]) == [id_]
    one.pass_time(1)
    result = one.app.AsyncResult(id_)
    with pytest.raises(NotForElection, match=f"{OWN}: task 'known' is not in election_allow"):
        result.get(timeout=10)
    assert one.sent("worker-elect") == one.sent("worker-elected") == []
    other = node()
    other.gossip.request(id_, "task", ACTION)
    other.pass_time(1)
    assert other.gossip.view()["decided"][id_]["winner"] is None, "who comes late finds it refused"
    assert other.sent("worker-elected") == []


def test_a_candidate_that_is_heard_is_left_to_decide_unless_it_is_lost(
    node: Callable[..., Node],
) -> None:
    one = node(election_allow=[], result_backend="cache+memory://")
    ids = {name: str(uuid.uuid4()) for name in ("before", "after")}
    one.beat()
    one.elect(ids["before"])
    for id_ in ids.values():
        with pytest.raises(NotForElection):
            one.gossip.request(id_, "task", ACTION)
    one.elect(ids["after"])
    one.pass_time(WAIT_S + 1, beating="peer@test")
    assert set(one.gossip.view()["declined"]) == set(ids.values())
    one.hear("worker-offline", inc=1)
    one.pass_time(1)
    for id_ in ids.values():
        with pytest.raises(NotForElection):
            one.app.AsyncResult(id_).get(timeout=10)


def test_an_election_that_is_given_up_fails_when_nobody_else_carries_it_out(
    node: Callable[..., Node],
) -> None:
    one = node(result_backend="cache+memory://")
    id_ = str(uuid.uuid4())
    one.gossip.carrier.claim = lambda effect: Claimed(  # type: ignore[method-assign]
        effect.id, won=False, reason="the broker refuses it"
    )
    one.gossip.request(id_, "task", ACTION)
    one.pass_time(WAIT_S + 2)
    with pytest.raises(NotForElection, match="the broker refuses it"):
        one.app.AsyncResult(id_).get(timeout=10)


def test_a_reason_tells_no_secrets_and_is_bounded(node: Callable[..., Node]) -> None:
    one = node()
    bad = {"task": "known", "kwargs": ["password=hunter2"]}
    for id_, topic in (("secret", "task"), ("long", "t" * 200)):
        with pytest.raises(NotForElection):
            one.gossip.request(id_, topic, bad)
    declined = one.gossip.view()["declined"]
    assert "'kwargs'" in declined["secret"]["reason"]
    assert "hunter2" not in str(declined)
    assert len(declined["long"]["reason"]) < 1_100


@pytest.mark.parametrize("id_", [None, 7, "", [], {}, "x" * 300])
def test_a_request_without_a_proper_id_is_refused_and_not_remembered(
    node: Callable[..., Node], id_: Any
) -> None:
    one = node()
    with pytest.raises(NotForElection, match="id "):
        one.gossip.request(id_, "task", ACTION)
    assert one.gossip.view()["declined"] == {}


def test_a_request_that_is_too_big_is_answered_with_an_error(node: Callable[..., Node]) -> None:
    one = node()
    with pytest.raises(NotForElection, match="bytes, at most"):
        one.gossip.request("big", "task", {"task": "known", "args": ["x" * ACTION_BYTES_MAX]})
    for number in range(1_000):
        one.gossip.request(f"id-{number}", "task", ACTION)
    with pytest.raises(NotForElection, match="one-more: too-many"):
        one.gossip.request("one-more", "task", ACTION)


def test_claims_that_take_long_are_made_one_by_one_and_listening_goes_on(
    node: Callable[..., Node],
) -> None:
    one = node()
    asked: list[str] = []
    real = one.gossip.carrier.claim

    def slow(effect: Any) -> Any:
        asked.append(effect.id)
        one.time.now += 0.4
        return real(effect)

    one.gossip.carrier.claim = slow  # type: ignore[method-assign]
    for number in range(20):
        one.gossip.request(f"id-{number}", "task", ACTION)
    one.time.now += 0.6
    one.gossip.turn()
    assert 0 < len(asked) <= 3, "then it listens again"
    while len(one.gossip.view()["open"]):
        one.gossip.turn()
    assert sorted(asked) == sorted(f"id-{number}" for number in range(20)), "each once"


def test_without_gossip_on_the_transport_there_is_a_clear_answer(node: Callable[..., Node]) -> None:
    one = node()
    one.gossip.node.elections = None
    for ask in (lambda: one.gossip.request("one", "task", ACTION), one.gossip.view):
        with pytest.raises(NotForElection, match="takes no part in elections"):
            ask()
    one.elect("one")
    one.pass_time(1)
    assert one.gossip.names() == [], "it can not tell who is there"


# -- the thread ------------------------------------------------------------------------------


def real(app: Umbel) -> Gossip:
    worker = idle_worker(app)
    worker.events = Dispatcher(app, OWN, groups={"worker"})
    worker.gossip = Gossip(worker)
    return worker.gossip


def test_it_starts_hears_tells_who_is_there_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_machine, "SETTLE_S", 0.2)
    exchange = f"celeryev-unit-{next(_exchanges)}"
    app = Umbel(
        "a", broker="memory://", backend="disabled://", event_exchange=exchange,
        set_as_current=False,
    )  # fmt: skip
    gossip = real(app)
    peer = Dispatcher(app, "peer@test")
    try:
        gossip.start()
        gossip.start()
        assert gossip.names() == [], "too early to know"
        peer.send("worker-online", freq=2.0)
        wait_until(lambda: gossip.names() == [OWN, "peer@test"], what="the other one")
        gossip.request("one", "task", {"task": "t"})
        wait_until(lambda: "one" in gossip.view()["decided"], what="a decision")
        thread = gossip._thread
        gossip.stop()
        gossip.stop()
        assert thread is not None
        assert not thread.is_alive()
    finally:
        peer.close()
        gossip._worker.events.close()  # type: ignore[union-attr]
        app.close()


def test_settings_that_exclude_each_other_end_it_with_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gossiping, "START_S", 0.5)
    caplog.set_level(logging.ERROR)
    app = Umbel(
        "a", broker="memory://", backend="disabled://", set_as_current=False,
        event_queue_durable=True, event_queue_exclusive=True,
    )  # fmt: skip
    gossip = real(app)
    try:
        gossip.start()
        assert caplog.text.count("no gossip and no elections") == 1
        with pytest.raises(NotForElection):
            gossip.request("one", "task", ACTION)
    finally:
        gossip.stop()
        app.close()


def test_summaries_of_heartbeats_are_compared_and_who_differs_is_asked(
    node: Callable[..., Node],
) -> None:
    one = node()
    differing = one.gossip.node.mingle.differing
    one.beat(revoked="abc")
    one.beat("odd@test", revoked=[7])
    one.beat("equal@test", revoked="")
    one.beat("celery@test")
    one.beat(OWN, revoked="abc")
    assert set(differing) == {"peer@test", "odd@test"}
    one.beat(revoked="")
    assert set(differing) == {"odd@test"}
