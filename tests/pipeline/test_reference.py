"""Every table of a build is, row for row, what plain Python makes of the same log."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.pipeline.reference import Row, tables_of
from tests.pipeline.stories import Story
from tests.pipeline.worlds import (
    Event,
    LogWriter,
    as_table,
    busy,
    cluster,
    disturbed,
    hostile,
    recorded,
    stretched,
)
from tests.sizes import size

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Sums and differences of times: the order in which they are added up is nobody's business. All
# else is exact.
NEAR = {"uptime", "lost", "decided_after", "duration", "critical_path", "oldest"}
NEAR_S = 1e-6


# -- comparing ---------------------------------------------------------------------------------


def published(tables: Path) -> dict[str, list[Row]]:
    """The rows of all tables, as users read them."""
    from umbel.pipeline.reading import Tables

    made = {}
    with Tables(tables) as opened:
        for name in opened.names:
            answer = opened.query(name)
            made[name] = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    return made


def frozen(value: Any) -> Any:
    """A value that can be a key."""
    if isinstance(value, list):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return tuple(sorted((name, frozen(one)) for name, one in value.items()))
    return value


def counted(rows: Iterable[Row]) -> dict[Any, list[tuple[float, ...]]]:
    """Of each row what must be equal, with what must be near; so often as it is there."""
    made = defaultdict(list)
    for row in rows:
        exact = {
            name: "a number" if name in NEAR and value is not None else frozen(value)
            for name, value in row.items()
        }
        near = tuple(row[name] for name in sorted(NEAR & row.keys()) if row[name] is not None)
        made[tuple(sorted(exact.items()))].append(near)
    return {key: sorted(near) for key, near in made.items()}


def is_near(some: Sequence[tuple[float, ...]], others: Sequence[tuple[float, ...]]) -> bool:
    """Whether there are as many, each near to its other."""
    return len(some) == len(others) and all(
        abs(a - b) <= NEAR_S
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def wrong_rows(found: Iterable[Row], wanted: Iterable[Row]) -> dict[str, list[Any]]:
    """Rows that only one of them has: at most five of each."""
    have, want = counted(found), counted(wanted)
    wrong = [k for k in {**have, **want} if not is_near(have.get(k, []), want.get(k, []))]
    made = {
        "published": [(dict(key), have[key]) for key in wrong if key in have][:5],
        "wanted": [(dict(key), want[key]) for key in wrong if key in want][:5],
    }
    return {name: rows for name, rows in made.items() if rows}


def check(log: Path, tables: Path) -> None:
    """All tables are what the reference makes of the log."""
    found, wanted = published(tables), tables_of(log)
    assert found.keys() == {*wanted, "runs"}
    wrong = {name: wrong_rows(found[name], rows) for name, rows in wanted.items()}
    assert not any(wrong.values()), {name: rows for name, rows in wrong.items() if rows}


# -- worlds ------------------------------------------------------------------------------------


def story(since: float) -> list[Event]:
    """Handmade: what is rare, or lies exactly on a bound."""
    tale = Story()
    tale.now = since
    umbel, other = tale.node("w1@a"), tale.node("w2@a", inc=2)
    celery, client = tale.node("old@b", inc=None), tale.node("gen1@web", inc=9)
    for node in (umbel, other, celery):
        node.tell("worker-elect", id="declined", topic="task", action={}, stands=node is celery)
    celery.tell("worker-online", processed=0, freq=2.0)
    client.tell("task-sent", "only sent", name="a", eta=since - 30, queue="q", sync=True)
    client.tell("task-sent", "due later", name="a", eta=since + 1e6, queue="q")
    client.tell("task-sent", "no receipt", name="b", eta=since + 1, queue="q")
    umbel.tell("task-started", "no receipt", timestamp=since + 2.25)
    umbel.tell("task-succeeded", "no receipt", runtime=0.0)
    minute = since // 60 * 60 - 60
    client.tell("task-sent", "minute", name="b", queue="q", timestamp=minute)
    umbel.tell("task-received", "minute", name="b", timestamp=minute)
    umbel.tell("task-started", "minute", timestamp=minute + 60)
    umbel.tell("task-failed", "minute", timestamp=minute + 59, exception="TimeLimitExceeded(1)")
    client.tell("task-sent", "day", name="b", queue="q", timestamp=since - 90_000)
    other.tell("task-rejected", "day", requeue=False, timestamp=since)
    umbel.tell("task-revoked", "stopped twice", timestamp=since + 1)
    other.tell("task-revoked", "stopped twice", terminated=True, timestamp=since + 2)
    umbel.tell("worker-elected", id="nobody won")
    umbel.tell("worker-elect", id="nobody won", topic="rotate", stands=False)
    for number in range(3):
        call = {"name": "c", "parent_id": f"family {number - 1}", "root_id": "family 0"}
        client.tell("task-sent", f"family {number}", **call)
        other.run(f"family {number}")
        call = {"parent_id": f"circle {(number + 1) % 3}", "root_id": "circle 0"}
        other.tell("task-received", f"circle {number}", **call)
    for _ in range(2):
        umbel.tell("task-started", "started twice")
    umbel.skip(4_096)
    umbel.beat(lost=4_000)
    celery.tell("task-started", "again")
    celery.tell("worker-online", processed=0)
    celery.tell("task-started", "again")
    celery.tell("worker-offline")
    celery.beat()
    other.beat()
    return tale.events


def world(seed: int) -> list[pa.Table]:
    """Segments of a log that ends with the handmade story, while most workers are online.

    All of it is one log: a build takes much longer to plan than to read a thousand events.
    """
    calm = stretched(cluster(size(700, 8_000), seed), 200.0)
    all_kinds = busy(size(200, 1_500), seed)
    ends = max(event["timestamp"] for event in all_kinds)
    senseless = hostile(seed, size(700, 4_000), since=ends - 230)
    return [
        as_table(disturbed(calm, seed)),
        *recorded(disturbed(all_kinds, seed), seed),
        *recorded(senseless, seed + 1),
        *recorded(story(ends - 3), seed + 2),
    ]


@settings(
    max_examples=size(1, 40),
    phases=[Phase.explicit, Phase.generate],  # the wrong rows are named; a build takes seconds
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(seed=st.integers(0, 2**32))
def test_every_row_of_every_table_is_what_the_page_says(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    from umbel.pipeline.build import Options, build
    from umbel.pipeline.session import SMALL_BYTES

    dice = random.Random(seed)
    directory = tmp_path_factory.mktemp("world")
    log, tables = directory / "log", directory / "tables"
    writer, segments = LogWriter(log), world(seed)
    dice.shuffle(segments)
    parts = size(1, 1 + seed % 3)
    for number in range(parts):
        for segment in segments[number::parts]:
            writer.add_table(segment)
        with mock.patch("umbel.pipeline.session.SMALL_BYTES", dice.choice((0, SMALL_BYTES))):
            build(Options(log=str(log), tables=str(tables)), spark)
    check(log, tables)
