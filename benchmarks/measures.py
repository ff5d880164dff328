"""The measures: each puts one contestant on stage, in fresh processes, and returns figures.

- *throughput*: tasks are queued, then the worker starts. The first tenth of them is left out,
  as start-up; the time runs from there to the end of the last one. Several kinds can be queued
  one after the other, each timed on its own.
- *sending*: tasks per second that one process sends, one by one and in batches.
- *waiting*: a worker of two processes with nothing to do: its memory, its processor time, the
  time from sending to starting a task at 100 tasks/s, and after half a second of silence.

Figures are named by what they are: `incr-2` is tasks per second of INCR on two processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.contestant import PACE_WARM_UP
from benchmarks.peers.work import KINDS
from benchmarks.stage import Contestant, Crew, Failed, Stage

SKIPPED = 0.1  # of the tasks, as start-up
TASKS_MAX = {"100k": 1500}
TASKS_MIN = {"100k": 100}
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured."""

    busy_s: float  # a throughput is taken over about so long
    send_s: float
    idle_s: float
    paced_count: int
    wakes_count: int


FULL = Amounts(busy_s=2.0, send_s=1.0, idle_s=3.0, paced_count=400, wakes_count=6)
QUICK = Amounts(busy_s=0.7, send_s=0.4, idle_s=1.5, paced_count=150, wakes_count=3)

PACED_PER_S = 100
WAKE_GAP_S = 0.5
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Who is measured, on what."""

    contestant: Contestant
    broker: str
    variant: str

    def commands(self, processes: int, *, events: bool = False) -> list[list[str]]:
        """Those that start its worker."""
        more = (self.contestant.events or []) if events else []
        found = self.contestant.variants[self.variant][str(processes)]
        return [[*command, *more] for command in found]


def throughput(
    stage: Stage,
    setting: Setting,
    kinds: Iterable[str],
    processes: int,
    per_s: float,
    seconds: float,
    *,
    events: bool = False,
) -> Figures:
    """Tasks per second of each kind; `per_s` is about what to expect."""
    counts = {kind: tasks_for(kind, per_s, seconds) for kind in kinds}
    total = sum(counts.values())
    stage.clear()
    name = setting.contestant.name
    stage.ask(name, setting.broker, "fill", *(f"{kind}:{n}" for kind, n in counts.items()))
    before: list[float] = []
    commands = setting.commands(processes, events=events)
    with stage.working(name, setting.broker, commands) as crew:
        skipped = math.ceil(total * SKIPPED)
        crew.wait(total, lambda: before.append(crew.cpu_s()), skipped)
        spent_s = crew.cpu_s() - before[0]
        records = crew.records()
    if (counted := stage.counted()) < counts.get("incr", 0):
        raise Failed(f"{counts['incr']} INCR tasks counted to {counted} only")
    mark = "-events" if events else ""
    found = {
        f"{kind}-{processes}{mark}": rate(
            [at for number, _, at in records if number == KINDS.index(kind)]
        )
        for kind in counts
    }
    if len(counts) == 1:
        (kind,) = counts
        found[f"{kind}-{processes}{mark}-cpu-us"] = 1e6 * spent_s / (total - skipped)
    return found


def tasks_for(kind: str, per_s: float, seconds: float) -> int:
    """How many tasks of a kind take about so long."""
    wanted = int(per_s * seconds)
    return max(TASKS_MIN.get(kind, 200), min(wanted, TASKS_MAX.get(kind, 60_000)))


def rate(times_ns: list[int]) -> float:
    """Tasks per second from the times at which they ended, less those that count as start-up."""
    times_ns.sort()
    first = int(len(times_ns) * SKIPPED)
    spent_ns = times_ns[-1] - times_ns[first]
    if spent_ns <= 0:
        raise Failed(f"{len(times_ns)} tasks are too few to be timed")
    return (len(times_ns) - 1 - first) / (spent_ns / 1e9)


def sending(stage: Stage, setting: Setting, seconds: float) -> Figures:
    """Tasks per second that one process sends."""
    found = {}
    for how in ("one", "batch") if setting.contestant.batch else ("one",):
        stage.clear()
        told = stage.ask(setting.contestant.name, setting.broker, "rate", how, seconds)
        found[f"send-{how}"] = told["per_s"]
    return found


def waiting(stage: Stage, setting: Setting, amounts: Amounts) -> Figures:
    """A worker of two processes that has little to do."""
    stage.clear()
    name, broker = setting.contestant.name, setting.broker
    with stage.working(name, broker, setting.commands(2)) as crew:
        warm_up = 200
        stage.ask(name, broker, "fill", f"noop:{warm_up}")
        crew.wait(warm_up)
        time.sleep(SETTLE_S)
        found = _idle(crew, amounts.idle_s)
        for what, count, per_s in (
            ("latency", amounts.paced_count, PACED_PER_S),
            ("wake", amounts.wakes_count, 1 / WAKE_GAP_S),
        ):
            before = crew.done_count()
            stage.ask(name, broker, "pace", count, per_s)
            crew.wait(before + PACE_WARM_UP + count)
            found |= _latencies(what, crew, count)
    return found


def _idle(crew: Crew, seconds: float) -> Figures:
    before_s, started = crew.awake_s(), time.monotonic()
    time.sleep(seconds)
    spent = (crew.awake_s() - before_s) / (time.monotonic() - started)
    rss_mib, pss_mib = crew.held_mib()
    return {"idle-cpu-percent": 100 * spent, "rss-mib": rss_mib, "pss-mib": pss_mib}


def _latencies(name: str, crew: Crew, count: int) -> Figures:
    """From sending to starting, of the last so many tasks."""
    stamps = [(sent, at) for kind, sent, at in crew.records() if KINDS[kind] == "stamp"]
    took_ms = [(at - sent) / 1e6 for sent, at in stamps[-count:]]
    return {f"{name}-p50-ms": percentile(took_ms, 50), f"{name}-p99-ms": percentile(took_ms, 99)}


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many per cent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
