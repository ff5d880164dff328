"""Families of tasks: one row for each root, with all that came of it.

| column         | what it is                                                                  |
| -------------- | --------------------------------------------------------------------------- |
| root_id        | the task that everything began with; it may itself not be in the log        |
| name           | its name                                                                    |
| state          | its state                                                                   |
| size           | how many tasks there are, the root included if it is in the log             |
| depth          | the longest way from a task to the top, in steps; at most `DEPTH_MAX` of    |
|                | `tables.tasks`; tasks in a circle of parents have none                      |
| began          | when the first of them was sent, or received, or started; Unix seconds      |
| ended          | when the last of them ended                                                 |
| duration       | seconds between these; null while nothing has ended, or where no beginning  |
|                | is known                                                                    |
| critical_path  | seconds during which at least one task of `critical_tasks` was waiting or   |
|                | running: from when it was first sent, received or started to its end, or to |
|                | `ended` where it has none. Null where one of these beginnings is not known  |
| critical_tasks | the chain of parents that ends in the task that ended last, from the first  |
|                | to the last: at most `CHAIN_MAX` of them, and only for families of at most  |
|                | `FAMILY_MAX` tasks, else the last one                                       |
| failed         | how many of them failed                                                     |
| failed_part    | their share                                                                 |

A parent that is not in the log, or in another family, ends a chain. Waiting includes the time until
an eta and between retries. Times are wall clocks of several hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from umbel.pipeline.queries import query
from umbel.pipeline.tables.shapes import check
from umbel.pipeline.tables.staging import Staged, unstaged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    root_id STRING, name STRING, state STRING, size BIGINT, depth BIGINT, began DOUBLE,
    ended DOUBLE, duration DOUBLE, critical_path DOUBLE, critical_tasks ARRAY<STRING>,
    failed BIGINT, failed_part DOUBLE
"""
CHAIN_MAX: Final = 1_000
# The parents of a family are walked in memory.
FAMILY_MAX: Final = 10_000
# How long the spans of an array are together, which are sorted; what overlaps counts once.
_COVERED: Final = """
    aggregate(spans, named_struct('seconds', 0D, 'since', spans[0].since, 'until', spans[0].since),
        (seen, span) -> IF(span.since > seen.until,
            named_struct('seconds', seen.seconds + (seen.until - seen.since),
                'since', span.since, 'until', greatest(span.since, span.until)),
            named_struct('seconds', seen.seconds, 'since', seen.since,
                'until', greatest(seen.until, span.until))),
        seen -> seen.seconds + (seen.until - seen.since))
"""


def lineage(
    tasks: DataFrame, events: DataFrame | None = None, staged: Staged = unstaged
) -> DataFrame:
    """One row for each family.

    Times in `tasks` are those of the last attempt of each task. The unique `events` tell when tasks
    that were retried began first.
    """
    members = staged(_members(tasks, events), "family_members")
    made = query(
        f"""
        WITH families AS (
            SELECT root_id, max(IF(uuid = root_id, name, NULL)) AS name,
                max(IF(uuid = root_id, state, NULL)) AS state, count(1) AS size,
                max(depth) AS depth, min(began) AS began, max(finished) AS ended,
                max(IF(finished IS NOT NULL, struct(finished, uuid, began), NULL)) AS last,
                count_if(state = 'FAILURE') AS failed
            FROM {{members}} GROUP BY root_id
        ), parents AS (
            SELECT members.root_id, map_from_entries(collect_list(
                struct(uuid, struct(parent, members.began AS since, finished AS until)))) AS ways
            FROM {{members}} AS members JOIN families ON members.root_id = families.root_id
            WHERE families.size BETWEEN 2 AND {FAMILY_MAX} AND families.last IS NOT NULL
            GROUP BY members.root_id
        ), walked AS (
            SELECT root_id, ways, reverse(aggregate(
                sequence(1, least(size, {CHAIN_MAX})),
                named_struct('chain', CAST(array() AS ARRAY<STRING>), 'at', last.uuid),
                (way, _) -> IF(
                    way.at IS NULL OR array_contains(way.chain, way.at)
                        OR NOT map_contains_key(ways, way.at),
                    named_struct('chain', way.chain, 'at', CAST(NULL AS STRING)),
                    named_struct('chain', array_append(way.chain, way.at),
                        'at', ways[way.at].parent))
            ).chain) AS chain
            FROM families JOIN parents USING (root_id)
        ), chained AS (
            SELECT families.*, coalesce(chain, IF(last IS NULL, array(), array(last.uuid)))
                    AS critical_tasks,
                array_sort(coalesce(
                    transform(chain, one -> struct(ways[one].since AS since,
                        coalesce(ways[one].until, ended) AS until)),
                    array(struct(last.began AS since, ended AS until)))) AS spans
            FROM families LEFT JOIN walked ON families.root_id = walked.root_id
        )
        SELECT root_id, name, state, size, depth, began, ended,
            IF(ended IS NULL OR began IS NULL, NULL, greatest(0D, ended - began)) AS duration,
            IF(ended IS NULL OR exists(spans, span -> span.since IS NULL), NULL, {_COVERED})
                AS critical_path,
            critical_tasks,
            failed, failed / size AS failed_part
        FROM chained
        """,  # noqa: S608 - our own names
        members=members,
    )
    return check(made, SCHEMA)


def _members(tasks: DataFrame, events: DataFrame | None) -> DataFrame:
    """What a family is made of: its tasks, with when each began first."""
    inputs: dict[str, Any] = {"tasks": tasks}
    began, firsts = "least(sent, received, started)", ""
    if events is not None:
        inputs["events"], began = events, f"least(first, {began})"
        firsts = """LEFT JOIN (
            SELECT uuid AS id, min(timestamp) AS first FROM {events}
            WHERE class IN ('sent', 'received', 'started') GROUP BY uuid
        ) ON uuid = id"""
    return query(
        f"""
        SELECT root AS root_id, uuid, parent, name, state, depth, finished, {began} AS began
        FROM {{tasks}} {firsts}
        """,  # noqa: S608 - our own names
        **inputs,
    )
