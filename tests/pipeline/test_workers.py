"""Lives of workers."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.stories import Node, Story, made, unique_events
from tests.pipeline.worlds import as_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def test_each_life_of_a_worker_has_its_end_its_figures_and_its_holes(spark: SparkSession) -> None:
    story = Story()
    software = {"sw_ident": "py-umbel", "sw_ver": "1.0"}
    lost, gone = story.node("w1@a", inc=1), story.node("w2@a", inc=1)
    lost.tell("worker-online", freq=2.0)
    gone.tell("worker-online", freq=2.0)
    lost.beat(processed=5, lost=2, active=1, **software)
    lost.skip(3)
    lost.beat(processed=9, lost=3, active=2, **software)
    gone.tell("worker-offline", processed=1)
    silent = story.node("w4@a", inc=1)
    silent.beat()
    mute = story.node("w5@a", inc=1)  # without heartbeats nobody can tell
    mute.tell("task-received", "t1")
    story.now += 30
    alive = story.node("w1@a", inc=2)
    alive.beat(freq=-5.0)
    celery = story.node("old@b", inc=None, pid=99)
    celery.beat(sw_ident="py-celery")
    story.node("gen1@c", inc=4).tell("task-sent", "t1")
    found = {
        (row["hostname"], row["incarnation"]): row for row in made(spark, "workers", story.events)
    }
    assert {place: row["status"] for place, row in found.items()} == {
        ("w1@a", 1): "lost",
        ("w1@a", 2): "online",
        ("w2@a", 1): "offline",
        ("w4@a", 1): "lost",
        ("w5@a", 1): "online",
        ("old@b", 99): "online",
    }
    times = [event["timestamp"] for event in story.events]
    first = found["w1@a", 1]
    assert (first["online"], first["last_heartbeat"]) == (times[0], times[3])
    assert first["lost"] == times[3] + 4.0
    assert round(first["uptime"], 3) == 0.3
    assert (first["processed"], first["active"]) == (9, 2)
    assert (first["events_seen"], first["events_missing"], first["events_lost"]) == (3, 3, 3)
    assert (first["sw_ident"], first["sw_ver"]) == ("py-umbel", "1.0")
    assert round(first["drift"], 3) == 0.1
    assert found["w2@a", 1]["offline"] == times[4]
    assert found["old@b", 99]["events_missing"] is None


def test_what_pool_processes_send_neither_begins_nor_ends_a_life(spark: SparkSession) -> None:
    story = Story()
    ours, celery = story.node("w1@a", inc=5), story.node("old@b", inc=None, pid=40)
    older = story.node("w2@a", inc=5)
    workers = (ours, older, celery)
    # The pool processes of older versions and of Celery name themselves, ours the worker.
    children = (
        story.node("w1@a", inc=5),
        story.node("w2@a", inc=6, pid=8),
        story.node("old@b", inc=None, pid=41),
    )
    for worker in workers:
        worker.tell("worker-online", freq=2.0)
    for number in range(3):
        for worker, child in zip(workers, children, strict=True):
            uuid = f"{worker.hostname} {number}"
            worker.tell("task-received", uuid, name="shop.add")
            worker.tell("task-started", uuid)
            series = {"umbel_series": 77} if child.hostname == "w1@a" else {}
            child.tell("task-progress", uuid, done=number, **series)
            worker.tell("task-succeeded", uuid)
            worker.beat(processed=number)
    children[0].skip(2)
    children[0].tell("task-progress", "w1@a 2", umbel_series=77)
    found = {row["hostname"]: row for row in made(spark, "workers", story.events)}
    born = round(next(e["timestamp"] for e in story.events if e["hostname"] == "old@b") * 1e6)
    assert {
        name: (row["incarnation"], row["status"], row["processed"], row["events_missing"])
        for name, row in found.items()
    } == {
        "w1@a": (5, "online", 2, 2),
        "w2@a": (5, "online", 2, 0),
        "old@b": (born, "online", 2, None),
    }
    assert {row["outcome"] for row in made(spark, "attempts", story.events)} == {"SUCCESS"}
    assert made(spark, "clock_audit", story.events) == []
    gaps = made(spark, "gaps", story.events)
    assert [(row["hostname"], row["series"], row["first"], row["last"]) for row in gaps] == [
        ("w1@a", 77, 4, 5)
    ]


def test_a_worker_that_stands_still_is_lost_although_its_pool_goes_on(spark: SparkSession) -> None:
    story = Story()
    stopped, other, child = story.node("w1@a"), story.node("w2@a"), story.node("w1@a")
    for _ in range(2):
        stopped.beat(freq=2.0)
    for number in range(10):
        story.now += 2
        other.beat()
        child.tell("task-progress", "t", done=number, umbel_series=77)
    found = {row["hostname"]: row["status"] for row in made(spark, "workers", story.events)}
    assert found == {"w1@a": "lost", "w2@a": "online"}


def test_lives_follow_each_other_as_they_went_online_however_late_their_events_are_imported(
    spark: SparkSession,
) -> None:
    story = Story()
    old = story.node("w1@a", inc=1)
    old.tell("worker-online", freq=2.0)
    old.beat()
    old.tell("task-started", "orphan")
    imported = list(story.events)
    story.events.clear()
    story.now += 30
    new = story.node("w1@a", inc=2)
    new.tell("worker-online", freq=2.0)
    new.tell("task-started", "running")
    new.beat()
    # An import takes the time of the import for that of the receipt.
    late = as_table(imported, received=story.now + 3_600, recorder="importer")
    found = {row["incarnation"]: row for row in made(spark, "workers", story.events, late)}
    assert {life: row["status"] for life, row in found.items()} == {1: "lost", 2: "online"}
    assert found[1]["lost"] == found[1]["last_seen"] + 4.0
    outcomes = made(spark, "attempts", story.events, late)
    assert {row["uuid"]: row["outcome"] for row in outcomes} == {
        "orphan": "LOST",
        "running": "RUNNING",
    }


def test_old_events_of_a_lost_worker_that_are_imported_do_not_bring_it_back(
    spark: SparkSession,
) -> None:
    story = Story()
    gone, other = story.node("w1@a"), story.node("w2@a")
    gone.tell("worker-online", freq=2.0)
    imported = [gone.beat()]
    story.events.remove(imported[0])
    gone.beat()
    story.now += 30
    other.beat()
    late = as_table(imported, received=story.now + 1, recorder="importer")
    found = {row["hostname"]: row["status"] for row in made(spark, "workers", story.events, late)}
    assert found == {"w1@a": "lost", "w2@a": "online"}


def celery_in_a_container(story: Story) -> Node:
    """A worker of Celery's that has begun a task; its process is number 1, as in any container."""
    worker = story.node("celery@pod", inc=None, pid=1)
    worker.tell("worker-online", freq=2.0, processed=0, active=0)
    worker.tell("task-received", "first", name="shop.add")
    worker.tell("task-started", "first")
    worker.beat(processed=1, active=1)
    return worker


