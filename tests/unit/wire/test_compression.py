"""Compression: the same as peers', and never more output than allowed."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib

import brotli
import pytest
from kombu import compression as peers

from umbel.exceptions import ImproperlyConfigured
from umbel.wire.compression import compress, compression_type, decompress
from umbel.wire.limits import Refusal

METHODS = ["gzip", "zlib", "bzip2", "lzma", "brotli"]
BOMB = bytes(10_000_000)


def zstd_is_installed() -> bool:
    try:
        compression_type("zstd")
    except ImproperlyConfigured:
        return False
    return True


@pytest.mark.parametrize("method", METHODS)
def test_peers_read_what_we_compress_and_we_what_they_do(method):
    body = b"some body" * 100
    packed, content_type = compress(body, method)
    assert peers.decompress(packed, content_type) == body
    theirs, their_type = peers.compress(body, method)
    assert their_type == content_type
    assert decompress(theirs, their_type, 1000) == body
    assert decompress(theirs, method, 1000) == body
    assert compress(body, content_type) == (packed, content_type)


def test_gzip_is_a_zlib_stream_but_real_gzip_is_read_too():
    assert compress(b"x", "gzip")[0][:2] == b"\x78\x9c"
    assert decompress(gzip.compress(b"real"), "application/x-gzip", 10) == b"real"


@pytest.mark.parametrize(
    ("method", "packed"),
    [
        ("gzip", zlib.compress(BOMB)),
        ("bzip2", bz2.compress(BOMB)),
        ("lzma", lzma.compress(BOMB)),
        ("brotli", brotli.compress(BOMB)),
        ("bzip2", bz2.compress(BOMB[:60]) + bz2.compress(BOMB[:60])),
        ("gzip", zlib.compress(BOMB[:101])),
    ],
    ids=range(6),
)
def test_a_bomb_is_refused_as_too_big(method, packed):
    with pytest.raises(Refusal) as caught:
        decompress(packed, method, 100)
    assert caught.value.reason == "too-big"


@pytest.mark.parametrize("method", METHODS)
def test_exactly_the_allowed_size_is_fine(method):
    packed, content_type = compress(bytes(1000), method)
    assert decompress(packed, content_type, 1000) == bytes(1000)
    with pytest.raises(Refusal, match="999"):
        decompress(packed, content_type, 999)


@pytest.mark.parametrize("method", METHODS)
def test_broken_or_cut_data_is_bad_compression(method):
    packed, _ = compress(bytes(range(256)) * 4, method)
    for broken in (b"", b"rubbish", packed[:-3], packed[: len(packed) // 2], packed + b"more"):
        with pytest.raises(Refusal) as caught:
            decompress(broken, method, 10_000)
        assert caught.value.reason == "bad-compression"


@pytest.mark.parametrize("method", ["nosuch", "", None, 5, ["gzip"]])
def test_an_unknown_method_in_a_message_is_bad_compression(method):
    with pytest.raises(Refusal, match="unknown compression") as caught:
        decompress(b"x", method, 100)
    assert caught.value.reason == "bad-compression"


def test_an_unknown_method_in_a_setting_is_refused_with_the_choices():
    with pytest.raises(ImproperlyConfigured, match=r"'gzpi': choose one of gzip"):
        compress(b"x", "gzpi")


@pytest.mark.skipif(zstd_is_installed(), reason="zstd is installed")
def test_a_method_without_its_package_is_refused_with_the_way_out():
    with pytest.raises(ImproperlyConfigured, match="install"):
        compress(b"x", "zstd")
    with pytest.raises(Refusal, match="install") as caught:
        decompress(b"x", "application/zstd", 100)
    assert caught.value.reason == "bad-compression"


def test_several_streams_are_read_but_not_without_end():
    assert decompress(bz2.compress(b"a") * 3, "bzip2", 10) == b"aaa"
    with pytest.raises(Refusal, match="streams"):
        decompress(bz2.compress(b"") * 1000, "bzip2", 100_000)
