"""`umbel report`: versions and settings, safe to paste into a bug report."""

from __future__ import annotations

from typing import Any

import click

from umbel.app.reporting import report_facts
from umbel.cli.group import Invocation
from umbel.cli.outcomes import as_json as to_json
from umbel.cli.outcomes import as_text


@click.command("report", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "with_defaults", is_flag=True, help="Show settings at their default too.")
@click.pass_obj
def report(invocation: Invocation, as_json: bool, with_defaults: bool) -> int:
    """Show versions, the platform, and the settings that were changed. Secrets are masked.

    Without -A the settings are those of the environment.
    """
    app = invocation.app_or_default()
    named = invocation.app_name is not None
    facts = report_facts(app, named=named, with_defaults=with_defaults)
    if as_json:
        click.echo(to_json(facts))
    else:
        _print(facts)
    return 0


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
