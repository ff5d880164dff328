"""The tables as readers see them, also through Delta Lake, and whether two builds agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

Rows = Callable[[Path, str], list[dict[str, Any]]]


def published(tables: Path) -> dict[str, dict[str, Any]]:
    """The tables that readers see, by name, as the index has them."""
    index = json.loads((tables / "_tables.json").read_text())
    return {name: entry for name, entry in index["tables"].items() if not name.startswith("_")}


def delta_paths(tables: Path, name: str, version: int | None = None) -> set[str]:
    """The files of a table, below the directory of all tables."""
    table = DeltaTable(tables / name, version=version)
    return {f"{name}/{path}" for path in pa.table(table.get_add_actions())["path"].to_pylist()}


def assert_delta_is_published(tables: Path) -> None:
    """The newest version of every table is the published one, and has the published files."""
    for name, entry in published(tables).items():
        table = DeltaTable(tables / name)
        assert table.version() == entry["version"], name
        assert delta_paths(tables, name) == {one["path"] for one in entry["files"]}, name
        counts = pa.table(table.get_add_actions())["num_records"].to_pylist()
        assert sum(counts) == entry["rows"], name


def comparable(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of a table, in an order of their own."""
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in rows)


def assert_same_tables(tables: Path, wanted: Path, rows: Rows) -> None:
    """All tables that readers see have the same rows."""
    for name in sorted(published(wanted).keys() - {"runs"}):
        found, told = comparable(rows(tables, name)), comparable(rows(wanted, name))
        extra, missing = sorted(set(found) - set(told))[:3], sorted(set(told) - set(found))[:3]
        assert found == told, f"{name}: {len(found)} rows, wanted {len(told)}: {extra} {missing}"
    assert_delta_is_published(tables)
