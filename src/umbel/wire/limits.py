"""The caps on what is read from the wire, and the one error that reading raises.

A message comes from anybody who can reach the broker. Each cap bounds a cost that a small
message could otherwise inflict: memory (`body_bytes`), stack (`depth`), quadratic number
parsing (`integer_digits`), and the expansion of repeated references (`alias_nodes`).

Whatever cannot be read becomes a `Refusal`. Its `reason` is one of `REASONS`, for counting and
for choosing what happens to the message; its `text` is a sentence for the log.
"""

from __future__ import annotations

from typing import Final

import msgspec

CONTENT_DISALLOWED: Final = "content-disallowed"
CONTENT_UNKNOWN: Final = "content-unknown"
UNDECODABLE: Final = "undecodable"
TOO_BIG: Final = "too-big"
TOO_DEEP: Final = "too-deep"
INTEGER_TOO_LARGE: Final = "integer-too-large"
INVALID_TASK: Final = "invalid-task"
UNKNOWN_MESSAGE: Final = "unknown-message"
BAD_COMPRESSION: Final = "bad-compression"

REASONS: Final = frozenset(
    {
        CONTENT_DISALLOWED,
        CONTENT_UNKNOWN,
        UNDECODABLE,
        TOO_BIG,
        TOO_DEEP,
        INTEGER_TOO_LARGE,
        INVALID_TASK,
        UNKNOWN_MESSAGE,
        BAD_COMPRESSION,
    }
)


class Limits(msgspec.Struct, frozen=True):
    """How much one message may ask of us."""

    # Counted before and after decompression. Raising it lets bigger arguments in; a decoded
    # body takes some ten times its size in memory, once per running task.
    body_bytes: int = 64 * 2**20
    # Levels of lists and mappings inside each other. Every level costs stack in whatever walks
    # the value later; Python itself gives up near 1,000.
    depth: int = 200
    # 308 digits is where a float ends, and so what most other languages can read at all.
    # Parsing takes time quadratic in the digits.
    integer_digits: int = 308
    # YAML lets a document repeat a part by reference. This is how many values such a document
    # may have when written out in full; without it 400 bytes can stand for 10**9 values.
    alias_nodes: int = 100_000
    # YAML is read at roughly 1 MiB/s, so a bigger text would hold a worker up for minutes.
    yaml_bytes: int = 8 * 2**20


DEFAULT_LIMITS: Final = Limits()


class Refusal(Exception):
    """Something from the wire was not read; `reason` is one of `REASONS`, `text` says why."""

    def __init__(self, reason: str, text: str) -> None:
        assert reason in REASONS, reason
        super().__init__(reason, text)
        self.reason = reason
        self.text = text

    def __str__(self) -> str:
        return self.text
