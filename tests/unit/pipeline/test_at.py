"""The cluster as it was, against a slow replay of the same events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pipeline.published import BEGAN, World, publish
from umbel.pipeline.at import Picture, at
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.reading import Tables


def replayed(events: Iterable[dict[str, Any]]) -> dict[str, set[str]]:
    """What runs and waits after these events, told one by one."""
    state: dict[str, str] = {}
    for event in events:
        if event["uuid"] is not None:
            state[event["uuid"]] = event["type"]
    waits = {"task-sent", "task-received", "task-retried"}
    return {
        "waiting": {uuid for uuid, kind in state.items() if kind in waits},
        "started": {uuid for uuid, kind in state.items() if kind == "task-started"},
    }


def uuids(tasks: Iterable[Any]) -> set[str]:
    return {task.uuid for task in tasks}


def agrees(picture: Picture, expected: dict[str, set[str]]) -> None:
    assert uuids(picture.waiting) == expected["waiting"]
    assert uuids(picture.running) | uuids(picture.orphaned) == expected["started"]


@pytest.mark.parametrize("after_s", [1.5, 17.0, 42.0, 43.5, 60.0, 100.0])
def test_tasks_at_a_time_are_those_of_a_replay(
    tables: Tables, world: World, after_s: float
) -> None:
    when = BEGAN + after_s
    picture = at(tables, time=when)
    before = [event for event in world.rows["timeline"] if event["timestamp"] <= when]
    agrees(picture, replayed(before))
    assert picture.events == len(before)


@pytest.mark.parametrize("clock", [30, 200, 555, 900, 10_000])
def test_tasks_at_a_clock_are_those_of_a_replay(tables: Tables, world: World, clock: int) -> None:
    picture = at(tables, clock=clock)
    timeline = world.rows["timeline"]
    last = [event for event in timeline if 0 < event["clock"] <= clock][-1]["timestamp"]
    before = [
        event
        for event in timeline
        if 0 < event["clock"] <= clock or (event["clock"] == 0 and event["timestamp"] <= last)
    ]
    agrees(picture, replayed(before))
    assert (picture.events, picture.time) == (len(before), last)


def test_a_node_is_alive_until_it_goes_or_counts_as_lost(tables: Tables, world: World) -> None:
    early = at(tables, time=BEGAN + 10)
    assert [(node.hostname, node.alive) for node in early.nodes] == [
        (name, True) for name in world.workers
    ]
    assert {node.since for node in early.nodes} == {BEGAN}
    lost = next(row for row in world.rows["workers"] if row["lost"])
    before = at(tables, time=lost["lost"] - 0.1).nodes[-1]
    after = at(tables, time=lost["lost"] + 0.1).nodes[-1]
    assert (before.alive, before.last_heartbeat) == (True, lost["last_heartbeat"])
    assert (after.alive, after.how, after.ended) == (False, "lost", lost["lost"])
    end = at(tables, time=world.end + 1)
    assert [node.how for node in end.nodes] == ["offline"] * 3 + ["lost"]
    assert end.counts["nodes"] == 0


def test_tasks_of_a_node_that_has_gone_are_told_apart(tables: Tables, world: World) -> None:
    picture = at(tables, time=world.end + 1)
    lost = {row["uuid"] for row in world.rows["attempts"] if row["outcome"] == "LOST"}
    assert uuids(picture.orphaned) == lost
    assert lost
    assert picture.running == []


def test_running_tasks_have_their_name_their_node_and_since_when(
    tables: Tables, world: World
) -> None:
    attempt = max(
        (row for row in world.rows["attempts"] if row["ended"]),
        key=lambda row: row["ended"] - row["started"],
    )
    picture = at(tables, time=(attempt["started"] + attempt["ended"]) / 2)
    task = next(task for task in picture.running if task.uuid == attempt["uuid"])
    assert (task.name, task.worker, task.since, task.state) == (
        attempt["name"],
        attempt["worker"],
        attempt["started"],
        "STARTED",
    )
    node = next(node for node in picture.nodes if node.hostname == attempt["worker"])
    assert node.running >= 1
    assert sum(node.running for node in picture.nodes) == picture.counts["running"]


def test_winners_are_told_from_the_moment_of_the_decision(tables: Tables, world: World) -> None:
    first = world.rows["elections"][0]
    assert at(tables, time=first["decided"] - 0.01).leaders == []
    (leader,) = at(tables, time=first["decided"] + 0.01).leaders
    assert (leader.id, leader.winner, leader.alive) == (first["id"], world.workers[0], True)
    assert len(at(tables, time=world.end).leaders) == 5  # one election had no winner


def test_lists_are_cut_and_counts_are_not(tables: Tables) -> None:
    whole = at(tables, time=BEGAN + 43)
    cut = at(tables, time=BEGAN + 43, limit=1)
    assert cut.counts == whole.counts
    assert cut.counts["leaders"] == 4
    assert cut.leaders == whole.leaders[:1]
    assert (cut.running, cut.waiting) == (whole.running[:1], whole.waiting[:1])


def test_before_the_history_there_is_nothing_to_show(tables: Tables, tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="is before the history"):
        at(tables, time=BEGAN - 1)
    with pytest.raises(HistoryError, match=r"clock 0 is before the history: it goes from 1 to"):
        at(tables, clock=0)
    with Tables(publish(tmp_path, {})) as empty, pytest.raises(HistoryError, match="no events"):
        at(empty, clock=3)


def test_a_custom_event_means_that_the_task_runs(tmp_path: Path) -> None:
    timeline = [
        {"position": n, "clock": n + 1, "timestamp": BEGAN + n, "hostname": "w@h", "uuid": "a",
         "incarnation": 1, "type": kind}
        for n, kind in enumerate(["task-received", "task-started", "task-progress"])
    ]  # fmt: skip
    task = {"uuid": "a", "name": "shop.report", "state": "PROGRESS", "clock": 3}
    with Tables(publish(tmp_path, {"timeline": timeline, "tasks": [task]})) as tables:
        (found,) = at(tables, clock=3).running
        assert (found.uuid, found.name, found.state) == ("a", "shop.report", "PROGRESS")


@pytest.mark.parametrize("pid", [40, 41], ids=["the worker itself", "a pool process of Celery"])
def test_a_task_whose_last_event_was_its_own_runs_as_long_as_its_node_is_there(
    tmp_path: Path, pid: int
) -> None:
    kinds = [("worker-online", 40), ("task-started", 40), ("task-progress", pid)]
    timeline = [
        {"position": n, "clock": n + 1, "timestamp": BEGAN + n, "hostname": "w@h",
         "uuid": "a" if kind.startswith("task-") else None, "incarnation": incarnation,
         "type": kind}
        for n, (kind, incarnation) in enumerate(kinds)
    ]  # fmt: skip
    node = {"hostname": "w@h", "incarnation": 40, "online": BEGAN, "lost": BEGAN + 10}
    told = {"timeline": timeline, "workers": [node], "tasks": [{"uuid": "a"}]}
    with Tables(publish(tmp_path, told)) as tables:
        before, after = at(tables, time=BEGAN + 9), at(tables, time=BEGAN + 11)
    assert (uuids(before.running), uuids(before.orphaned)) == ({"a"}, set())
    assert [one.running for one in before.nodes] == [1]
    assert (uuids(after.running), uuids(after.orphaned)) == (set(), {"a"})


def test_a_task_that_was_cancelled_waits_to_be_delivered_again(tmp_path: Path) -> None:
    timeline = [
        {"position": n, "clock": n + 1, "timestamp": BEGAN + n, "hostname": "w@h", "uuid": "a",
         "incarnation": 1, "type": kind}
        for n, kind in enumerate(["task-received", "task-started", "task-cancelled"])
    ]  # fmt: skip
    with Tables(publish(tmp_path, {"timeline": timeline, "tasks": [{"uuid": "a"}]})) as tables:
        assert uuids(at(tables, clock=3).waiting) == {"a"}


def test_lives_of_one_process_number_are_told_apart_by_when_they_began(tmp_path: Path) -> None:
    kinds = [
        ("task-started", "before"),  # the recorder came later than the worker
        ("worker-heartbeat", None),
        ("worker-online", None),
        ("task-started", "first"),
        ("worker-offline", None),
        ("worker-online", None),
        ("task-started", "second"),
        ("worker-heartbeat", None),
    ]
    timeline = [
        {"position": n, "clock": n + 1, "timestamp": BEGAN + n, "hostname": "w@h", "uuid": uuid,
         "incarnation": 1, "type": kind}
        for n, (kind, uuid) in enumerate(kinds)
    ]  # fmt: skip
    born = [1, round((BEGAN + 2) * 1e6), round((BEGAN + 5) * 1e6)]
    ends: list[dict[str, Any]] = [{"lost": BEGAN + 2}, {"offline": BEGAN + 4}, {}]
    workers = [
        {"hostname": "w@h", "incarnation": incarnation, "pid": 1, "online": online, **end}
        for incarnation, online, end in zip(born, (BEGAN, BEGAN + 2, BEGAN + 5), ends, strict=True)
    ]
    tasks = [{"uuid": uuid} for _, uuid in kinds if uuid]
    told = {"timeline": timeline, "workers": workers, "tasks": tasks}
    with Tables(publish(tmp_path, told)) as tables:
        early, middle, end = (at(tables, time=BEGAN + after) for after in (3, 4, 7))
        by_clock = at(tables, clock=8)
    assert [(one.incarnation, one.alive) for one in early.nodes] == [
        (born[0], False), (born[1], True),
    ]  # fmt: skip
    assert (uuids(early.running), uuids(early.orphaned)) == ({"first"}, {"before"})
    assert [(one.how, one.since) for one in middle.nodes] == [
        ("lost", BEGAN + 1), ("offline", BEGAN + 2),
    ]  # fmt: skip
    for picture in (end, by_clock):
        assert [(one.incarnation, one.how, one.running) for one in picture.nodes] == [
            (born[0], "lost", 0), (born[1], "offline", 0), (born[2], "", 1),
        ]  # fmt: skip
        assert uuids(picture.running) == {"second"}
        assert uuids(picture.orphaned) == {"before", "first"}
