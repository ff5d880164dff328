"""Places behind fsspec keep the small files of a build as local ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place


@pytest.fixture(params=["local", "store"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "tables"))
    return Place(f"memory://{tmp_path_factory.mktemp('store').name}/tables")


def test_a_file_is_there_whole_and_can_be_replaced_and_removed(place: Place) -> None:
    place.make()
    assert place.names() == []
    assert place.read_json("_work/manifest.json") is None
    for number in (1, 2):
        place.write_json("_work/manifest.json", {"batch": number})
        assert place.read_json("_work/manifest.json") == {"batch": number}
    assert (place.names(), place.names("_work")) == (["_work"], ["manifest.json"])
    assert place.size("_work/manifest.json") > 0
    place.flush("_work")
    place.remove("_work")
    place.remove("_work")  # what is gone is gone
    assert place.read_json("_work/manifest.json") is None
    assert place.names("_work") == []


def test_paths_are_given_to_spark_under_the_scheme_of_the_place(place: Place) -> None:
    scheme = "file" if place.is_local else "memory"
    assert place.at("tasks").startswith(f"{scheme}://")
    assert place.at("tasks").endswith("/tables/tasks")


def test_what_killed_and_old_runs_left_is_removed_and_what_is_read_stays(place: Place) -> None:
    from umbel.pipeline.storage import clean

    one, two = "20260101T000000000000-abcd", "20260102T000000000000-abcd"
    index = {"tables": {"tasks": {"files": [{"path": f"tasks/r={one}.1/part=5/a.parquet"}]}}}
    place.write_json("_tables.json", {"format": 2, "run": one, "kept": [one], **index})
    place.write_json(f"_work/index-{one}.json", index)
    place.write_json(f"_work/state-{one}.json", {})
    place.write_json(f"_work/state-{two}.json", {})
    place.write_json(f"_work/events-{two}/part-0", {})
    place.write_json("_work/manifest.json", {})  # of the version before
    place.write_json("_work/tiers/a/part", {})
    place.write_json(f"tasks/v={one}/part-0.parquet", {})
    place.write_json(f"tasks/r={one}.1/part=5/a.parquet", {})
    place.write_json(f"tasks/r={one}.1/part=6/a.parquet", {})
    place.write_json(f"tasks/r={two}.1/part=5/a.parquet", {})
    place.write_json(f"_work/facts/r={two}.1/part=5/a.parquet", {})
    place.write_json("notes/mine.txt", {})
    place.write_json("_tables.json", {"format": 1, "run": one, "tables": {}})
    clean(place)
    assert len(place.names("tasks")) == 3, "tables of an older version stay until there are others"
    place.write_json("_tables.json", {"format": 2, "run": one, "kept": [one], **index})
    clean(place)
    assert place.names("_work") == sorted(
        name
        for name in ("facts", f"index-{one}.json", f"state-{one}.json")
        if place.is_local or name != "facts"  # an object store has no empty folders
    )
    assert place.names("tasks") == [f"r={one}.1"]
    assert place.names(f"tasks/r={one}.1") == ["part=5"]
    assert place.names("notes") == ["mine.txt"]


def test_a_damaged_file_and_an_unknown_store_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(HistoryError, match="is damaged: it is no JSON"):
        Place(str(tmp_path)).read_json("x.json")
    with pytest.raises(HistoryError, match="cannot use nowhere://x"):
        Place("nowhere://x")
