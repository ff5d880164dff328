"""Results: what the document of a task holds."""

from __future__ import annotations

from umbel.wire.results import extended_fields, meta_document

DONE = "2026-11-15T19:41:58.927141+00:00"


def test_the_time_is_kept_for_final_states_only():
    assert meta_document("t", "SUCCESS", 1, date_done=DONE)["date_done"] == DONE
    assert meta_document("t", "STARTED", {}, date_done=DONE)["date_done"] is None


def test_group_and_parent_are_there_when_they_have_a_value():
    meta = meta_document("t", "SUCCESS", 1, group_id="g", parent_id="p")
    assert (meta["group_id"], meta["parent_id"]) == ("g", "p")
    assert not {"group_id", "parent_id"} & meta_document("t", "SUCCESS", 1).keys()


def test_extended_fields_join_the_document():
    extended = extended_fields(
        name="w.add",
        args=[1],
        kwargs={},
        worker="w@h",
        retries=0,
        queue="celery",
        stamped_headers=["batch"],
        stamps={"batch": 7, "unnamed": 8},
    )
    meta = meta_document("t", "SUCCESS", 1, extended=extended)
    assert meta["name"] == "w.add"
    assert meta["stamped_headers"] == ["batch"]
    assert meta["batch"] == 7
    assert "unnamed" not in meta
