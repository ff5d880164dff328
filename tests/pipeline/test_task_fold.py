"""Spark folds the events of tasks into what Python's fold makes of them, whatever they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.pipeline.worlds import (
    Event,
    LogWriter,
    as_received,
    differences,
    folded,
    small_world,
)
from umbel.cluster.task_states import read
from umbel.cluster.task_summary import Summary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Each world is one job of Spark: few worlds, many tasks in each.
WORLDS = int(os.environ.get("UMBEL_FOLD_WORLDS", "2"))
TASKS = int(os.environ.get("UMBEL_FOLD_TASKS", "1500"))


def prepared(spark: SparkSession, directory: Path, events: list[Event]) -> DataFrame:
    """The events of a log of one segment."""
    from umbel.pipeline import log
    from umbel.pipeline.events import prepare

    LogWriter(directory).add(events)
    place = log.open_log(str(directory))
    return prepare(log.read(spark, place, log.look(place, log.Coverage()).coverage.paths))


@settings(
    max_examples=WORLDS,
    phases=[Phase.explicit, Phase.generate],  # tasks are apart: the wrong one is small already
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32))
def test_tasks_of_any_world_are_those_of_the_fold_however_often_events_come(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    from umbel.pipeline.task_fold import summarise, tasks

    world = small_world(seed, TASKS)
    events = prepared(spark, tmp_path_factory.mktemp("log"), world)
    again = events.where("hash(tie, timestamp) % 3 != 0 OR hash(tie) % 5 = 0")
    found = tasks(summarise(again.union(events))).toArrow().to_pylist()
    wrong = differences(found, folded(world))
    assert not wrong, [
        (one, [event for event in world if event.get("uuid") == one[0]]) for one in wrong[:1]
    ]
    live: dict[str, Summary] = {}
    for event in map(as_received, world):
        if event["type"].startswith("task-"):
            live.setdefault(event["uuid"], Summary(event["uuid"])).add(read(event))
    assert {one["uuid"]: one["queued"] for one in found} == {
        uuid: summary.queued for uuid, summary in live.items()
    }


@pytest.mark.usefixtures("large")
def test_no_python_runs_on_the_way_of_an_event(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbel.pipeline.build import Options, build
    from umbel.pipeline.storage import Publication

    plans: dict[str, str] = {}
    write = Publication._write

    def noting(self: Any, rows: DataFrame, folder: str, by: str = "") -> Any:
        plans[folder] = rows._jdf.queryExecution().executedPlan().toString()
        return write(self, rows, folder, by)

    monkeypatch.setattr(Publication, "_write", noting)
    writer = LogWriter(tmp_path / "log")
    for seed in (1, 2):  # everything, and an increment
        writer.add(small_world(seed, 5))
        build(Options(log=str(tmp_path / "log"), tables=str(tmp_path / "tables")), spark)
    assert len(plans) > 40
    assert sum("Scan parquet" in plan for plan in plans.values()) > 40
    for name, plan in plans.items():
        for word in ("Python", "ArrowEval", "MapInArrow", "MapInPandas", "FlatMapGroups"):
            assert word not in plan, (name, word)
