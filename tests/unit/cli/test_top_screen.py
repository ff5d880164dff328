"""The screen of `umbel top`, driven by Textual's own pilot on a feed made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from tests.unit.cli.cluster_script import Event, Script
from umbel.cli.feed import GONE
from umbel.cli.top.screen import KEYS, Help, Top
from umbel.cli.top.tables import NODES, RUNNING, TYPES, Table

Play = Callable[["Pilot[None]", "Bench"], Awaitable[None]]


class HandFeed:
    """Gives what a test puts in."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.condition = ""
        self.dropped = 0

    def drain(self, count_max: int) -> list[Event]:
        taken, self.events = self.events[:count_max], self.events[count_max:]
        return taken


class Bench:
    """A screen with its feed and a time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.feed = HandFeed()
        self.script = Script()
        self.top = Top(self.feed, "redis://h/0", clock=lambda: self.now_s)

    def give(self, *events: Event) -> None:
        """Events arrive and are drawn."""
        self.feed.events += events
        self.top.tick()
        self.top.draw()

    @property
    def head(self) -> str:
        return str(self.top.screen_stack[0].query_one("#head", Static).render())

    def widget(self, table: Table) -> DataTable[Any]:
        return self.top.screen_stack[0].query_one(f"#{table.id}", DataTable)

    def rows(self, table: Table) -> list[list[str]]:
        widget = self.widget(table)
        return [[cell.plain for cell in widget.get_row_at(n)] for n in range(widget.row_count)]

    def column(self, table: Table, title: str) -> list[str]:
        place = [column.title for column in table.columns].index(title)
        return [row[place] for row in self.rows(table)]


def play(scene: Play) -> None:
    """Run a scene on a screen that is up."""

    async def run() -> None:
        bench = Bench()
        async with bench.top.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            await scene(pilot, bench)

    asyncio.run(run())


def test_a_cluster_is_shown_as_its_events_come() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        assert "redis://h/0  connected" in bench.head
        assert "nodes 0/0 alive" in bench.head
        script = bench.script
        bench.give(
            script.heartbeat(active=1, processed=5),
            *script.life("a"),
            *script.life("b", end="failed"),
            *script.life("c", name="shop.slow")[:2],
        )
        assert "nodes 1/1 alive" in bench.head
        assert "running 1" in bench.head
        assert bench.column(NODES, "node") == ["w1@host"]
        assert bench.column(NODES, "state") == ["alive"]
        assert bench.column(NODES, "version") == ["umbel 1.2.3"]
        assert bench.column(TYPES, "task") == ["shop.charge", "shop.slow"]
        assert bench.column(TYPES, "succeeded") == ["1", "0"]
        assert bench.column(TYPES, "failed") == ["1", "0"]
        assert bench.column(TYPES, "run p95") == ["2.00s", ""]
        assert bench.column(TYPES, "wait p50") == ["500ms", "500ms"]
        assert bench.column(RUNNING, "id") == ["c"]
        bench.now_s += 3
        bench.give(script.task("succeeded", "c", runtime=3.0))
        assert bench.rows(RUNNING) == []
        bench.now_s += 60
        bench.give()
        assert "nodes 0/1 alive" in bench.head
        assert bench.column(NODES, "state") == ["silent"]

    play(scene)


def test_the_clock_of_the_screen_takes_events_by_itself() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        bench.feed.events += [bench.script.heartbeat()]
        for _ in range(100):
            await pilot.pause(0.05)
            if bench.rows(NODES):
                break
        assert bench.column(NODES, "node") == ["w1@host"]

    play(scene)


def test_a_broker_that_is_gone_is_told_in_the_head() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        bench.feed.condition = GONE
        bench.give()
        assert "reconnecting" in bench.head
        bench.feed.condition = ""
        bench.feed.dropped = 12
        bench.give()
        assert "reconnecting" not in bench.head
        assert "not shown 12" in bench.head

    play(scene)


def test_workers_that_send_heartbeats_only_are_told() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        bench.give(bench.script.heartbeat())
        assert "heartbeats only" in bench.head
        bench.give(bench.script.task("received", "a", name="n"))
        assert "heartbeats only" not in bench.head

    play(scene)


def test_pause_holds_the_tables_while_events_are_counted() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        bench.give(bench.script.heartbeat())
        await pilot.press("p")
        bench.give(bench.script.heartbeat("w2@host"))
        assert "paused" in bench.head
        assert "nodes 2/2 alive" in bench.head
        assert bench.column(NODES, "node") == ["w1@host"]
        await pilot.press("p")
        assert "paused" not in bench.head
        assert bench.column(NODES, "node") == ["w1@host", "w2@host"]

    play(scene)


def test_sort_goes_through_the_columns_of_the_table_with_the_focus() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        bench.give(
            bench.script.heartbeat("a@h", active=1, processed=7),
            bench.script.heartbeat("b@h", active=2, processed=5),
        )
        assert bench.column(NODES, "node") == ["a@h", "b@h"]
        await pilot.press("s", "s")  # state, active
        assert bench.column(NODES, "node") == ["b@h", "a@h"]
        assert "by active" in str(bench.widget(NODES).border_title)
        await pilot.press("s")
        assert bench.column(NODES, "processed") == ["7", "5"]
        assert bench.top.orders["types"] == TYPES.first_order

    play(scene)


def test_tab_goes_round_the_tables() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        seen = []
        for _ in range(4):
            seen.append(bench.top.focused.id if bench.top.focused else None)
            await pilot.press("tab")
        assert seen == ["nodes", "types", "running", "nodes"]
        await pilot.press("s")
        assert bench.top.orders["types"] != TYPES.first_order

    play(scene)


def test_a_filter_hides_rows_as_it_is_typed_and_escape_drops_it() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        script = bench.script
        bench.give(
            script.heartbeat("a@h"),
            *script.life("x", "shop.charge"),
            *script.life("y", "mail.send"),
        )
        await pilot.press("slash", *"MAIL")
        assert bench.column(TYPES, "task") == ["mail.send"]
        await pilot.press(*"qps")  # letters here, not keys
        assert bench.column(TYPES, "task") == []
        assert "none with 'MAILqps'" in str(bench.widget(TYPES).border_title)
        await pilot.press(*["backspace"] * 3, "enter")
        assert bench.column(TYPES, "task") == ["mail.send"]
        assert isinstance(bench.top.focused, DataTable)
        await pilot.press("escape")
        assert len(bench.rows(TYPES)) == 2
        assert not bench.top.query_one("#word", Input).display

    play(scene)


def test_the_help_lists_every_key_and_goes_again() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        await pilot.press("question_mark")
        assert isinstance(bench.top.screen, Help)
        said = str(bench.top.screen.query_one("#keys", Static).render())
        for _, _, _, meaning in KEYS:
            assert meaning in said
        for key in ("q", "p", "s", "tab", "/", "?"):
            assert f" {key} " in said
        bench.give(bench.script.heartbeat())
        assert bench.column(NODES, "node") == ["w1@host"]  # it goes on behind
        await pilot.press("question_mark")
        assert not isinstance(bench.top.screen, Help)

    play(scene)


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_leaving(key: str) -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        await pilot.press(key)
        await pilot.pause()
        assert not bench.top.is_running
        assert bench.top.return_code == 0

    play(scene)


def test_the_cursor_stays_while_figures_change() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        names = [f"w{number:02}@h" for number in range(30)]
        bench.give(*(bench.script.heartbeat(name) for name in names))
        await pilot.press(*["down"] * 8)
        bench.give(*(bench.script.heartbeat(name, active=3) for name in names))
        assert bench.widget(NODES).cursor_row == 8
        assert set(bench.column(NODES, "active")) == {"3"}

    play(scene)


def test_many_rows_are_bounded_and_counted() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        bench.give(*(bench.script.heartbeat(f"w{number:03}@h") for number in range(300)))
        assert bench.widget(NODES).row_count == 200
        assert "200 of 300" in str(bench.widget(NODES).border_title)

    play(scene)


def test_texts_of_others_are_no_markup_and_no_escape_sequences() -> None:
    async def scene(pilot: Pilot[None], bench: Bench) -> None:
        script = bench.script
        name = "[bold red]n[/] \x1b[2J[link=http://x]"
        bench.give(
            script.heartbeat("[b]\x1b]0;x\x07@h"),
            script.task("received", "[i]\x9b", name=name, args=name),
            script.task("started", "[i]\x9b"),
        )
        await pilot.press("slash", *"[b]")
        await pilot.press("enter", "escape")
        shown = [
            cell for table in (NODES, TYPES, RUNNING) for row in bench.rows(table) for cell in row
        ]
        assert all(cell.isprintable() for cell in shown)
        assert bench.column(TYPES, "task") == ["[bold red]n[/] \\x1b[2J[link=http://x]"]

    play(scene)
