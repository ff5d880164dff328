"""SQL over DataFrames: `query("SELECT uuid FROM {tasks}", tasks=tasks)`.

`SparkSession.sql` can do the same, but makes a view of each DataFrame for each query and drops it
afterwards. In a small build that is a tenth of the time. Here a DataFrame keeps its view as long as
it exists, or until `VIEWS_MAX` others came after it: a query has its plan before it returns, and
does not need the view any more.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEWS_MAX: Final = 200

_lock: Final = threading.Lock()
_numbers: Final = itertools.count(1)


@dataclass(slots=True)
class _Views:
    """The views of a session."""

    names: WeakKeyDictionary[DataFrame, str] = field(default_factory=WeakKeyDictionary)
    made: deque[str] = field(default_factory=deque)


_sessions: Final[WeakKeyDictionary[SparkSession, _Views]] = WeakKeyDictionary()


def query(text: str, **frames: DataFrame) -> DataFrame:
    """The rows that a query over these DataFrames gives; the text has their names in braces."""
    spark = next(iter(frames.values())).sparkSession
    views = {name: _view(spark, frame) for name, frame in frames.items()}
    return spark.sql(text.format_map(views))


def _view(spark: SparkSession, frame: DataFrame) -> str:
    with _lock:
        views = _sessions.setdefault(spark, _Views())
        if known := views.names.get(frame):
            return known
        name = f"umbel_{next(_numbers)}"
    frame.createOrReplaceTempView(name)
    with _lock:
        views.names[frame] = name
        views.made.append(name)
        oldest = views.made.popleft() if len(views.made) > VIEWS_MAX else None
        for other, its in list(views.names.items()):
            if its == oldest:
                del views.names[other]
    if oldest:
        spark.catalog.dropTempView(oldest)
    return name
