"""A recorder as a program of its own, to be killed: `python -m tests.recording JSON`.

And what is in a log, for tests that look at it.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.workers import Program
from umbel import Umbel
from umbel.cluster.event_rows import IDENTITY
from umbel.recorder.log import Log
from umbel.recorder.options import Options
from umbel.recorder.run import Recorder
from umbel.recorder.sources import source_for
from umbel.recorder.sources.streams import StreamSource

TAKES = "takes events from the broker"


def recorder_program(broker_url: str, log: Path, **options: Any) -> Program:
    """Start a recorder; `options` are those of `Options`, and `claim_after_s`."""
    told = json.dumps({"broker_url": broker_url, "log": str(log), **options})
    return Program([sys.executable, "-m", "tests.recording", told], cwd=log.parent)


def rows_of(log: Path, kind: str = "events") -> list[dict[str, Any]]:
    """Every row of the log, duplicates included."""
    return [
        row
        for path in sorted((log / kind).glob("day=*/[0-9]*.parquet"))
        for row in pq.ParquetFile(path).read().to_pylist()
    ]


def unique(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each event."""
    found = {tuple(row[name] for name in IDENTITY): row for row in rows}
    return list(found.values())


def numbers_of(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[int]]:
    """The sequence numbers of every incarnation, in order."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows:
        if row["inc"] is not None:
            found[row["hostname"], row["inc"]].append(row["seq"])
    return {key: sorted(numbers) for key, numbers in found.items()}


def main(told: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    app = Umbel("recorder", broker=told.pop("broker_url"), backend="disabled://")
    log = Log(told.pop("log")).open()
    claim_after_s = told.pop("claim_after_s", 1.5)
    options = Options(**told)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    source = source_for(app, options.recorder)
    if isinstance(source, StreamSource):
        source = StreamSource(app, options.recorder, claim_after_s=claim_after_s)
    Recorder(app, log, options, source=source).run(stop)
    app.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
