"""What a build of the history costs as the history grows, in CPU seconds: wall time depends on what
else the machine does.

Histories of 10,000, one million and five million events, 100,000 a day, of 10 workers. Of each: a
build of everything from the command line, builds of 50,000 more events, of which some come late and
some were recorded before, and a build with nothing new. Peak memory is that of all processes of a
build. Disk is the size of the tables after ten increments, including files for readers of older
builds, divided by the size of the log.

Then `--follow` on the longest history, while 500 events a second are recorded, in segments of ten
seconds: how old the newest published event is at worst, once the first build is there.

    python -m benchmarks.history_growth [--sizes 10000,1000000] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import psutil

from umbel.cluster.event_rows import COLUMNS

SIZES = (10_000, 1_000_000, 5_000_000)
SEGMENT_ROWS = 50_000
EVENTS_PER_TASK = 4.27  # of those that are made here, heartbeats included
EVENTS_PER_DAY = 100_000
WORKERS = 10
INCREMENTS = 2
# After one increment of each size, the disk is looked at after this many more at one million.
MORE_INCREMENTS = 8
LATE, REPEATED = 270, 500
FOLLOW_S, FOLLOW_EVENTS_PER_S, FOLLOW_SEGMENT_S = 240, 500, 10
CLIENT = "'gen77@web.example.org'"
REQUIRED = {
    "new at 5 M to new at 1 M": (1.2, "<="),
    "new at 5 M, CPU s": (90.0, "<="),
    "all of 5 M, CPU s": (446.0, "<="),
    "nothing new, CPU s": (15.0, "<="),
    "tables to log, bytes": (1.5, "<="),
    "10,000 events, wall s": (10.0, "<="),
    "10,000 events, GB": (1.2, "<="),
    "following, age in s": (60.0, "<="),
}
SQL_TYPES = {"text": "VARCHAR", "whole": "BIGINT", "number": "DOUBLE", "flag": "BOOLEAN"}
# Columns that are no fields of the event itself, which `raw` has as it was sent.
UNTOLD = frozenset({"present", "tie", "received", "recorder", "raw"})
_STEPS = (
    # type, how many there are before it, which tasks have it, what it says
    ("task-sent", 0, "true", "name AS name, args AS args, uuid AS root_id, 0 AS retries"),
    ("task-received", 1, "true", "name AS name, args AS args, uuid AS root_id, 0 AS retries"),
    ("task-started", 2, "dice >= 1", ""),
    ("task-retried", 3, "dice BETWEEN 4 AND 9", "error AS exception"),
    ("task-received", 4, "dice BETWEEN 4 AND 9", "name AS name, args AS args, 1 AS retries"),
    ("task-started", 5, "dice BETWEEN 4 AND 9", ""),
    ("task-succeeded", 6, "dice >= 4", "'done' AS result, 0.1 + dice / 1000 AS runtime"),
    ("task-failed", 6, "dice BETWEEN 1 AND 3", "error AS exception"),
    ("task-revoked", 6, "dice < 1", "false AS terminated, false AS expired"),
    ("worker-heartbeat", 7, "i % 10 = 0", "2.0 AS freq, 1 AS active, i AS processed"),
)


class History:
    """A log that grows, and its tables."""

    def __init__(self, directory: Path) -> None:
        self.log, self.tables = directory / "log", directory / "tables"
        self.folder = self.log / "events" / "day=2026-11-16"
        self.folder.mkdir(parents=True)
        (self.log / "_umbel-log.json").write_text('{"format": 1}')
        self.task_count = self.segment_count = 0

    def grow(self, event_count: int, *, disturbed: bool = False) -> None:
        """Add about this many events, in segments."""
        step = int(SEGMENT_ROWS / EVENTS_PER_TASK)
        last = self.task_count + int(event_count / EVENTS_PER_TASK)
        while self.task_count < last:
            until = min(self.task_count + step, last)
            rows = _rows(self.task_count, until, self.segment_count)
            if disturbed:
                rows = self._disturbed(rows)
            name = f"{1_794_000_000_000 + self.segment_count}-bench-{self.segment_count}.parquet"
            target = self.folder / name
            duckdb.execute(f"COPY ({rows}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")
            self.task_count, self.segment_count = until, self.segment_count + 1

    def _disturbed(self, rows: str) -> str:
        """With some events of the last segment again, and others of its tasks that come late."""
        before = max(self.folder.iterdir())
        late = f"""
            SELECT * REPLACE ('task-progress' AS type, timestamp + 0.005 AS timestamp,
                NULL AS seq, NULL AS inc, received + 3600 AS received)
            FROM '{before}' WHERE type = 'task-started' LIMIT {LATE}
        """
        again = f"SELECT * FROM '{before}' USING SAMPLE {REPEATED} ROWS"
        return f"{rows} UNION ALL BY NAME ({late}) UNION ALL BY NAME ({again})"

    def build(self) -> dict[str, float]:
        """A build from the command line: CPU and wall seconds, and bytes of memory."""
        command = [sys.executable, "-m", "umbel", "history", "build", "--log", str(self.log)]
        began, cpu_s, peak = time.monotonic(), dict[int, float](), 0
        with subprocess.Popen(
            [*command, "--tables", str(self.tables)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as program:
            while program.poll() is None:
                peak = max(peak, _look(program.pid, cpu_s))
                time.sleep(0.05)
            output = program.stdout.read() if program.stdout else ""
        assert program.returncode == 0, output
        wall_s = time.monotonic() - began
        return {"cpu s": sum(cpu_s.values()), "wall s": wall_s, "peak": float(peak)}

    def follow(self) -> dict[str, float]:
        """A build that follows: the greatest age of the newest published event, and memory."""
        command = [sys.executable, "-m", "umbel", "history", "build", "--log", str(self.log)]
        written: dict[str, float] = {}  # segments, and when they were
        cpu_s, peak, ages, files = dict[int, float](), 0, list[float](), list[int]()
        with subprocess.Popen(
            [*command, "--tables", str(self.tables), "--follow"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as program:
            began = time.monotonic()
            while (now := time.monotonic()) < began + FOLLOW_S:
                if now >= began + len(written) * FOLLOW_SEGMENT_S:
                    self.grow(FOLLOW_EVENTS_PER_S * FOLLOW_SEGMENT_S)
                    written[max(self.folder.iterdir()).name] = time.monotonic()
                peak = max(peak, _look(program.pid, cpu_s))
                covered, count = self._covered()
                if seen := [written[name] for name in covered if name in written]:
                    ages.append(time.monotonic() - max(seen))
                    files.append(count)
                time.sleep(0.5)
            program.terminate()
            assert program.wait(300) == 0
        assert len(ages) > 2, "nothing was published"
        return {
            "age s": max(ages),
            "peak": float(peak),
            "cpu s": sum(cpu_s.values()),
            "files at first": float(files[0]),
            "files": float(files[-1]),
        }

    def _covered(self) -> tuple[list[str], int]:
        """The segments behind the published tables, and how many files those have."""
        try:
            index = json.loads((self.tables / "_tables.json").read_text())
            state = json.loads((self.tables / f"_work/state-{index['run']}.json").read_text())
        except FileNotFoundError:  # replaced just now
            return [], 0
        count = sum(len(one["files"]) for one in index["tables"].values())
        return [name for names in state["coverage"]["read"].values() for name in names], count

    def bytes_of(self, folder: Path) -> int:
        """What the files of a folder take."""
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _look(pid: int, cpu_s: dict[int, float]) -> int:
    """Note the CPU time of a process and all that it started; how much memory they have."""
    total, java = 0, set[int]()
    try:
        top = psutil.Process(pid)
        for one in (top, *top.children(recursive=True)):
            times = one.cpu_times()
            cpu_s[one.pid] = times.user + times.system
            if one.ppid() not in java:  # which forks itself to start other programs
                total += one.memory_info().rss
            if one.name() == "java":
                java.add(one.pid)
    except psutil.Error:
        pass  # it has ended meanwhile
    return total


def _rows(first: int, last: int, segment: int) -> str:
    """The query for the rows of some tasks; workers number their events."""
    spacing = 86_400 / EVENTS_PER_DAY * EVENTS_PER_TASK
    tasks = f"""
        SELECT i, CAST(CAST(md5(CAST(i AS VARCHAR)) AS UUID) AS VARCHAR) AS uuid,
            (i * 104729) % 100 AS dice,
            1.7e9 + i * {spacing} AS t, 'worker' || (i % {WORKERS}) || '@shop' AS worker,
            'shop.order.' || (i % 12) AS name, '(' || i || ', 7)' AS args,
            'OSError(' || i || ')' AS error
        FROM range({first}, {last}) AS r(i)
    """
    nothing = ", ".join(f"CAST(NULL AS {SQL_TYPES[k]}) AS {name}" for name, k in COLUMNS.items())
    steps = "\nUNION ALL BY NAME\n".join(_step(*one) for one in _STEPS)
    columns = ", ".join(
        f"CAST({name} AS {SQL_TYPES[kind]}) AS {name}"
        for name, kind in COLUMNS.items()
        if name not in {"seq", "raw"}
    )
    told = ", ".join(f"'{name}', {name}" for name in COLUMNS if name not in UNTOLD)
    number = f"{segment} * 100000 + row_number() OVER (PARTITION BY hostname ORDER BY clock)"
    return f"""
        WITH tasks AS MATERIALIZED ({tasks})
        SELECT {columns}, CAST(IF(inc IS NULL, NULL, {number}) AS BIGINT) AS seq,
            CAST(json_merge_patch('{{}}', json_object({told})) AS VARCHAR) AS raw
        FROM (
            SELECT * FROM (SELECT {nothing}) WHERE false UNION ALL BY NAME {steps}
        )
    """


def _step(kind: str, number: int, which: str, fields: str) -> str:
    is_sent, is_task = kind == "task-sent", kind.startswith("task-")
    told = [
        f"'{kind}' AS type",
        f"{CLIENT if is_sent else 'worker'} AS hostname",
        f"{900 if is_sent else '1000 + i % ' + str(WORKERS)} AS pid",
        f"{'NULL' if is_sent else '1'} AS inc",
        f"i * 8 + {number} + 1 AS clock",
        f"t + {number} * 0.01 AS timestamp",
        f"t + {number} * 0.01 + 0.05 AS received",
        "'bench' AS recorder",
        *(["uuid", f"CAST(hash(i, {number}) >> 1 AS BIGINT) AS tie", "-1 AS present"] * is_task),
        *([fields] if fields else []),
    ]
    return f"SELECT {', '.join(told)} FROM tasks WHERE {which}"


def measure(directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The builds of all sizes, and the disk that they take."""
    made: dict[str, Any] = {"builds": {}}
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="history-", dir=directory) as temporary:
            history = History(Path(temporary))
            history.grow(size)
            say(f"{size:,} events")
            found = {"all": history.build()}
            news = []
            for _ in range(INCREMENTS):
                history.grow(SEGMENT_ROWS, disturbed=True)
                news.append(history.build())
            found["new"] = min(news, key=lambda one: one["cpu s"])
            found["nothing"] = history.build()
            if size == SIZES[min(1, len(SIZES) - 1)]:
                for _ in range(MORE_INCREMENTS):
                    history.grow(SEGMENT_ROWS, disturbed=True)
                    history.build()
                tables, log = history.bytes_of(history.tables), history.bytes_of(history.log)
                made["tables to log"] = tables / log
            made["builds"][size] = found
            say(json.dumps(found))
            if size == SIZES[-1]:
                made["following"] = history.follow()
                say(json.dumps(made["following"]))
    return made


