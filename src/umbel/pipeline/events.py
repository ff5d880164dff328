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

`unique` makes one row of all that have the same `event_rows.IDENTITY`, with the columns that tables
read (`READ`). Recorders may write an event twice, and then only when and by whom it was received
differs: the first receipt is kept. If senders put different things under one identity, each column
has the greatest of its values, so that the answer does not depend on the order of rows. `copies`
is how often the event was in the log.

`once` gives the same rows, much faster where there are many and few of them come twice: it looks
first which identities do, by a number made of them, and lets all other rows through as they are.

The fold of tasks takes all events, not the unique ones: duplicates do not matter to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.functions import broadcast, expr

from umbel.cluster.event_rows import ELECTION, IDENTITY, NODE
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
# What tables read of an event beyond its identity. The whole of it is read of few types only.
_WHOLE: Final = "('worker-elect', 'worker-revocation')"
READ: Final = {
    **{name: name for name in ("seq", "series", "sync", "tie", "eta", "parent_id", "retries")},
    **{name: name for name in ("runtime", "exception", "terminated", "expired", "requeue")},
    **{name: name for name in (*NODE, *ELECTION, "received")},
    "taken_from": "IF(type IN ('task-received', 'task-started'), queue, NULL)",
    "raw": f"IF(type IN {_WHOLE}, raw, NULL)",
}
_FIRST: Final = frozenset({"received"})
# So many identities may be sent to every executor; of more, all rows are sorted.
REPEATED_MAX: Final = 1_000_000
# Zero and minus zero are one timestamp.
_NUMBER: Final = "xxhash64({})".format(
    ", ".join("timestamp + 0.0D" if name == "timestamp" else name for name in IDENTITY)
)


def prepare(raw: DataFrame) -> DataFrame:
    """The rows of the log with the columns of `PREPARED` added."""
    return raw.selectExpr("*", *(f"{text} AS {name}" for name, text in PREPARED.items()))


def unique(rows: DataFrame) -> DataFrame:
    """One row for each event, prepared, however often it was recorded."""
    kept = (
        expr(f"{'min' if name in _FIRST else 'max'}({text})").alias(name)
        for name, text in READ.items()
    )
    return prepare(rows.groupBy(*IDENTITY).agg(*kept, expr("count(1)").alias("copies")))


def once(rows: DataFrame) -> DataFrame:
    """The rows of `unique`, in another order; runs a job to see which come more than once."""
    numbered = rows.selectExpr("*", f"{_NUMBER} AS number")
    repeated = numbered.groupBy("number").count().where("count > 1").select("number").persist()
    count = repeated.count()
    if count == 0:
        return _each(rows)
    if count > REPEATED_MAX:
        return unique(rows)
    few = broadcast(repeated)
    single = numbered.join(few, "number", "left_anti")
    return _each(single).unionByName(unique(numbered.join(few, "number", "left_semi")))


def _each(rows: DataFrame) -> DataFrame:
    """Rows of which each is another event.

    The whole event is half of the log, and read of few types: those are read apart, where Parquet
    tells which segments have any.
    """
    whole = rows.where(f"type IN {_WHOLE}").selectExpr(*IDENTITY, *_read(READ))
    others = rows.where(f"type NOT IN {_WHOLE}").selectExpr(
        *IDENTITY, *_read(READ | {"raw": "CAST(NULL AS STRING)"})
    )
    return prepare(others.unionByName(whole).selectExpr("*", "1L AS copies"))


def _read(columns: Mapping[str, str]) -> list[str]:
    return [f"{text} AS {name}" for name, text in columns.items()]
