"""Events between the log and the tables: what every table needs, worked out once.

`prepare` adds columns that follow from a row alone:

| column      | what it is                                                                      |
| ----------- | ------------------------------------------------------------------------------- |
| order_clock | the clock that orders: 0 where there is none, and for a `task-sent` of a client |
|             | that is not in step (`sync`), as `umbel.app.events.receiver` has it             |
| origin      | who sent it: node and process, as `umbel.cluster.clock.origin` has it           |
| class       | of an event of a task: `sent`, ..., `custom` (`umbel.cluster.task_states`)      |
| incarnation | `inc`; of senders that have none the process's number                           |
| minute      | the minute of its timestamp, Unix seconds                                       |

Events are ordered by `ORDER`. Strings compare by their bytes in Spark, by code points in Python:
in UTF-8 that is the same order.

`unique` makes one row of all that have the same `event_rows.IDENTITY`. Recorders may write an
event twice, and then only when and by whom it was received differs: the first receipt is kept. If
senders put different things under one identity, each column has the greatest of its values, so
that the answer does not depend on the order of rows. A table that asks for few columns pays for
few: Catalyst leaves out the others. `copies` is how often the event was in the log.

The fold of tasks takes all events, not the unique ones: duplicates do not matter to it.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.functions import expr

from umbel.cluster.event_rows import COLUMNS, IDENTITY
from umbel.cluster.task_states import CUSTOM, EVENT_CLASS

ORDER: Final = ("order_clock", "timestamp", "origin")
_CLASS: Final = " ".join(f"WHEN '{kind}' THEN '{name}'" for kind, name in EVENT_CLASS.items())
PREPARED: Final = {
    "order_clock": (
        "IF(type = 'task-sent' AND NOT coalesce(sync, false), 0L, coalesce(clock, 0L))"
    ),
    "origin": "coalesce(concat(hostname, '.', CAST(pid AS STRING)), hostname)",
    "class": f"IF(type LIKE 'task-%', CASE type {_CLASS} ELSE '{CUSTOM}' END, NULL)",
    "incarnation": "coalesce(inc, pid)",
    "minute": "CAST(floor(timestamp / 60) * 60 AS DOUBLE)",
}
_FIRST: Final = frozenset({"received", "recorder"})


def prepare(raw: DataFrame) -> DataFrame:
    """The rows of the log with the columns of `PREPARED` added."""
    return raw.selectExpr("*", *(f"{text} AS {name}" for name, text in PREPARED.items()))


def unique(events: DataFrame) -> DataFrame:
    """One row for each event, however often it was recorded; see the module's text."""
    others = (name for name in COLUMNS if name not in IDENTITY)
    kept = (expr(f"{'min' if name in _FIRST else 'max'}({name})").alias(name) for name in others)
    grouped = events.groupBy(*IDENTITY).agg(*kept, expr("count(1)").alias("copies"))
    return prepare(grouped)
