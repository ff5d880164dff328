"""Whether Spark's executors can reach the log and the tables, found out before anything is read.

On a cluster the executors read the log and write the tables, so both must be on something that all
machines share. Executors that look at a disk of their own would find an empty log, or write tables
that nobody sees. Each of them is made to read a file that the driver has just written, from both
places, and to write one that the driver has to find.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from umbel.pipeline.errors import HistoryError
from umbel.pipeline.log import MARKER
from umbel.pipeline.places import Place
from umbel.pipeline.session import first_line, is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORK: Final = "_work"
# Tries per core: Spark decides which executor gets which of them.
PER_CORE: Final = 4


def probe(spark: SparkSession, log: Place, tables: Place) -> None:
    """Raises `HistoryError` unless all executors see what the driver sees."""
    if is_local(spark.sparkContext.master or ""):
        return
    token = secrets.token_hex(8)
    folder = f"{WORK}/probe-{token}"
    tables.write_json(f"{folder}/token.json", {"token": token})
    count = max(2, spark.sparkContext.defaultParallelism) * PER_CORE
    try:
        for place, path in ((tables, f"{folder}/token.json"), (log, MARKER)):
            _read_everywhere(spark, place, path, count)
        written = spark.range(0, count, 1, numPartitions=count)  # a file each, without a shuffle
        written.write.mode("overwrite").parquet(tables.at(f"{folder}/written"))
        found = [name for name in tables.names(f"{folder}/written") if name.endswith(".parquet")]
        if len(found) < count:
            raise HistoryError(_not_shared(tables))
    finally:
        tables.remove(folder)


def _read_everywhere(spark: SparkSession, place: Place, path: str, count: int) -> None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    names = ("spark.sql.files.maxPartitionBytes", "spark.sql.files.openCostInBytes")
    before = {name: spark.conf.get(name) for name in names}
    try:
        for name in names:  # a file to a task
            spark.conf.set(name, "1024")
        spark.read.text([place.at(path)] * count).count()
    except (PySparkException, Py4JError) as exc:
        if "FileNotFound" in str(exc) or "does not exist" in str(exc):
            raise HistoryError(_not_shared(place)) from exc
        raise HistoryError(f"executors cannot read {place.shown}: {first_line(exc)}") from exc
    finally:
        for name, value in before.items():
            spark.conf.set(name, str(value))


def _not_shared(place: Place) -> str:
    return (
        f"not all of Spark's executors see {place.shown}: put it where every machine of the "
        "cluster reaches it under the same name (a shared file system, or an object store)"
    )