@pytest.mark.parametrize("told", [True, False], ids=["counts tasks", "reports no counts"])
@pytest.mark.parametrize(
    ("end", "reason"), [("offline", "worker offline"), ("lost", "worker lost")]
)
def test_a_restarted_worker_with_the_same_process_number_is_another_life(
    spark: SparkSession, end: str, reason: str, told: bool
) -> None:
    story = Story()
    worker = celery_in_a_container(story)
    if end == "offline":
        worker.tell("worker-offline", processed=1, active=1)
    story.now += 5
    story.clock = 0  # the clock of a process begins anew
    again = worker.tell("worker-online", freq=2.0, processed=0 if told else None)
    worker.tell("task-received", "second", name="shop.add")
    worker.tell("task-started", "second")
    worker.beat(processed=1 if told else None, active=1)
    rows = made(spark, "workers", story.events)
    rows.sort(key=lambda row: float(row["online"]))
    assert [(row["pid"], row["status"]) for row in rows] == [(1, end), (1, "online")]
    assert [row["online"] for row in rows] == [
        story.events[0]["timestamp"],
        again["timestamp"],
    ]
    assert [row["events_seen"] for row in rows] == [5 if end == "offline" else 4, 4]
    attempts = {row["uuid"]: row for row in made(spark, "attempts", story.events)}
    assert {uuid: (row["outcome"], row["reason"]) for uuid, row in attempts.items()} == {
        "first": ("LOST", reason),
        "second": ("RUNNING", None),
    }
    assert [attempts[uuid]["incarnation"] for uuid in ("first", "second")] == [
        row["incarnation"] for row in rows
    ]
    assert [row["incarnation"] for row in rows] == [
        round(event["timestamp"] * 1e6) for event in (story.events[0], again)
    ]


