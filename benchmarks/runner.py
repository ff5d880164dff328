"""`make bench`: Umbel and its peers in turn on the same servers, round after round.

Every figure of every contestant is taken once per round, INCR on two processes three times; the
contestants take turns, and medians count. Before the first round the settings that a contestant
offers are tried on each broker, in turn, and the fastest is taken. What failed is named, and the
run goes on.

    python -m benchmarks.runner [--quick] [--rounds 3] [--only NAME] [--measure NAME]

A whole run writes benchmarks/results/DATE.json, shows it in docs/performance.md, the README and
the chart, and exits with 1 when something that is promised was missed. `--quick` is for work on
the code: one round, fewer tasks, fewer measures of the peers, no trials. It writes quick.json, and
a run of some parts partial.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from benchmarks import bars, growth, measures, report, small
from benchmarks.figures import BROKERS, Results
from benchmarks.measures import Amounts, Figures, Setting
from benchmarks.peers import NAMES
from benchmarks.stage import ROOT, Contestant, Failed, Stage, machine, missing, open_stage
from tests.servers import Missing

MEASURES = ("incr", "single", "kinds", "sending", "waiting", "events", "growth", "small")
QUICK_MEASURES = ("incr", "kinds", "sending", "waiting", "events")
PASSES = {"incr": 3}  # in a round: most is said about it, and machines have slow seconds
OF_EACH = {"umbel", "celery"}  # the others have some measures less often
KINDS = ("noop", "sleep", "1k", "100k")
TRIAL_S, TRIALS = 1.0, 3


class Run:
    """One run: who, what, how often, and what was found."""

    def __init__(self, stage: Stage, options: argparse.Namespace) -> None:
        self.stage = stage
        self.measures = options.measure or (QUICK_MEASURES if options.quick else MEASURES)
        self.chosen = bool(options.measure or options.only)
        self.rounds = 1 if options.quick else options.rounds
        self.quick = options.quick
        self.amounts: Amounts = measures.QUICK if options.quick else measures.FULL
        self.failures: list[str] = []
        self.contestants: list[Contestant] = []
        self.settings: list[Setting] = []
        self.results = Results(
            {
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "machine": machine(),
                "servers": stage.versions(),
                "rounds": self.rounds,
                "quick": self.quick,
                "contestants": {},
                "variants": {},
                "figures": {},
            }
        )
        for name in options.only or NAMES:
            self._meet(name)

    def _meet(self, name: str) -> None:
        try:
            met = self.stage.describe(name)
        except Failed as failed:
            self._failed(f"{name} cannot take part", failed)
            return
        self.contestants.append(met)
        known = {"label": met.label, "version": met.version, "acks": met.acks}
        self.results.data["contestants"][name] = known

    # -- the course of it --------------------------------------------------------------------

    def go(self) -> None:
        """Everything, in turn."""
        self.settings = list(self._settings())
        for number in range(self.rounds):
            for measure in self.measures:
                for turn in range(1 if self.quick else PASSES.get(measure, 1)):
                    # Each begins with another one, so that no one is always first.
                    for setting in self._turned(number + turn):
                        if self._wanted(measure, setting, number):
                            self._take(measure, setting, number)
        if "growth" in self.measures:
            self._growth()
        self.results.data["bars"] = bars.check(self.results)

    def _settings(self) -> Iterator[Setting]:
        """The fastest settings of each contestant on each broker."""
        for broker in BROKERS:
            for contestant in self.contestants:
                if broker in contestant.brokers and broker in self.stage.brokers:
                    tried = [Setting(contestant, broker, name) for name in contestant.variants]
                    sure = self.quick or len(tried) == 1
                    best = tried[0] if sure else self._fastest(tried)
                    chosen = self.results.data["variants"].setdefault(contestant.name, {})
                    chosen[broker] = best.variant
                    yield best

    def _fastest(self, tried: list[Setting]) -> Setting:
        found: dict[str, list[float]] = {one.variant: [] for one in tried}
        for _ in range(TRIALS):
            for one in tried:
                found[one.variant].append(self._trial(one))
        return max(tried, key=lambda one: statistics.median(found[one.variant]))

    def _trial(self, setting: Setting) -> float:
        per_s = setting.contestant.rough_per_s
        try:
            found = measures.throughput(self.stage, setting, ("incr",), 2, per_s, TRIAL_S)
        except Failed as failed:
            self._failed(f"trial of {setting.contestant.name}, {setting.variant}", failed)
            return 0.0
        self._say("trial", setting, {setting.variant: found["incr-2"]})
        return found["incr-2"]

    def _wanted(self, measure: str, setting: Setting, number: int) -> bool:
        """Whether to take it: of the peers that are only there to be compared, not everything."""
        if setting.contestant.name in OF_EACH or self.chosen:
            return True
        if measure == "waiting":
            return number == 0 and not self.quick
        return not (measure == "kinds" and self.quick)

    def _turned(self, number: int) -> list[Setting]:
        first = number % max(1, len(self.settings))
        return self.settings[first:] + self.settings[:first]

    def _take(self, measure: str, setting: Setting, number: int) -> None:
        started = time.monotonic()
        try:
            for found in self._figures(measure, setting):
                for figure, value in found.items():
                    self.results.add(figure, setting.broker, setting.contestant.name, value)
                self._say(f"{number + 1}/{self.rounds} {measure}", setting, found, started)
        except Failed as failed:
            what = f"{measure} of {setting.contestant.name} on {BROKERS[setting.broker]}"
            self._failed(what, failed)

    def _figures(self, measure: str, setting: Setting) -> Iterator[Figures]:
        stage, busy_s = self.stage, self.amounts.busy_s
        two, one = self._expected(setting, 2), self._expected(setting, 1)
        if measure == "incr":
            yield measures.throughput(stage, setting, ("incr",), 2, two, busy_s)
        elif measure == "single":
            yield measures.throughput(stage, setting, ("incr",), 1, one, busy_s)
        elif measure == "kinds":
            yield measures.throughput(stage, setting, KINDS, 2, two, busy_s / 2)
        elif measure == "events" and setting.contestant.events:
            yield measures.throughput(stage, setting, ("incr",), 2, two, busy_s, events=True)
        elif measure == "sending":
            yield measures.sending(stage, setting, self.amounts.send_s)
        elif measure == "waiting":
            yield measures.waiting(stage, setting, self.amounts)

    def _expected(self, setting: Setting, processes: int) -> float:
        """What was measured last, or about what can be."""
        name = setting.contestant.name
        known = self.results.median(f"incr-{processes}", setting.broker, name)
        return known or setting.contestant.rough_per_s / (1 if processes == 2 else 1.5)

    def _growth(self) -> None:
        variants = self.results.data["variants"]
        chosen = [
            (one, variants[one.name]["redis"])
            for one in self.contestants
            if one.name in {"umbel", "celery"} and "redis" in variants.get(one.name, {})
        ]
        try:
            found = growth.measure(self.stage, chosen, self.rounds, quick=self.quick)
            self.results.data["growth"] = found
        except Failed as failed:
            self._failed("growth", failed)

    # -- what it says ------------------------------------------------------------------------

    def _say(self, what: str, setting: Setting, found: Figures, started: float = 0.0) -> None:
        figures = "  ".join(f"{name} {value:,.6g}" for name, value in found.items())
        took = f"  [{time.monotonic() - started:.1f} s]" if started else ""
        who = f"{setting.broker:6} {setting.contestant.name:15}"
        print(f"{what:12} {who} {figures}{took}", file=sys.stderr, flush=True)

    def _failed(self, what: str, failed: Failed) -> None:
        print(f"FAILED: {what}: {failed}", file=sys.stderr, flush=True)
        self.failures.append(what)


def conclude(run: Run, whole: bool, missed: list[str]) -> int:
    """Keep, show and judge what was found."""
    results = run.results
    results.data["failures"] = run.failures
    stem = results.data["date"] if whole else ("quick" if run.quick else "partial")
    kept = ROOT / "benchmarks" / "results" / f"{stem}.json"
    results.write(kept)
    kept.with_suffix(".md").write_text(report.full(results) + "\n")
    print(report.full(results))
    if whole and not run.failures:  # pages show whole runs only
        report.publish(kept)
    print(f"\nkept in {kept.relative_to(ROOT)}")
    missed = [*run.failures, *(f"benchmarks/{name}.py" for name in missed)]
    for bar in results.data["bars"]:
        sign = "<=" if bar["at_most"] else ">="
        words = f"{bar['name']}: {bar['got']:.2f} {bar['unit']} ({sign} {bar['wanted']:g})"
        print(f"{'met   ' if bar['met'] else 'MISSED'} {words}")
        missed += [] if bar["met"] else [bar["name"]]
    if whole:
        unmeasured = len(bars.BARS) - len(results.data["bars"])
        missed += [f"{unmeasured} bars were not measured"] if unmeasured else []
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


def main() -> int:
    """Run, and exit with 1 when something was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer tasks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME")
    parser.add_argument("--measure", action="append", choices=MEASURES, metavar="NAME")
    parser.add_argument("--broker", action="append", choices=BROKERS, metavar="NAME")
    options = parser.parse_args()
    whole = not (options.quick or options.only or options.measure or options.broker)
    if found := missing():
        raise SystemExit("missing: " + "; ".join(found))
    started = time.monotonic()
    try:
        with open_stage(tuple(options.broker or BROKERS)) as stage:
            run = Run(stage, options)
            run.go()
    except Missing as gone:
        raise SystemExit(
            f"missing: the program {gone}; `make setup` installs it or says how"
        ) from None
    missed = small.run() if "small" in run.measures and not options.only else []
    code = conclude(run, whole, missed)
    print(f"took {(time.monotonic() - started) / 60:.1f} min")
    return code


if __name__ == "__main__":
    sys.exit(main())
