"""What is stored of results: what peers store; rubbish is read as a failure that says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import compress_payload, decompress_payload

from umbel import Umbel
from umbel.app.results.codec import Codec
from umbel.exceptions import BackendError
from umbel.wire.limits import Refusal

Make = Callable[..., Codec]


@pytest.fixture
def make() -> Iterator[Make]:
    apps: list[Umbel] = []

    def made(**settings: Any) -> Codec:
        apps.append(Umbel("a", broker="memory://", set_as_current=False, **settings))
        return Codec(apps[-1])

    yield made
    for app in apps:
        app.close()


def stored(codec: Codec, result: Any = 1) -> bytes:
    return codec.stored("t", result, "SUCCESS", None, None)


def test_a_document_is_stored_as_a_peer_stores_it(make: Make) -> None:
    backend = Celery("peer", backend="cache+memory://", set_as_current=False).backend
    backend.store_result("9eab", 3, "SUCCESS")
    theirs = json.loads(backend.get(backend.get_key_for_task("9eab")))
    ours = json.loads(make().stored("9eab", 3, "SUCCESS", None, None))
    assert {**ours, "date_done": theirs["date_done"]} == theirs
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("compression", [None, "gzip", "bzip2"])
@pytest.mark.parametrize("serializer", ["json", "msgpack", "yaml"])
def test_a_document_survives_storage(make: Make, serializer: str, compression: str | None) -> None:
    codec = make(result_serializer=serializer, result_compression=compression)
    found = codec.read(stored(codec, {"a": [1]}), "t")
    assert (found["status"], found["result"], found["children"]) == ("SUCCESS", {"a": [1]}, None)


def test_compressed_documents_cross_between_us_and_peers(make: Make) -> None:
    codec = make(result_compression="gzip")
    theirs = json.loads(decompress_payload(stored(codec)))
    assert (theirs["task_id"], theirs["result"]) == ("t", 1)
    assert codec.loads(compress_payload(json.dumps(theirs), "lzma")) == theirs


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
def test_rubbish_is_read_as_a_failure(make: Make, data: bytes) -> None:
    found = make().read(data, "t")
    assert found["status"] == "FAILURE"
    assert isinstance(found["result"], BackendError)


def test_a_compressed_document_that_unfolds_too_far_is_refused(make: Make) -> None:
    data = stored(make(result_compression="gzip"), "x" * 10_000)
    with pytest.raises(Refusal) as caught:
        make(task_message_max_bytes=5_000).loads(data)
    assert caught.value.reason == "too-big"


def test_a_chord_part_is_what_peers_write(make: Make) -> None:
    codec = make()
    assert json.loads(codec.part("t1", "SUCCESS", {"a": 1})) == [1, "t1", "SUCCESS", {"a": 1}]
    assert codec.read_part(b'[1, "t1", "SUCCESS", 5]') == ("t1", "SUCCESS", 5)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"a":1}', b'[1,"t","S"]', b'[1,"t","S",3,4]'])
def test_a_malformed_chord_part_is_a_failed_one(make: Make, data: bytes) -> None:
    _, state, error = make().read_part(data)
    assert state == "FAILURE"
    assert isinstance(error, BackendError)
