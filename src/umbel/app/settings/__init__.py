"""Every setting that takes effect: its type, its default, and its trade-off.

The names are Celery's, lower case, and so are the defaults unless `differs` says why not. The
trade-off says what raising the value (or switching it on) buys and what it costs. A name that
Celery knows and that does nothing here is in `app.inert_settings`, with the reason. The page
docs/settings.md is written from these tables (`python -m umbel.app.settings_page`), and
`app.conf` checks and keeps the values.
"""

from __future__ import annotations

from umbel.app.settings.cluster import CONTROL, EVENTS, FILES, LOGGING, WORKER
from umbel.app.settings.messages import BROKER, CONTENT, RESULTS
from umbel.app.settings.setting import Setting
from umbel.app.settings.tasks import ROUTING, TASKS

__all__ = ["SECTIONS", "SETTINGS", "Setting"]

SECTIONS: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    ("Broker", BROKER),
    ("Results", RESULTS),
    ("Messages", CONTENT),
    ("Queues and routes", ROUTING),
    ("Tasks", TASKS),
    ("Worker", WORKER),
    ("Remote control", CONTROL),
    ("Events", EVENTS),
    ("Logging", LOGGING),
    ("Files", FILES),
)

SETTINGS: dict[str, Setting] = {
    setting.name: setting for _, settings in SECTIONS for setting in settings
}
