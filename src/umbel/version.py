"""The version of Umbel, written here and nowhere else."""

from __future__ import annotations

__version__ = "0.1.0"
