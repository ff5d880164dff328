"""The tables: from the JSON of a run to Markdown, and into the pages that show them.

A page has a section between two markers, the first of which names the file with the figures:

    <!-- figures: benchmarks/results/2026-11-16.json -->
    ...
    <!-- end of figures -->

Both pages and the chart are written by

    python -m benchmarks.report benchmarks/results/2026-11-16.json
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import chart, growth
from benchmarks.figures import BROKERS, NONE, TIMES, Results

ROOT = Path(__file__).resolve().parent.parent
CHART = "docs/benchmarks.svg"
SECTION = re.compile(r"<!-- figures: (\S+) -->\n.*?<!-- end of figures -->", re.DOTALL)

KINDS = {
    "incr-2": "INCR",
    "noop-2": "no-op",
    "sleep-2": "1 ms sleep",
    "1k-2": "1 KiB",
    "100k-2": "100 KiB",
    "incr-1": "INCR, 1 process",
}
WAITS = {
    "latency-p50-ms": ("p50 ms", 2),
    "latency-p99-ms": ("p99 ms", 1),
    "wake-p50-ms": ("woken p50 ms", 2),
    "idle-cpu-percent": ("idle CPU %", 2),
    "rss-mib": ("RSS MiB", 0),
    "pss-mib": ("PSS MiB", 0),
}


# -- sections --------------------------------------------------------------------------------


def full(results: Results) -> str:
    """All tables, for docs/performance.md."""
    parts = [about(results), f"![Tasks per second]({Path(CHART).name})"]
    for broker, label in BROKERS.items():
        if results.contestants(broker, "incr-2"):
            parts += [f"### {label}: tasks per second, 2 processes", throughput(results, broker)]
    if events := with_events(results):
        parts += ["### With events for monitors (`-E`)", events]
    if results.contestants("redis", "send-one") or results.contestants("amqp", "send-one"):
        parts += ["### Sending: tasks per second of one process", sending(results)]
    if rows := waits(results):
        parts += ["### A worker of 2 processes that waits", rows]
    if results.data.get("growth"):
        labels = {name: results.label(name) for name in results.data["contestants"]}
        parts += [
            "### Long queues and many queues, Redis",
            growth.table(results.data["growth"], labels),
        ]
    if results.data.get("bars"):
        parts += ["### What is promised", bars(results)]
    parts += ["### Who ran how", who(results)]
    return "\n\n".join(parts)


def short(results: Results) -> str:
    """The chart and the bare facts, for the README."""
    parts = [f"![Tasks per second of Umbel and its peers on Redis and RabbitMQ]({CHART})"]
    lines = [
        "| INCR task, 2 processes | Umbel | Celery | fastest other peer |",
        "| --- | ---: | ---: | ---: |",
    ]
    for broker, label in BROKERS.items():
        others = [
            row for row in chart.ranking(results, broker) if row[0] not in {"umbel", "celery"}
        ]
        own, celery = (results.median("incr-2", broker, name) for name in ("umbel", "celery"))
        if own is None:
            continue
        other = f"{others[0][1]:,.0f}, {results.label(others[0][0])}" if others else NONE
        lines.append(f"| {label}, tasks/s | {number(own)} | {number(celery)} | {other} |")
    parts.append("\n".join(lines))
    parts.append(
        f"{results.data['date']}, {_machine(results)}. How it was measured, and the rest: "
        "[Performance](docs/performance.md)."
    )
    return "\n\n".join(parts)


# -- tables ----------------------------------------------------------------------------------


def about(results: Results) -> str:
    """When and on what."""
    servers = results.data["servers"]
    named = {"redis": "Redis", "rabbitmq": "RabbitMQ"}
    software = ", ".join(f"{named[name]} {version}" for name, version in servers.items())
    rounds = results.data["rounds"]
    return (
        f"{results.data['date']}, {_machine(results)}, {software}; "
        f"median of {rounds} round{'s' * (rounds > 1)}."
    )


def throughput(results: Results, broker: str) -> str:
    """One broker's contestants, the fastest first."""
    rows = [name for name, _ in chart.ranking(results, broker)]
    columns = [figure for figure in KINDS if results.contestants(broker, figure)]

    def times(name: str) -> str:
        ratio = results.ratio("incr-2", broker, name)
        return NONE if name == "umbel" or ratio is None else f"{ratio:.1f}{TIMES}"

    head = ["", KINDS["incr-2"], "Umbel is", *(KINDS[key] for key in columns if key != "incr-2")]
    return table(
        head,
        (
            [
                results.label(name),
                number(results.median("incr-2", broker, name)),
                times(name),
                *(number(results.median(k, broker, name)) for k in columns if k != "incr-2"),
            ]
            for name in rows
        ),
    )


