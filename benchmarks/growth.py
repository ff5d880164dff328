"""How the cost of a task grows with what waits: tasks per second at 10 to 10⁶ waiting tasks,
and over 1, 10 and 100 queues. Umbel on Redis, Celery for reference where it can be afforded.

At W waiting tasks, W + N are queued and the N that run first are timed: W wait all the while.
Each size has a database of its own, filled once and topped up between rounds, so that the sizes
take turns on one server that holds the same the whole time. Celery gets the messages that Umbel
has sent, as Celery's own would take minutes to send.

    python -m benchmarks.growth [--rounds 3] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import NONE
from benchmarks.measures import SKIPPED, rate
from benchmarks.stage import Contestant, Crew, Stage, missing, open_stage

WAITING = (10, 1_000, 100_000, 1_000_000)
QUEUES = (1, 10, 100)
DEFAULT_QUEUE = "celery"
BUSY_S = 2.5
QUICK_BUSY_S = 0.8
WITHIN = 0.9  # the rate at 10⁶ waiting, of that at 10³

Growth = dict[str, dict[str, dict[str, Any]]]


class Field:
    """One contestant, the sizes it is measured at, and what was found."""

    def __init__(self, stage: Stage, contestant: Contestant, variant: str, busy_s: float) -> None:
        self.stage = stage
        self.contestant = contestant
        self.variant = variant
        self.timed = max(1000, int(contestant.rough_per_s * busy_s))
        self._started = 0
        self.rates: dict[str, list[float]] = {}
        self.costs_us: dict[str, list[float]] = {}

    def measure(self, key: str, db: int, waiting: int, queues: list[str]) -> None:
        """Have as many queued as are needed, and time the first of them."""
        client = self.stage.redis(db)
        client.delete("unacked", "unacked_index", "unacked_mutex")  # of the worker before
        short = waiting + self.timed - sum(client.llen(name) for name in queues)
        if short > 0:
            self.stage.ask("umbel", "redis", "spread", short, *queues, db=db)
        self.stage.log.write_bytes(b"")
        (command,) = self.contestant.variants[self.variant]["2"]
        before: list[float] = []
        # Under a new name: the worker before was killed, and its name may still be taken.
        self._started += 1
        named = [*command, "-n", f"growth{self._started}@%h", "-Q", ",".join(queues)]
        name, chosen = self.contestant.name, [named]
        with self.stage.working(name, "redis", chosen, db=db) as crew:
            skipped = math.ceil(self.timed * SKIPPED)
            crew.wait(self.timed, lambda: before.append(self._spent_s(crew)), skipped)
            spent_s = self._spent_s(crew) - before[0]
            records = crew.records()
        times = sorted(at for _, _, at in records)[: self.timed]
        found = rate(times)
        print(f"growth       redis  {name:15} {key} {found:,.0f}", file=sys.stderr, flush=True)
        self.rates.setdefault(key, []).append(found)
        self.costs_us.setdefault(key, []).append(1e6 * spent_s / (len(records) - skipped))

    def measure_all(self, sizes: list[int]) -> None:
        """Every size once, each in a database of its own."""
        for db, size in enumerate(WAITING):
            if size in sizes:
                self.measure(f"waiting {size}", db, size, [DEFAULT_QUEUE])
        for db, count in enumerate(QUEUES, start=len(WAITING)):
            self.measure(f"queues {count}", db, 0, [f"queue{place}" for place in range(count)])

    def _spent_s(self, crew: Crew) -> float:
        return crew.cpu_s() + self.stage.redis_cpu_s()

    def medians(self) -> dict[str, dict[str, Any]]:
        """Tasks per second and processor time of worker and server, by size."""
        found: dict[str, dict[str, Any]] = {"waiting": {}, "queues": {}, "cpu_us": {}}
        for key, values in self.rates.items():
            kind, _, size = key.partition(" ")
            found[kind][size] = statistics.median(values)
        for key, values in self.costs_us.items():
            found["cpu_us"][key] = statistics.median(values)
        return found


def measure(
    stage: Stage, contestants: list[tuple[Contestant, str]], rounds: int, *, quick: bool = False
) -> Growth:
    """All sizes in turn, for each of the contestants in turn."""
    stage.clear()
    busy_s = QUICK_BUSY_S if quick else BUSY_S
    fields = [Field(stage, contestant, variant, busy_s) for contestant, variant in contestants]
    sizes = [size for size in WAITING if not quick or size < 1_000_000]
    for number in range(rounds):
        for field in fields:
            own = field.contestant.name == "umbel"
            if own or number == 0:  # the other is for reference
                field.measure_all([size for size in sizes if own or size < 1_000_000])
    stage.clear()  # a million messages are in the way of what comes next
    return {field.contestant.name: field.medians() for field in fields}


def table(growth: Growth, labels: dict[str, str]) -> str:
    """In Markdown."""
    names = {"10": "10", "1000": "10³", "100000": "10⁵", "1000000": "10⁶"}
    lines = [
        "| tasks/s | " + " | ".join(f"{names[str(size)]} waiting" for size in WAITING) + " | "
        + " | ".join(f"{count} queue{'s' * (count > 1)}" for count in QUEUES) + " |",
        "| --- |" + " ---: |" * (len(WAITING) + len(QUEUES)),
    ]  # fmt: skip
    for name, found in growth.items():
        rates = [found["waiting"].get(str(size)) for size in WAITING]
        rates += [found["queues"].get(str(count)) for count in QUEUES]
        cells = " | ".join(NONE if value is None else f"{value:,.0f}" for value in rates)
        lines.append(f"| {labels.get(name, name)} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; exit 1 when a longer queue costs more than is promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="without 10⁶, one round")
    parser.add_argument("--only", choices=("umbel", "celery"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [options.only] if options.only else ["umbel", "celery"]
    if found := missing():
        raise SystemExit("missing: " + "; ".join(found))
    with open_stage(("redis",)) as stage:
        contestants = [stage.describe(name) for name in names]
        chosen = [(one, next(iter(one.variants))) for one in contestants]
        growth = measure(stage, chosen, 1 if options.quick else options.rounds, quick=options.quick)
    print(table(growth, {one.name: one.label for one in contestants}))
    if options.json:
        options.json.write_text(json.dumps(growth, indent=1))
    waiting = growth.get("umbel", {}).get("waiting", {})
    if "1000000" not in waiting:
        return 0
    kept = waiting["1000000"] / waiting["1000"]
    print(f"10⁶ over 10³ waiting = {kept:.2f} (at least {WITHIN})")
    return 0 if kept >= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
