"""The parts of the page: the summary and the plots here, the tables in `listings`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from umbel.pipeline.report import charts, listings
from umbel.pipeline.report.facts import BARS_MAX, Facts, Listing
from umbel.pipeline.report.pieces import Column, Row, Section, table_of
from umbel.pipeline.report.shapes import NOTHING, legend, number, seconds, share, text


def sections(facts: Facts) -> list[Section]:
    """All parts that the tables can tell, in their order."""
    made = (make(facts) for make in _ALL)
    return [section for section in made if section is not None]


# -- the summary -------------------------------------------------------------------------------


def tiles(facts: Facts) -> str:
    """The most important numbers."""
    total = facts.totals()
    found: list[tuple[str, str, bool]] = []

    def add(value: str, label: str, bad: bool = False) -> None:
        found.append((value, label, bad))

    if "tasks" in total:
        add(number(total["tasks"]), "tasks")
        add(share(total["succeeded"], total["ended"]), "of ended tasks succeeded")
        add(number(total["failed"]), "failed", bool(total["failed"]))
    if "executions" in total:
        add(number(total["executions"]), "executions")
    for key, label in (("wait_p95", "waited, p95"), ("run_p95", "ran, p95")):
        if key in total:
            add(seconds(total[key]), label)
    if "nodes" in total:
        lost = f", {total['lost']:,} lost" if total["lost"] else ""
        add(number(total["nodes"]), f"nodes{lost}", bool(total["lost"]))
    if total.get("elections"):
        over = total["elections"] - total["open"]
        still = f", {total['open']:,} still open" if total["open"] else ""
        label = f"elections exactly once{still}"
        add(f"{total['once']:,} / {over:,}", label, total["once"] < over)
    if "events" in total:
        add(number(total["events"]), "events")
    if "missing" in total:
        add(number(total["missing"]), "events missing", bool(total["missing"]))
    if total.get("violations"):
        add(number(total["violations"]), "ran after revocation", True)
    return '<div class="tiles">' + "".join(
        f'<div class="tile{" alarm" if bad else ""}"><b>{value}</b><span>{label}</span></div>'
        for value, label, bad in found
    ) + "</div>"  # fmt: skip


# -- plots -------------------------------------------------------------------------------------


def _throughput(facts: Facts) -> Section | None:
    if facts.span is None or not facts.has("timeline", "timestamp", "type"):
        return None
    counts, sent = facts.throughput()
    if not any(map(any, counts.values())) and not any(sent):
        return None
    shown = [kind for kind, by_column in counts.items() if any(by_column)]
    keys = [(charts.TYPE_CLASS[kind], kind.removeprefix("task-")) for kind in shown]
    if any(sent):
        keys.append(("sent", "sent"))
    outside = ""
    if facts.outside:
        outside = f" {facts.outside:,} events have times far outside and are not drawn."
    return Section(
        "throughput",
        "Throughput",
        f"Tasks per second, in steps of {_step(facts.span.step)}.{outside}",
        _wide(charts.throughput(facts.span, counts, sent)) + legend(keys),
    )


def _wide(drawn: str) -> str:
    """A picture that a narrow screen scrolls."""
    return f'<div class="scroll wide">{drawn}</div>'


def _step(value: float) -> str:
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if value >= unit_s:
            return f"{value / unit_s:g} {unit}"
    return f"{value * 1_000:g} ms"


def _times(facts: Facts) -> Section | None:
    parts = []
    for what, title in (("wait", "Waiting, from sent to started"), ("run", "Running")):
        found = facts.percentiles(what)
        if found:
            assert facts.span is not None
            drawn = charts.percentiles(facts.span, found, title)
            parts.append(f"<div><h3>{title}</h3>{drawn}</div>")
    table = _kinds(facts.kinds())
    if not parts and not table:
        return None
    keys = legend((("a", "p50"), ("b", "p95"), ("c", "p99"))) if parts else ""
    plots = f'<div class="two">{"".join(parts)}</div>{keys}' if parts else ""
    return Section("times", "Waits and runs", "", plots + table)


def _kinds(found: Listing) -> str:
    runs = [row["run"] for row in found.rows if row.get("run")]
    low = max(min((parts[0] for parts in runs), default=0.001), 1e-4)
    high = max(max((parts[2] for parts in runs), default=1.0), low * 10)

    def part(what: str, number_: int) -> Callable[[Row], str]:
        return lambda row: seconds(row[what][number_]) if row.get(what) else NOTHING

    columns = [
        Column("task", lambda row: text(row["name"]) or '<span class="soft">(no name)</span>', "w"),
        Column("tasks", lambda row: number(row["n"]), "n"),
        Column("succeeded", lambda row: number(row["succeeded"]), "n"),
        Column("failed", lambda row: number(row["failed"]), "n"),
        Column("retries", lambda row: number(row["again"]), "n"),
        Column("wait p50", part("wait", 0), "n"),
        Column("p95", part("wait", 1), "n"),
        Column("p99", part("wait", 2), "n"),
        Column("run p50", part("run", 0), "n"),
        Column("p95", part("run", 1), "n"),
        Column("p99", part("run", 2), "n"),
        Column("run: p50, p95, p99", lambda row: charts.range_of(row.get("run"), low, high), "pic"),
    ]
    return table_of(found, columns)


def _lanes(facts: Facts) -> Section | None:
    wanted = ("uuid", "name", "worker", "started", "ended", "outcome")
    if facts.span is None or not facts.has("attempts", *wanted):
        return None
    bars, workers = facts.bars(), facts.busiest()
    if not bars.rows:
        return None
    names = [row["worker"] for row in workers.rows]
    lead = "What each worker was busy with; rest the pointer on a bar to see the task."
    if workers.count > len(names):
        lead += f" The busiest {len(names)} of {workers.count:,} workers are shown."
    content = ""
    if bars.count > len(bars.rows):
        content += "<h3>Tasks at once</h3>" + _wide(charts.heat(facts.span, facts.load(), names))
        content += f"<h3>The last {BARS_MAX:,} of {bars.count:,} executions</h3>"
    shown = [bar for bar in bars.rows if bar["worker"] in set(names)]
    colours = _colours(shown)
    present = {bar["worker"] for bar in shown}
    lanes = charts.lanes(shown, [name for name in names if name in present], colours)
    content += _wide(lanes)
    outcomes = {bar["outcome"] for bar in shown}
    keys = [(colour, text(name) or "(no name)") for name, colour in colours.items()]
    if len({bar["name"] for bar in shown}) > len(colours):
        keys.append(("c7", "other tasks"))
    keys += [
        (kind, label)
        for outcome, kind, label in (
            ("FAILURE", "bad", "failed"),
            ("RETRY", "again", "to be tried again"),
            ("REVOKED", "gone", "revoked"),
        )
        if outcome in outcomes
    ]
    if any(bar["ended"] is None for bar in shown):
        keys.append(("open", "no end seen"))
    return Section("workers", "Workers", lead, content + legend(keys) + listings.lives(facts))


def _colours(bars: Sequence[Row]) -> dict[Any, str]:
    counts: dict[Any, int] = {}
    for bar in bars:
        counts[bar["name"]] = counts.get(bar["name"], 0) + 1
    common = sorted(counts, key=lambda name: (-counts[name], str(name)))[: charts.NAMES_MAX]
    return {name: f"c{number_}" for number_, name in enumerate(common)}


_ALL: Final = (
    _throughput,
    _times,
    _lanes,
    listings.elections,
    listings.failures,
    listings.revocations,
    listings.lineage,
    listings.clocks,
    listings.gaps,
    listings.runs,
)
