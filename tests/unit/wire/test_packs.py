"""Revocations and digests are small on the wire, come out as they went in, and never raise."""

from __future__ import annotations

import base64
import json
import random
import time
import uuid
import zlib
from typing import Any

import msgspec
import pytest

from umbel.cluster.revocations import Revocations
from umbel.wire.packs import (
    PACKED_MIN,
    UNPACKED_BYTES_MAX,
    packed_digest,
    packed_lives,
    unpacked_digest,
    unpacked_lives,
)

LIFE_S = 10_800.0


def lives(count: int, seed: int = 7) -> dict[str, list[float]]:
    dice, now = random.Random(seed), time.time()
    stamps = [now - dice.uniform(0, 9_000) for _ in range(count)]
    return {str(uuid.UUID(int=dice.getrandbits(128))): [at, at + LIFE_S] for at in stamps}


def pack_of(content: Any) -> dict[str, str]:
    data = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    return {"packed": base64.b64encode(zlib.compress(data)).decode()}


@pytest.mark.parametrize("count", [0, 1, PACKED_MIN - 1])
def test_few_stay_as_they_are(count: int) -> None:
    told = {"tasks": lives(count), "headers": {}}
    assert packed_lives(told) is told
    assert unpacked_lives(told) is told


def test_many_come_out_as_they_went_in_to_the_last_bit() -> None:
    odd = {
        "": [0.0, 1.5], "no uuid": [3.25, 1e300], "ä" * 900: [1.0, 1.0 + LIFE_S],
        str(uuid.uuid4()).upper(): [5.0, 6.0], "0" * 36: [7.0, 8.0],
        "----00000000000000000000000000000000": [9.0, 10.0], str(uuid.uuid4()): [11.0, 12.0],
    }  # fmt: skip
    told = {"tasks": {**lives(5_000), **odd}, "headers": {'["team","red"]': [1.0, 2.0]}}
    sent = json.loads(json.dumps(packed_lives(told)))
    assert sent.keys() == {"packed"}
    assert unpacked_lives(sent) == told


def test_ten_thousand_revocations_take_less_than_thirty_bytes_each() -> None:
    text = packed_lives({"tasks": lives(10_000), "headers": {}})["packed"]
    assert len(text) < 30 * 10_000
    assert len(text) < len(json.dumps(lives(10_000))) / 2.5


def test_a_digest_takes_less_than_half_and_comes_out_as_it_went_in() -> None:
    revocations = Revocations(time.time)
    assert packed_digest(revocations.digest()) == revocations.digest()
    revocations.revoke(lives(2_000), time.time())
    digest = revocations.digest()
    sent = packed_digest(digest)
    assert len(json.dumps(sent)) < len(json.dumps(digest)) / 1.9
    assert unpacked_digest(sent) == digest


@pytest.mark.parametrize(
    "pack",
    [
        {"packed": None}, {"packed": 7}, {"packed": ""}, {"packed": "%%%"}, {"packed": "AAAA"},
        {"packed": "\ud800"}, {"packed": base64.b64encode(zlib.compress(b"x" * 99)[:-4]).decode()},
        pack_of(b""), pack_of(None), pack_of([]), pack_of({"tasks": 7}), pack_of({"tasks": [1]}),
        pack_of({"tasks": [b"short", [], b"", 0.0, {}]}),
        pack_of({"tasks": [b"", ["a"], b"", 0.0, {}]}),
        pack_of({"tasks": [b"", [], b"1234567", 0.0, {}]}),
        pack_of({"tasks": [b"", [7], b"12345678", 0.0, {}]}),
        pack_of({"tasks": [b"x" * 16, [], b"12345678", "long", {}]}),
        pack_of({"tasks": [b"x" * 16, [], b"12345678", 0.0, {"a": 1}]}),
        pack_of(b"\x81" * 100_000),
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_nothing(pack: Any) -> None:
    assert unpacked_lives(pack) is None
    assert unpacked_digest(pack) == {}


def test_a_pack_that_would_fill_the_memory_is_not_unpacked() -> None:
    bomb = pack_of(b"\0" * (UNPACKED_BYTES_MAX + 1))
    assert len(bomb["packed"]) < UNPACKED_BYTES_MAX / 500
    assert unpacked_lives(bomb) is None


@pytest.mark.parametrize("value", [None, 7, "text", [], {}, {"packed": "AAAA", "more": 1}])
def test_what_is_no_pack_is_handed_on(value: Any) -> None:
    assert unpacked_lives(value) is value
    assert unpacked_digest(value) is value


def test_places_that_are_not_there_and_times_that_are_none_are_left_to_who_merges() -> None:
    pack = pack_of({"tasks": [b"x" * 16, [], b"\xff" * 8, 1.0, {99: 5.0, 0: 6.0}]})
    found = unpacked_lives(pack)
    revocations = Revocations(time.time)
    assert revocations.merge(found, time.time()) == []
    assert revocations.counts["bad-life"] == 1
