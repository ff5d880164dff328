"""Java's classes of Spark, loaded and verified once and kept in a file.

To start Spark and to plan its first queries Java loads many thousand classes, which is a good part
of a short build. Java can write what one process has loaded to an archive, and map that
into the memory of the next (application class data sharing). `make` writes one, by a small build of
made-up events; sessions use it from then on.

An archive fits one Java and one set of jars. Its name tells both, and Java ignores one that does
not fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from umbel import files
from umbel.cluster.event_rows import row
from umbel.pipeline import log as logs
from umbel.pipeline import schemas
from umbel.pipeline.connectors import spark_home
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.settings import java_path

TIMEOUT_S: Final = 600
KEPT_S: Final = 30 * 86_400
_TASKS: Final = 20


def archive_path() -> Path | None:
    """Where the archive for this Java and this Spark is, or would be."""
    found = java_path()
    if found is None:
        return None
    try:
        import pyspark

        java = found.resolve(strict=True)
        jars = spark_home() / "jars"
        times = java.stat().st_mtime_ns, jars.stat().st_mtime_ns
        seen = f"{java} {jars} {times} {pyspark.__version__}"
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except (ImportError, OSError, RuntimeError):
        return None
    return folder / "umbel" / f"spark-{hashlib.sha256(seen.encode()).hexdigest()[:16]}.jsa"


def java_option() -> str:
    """The option with which Java uses the archive; nothing where there is none."""
    path = archive_path()
    with contextlib.suppress(OSError):
        if path is not None and path.stat().st_uid == os.getuid():
            return f'"-XX:SharedArchiveFile={path}" -Xshare:auto'
    return ""


def make() -> Path:
    """Write the archive; raises `HistoryError` with the reason if it cannot."""
    path = archive_path()
    if path is None:
        raise HistoryError("there is no Java, or no home directory for the archive")
    try:
        files.make_folders(path.parent)
        with tempfile.TemporaryDirectory(prefix=".spark-", dir=path.parent) as folder:
            made = Path(folder, "archive.jsa")
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(made)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            if done.returncode or not made.exists():
                said = (done.stderr.strip().splitlines() or ["Java wrote no archive"])[-1]
                raise HistoryError(f"cannot prepare Spark: {said}")
            made.replace(path)
    except OSError as exc:
        raise HistoryError(f"cannot write {path}: {exc.strerror or exc}") from exc
    except subprocess.TimeoutExpired:
        raise HistoryError(f"cannot prepare Spark: not done after {TIMEOUT_S} s") from None
    _remove_old(path.parent)
    return path


def _remove_old(folder: Path) -> None:
    """Remove archives that may be of a Java or a Spark that is gone."""
    for path in folder.glob("spark-*.jsa"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink()


def _write(archive: str) -> None:
    """Build a small history, and let Java write what it has loaded meanwhile."""
    from pyspark import SparkContext

    from umbel.pipeline.build import Options, build
    from umbel.pipeline.session import SHORT_LIVED, session

    with tempfile.TemporaryDirectory(prefix="umbel-prepare-") as directory:
        log = Path(directory, "log")
        _write_log(log)
        spark = session(
            java_options=f'{SHORT_LIVED} "-XX:ArchiveClassesAtExit={archive}"', is_small=True
        )
        build(Options(log=str(log), tables=str(Path(directory, "tables"))), spark)
        # Larger builds have code generated, and write by Spark itself.
        spark.range(100).groupBy("id").count().write.parquet(str(Path(directory, "written")))
        spark.stop()
        gateway: Any = SparkContext._gateway
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(TIMEOUT_S)


def _write_log(log: Path) -> None:
    """The log of a worker that ran a few tasks."""
    folder = log / logs.EVENTS / "day=2026-01-01"
    folder.mkdir(parents=True)
    (log / logs.MARKER).write_text(json.dumps({"format": logs.FORMAT}))
    events: list[dict[str, Any]] = []

    def tell(kind: str, **fields: Any) -> None:
        number = len(events) + 1
        common = {"hostname": "w1@here", "pid": 1, "inc": 1, "seq": number, "clock": number}
        events.append({"type": kind, "timestamp": 1.7e9 + number, **common, **fields})

    tell("worker-online", freq=2.0)
    for number in range(_TASKS):
        task = {"uuid": str(uuid.UUID(int=number + 1)), "name": "prepare"}
        tell("task-received", **task, args="()", kwargs="{}", retries=0)
        tell("task-started", **task)
        if number % 4:
            tell("task-succeeded", **task, result="1", runtime=0.1)
        else:
            tell("task-failed", **task, exception="OSError()", traceback="")
    tell("task-revoked", uuid=str(uuid.UUID(int=_TASKS + 1)))
    tell("worker-heartbeat", freq=2.0, active=0, processed=_TASKS)
    rows = [row(event, event["timestamp"], "prepare") for event in events]
    table = pa.Table.from_pylist(rows, schemas.LOG_ARROW)
    pq.write_table(table, folder / "1700000000000-prepare-1.parquet", compression="zstd")


if __name__ == "__main__":
    try:
        _write(sys.argv[1])
    except HistoryError as error:
        raise SystemExit(str(error)) from None
