"""Families of tasks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.pipeline.stories import Story
from tests.pipeline.worlds import LogWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

COLUMNS = (
    "uuid STRING, parent STRING, root STRING, depth BIGINT, finished DOUBLE, state STRING, "
    "name STRING, sent DOUBLE, received DOUBLE, started DOUBLE"
)


def task(
    uuid: str,
    parent: str | None,
    root: str,
    depth: int | None,
    finished: float | None,
    state: str = "SUCCESS",
) -> tuple[Any, ...]:
    """A row of the table `tasks`: received 5 seconds before its end, and started 1 second later."""
    ended = finished or 45.0
    return (uuid, parent, root, depth, finished, state, uuid, None, ended - 5, ended - 4)


def test_a_family_has_its_size_its_depth_and_the_chain_that_took_longest(
    spark: SparkSession,
) -> None:
    from umbel.pipeline.tables.lineage import lineage

    tasks = [
        task("root", None, "root", 0, 10.0),
        task("left", "root", "root", 1, 20.0),
        task("right", "root", "root", 1, 30.0, "FAILURE"),
        task("leaf", "left", "root", 2, 40.0),
        task("waits", "leaf", "root", 3, None, "RECEIVED"),
        task("alone", None, "alone", 0, 7.0),
        task("child", "unseen", "gone", 1, 9.0),
        task("a", "b", "ring", None, 11.0),
        task("b", "a", "ring", None, 12.0),
        task("open", None, "open", 0, None, "STARTED"),
    ]
    rows = [row.asDict() for row in lineage(spark.createDataFrame(tasks, COLUMNS)).collect()]
    found = {row["root_id"]: row for row in rows}
    assert {
        root: (row["size"], row["depth"], row["critical_path"], row["critical_tasks"])
        for root, row in found.items()
    } == {
        "root": (5, 3, 15.0, ["root", "left", "leaf"]),
        "alone": (1, 0, 5.0, ["alone"]),
        "gone": (1, 1, 5.0, ["child"]),
        "ring": (2, None, 6.0, ["a", "b"]),
        "open": (1, 0, None, []),
    }
    whole = found["root"]
    assert (whole["name"], whole["state"], whole["duration"]) == ("root", "SUCCESS", 35.0)
    assert (whole["failed"], whole["failed_part"]) == (1, 0.2)
    assert found["open"]["duration"] is None


def test_the_critical_path_is_the_time_in_which_some_task_of_the_chain_waited_or_ran(
    spark: SparkSession,
) -> None:
    from umbel.pipeline.tables.lineage import lineage

    def row(
        uuid: str, parent: str | None, root: str, began: float | None, finished: float | None
    ) -> tuple[Any, ...]:
        return (uuid, parent, root, 0, finished, "SUCCESS", uuid, began, None, None)

    tasks = [
        # sent while its parent runs, and by somebody else after a pause
        row("a1", None, "a1", 0.0, 10.0),
        row("a2", "a1", "a1", 4.0, 30.0),
        row("a3", "a2", "a1", 50.0, 57.0),
        row("beside", "a1", "a1", 1.0, 45.0),
        # a parent that had not ended yet when the last one did
        row("b1", None, "b1", 100.0, None),
        row("b2", "b1", "b1", 103.0, 110.0),
        # a child that began before its parent, by the clocks of their hosts
        row("c1", None, "c1", 10.0, 20.0),
        row("c2", "c1", "c1", 9.0, 22.0),
        # ends before their beginnings count as nothing
        row("d1", None, "d1", 10.0, 5.0),
        row("d2", "d1", "d1", 10.0, 12.0),
        # nobody knows when it began: neither of the one, nor of its chain
        row("e1", None, "e1", None, 7.0),
        row("f1", None, "f1", None, 7.0),
        row("f2", "f1", "f1", 8.0, 9.0),
    ]
    rows = lineage(spark.createDataFrame(tasks, COLUMNS)).collect()
    assert {
        row["root_id"]: (row["began"], row["duration"], row["critical_path"]) for row in rows
    } == {
        "a1": (0.0, 57.0, 37.0),
        "b1": (100.0, 10.0, 10.0),
        "c1": (9.0, 13.0, 13.0),
        "d1": (10.0, 2.0, 2.0),
        "e1": (None, None, None),
        "f1": (8.0, 1.0, None),
    }


def test_a_family_began_when_the_first_attempt_of_its_first_task_was_sent(
    spark: SparkSession, tmp_path: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    from umbel.pipeline.build import Options, build

    story = Story()
    client, one = story.node("gen1@c"), story.node("w1@a")
    first = client.tell("task-sent", "root", name="shop.add", retries=0)
    for retries in range(3):
        story.now += 100
        one.tell("task-received", "root", name="shop.add", root_id="root", retries=retries)
        one.tell("task-started", "root")
        if retries < 2:
            one.tell("task-sent", "root", root_id="root", retries=retries + 1, sync=True)
            one.tell("task-retried", "root")
    last = one.tell("task-succeeded", "root", runtime=0.1)
    log, tables = tmp_path / "log", tmp_path / "tables"
    LogWriter(log).add(story.events)
    build(Options(log=str(log), tables=str(tables), full=True), spark)
    (family,), (found,) = rows(tables, "lineage"), rows(tables, "tasks")
    took = last["timestamp"] - first["timestamp"]
    assert (family["began"], family["ended"]) == (first["timestamp"], last["timestamp"])
    assert (family["duration"], family["critical_path"]) == (took, took)
    assert round(found["queue_wait"], 3) == 100.3  # from the sending of the last attempt


def test_families_of_any_shape_are_those_of_a_plain_reading(spark: SparkSession) -> None:
    from umbel.pipeline.tables.lineage import lineage
    from umbel.pipeline.tables.tasks import depths

    dice = random.Random(9)
    parents = {f"t{n}": f"t{dice.randrange(400)}" for n in range(300) if dice.random() < 0.8}
    roots = {f"t{n}": f"r{n % 7}" for n in range(300)}
    parents = {
        uuid: parent
        if dice.random() < 0.1 or parent not in roots
        else f"t{(int(parent[1:]) // 7 * 7 + int(uuid[1:]) % 7) % 300}"
        for uuid, parent in parents.items()
    }
    spans: dict[str, tuple[int | None, int | None]] = {}
    for uuid in roots:
        began = dice.randrange(5_000)
        ended = began + dice.randrange(-5, 400)
        spans[uuid] = (
            None if dice.random() < 0.05 else began, None if dice.random() < 0.2 else ended,
        )  # fmt: skip

    def chain(uuid: str) -> list[str]:
        """From a task up, within its family; a task that comes again is the last."""
        found = [uuid]
        while (above := parents.get(found[-1])) is not None and roots.get(above) == roots[uuid]:
            found.append(above)
            if above in found[:-1]:
                break
        return found

    def depth(uuid: str) -> int | None:
        found = chain(uuid)
        if len(set(found)) < len(found):
            return None
        return len(found) - 1 + (found[-1] in parents)

    edges = [(uuid, parent, roots[uuid]) for uuid, parent in parents.items()]
    made = depths(spark.createDataFrame(edges, "uuid STRING, parent STRING, root STRING"))
    assert {row.uuid: row.depth for row in made.collect()} == {
        uuid: depth(uuid) for uuid in parents
    }

    tasks = [
        (uuid, parents.get(uuid), roots[uuid], 0, ended and float(ended), "SUCCESS", uuid,
         None if began is None else float(began), None, None)
        for uuid, (began, ended) in spans.items()
    ]  # fmt: skip
    longest = 0
    for row in lineage(spark.createDataFrame(tasks, COLUMNS)).collect():
        ends = [(spans[uuid][1] or -1, uuid) for uuid in roots if roots[uuid] == row["root_id"]]
        ended, last = max(ends)
        path = list(dict.fromkeys(chain(last)))
        assert row["critical_tasks"] == path[::-1]
        longest = max(longest, len(path))
        seconds: set[int] = set()
        for began, end in (spans[uuid] for uuid in path):
            seconds.update(range(began or 0, ended if end is None else end))
        is_known = all(spans[uuid][0] is not None for uuid in path)
        assert row["critical_path"] == (len(seconds) if is_known else None)
    assert longest > 3
