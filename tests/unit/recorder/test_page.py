"""docs/recording.md names the columns that there are."""

from __future__ import annotations

import re

from tests.workers import ROOT
from umbel.cluster.event_rows import COLUMNS
from umbel.recorder.rows import QUARANTINE_COLUMNS, REQUIRED


def test_the_page_has_every_column_with_its_kind_in_its_order() -> None:
    page = (ROOT / "docs" / "recording.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    assert [(name, kind) for name, kind, _ in found] == [
        *COLUMNS.items(),
        *QUARANTINE_COLUMNS.items(),
    ]
    assert {name for name, _, text in found if "never null" in text} == REQUIRED
