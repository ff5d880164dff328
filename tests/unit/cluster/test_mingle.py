"""Mingle: readable transcripts of who is greeted, what is merged, and when it is over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from umbel.cluster import mingle
from umbel.cluster.clock import Clock
from umbel.cluster.mingle import (
    Answered,
    Begin,
    Compared,
    Done,
    Gone,
    Hello,
    Mingle,
    Take,
    Tick,
    answer,
    summary_of,
)
from umbel.cluster.revocations import Revocations

NOTHING = {"tasks": {}, "headers": {}}
WALL_S = 1_700_000_000.0


class Peer:
    """A node of our kind, or a Celery worker, as far as mingling is concerned."""

    def __init__(self, name: str, *ids: str, celery: bool = False) -> None:
        self.name, self.celery = name, celery
        self.clock = Clock(len(name))
        self.revocations = Revocations(lambda: WALL_S)
        self.revocations.revoke(list(ids), WALL_S - 10)
        self.heard: list[dict[str, Any]] = []

    def hello(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Answer; whatever goes over the wire is JSON."""
        arguments = msgspec.json.decode(msgspec.json.encode(arguments))
        self.heard.append(arguments)
        if self.celery:
            self.revocations.merge_ids(arguments["revoked"], WALL_S)
            reply: dict[str, Any] = {"revoked": self.revocations.ids()}
        else:
            found = answer(self.name, arguments, self.revocations, WALL_S)
            if found is None:
                return None
            reply = found.reply
        return msgspec.json.decode(msgspec.json.encode({**reply, "clock": self.clock.forward()}))


class Hall:
    """A node that mingles, the others, and the time."""

    def __init__(self, *peers: Peer, own: Peer | None = None, **options: Any) -> None:
        self.own = own or Peer("me")
        self.peers = {peer.name: peer for peer in peers}
        self.mingle = Mingle("me", revocations=self.own.revocations, **options)
        self.now = 1_000.0
        self.bytes = self.hello_count = 0
        self.done: Done | None = None

    def step(self, what: Any) -> list[Any]:
        """One step, and what follows until nothing does, except that time passes."""
        effects = self.mingle.step(what, self.now)
        replies = []
        for effect in effects:
            if isinstance(effect, Hello):
                replies += self._send(effect)
            elif isinstance(effect, Take):
                self._take(effect)
            else:
                assert self.done is None, "told twice"
                self.done = effect
        for name, reply in replies:
            self.step(Answered(name, reply))
            self.step(Tick())
        return effects

    def _take(self, effect: Take) -> None:
        if effect.name == "clock":
            self.own.clock.adjust(effect.told)
        elif effect.name == "told":
            self.own.revocations.merge(effect.told, WALL_S)
        elif effect.name == "revoked":
            self.own.revocations.merge_ids(effect.told, WALL_S)
        else:
            raise AssertionError(effect)

    def _send(self, hello: Hello) -> list[tuple[str, Any]]:
        names = list(self.peers) if hello.destination is None else [hello.destination]
        self.hello_count += 1
        self.bytes += len(msgspec.json.encode(hello.arguments)) * len(names)
        replies = []
        for name in names:
            reply = self.peers[name].hello(hello.arguments) if name in self.peers else None
            if reply is not None:
                self.bytes += len(msgspec.json.encode(reply))
                replies.append((name, reply))
        return replies

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.step(Tick())

    def agree(self) -> bool:
        return len({summary_of(one.revocations) for one in [self.own, *self.peers.values()]}) == 1


# -- greeting ------------------------------------------------------------------------------


def test_it_ends_as_soon_as_all_known_nodes_have_answered() -> None:
    hall = Hall(Peer("a"), Peer("b"))
    hall.step(Begin(["a", "b", "me"]))
    assert hall.done == Done(("a", "b"), ())
    assert hall.hello_count == 1
    assert not hall.mingle.busy


