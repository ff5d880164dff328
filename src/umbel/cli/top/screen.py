"""The screen of `umbel top`.

It takes events from a feed a few times a second, gives them to the figures and redraws the tables
from them. Only cells that changed are touched, so the cursor and the place scrolled to stay. While
it is paused events are still counted; the tables stand still. A broker that is gone is told in the
head and nothing else happens: the feed goes on trying.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from umbel.cli.top.figures import Figures
from umbel.cli.top.tables import TABLES, Table, View, rate
from umbel.wire.events import Event

TICK_S = 0.25
REDRAW_TICKS = 2
EVENTS_PER_TICK_MAX = 20_000

KEYS = (
    ("q", "quit", "quit", "leave"),
    ("p", "pause", "pause", "hold the tables, and go on; events are still counted"),
    ("s", "sort", "sort", "order the table with the focus by its next column"),
    ("tab", "app.focus_next", "switch", "go to the next table; shift+tab to the one before"),
    ("slash", "filter", "filter", "show rows with a word only; enter keeps it, esc drops it"),
    ("escape", "drop_filter", "", "drop the filter"),
    ("question_mark", "help", "keys", "show or hide this"),
)
_SHOWN_KEYS = {"slash": "/", "question_mark": "?", "escape": "esc"}


class Source(Protocol):
    """Where events come from; see `umbel.cli.feed`."""

    @property
    def condition(self) -> str:
        """How it stands with the broker, in a word or a line; empty when all is well."""

    @property
    def dropped(self) -> int:
        """Events that came faster than they were taken."""

    def drain(self, count_max: int) -> list[Event]:
        """What has come since."""


class Help(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,escape,q,enter,space", "app.pop_screen", show=False)
    ]

    def compose(self) -> ComposeResult:
        """One box."""
        text = Text()
        for key, _, _, meaning in KEYS:
            text.append(f"{_SHOWN_KEYS.get(key, key):>6}", "bold")
            text.append(f"   {meaning}\n")
        text.rstrip()
        box = Static(text, id="keys")
        box.border_title = "keys"
        yield box


class Top(App[None]):
    """See the module's text."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "umbel top"
    CSS = """
    #head { height: auto; padding: 0 1; background: $panel; }
    #tables { height: 1fr; }
    DataTable { height: 1fr; border: round $surface-lighten-2; }
    DataTable:focus { border: round $accent; }
    #nodes { max-height: 40%; }
    #word { display: none; height: 3; }
    Help { align: center middle; }
    #keys { width: auto; height: auto; padding: 1 2; border: round $accent; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(
                key,
                action,
                label,
                key_display=_SHOWN_KEYS.get(key, key),
                show=bool(label),
            )
            for key, action, label, _ in KEYS
        ),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        source: Source,
        place: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        figures: Figures | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.place = place
        self.figures = figures or Figures()
        self.paused = False
        self.word = ""
        self.orders = {table.id: table.first_order for table in TABLES}
        self._clock = clock
        self._ticks = 0

    def compose(self) -> ComposeResult:
        """The head, three tables, the filter, the keys."""
        yield Static(id="head", markup=False)
        with Vertical(id="tables"):
            for table in TABLES:
                yield DataTable(id=table.id, cursor_type="row", zebra_stripes=True)
        yield Input(placeholder="show rows with this word only", id="word")
        yield Footer()

    def on_mount(self) -> None:
        """Draw once, then as time goes on."""
        for table in TABLES:
            widget = self._widget(table)
            widget.add_columns(*(column.title for column in table.columns))
        self._widget(TABLES[0]).focus()
        self.draw()
        self.set_interval(TICK_S, self.tick)
        # The terminal gets its old screen back, also when somebody ends us.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)

    def tick(self) -> None:
        """Count what has come; redraw every other time."""
        now_s = self._clock()
        for event in self.source.drain(EVENTS_PER_TICK_MAX):
            self.figures.event(event, now_s)
        self._ticks += 1
        if self._ticks % REDRAW_TICKS == 0:
            self.draw()

    def draw(self) -> None:
        """Bring the screen up to date; only the head while it is paused."""
        if not self.is_running or not self.screen_stack:
            return
        base = self.screen_stack[0]
        now_s = self._clock()
        with self.batch_update():
            base.query_one("#head", Static).update(self._head(now_s))
            if not self.paused:
                for table in TABLES:
                    self._fill(table, now_s)

    # -- keys

    def action_pause(self) -> None:
        """Hold the tables, or let them go on."""
        self.paused = not self.paused
        self.draw()

    def action_sort(self) -> None:
        """Order the table with the focus by its next column."""
        table = self._table_with_focus()
        self.orders[table.id] = (self.orders[table.id] + 1) % len(table.columns)
        self._fill(table, self._clock())

    def action_filter(self) -> None:
        """Ask for a word."""
        field = self.query_one("#word", Input)
        field.display = True
        field.focus()

    def action_drop_filter(self) -> None:
        """Show everything again."""
        field = self.query_one("#word", Input)
        field.value = ""
        self._leave(field)

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    def on_input_changed(self, message: Input.Changed) -> None:
        """Filter as the word is typed."""
        self.word = message.value.strip()
        for table in TABLES:
            self._fill(table, self._clock())

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Keep the word."""
        self._leave(message.input)

    def _leave(self, field: Input) -> None:
        field.display = bool(field.value)
        if field.has_focus or self.focused is None:
            self._widget(TABLES[0]).focus()

    # -- drawing

    def _head(self, now_s: float) -> Text:
        totals = self.figures.totals(now_s)
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append("umbel top  ", "bold")
        head.append(self.place)
        condition = self.source.condition
        head.append("  ")
        head.append(condition or "connected", "bold red" if condition else "green")
        if self.paused:
            head.append("  paused", "bold yellow")
        head.append(
            f"\nnodes {totals.nodes_alive}/{totals.nodes} alive"
            f"   events {rate(totals.events_per_s)}/s"
            f"   tasks {rate(totals.ended_per_s)}/s"
            f"   failed {rate(totals.failed_per_s)}/s"
            f"   waiting {totals.waiting}   running {totals.running}"
        )
        missed = self.source.dropped + totals.forgotten
        if missed:
            head.append(f"   not shown {missed}", "yellow")
        advice = self._advice(totals.nodes_alive)
        if advice:
            head.append(f"\n{advice}", "yellow")
        return head

    def _advice(self, nodes_alive: int) -> str:
        if nodes_alive and not self.figures.task_event_count:
            return "heartbeats only so far: workers send events of tasks with -E"
        return ""

    def _fill(self, table: Table, now_s: float) -> None:
        order = self.orders[table.id]
        view = table.view(self.figures, now_s, order, self.word)
        widget = self._widget(table)
        widget.border_title = self._title(table, view, table.columns[order].title)
        while widget.row_count > len(view.cells):
            last = widget.ordered_rows[-1].key
            widget.remove_row(last)
        for row, cells in enumerate(view.cells):
            if row >= widget.row_count:
                widget.add_row(*cells)
                continue
            before = widget.get_row_at(row)
            for column, cell in enumerate(cells):
                if not _same(before[column], cell):
                    widget.update_cell_at(Coordinate(row, column), cell, update_width=True)

    def _title(self, table: Table, view: View, order: str) -> Text:
        shown = len(view.cells)
        counted = f"{shown} of {view.count}" if shown < view.count else f"{shown}"
        said = f"{table.title}: {counted}, by {order}"
        if not view.count:
            said = f"{table.title}: none with {self.word!r}" if self.word else table.empty
        elif self.word:
            said += f", with {self.word!r}"
        return Text(said)

    def _table_with_focus(self) -> Table:
        return next((t for t in TABLES if self._widget(t).has_focus), TABLES[0])

    def _widget(self, table: Table) -> DataTable[Any]:
        return self.screen_stack[0].query_one(f"#{table.id}", DataTable)


def _same(before: Any, now: Text) -> bool:
    return isinstance(before, Text) and before.plain == now.plain and before.style == now.style
