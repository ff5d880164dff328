"""What a row of the tables is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from umbel.app.setting_kinds import Kind


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; `differs` is why its default is not Celery's, or that it is Umbel's own."""

    name: str
    kind: Kind
    default: Any
    trade_off: str
    differs: str = ""