def test_it_ends_with_its_window_when_nobody_knows_who_is_there() -> None:
    hall = Hall(Peer("a"))
    hall.step(Begin())
    hall.wait(0.9)
    assert hall.done is None
    assert hall.mingle.busy
    hall.wait(0.1)
    assert hall.done == Done(("a",), ())


def test_it_ends_at_once_when_there_is_nobody() -> None:
    hall = Hall()
    hall.step(Begin([]))
    hall.step(Tick())
    assert hall.done == Done((), ())


def test_a_node_that_does_not_answer_is_waited_for_no_longer_than_the_window() -> None:
    hall = Hall(Peer("a"))
    hall.step(Begin(["a", "dead"]))
    hall.wait(1)
    assert hall.done == Done(("a",), ("dead",))


def test_a_node_that_is_gone_is_not_waited_for() -> None:
    hall = Hall(Peer("a"))
    hall.step(Begin(["a", "dead"]))
    hall.step(Gone("dead"))
    hall.step(Tick())
    assert hall.done == Done(("a",), ())


def test_whom_to_wait_for_may_become_known_from_somebody_who_answers() -> None:
    hall = Hall(Peer("a"))
    hall.step(Begin())
    hall.mingle.expect({"a", "me"})
    hall.step(Tick())
    assert hall.done == Done(("a",), ())
    hall.mingle.expect({"b"})
    assert not hall.mingle.busy


def test_every_clock_is_witnessed() -> None:
    peers = [Peer("a"), Peer("b", celery=True)]
    peers[0].clock.value, peers[1].clock.value = 100, 200
    hall = Hall(*peers)
    hall.step(Begin(["a", "b"]))
    assert hall.own.clock.value > 200


def test_which_queues_are_paused_is_taken_over_from_our_own_kind_only() -> None:
    told = {"q": [WALL_S, True]}
    hall = Hall()
    hall.step(Begin(["a", "b"]))
    effects = hall.mingle.step(Answered("a", {"digest": NOTHING, "paused": told}), hall.now)
    assert effects == [Take("paused", told)]
    assert hall.mingle.step(Answered("b", {"revoked": [], "paused": told}), hall.now) == []


def test_mingling_again_after_a_reconnect_begins_anew() -> None:
    hall = Hall(Peer("a"))
    hall.step(Begin(["a"]))
    hall.done = None
    hall.peers["a"].revocations.revoke("later", WALL_S)
    hall.step(Begin(["a"]))
    assert hall.done == Done(("a",), ())
    assert hall.agree()


# -- revocations ---------------------------------------------------------------------------


def test_a_joiner_learns_every_revocation_its_neighbours_know() -> None:
    hall = Hall(Peer("a", "t1", "t2"), Peer("b", "t2", "t3"), Peer("c"))
    hall.step(Begin(["a", "b", "c"]))
    assert hall.own.revocations.ids() == ["t1", "t2", "t3"]
    assert hall.done is not None
    assert hall.agree()


def test_the_neighbours_learn_what_a_joiner_has_kept_on_disk() -> None:
    hall = Hall(Peer("a"), Peer("b", "t1"), own=Peer("me", "t1", "old"))
    hall.step(Begin(["a", "b"]))
    assert hall.agree()
    assert "old" in hall.peers["a"].revocations


def test_nodes_that_agree_tell_each_other_nothing_but_digests() -> None:
    ids = [f"task-{n}" for n in range(1_000)]
    hall = Hall(*(Peer(f"w{n}", *ids) for n in range(20)), own=Peer("me", *ids))
    hall.step(Begin(list(hall.peers)))
    assert hall.hello_count == 1
    assert hall.bytes < 40 * 13_000


def test_fifty_thousand_revocations_come_once_although_twenty_neighbours_know_them() -> None:
    ids = [f"{n:08x}-0b1e-4c2d-9f3a-{n:012x}" for n in range(50_000)]
    known = Peer("x", *ids).revocations
    peers = [Peer(f"w{n}") for n in range(20)]
    for peer in peers:
        peer.revocations = known
    hall = Hall(*peers)
    hall.step(Begin(list(hall.peers)))
    assert hall.done is not None
    assert len(hall.own.revocations) == 50_000
    assert hall.agree()
    assert hall.bytes < 5_000_000
    exchanged = [name for name, peer in hall.peers.items() if len(peer.heard) > 1]
    assert exchanged == ["w0"]


