"""`tasks`: one row a task.

All of the fold (`umbel.cluster.task_states.TASK_FIELDS`), and what follows from it:

| column     | what it is                                                                       |
| ---------- | -------------------------------------------------------------------------------- |
| finished   | when the task came into the state in which it ended; null while it has not       |
| queue_wait | seconds from the last sending (or receipt, where nobody saw it sent) to the last |
|            | start; null where there was no start since, or wall clocks say so                |
| attempts   | how many executions were started: each `started` event once                      |
| root       | `root_id`; a task that names none is its own root                                |
| parent     | `parent_id`, unless it is the task itself                                        |
| depth      | how many steps it is to the top along parents; 0 is a root. A parent that is not |
|            | in the log is one step. Null where parents go round in a circle, or there are    |
|            | more than `DEPTH_MAX` of them                                                    |

`eta`, `expires`, `signum` and `extra` are JSON, as in the log. Times are Unix seconds, by the wall
clock of whoever sent the event.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame

from umbel.cluster.event_rows import TASK
from umbel.cluster.task_states import CLASS_STATE, TASK_FIELDS
from umbel.pipeline.schemas import schema

DOUBLINGS_MAX: Final = 10
DEPTH_MAX: Final = 2**DOUBLINGS_MAX - 1
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

_PARENT: Final = "nullif(parent_id, uuid)"
_WAIT: Final = "started - coalesce(sent, received)"


def tasks(folded: DataFrame, events: DataFrame) -> DataFrame:
    """The table, of `task_fold.tasks` and the unique events."""
    starts = events.where("class = 'started'").groupBy("uuid").count()
    edges = folded.where(f"{_PARENT} IS NOT NULL").selectExpr("uuid", f"{_PARENT} AS parent")
    joined = folded.join(starts, "uuid", "left").join(depths(edges), "uuid", "left")
    made = joined.selectExpr(
        *TASK_FIELDS,
        "finished",
        f"IF({_WAIT} >= 0, {_WAIT}, NULL) AS queue_wait",
        "coalesce(count, 0L) AS attempts",
        "coalesce(root_id, uuid) AS root",
        f"{_PARENT} AS parent",
        f"IF({_PARENT} IS NULL, 0L, depth) AS depth",
    )
    assert [(one.name, one.dataType) for one in made.schema] == [
        (one.name, one.dataType) for one in SCHEMA
    ], made.schema
    return made


def depths(edges: DataFrame) -> DataFrame:
    """How deep each task is that has a parent (uuid, parent -> uuid, depth).

    Each round doubles how far every task has seen: from its parent to its parent's parent, from
    there four up, and so on. A round is one join; there are as many as the depth has binary digits.
    """
    # A checkpoint, not a cache: a plan that has the last one in it twice doubles in each round.
    seen = edges.selectExpr("uuid", "parent AS far", "1L AS steps").localCheckpoint()
    for _ in range(DOUBLINGS_MAX):
        if seen.where("far IS NOT NULL").isEmpty():
            break
        ahead = seen.selectExpr("uuid AS there", "far AS farther", "steps AS more")
        joined = seen.join(ahead, seen["far"] == ahead["there"], "left")
        told = joined.selectExpr("uuid", "farther AS far", "steps + coalesce(more, 0L) AS steps")
        seen = told.localCheckpoint()
    return seen.selectExpr("uuid", "IF(far IS NULL, steps, NULL) AS depth")
