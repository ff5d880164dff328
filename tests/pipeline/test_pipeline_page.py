"""docs/pipeline.md has the columns that the tables have, with their types and in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Spark reads the schemas, which are SQL.
pytestmark = pytest.mark.usefixtures("spark")

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def told() -> dict[str, list[tuple[str, str]]]:
    """Columns and types by table, as the page has them."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            name = line.removeprefix("## ")
        elif (cells := re.match(r"\| (\w+) \| (\w+) \|", line)) and cells[1] != "column":
            found.setdefault(name, []).append((cells[1], cells[2]))
    return found


def test_the_page_tells_every_column_of_every_table() -> None:
    from umbel.pipeline.build import RUN_KINDS
    from umbel.pipeline.schemas import schema
    from umbel.pipeline.tables import SCHEMAS
    from umbel.pipeline.tables.shapes import fields
    from umbel.pipeline.tables.tasks import SCHEMA as TASKS

    shapes = {name: fields(text) for name, text in SCHEMAS.items()}
    wanted = {
        table: [(one.name, one.dataType.simpleString().partition("<")[0]) for one in shape]
        for table, shape in {**shapes, "tasks": TASKS, "runs": schema(RUN_KINDS)}.items()
    }
    as_page = {
        table: [(name, "list" if kind == "array" else kind) for name, kind in columns]
        for table, columns in wanted.items()
    }
    assert told() == as_page


def test_each_module_tells_its_columns() -> None:
    from umbel.pipeline import tables
    from umbel.pipeline.tables.rates import PERIODS
    from umbel.pipeline.tables.shapes import fields

    for name, schema in tables.SCHEMAS.items():
        text = getattr(tables, name.partition("_")[0] if name in PERIODS else name).__doc__
        silent = [one.name for one in fields(schema) if not re.search(rf"\b{one.name}\b", text)]
        assert not silent, f"{name} does not tell of {silent}"
