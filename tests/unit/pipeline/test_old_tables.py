"""Tables of an older version, which others could read."""

from __future__ import annotations

from pathlib import Path

from tests.modes import modes_of
from umbel.pipeline.places import Place
from umbel.pipeline.storage import tighten_old

VERSION = "v=20260101T000000000000-abcd"


def test_old_tables_are_closed_to_others_and_files_beside_them_are_left(tmp_path: Path) -> None:
    for name in (f"tasks/{VERSION}/part-0.parquet", "_work/manifest.json", "notes/mine.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "_tables.json").touch()
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    tighten_old(Place(str(tmp_path)))
    assert modes_of(tmp_path) == {
        "tasks": 0o700,
        f"tasks/{VERSION}": 0o700,
        f"tasks/{VERSION}/part-0.parquet": 0o600,
        "_work": 0o700,
        "_work/manifest.json": 0o600,
        "_tables.json": 0o600,
        "notes": 0o755,
        "notes/mine.txt": 0o644,
    }