def with_events(results: Results) -> str:
    """INCR on two processes, and what events leave of it."""
    rows = []
    for broker, label in BROKERS.items():
        for name in results.contestants(broker, "incr-2-events"):
            told = results.median("incr-2-events", broker, name)
            plain = results.median("incr-2", broker, name)
            kept = f"{told / plain:.0%}" if told and plain else NONE
            rows.append([f"{results.label(name)}, {label}", number(told), kept])
    return table(["", "tasks/s", "of the rate without"], rows) if rows else ""


def sending(results: Results) -> str:
    """One by one and in batches, on each broker."""
    names = {name: None for broker in BROKERS for name in results.contestants(broker, "send-one")}
    head = [
        "",
        *(f"{label}, {how}" for label in BROKERS.values() for how in ("one by one", "batched")),
    ]
    return table(
        head,
        (
            [results.label(name)]
            + [
                number(results.median(figure, broker, name))
                for broker in BROKERS
                for figure in ("send-one", "send-batch")
            ]
            for name in names
        ),
    )


def waits(results: Results) -> str:
    """Latency, idle time and memory."""
    rows = []
    for broker, label in BROKERS.items():
        for name in results.contestants(broker, "latency-p50-ms"):
            values = (
                number(results.median(figure, broker, name), digits)
                for figure, (_, digits) in WAITS.items()
            )
            rows.append([f"{results.label(name)}, {label}", *values])
    return table(["", *(title for title, _ in WAITS.values())], rows) if rows else ""


def bars(results: Results) -> str:
    """Promised, got, met."""
    rows = []
    for bar in results.data.get("bars", ()):
        sign = "at most" if bar["at_most"] else "at least"
        got = f"{bar['got']:.2f} {bar['unit']}"
        met = "yes" if bar["met"] else "**no**"
        rows.append([bar["name"], f"{sign} {bar['wanted']:g} {bar['unit']}", got, met])
    return table(["", "promised", "got", "met"], rows)


def who(results: Results) -> str:
    """Versions and settings."""
    rows = []
    for name, known in results.data["contestants"].items():
        variants = results.data["variants"].get(name, {})
        chosen = ", ".join(
            f"{variant} ({BROKERS[broker]})" if len(set(variants.values())) > 1 else variant
            for broker, variant in variants.items()
            if len(set(variants.values())) > 1 or broker == next(iter(variants))
        )
        rows.append([known["label"], known["version"], chosen, known["acks"]])
    return table(["", "version", "settings, the fastest of those tried", "acknowledged"], rows)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Of Markdown; all but the first column are to the right where they hold numbers."""
    body = list(rows)
    marks = [
        "---:" if place and all(_numeric(row[place]) for row in body) else "---"
        for place in range(len(head))
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, marks, *body])


def number(value: float | None, digits: int = 0) -> str:
    """A number to be read by people."""
    return NONE if value is None else f"{value:,.{digits}f}"


def _numeric(cell: str) -> bool:
    return cell == NONE or cell[:1].isdigit()


def _machine(results: Results) -> str:
    machine = results.data["machine"]
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, "
        f"Python {machine['python']}"
    )


# -- pages -----------------------------------------------------------------------------------

PAGES: dict[str, Callable[[Results], str]] = {"docs/performance.md": full, "README.md": short}


def with_section(page: str, source: str, text: str) -> str:
    """The page with another text between its markers."""
    found, count = SECTION.subn(
        lambda _: f"<!-- figures: {source} -->\n{text}\n<!-- end of figures -->", page
    )
    assert count == 1, "a page has one section of figures"
    return found


def publish(source: Path) -> None:
    """Show the figures of that file in both pages and in the chart."""
    results = Results.read(source)
    for name, section in PAGES.items():
        page = ROOT / name
        name_of_source = source.resolve().relative_to(ROOT).as_posix()
        page.write_text(with_section(page.read_text(), name_of_source, section(results)))
    (ROOT / CHART).write_text(chart.draw(results))


if __name__ == "__main__":
    publish(Path(sys.argv[1]))
