"""What parent and child say to each other.

Down, parent to child: packets of a SOCK_SEQPACKET socket. A packet is kind (1 byte), sequence
number (8 bytes) and bytes of an encoded order. An order that does not fit into one packet comes in
several, `MORE` … `LAST`; a small one is a single `WHOLE`. Packets are atomic: either the child
reads one or the parent takes it back, never half of it. A `WHOLE` may carry the flag `RINGS`: the
parent wants to hear at once when this one begins.

Up, child to parent: frames on a pipe. A frame is length of the payload (4 bytes), kind (1 byte),
sequence number (8 bytes), payload. Frames come in any pieces; `FrameReader` joins them. Nobody
waits for the pipe: writing to it wakes no one. The child rings a bell where that is wanted.
"""

from __future__ import annotations

import struct

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
RINGS = 0x80  # added to the kind

READY = 1  # the child is up
ACCEPTED = 2  # payload: monotonic time
FINISHED = 3  # payload: outcome
FINISHED_LAST = 4  # the same, and the child leaves: it will accept nothing more


class BrokenFrame(Exception):
    """The child's pipe carries something that is not a frame."""


def packet(seq: int, data: bytes, rings: bool) -> bytes:
    """The packet that carries a small order."""
    return _PACKET.pack(WHOLE | RINGS if rings else WHOLE, seq) + data


def packets(seq: int, data: bytes) -> list[bytes]:
    """The packets that carry an order that is too large for one."""
    size, view = PACKET_PAYLOAD_BYTES_MAX, memoryview(data)
    return [
        _PACKET.pack(LAST if start + size >= len(data) else MORE, seq) + view[start : start + size]
        for start in range(0, len(data), size)
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
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """The frames that are complete now: kind, sequence number, payload."""
        if self._rest:
            data = self._rest + data
        found, start, size, head = [], 0, len(data), _FRAME.size
        while size - start >= head:
            length, kind, seq = _FRAME.unpack_from(data, start)
            if length > FRAME_PAYLOAD_BYTES_MAX or not READY <= kind <= FINISHED_LAST:
                raise BrokenFrame(f"kind {kind}, {length} bytes")
            begin = start + head
            if size < begin + length:
                break
            start = begin + length
            found.append((kind, seq, data[begin:start]))
        self._rest = data[start:]
        return found
