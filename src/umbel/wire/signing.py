"""Signed control messages: who has the shared key may command, nobody else.

The signature is an HMAC-SHA256 over everything that a node acts upon: the body as it is on the
wire (method, arguments, destination, pattern, matcher, ticket, reply_to), what kind of text it is,
the headers `clock`, `expires` and `compression`, the exchange (so that a command to one cluster is
none to another that has the same key), the time of signing and a nonce. Each part is written with
its length, so that no two messages have one form. It travels in headers, which peers without a key
ignore.

A message that was recorded on its way can be sent again as it is. So a signature holds for a window
of time only, and within the window each nonce once. `Nonces` remembers those of messages whose
signature was right, hence nobody without the key can fill it; when it is full all the same,
messages are refused rather than old nonces forgotten. What was signed before the table was made is
refused too: a process that has just started can not know what was seen before.

Time is an argument. The clocks of signer and verifier may differ by less than the window.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from umbel.wire.limits import REASONS, Refusal
from umbel.wire.reprs import safe_repr

SIGNATURE: Final = "umbel_signature"
SIGNED_AT: Final = "umbel_signed_at"
NONCE: Final = "umbel_nonce"

UNSIGNED: Final = "unsigned"
BAD_SIGNATURE: Final = "bad-signature"
OUT_OF_TIME: Final = "out-of-time"
REPLAYED: Final = "replayed"
NONCES_FULL: Final = "nonces-full"
SIGNING_REASONS: Final = frozenset({UNSIGNED, BAD_SIGNATURE, OUT_OF_TIME, REPLAYED, NONCES_FULL})

WINDOW_S: Final = 30.0
NONCES_MAX: Final = 100_000
NONCE_CHARS_MAX: Final = 64
KEY_BYTES_MIN: Final = 16
_VERSION: Final = b"umbel-control-1"
_COVERED: Final = ("clock", "expires", "compression")


class Distrust(Refusal):
    """A message whose sender has not shown that he has the key; one of `SIGNING_REASONS`."""

    def __init__(self, reason: str, text: str) -> None:
        assert reason in SIGNING_REASONS, reason
        Exception.__init__(self, reason, text)
        self.reason = reason
        self.text = text


assert not SIGNING_REASONS & REASONS


class Nonces:
    """The nonces of signatures that still hold; `since` is when the table was made."""

    def __init__(self, since: float, *, count_max: int = NONCES_MAX) -> None:
        self.since = since
        self._count_max = count_max
        self._until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def use(self, nonce: str, until: float, now: float) -> None:
        """Note a nonce; raises `Distrust` when it was used before, or when there is no room."""
        self._forget(now)
        if nonce in self._until:
            raise Distrust(REPLAYED, "the message was received before: each is obeyed once")
        if len(self._until) >= self._count_max:
            raise Distrust(NONCES_FULL, f"more than {self._count_max} messages at a time")
        self._until[nonce] = until

    def _forget(self, now: float) -> None:
        """Drop what no longer holds: from the oldest on, and all of it when there is no room."""
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] >= now:
                break
            del self._until[oldest]
        if len(self._until) >= self._count_max:
            self._until = {one: end for one, end in self._until.items() if end >= now}


def sign(
    body: bytes,
    headers: Mapping[str, Any],
    key: bytes,
    now: float,
    nonce: str,
    *,
    exchange: str = "",
    content_type: str = "application/json",
) -> dict[str, Any]:
    """The headers with a signature; `nonce` must never have been used with this key."""
    signed = {**headers, SIGNED_AT: float(now), NONCE: nonce}
    signed[SIGNATURE] = _signature(body, signed, key, exchange, content_type)
    return signed


def is_signed(headers: Any) -> bool:
    """Whether the sender claims to have the key."""
    return isinstance(headers, Mapping) and headers.get(SIGNATURE) is not None


def verify(
    body: Any,
    headers: Any,
    key: bytes,
    now: float,
    nonces: Nonces,
    *,
    exchange: str = "",
    content_type: Any = "application/json",
    window_s: float = WINDOW_S,
) -> None:
    """Return if the message was signed with this key, lately, and is seen for the first time;
    raises `Distrust` else."""
    if not is_signed(headers):
        raise Distrust(UNSIGNED, "the message is not signed: the sender needs control_signing_key")
    given, signed_at, nonce = (headers.get(name) for name in (SIGNATURE, SIGNED_AT, NONCE))
    if type(given) is not str or type(nonce) is not str or not 0 < len(nonce) <= NONCE_CHARS_MAX:
        raise _bad("it is none")
    if type(signed_at) not in (int, float) or not math.isfinite(signed_at):
        raise _bad(f"it is of the time {safe_repr(signed_at, 40)}")
    try:
        right = _signature(_bytes(body), headers, key, exchange, str(content_type))
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise _bad("a header that it covers is none") from None
    if not hmac.compare_digest(right.encode(), given.encode("utf-8", "replace")):
        raise _bad("another key was used, or the message was changed on its way")
    _check_time(float(signed_at), now, nonces.since, window_s)
    nonces.use(nonce, float(signed_at) + window_s, now)


def _check_time(signed_at: float, now: float, since: float, window_s: float) -> None:
    if abs(now - signed_at) > window_s:
        raise Distrust(
            OUT_OF_TIME,
            f"the message was signed {now - signed_at:.1f} s ago and {window_s:g} s are allowed: "
            "it was held up, or the clocks differ",
        )
    if signed_at < since:
        raise Distrust(OUT_OF_TIME, "the message was signed before this node began to listen")


def _signature(
    body: bytes, headers: Mapping[str, Any], key: bytes, exchange: str, content_type: str
) -> str:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in _parts(body, headers, exchange, content_type):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _parts(
    body: bytes, headers: Mapping[str, Any], exchange: str, content_type: str
) -> Iterator[bytes]:
    yield _VERSION
    yield exchange.encode("utf-8", "surrogatepass")
    yield content_type.encode("utf-8", "surrogatepass")
    for name in (*_COVERED, SIGNED_AT, NONCE):
        yield name.encode()
        yield _plain(headers.get(name)).encode("utf-8", "surrogatepass")
    yield body


def _plain(value: Any) -> str:
    """One form for a number, whatever a transport made of it: 3, 3.0 and "3" are two things."""
    if value is None:
        return ""
    if type(value) is bool:
        raise TypeError(value)
    if type(value) in (int, float):
        exact = float(value)
        return f"n{int(exact)}" if exact.is_integer() else f"n{exact!r}"
    if type(value) is str:
        return f"t{value}"
    raise TypeError(type(value))


def _bytes(body: Any) -> bytes:
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass")
    raise TypeError(type(body))


def _bad(why: str) -> Distrust:
    return Distrust(BAD_SIGNATURE, f"the signature is not right: {why}")
