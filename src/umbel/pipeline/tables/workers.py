"""The lives of workers: one row for each, from its first to its last sign.

Who only ever sent tasks is a client, and not here.

| column         | what it is                                                                  |
| -------------- | --------------------------------------------------------------------------- |
| hostname       | the node                                                                    |
| incarnation    | its life; the process's number where it tells none                          |
| pid            | the process                                                                 |
| status         | `online` when the log ends, `offline` after an orderly end, else `lost`     |
| online         | when it said that it is there, or sent its first event                      |
| last_heartbeat | when it sent the last one                                                   |
| last_seen      | when it sent the last event of any type                                     |
| offline        | when it said that it goes                                                   |
| lost           | when it counts as lost: two heartbeat intervals after its last event, or    |
|                | when the next life of this node begins; null unless it is                   |
| uptime         | seconds from `online` to `offline` or its last event                        |
| processed      | tasks that it has begun, as it says                                         |
| active         | tasks that ran at its last heartbeat                                        |
| freq           | seconds between its heartbeats                                              |
| drift          | seconds from sending to receipt by the recorder's wall clock, median of     |
|                | (about): a clock that is wrong, or a way that is slow                       |
| sw_ident, sw_ver | its software                                                              |
| events_seen    | events of it in the log, each once                                          |
| events_missing | numbers between the first and the last in the log that are not there        |
| events_lost    | events that it says it has dropped                                          |

Whether somebody is lost is judged by when things were received, not by the senders' wall clocks. A
worker without heartbeats is never lost unless a next life of it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    hostname STRING, incarnation BIGINT, pid BIGINT, status STRING, online DOUBLE,
    last_heartbeat DOUBLE, last_seen DOUBLE, offline DOUBLE, lost DOUBLE, uptime DOUBLE,
    processed BIGINT, active BIGINT, freq DOUBLE, drift DOUBLE, sw_ident STRING, sw_ver STRING,
    events_seen BIGINT, events_missing BIGINT, events_lost BIGINT
"""
# So many intervals without a sign, and a node is taken for lost, as everywhere in the cluster.
PATIENCE: Final = 2
# Of heartbeats that do not tell their interval.
FREQ_S: Final = 2.0
FREQ_MAX_S: Final = 3_600.0


_SIGNS: Final = "type IN ('worker-heartbeat', 'worker-online', 'worker-offline')"
# What is needed to tell who is lost, of each life.
_LIFE: Final = f"""
    max(timestamp) FILTER (WHERE type = 'worker-heartbeat') AS last_heartbeat,
    max(timestamp) FILTER (WHERE type = 'worker-offline') AS offline,
    min(timestamp) AS first_seen, min(received) AS first_received, max(received) AS last_received,
    max(struct(timestamp, freq, active, sw_ident, sw_ver)) FILTER (WHERE {_SIGNS}) AS sign,
    bool_or(type LIKE 'worker-%' OR class NOT IN ('sent', 'custom')) AS is_worker
"""
_JUDGED: Final = f"""
    {PATIENCE} * IF(sign.freq > 0 AND sign.freq <= {FREQ_MAX_S}D, sign.freq, {FREQ_S}D)
        AS patience,
    max(last_received) OVER () AS log_ends,
    lead(first_seen) OVER (PARTITION BY hostname ORDER BY first_received, incarnation) AS next_life
"""
_STATUS: Final = """
    CASE WHEN offline IS NOT NULL THEN 'offline' WHEN next_life IS NOT NULL THEN 'lost'
        WHEN last_heartbeat IS NOT NULL AND log_ends - last_received > patience THEN 'lost'
        ELSE 'online' END AS status
"""


def statuses(events: DataFrame) -> DataFrame:
    """Whether each life is online, offline or lost (hostname, incarnation, status), clients too."""
    return events.sparkSession.sql(
        f"""
        SELECT hostname, incarnation, {_STATUS} FROM (
            SELECT *, {_JUDGED} FROM (
                SELECT hostname, incarnation, {_LIFE} FROM {{events}} GROUP BY hostname, incarnation
            )
        )
        """,  # noqa: S608 - our own names
        events=events,
    )


def workers(events: DataFrame) -> DataFrame:
    """One row for each life of a worker; see the module's text."""
    made = events.sparkSession.sql(
        f"""
        WITH lives AS (
            SELECT hostname, incarnation, {_LIFE}, max(pid) AS pid,
                min(timestamp) FILTER (WHERE type = 'worker-online') AS said_online,
                max(timestamp) AS last_seen, max(processed) AS processed,
                max(lost) AS events_lost,
                percentile_disc(0.5D)
                    WITHIN GROUP (ORDER BY round(received - timestamp, 3)) AS drift,
                count(1) AS events_seen
            FROM {{events}} GROUP BY hostname, incarnation
        ), numbers AS (
            SELECT hostname, incarnation,
                max(seq) - min(seq) + 1 - count(DISTINCT seq) AS events_missing
            FROM {{events}} WHERE seq IS NOT NULL GROUP BY hostname, incarnation
        ), judged AS (
            SELECT *, {_JUDGED} FROM lives
        ), told AS (
            SELECT *, {_STATUS} FROM judged WHERE is_worker
        )
        SELECT told.hostname, told.incarnation, pid, status,
            coalesce(said_online, first_seen) AS online, last_heartbeat, last_seen, offline,
            IF(status = 'lost', greatest(last_seen, least(last_seen + patience, next_life)), NULL)
                AS lost,
            greatest(0D, coalesce(offline, last_seen) - coalesce(said_online, first_seen))
                AS uptime,
            processed, sign.active AS active, sign.freq AS freq, drift, sign.sw_ident AS sw_ident,
            sign.sw_ver AS sw_ver, events_seen, events_missing, events_lost
        FROM told LEFT JOIN numbers
            ON told.hostname = numbers.hostname AND told.incarnation <=> numbers.incarnation
        """,  # noqa: S608 - our own names
        events=events,
    )
    return check(made, SCHEMA)
