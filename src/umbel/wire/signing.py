"""Signed messages: only processes that have the shared key can make a node act.

Three kinds of messages are signed, each for its own *purpose*, so that a signature on one kind is
worth nothing on another:

| purpose   | message                      | headers that the signature covers                     |
| --------- | ---------------------------- | ----------------------------------------------------- |
| `REQUEST` | a control command to nodes   | clock, expires, compression, send time, challenge     |
| `REPLY`   | a node's reply to a command  | ticket, clock, compression                            |
| `EVENT`   | an event about a node itself | hostname, compression                                 |

The signature is an HMAC-SHA256 over the purpose, the exchange (a command to one cluster is not a
command to another one with the same key), content type and encoding, the headers in the table, the
time of signing, a nonce, and the body as it is on the wire. Every part is preceded by its length,
so that two different messages never have the same form. The signature travels in headers, which
peers without a key ignore.

A recorded message can be published again unchanged. So a signature is valid for a window of time
only, and within the window each nonce is accepted once. `Nonces` remembers the nonces of messages
whose signature was right, so nobody without the key can fill it; when it is full, messages are
refused rather than nonces forgotten.

A process that has just started does not know which messages were obeyed before. Clocks may differ
by up to the window, so a message can only be dated after the start for certain if it was signed at
least one window later. For all others `verify` returns False: the message is authentic and of the
right time, but may be a copy. Whoever receives such a message answers with a *challenge*
(`Challenges`) and with how long it has been listening; the sender, if it has sent the message since
then, signs it again with the challenge in it. That proves that it is new, whatever the clocks show.
Replies need neither time nor nonce: they carry the ticket of one request, which is their challenge.

Time is an argument.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from umbel.wire.limits import REASONS, Refusal
from umbel.wire.reprs import safe_repr

SIGNATURE: Final = "umbel_signature"
SIGNED_AT: Final = "umbel_signed_at"
NONCE: Final = "umbel_nonce"
#: In a request the challenge that it answers, in the value of a reply the challenge itself.
CHALLENGE: Final = "umbel_challenge"
#: In the value of a reply with a challenge: for how many seconds the node has been listening.
LISTENING_S: Final = "umbel_listening_s"
#: When a request was sent, by the sender's clock; signed or not.
SENT_AT: Final = "umbel_sent_at"

UNSIGNED: Final = "unsigned"
BAD_SIGNATURE: Final = "bad-signature"
OUT_OF_TIME: Final = "out-of-time"
REPLAYED: Final = "replayed"
UNPROVEN: Final = "unproven"
NONCES_FULL: Final = "nonces-full"
SIGNING_REASONS: Final = frozenset(
    {UNSIGNED, BAD_SIGNATURE, OUT_OF_TIME, REPLAYED, UNPROVEN, NONCES_FULL}
)

Purpose = Literal["request", "reply", "event"]
REQUEST: Final = "request"
REPLY: Final = "reply"
EVENT: Final = "event"

WINDOW_S: Final = 30.0
NONCES_MAX: Final = 100_000
NONCE_CHARS_MAX: Final = 64
KEY_BYTES_MIN: Final = 16
_TIME_MAX: Final = 2**53
_VERSION: Final = b"umbel-signature-2"
_COVERED: Final[dict[Purpose, tuple[str, ...]]] = {
    REQUEST: ("clock", "expires", "compression", SENT_AT, CHALLENGE),
    REPLY: ("ticket", "clock", "compression"),
    EVENT: ("hostname", "compression"),
}


class Distrust(Refusal):
    """A message whose sender has not shown that it has the key; one of `SIGNING_REASONS`.

    `provable` is set when the signature is right and an answered challenge would prove the rest.
    """

    def __init__(self, reason: str, text: str, *, provable: bool = False) -> None:
        assert reason in SIGNING_REASONS, reason
        Exception.__init__(self, reason, text)
        self.reason = reason
        self.text = text
        self.provable = provable


assert not SIGNING_REASONS & REASONS


class Nonces:
    """The nonces of signatures that are still valid; `since` is when the table was made."""

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


class Challenges:
    """What one process asks senders to sign; each challenge is valid for one to two windows.

    `secret` must be new in every process: then no message that was signed for an earlier one
    answers a challenge of this one.
    """

    def __init__(self, secret: bytes, *, window_s: float = WINDOW_S) -> None:
        self._secret = secret
        self._window_s = window_s

    def current(self, now: float) -> str:
        """The challenge of this moment."""
        return self._of(int(now // self._window_s))

    def is_answered(self, answer: Any, now: float) -> bool:
        """Whether a message carries a challenge that this process has made lately."""
        slot = int(now // self._window_s)
        return type(answer) is str and answer in (self._of(slot), self._of(slot - 1))

    def _of(self, slot: int) -> str:
        return hmac.new(self._secret, b"%d" % slot, hashlib.sha256).hexdigest()[:32]


def sign(
    body: bytes,
    headers: Mapping[str, Any],
    key: bytes,
    now: float,
    nonce: str,
    *,
    exchange: str = "",
    content_type: str = "application/json",
    content_encoding: str = "utf-8",
    purpose: Purpose = REQUEST,
) -> dict[str, Any]:
    """The headers with a signature; `nonce` must never have been used with this key."""
    signed = {**headers, SIGNED_AT: float(now), NONCE: nonce}
    form = (purpose, exchange, content_type, content_encoding)
    signed[SIGNATURE] = _signature(body, signed, key, *form)
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
    content_encoding: Any = "utf-8",
    purpose: Purpose = REQUEST,
    window_s: float = WINDOW_S,
    challenges: Challenges | None = None,
) -> bool:
    """Whether the message is certainly new: signed with this key, lately, and after `nonces.since`.

    False if it was signed with this key, lately, and is seen for the first time, but may have been
    sent before `nonces.since`. Raises `Distrust` for every other message.
    """
    signed_at, nonce = check_signature(
        body,
        headers,
        key,
        exchange=exchange,
        content_type=content_type,
        content_encoding=content_encoding,
        purpose=purpose,
    )
    if challenges is not None and challenges.is_answered(headers.get(CHALLENGE), now):
        # Remembered for longer than the challenge is valid.
        nonces.use(nonce, max(signed_at, now) + 2 * window_s, now)
        return True
    if abs(now - signed_at) > window_s:
        raise Distrust(
            OUT_OF_TIME,
            f"the message was signed {now - signed_at:.1f} s ago and {window_s:g} s are allowed: "
            "it was held up, or the clocks differ",
        )
    nonces.use(nonce, signed_at + window_s, now)
    if signed_at < nonces.since:
        raise Distrust(
            OUT_OF_TIME,
            "the message was signed before this node began to listen, or by a clock that is behind",
            provable=True,
        )
    return signed_at >= nonces.since + window_s


def check_signature(
    body: Any,
    headers: Any,
    key: bytes,
    *,
    exchange: str = "",
    content_type: Any = "application/json",
    content_encoding: Any = "utf-8",
    purpose: Purpose = REQUEST,
) -> tuple[float, str]:
    """When a message was signed, and its nonce; raises `Distrust` unless this key signed it."""
    if not is_signed(headers):
        raise Distrust(UNSIGNED, "the message is not signed: the sender needs control_signing_key")
    given, signed_at, nonce = (headers.get(name) for name in (SIGNATURE, SIGNED_AT, NONCE))
    if type(given) is not str or type(nonce) is not str or not 0 < len(nonce) <= NONCE_CHARS_MAX:
        raise _bad("it is not one")
    if type(signed_at) not in (int, float) or not -_TIME_MAX <= signed_at <= _TIME_MAX:
        raise _bad(f"it is of the time {safe_repr(signed_at, 40)}")
    form = (purpose, exchange, str(content_type), str(content_encoding))
    try:
        right = _signature(_bytes(body), headers, key, *form)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise _bad("it covers a header of another type") from None
    if not hmac.compare_digest(right.encode(), given.encode("utf-8", "replace")):
        raise _bad("another key was used, or the message was changed on its way")
    return float(signed_at), nonce


def _signature(
    body: bytes,
    headers: Mapping[str, Any],
    key: bytes,
    purpose: Purpose,
    exchange: str,
    content_type: str,
    content_encoding: str,
) -> str:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    texts = (purpose, exchange, content_type, content_encoding)
    for part in _parts(body, headers, texts, _COVERED[purpose]):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _parts(
    body: bytes, headers: Mapping[str, Any], texts: tuple[str, ...], covered: tuple[str, ...]
) -> Iterator[bytes]:
    yield _VERSION
    for text in texts:
        yield text.encode("utf-8", "surrogatepass")
    for name in (*covered, SIGNED_AT, NONCE):
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
