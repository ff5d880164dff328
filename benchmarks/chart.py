"""The chart: tasks per second of the INCR task on two processes, a bar for each contestant.

Written by hand as SVG, without a background. Its colours follow the reader's scheme, also where
the picture is shown by `<img>`, as on a page of a repository.
"""

from __future__ import annotations

from html import escape

from benchmarks.figures import BROKERS, TIMES, Results

FIGURE = "incr-2"
WIDTH, NAME_WIDTH, VALUE_WIDTH = 720, 130, 130
BAR, GAP, HEAD = 18, 8, 34

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 14px; }
.note { font-size: 12px; fill: #59636e; }
.peer { fill: #a8b1bb; }
.own { fill: #2f7d4f; }
.own-name { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .note { fill: #9198a1; }
  .peer { fill: #5a636e; }
  .own { fill: #4fbf7c; }
}
"""


def draw(results: Results) -> str:
    """The whole picture."""
    parts: list[str] = []
    top = 0
    for broker, title in BROKERS.items():
        rows = ranking(results, broker)
        if rows:
            parts += _panel(results, title, rows, top)
            top += HEAD + len(rows) * (BAR + GAP) + 14
    parts.append(f'<text class="note" x="0" y="{top + 4}">{escape(_note(results))}</text>')
    height = top + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="t">'
    )
    title = f'<title id="t">{escape(_summary(results))}</title>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def ranking(results: Results, broker: str) -> list[tuple[str, float]]:
    """Contestants and their medians, the fastest first."""
    found = [
        (name, results.median(FIGURE, broker, name) or 0.0)
        for name in results.contestants(broker, FIGURE)
    ]
    return sorted(found, key=lambda row: -row[1])


def _panel(results: Results, title: str, rows: list[tuple[str, float]], top: int) -> list[str]:
    longest = rows[0][1] or 1.0
    own = results.median(FIGURE, _key(title), "umbel")
    lines = [f'<text class="title" x="0" y="{top + 18}">{title}: tasks per second</text>']
    for number, (name, value) in enumerate(rows):
        y = top + HEAD + number * (BAR + GAP)
        width = max(1.0, (WIDTH - NAME_WIDTH - VALUE_WIDTH) * value / longest)
        kind = "own" if name == "umbel" else "peer"
        bold = ' class="own-name"' if name == "umbel" else ""
        label = escape(results.label(name))
        words = f"{value:,.0f}"
        if own and name != "umbel" and value:
            words += f"  (1/{own / value:.1f})" if own >= value else f"  ({value / own:.1f}{TIMES})"
        size = f'width="{width:.1f}" height="{BAR}"'
        lines += [
            f'<text{bold} x="{NAME_WIDTH - 10}" y="{y + 14}" text-anchor="end">{label}</text>',
            f'<rect class="{kind}" x="{NAME_WIDTH}" y="{y}" {size} rx="2"/>',
            f'<text{bold} x="{NAME_WIDTH + width + 8:.1f}" y="{y + 14}">{words}</text>',
        ]
    return lines


def _key(title: str) -> str:
    return next(broker for broker, name in BROKERS.items() if name == title)


def _note(results: Results) -> str:
    machine = results.data["machine"]
    return (
        f"A task is one Redis INCR; 2 worker processes; {results.data['date']}, "
        f"{machine['cores']} cores, median of {results.data['rounds']}"
    )


def _summary(results: Results) -> str:
    told = []
    for broker, title in BROKERS.items():
        rows = ", ".join(
            f"{results.label(name)} {value:,.0f}" for name, value in ranking(results, broker)
        )
        if rows:
            told.append(f"Tasks per second on {title}: {rows}.")
    return " ".join(told)
