"""Base64 for the bodies of kombu's virtual transports, in a third of the time.

kombu writes every body as base64, for brokers that keep text. Lists of events are large, and
Python's own way is slow. The JSON writer's is not, and gives the same text between quotes. In
memory nothing is written at all, and bodies stay as they are. The tags of messages need no
randomness from the system either, for which a thread would let go of the interpreter each time.
"""

from __future__ import annotations

import binascii
from typing import Any, Final

import msgspec
from kombu.transport import memory

from umbel.broker.ids import fresh_tag

_NAME: Final = "base64"
_encoder: Final = msgspec.json.Encoder()


class QuickBase64:
    """In the place of kombu's codec."""

    def encode(self, body: str | bytes) -> str:
        """The text of a body."""
        raw = body.encode() if isinstance(body, str) else body
        return _encoder.encode(raw)[1:-1].decode("ascii")

    def decode(self, text: str | bytes) -> bytes:
        """The body."""
        return decode(text)


def decode(text: Any) -> bytes:
    """The bytes; lenient where Python's own reader is, with its errors."""
    if type(text) is str:
        try:
            return msgspec.convert(text, bytes)
        except msgspec.ValidationError:
            pass  # line breaks, for example
    return binascii.a2b_base64(text)


def quicken(channel: Any) -> None:
    """Let this channel use it, or nothing; one that writes no base64 stays as it is."""
    if hasattr(channel, "_next_delivery_tag"):
        channel._next_delivery_tag = fresh_tag
    if isinstance(channel, memory.Channel):
        channel.body_encoding = None  # messages say how theirs are: all consumers can read both
        return
    codecs = getattr(channel, "codecs", None) or {}
    if _NAME in codecs:
        channel.codecs = {**codecs, _NAME: QuickBase64()}
