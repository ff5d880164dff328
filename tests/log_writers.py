"""Processes that write a log and are killed while they do: `Killable` starts them cheaply.

One process imports what is slow to import, and forks a child for each job. What a child has done it
notes in a file, which survives it. A job may ask to die at a certain point: at its n-th step that
touches a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.log_reading import event
from tests.servers import wait_until
from tests.workers import ROOT, program_environment

STEPS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"})


class Killable:
    """Runs jobs, one at a time, in processes that may be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.log_writers"],
            cwd=ROOT,
            env=program_environment(ROOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(
        self,
        job: str,
        *,
        kill_after_s: float | None = None,
        kill_once: Path | None = None,
        **arguments: Any,
    ) -> int:
        """Run one job, and kill it after a time if asked to; minus the signal, or the exit code.

        With `kill_once` the time begins when there is something in that file.
        """
        server = self._process
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        if kill_after_s is not None:
            if kill_once is not None:
                wait_until(lambda: _has_content(kill_once), 60, f"content of {kill_once}")
            time.sleep(kill_after_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return int(server.stdout.readline())


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def serve() -> None:
    """Fork a child for each line; tell its id, then how it ended."""
    import pyarrow as pa

    import umbel.recorder.compaction
    import umbel.recorder.retention
    import umbel.recorder.segments  # noqa: F401 - slow, and so done once

    pa.array([{"a": 1}])
    jobs = {"write": write, "compact": compact, "fill": fill, "retain": retain}
    for line in sys.stdin:
        arguments = json.loads(line)
        job = jobs[arguments.pop("job")]
        pid = os.fork()
        if pid == 0:
            try:
                job(**arguments)
            except BaseException as exc:
                sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
                os._exit(1)
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def die_at(step: int | None) -> None:
    """Be killed at the n-th step from now on that touches a file."""
    left = step

    def count(name: str, arguments: object) -> None:
        nonlocal left
        if left is not None and name in STEPS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if step is not None:
        sys.addaudithook(count)


def write(log: str, notes: str, life: int, seed: int, die: int | None = None) -> None:
    """Write events for ever, and note what may be acknowledged."""
    from umbel.recorder.log import Log
    from umbel.recorder.segments import Segments

    dice = random.Random(seed)
    with Path(notes).open("ab", buffering=0) as noted:
        die_at(die)
        segments = Segments(Log(log).open())
        number = 0
        while True:
            for _ in range(dice.randint(1, 400)):
                number += 1
                received = 1_000.0 + 86_400 * (dice.random() < 0.2)
                segments.add(event(number, inc=life), received, number)
            segments.quarantine("x", "bad", 1_000.0, 0)
            noted.write(json.dumps(segments.roll()).encode() + b"\n")


def compact(log: str, now: float, die: int | None = None) -> None:
    """Compact a log, and remove at once what was replaced."""
    from umbel.recorder.compaction import Compaction
    from umbel.recorder.log import Log

    one = Log(log).open()
    compaction = Compaction(one, keep_s=0, wall=lambda: now)
    die_at(die)
    compaction.run()
    compaction.run()


def retain(log: str, cutoff: str, now: float, die: int | None = None) -> None:
    """Remove the days before a cutoff from a log, but for every eighth number of each day."""
    from umbel.recorder.log import Log
    from umbel.recorder.retention import Retention

    one = Log(log).open(create=False)
    retention = Retention(one, wall=lambda: now)
    die_at(die)
    retention.finish()
    retention.apply(cutoff, eighths(one, cutoff))


def eighths(log: Any, cutoff: str) -> list[Any]:
    """The old days of a log, of which every eighth number is carried over."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from umbel.recorder.retention import OldDay

    found = []
    for day in (day for day in log.days() if day < cutoff):
        names = [segment.name for segment in log.segments(day=day)]
        tables = []
        for name in names:
            with log.disk.open(f"events/day={day}/{name}") as file:
                tables.append(pq.read_table(file))
        whole = pa.concat_tables([table.replace_schema_metadata() for table in tables])
        eighth = whole.filter(pc.equal(pc.bit_wise_and(whole["clock"], 7), 0))
        numbers = eighth.column_names.index("seq")
        eighth = eighth.set_column(numbers, "seq", pa.nulls(len(eighth), pa.int64()))
        is_same = len(names) == 1 and eighth.num_rows == whole.num_rows
        if names and not is_same:
            found.append(OldDay(day, names, len(whole), len(eighth), lambda rows=eighth: [rows]))
    return found


def fill(log: str, notes: str, limit_bytes: int) -> None:
    """Write while no file may grow beyond the limit, and again when it may."""
    from umbel.recorder.errors import LogFull
    from umbel.recorder.log import Log
    from umbel.recorder.options import Options
    from umbel.recorder.segments import Segments

    segments = Segments(Log(log).open(), Options(roll_rows=100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    number, failures = 0, []
    while not segments.is_full:
        segments.add(event(number, x=f"{number * 7919:x}"), 1_000.0, number)
        number += 1
        if segments.due() and number % 50 == 0:
            try:
                segments.roll()
            except LogFull as exc:
                failures.append(str(exc))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = {"failures": failures, "added": number, "left": len(list(Path(log).rglob(".*")))}
    Path(notes).write_text(json.dumps({**told, "tokens": segments.roll()}))


if __name__ == "__main__":
    serve()
