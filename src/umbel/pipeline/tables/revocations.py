"""Revoked tasks: who knew of it and when, and whether it was of use.

A worker that learns of revocations says so (`worker-revocation`); one that keeps a task from
running, or ends it, says that (`task-revoked`). Celery's workers do the latter only. Tasks that
expired are not here.

| column        | what it is                                                                    |
| ------------- | ----------------------------------------------------------------------------- |
| uuid          | the revoked task                                                              |
| name          | its name, as in `tasks`                                                       |
| revoked       | when it was revoked, by the wall clock of who did it; else when the first     |
|               | worker knew, or else stopped it, Unix seconds                                 |
| revoked_clock | the clock at which the first worker knew                                      |
| known         | when the first worker knew                                                    |
| methods       | how workers learned of it                                                     |
| seen_by       | the workers that said they know                                               |
| stopped_by    | the worker that kept it from running, or ended it; the last one of several    |
| stopped       | when it did                                                                   |
| terminated    | whether it ran and was ended                                                  |
| effective     | true when it was stopped and nobody ran it after knowing; false when somebody |
|               | did, or it ended by itself; null when neither is known (yet)                  |
| violations    | how many times a worker started it after it knew, by its clock                |
| violated_by   | the workers that did                                                          |

A worker knows what it said in the same life of its process; the next life learns anew, and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.pipeline.queries import query
from umbel.pipeline.tables.shapes import check
from umbel.pipeline.tables.staging import Staged, unstaged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    uuid STRING, name STRING, revoked DOUBLE, revoked_clock BIGINT, known DOUBLE,
    methods ARRAY<STRING>, seen_by ARRAY<STRING>, stopped_by STRING, stopped DOUBLE,
    terminated BOOLEAN, effective BOOLEAN, violations BIGINT, violated_by ARRAY<STRING>
"""
# What `worker-revocation` events say, of their JSON.
RAW: Final = "ids ARRAY<STRING>, stamp DOUBLE, stamps ARRAY<DOUBLE>, method STRING"


# Beside the columns: the cells of the events that tell of the revocation.
HIDDEN: Final = "_cells ARRAY<BIGINT>"
_STOPS: Final = "class = 'revoked' AND NOT coalesce(expired, false)"


def named(events: DataFrame) -> DataFrame:
    """The revoked tasks that workers name in these events (uuid)."""
    return query(
        f"""
        SELECT DISTINCT uuid FROM (
            SELECT explode(from_json(raw, '{RAW}').ids) AS uuid FROM {{events}}
            WHERE type = 'worker-revocation'
        ) WHERE uuid IS NOT NULL
        """,  # noqa: S608 - our own names
        events=events,
    )


def revocations(events: DataFrame, names: DataFrame, staged: Staged = unstaged) -> DataFrame:
    """One row for each revoked task, with the `HIDDEN` columns.

    Of all events of these tasks, and all in which workers name them; `names` are those of `tasks`
    (uuid, name).
    """
    told = staged(_revoked(events), "revoked")
    made = query(
        f"""
        WITH ids AS (
            SELECT uuid, min(stamp) AS stamp, min(known_clock) AS known_clock,
                min(known) AS known,
                array_sort(array_distinct(flatten(collect_list(methods)))) AS methods,
                array_sort(collect_set(hostname)) AS seen_by, flatten(collect_list(cells)) AS cells
            FROM {{told}} GROUP BY uuid
        ), ran AS (
            SELECT events.uuid,
                max(IF({_STOPS}, struct(order_clock, events.timestamp, events.hostname,
                    coalesce(terminated, false) AS terminated), NULL)) AS stop,
                min(events.timestamp) FILTER (WHERE {_STOPS}) AS first_stop,
                bool_or(class IN ('succeeded', 'failed')) AS ended,
                count_if(class = 'started' AND order_clock > known_clock) AS violations,
                array_sort(collect_set(IF(class = 'started' AND order_clock > known_clock,
                    events.hostname, NULL))) AS violated_by,
                collect_set(IF(class = 'revoked', _cell, NULL)) AS cells
            FROM {{events}} AS events
            LEFT SEMI JOIN {{told}} AS ids ON events.uuid = ids.uuid
            LEFT JOIN {{told}} AS learned
                ON events.uuid = learned.uuid AND events.hostname = learned.hostname
                AND events.incarnation <=> learned.incarnation
            WHERE class IS NOT NULL
            GROUP BY events.uuid
        )
        SELECT ids.uuid, names.name, coalesce(stamp, ids.known, first_stop) AS revoked,
            known_clock AS revoked_clock, ids.known, methods, seen_by,
            stop.hostname AS stopped_by, stop.timestamp AS stopped, stop.terminated AS terminated,
            CASE WHEN violations > 0 THEN false WHEN stop IS NOT NULL THEN true
                WHEN ended THEN false END AS effective,
            coalesce(violations, 0L) AS violations, coalesce(violated_by, array()) AS violated_by,
            array_sort(array_union(ids.cells, coalesce(ran.cells, array()))) AS _cells
        FROM ids LEFT JOIN ran ON ids.uuid = ran.uuid
        LEFT JOIN {{names}} AS names ON ids.uuid = names.uuid
        """,  # noqa: S608 - our own names
        events=events,
        told=told,
        names=names,
    )
    return check(made, f"{SCHEMA}, {HIDDEN}")


def _revoked(events: DataFrame) -> DataFrame:
    """The revoked tasks: a row for each life of a worker that knew of it (`known_clock` and so on),
    and one without `hostname` if a worker stopped it.
    """
    return query(
        f"""
        WITH parsed AS (
            SELECT hostname, incarnation, order_clock, timestamp, _cell,
                from_json(raw, '{RAW}') AS told
            FROM {{events}} WHERE type = 'worker-revocation'
        ), exploded AS (
            SELECT hostname, incarnation, order_clock, timestamp, _cell, told,
                posexplode(told.ids) AS (number, uuid)
            FROM parsed
        )
        SELECT uuid, hostname, incarnation, min(order_clock) AS known_clock,
            min(timestamp) AS known,
            min(coalesce(get(told.stamps, number), told.stamp)) AS stamp,
            collect_set(told.method) AS methods, collect_set(_cell) AS cells
        FROM exploded WHERE uuid IS NOT NULL GROUP BY uuid, hostname, incarnation
        UNION ALL
        SELECT DISTINCT uuid, NULL, NULL, NULL, NULL, NULL, array(), array() FROM {{events}}
        WHERE uuid IS NOT NULL AND {_STOPS}
        """,  # noqa: S608 - our own names
        events=events,
    )
