"""Refusals: readable transcripts of what is refused and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from umbel.cluster.election import ANSWER_S, COLLECT_S, RANK_MAX, RETRY, STEP_S
from umbel.cluster.election_words import (
    Candidate,
    Claimed,
    ClaimFailed,
    Gone,
    Heard,
    Tick,
    is_refusal,
    node_of,
)
from umbel.cluster.refusals import (
    CANDIDATES_MAX,
    DROPPED,
    LIFE_S,
    WAIT_S,
    WATCH_S,
    ClaimRefusal,
    Declined,
    Effect,
    Fail,
    Refusals,
)

ME = Candidate("me@host", 5, 50)
TOKEN = "refused:me@host/5/50/1"
CLAIM = ClaimRefusal("e1", TOKEN)


def stands(hostname: str = "a", *, id: str = "e1", pid: int = 1, stands: bool = True) -> Heard:  # noqa: A002
    return Heard(id, "task", {}, 10, hostname, pid, 1, 2, stands)


class Booth:
    """What one node refuses, and the time."""

    def __init__(self, **options: Any) -> None:
        self.refusals = Refusals(ME, **options)
        self.now = 1_000.0

    def step(self, *inputs: Any) -> list[Effect]:
        return [effect for one in inputs for effect in self.refusals.step(one, self.now)]

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with ten ticks a second."""
        effects = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            effects += self.step(Tick())
        return effects


@pytest.fixture
def booth() -> Booth:
    return Booth()


def test_when_nobody_stands_the_refusal_is_claimed_and_whoever_wins_reports_it(
    booth: Booth,
) -> None:
    assert booth.step(Declined("e1", "no such topic", "replies")) == []
    assert booth.wait(WAIT_S - 0.2) == []
    assert booth.wait(0.4) == [CLAIM]
    assert booth.step(Claimed("e1", True, TOKEN)) == [Fail("e1", "no such topic", "replies")]
    assert len(booth.refusals) == 0
    assert booth.wait(100) == []


def test_a_refusal_waits_for_longer_than_every_candidate_waits_for_its_turn() -> None:
    assert WAIT_S > COLLECT_S + RANK_MAX * STEP_S


def test_whoever_loses_reports_nothing(booth: Booth) -> None:
    booth.step(Declined("e1", "no"))
    assert booth.wait(WAIT_S + 0.1) == [CLAIM]
    assert booth.step(Claimed("e1", False, "a/1/1/1")) == []
    assert "e1" not in booth.refusals


def test_a_candidate_is_left_alone_whether_it_is_heard_before_or_after_the_request() -> None:
    for words in ((stands(), Declined("e1", "no")), (Declined("e1", "no"), stands())):
        booth = Booth()
        booth.step(*words)
        assert booth.wait(2 * WATCH_S) == []
        assert len(booth.refusals) == 0, "and forgotten in the end"


def test_when_all_candidates_are_gone_the_refusal_is_claimed(booth: Booth) -> None:
    booth.step(Declined("e1", "no"), stands("a"), stands("b"), stands("b", pid=2))
    booth.step(Gone("a"))
    assert booth.wait(WAIT_S + 1) == []
    booth.step(Gone("b"))
    assert booth.wait(0.2) == [CLAIM]


def test_a_candidate_that_goes_early_shortens_no_wait(booth: Booth) -> None:
    booth.step(stands("a"), Declined("e1", "no"), Gone("a"))
    assert booth.wait(WAIT_S - 0.2) == []
    assert booth.wait(0.4) == [CLAIM]


def test_a_word_for_celery_workers_is_not_a_candidacy(booth: Booth) -> None:
    booth.step(Declined("e1", "no"), stands(stands=False))
    assert booth.wait(WAIT_S + 0.1) == [CLAIM]


def test_a_candidate_alone_is_no_request(booth: Booth) -> None:
    booth.step(stands())
    booth.step(Gone("a"))
    assert booth.wait(2 * WATCH_S) == []


def test_a_request_that_comes_twice_is_refused_once(booth: Booth) -> None:
    booth.step(Declined("e1", "no"))
    booth.wait(3)
    booth.step(Declined("e1", "no, again"))
    assert booth.wait(WAIT_S - 3 + 0.1) == [CLAIM]
    booth.step(Declined("e1", "and again"))
    assert booth.step(Claimed("e1", True, TOKEN)) == [Fail("e1", "no", None)]


def test_a_claim_without_an_answer_is_repeated_with_its_token_for_a_while(booth: Booth) -> None:
    booth.step(Declined("e1", "no"))
    assert booth.wait(WAIT_S + 0.1) == [CLAIM]
    assert booth.wait(ANSWER_S + 0.1) == [CLAIM]
    booth.step(ClaimFailed("e1"))
    assert booth.wait(RETRY.longest_s) == [CLAIM]
    booth.step(stands("late"))
    assert set(booth.wait(LIFE_S)) == {CLAIM}, "it may have arrived: nobody else can act"
    assert len(booth.refusals) == 0


def test_an_answer_that_names_our_token_is_ours(booth: Booth) -> None:
    booth.step(Declined("e1", "no"))
    booth.wait(WAIT_S + 0.1)
    assert booth.step(Claimed("e1", False, TOKEN)) == [Fail("e1", "no", None)]
    assert booth.step(Claimed("e1", True, TOKEN)) == [], "once"


def test_a_register_that_is_ours_already_is_kept(booth: Booth) -> None:
    booth.step(Declined("e1", "the broker refuses it", None, "me@host/5/50/9"))
    assert booth.wait(WAIT_S + 0.1) == [ClaimRefusal("e1", "me@host/5/50/9")]


def test_every_refusal_has_a_token_that_names_its_node_and_says_what_it_is(booth: Booth) -> None:
    booth.step(Declined("e1", "no"), Declined("e2", "no"))
    tokens = [effect.token for effect in booth.wait(WAIT_S + 0.1)]  # type: ignore[union-attr]
    assert len(set(tokens)) == 2
    assert all(is_refusal(token) and node_of(token) == "me@host" for token in tokens)
    assert not is_refusal("me@host/5/50/1")


def test_tables_are_bounded_and_what_is_dropped_is_counted() -> None:
    booth = Booth(ids_max=10)
    for number in range(50):
        booth.step(stands(id=f"heard-{number}"))
    assert booth.refusals.counts[DROPPED] == 0, "nobody was asked"
    for number in range(50):
        booth.step(Declined(f"e{number}", "no"))
    assert len(booth.refusals) == 10
    assert booth.refusals.counts[DROPPED] == 40
    for number in range(2 * CANDIDATES_MAX):
        booth.step(stands(f"n{number}", id="e49"))
    assert len(booth.refusals.view(booth.now)["e49"]["candidates"]) == CANDIDATES_MAX


def test_the_view_shows_what_was_asked_for_and_why_not(booth: Booth) -> None:
    booth.step(Declined("e1", "no"), stands("a"), stands("b", id="heard"))
    booth.now += 2
    assert booth.refusals.view(booth.now) == {
        "e1": {"age": 2.0, "reason": "no", "candidates": ["a"]}
    }
