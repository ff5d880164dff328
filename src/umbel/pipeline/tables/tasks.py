"""`tasks`: one row a task.

All of the fold (`umbel.cluster.task_states.TASK_FIELDS`), and what follows from it:

| column     | what it is                                                                       |
| ---------- | -------------------------------------------------------------------------------- |
| finished   | when the task came into the state in which it ended; null while it has not       |
| queue_wait | seconds from when the last attempt was due to the last start. It was due when it  |
|            | was sent (or received, where nobody saw it sent), or at its eta if that is      |
|            | later; 0 where it was started before its eta. Null where there was no start     |
|            | since it was sent, by the clocks of their hosts                                 |
| attempts   | how many executions were started: each `started` event once                      |
| root       | `root_id`; a task that names none is its own root                                |
| parent     | `parent_id`, unless it is the task itself                                        |
| depth      | steps to the top of the family along parents: 0 without a parent, else 1, plus  |
|            | the depth of the parent if that is in the log and has the same `root`. Null     |
|            | where parents form a circle, for more than `DEPTH_MAX` steps, and below parents |
|            | in families in which more than `INNER_MAX` tasks have both parent and children  |

`eta`, `expires`, `signum` and `extra` are JSON, as in the log. Times are Unix seconds, by the wall
clock of whoever sent the event.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.functions import expr

from umbel.cluster.event_rows import TASK
from umbel.cluster.task_states import CLASS_STATE, TASK_FIELDS
from umbel.pipeline.queries import query
from umbel.pipeline.schemas import schema
from umbel.pipeline.tables.due import due, waited
from umbel.pipeline.tables.staging import Staged, unstaged

DOUBLINGS: Final = 10
DEPTH_MAX: Final = 2**DOUBLINGS - 1
# The most parents of a family that are walked in memory, some 100 bytes each.
INNER_MAX: Final = 100_000
_KINDS: Final = {
    **TASK,
    "state": "text",
    **dict.fromkeys(CLASS_STATE, "number"),
    "worker": "text",
    "client": "text",
    "timestamp": "number",
    "clock": "whole",
}
DERIVED: Final = {
    "finished": "number",
    "queue_wait": "number",
    "attempts": "whole",
    "root": "text",
    "parent": "text",
    "depth": "whole",
}
SCHEMA: Final = schema({**{name: _KINDS[name] for name in TASK_FIELDS}, **DERIVED})
HIDDEN: Final = "_cells ARRAY<BIGINT>, _due DOUBLE, _queue STRING, _cell BIGINT"
_TAKEN: Final = "struct(order_clock, timestamp, origin, type, taken_from)"

_PARENT: Final = "nullif(parent_id, uuid)"
_ROOT: Final = "coalesce(root_id, uuid)"


def tasks(folded: DataFrame, events: DataFrame, staged: Staged = unstaged) -> DataFrame:
    """The table, of `task_fold.tasks` and the unique events of whole families.

    Hidden columns follow: `_cells` has the cells of the task's events, `_due` is when its last
    attempt was due, `_queue` is the queue that a worker took it from last, else the one that it was
    sent to, and `_cell` is the first cell of its family.
    """
    starts = (
        events.where("class IS NOT NULL")
        .groupBy("uuid")
        .agg(
            expr("count_if(class = 'started')").alias("count"),
            expr("array_sort(collect_set(_cell))").alias("_cells"),
            expr(f"max(IF(taken_from IS NULL, NULL, {_TAKEN})).taken_from").alias("taken_from"),
        )
    )
    edges = folded.where(f"{_PARENT} IS NOT NULL").selectExpr(
        "uuid", f"{_PARENT} AS parent", f"{_ROOT} AS root"
    )
    edges = staged(edges, "edges")
    joined = folded.join(starts, "uuid", "left").join(depths(edges), "uuid", "left")
    made = joined.selectExpr(
        *TASK_FIELDS,
        "finished",
        f"{waited('started', 'queued', 'eta')} AS queue_wait",
        "coalesce(count, 0L) AS attempts",
        f"{_ROOT} AS root",
        f"{_PARENT} AS parent",
        f"IF({_PARENT} IS NULL, 0L, depth) AS depth",
        "_cells",
        f"IF(queued IS NULL, NULL, {due('queued', 'eta')}) AS _due",
        "coalesce(taken_from, queue) AS _queue",
    )
    assert [(one.name, one.dataType) for one in made.drop("_cells", "_due", "_queue").schema] == [
        (one.name, one.dataType) for one in SCHEMA
    ], made.schema
    return made.selectExpr("*", "min(_cells[0]) OVER (PARTITION BY root) AS _cell")


def depths(edges: DataFrame) -> DataFrame:
    """How deep each task is that has a parent (uuid, parent, root -> uuid, depth).

    *Inner* tasks have a parent and, in their family, children. They are numbered, so that the
    parents of a family are one array of numbers. There each round doubles how far every task has
    seen: from its parent to its parent's parent, from there four up, and so on. All others are one
    step below their parent.
    """
    return query(
        f"""
        WITH edges AS (SELECT uuid, parent, root FROM {{edges}}),
        inner AS (
            SELECT *, CAST(row_number() OVER (PARTITION BY root ORDER BY uuid) - 1 AS INT) AS number
            FROM edges LEFT SEMI JOIN (SELECT root AS of, parent AS above FROM edges)
                ON root = of AND uuid = above
        ), ups AS (
            SELECT inner.root, inner.number, coalesce(upper.number, -1) AS up
            FROM inner LEFT JOIN inner AS upper
                ON inner.root = upper.root AND inner.parent = upper.uuid
        ), families AS (
            SELECT root, transform(array_sort(collect_list(struct(number, up))), one -> one.up)
                AS ups
            FROM ups GROUP BY root HAVING count(1) <= {INNER_MAX}
        ), walked AS (
            SELECT root, aggregate(
                sequence(1, {DOUBLINGS}),
                named_struct('ups', ups, 'steps', transform(ups, up -> 1)),
                (seen, _) -> named_struct(
                    'ups', transform(seen.ups, up -> IF(up < 0, -1, seen.ups[up])),
                    'steps', transform(seen.ups, (up, number) ->
                        seen.steps[number] + IF(up < 0, 0, seen.steps[up])))
            ) AS seen
            FROM families
        ), counted AS (
            SELECT root, number, IF(seen.ups[number] < 0, steps, NULL) AS steps
            FROM walked LATERAL VIEW posexplode(seen.steps) AS number, steps
        ), above AS (
            SELECT inner.root, uuid, steps
            FROM inner LEFT JOIN counted
                ON inner.root = counted.root AND inner.number = counted.number
        )
        SELECT edges.uuid, CAST(CASE WHEN above.uuid IS NULL THEN 1
            WHEN steps < {DEPTH_MAX} THEN steps + 1 END AS BIGINT) AS depth
        FROM edges LEFT JOIN above ON edges.root = above.root AND edges.parent = above.uuid
        """,  # noqa: S608 - our own names
        edges=edges,
    )
