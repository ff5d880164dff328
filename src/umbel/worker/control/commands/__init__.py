"""The commands that every worker obeys, one file per family."""

from __future__ import annotations

from umbel.worker.control.commands import consuming, inspecting, limiting, living, pooling, revoking
from umbel.worker.control.commands.registry import BUILTIN

__all__ = ["BUILTIN", "consuming", "inspecting", "limiting", "living", "pooling", "revoking"]
