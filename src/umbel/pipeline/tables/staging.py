"""Rows that a query reads several times are written first: planning it takes long otherwise.

Functions of tables take a `Staged` for that. It writes rows under a name, and gives them as they
were written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Staged = Callable[["DataFrame", str], "DataFrame"]


def unstaged(rows: DataFrame, _: str) -> DataFrame:
    """The rows themselves."""
    return rows
