"""A declared setting does something; one declared without effect does nothing."""

from __future__ import annotations

import re
from pathlib import Path

import umbel.app
from umbel.app.inert_settings import INERT
from umbel.app.settings import SETTINGS

_APP = Path(umbel.app.__file__).parent
_READERS_OF_NONE = {
    "conf.py",
    "config_objects.py",
    "inert_settings.py",
    "masking.py",
    "setting_kinds.py",
    "setting_objects.py",
    "settings.py",
    "settings_page.py",
}


def _source() -> str:
    """The package outside of what declares, checks and shows settings."""
    return "\n".join(
        path.read_text(encoding="utf-8")
        for path in _APP.parent.rglob("*.py")
        if path.parent != _APP or path.name not in _READERS_OF_NONE
    )


def test_every_declared_setting_is_read_somewhere() -> None:
    words = set(re.findall(r"\w+", _source()))
    assert sorted(SETTINGS.keys() - words) == []


def test_no_setting_declared_without_effect_is_read_anywhere() -> None:
    read = set(re.findall(r"\bconf\.(\w+)", _source()))
    assert sorted(INERT.keys() & read) == []
