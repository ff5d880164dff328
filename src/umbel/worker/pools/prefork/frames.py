"""What parent and child say to each other.

Down, parent to child: packets of a SOCK_SEQPACKET socket. A packet is kind (1 byte), sequence
number (8 bytes) and bytes of an encoded order. An order that does not fit into one packet comes in
several, `MORE` … `LAST`; a small one is a single `WHOLE`. Packets are atomic: either the child
reads one or the parent takes it back, never half of it.

Up, child to parent: frames on a pipe. A frame is length of the payload (4 bytes), kind (1 byte),
sequence number (8 bytes), payload. Frames come in any pieces; `FrameReader` joins them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

# Well below the 208 KiB that a Unix socket buffers by default, so that several fit.
PACKET_PAYLOAD_BYTES_MAX = 60_000
# A child only sends outcomes, whose texts are capped: more than this is not a frame of ours.
FRAME_PAYLOAD_BYTES_MAX = 256 * 2**20

_PACKET = struct.Struct("!BQ")
_FRAME = struct.Struct("!IBQ")
_WHEN = struct.Struct("!d")
PACKET_HEADER_BYTES = _PACKET.size
PACKET_BYTES_MAX = PACKET_HEADER_BYTES + PACKET_PAYLOAD_BYTES_MAX

WHOLE, MORE, LAST = 1, 2, 3

READY = 1  # the child is up
ACCEPTED = 2  # payload: monotonic time
FINISHED = 3  # payload: outcome
FINISHED_LAST = 4  # the same, and the child leaves: it will accept nothing more


class BrokenFrame(Exception):
    """The child's pipe carries something that is not a frame."""


def packets(seq: int, data: bytes) -> list[bytes]:
    """The packets that carry one encoded order."""
    size = PACKET_PAYLOAD_BYTES_MAX
    if len(data) <= size:
        return [_PACKET.pack(WHOLE, seq) + data]
    view = memoryview(data)
    starts = range(0, len(data), size)
    return [
        _PACKET.pack(LAST if start + size >= len(data) else MORE, seq) + view[start : start + size]
        for start in starts
    ]


def packet_header(packet: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Kind and sequence number of a packet."""
    kind, seq = _PACKET.unpack_from(packet)
    return kind, seq


def frame(kind: int, seq: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return _FRAME.pack(len(payload), kind, seq) + payload


def accepted_frame(seq: int, when: float) -> bytes:
    """The frame that claims an order."""
    return _FRAME.pack(_WHEN.size, ACCEPTED, seq) + _WHEN.pack(when)


def accepted_when(payload: bytes) -> float:
    """The time in an `ACCEPTED` frame."""
    (when,) = _WHEN.unpack(payload)
    return float(when)


class FrameReader:
    """Joins pieces of a stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """The frames that are complete now: kind, sequence number, payload."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _FRAME.size:
                length, kind, seq = _FRAME.unpack_from(buffer, start)
                if length > FRAME_PAYLOAD_BYTES_MAX or not READY <= kind <= FINISHED_LAST:
                    raise BrokenFrame(f"kind {kind}, {length} bytes")
                end = start + _FRAME.size + length
                if len(buffer) < end:
                    break
                payload = bytes(memoryview(buffer)[start + _FRAME.size : end])
                start = end
                yield kind, seq, payload
        finally:
            del buffer[:start]