def test_a_celery_worker_gets_our_ids_and_we_get_its() -> None:
    hall = Hall(Peer("c", "t1", celery=True), own=Peer("me", "t2"))
    hall.step(Begin(["c"]))
    assert sorted(hall.own.revocations.ids()) == ["t1", "t2"]
    assert sorted(hall.peers["c"].revocations.ids()) == ["t1", "t2"]
    greeting, telling = hall.peers["c"].heard
    assert greeting["revoked"] == []
    assert "digest" not in telling


def test_celery_workers_are_asked_what_they_understand() -> None:
    own = Peer("me", "t2")
    found = answer("me", {"from_node": "c", "revoked": ["t1"]}, own.revocations, WALL_S)
    assert found is not None
    assert found.reply == {"revoked": ["t2", "t1"]}
    assert [one.key for one in found.changed] == ["t1"]
    monotonic = {"t3": [12.5, "t3"]}
    found = answer("me", {"from_node": "c", "revoked": monotonic}, own.revocations, WALL_S)
    assert found is not None
    assert "t3" in own.revocations
    assert answer("me", {"from_node": "me", "revoked": []}, own.revocations, WALL_S) is None


def test_an_exchange_with_a_node_that_falls_silent_is_given_up() -> None:
    hall = Hall(Peer("a", "t1"), Peer("b", "t1"))
    effects = hall.mingle.step(Begin(["a", "b"]), hall.now)
    assert len(effects) == 1
    for name in ("a", "b"):
        reply = hall.peers[name].hello({"from_node": "me", "revoked": [], "digest": NOTHING})
        hall.mingle.step(Answered(name, reply), hall.now)
    (hello,) = hall.mingle.step(Tick(), hall.now)
    assert isinstance(hello, Hello)
    assert hello.destination == "a"  # which has died in the meantime
    assert hall.mingle.due_at == pytest.approx(hall.now + 1)
    hall.wait(2.1)
    assert hall.own.revocations.ids() == ["t1"]
    assert hall.done is not None


def test_what_takes_too_long_goes_on_after_it_is_done() -> None:
    hall = Hall(Peer("a", "t1"), limit_s=1.5, exchange_s=5.0)
    hall.mingle.step(Begin(["a"]), hall.now)
    digest = hall.peers["a"].revocations.digest()
    hall.mingle.step(Answered("a", {"clock": 1, "digest": digest}), hall.now)
    (hello,) = hall.mingle.step(Tick(), hall.now)
    hall.wait(1.6)
    assert hall.done == Done(("a",), ())
    hall.step(Answered("a", hall.peers["a"].hello(hello.arguments)))
    assert hall.own.revocations.ids() == ["t1"]


def test_nodes_that_can_not_come_to_agree_let_each_other_be() -> None:
    """A full table takes nothing in, however often it is told."""
    full = Peer("a")
    full.revocations = Revocations(lambda: WALL_S, count_max=1)
    full.revocations.revoke("t9", WALL_S)
    hall = Hall(full, own=Peer("me", "t1", "t2"))
    hall.step(Begin(["a"]))
    assert hall.done is not None
    assert hall.hello_count <= 4
    count = hall.hello_count
    for _ in range(20):
        hall.step(Compared("a", False))
        hall.wait(2)
    assert hall.hello_count == count


# -- heartbeats ----------------------------------------------------------------------------


def test_a_node_whose_heartbeats_go_on_differing_is_asked() -> None:
    hall = Hall(Peer("a", "missed"))
    hall.step(Compared("a", False))
    hall.wait(2)
    hall.step(Compared("a", False))
    assert hall.hello_count == 0
    hall.wait(1.1)
    assert hall.own.revocations.ids() == ["missed"]
    assert hall.agree()
    assert hall.mingle.due_at is None


