"""One Spark for all tests of the pipeline: small, and started by the first that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.sizes import FULL, size

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Adaptive plans and generated code pay off on much data only: `make soak` has it, and the settings
# that users have.
SETTINGS = {"spark.driver.memory": "2g"}
FEW = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.streaming.numRecentProgressUpdates": "1",
}
if not FULL:
    SETTINGS |= FEW
# A Java process that lives for a minute does not earn back what optimised code costs.
JAVA_OPTIONS = "" if FULL else "-XX:TieredStopAtLevel=1"
# The first job compiles everything, on a machine that may be busy with other tests.
TIMEOUT_S = size(450, 3_600)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session; every test process has at most one."""
    from umbel.pipeline.session import session

    running = session("local[2]", name="umbel tests", settings=SETTINGS, java_options=JAVA_OPTIONS)
    yield running
    running.stop()


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`rows(tables, name)` gives the published rows of a table, read without Spark."""
    import json

    import pyarrow.parquet as pq

    def read(tables: Path, name: str) -> list[dict[str, Any]]:
        table = json.loads((tables / "_tables.json").read_text())["tables"][name]
        found: list[dict[str, Any]] = []
        for file in table["files"]:
            found += pq.ParquetFile(tables / file["path"]).read().to_pylist()
        for row in found if name == "timeline" else ():
            row["position"] = table["bases"][str(row["_range"])] + row["_number"]
        return [{key: one for key, one in row.items() if key[0] != "_"} for row in found]

    return read


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds in this process take every log for a large one: Spark writes the tables itself."""
    monkeypatch.setattr("umbel.pipeline.session.SMALL_BYTES", 0)


@pytest.fixture
def only_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out tables where they do not matter: each costs a job or two."""
    from umbel.pipeline.increment import Increment

    left_out = "_attempts _clock_audit _elections _lineage _queues _rates _revocations"
    for name in left_out.split():
        monkeypatch.setattr(Increment, name, lambda *_: None)
