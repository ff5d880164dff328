"""A dashboard: its parts, made from the settings, and how a page is rendered from them."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from umbel.broker.sessions.connections import is_embedded, masked
from umbel.dashboard.gate import Audit, Gate
from umbel.dashboard.guard import FORM_TOKEN, Visit
from umbel.dashboard.identity import Notes, Sessions, Throttle
from umbel.dashboard.live.polling import Polling
from umbel.dashboard.live.source import Live
from umbel.dashboard.pages import cluster, elections, history, queues, task, tasks, timeline
from umbel.dashboard.pages.page import Page, Params
from umbel.dashboard.settings import Settings
from umbel.dashboard.statics import Statics
from umbel.dashboard.stream import Places
from umbel.dashboard.texts import FILTERS
from umbel.version import __version__

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

HERE: Final = Path(__file__).parent
PAGES: Final = {
    page.name: page
    for page in (
        cluster.PAGE,
        tasks.PAGE,
        task.PAGE,
        timeline.PAGE,
        elections.PAGE,
        queues.PAGE,
        history.PAGE,
        history.AT,
    )
}
NAVIGATION: Final = ("cluster", "tasks", "timeline", "elections", "queues", "history")
# Which entry of the navigation a page belongs to.
UNDER: Final = {"task": "tasks", "at": "history"}
FRAGMENTS_MAX: Final = 64
FRAGMENT_AGE_S: Final = 0.2


class Site:
    """See the module's text."""

    def __init__(self, app: Umbel, settings: Settings, live: Live | None = None) -> None:
        self.app, self.settings = app, settings
        self.live = live or Live(app, tasks_max=settings.tasks_max)
        self.polling = Polling(self.live)
        self.history = history.History(settings.tables)
        self.sessions, self.notes, self.throttle = Sessions(), Notes(), Throttle()
        self.audit = Audit(settings.audit)
        self.gate = Gate(self, self.audit)
        self.statics = Statics(HERE / "static")
        self.live_clients = Places(settings.live_clients_max)
        self.stopping = False
        self._environment = _environment()
        self._fragments: dict[Any, tuple[float, dict[str, str]]] = {}
        self._lock = Lock()

    def start(self) -> None:
        """Begin to listen and to ask."""
        self.live.start()
        self.polling.start()

    def stop(self) -> None:
        """End the threads and let go of everything."""
        self.stopping = True
        self.polling.stop()
        self.live.stop()
        self.history.close()

    @property
    def place(self) -> str:
        """Which broker this is about, without secrets."""
        url = self.app.read_url
        return "the embedded broker" if is_embedded(url) else masked(url)

    @staticmethod
    def wall_time() -> float:
        """Unix time, now."""
        return time.time()

    # -- who sees what -----------------------------------------------------------------

    def shows_details(self, visit: Visit) -> bool:
        """Whether a visitor sees arguments, results and the texts of errors."""
        return visit.identity.is_known or self.settings.public_details

    def is_current(self, visit: Visit) -> bool:
        """Whether the session that a visit began with is still open."""
        return not visit.is_session or self.sessions.user(visit.token) == visit.identity.user

    # -- pages -------------------------------------------------------------------------

    def page(self, page: Page, params: Params, visit: Visit) -> str:
        """A whole page."""
        facts = page.facts(self, params, self.shows_details(visit))
        return self.render(f"{page.name}.html", visit, page=page, facts=facts, params=dict(params))

    def fragments(self, page: Page, params: Params, visit: Visit) -> dict[str, str]:
        """The live parts of a page; shared by all who look at the same within a moment."""
        may, details = not self.gate.why_not(visit.identity), self.shows_details(visit)
        key = (page.name, tuple(sorted(params.items())), may, details)
        now = time.monotonic()
        with self._lock:
            known = self._fragments.get(key)
            if known is not None and now - known[0] < FRAGMENT_AGE_S:
                return known[1]
        facts = page.facts(self, params, details) if page.live else {}
        context = self._context(visit, page=page, facts=facts, params=dict(params))
        made = {
            name: self._environment.get_template(f"_{name}.html").render(context)
            for name in ("status", *page.live)
        }
        with self._lock:
            if len(self._fragments) >= FRAGMENTS_MAX:
                self._fragments.clear()
            self._fragments[key] = (now, made)
        return made

    def render(self, template: str, visit: Visit, **more: Any) -> str:
        """A template with what all of them need."""
        if not visit.token:
            visit.token = visit.renew = self.sessions.new_token()
        context = self._context(visit, **more)
        context["form_token"] = self.sessions.form_token(visit.token)
        context["notes"] = self.notes.take(visit.token)
        return self._environment.get_template(template).render(context)

    @property
    def _no_details(self) -> str:
        what = "arguments, results and the texts of errors"
        if self.settings.has_login:
            return f"log in to see {what}"
        return f"{what} need a login: give --password-file, or --public-details to show them to all"

    def _context(self, visit: Visit, **more: Any) -> dict[str, Any]:
        page: Page | None = more.get("page")
        why_not = self.gate.why_not(visit.identity)
        return {
            "base": self.settings.prefix,
            "asset": lambda name: f"{self.settings.prefix}/static/{self.statics.versioned(name)}",
            "navigation": [PAGES[name] for name in NAVIGATION],
            "here": "" if page is None else UNDER.get(page.name, page.name),
            "page": page,
            "identity": visit.identity,
            "may": not why_not,
            "why_not": why_not,
            "no_details": "" if self.shows_details(visit) else self._no_details,
            "has_login": self.settings.has_login,
            "has_password": self.settings.password is not None,
            "FORM_TOKEN": FORM_TOKEN,
            "place": self.place,
            "condition": self.live.condition,
            "version": __version__,
            "now": time.time(),
            **{key: value for key, value in more.items() if key != "page"},
        }


@cache
def _environment() -> Environment:
    """The templates, compiled once in a process."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(FILTERS)
    made.filters["safe_report"] = Markup  # of umbel.pipeline.report, which escapes what it shows
    return made
