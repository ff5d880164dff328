"""One node's part in agreement: who could not hear marks nobody as lost; elections and mingle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from umbel.cluster import election_words as election
from umbel.cluster import membership, mingle, node, refusals
from umbel.cluster.agreed_time import AgreedTime
from umbel.cluster.clock import CLOCK_JUMP, Clock
from umbel.cluster.election import Elections
from umbel.cluster.membership import ECHO_S, ESTABLISHED_S, GRACE_S, Deaf, Joined, Lost, Node
from umbel.cluster.refusals import WAIT_S, ClaimRefusal, Declined, Fail
from umbel.cluster.revocations import Revocations

BEAT_S, CHECK_S, TURN_S = 2.0, 0.5, 0.25
OWN, PEER = "own@test", "peer@test"
WALL_S = 1_000_000.0
ACTION = {"task": "known", "options": {"reply_to": "replies"}}


class One:
    """A machine and its time. It hears itself, and whom a test lets it hear."""

    def __init__(self, hostname: str = OWN, **options: Any) -> None:
        self.now, self.wall_ahead_s = 1_000.0, 0.0
        wall = AgreedTime(self.wall_s)
        self.clock = Clock()
        self.machine = node.NodeMachine(
            hostname,
            clock=self.clock,
            wall=wall,
            revocations=Revocations(wall),
            **{"beat_s": BEAT_S, "check_s": CHECK_S, **options},
        )
        self.hostname = hostname
        own = election.Candidate(hostname, 1, 1)
        self.machine.take_part(Elections(own), refusals.Refusals(own), self.now)
        self.connected = True
        self.hears = {hostname: BEAT_S}  # who beats, and how often

    def wall_s(self) -> float:
        return WALL_S + self.now + self.wall_ahead_s

    def do(self, what: node.Input) -> list[node.Effect]:
        return self.machine.step(what, self.now)

    def hear(self, hostname: str = PEER, kind: str = "heartbeat", **fields: Any) -> Any:
        event = {
            "type": f"worker-{kind}", "hostname": hostname, "pid": 1, "inc": 1, "freq": BEAT_S,
            "timestamp": self.wall_s(), "clock": self.clock.value, **fields,
        }  # fmt: skip
        return self.do(node.read(event))

    def elect(self, hostname: str = PEER, **fields: Any) -> list[node.Effect]:
        objection = fields.pop("objection", None)
        chosen = {"id": "one", "topic": "task", "action": ACTION, "cver": 2, **fields}
        event = {
            "type": "worker-elect", "hostname": hostname, "pid": 1, "inc": 1, "timestamp": 1.0,
            "clock": self.clock.value, **chosen,
        }  # fmt: skip
        heard = node.read(event)
        assert isinstance(heard.elect, election.Heard)
        return self.do(heard._replace(elect=replace(heard.elect, objection=objection)))

    def request(self, objection: str | None = None, id_: Any = "one") -> list[node.Effect]:
        return self.do(election.Requested(id_, "task", ACTION, objection))

    def tick(self) -> list[node.Effect]:
        found = self.do(node.Tick(self.connected))
        return [one for one in found if not isinstance(one, node.BeatSlower)]

    def wait(self, seconds: float) -> list[node.Effect]:
        """Turns of the thread, and heartbeats of those who are heard."""
        effects: list[node.Effect] = []
        for _ in range(round(seconds / TURN_S)):
            self.now += TURN_S
            for hostname, beat_s in self.hears.items():
                if self.now % beat_s < TURN_S:
                    effects += self.hear(hostname, freq=beat_s)
            effects += self.tick()
        return effects


def settled(**options: Any) -> One:
    """One that has heard itself and another node for a while."""
    one = One(**options)
    one.hears[PEER] = BEAT_S
    assert one.wait(10) == [Joined(Node(PEER, 1, 1))]
    return one


def losses(effects: list[node.Effect]) -> list[str]:
    return [effect.node.hostname for effect in effects if isinstance(effect, Lost)]


# -- who is lost, and who is deaf ------------------------------------------------------------


def test_a_silent_node_is_lost_within_two_intervals_and_a_look_by_who_hears_itself() -> None:
    one = settled()
    del one.hears[PEER]
    assert losses(one.wait(2 * BEAT_S - TURN_S)) == []
    assert losses(one.wait(ECHO_S + CHECK_S + 2 * TURN_S)) == [PEER]


@pytest.mark.parametrize("deaf_s", [0.5, 2.0, 3.0, 6.0, 60.0])
def test_who_does_not_hear_itself_either_marks_nobody_as_lost(deaf_s: float) -> None:
    for phase in range(8):
        one = settled()
        one.wait(phase * TURN_S)
        hears, one.hears = one.hears, {}
        found = one.wait(deaf_s)
        one.hears = hears
        assert losses(found + one.wait(30)) == []


@pytest.mark.parametrize("away_s", [0.25, 2.0, 3.0, 6.0, 60.0])
def test_who_is_not_connected_marks_nobody_as_lost(away_s: float) -> None:
    for phase in range(8):
        one = settled()
        one.wait(phase * TURN_S)
        hears, one.hears, one.connected = one.hears, {}, False
        found = one.wait(away_s)
        one.connected = True
        one.hear(OWN, "online")
        assert losses(found + one.wait(BEAT_S)) == []
        one.hears = hears
        assert losses(one.wait(30)) == []


@pytest.mark.parametrize("own", [BEAT_S, None])
def test_who_was_held_up_marks_nobody_as_lost_before_it_could_read_what_came(
    own: float | None,
) -> None:
    one = settled()
    if own is None:  # without heartbeats of its own it knows of nothing else
        one.machine._echo_at = one.machine._next_echo_s = None
        del one.hears[OWN]
    one.now += 60.0
    if own is not None:
        one.hear(OWN)  # of all that waited for the thread only this is left
    assert losses(one.tick()) == []
    assert losses(one.wait(BEAT_S)) == []
    del one.hears[PEER]
    assert losses(one.wait(GRACE_S + 2 * BEAT_S)) == [PEER], "in earnest"


def test_a_hold_up_before_the_first_turn_counts_too() -> None:
    one = One()
    one.hear()
    one.now += 30.0
    assert losses(one.tick()) == []


def test_a_long_way_from_making_to_taking_part_is_no_stall() -> None:
    one = One()
    one.now += 30.0
    own = election.Candidate(OWN, 1, 1)
    one.machine.take_part(Elections(own), refusals.Refusals(own), one.now)
    one.hear()
    assert losses(one.wait(2 * BEAT_S + ECHO_S + CHECK_S + TURN_S)) == [PEER]


def test_messages_between_two_ticks_are_no_proof_of_not_having_been_held_up() -> None:
    one = settled()
    one.hear("other@test")
    one.now += 20.0
    one.hear(OWN)
    one.hear("other@test")
    assert losses(one.tick()) == []


def test_it_says_for_how_long_it_could_not_hear_once_and_not_for_a_moment() -> None:
    one = settled()
    hears, one.hears = one.hears, {}
    assert one.wait(30) == []
    one.hears = hears
    (doubt,) = one.wait(30)
    assert isinstance(doubt, node.SelfDoubt)
    assert doubt.deaf_s == pytest.approx(30 - BEAT_S, abs=BEAT_S)
    one.now += node.HELD_UP_S + 1
    assert one.wait(30) == []


def test_who_is_deaf_all_the_time_marks_nobody_as_lost() -> None:
    one = settled()
    for _ in range(100):
        one.now += node.HELD_UP_S + 0.1
        assert one.tick() == []
    assert PEER in one.machine.membership


def test_events_of_pool_processes_and_of_strangers_are_no_echo() -> None:
    one = One()
    one.hear(OWN, umbel_series=7)
    one.hear(PEER)
    assert one.machine._echo_at is None
    one.hear(OWN)
    assert one.machine._echo_at == one.now


# -- how often nodes beat --------------------------------------------------------------------


def times(one: One) -> float:
    one.now += CHECK_S
    (found,) = [e for e in one.do(node.Tick(True)) if isinstance(e, node.BeatSlower)]
    return found.times


@pytest.mark.parametrize(("others", "expected"), [(3, 1.0), (4, 1.0), (9, 2.0), (49, 10.0)])
def test_a_crowd_beats_more_slowly_in_proportion_and_only_established_nodes_count(
    others: int, expected: float
) -> None:
    one = One(nodes_full=5)
    for _ in range(3):
        assert times(one) == 1.0, "they were not heard for long"
        for number in range(others):
            one.hear(f"n{number}@test", freq=60)
        one.now += ESTABLISHED_S / 2
        one.tick()
    assert times(one) == expected
    for number in range(others):
        one.hear(f"n{number}@test", "offline")
    assert times(one) == 1.0


def test_who_beats_slowly_waits_as_long_for_its_own_heartbeat_even_if_the_crowd_is_gone() -> None:
    one = settled(nodes_full=1)
    one.hears[OWN] = 20.0
    one.wait(40)
    one.hear(PEER, "offline")
    del one.hears[PEER]
    assert times(one) == 1.0
    assert one.wait(18) == []
    assert one.machine._deaf_since is None, "the next one comes when the last one promised it"


def test_an_interval_is_believed_up_to_a_few_times_our_own_at_the_number_of_nodes() -> None:
    one = One(beat_s=40.0, nodes_full=2)
    for number in range(3):
        one.hear(f"slow{number}@test", freq=1e9)
    one.tick()
    assert one.machine.membership.freq_max_s == node.FREQ_TIMES_MAX * 40.0 * 2


# -- events ----------------------------------------------------------------------------------


def test_a_clock_too_far_ahead_is_not_believed_and_its_sender_is_heard_all_the_same() -> None:
    one = settled()
    before = one.clock.value
    assert one.elect("new@test", clock=2**53 - 1) == [
        node.Malformed(CLOCK_JUMP), Joined(Node("new@test", 1, 1)),
    ]  # fmt: skip
    assert one.clock.value == before
    assert "one" not in (one.machine.elections or ())


def test_what_is_not_believed_is_displayed_and_nothing_else() -> None:
    one = settled()
    before = one.clock.value
    event = {"type": "worker-online", "hostname": "ghost@test", "timestamp": 1.0, "clock": 500}
    assert one.do(node.read(event)._replace(believed=False)) == []
    assert (one.clock.value, "ghost@test" in one.machine.membership) == (before, False)
    assert "ghost@test" in one.machine.unsigned
    one.wait(4 * membership.FREQ_UNKNOWN_S)
    assert "ghost@test" not in one.machine.unsigned


def test_it_names_who_is_there_once_others_had_time_to_answer() -> None:
    one = One()
    one.connected = False
    one.hear()
    one.wait(5)
    assert one.machine.names(one.now) == []
    one.connected = True
    one.tick()
    assert one.machine.names(one.now) == []
    one.now += node.SETTLE_S
    assert one.machine.names(one.now) == [OWN, PEER]


# -- elections -------------------------------------------------------------------------------


def stood(one: One, effects: list[node.Effect]) -> None:
    """Publish what the machine wants to be published, and tell it."""
    (effect,) = [e for e in effects if isinstance(e, election.PublishElect)]
    one.do(election.Heard(effect.id, effect.topic, effect.action, one.clock.forward(), OWN, 1, 1))


def test_a_request_is_stood_for_claimed_and_decided() -> None:
    one = settled()
    stood(one, one.request())
    assert one.machine.due_at is not None
    (claim,) = one.wait(1)
    assert isinstance(claim, election.Claim)
    won = election.Claimed("one", True, claim.token)
    acts = one.do(node.ClaimAnswered(claim, won))
    assert acts == [election.Act("one", "task", ACTION), election.Decided("one", claim.token)]
    assert one.request() == [election.Refused(election.REPEATED)]


def test_who_is_lost_is_not_waited_for() -> None:
    one = settled()
    stood(one, one.elect())
    one.hear(PEER, "offline")
    del one.hears[PEER]
    assert [type(effect) for effect in one.wait(0.75)] == [election.Claim]


def test_what_is_declined_is_refused_when_nobody_stands() -> None:
    one = settled(hide=lambda text: text.replace("secret", "**"))
    assert one.request("the secret is out") == [Declined("one", "the secret is out")]
    assert one.wait(WAIT_S - 1) == []
    (claim,) = one.wait(1.5)
    assert isinstance(claim, ClaimRefusal)
    failed = one.do(node.ClaimAnswered(claim, election.Claimed("one", True, claim.token)))
    assert failed == [Fail("one", f"{OWN}: the ** is out", "replies")]


def test_what_is_declined_is_left_to_a_candidate_unless_it_goes() -> None:
    one = settled()
    one.request("not here")
    assert one.elect(objection="not here") == [Declined("one", "not here")]
    assert one.wait(WAIT_S + 1) == []
    one.hear(PEER, "offline")
    del one.hears[PEER]
    assert [type(effect) for effect in one.wait(1)] == [ClaimRefusal]


def test_an_objection_comes_too_late_for_an_election_that_is_known() -> None:
    one = settled()
    stood(one, one.request())
    assert one.elect(objection="not any more") == []
    assert one.request("not any more") == [Declined("one", "not any more")]
    assert [type(effect) for effect in one.wait(1)] == [election.Claim], "it stands"


@pytest.mark.parametrize("id_", [None, 7, "", [], {}, "x" * 300])
def test_a_request_without_a_proper_id_is_declined_and_not_remembered(id_: Any) -> None:
    one = settled()
    assert one.request("no proper id", id_) == [Declined(id_, "no proper id")]
    assert one.wait(2 * WAIT_S) == []


def test_a_request_that_finds_no_room_is_declined() -> None:
    one = settled()
    own = election.Candidate(OWN, 1, 1)
    elections = Elections(own, ids_max=1)
    one.machine.take_part(elections, refusals.Refusals(own), one.now)
    one.request(id_="first")
    (declined,) = one.request(id_="second")
    assert isinstance(declined, Declined)
    assert "second: too-many" in declined.reason


def test_an_election_that_is_given_up_is_refused_with_the_token_it_holds() -> None:
    one = settled()
    stood(one, one.request())
    (claim,) = one.wait(1)
    assert isinstance(claim, election.Claim)
    given_up = election.Claimed("one", won=False, reason="no rights", owns=True)
    one.do(node.ClaimAnswered(claim, given_up))
    (refusal,) = one.wait(WAIT_S + 1)
    assert refusal == ClaimRefusal("one", claim.token)


def test_a_celery_worker_is_spared_once_per_election_and_only_while_it_is_there() -> None:
    one = settled()
    one.hear("celery@test", sw_ident="py-celery", freq=60)
    first = one.elect("celery@test", cver=1, objection="not here")
    (spare,) = [e for e in first if isinstance(e, election.PublishElect)]
    assert (spare.id, spare.spares_at) == ("one", one.clock.value + node.SPARED_CLOCK)
    again = one.elect("celery@test", cver=1, objection="not here")
    assert not [e for e in again if isinstance(e, election.PublishElect)]
    one.hear("celery@test", "offline")
    assert one.request("not here", "two") == [Declined("two", "not here")]


# -- mingle and pauses -----------------------------------------------------------------------


def greet(asking: One, *asked: One) -> list[node.Effect]:
    """Let one mingle with others until it is done; what it learns."""
    found: list[node.Effect] = []
    todo = asking.do(mingle.Begin([one.hostname for one in asked]))
    while todo := todo or asking.do(mingle.Tick()):
        effect = todo.pop(0)
        if isinstance(effect, mingle.Done):
            return found
        if not isinstance(effect, mingle.Hello):
            found.append(effect)
            continue
        for other in asked:
            if effect.destination in (None, other.hostname):
                for answer in other.do(node.Greeted(effect.arguments)):
                    if isinstance(answer, node.Reply):
                        asking.do(mingle.Answered(other.hostname, answer.fields))
        todo += asking.do(node.CallEnded())
    raise AssertionError("not done")


def test_two_know_the_same_after_one_has_greeted_the_other() -> None:
    old, new = One(PEER), One()
    old.machine.revocations.revoke("theirs", old.wall_s())
    new.machine.revocations.revoke("ours", new.wall_s())
    old.do(node.PauseCommanded("old", old.wall_s(), True))
    new.do(node.PauseCommanded("new", new.wall_s(), True))
    learned = greet(new, old)
    assert node.Paused({"old": True}) in learned
    assert [one.key for e in learned if isinstance(e, node.Learned) for one in e.changed] == [
        "theirs"
    ]
    assert old.machine.summary() == new.machine.summary()
    assert old.machine.pauses.told() == new.machine.pauses.told()


def test_of_two_commands_about_a_queue_the_later_one_holds_wherever_it_was_heard_first() -> None:
    one, other = One(), One(PEER)
    at = one.wall_s()
    assert one.do(node.PauseCommanded("q", at, True)) == [node.Paused({"q": True})]
    assert one.do(node.PauseCommanded("q", at + 2, False)) == [node.Paused({"q": False})]
    assert one.do(node.PauseCommanded("q", at + 1, True)) == []
    other.do(node.PauseCommanded("q", at + 1, True))
    assert greet(other, one) == [node.Paused({"q": False})]
    assert one.machine.pauses.told() == other.machine.pauses.told() == {"q": [at + 2, False]}
    with pytest.raises(ValueError, match="a name and a time"):
        one.do(node.PauseCommanded("q", "now", True))


def test_what_may_not_be_commanded_here_is_not_taken_over_from_others() -> None:
    old, closed = One(PEER), One(may=lambda command: False)
    old.machine.revocations.revoke("theirs", old.wall_s())
    greet(closed, old)
    assert len(closed.machine.revocations) == 0
    closed.do(node.Greeted({"from_node": "celery@test", "revoked": ["forged"]}))
    assert len(closed.machine.revocations) == 0


def test_a_greeting_that_may_be_a_copy_is_answered_and_not_believed() -> None:
    one = One()
    told = {"tasks": {"x": [one.wall_s(), one.wall_s() + 60]}}
    copy = {"from_node": PEER, "digest": {}, "told": told, "revoked": ["y"],
            "paused": {"q": [one.wall_s(), True]}}  # fmt: skip
    (reply,) = one.do(node.Greeted(copy, is_new=False))
    assert isinstance(reply, node.Reply)
    assert (len(one.machine.revocations), len(one.machine.pauses)) == (0, 0)
    assert [type(effect) for effect in one.do(node.Greeted(copy))] == [
        node.Learned, node.Paused, node.Reply,
    ]  # fmt: skip


def test_at_the_start_the_time_of_the_others_is_taken_over_before_what_they_tell() -> None:
    old, new = One(PEER), One()
    new.wall_ahead_s = -3_600.0
    old.do(node.PauseCommanded("q", old.wall_s(), True))
    assert greet(new, old) == [node.TimeMoved(), node.Paused({"q": True})]
    assert new.machine.wall() == pytest.approx(old.wall_s())
    assert new.machine.pauses.told() == old.machine.pauses.told()


def test_who_differs_for_long_is_asked() -> None:
    one = settled()
    one.hear(revoked="something else")
    one.now += mingle.PATIENCE_S
    (hello,) = one.do(mingle.Tick())
    assert isinstance(hello, mingle.Hello)
    assert hello.destination == PEER
    one.hear(PEER, "offline")
    assert one.do(mingle.Tick()) == []


def test_deafness_is_told_to_both_tables() -> None:
    one = settled()
    steps: list[Any] = []
    for table in (one.machine.membership, one.machine.unsigned):
        table.step = lambda what, now: steps.append(what) or []  # type: ignore[method-assign]
    one.connected = False
    one.now += 0.1
    one.tick()
    assert steps[:2] == [Deaf(), Deaf()]
