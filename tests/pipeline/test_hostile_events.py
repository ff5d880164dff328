"""No event that the wire lets through fails a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.stories import Story
from tests.pipeline.worlds import LogWriter, small_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAR = 2**53 - 1
HUGE = 2**63 - 1


@pytest.mark.usefixtures("large")
def test_extreme_and_odd_values_fail_no_table_and_no_increment(
    spark: SparkSession, tmp_path: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    from umbel.pipeline.build import Options, build
    from umbel.pipeline.tables import SCHEMAS

    story = Story()
    node, celery = story.node("w1@a"), story.node("old@b", inc=None)
    node.beat(lost=-HUGE, processed=HUGE, active=-HUGE, freq=1e308, timestamp=float(-FAR))
    node.beat(lost=HUGE, processed=-HUGE, freq=-1.0, timestamp=float(FAR), clock=0)
    node.beat(seq=FAR, clock=FAR, lost=0, sw_ident=7, freq="often")
    for stamp in (float(FAR), float(-FAR)):
        node.tell("task-sent", "t'\\", timestamp=stamp, name="'; --", parent_id="t'\\")
        node.tell("task-received", "t'\\", timestamp=stamp, name="{x}", root_id="")
        node.tell("task-started", "t'\\", timestamp=stamp, clock=FAR)
        node.tell("task-succeeded", "t'\\", timestamp=-stamp, runtime=1e300)
    for odd in ({}, {"ids": 7}, {"ids": [None, [], "x" * 5_000]}, {"ids": "abc", "stamp": [1]}):
        node.tell("worker-revocation", **odd)
        celery.tell("worker-elect", id="e", topic="task", action=odd, clock=None)
        celery.tell("worker-elected", id=odd.get("ids"), winner=odd.get("ids"))
    node.tell("worker-elect", id="e2", topic="task", action={"options": {"task_id": {"a": 1}}})
    events = [*story.events, *small_world(3, 40)]
    writer, whole, parts = LogWriter(tmp_path / "log"), tmp_path / "whole", tmp_path / "parts"
    for half in (events[::2], events[1::2]):
        writer.add(half)
        build(Options(log=str(writer.directory), tables=str(parts)), spark)
    build(Options(log=str(writer.directory), tables=str(whole), full=True), spark)
    for name in ("tasks", *SCHEMAS):
        found = [sorted(map(repr, rows(place, name))) for place in (whole, parts)]
        assert found[0] == found[1], name
        assert found[0], name