@pytest.mark.parametrize("is_told", [True, False], ids=["offline is told", "offline is lost"])
def test_a_worker_that_has_connected_again_lives_on_and_so_does_its_task(
    spark: SparkSession, is_told: bool
) -> None:
    story = Story()
    worker = celery_in_a_container(story)
    # As Celery's worker does when the broker cuts its connections.
    if is_told:
        worker.tell("worker-offline", processed=1, active=1)
    story.now += 2
    worker.tell("worker-online", freq=2.0, processed=1, active=1)
    worker.beat(processed=1, active=1)
    (row,) = made(spark, "workers", story.events)
    assert (row["status"], row["offline"], row["lost"]) == ("online", None, None)
    assert row["online"] == story.events[0]["timestamp"]
    assert row["uptime"] == row["last_seen"] - row["online"]
    (attempt,) = made(spark, "attempts", story.events)
    assert (attempt["outcome"], attempt["incarnation"]) == ("RUNNING", row["incarnation"])


def test_a_worker_that_is_heard_after_it_went_is_there_although_its_return_is_not_in_the_log(
    spark: SparkSession,
) -> None:
    story = Story()
    celery = story.node("celery@pod", inc=None, pid=1)
    celery.beat()
    celery.tell("worker-offline")
    story.now += 5
    celery.beat()
    (row,) = made(spark, "workers", story.events)
    assert (row["incarnation"], row["status"], row["offline"]) == (1, "online", None)


def test_a_recorder_that_is_behind_makes_no_worker_lost(spark: SparkSession) -> None:
    story = Story()
    nodes = [story.node(f"w{number}@a") for number in range(12)]
    by_other: list[dict[str, Any]] = []
    for _ in range(10):
        story.now += 2
        for node in nodes[:-1]:
            node.beat()
        by_other.append(nodes[-1].beat())
        story.events.pop()
    # What the second recorder has received since is in no segment yet.
    rows = made(spark, "workers", story.events, as_table(by_other[:5], recorder="r2"))
    assert {row["status"] for row in rows} == {"online"}
    # A recorder that ended long ago does not hold the end of the log back.
    ended = as_table([story.node("w12@a").beat(timestamp=story.now - 7_200)], recorder="r0")
    story.events.pop()
    dead = story.node("w13@a").beat(timestamp=story.now - 60)
    rows = made(spark, "workers", story.events, ended)
    assert dead["hostname"] == "w13@a"
    statuses = {row["hostname"]: row["status"] for row in rows}
    assert (statuses["w13@a"], statuses["w12@a"], statuses["w0@a"]) == ("lost", "lost", "online")


def test_facts_of_parts_merge_to_those_of_the_whole_and_late_births_are_noticed(
    spark: SparkSession,
) -> None:
    from umbel.pipeline.tables import workers as lives
    from umbel.pipeline.tables.sequences import blocks, missing_numbers

    story = Story()
    ours = story.node("w1@a")
    for number in range(4):
        celery_in_a_container(story)
        ours.tell("task-progress", "t", umbel_series=77)
        ours.beat(processed=number, lost=number)
        ours.skip(1)
        story.now += 7
    events = unique_events(spark, story.events).cache()
    births = lives.births(events)
    parts = [events.where(f"pmod(xxhash64(timestamp), 3) = {number}") for number in range(3)]

    def rows(facts: DataFrame, drifts: DataFrame) -> list[Any]:
        numbers = missing_numbers(blocks(events))
        merged = lives.merge_life_facts(facts), lives.merge_drifts(drifts)
        return sorted(lives.workers(*merged, numbers, story.now).collect())

    whole = rows(lives.life_facts(events, births), lives.drifts(events, births))
    facts, drifts = (
        reduce(lambda one, other: one.union(other), [of(part, births) for part in parts])
        for of in (lives.life_facts, lives.drifts)
    )
    assert rows(facts, drifts) == whole
    assert len(whole) == 5
    assert lives.outdated(facts, births).isEmpty()
    known = births.where(f"born != {story.events[6]['timestamp']!r}D")
    assert known.count() == 3
    stale = lives.outdated(lives.life_facts(events, known), births)
    assert [tuple(row) for row in stale.collect()] == [("celery@pod", 1)]
    assert lives.outdated(lives.life_facts(events.where("false"), births), births).isEmpty()
    events.unpersist()


