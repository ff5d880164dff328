"""How a recorder writes."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass, field

ROLL_ROWS = 50_000
ROLL_AGE_S = 10.0
ROLL_BYTES = 64 * 2**20
# So many times what is rolled may be in memory while nothing can be written.
FULL_FACTOR = 4

_UNSAFE = re.compile(r"[^A-Za-z0-9_.]+")


def recorder_id() -> str:
    """A name of this life of this process; no other has it, and it may stand in a file's name."""
    host = _UNSAFE.sub("_", socket.gethostname())[:40] or "host"
    return f"{host}.{os.getpid()}.{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """When a segment is rolled, and who writes it.

    Rolling more often shows events sooner and leaves less unacknowledged at the broker; it makes
    small segments, which are slow to read until they are compacted.
    """

    roll_rows: int = ROLL_ROWS
    roll_age_s: float = ROLL_AGE_S
    roll_bytes: int = ROLL_BYTES
    recorder: str = field(default_factory=recorder_id)

    def __post_init__(self) -> None:
        assert self.roll_rows > 0, self.roll_rows
        assert self.roll_age_s >= 0, self.roll_age_s
        assert self.roll_bytes > 0, self.roll_bytes
