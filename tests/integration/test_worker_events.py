"""What workers tell, on real brokers: the right events, at the right moments, in causal order."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ears import Ears
from tests.servers import wait_until
from tests.sites import APP, Site
from umbel.app.events.state import State

Event = dict[str, Any]
SIGNS = {"freq", "active", "processed", "loadavg", "sw_ident", "sw_ver", "sw_sys", "lost"}
COMMON = {"type", "hostname", "pid", "clock", "timestamp", "utcoffset", "seq", "inc"}


@pytest.fixture
def ears(site: Site) -> Iterator[Ears]:
    with Ears(site.broker_url) as made:
        yield made


def story(ears: Ears, uuid: str) -> list[Event]:
    """The events of one task, in causal order."""
    events = [event for event in list(ears.events) if event.get("uuid") == uuid]
    return sorted(events, key=lambda event: (event["clock"], event["timestamp"]))


def kinds(ears: Ears, uuid: str) -> list[str]:
    return [event["type"] for event in story(ears, uuid)]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "asyncio", "solo"])
def test_every_pool_tells_the_story_of_a_task(ears: Ears, site: Site, pool: str) -> None:
    worker = site.worker(pool, "-E", "-n", "teller@test")
    result = site.send("add", 2, 3)
    assert result.get(timeout=30) == 5
    ears.wait_for("task-succeeded", uuid=result.id)
    received, started, succeeded = story(ears, result.id)
    assert [e["type"] for e in (received, started, succeeded)] == [
        "task-received", "task-started", "task-succeeded",
    ]  # fmt: skip
    for event in (received, started, succeeded):
        assert event.keys() >= COMMON
        assert event["hostname"] == "teller@test"
        assert event["pid"] == worker.pid
    assert received["name"] == f"{APP}.add"
    assert (received["args"], received["kwargs"]) == ("(2, 3)", "{}")
    assert (received["root_id"], received["parent_id"]) == (result.id, None)
    assert (received["retries"], received["eta"], received["expires"]) == (0, None, None)
    assert succeeded["result"] == "5"
    assert 0 <= succeeded["runtime"] < 10
    assert received["timestamp"] <= started["timestamp"] <= succeeded["timestamp"]
    worker.stop()
    (offline,) = ears.wait_for("worker-offline", hostname="teller@test")
    assert offline.keys() >= SIGNS | COMMON
    assert offline["processed"] == 1
    own = [event for event in ears.events if event["hostname"] == "teller@test"]
    assert sorted(event["seq"] for event in own) == list(range(1, len(own) + 1))
    assert offline["seq"] == len(own), "good-bye is the last word"


def test_a_worker_says_hello_beats_and_says_good_bye_without_task_events(
    ears: Ears, site: Site
) -> None:
    worker = site.worker("threads", "-n", "quiet@test", "--heartbeat-interval", "0.2")
    (online,) = ears.wait_for("worker-online")
    assert online.keys() >= SIGNS | COMMON
    assert online["sw_ident"] == "py-umbel"
    assert site.works()
    beats = ears.wait_for("worker-heartbeat", 3)
    assert beats[-1]["freq"] == 0.2
    worker.stop()
    ears.wait_for("worker-offline")
    assert {event["type"] for event in ears.events} == {
        "worker-online", "worker-heartbeat", "worker-offline",
    }  # fmt: skip


def test_without_heartbeats_a_worker_says_nothing_of_itself(ears: Ears, site: Site) -> None:
    worker = site.worker("threads", "-E", "--without-heartbeat")
    result = site.send("add", 1, 1)
    result.get(timeout=30)
    ears.wait_for("task-succeeded", uuid=result.id)
    worker.stop()
    assert not [event for event in ears.events if event["type"].startswith("worker-")]


def test_failures_retries_rejections_and_ends_by_force_are_told(ears: Ears, site: Site) -> None:
    site.worker("prefork", "-E")
    failed = site.send("fail", "so sad")
    retried = site.send("retry_until", "again", 2)
    unknown = site.send("nowhere")
    expired = site.send("add", 1, 1, expires=-1)
    killed = site.send("die", "killed")
    slow = site.send("spin_hard", 20)
    late = site.send("die_late", "late", 1)
    for one, last in {
        failed: "task-failed",
        retried: "task-succeeded",
        unknown: "task-failed",
        expired: "task-revoked",
        killed: "task-failed",
        slow: "task-failed",
        late: "task-succeeded",
    }.items():
        ears.wait_for(last, uuid=one.id)
    assert kinds(ears, failed.id) == ["task-received", "task-started", "task-failed"]
    failure = story(ears, failed.id)[-1]
    assert failure["exception"] == "ValueError('so sad')"
    assert "so sad" in failure["traceback"]
    assert kinds(ears, retried.id) == [
        *("task-received", "task-started", "task-retried") * 2,
        "task-received", "task-started", "task-succeeded",
    ]  # fmt: skip
    assert [e["retries"] for e in ears.of("task-received", uuid=retried.id)] == [0, 1, 2]
    assert "NotRegistered" in story(ears, unknown.id)[-1]["exception"]
    (revoked,) = story(ears, expired.id)
    assert (revoked["expired"], revoked["terminated"]) == (True, False)
    assert "SIGKILL" in story(ears, killed.id)[-1]["exception"]
    assert "TimeLimitExceeded" in story(ears, slow.id)[-1]["exception"]
    assert kinds(ears, late.id) == [
        "task-received", "task-started", "task-rejected",
        "task-received", "task-started", "task-succeeded",
    ]  # fmt: skip
    assert ears.of("task-rejected", uuid=late.id)[0]["requeue"] is True


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "asyncio", "solo"])
def test_events_that_a_task_sends_belong_to_the_life_of_its_worker(
    redis_site: Site, pool: str
) -> None:
    check_events_of_tasks(redis_site, pool)


def test_events_that_a_task_sends_belong_to_the_life_of_its_worker_on_rabbitmq(
    amqp_site: Site,
) -> None:
    check_events_of_tasks(amqp_site, "prefork")


def check_events_of_tasks(site: Site, pool: str) -> None:
    """Tasks send events of their own while a second worker and a monitor watch."""
    state = State()
    with Ears(site.broker_url, state=state) as ears:
        beat = ("--heartbeat-interval", "0.3")
        watcher = site.worker("threads", "-n", "watcher@test", "-Q", "none", *beat)
        worker = site.worker(pool, "-E", "-n", "busy@test", *beat)
        (online,) = ears.wait_for("worker-online", hostname="busy@test")
        results = [site.send("report_progress", 5) for _ in range(8)]
        sent = sum(result.get(timeout=30) for result in results)
        own = ("task-progress", "task-checked", "worker-note", "task-measured")
        ears.wait(lambda: sum(len(ears.of(kind)) for kind in own) == sent, f"{sent} own events")
        beats = len(ears.of("worker-heartbeat", hostname="busy@test"))
        ears.wait_for("worker-heartbeat", beats + 5, hostname="busy@test")

        of_worker = [event for event in ears.events if event["hostname"] == "busy@test"]
        assert {(event["pid"], event["inc"]) for event in of_worker} == {
            (worker.pid, online["inc"])
        }
        seen = state.workers["busy@test"]
        assert (seen.alive, seen.pid, seen.inc) == (True, worker.pid, online["inc"])
        assert (seen.active, seen.processed) == (0, 8)
        assert seen.loadavg is not None
        assert state.workers.keys() == {"busy@test", "watcher@test"}
        sequences = ears.receiver.sequences
        assert (sequences.missing_count, sequences.duplicate_count) == (0, 0)
        worker.stop()
        ears.wait_for("worker-offline", hostname="busy@test")
        watcher.wait_for("busy@test left")
        assert not re.search("lost", watcher.output)
        assert len(re.findall("busy@test joined", watcher.output)) == 1


def test_a_worker_that_stands_still_is_lost_although_its_pool_goes_on(redis_site: Site) -> None:
    state = State()
    with Ears(redis_site.broker_url, state=state) as ears:
        beat = ("--heartbeat-interval", "0.3")
        watcher = redis_site.worker("threads", "-n", "watcher@test", "-Q", "none", *beat)
        worker = redis_site.worker("prefork", "-E", "-n", "busy@test", *beat)
        redis_site.send("report_steps", 1_000)
        ears.wait_for("task-progress", 3)
        worker.signal(signal.SIGSTOP)
        ears.wait(lambda: not state.workers["busy@test"].alive, "the loss to be seen")
        watcher.wait_for("busy@test was lost")
        ears.wait_for("task-progress", len(ears.of("task-progress")) + 3)
        assert not state.workers["busy@test"].alive
        worker.signal(signal.SIGCONT)
        ears.wait(lambda: state.workers["busy@test"].alive, "the return to be seen")
        assert len(re.findall("busy@test was lost", watcher.output)) == 1


def test_a_held_task_is_received_before_it_is_due(ears: Ears, site: Site) -> None:
    site.worker("threads", "-E")
    result = site.send("add", 1, 1, countdown=1.5)
    (received,) = ears.wait_for("task-received", uuid=result.id)
    assert received["eta"] is not None
    assert result.get(timeout=30) == 2
    ears.wait_for("task-succeeded", uuid=result.id)
    assert kinds(ears, result.id) == ["task-received", "task-started", "task-succeeded"]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_what_a_task_sends_comes_after_its_start_in_every_clock(
    ears: Ears, site: Site, pool: str
) -> None:
    for name in ("one@test", "two@test"):
        site.worker(pool, "-E", "-n", name, settings={"task_send_sent_event": True})
    results = [site.send("send_child", number) for number in range(60)]
    for result in results:
        result.get(timeout=30)
    ears.wait(lambda: len(ears.of("task-succeeded")) == 120, "all to be told")
    children = [event for event in ears.of("task-received") if event["parent_id"]]
    assert len(children) == 60
    for child in children:
        started = ears.of("task-started", uuid=child["parent_id"])[0]
        for event in story(ears, child["uuid"]):
            assert event["clock"] > started["clock"], event
        assert kinds(ears, child["uuid"])[0] == "task-sent"


def test_a_stalled_loop_does_not_stop_the_heart(ears: Ears, site: Site) -> None:
    """A solo worker runs its tasks on the loop: while one runs the loop does not turn."""
    site.worker("solo", "--heartbeat-interval", "0.2", concurrency=1)
    result = site.send("wait", "long")
    site.wait_until_begun("long")
    heard = len(ears.of("worker-heartbeat"))
    beats = ears.wait_for("worker-heartbeat", heard + 4)
    assert beats[-1]["active"] == 1
    site.open_gate("long")
    assert result.get(timeout=30) == "long"


def test_a_worker_that_is_killed_says_no_good_bye(ears: Ears, site: Site) -> None:
    worker = site.worker("threads", "--heartbeat-interval", "0.2")
    ears.wait_for("worker-heartbeat", 1)
    worker.signal(signal.SIGKILL)
    wait_until(lambda: worker.process.poll() is not None, what="its end")
    heard = len(ears.events)
    assert not ears.of("worker-offline")
    assert heard >= 2
