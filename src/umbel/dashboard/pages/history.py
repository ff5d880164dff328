"""History: the tables that the pipeline has built, read through duckdb; and the time machine.

The questions and the charts are those of the report (`umbel.pipeline.report`). Tables are opened
when somebody asks, and anew when a build has replaced them. What can not be told is said in one
line: no tables, a package that is not installed, a moment before the history.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from umbel.dashboard.pages.page import BadQuestion, Facts, Page, Params
from umbel.pipeline.moments import unix_time

if TYPE_CHECKING:
    from umbel.dashboard.site import Site
    from umbel.pipeline.reading import Tables

LIST_MAX: Final = 200
CHECK_S: Final = 2.0
NO_TABLES: Final = (
    "No tables were named. Record events with 'umbel record', build tables with "
    "'umbel history build', and start the dashboard with --tables DIR."
)


class History:
    """The tables of one directory; one question at a time, from any thread."""

    def __init__(self, directory: str | None) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._tables: Tables | None = None
        self._seen: Any = None
        self._checked_s = 0.0
        self._overviews: dict[bool, Facts] = {}

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            self._drop()

    def ask(self, question: Callable[[Tables], Facts]) -> Facts:
        """The answer, or `{"trouble": why there is none}`."""
        if self.directory is None:
            return {"trouble": NO_TABLES}
        try:
            from umbel.pipeline.errors import HistoryError
            from umbel.pipeline.reading import Tables
        except ModuleNotFoundError as exc:
            return {
                "trouble": f"History needs the package {exc.name}: pip install 'umbel[history]'"
            }
        with self._lock:
            try:
                if self._tables is None or self._is_replaced():
                    self._drop()
                    self._tables = Tables(self.directory)
                return question(self._tables)
            except HistoryError as exc:
                return {"trouble": str(exc)}

    def overview(self, details: bool = False) -> Facts:
        """The content of the report; made once for each build, with details and without."""

        def question(tables: Tables) -> Facts:
            if details not in self._overviews:
                self._overviews[details] = _overview(tables, details)
            return self._overviews[details]

        return self.ask(question)

    def _is_replaced(self) -> bool:
        now = time.monotonic()
        if now < self._checked_s + CHECK_S:
            return False
        self._checked_s = now
        seen = self._stamp()
        changed = seen != self._seen
        self._seen = seen
        return changed

    def _stamp(self) -> Any:
        assert self.directory is not None
        try:
            found = Path(self.directory, "_tables.json").stat()
        except (OSError, ValueError):
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _drop(self) -> None:
        if self._tables is not None:
            self._tables.close()
        self._tables = None
        self._overviews.clear()


def _overview(tables: Tables, details: bool) -> Facts:
    from umbel.pipeline.report.facts import Facts as Asked
    from umbel.pipeline.report.sections import sections, tiles

    asked = Asked(tables, details=details)
    span = asked.span
    return {
        "trouble": "",
        "details": details,
        "run": tables.run,
        "directory": tables.directory,
        "first": None if span is None else span.first,
        "last": None if span is None else span.last,
        "totals": asked.totals(),
        "kinds": asked.kinds().rows,
        "failures": asked.failures().rows if asked.has("tasks", "exception", "failed") else [],
        # HTML of the report: safe, it escapes what it shows.
        "tiles_html": tiles(asked),
        "sections_html": [
            {"key": one.key, "title": one.title, "lead": one.lead, "content": one.content}
            for one in sections(asked)
        ],
    }


def facts(site: Site, params: Params, details: bool = False) -> Facts:
    """What the history tells as a whole."""
    return site.history.overview(details)


def at_facts(site: Site, params: Params, details: bool = False) -> Facts:
    """The cluster as it was at a clock or a time; empty without either."""
    clock, moment = params.get("clock", "").strip(), params.get("time", "").strip()
    asked = {"clock": clock[:20], "time": moment[:40]}
    if clock and moment:
        raise BadQuestion("give a clock or a time, not both")
    if not clock and not moment:
        overview = site.history.overview(details)
        kept = ("trouble", "first", "last")
        return {"asked": asked, "picture": None, **{name: overview.get(name) for name in kept}}
    if clock and not (clock.isascii() and clock.isdigit() and len(clock) < 16):
        raise BadQuestion(f"clock {clock[:40]!r} is no whole number")
    try:
        when = unix_time(moment) if moment else None
    except ValueError as exc:
        raise BadQuestion(str(exc)) from None

    def question(tables: Tables) -> Facts:
        from umbel.pipeline.at import at

        if clock:
            return at(tables, clock=int(clock), limit=LIST_MAX).as_dict()
        return at(tables, time=when, limit=LIST_MAX).as_dict()

    found = site.history.ask(question)
    if "trouble" in found:
        return {"asked": asked, "picture": None, "trouble": found["trouble"]}
    return {"asked": asked, "picture": found, "trouble": ""}


PAGE: Final = Page("history", "/history", "History", facts)
AT: Final = Page("at", "/history/at", "Time machine", at_facts)
