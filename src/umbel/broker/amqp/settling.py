"""Which deliveries of a channel are open, and how the others are acknowledged with few frames.

RabbitMQ numbers the deliveries of a channel, and an acknowledgement may be of one of them or of
all up to one (`multiple`). That says too much where an earlier one is still open. So the ledger
notes every delivery that wants an answer, in order; when the gathered acks are written, those in
front of the first open one become one frame, and each of the others gets its own. A message that
is held for long lets all behind it be acknowledged one by one, in one write all the same.

Only what was gathered is ever the number of a frame, so that the server knows it, and everything
below a `multiple` has been answered before it.
"""

from __future__ import annotations

from collections import deque
from struct import Struct
from typing import Final

# Type, channel, length, class, method, tag, multiple, end.
_ACK: Final = Struct(">BHIHHQBB")
# Numbers of answered deliveries are kept behind an open one, up to so many more than are open.
SLACK: Final = 1024


class Ledger:
    """The deliveries of one channel."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._gathered: set[int] = set()

    def delivered(self, tag: int) -> None:
        """A message has come that is to be answered."""
        self._order.append(tag)
        self._open.add(tag)

    def gather(self, tag: int) -> bool:
        """This one is acknowledged with the next `frames`; False if it is not an open one."""
        if tag not in self._open:
            return False
        self._open.remove(tag)
        self._gathered.add(tag)
        return True

    def answered(self, tag: int, multiple: bool = False) -> None:
        """The server was told, by other means than `frames`."""
        if multiple:
            self._open = {one for one in self._open if tag and one > tag}
            self._gathered = {one for one in self._gathered if tag and one > tag}
        else:
            self._open.discard(tag)

    def frames(self, channel_id: int) -> bytes:
        """Acknowledge what was gathered."""
        order, still_open, gathered = self._order, self._open, self._gathered
        last = count = 0
        while order and order[0] not in still_open:
            tag = order.popleft()
            if tag in gathered:
                last = tag
                count += 1
        if count == len(gathered):
            gathered.clear()
            return ack(channel_id, last, count > 1) if count else b""
        parts = [ack(channel_id, last, count > 1)] if count else []
        parts += [ack(channel_id, tag) for tag in sorted(gathered) if tag > last]
        gathered.clear()
        if len(order) > 2 * len(still_open) + SLACK:
            self._order = deque(tag for tag in order if tag in still_open)
        return b"".join(parts)

    def clear(self) -> None:
        """The numbers mean nothing any more: the channel is another, or all was given back."""
        self._order.clear()
        self._open.clear()
        self._gathered.clear()

    def __len__(self) -> int:
        """How many are gathered."""
        return len(self._gathered)


def ack(channel_id: int, tag: int, multiple: bool = False) -> bytes:
    """The frame that acknowledges one delivery, or all up to it."""
    return _ACK.pack(1, channel_id, 13, 60, 80, tag, multiple, 0xCE)
