"""Writes docs/settings.md from the tables of settings: `python -m umbel.app.settings_page FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from umbel.app.inert_settings import INERT
from umbel.app.settings import SECTIONS, Setting

_INTRODUCTION = """\
# Settings

<!-- Written by `python -m umbel.app.settings_page docs/settings.md`: change the tables in
src/umbel/app instead. -->

Names are Celery's lower-case ones, and so are the defaults unless the text says otherwise. A
value of the wrong type, a value out of range and a name that is no setting are refused with the
name, the value and the way out.

A value comes from one of four places, and the stronger wins whatever the order of the calls:

1. **code**: `Umbel(broker=..., backend=...)`, `app.conf.update(...)`, `app.conf.imports = [...]`
2. **environment**: `UMBEL_<SETTING>`, such as `UMBEL_BROKER_URL` or `UMBEL_WORKER_CONCURRENCY`.
   Numbers and `true`/`false` as usual, `null` for None, lists and dictionaries as JSON (a list of
   strings may also be written with commas). An empty variable counts as unset.
   `CELERY_BROKER_URL`, `CELERY_BROKER_READ_URL`, `CELERY_BROKER_WRITE_URL` and
   `CELERY_RESULT_BACKEND` are read too; `UMBEL_` wins.
3. **config object**: `app.config_from_object('celeryconfig')`; with `namespace='CELERY'` names like
   `CELERY_TASK_SERIALIZER` count and nothing else. Without a namespace every public lower-case name
   of the module must be a setting: names of your own start with an underscore.
4. the **default**

Wherever settings are shown, passwords in addresses and whatever is named like a key, token, secret
or password are masked.
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION]
    for title, settings in SECTIONS:
        parts.append(f"## {title}\n")
        parts.extend(_entry(setting) for setting in settings)
    parts.append(_inert())
    return "\n".join(parts)


def _entry(setting: Setting) -> str:
    note = f" *{_sentence(setting.differs)}*" if setting.differs else ""
    return (
        f"### `{setting.name}`\n\n"
        f"{_sentence(setting.kind.what)} Default: `{_default(setting.default)}`.{note}\n\n"
        f"{setting.trade_off}\n"
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _default(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _inert() -> str:
    lines = [
        "## Accepted without effect\n",
        "A configuration that sets one of these still loads, with one warning that names it.\n",
        "| setting | why |",
        "|---|---|",
    ]
    lines.extend(f"| `{name}` | {reason} |" for name, (_, reason) in sorted(INERT.items()))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
