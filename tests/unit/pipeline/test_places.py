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


def test_the_summaries_that_are_alive_are_known_again(place: Place, tmp_path: Path) -> None:
    from umbel.pipeline.storage import Tiers

    log = Place(str(tmp_path / "log"))
    tiers = Tiers.open(place, log)
    tiers.batch, tiers.live = 7, [{"path": "_work/tiers/a", "level": 0}]
    tiers.save()
    place.write_json("_work/checkpoint-of-an-older-version/offsets", {})
    place.write_json("_work/tiers/a/part", {})
    place.write_json("_work/tiers/left-behind/part", {})
    again = Tiers.open(place, log)
    again.clean()
    assert (again.batch, again.live) == (7, tiers.live)
    assert place.names("_work/tiers") == ["a"]
    assert place.names("_work") == ["manifest.json", "tiers"]


def test_a_damaged_file_and_an_unknown_store_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(HistoryError, match="is damaged: it is no JSON"):
        Place(str(tmp_path)).read_json("x.json")
    with pytest.raises(HistoryError, match="cannot use nowhere://x"):
        Place("nowhere://x")
