"""Compressed bodies: the methods of the `compression` header.

Each method has a short name for settings and a content type for the header. The method that
peers call gzip is a zlib stream; real gzip is read too.

Decompression is incremental and never produces more than the caller allows, so a small body
cannot unfold into all the memory there is. Brotli and Zstandard exist when their packages do;
a body that uses a method we lack is refused by name.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final, Protocol

from umbel.exceptions import ImproperlyConfigured
from umbel.wire.limits import BAD_COMPRESSION, TOO_BIG, Refusal
from umbel.wire.reprs import safe_repr

GZIP: Final = "application/x-gzip"
BZIP2: Final = "application/x-bz2"
LZMA: Final = "application/x-lzma"
BROTLI: Final = "application/x-brotli"
ZSTD: Final = "application/zstd"

CONTENT_TYPES: Final = {
    "gzip": GZIP,
    "zlib": GZIP,
    "bzip2": BZIP2,
    "bzip": BZIP2,
    "lzma": LZMA,
    "xz": LZMA,
    "brotli": BROTLI,
    "zstd": ZSTD,
    "zstandard": ZSTD,
}
_KNOWN: Final = frozenset(CONTENT_TYPES.values())
_PACKAGES: Final = {BROTLI: "brotli (1.2 or newer)", ZSTD: "backports.zstd"}
_CHOICES: Final = "gzip, bzip2, lzma, brotli, zstd"

_ZLIB_OR_GZIP: Final = zlib.MAX_WBITS | 32
_LZMA_MEMORY_BYTES: Final = 128 * 2**20  # the strongest preset needs 65 MiB to read
_STREAMS_MAX: Final = 16  # peers send one; each further one copies the rest of the body


def compress(body: bytes, method: str) -> tuple[bytes, str]:
    """`body` compressed, and the content type that the header carries."""
    content_type = compression_type(method)
    return _COMPRESSORS[content_type](body), content_type


def compression_type(method: str) -> str:
    """The content type of a method given by name or content type, if it can be used here."""
    content_type = CONTENT_TYPES.get(method, method)
    if content_type not in _KNOWN:
        raise ImproperlyConfigured(
            f"unknown compression {safe_repr(method, 80)}: choose one of {_CHOICES}"
        )
    if content_type in _PACKAGES and _package(content_type) is None:
        raise ImproperlyConfigured(
            f"compression {method!r} needs the package {_PACKAGES[content_type]}:"
            " install it, or choose one of gzip, bzip2, lzma"
        )
    return content_type


def decompress(body: bytes, method: object, max_bytes: int) -> bytes:
    """`body` unfolded; refused as soon as it would exceed `max_bytes` or is not what it claims."""
    content_type = CONTENT_TYPES.get(method, method) if isinstance(method, str) else ""
    if content_type not in _KNOWN:
        raise Refusal(
            BAD_COMPRESSION,
            f"unknown compression {safe_repr(method, 80)}: send one of {_CHOICES}",
        )
    try:
        data = _DECOMPRESSORS[content_type](bytes(body), max_bytes)
    except Refusal:
        raise
    except Exception as exc:  # noqa: BLE001 - each library has its own error classes
        raise _bad(content_type, str(exc)) from None
    return data


class _Stream(Protocol):
    """What the decompressors of bz2, lzma and zstd have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


def _read_streams(
    start: Callable[[], _Stream], content_type: str, body: bytes, max_bytes: int
) -> bytes:
    """Everything in `body`, which may be several streams after each other."""
    parts: list[bytes] = []
    left = max_bytes
    rest = body
    while True:
        stream = start()
        # One byte more than allowed is asked for: getting it means that there is too much.
        part = stream.decompress(rest, left + 1)
        if len(part) > left:
            raise _too_big(max_bytes)
        if not stream.eof:
            raise _bad(content_type, "the data ends too early")
        parts.append(part)
        left -= len(part)
        rest = stream.unused_data.lstrip(b"\0")  # xz pads streams with zero bytes
        if not rest:
            return b"".join(parts)
        if len(parts) >= _STREAMS_MAX:
            raise _bad(content_type, f"more than {_STREAMS_MAX} streams in one body")


def _read_zlib(body: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj(_ZLIB_OR_GZIP)
    data = stream.decompress(body, max_bytes + 1)
    if len(data) > max_bytes:
        raise _too_big(max_bytes)
    if not stream.eof:
        raise _bad(GZIP, "the data ends too early")
    if stream.unused_data:
        raise _bad(GZIP, "there is something after its end")
    return data


def _read_bzip2(body: bytes, max_bytes: int) -> bytes:
    return _read_streams(bz2.BZ2Decompressor, BZIP2, body, max_bytes)


def _read_lzma(body: bytes, max_bytes: int) -> bytes:
    def start() -> _Stream:
        return lzma.LZMADecompressor(memlimit=_LZMA_MEMORY_BYTES)

    return _read_streams(start, LZMA, body, max_bytes)


def _read_brotli(body: bytes, max_bytes: int) -> bytes:
    stream = _installed(BROTLI).Decompressor()
    parts: list[bytes] = []
    left = max_bytes
    data = body
    while True:
        part: bytes = stream.process(data, output_buffer_limit=min(left + 1, 2**24))
        data = b""
        left -= len(part)
        if left < 0:
            raise _too_big(max_bytes)
        parts.append(part)
        if stream.is_finished():
            return b"".join(parts)
        if not part:
            raise _bad(BROTLI, "the data ends too early")


def _read_zstd(body: bytes, max_bytes: int) -> bytes:
    return _read_streams(_installed(ZSTD).ZstdDecompressor, ZSTD, body, max_bytes)


@cache
def _package(content_type: str) -> Any:
    """The module behind an optional method, or None; brotli only if it can bound its output."""
    names = ("brotli",) if content_type == BROTLI else ("compression.zstd", "backports.zstd")
    for name in names:
        try:
            module = import_module(name)
        except ImportError:
            continue
        if content_type == BROTLI and not hasattr(module.Decompressor, "can_accept_more_data"):
            return None
        return module
    return None


def _installed(content_type: str) -> Any:
    module = _package(content_type)
    if module is None:
        raise Refusal(
            BAD_COMPRESSION,
            f"cannot read compression {content_type!r} here: install {_PACKAGES[content_type]},"
            " or send gzip",
        )
    return module


def _too_big(max_bytes: int) -> Refusal:
    return Refusal(
        TOO_BIG,
        f"the body is larger than {max_bytes} bytes when decompressed:"
        " send less, or a reference to the data",
    )


def _bad(content_type: str, why: str) -> Refusal:
    return Refusal(BAD_COMPRESSION, f"the body is not valid {content_type}: {why[:200]}")


_COMPRESSORS: Final[dict[str, Callable[[bytes], bytes]]] = {
    GZIP: zlib.compress,
    BZIP2: bz2.compress,
    LZMA: lzma.compress,
    BROTLI: lambda body: bytes(_installed(BROTLI).compress(body)),
    ZSTD: lambda body: bytes(_installed(ZSTD).compress(body)),
}
_DECOMPRESSORS: Final[dict[str, Callable[[bytes, int], bytes]]] = {
    GZIP: _read_zlib,
    BZIP2: _read_bzip2,
    LZMA: _read_lzma,
    BROTLI: _read_brotli,
    ZSTD: _read_zstd,
}
