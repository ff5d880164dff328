"""Events from files of JSON lines: one event, or a list of them, on each line.

`umbel events --json` writes such files, and so do others. Files that were compressed with gzip are
known by their first bytes. A line that is no event goes to quarantine with its number and the
reason. To import a file twice is harmless: each event has an identity, and readers take it once.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from umbel.recorder.errors import Damaged, LogError
from umbel.recorder.segments import Segments
from umbel.recorder.sorting import take
from umbel.wire.events import EVENT_LIMITS
from umbel.wire.limits import TOO_BIG

STDIN: Final = "-"
# Of a line that is too long so much goes to quarantine.
TOO_BIG_KEPT_BYTES: Final = 2**20
PROGRESS_LINES: Final = 5_000

_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Summary:
    """What was in the files so far."""

    lines: int = 0
    events: int = 0
    quarantined: int = 0


class Importer:
    """Reads files into segments.

    `stop`, called from a signal handler, ends it in order: what was read is written. `is_waiting`
    is true while it waits for a line; who blocks it there may raise KeyboardInterrupt.
    """

    def __init__(
        self,
        segments: Segments,
        progress: Callable[[Summary], None] = lambda _: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.summary = Summary()
        self.is_stopped = self.is_waiting = False
        self._segments, self._progress, self._wall = segments, progress, wall

    def stop(self) -> None:
        """Read no more lines."""
        self.is_stopped = True

    def read(self, path: str) -> None:
        """Import one file, `-` for standard input; all that was read is written at the end.

        Raises `LogFull` when the log can not be written, `LogError` for a file that is not there,
        `Damaged` for one that is broken: what came before is imported.
        """
        with opened(path) as file:
            number = self.summary.lines
            try:
                self._read(file, path)
            except (EOFError, OSError, zlib.error) as exc:
                self._segments.roll()
                line = self.summary.lines - number
                raise Damaged(f"{path} is damaged after line {line}: {exc}") from exc
            except KeyboardInterrupt:
                self.is_stopped = True
            finally:
                self.is_waiting = False
        self._segments.roll()
        self._progress(self.summary)

    def _read(self, file: BinaryIO, name: str) -> None:
        number = 0
        while not self.is_stopped:
            self.is_waiting = True
            line = file.readline(EVENT_LIMITS.body_bytes + 1)
            self.is_waiting = False
            if not line:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(_BOM)
            is_whole = len(line) <= EVENT_LIMITS.body_bytes
            self._take(line, f"{name}:{number}", is_whole)
            if not is_whole:
                _skip_line(file, line)

    def _take(self, line: bytes, source: str, is_whole: bool) -> None:
        summary, now = self.summary, self._wall()
        summary.lines += 1
        if not is_whole:
            kept = line[:TOO_BIG_KEPT_BYTES]
            self._segments.quarantine(kept, TOO_BIG, now, source=source)
            summary.quarantined += 1
        elif text := line.strip():
            events, refused = take(self._segments, text, received=now, source=source)
            summary.events += events
            summary.quarantined += refused
        if self._segments.due():
            self._segments.roll()
        if summary.lines % PROGRESS_LINES == 0:
            self._progress(summary)


def _skip_line(file: BinaryIO, read: bytes) -> None:
    while read and not read.endswith(b"\n"):
        read = file.readline(2**20)


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """A file or standard input, uncompressed if need be."""
    with contextlib.ExitStack() as stack:
        try:
            if path == STDIN:
                raw = cast("io.BufferedReader", sys.stdin.buffer)
            else:
                raw = stack.enter_context(Path(path).open("rb"))
            is_gzip = raw.peek(2)[:2] == _GZIP
        except OSError as exc:
            raise LogError(f"cannot read {path}: {exc.strerror or exc}") from exc
        if is_gzip:
            yield cast("BinaryIO", stack.enter_context(gzip.GzipFile(fileobj=raw)))
        else:
            yield raw