def read_plainly(events: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Lives as docs/pipeline.md has them: (online, offline, status, events) by node and life."""
    births: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        if event["type"] == "worker-online" and "inc" not in event and not event.get("processed"):
            births[event["hostname"], event["pid"]].append(event["timestamp"])
    lives: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        host, pid, at = event["hostname"], event["pid"], event["timestamp"]
        born = max((one for one in births[host, pid] if one <= at), default=None)
        lives[host, event.get("inc") or (pid if born is None else round(born * 1e6))].append(event)
    ends = max(event["timestamp"] for event in events) + 0.1
    made: dict[tuple[str, int], tuple[Any, ...]] = {}
    later: set[str] = set()

    def online(life: tuple[str, int]) -> tuple[float, int]:
        told = [event for event in lives[life] if event["type"] == "worker-online"]
        return min(event["timestamp"] for event in told or lives[life]), life[1]

    for life in sorted(lives, key=online, reverse=True):
        if not any(event["type"].startswith("worker-") for event in lives[life]):
            continue
        times: dict[str, float] = {}
        for event in lives[life]:
            times[event["type"]] = max(times.get(event["type"], 0.0), event["timestamp"])
        last = max(lives[life], key=lambda event: (event["clock"], event["timestamp"]))
        offline = times.get("worker-offline")
        back = [times.get("worker-online", 0.0)]
        if not any("inc" in event for event in lives[life]):
            back.append(times.get("worker-heartbeat", 0.0))
        if offline is not None and max(back) > offline:
            offline = None
        is_silent = "worker-heartbeat" in times and ends - last["timestamp"] - 0.1 > 4
        status = "lost" if life[0] in later or is_silent else "online"
        status = "offline" if offline is not None else status
        later.add(life[0])
        made[life] = online(life)[0], offline, status, len(lives[life])
    return made


def test_lives_of_any_history_are_those_of_a_plain_reading(spark: SparkSession) -> None:
    dice = random.Random(4)
    story = Story()
    nodes = [story.node(f"c{number}@a", inc=None, pid=1) for number in range(30)]
    nodes += [story.node(f"c{number}@a", inc=None, pid=2) for number in range(10)]
    nodes += [story.node(f"u{number % 10}@a", inc=number) for number in range(1, 20)]
    kinds = ("worker-online", "worker-heartbeat", "worker-heartbeat", "worker-offline")
    for number in range(800):
        kind = dice.choice((*kinds, "task-started"))
        uuid = f"t{number}" if kind == "task-started" else None
        processed = dice.choice([None, 0, 3]) if uuid is None else None
        dice.choice(nodes).tell(kind, uuid, processed=processed)
    dice.shuffle(story.events)
    rows = made(spark, "workers", story.events)
    assert {
        (row["hostname"], row["incarnation"]): (
            row["online"], row["offline"], row["status"], row["events_seen"],
        )
        for row in rows
    } == read_plainly(story.events)  # fmt: skip
    statuses = {(row["hostname"], row["incarnation"]): row["status"] for row in rows}
    assert set(statuses.values()) == {"online", "offline", "lost"}
    for row in made(spark, "attempts", story.events):
        status = statuses.get((row["worker"], row["incarnation"]))
        assert (row["outcome"] == "LOST") == (status in {"lost", "offline"})