def test_a_heartbeat_that_was_only_early_costs_nothing() -> None:
    hall = Hall(Peer("a"))
    hall.step(Compared("a", False))
    hall.wait(2)
    hall.step(Compared("a", True))
    hall.wait(10)
    assert hall.hello_count == 0


def test_invented_nodes_do_not_keep_a_real_one_from_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mingle, "PEERS_MAX", 100)
    hall = Hall(Peer("a"))
    hall.step(Begin())
    hall.wait(1.1)
    for number in range(200):
        hall.step(Compared(f"ghost{number}", False))
    hall.peers["a"].revocations.revoke("missed", WALL_S)
    hall.step(Compared("a", False))
    assert len(hall.mingle.differing) == 100
    hall.wait(3.1)
    assert hall.own.revocations.ids() == ["missed"]


def test_one_that_lacks_something_asks_one_of_many() -> None:
    hall = Hall(*(Peer(f"w{n}", "t1") for n in range(9)))
    for name in hall.peers:
        hall.step(Compared(name, False))
    hall.wait(3.1)
    assert hall.agree()
    for name in hall.peers:
        hall.step(Compared(name, True))
    hall.wait(10)
    assert hall.hello_count == 1


def test_a_summary_is_equal_for_equal_sets_however_they_came_about() -> None:
    one, other = Peer("a", "t1", "t2").revocations, Peer("b", "t2").revocations
    assert summary_of(Peer("c").revocations) == ""
    assert summary_of(one) != summary_of(other)
    other.merge(one.difference(other.digest()), WALL_S)
    assert summary_of(one) == summary_of(other)


# -- what comes from outside ---------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        None, 7, "x", [], [["clock", 1]], {}, {"error": "KeyError('hello')"},
        {"clock": None}, {"clock": "9"}, {"clock": 10**30}, {"revoked": 5}, {"revoked": "ab"},
        {"revoked": {5: object()}}, {"digest": None}, {"digest": 5}, {"digest": {}},
        {"digest": {"tasks": {"zz": "1"}, "headers": {}}},
        {"digest": {"tasks": {f"{n}": "1" for n in range(999)}, "headers": {}}},
        {"digest": NOTHING, "told": 5}, {"digest": NOTHING, "told": {"tasks": [1]}},
        {"digest": NOTHING, "told": {"tasks": {"a": ["x", "y"], 5: None}}},
    ],
)  # fmt: skip
def test_a_hostile_reply_changes_nothing(reply: Any) -> None:
    hall = Hall()
    hall.step(Begin(["a"]))
    hall.step(Answered("a", reply))
    hall.wait(10)
    assert hall.done == Done(("a",), ())
    assert hall.own.revocations.ids() == []
    assert hall.own.clock.value <= 3


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"from_node": None}, {"from_node": "a", "revoked": 5}, {"digest": 5},
        {"digest": {"tasks": 1}, "told": {}}, {"digest": NOTHING, "told": "x"},
        {"digest": NOTHING, "told": {"tasks": {"a": [float("nan"), 1]}}},
    ],
)  # fmt: skip
def test_a_hostile_hello_changes_nothing(arguments: dict[str, Any]) -> None:
    own = Peer("me", "t1")
    found = answer("me", arguments, own.revocations, WALL_S)
    assert found is not None
    assert found.changed == []
    assert own.revocations.ids() == ["t1"]


def test_replies_and_heartbeats_of_a_great_many_names_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mingle, "PEERS_MAX", 10)
    hall = Hall()
    hall.step(Begin())
    for n in range(100):
        hall.mingle.step(Answered(f"w{n}", {"clock": 1, "digest": NOTHING}), hall.now)
        hall.mingle.step(Compared(f"w{n}", False), hall.now)
    assert len(hall.mingle.differing) == 10
    assert hall.mingle.counts == {mingle.TOO_MANY: 180}
    hall.wait(1)
    assert hall.done is not None
    assert len(hall.done.answered) == 10
