"""Families of tasks: one row for each root, with all that came of it.

| column         | what it is                                                                  |
| -------------- | --------------------------------------------------------------------------- |
| root_id        | the task that everything began with; it may itself not be in the log        |
| name           | its name                                                                    |
| state          | its state                                                                   |
| size           | how many tasks there are, the root included if it is in the log             |
| depth          | the longest way from a task to the top, in steps; at most `DEPTH_MAX` of    |
|                | `tables.tasks`; what goes round in a circle has none                        |
| began          | when the first of them was sent, or received, or started; Unix seconds      |
| ended          | when the last of them ended                                                 |
| duration       | seconds between these; null while nothing has ended                         |
| critical_path  | seconds along the chain of parents that ends in the task that ended last:   |
|                | from when its first task began to that end                                  |
| critical_tasks | the tasks of that chain, from the first to the last; at most `CHAIN_MAX`,   |
|                | and only for families of at most `FAMILY_MAX` tasks: else the last one      |
| failed         | how many of them failed                                                     |
| failed_part    | their share                                                                 |

A parent that is not in the log ends a chain. Times are wall clocks of several hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.pipeline.tables.shapes import check

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


def lineage(tasks: DataFrame) -> DataFrame:
    """One row for each family; see the module's text."""
    made = tasks.sparkSession.sql(
        f"""
        WITH members AS (
            SELECT root AS root_id, uuid, parent, name, state, depth, finished,
                least(sent, received, started) AS began
            FROM {{tasks}}
        ), families AS (
            SELECT root_id, max(IF(uuid = root_id, name, NULL)) AS name,
                max(IF(uuid = root_id, state, NULL)) AS state, count(1) AS size,
                max(depth) AS depth, min(began) AS began, max(finished) AS ended,
                max(IF(finished IS NOT NULL, struct(finished, uuid, began), NULL)) AS last,
                count_if(state = 'FAILURE') AS failed
            FROM members GROUP BY root_id
        ), parents AS (
            SELECT members.root_id, map_from_entries(collect_list(
                struct(uuid, struct(parent, members.began AS began)))) AS ways
            FROM members JOIN families ON members.root_id = families.root_id
            WHERE families.size BETWEEN 2 AND {FAMILY_MAX} AND families.last IS NOT NULL
            GROUP BY members.root_id
        ), walked AS (
            SELECT root_id, aggregate(
                sequence(1, least(size, {CHAIN_MAX})),
                named_struct('chain', CAST(array() AS ARRAY<STRING>), 'at', last.uuid,
                    'began', last.began),
                (way, _) -> IF(
                    way.at IS NULL OR array_contains(way.chain, way.at)
                        OR NOT map_contains_key(ways, way.at),
                    named_struct('chain', way.chain, 'at', CAST(NULL AS STRING),
                        'began', way.began),
                    named_struct('chain', array_append(way.chain, way.at),
                        'at', ways[way.at].parent,
                        'began', coalesce(ways[way.at].began, way.began)))
            ) AS way
            FROM families JOIN parents USING (root_id)
        )
        SELECT families.root_id, name, state, size, depth, families.began, ended,
            IF(ended IS NULL, NULL, greatest(0D, ended - families.began)) AS duration,
            IF(ended IS NULL, NULL, greatest(0D, ended - coalesce(way.began, last.began)))
                AS critical_path,
            coalesce(reverse(way.chain), IF(last IS NULL, array(), array(last.uuid)))
                AS critical_tasks,
            failed, failed / size AS failed_part
        FROM families LEFT JOIN walked ON families.root_id = walked.root_id
        """,  # noqa: S608 - our own names
        tasks=tasks,
    )
    return check(made, SCHEMA)
