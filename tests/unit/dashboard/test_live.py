"""What is made of events: executions, elections, figures; and what is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.app.events.measures import Rate
from umbel.dashboard import stream
from umbel.dashboard.guard import Visit
from umbel.dashboard.identity import Identity
from umbel.dashboard.live.elections import ELECTIONS_MAX, ElectionBook
from umbel.dashboard.live.executions import Executions
from umbel.dashboard.live.figures import Figures
from umbel.dashboard.live.oldest import read
from umbel.dashboard.live.polling import QueueFacts, Sample
from umbel.dashboard.live.series import SERIES_S, Series
from umbel.dashboard.serving import GRACE_S
from umbel.dashboard.site import PAGES, Site


def event(kind: str, uuid: str = "t", clock: int = 1, node: str = "w1", **more: Any) -> Any:
    at = more.pop("timestamp", float(clock))
    return {"type": kind, "uuid": uuid, "hostname": node, "clock": clock, "timestamp": at, **more}


# -- executions --------------------------------------------------------------------------------


def test_an_execution_has_its_beginning_and_its_end() -> None:
    book = Executions(10)
    book.event(event("task-received", clock=1, name="a", parent_id="p"))
    book.event(event("task-started", clock=3))
    book.event(event("task-succeeded", clock=7, runtime=4.0))
    [one] = book.of_task("t")
    assert (one.name, one.parent, one.outcome) == ("a", "p", "SUCCESS")
    assert (one.received_clock, one.started_clock, one.ended_clock) == (1, 3, 7)
    assert one.runtime_s == 4.0


def test_every_attempt_stands_by_itself() -> None:
    book = Executions(10)
    for base, node, end in ((1, "w1", "task-retried"), (4, "w1", "task-failed")):
        book.event(event("task-received", clock=base, node=node, name="a"))
        book.event(event("task-started", clock=base + 1, node=node))
        book.event(event(end, clock=base + 2, node=node, exception="E()"))
    assert [one.outcome for one in book.of_task("t")] == ["RETRY", "FAILURE"]


def test_a_task_that_two_workers_ran_has_two_executions() -> None:
    book = Executions(10)
    book.event(event("task-received", clock=1, node="w1"))
    book.event(event("task-started", clock=2, node="w1"))
    book.event(event("task-received", clock=3, node="w2"))
    book.event(event("task-succeeded", clock=5, node="w2", runtime=1.0))
    assert [(one.worker, one.outcome) for one in book.of_task("t")] == [
        ("w1", None),
        ("w2", "SUCCESS"),
    ]


def test_a_start_that_comes_late_belongs_to_its_end() -> None:
    book = Executions(10)
    book.event(event("task-received", clock=1))
    book.event(event("task-succeeded", clock=5, runtime=2.0))
    book.event(event("task-started", clock=3))
    [one] = book.of_task("t")
    assert (one.started, one.started_clock, one.outcome) == (3.0, 3, "SUCCESS")


def test_a_retry_that_is_received_before_the_first_try_has_ended_keeps_both_apart() -> None:
    book = Executions(10)
    for kind, clock in (
        ("received", 1), ("started", 2), ("received", 4), ("retried", 3), ("started", 5),
        ("succeeded", 6),
    ):  # fmt: skip
        book.event(event(f"task-{kind}", clock=clock))
    found = [(one.received_clock, one.outcome, one.ended_clock) for one in book.of_task("t")]
    assert found == [(1, "RETRY", 3), (4, "SUCCESS", 6)]


def test_the_rejection_of_a_failed_message_is_no_second_execution() -> None:
    book = Executions(10)
    book.event(event("task-received", clock=1))
    book.event(event("task-failed", clock=2, exception="E()"))
    book.event(event("task-rejected", clock=3))
    assert len(book.of_task("t")) == 1


def test_executions_are_bounded_and_tell_what_changed() -> None:
    book = Executions(5)
    for number in range(20):
        book.event(event("task-received", uuid=str(number), clock=number + 1))
    assert len(book) == 5
    assert [one.uuid for one in book.since(0, 100)] == ["15", "16", "17", "18", "19"]
    seen = book.version
    book.event(event("task-started", uuid="16", clock=50))
    assert [one.uuid for one in book.since(seen, 100)] == ["16"]
    assert [one.uuid for one in book.since(0, 2)] == ["19", "16"]
    assert book.of_task("3") == []


KINDS = ["received", "started", "succeeded", "failed", "retried", "revoked", "rejected", "sent"]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 9))))
def test_events_in_any_order_keep_the_books_equal(story: list[tuple[str, int, int]]) -> None:
    book = Executions(4)
    for kind, uuid, clock in story:
        book.event(event(f"task-{kind}", uuid=str(uuid), clock=clock, runtime=1.0))
    by_task = [one for uuid in range(4) for one in book.of_task(str(uuid))]
    assert len(book) == len(by_task) <= 4
    assert sorted(one.number for one in by_task) == sorted(one.number for one in book.since(0, 100))


# -- elections ---------------------------------------------------------------------------------


def elect(node: str, clock: int, id_: str = "e1") -> Any:
    return {
        "type": "worker-elect", "hostname": node, "pid": 1, "inc": 1, "clock": clock, "id": id_,
        "topic": "task", "action": None, "cver": 2, "timestamp": 1.0,
    }  # fmt: skip


def elected(node: str, winner: str, id_: str = "e1") -> Any:
    return {"type": "worker-elected", "hostname": node, "id": id_, "winner": winner,
            "timestamp": 1.0}  # fmt: skip


def test_an_election_ranks_its_candidates_and_knows_its_winner() -> None:
    book = ElectionBook()
    for node, clock in (("b", 9), ("a", 9), ("c", 4)):
        book.event(elect(node, clock), 10.0)
    [one] = book.latest()
    assert [standing.hostname for standing in one.ranked] == ["c", "a", "b"]
    assert one.verdict == "open"
    book.event(elected("a", "c"), 10.75)
    book.event(elected("b", "c"), 10.9)
    assert one.verdict == "decided"
    assert one.decided_after_s == pytest.approx(0.75)
    assert book.leaders()["task"].winners == ["c"]
    assert book.disagreements == 0


def test_two_winners_are_an_alarm() -> None:
    book = ElectionBook()
    book.event(elect("a", 1), 0.0)
    book.event(elected("a", "a"), 1.0)
    book.event(elected("b", "b"), 1.0)
    book.event(elected("c", "a"), 1.0)
    assert book.latest()[0].verdict == "disagreement"
    assert book.disagreements == 1
    assert book.leaders() == {}


def test_elections_are_bounded_and_rubbish_is_left() -> None:
    book = ElectionBook()
    for number in range(ELECTIONS_MAX + 5):
        book.event(elect("a", 1, str(number)), 0.0)
    assert len(book) == ELECTIONS_MAX
    before = len(book)
    for bad in ({"id": 7}, {"id": ""}, {"id": "x", "topic": None}, {"cver": "x"}):
        book.event({**elect("a", 1, "new"), **bad}, 0.0)
    for bad in ({"id": None}, {"winner": 3}):
        book.event({**elected("a", "a", "newer"), **bad}, 0.0)
    assert len(book) == before


# -- figures -----------------------------------------------------------------------------------


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    for second in range(20):
        rate.add(float(second), 3)
    assert rate.per_s(19.9) == pytest.approx(3.0, rel=0.1)
    assert rate.per_s(60.0) == 0.0
    assert rate.total == 60


def test_columns_of_a_series_do_not_change_once_they_are_past() -> None:
    series = Series(("a", "b"))
    for second in range(1_000, 1_400):
        series.add("a", float(second))
    before = series.columns(1_399.0, 5)["a"]
    after = series.columns(1_401.0, 5)["a"]
    assert len(before) in (SERIES_S // 5, SERIES_S // 5 + 1)
    assert before[-10:-1] == pytest.approx([1.0] * 9)
    assert after[-10:-1] == pytest.approx([1.0] * 9)
    assert series.columns(9_999.0, 5)["a"] == [0.0] * (SERIES_S // 5)


def test_a_node_that_finishes_tasks_without_a_word_is_noticed() -> None:
    figures = Figures()
    beat = {"type": "worker-heartbeat", "hostname": "w1", "timestamp": 1.0, "clock": 1}
    for processed in (10, 11, 14):
        figures.event({**beat, "processed": processed}, None, 0.0)
    assert figures.nodes["w1"].is_silent_on_tasks
    figures.event(event("task-progress", node="w1"), None, 0.0)
    assert figures.nodes["w1"].is_silent_on_tasks, "every worker lets tasks send events"
    figures.event(event("task-received", node="w1"), None, 0.0)
    assert not figures.nodes["w1"].is_silent_on_tasks


# -- queues ------------------------------------------------------------------------------------


def test_the_growth_of_a_queue_is_that_of_the_last_seconds() -> None:
    facts = QueueFacts("q")
    assert facts.length is None
    assert facts.rates() == (None, None)
    for second in range(30):
        facts.samples.append(Sample(float(second), second * 4, second * 7))
    assert facts.length == 116
    assert facts.rates() == (pytest.approx(4.0), pytest.approx(7.0))
    facts.known = False
    assert facts.rates() == (None, None)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"7", None, 3, b'{"headers": 3}', "\udcff"])
def test_whatever_is_in_a_queue_can_be_looked_at(raw: Any) -> None:
    found = read(raw)
    assert found is None or found.uuid is None


def test_the_oldest_message_tells_its_task() -> None:
    found = read(b'{"headers": {"id": "t1", "task": "shop.charge"}, "properties": {}}')
    assert found is not None
    assert (found.uuid, found.task) == ("t1", "shop.charge")


def test_a_node_that_leaves_one_question_unanswered_keeps_its_last_answer(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site()
    answers = {
        "stats": [{"w1@host": {"pool": {"max-concurrency": 4}}}],
        "active_queues": [{"w1@host": [{"name": "celery"}]}],
    }
    monkeypatch.setattr(
        site.app.control, "broadcast", lambda command, **_: answers.get(command, [])
    )
    site.polling.ask_nodes()
    for silent_on in ("active_queues", "stats"):
        kept = answers.pop(silent_on)
        site.polling.ask_nodes()
        answers[silent_on] = kept
        node = site.polling.nodes()["w1@host"]
        assert (node.pool_size, node.queues) == (4, ("celery",))
    # A node that answers otherwise is believed.
    answers["active_queues"] = [{"w1@host": []}]
    site.polling.ask_nodes()
    assert site.polling.nodes()["w1@host"].queues == ()


def test_live_updates_of_a_slow_page_end_as_soon_as_the_dashboard_does(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site()

    def slowly(*_: Any) -> dict[str, str]:
        time.sleep(0.5)  # so that it rests for five seconds
        return {"nodes": "<p>"}

    monkeypatch.setattr(site, "fragments", slowly)

    async def look_on() -> list[bytes]:
        visit = Visit(Identity("", "127.0.0.1"), "")
        told = stream.updates(site, PAGES["cluster"], {}, visit)
        got = [await anext(told), await anext(told)]
        waiting = asyncio.ensure_future(next_of(told))
        await asyncio.sleep(0.1)
        site.stopping = True
        got.append(await asyncio.wait_for(waiting, GRACE_S))
        return got

    async def next_of(told: Any) -> bytes:
        return await anext(told, b"the end")

    got = asyncio.run(look_on())
    assert got[1].startswith(b"event: fragments")
    assert got[2] == b"the end"