def figures(made: dict[str, Any]) -> dict[str, Callable[[], float]]:
    """The figures that are required, of what was measured."""

    def of(size: int, what: str, unit: str = "cpu s") -> float:
        return float(made["builds"][size][what][unit])

    small, middle, large = 10_000, 1_000_000, 5_000_000
    return {
        "new at 5 M to new at 1 M": lambda: of(large, "new") / of(middle, "new"),
        "new at 5 M, CPU s": lambda: of(large, "new"),
        "all of 5 M, CPU s": lambda: of(large, "all"),
        "nothing new, CPU s": lambda: of(large, "nothing"),
        "tables to log, bytes": lambda: float(made["tables to log"]),
        "10,000 events, wall s": lambda: of(small, "all", "wall s"),
        "10,000 events, GB": lambda: of(small, "all", "peak") / 1e9,
        "following, age in s": lambda: float(made["following"]["age s"]),
    }


def table(builds: dict[int, dict[str, dict[str, float]]]) -> str:
    """The builds as a table in Markdown."""
    lines = [
        "| history | all of it | +50,000 events | nothing new | peak memory |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for size, found in builds.items():
        cells = (
            f"{found[what]['cpu s']:.1f} CPU s ({found[what]['wall s']:.1f} s)"
            for what in ("all", "new", "nothing")
        )
        peak = max(one["peak"] for one in found.values()) / 1e9
        lines.append(f"| {size:,} | {' | '.join(cells)} | {peak:.1f} GB |")
    return "\n".join(lines)


def main() -> int:
    """Measure, and print the table."""
    global SIZES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    SIZES = tuple(int(size) for size in options.sizes.split(","))
    made = measure(options.directory, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(made["builds"]))
    for name, value in figures(made).items():
        try:
            print(f"{name}: {value():.2f} ({REQUIRED[name][1]} {REQUIRED[name][0]})")
        except KeyError:
            continue
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
