"""Results: the documents of peers are read, and ours are theirs."""

from __future__ import annotations

import json

import pytest
from celery import Celery
from celery.backends.base import compress_payload, decompress_payload

from umbel.wire.limits import Limits, Refusal
from umbel.wire.results import (
    extended_fields,
    member,
    meta_document,
    read_member,
    read_meta,
    write_meta,
)

DONE = "2026-11-15T19:41:58.927141+00:00"


def test_a_document_has_exactly_the_keys_of_a_peers_in_their_order():
    peer = Celery("peer", broker="memory://", backend="cache+memory://", set_as_current=False)
    backend = peer.backend
    backend.store_result("9eab", 3, "SUCCESS")
    theirs = json.loads(backend.get(backend.get_key_for_task("9eab")))
    ours = meta_document("9eab", "SUCCESS", 3, date_done=theirs["date_done"])
    assert json.loads(write_meta(ours)) == theirs
    assert list(ours) == list(theirs)


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


@pytest.mark.parametrize("compression", [None, "gzip", "bzip2"])
@pytest.mark.parametrize("serializer", ["json", "msgpack", "yaml"])
def test_a_document_survives_storage(serializer, compression):
    meta = meta_document("t", "SUCCESS", {"a": [1]}, children=[], date_done=DONE)
    stored = write_meta(meta, serializer=serializer, compression=compression)
    assert read_meta(stored, serializer=serializer) == meta


def test_compressed_documents_cross_between_us_and_peers():
    meta = meta_document("t", "SUCCESS", 1)
    assert json.loads(decompress_payload(write_meta(meta, compression="gzip"))) == meta
    assert read_meta(compress_payload(json.dumps(meta), "lzma")) == meta


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"status": 5}',
        b"\xff",
        b"\0celery-compressed\0",
        b"\0celery-compressed\0application/x-gzip",
        b"\0celery-compressed\0application/x-gzip\0rubbish",
        b"\0celery-compressed\0\xff\0rubbish",
        b"\0celery-compressed\0nosuch\0rubbish",
    ],
    ids=repr,
)
def test_rubbish_is_refused(data):
    with pytest.raises(Refusal):
        read_meta(data)


def test_a_compressed_document_that_unfolds_too_far_is_refused():
    stored = write_meta(meta_document("t", "SUCCESS", "x" * 10_000), compression="gzip")
    with pytest.raises(Refusal) as caught:
        read_meta(stored, Limits(body_bytes=5000))
    assert caught.value.reason == "too-big"


def test_a_chord_part_is_what_peers_write():
    assert json.loads(member("t1", "SUCCESS", {"a": 1})) == [1, "t1", "SUCCESS", {"a": 1}]
    assert read_member(json.dumps([1, "t1", "SUCCESS", 5])) == ("t1", "SUCCESS", 5)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"a":1}', b'[1,2,"SUCCESS",3]', b'[1,"t",null,3]', b'[1,"t","S",3,4]']
)
def test_a_malformed_chord_part_is_refused(data):
    with pytest.raises(Refusal):
        read_member(data)
