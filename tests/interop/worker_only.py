"""What only workers import: clients get a stand-in for this class."""

from __future__ import annotations


class Shortage(Exception):
    """Something is not in stock."""
