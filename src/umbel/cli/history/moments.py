"""Times as people write and read them. Everything is UTC, in and out."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import click

from umbel.pipeline.moments import LATEST, unix_time

__all__ = ["read_time", "shown_time", "unix_time"]


def read_time(ctx: click.Context, param: click.Parameter, value: Any) -> float | None:
    """For click's `callback`."""
    if value is None:
        return None
    try:
        return unix_time(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None


def shown_time(seconds: float | None) -> str:
    """`2026-11-16 07:30:00.000`, which `--time` takes as well; nothing for no time."""
    if seconds is None:
        return ""
    if not math.isfinite(seconds) or not 0 <= seconds <= LATEST:
        return f"{seconds:g}"
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
