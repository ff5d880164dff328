"""Elections: readable transcripts of what is heard and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from umbel.cluster import election_words as words
from umbel.cluster.clock import CLOCK_MAX
from umbel.cluster.election import (
    ACTION_BYTES_MAX,
    ANSWER_S,
    LIFE_S,
    RETRY,
    TOMBSTONE_S,
    Elections,
)
from umbel.cluster.election_words import (
    Act,
    Candidate,
    Claim,
    Claimed,
    ClaimFailed,
    Decided,
    Effect,
    Gone,
    Heard,
    PublishAck,
    PublishElect,
    Refused,
    Requested,
    Tick,
    node_of,
    read_elect,
    read_request,
)

ACTION = {"task": "shop.charge", "args": [7]}
REQUEST = Requested("e1", "task", ACTION)
ME = Candidate("me", 5, 50)
TOKEN = "me/5/50/1"


def elect(
    hostname: str = "a",
    clock: int = 10,
    *,
    pid: int = 1,
    inc: int = 1,
    id: str = "e1",  # noqa: A002 - the name on the wire
    cver: int = 2,
) -> Heard:
    return Heard(id, "task", ACTION, clock, hostname, pid, inc, cver)


def own(clock: int = 20, id: str = "e1") -> Heard:  # noqa: A002 - the name on the wire
    return elect(ME.hostname, clock, pid=ME.pid, inc=ME.inc, id=id)


class Booth:
    """One node's elections, and the time."""

    def __init__(self, **options: Any) -> None:
        self.elections = Elections(ME, **options)
        self.now = 1_000.0

    def step(self, *inputs: Any) -> list[Effect]:
        return [effect for one in inputs for effect in self.elections.step(one, self.now)]

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with ten ticks a second."""
        effects = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            effects += self.step(Tick())
        return effects

    def open(self, *others: Heard, clock: int = 20) -> None:
        """A request, our own word and those of others."""
        assert self.step(REQUEST) == [PublishElect("e1", "task", ACTION)]
        assert self.step(own(clock), *others) == []


def claim(token: str = TOKEN, election_id: str = "e1") -> Claim:
    return Claim(election_id, "task", ACTION, token)


# -- opening -------------------------------------------------------------------------------


def test_a_request_makes_us_stand_at_once_and_only_once() -> None:
    booth = Booth()
    assert booth.step(REQUEST) == [PublishElect("e1", "task", ACTION)]
    assert booth.step(REQUEST, REQUEST) == []


def test_somebody_elses_word_opens_an_election_as_a_request_does() -> None:
    booth = Booth()
    assert booth.step(elect()) == [PublishElect("e1", "task", ACTION)]
    assert booth.step(REQUEST, elect(), own()) == []
    assert booth.wait(1.4) == []
    assert booth.wait(0.2) == [claim()]


def test_one_candidate_is_enough() -> None:
    booth = Booth()
    booth.open()
    assert booth.wait(0.4) == []
    assert booth.wait(0.1) == [claim()]
    assert booth.step(Claimed("e1", True, TOKEN)) == [
        Act("e1", "task", ACTION),
        Decided("e1", TOKEN),
    ]
    assert booth.wait(60) == []


def test_without_a_clock_of_our_own_we_come_last() -> None:
    booth = Booth()
    booth.step(REQUEST, elect("z", 1_000))
    assert booth.wait(1.4) == []
    assert booth.wait(0.1) == [claim()]


# -- rank ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "rank"),
    [
        ([], 0),
        ([elect("a", 21)], 0),
        ([elect("a", 19)], 1),
        ([elect("a", 20)], 1),  # "a.1" before "me.5"
        ([elect("z", 20)], 0),
        ([elect("me", 20, pid=4)], 0),  # a former life of ours
        ([elect("a", 1), elect("a", 1, inc=2)], 2),
        ([elect("a", 1), elect("a", 1), elect("a", 3)], 1),
        ([elect("a", 1), elect("b", 2), elect("c", 3)], 3),
    ],
)
def test_we_claim_when_everybody_before_us_had_their_second(others: list[Heard], rank: int) -> None:
    booth = Booth()
    booth.open(*others)
    assert booth.wait(0.4 + rank) == []
    assert booth.wait(0.2) == [claim()]


def test_nobody_waits_for_more_than_some_others() -> None:
    booth = Booth()
    booth.open(*(elect(f"w{n}", n) for n in range(19)))
    assert booth.wait(4.4) == []
    assert booth.wait(0.2) == [claim()]


def test_who_is_gone_is_not_waited_for() -> None:
    booth = Booth()
    booth.open(elect("a", 1), elect("a", 1, inc=2), elect("b", 2))
    assert booth.wait(1) == []
    assert booth.step(Gone("a"), Gone("nobody"), Gone("me")) == []
    assert booth.wait(0.4) == []
    assert booth.wait(0.2) == [claim()]


def test_a_candidate_that_comes_while_we_wait_is_let_go_first() -> None:
    booth = Booth()
    booth.open(elect("a", 1))
    booth.wait(1.3)
    booth.step(elect("b", 2))
    assert booth.wait(1) == []
    assert booth.wait(0.3) == [claim()]


def test_the_time_of_the_next_tick_is_known() -> None:
    booth = Booth()
    assert booth.elections.due_at is None
    booth.open()
    assert booth.elections.due_at == pytest.approx(1_000.5)
    booth.now = 1_000.5
    assert booth.step(Tick()) == [claim()]
    assert booth.elections.due_at == pytest.approx(1_000.5 + ANSWER_S)


# -- the register --------------------------------------------------------------------------


def test_whoever_is_not_first_learns_the_winner_and_does_not_act() -> None:
    booth = Booth()
    booth.open()
    booth.wait(0.5)
    assert booth.step(Claimed("e1", False, "a/1/1/9")) == [Decided("e1", "a/1/1/9")]
    assert booth.elections.winner("e1") == "a/1/1/9"
    assert node_of("a/1/1/9") == "a"
    assert node_of("w1@host/x/1/1/9") == "w1@host/x"
    assert node_of("celery@host.name.77") == "celery@host.name"


def test_an_answer_that_names_our_token_is_a_victory() -> None:
    booth = Booth()
    booth.open()
    booth.wait(0.5)
    assert booth.step(ClaimFailed("e1", "the answer got lost")) == []
    assert booth.wait(0.3) == [claim()]
    assert booth.step(Claimed("e1", False, TOKEN)) == [
        Act("e1", "task", ACTION),
        Decided("e1", TOKEN),
    ]


def test_a_claim_that_fails_is_repeated_with_the_same_token_ever_more_slowly() -> None:
    booth = Booth()
    booth.open()
    assert booth.wait(0.5) == [claim()]
    pauses = []
    for _ in range(6):
        booth.step(ClaimFailed("e1"))
        due = booth.elections.due_at
        assert due is not None
        pauses.append(due - booth.now)
        booth.now = due
        assert booth.step(Tick()) == [claim()]
    assert pauses[0] == pytest.approx(RETRY.first_s)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(RETRY.longest_s)
    assert booth.elections.counts[words.CLAIM_FAILED] == 6


def test_a_claim_without_an_answer_is_repeated_and_a_second_answer_does_nothing() -> None:
    booth = Booth()
    booth.open()
    booth.wait(0.5)
    assert booth.wait(ANSWER_S - 0.2) == []
    assert booth.wait(0.3) == [claim()]
    assert len(booth.step(Claimed("e1", True, TOKEN))) == 2
    assert booth.step(Claimed("e1", True, TOKEN), ClaimFailed("e1"), ClaimFailed("e9")) == []


def test_an_election_that_nobody_decides_is_given_up_before_the_register_forgets() -> None:
    booth = Booth()
    booth.open()
    booth.wait(0.5)
    booth.now += LIFE_S + 1
    assert booth.step(Tick()) == [Refused(words.GIVEN_UP)]
    assert booth.step(REQUEST) == [Refused(words.REPEATED)]
    assert len(booth.elections) == 0


# -- afterwards ----------------------------------------------------------------------------


def decided(booth: Booth, election_id: str = "e1") -> None:
    booth.step(replace(REQUEST, id=election_id))
    booth.wait(0.5)
    booth.step(Claimed(election_id, False, "a/1/1/1"))


def test_requests_and_candidates_that_come_later_do_nothing() -> None:
    booth = Booth()
    decided(booth)
    assert booth.step(REQUEST) == [Refused(words.REPEATED)]
    assert booth.step(elect(), own()) == [Refused(words.LATE)] * 2
    assert booth.wait(30) == []
    assert len(booth.elections) == 0


def test_tombstones_end_after_a_day() -> None:
    booth = Booth()
    decided(booth)
    booth.now += TOMBSTONE_S - 1
    booth.step(Tick())
    assert "e1" in booth.elections
    booth.now += 1
    booth.step(Tick())
    assert "e1" not in booth.elections


def test_an_election_that_opens_again_has_another_token_and_can_only_lose() -> None:
    booth = Booth(tombstones_max=1)
    booth.open()
    booth.wait(0.5)
    booth.step(Claimed("e1", True, TOKEN))
    decided(booth, "e2")
    assert booth.elections.counts[words.FORGOTTEN] == 1
    assert booth.step(REQUEST) == [PublishElect("e1", "task", ACTION)]
    assert booth.wait(0.5) == [claim("me/5/50/3")]
    assert booth.step(Claimed("e1", False, TOKEN)) == [Decided("e1", TOKEN)]


def test_what_is_open_and_decided_can_be_looked_at() -> None:
    booth = Booth()
    decided(booth, "e0")
    booth.open(elect("a", 1))
    booth.wait(0.5)
    view = booth.elections.view()
    assert view["open"] == {
        "e1": {"topic": "task", "age": 0.5, "candidates": ["a", "me"], "claimed": False}
    }
    assert view["decided"] == {"e0": {"winner": "a/1/1/1", "age": 0.5}}


# -- Celery's workers ----------------------------------------------------------------------


def test_a_celery_worker_gets_one_ack_and_nobody_else_does() -> None:
    booth = Booth()
    booth.open(elect("a", 30))
    assert booth.step(elect("c", 31, cver=1, inc=0)) == [PublishAck("e1")]
    assert booth.step(elect("d", 32, cver=1, inc=0), elect("c", 31, cver=1, inc=0)) == []
    assert booth.wait(0.5) == [claim()]


def test_a_celery_worker_that_ranks_lowest_acts_by_itself_and_we_stand_back() -> None:
    booth = Booth()
    booth.open()
    booth.step(elect("c", 1, pid=77, cver=1, inc=0))
    assert booth.wait(1.6) == [Decided("e1", "c.77")]
    assert booth.wait(30) == []
    assert booth.step(REQUEST) == [Refused(words.REPEATED)]


def test_a_celery_worker_that_is_gone_is_not_stood_back_for() -> None:
    booth = Booth()
    booth.open()
    booth.step(elect("c", 1, cver=1, inc=0), Gone("c"))
    assert booth.wait(0.6) == [claim()]


def test_standing_back_can_be_switched_off() -> None:
    booth = Booth(yields_to_celery=False)
    booth.open()
    booth.step(elect("c", 1, cver=1, inc=0))
    assert booth.wait(1.6) == [claim()]


# -- what comes from outside ---------------------------------------------------------------

EVENT = {
    "type": "worker-elect", "hostname": "w1@wire", "utcoffset": 0.0, "pid": 15619, "clock": 266,
    "id": "el-0", "topic": "task", "action": ACTION, "cver": 1, "timestamp": 1794771703.6,
}  # fmt: skip
REQUIRED = ("id", "topic", "action", "clock", "hostname", "pid", "cver")


def test_a_celery_workers_event_is_read() -> None:
    assert read_elect(EVENT) == Heard("el-0", "task", ACTION, 266, "w1@wire", 15619, 0, 1)
    assert read_elect({**EVENT, "cver": 2, "inc": 9}) == Heard(
        "el-0", "task", ACTION, 266, "w1@wire", 15619, 9, 2
    )
    assert read_request({"id": "e", "topic": "t", "action": None}) == Requested("e", "t", None)


@pytest.mark.parametrize("name", REQUIRED)
def test_an_event_that_lacks_a_field_is_refused(name: str) -> None:
    assert isinstance(read_elect({key: EVENT[key] for key in EVENT if key != name}), str)


HOSTILE: list[Any] = [
    None, True, "", 0.5, float("nan"), float("inf"), -1, 2**53, 10**30, [], {}, [[]], b"x",
    "\ud800", "x" * 5_000, "é" * 600,
]  # fmt: skip


@pytest.mark.parametrize("name", ["id", "topic", "clock", "hostname", "pid", "cver", "inc"])
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:12])
def test_a_field_of_the_wrong_kind_or_size_is_refused(name: str, value: Any) -> None:
    assert isinstance(read_elect({**EVENT, "inc": 1, name: value}), str)


@pytest.mark.parametrize("event", [None, [], "worker-elect", 7, b"{}"])
def test_what_is_no_mapping_is_refused(event: Any) -> None:
    assert read_elect(event) == read_request(event) == words.NOT_AN_ELECTION


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("x" * ACTION_BYTES_MAX, words.TOO_BIG),
        ({"a": "\ud83d\ude00"}, words.BAD_ACTION),
        ({"a": object()}, words.BAD_ACTION),
    ],
    ids=["big", "surrogate pair", "object"],
)
def test_an_action_that_cannot_be_kept_is_refused(action: Any, reason: str) -> None:
    booth = Booth()
    assert booth.step(replace(REQUEST, action=action)) == [Refused(reason)]
    assert booth.elections.counts == {reason: 1}
    assert len(booth.elections) == 0


def test_actions_that_nest_deeply_are_refused_or_kept_but_never_raise() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    booth = Booth()
    assert booth.step(replace(REQUEST, action=nested)) == [Refused(words.BAD_ACTION)]
    while nested:  # taken apart level by level: the interpreter would do it recursively
        nested = nested[0]


def test_a_forged_clock_only_moves_a_rank() -> None:
    booth = Booth()
    booth.open(elect("a", CLOCK_MAX))
    assert booth.wait(0.6) == [claim()]
    booth = Booth()
    booth.open(*(elect(f"forged{n}", 0) for n in range(5_000)))
    assert booth.elections.sizes()["candidates"] <= 64
    assert booth.wait(4.6) == [claim()]


def test_forged_words_in_our_own_name_do_not_keep_us_from_claiming() -> None:
    booth = Booth()
    booth.open()
    booth.step(own(CLOCK_MAX), own(0), replace(own(0), cver=1), elect("me", 0, inc=51))
    assert booth.wait(0.6) == [claim()]


def test_a_million_ids_take_no_more_than_the_table_has_room_for() -> None:
    booth = Booth(ids_max=100)
    heard = elect()
    for n in range(200):
        booth.step(replace(heard, id=f"first{n}"))
    for n in range(1_000_000):
        booth.elections.step(Requested(f"f{n}", "task", None), booth.now)
    assert booth.elections.sizes() == {"ids": 100, "candidates": 1, "tombstones": 0}
    assert booth.elections.counts == {words.TOO_MANY: 1_000_100}


def test_big_actions_are_bounded_together() -> None:
    booth = Booth()
    big = "x" * (ACTION_BYTES_MAX - 10)
    for n in range(400):
        booth.step(Requested(f"e{n}", "task", big))
    assert len(booth.elections) == 64
    assert booth.elections.counts == {words.TOO_MANY: 336}
    booth.wait(0.5)
    booth.step(Claimed("e0", False, "a/1/1/1"))
    assert len(booth.step(Requested("e999", "task", big))) == 1


def test_tombstones_are_bounded() -> None:
    booth = Booth(tombstones_max=10)
    for n in range(50):
        decided(booth, f"e{n}")
    assert booth.elections.sizes()["tombstones"] == 10
    assert booth.elections.counts[words.FORGOTTEN] == 40


def test_a_time_that_goes_backwards_makes_nothing_due_twice() -> None:
    booth = Booth()
    booth.open()
    assert booth.wait(0.5) == [claim()]
    booth.now -= 100
    assert booth.step(Tick()) == []
    assert booth.elections.step(Claimed("e1", True, TOKEN), 1.0)[0] == Act("e1", "task", ACTION)
