"""What parent and child say to each other.

Down, parent to child: packets of a SOCK_SEQPACKET socket. A packet is kind (1 byte), a number
(8 bytes) and more. `JOBS` carries that many small jobs, each as sequence number (8 bytes), a
flag (1 byte: the parent wants to hear at once when this one begins), length (4 bytes) and its
encoded bytes. A job that does not fit into one packet comes in several, `MORE` … `LAST`, whose
number is its sequence number. `VOID`: the number counts the jobs before this
packet that are taken back.

Whether the child may begin the next job is decided by *tokens* (an eventfd that counts down by
one with each read). For every job the parent adds one, after the packet; the child takes one
before it begins, and the parent takes back the newest jobs by taking tokens. So a job belongs
to exactly one of them, although the child has read the packet long ago. After a `VOID` and before
the next token the parent raises the *epoch* in the shared cell: a child with a token of later finds
it raised, and reads on before it believes what it has.

Up, child to parent: frames on a pipe. A frame is length of the payload (4 bytes), kind (1 byte),
sequence number (8 bytes), payload. Frames come in any pieces; `FrameReader` joins them. Nobody
waits for the pipe: writing to it wakes no one. The child rings a bell where that is wanted.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# Well below the 208 KiB that a Unix socket buffers by default, so that several fit.
PACKET_PAYLOAD_BYTES_MAX = 60_000
# A child only sends results, whose texts are capped: more than this is not a frame of ours.
FRAME_PAYLOAD_BYTES_MAX = 256 * 2**20

_PACKET = struct.Struct("!BQ")
_JOB = struct.Struct("!QBI")
_FRAME = struct.Struct("!IBQ")
_WHEN = struct.Struct("!d")
_ACCEPTED = struct.Struct("!IBQd")
PACKET_HEADER_BYTES = _PACKET.size
JOB_HEADER_BYTES = _JOB.size
PACKET_BYTES_MAX = PACKET_HEADER_BYTES + JOB_HEADER_BYTES + PACKET_PAYLOAD_BYTES_MAX

JOBS, MORE, LAST, VOID = 1, 2, 3, 4

READY = 1  # the child is up
ACCEPTED = 2  # payload: monotonic time
FINISHED = 3  # payload: result
FINISHED_LAST = 4  # the same, and the child leaves: it will accept nothing more


class Link(NamedTuple):
    """One side's ends of everything that connects parent and child."""

    jobs: socket.socket
    results_fd: int
    bell_fd: int
    tokens_fd: int
    cell: mmap.mmap


# Kind, sequence number, and the payload: of `ACCEPTED` the time, of others bytes.
Frame = tuple[int, int, Any]


class BrokenFrame(Exception):
    """The child's pipe carries something that is not a frame; `before` came whole."""

    def __init__(self, text: str, before: list[Frame]) -> None:
        super().__init__(text)
        self.before = before


def packet(jobs: Iterable[tuple[int, bool, bytes]]) -> bytes:
    """The packet that carries small jobs: sequence number, whether to ring, bytes."""
    pack, parts = _JOB.pack, [b""]
    for seq, rings, data in jobs:
        parts.append(pack(seq, rings, len(data)))
        parts.append(data)
    parts[0] = _PACKET.pack(JOBS, len(parts) // 2)
    return b"".join(parts)


def void(count: int) -> bytes:
    """The packet that takes back the last `count` jobs."""
    return _PACKET.pack(VOID, count)


def is_void(packet: bytes) -> bool:
    """Whether it takes back."""
    return packet[0] == VOID


def jobs(packet: bytes) -> Iterator[tuple[int, bool, bytes]]:
    """What an `JOBS` packet carries."""
    start, size, head = PACKET_HEADER_BYTES, len(packet), _JOB.size
    unpack = _JOB.unpack_from
    while start < size:
        seq, rings, length = unpack(packet, start)
        begin = start + head
        start = begin + length
        yield seq, bool(rings), packet[begin:start]


def packets(seq: int, data: bytes) -> list[bytes]:
    """The packets that carry a job that is too large for one."""
    size, view = PACKET_PAYLOAD_BYTES_MAX, memoryview(data)
    return [
        _PACKET.pack(LAST if start + size >= len(data) else MORE, seq) + view[start : start + size]
        for start in range(0, len(data), size)
    ]


def packet_header(packet: bytes) -> tuple[int, int]:
    """Kind and number of a packet."""
    kind, number = _PACKET.unpack_from(packet)
    return kind, number


def frame(kind: int, seq: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return _FRAME.pack(len(payload), kind, seq) + payload


def accepted_frame(seq: int, when: float) -> bytes:
    """The frame that claims a job."""
    return _ACCEPTED.pack(_WHEN.size, ACCEPTED, seq, when)


class FrameReader:
    """Joins pieces of a stream into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now."""
        if self._rest:
            data = self._rest + data
        found: list[Frame] = []
        start, size, head = 0, len(data), _FRAME.size
        while size - start >= head:
            length, kind, seq = _FRAME.unpack_from(data, start)
            if length > FRAME_PAYLOAD_BYTES_MAX or not READY <= kind <= FINISHED_LAST:
                raise BrokenFrame(f"kind {kind}, {length} bytes", found)
            begin = start + head
            if size < begin + length:
                break
            start = begin + length
            if kind == ACCEPTED:
                if length != _WHEN.size:
                    raise BrokenFrame(f"kind {kind}, {length} bytes", found)
                found.append((kind, seq, _WHEN.unpack_from(data, begin)[0]))
            else:
                found.append((kind, seq, data[begin:start]))
        self._rest = data[start:]
        return found
