"""A log as a test sees it: every segment under a final name, read to its last row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from umbel.cluster.event_rows import IDENTITY


def segments(log: Path, kind: str = "events") -> list[Path]:
    return sorted((log / kind).glob("day=*/[!._]*.parquet"))


def rows(log: Path, kind: str = "events") -> list[dict[str, Any]]:
    """All rows; fails when a segment is not whole, or says something else of itself."""
    return [row for path in segments(log, kind) for row in rows_of(path)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of one segment."""
    file = pq.ParquetFile(path)
    found: list[dict[str, Any]] = file.read().to_pylist()
    manifest = json.loads(file.metadata.metadata[b"umbel"])
    assert manifest["rows"] == len(found), path
    return found


def identities(log: Path) -> set[tuple[Any, ...]]:
    return {tuple(row[name] for name in IDENTITY) for row in rows(log)}


def event(number: int, **fields: Any) -> dict[str, Any]:
    """A heartbeat, told from others by its number."""
    return {
        "type": "worker-heartbeat",
        "hostname": "w1@a",
        "timestamp": 1_700_000_000.0 + number,
        "pid": 7,
        "clock": number,
        "inc": 77,
        "seq": number,
        **fields,
    }
