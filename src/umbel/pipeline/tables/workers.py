"""The lives of workers: one row for each, from its first to its last event.

Only events of the worker itself (`worker-*`) make a life; where a host name has none of these, the
receipts, starts and ends of its tasks do. Custom task events may come from a pool process that
names itself, as Celery's do, so they make none. A sender of nothing but `task-sent` is a client,
and not in this table.

| column         | what it is                                                                  |
| -------------- | --------------------------------------------------------------------------- |
| hostname       | the node                                                                    |
| incarnation    | its life: `inc`; of a worker without one the time of the `worker-online`    |
|                | that began the life, in microseconds; else the process id                   |
| pid            | the process                                                                 |
| status         | `online` when the log ends, `offline` after an orderly end, else `lost`     |
| online         | time of its first `worker-online`, else of its first event                  |
| last_heartbeat | time of its last heartbeat                                                  |
| last_seen      | time of its last event of any type                                          |
| offline        | time of its `worker-offline`; null if it came back in the same life         |
| lost           | when it counts as lost: two heartbeat intervals after its last event, or    |
|                | when the next life of this node begins; null unless it is                   |
| uptime         | seconds from `online` to `offline` or its last event                        |
| processed      | tasks that it has begun, as it reports                                      |
| active         | tasks that ran at its last heartbeat                                        |
| freq           | seconds between its heartbeats                                              |
| drift          | median of the seconds from sending to receipt by the recorder's wall clock, |
|                | to the millisecond: a clock that is wrong, or a slow connection             |
| sw_ident, sw_ver | its software                                                              |
| events_seen    | events of it in the log, each once                                          |
| events_missing | numbers between the first and the last of each sender that are not in the   |
|                | log                                                                         |
| events_lost    | events that it reports as dropped                                           |

**Where a life begins.** Umbel's workers name their life (`inc`). Celery's do not, and in containers
each of them is process 1. A Celery worker sends `worker-online` when it starts, and again each time
that it has reconnected to the broker; in both it reports how many tasks it has begun (`processed`).
A process that has just started has begun none. So a life begins at a `worker-online` without `inc`
whose `processed` is 0 or missing (`births`), and lasts until the next one of the same host name and
process id; all these times are by one host's clock. A worker that reconnects before its first task
counts as another life: it has no running task that could be taken for lost.

**Order of lives.** The lives of a host name follow each other by `online`, then by incarnation,
whenever their events were received or imported.

**Who is lost.** The judgement depends on where the log ends (`umbel.pipeline.watermarks`) and on
when the last event of the worker was received, not on the senders' wall clocks. Its last event is
the one with the greatest (clock, timestamp). A worker without heartbeats is never lost unless a
next life of it begins. Events of pool processes do not count: they go on while the worker is stuck.

**Maintaining it.** `life_facts` has one row for each life and cell, and `merge_life_facts` makes
one set of facts of the cells; `drifts` and `merge_drifts` do so for the delays. Neither depends on
where the log ends: `statuses` and `workers` add that. Facts hold as long as no birth turns up
within a life that is known already; `outdated` names the processes of which one did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.functions import broadcast

from umbel.pipeline.queries import query
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    hostname STRING, incarnation BIGINT, pid BIGINT, status STRING, online DOUBLE,
    last_heartbeat DOUBLE, last_seen DOUBLE, offline DOUBLE, lost DOUBLE, uptime DOUBLE,
    processed BIGINT, active BIGINT, freq DOUBLE, drift DOUBLE, sw_ident STRING, sw_ver STRING,
    events_seen BIGINT, events_missing BIGINT, events_lost BIGINT
"""
BIRTHS: Final = "hostname STRING, pid BIGINT, born DOUBLE"
DRIFTS: Final = "_cell BIGINT, hostname STRING, incarnation BIGINT, drift_ms BIGINT, count BIGINT"
FACTS: Final = """
    _cell BIGINT, hostname STRING, incarnation BIGINT, born DOUBLE, pid BIGINT, has_inc BOOLEAN,
    is_named BOOLEAN, has_tasks BOOLEAN, is_numbered BOOLEAN, first_seen DOUBLE, last_seen DOUBLE,
    first_online DOUBLE, last_online DOUBLE, last_heartbeat DOUBLE, last_offline DOUBLE,
    last_own STRUCT<order_clock: BIGINT, timestamp: DOUBLE, received: DOUBLE>,
    last_sign STRUCT<timestamp: DOUBLE, freq: DOUBLE, active: BIGINT, sw_ident: STRING,
        sw_ver: STRING>,
    processed BIGINT, events_lost BIGINT, events_seen BIGINT
"""
# A worker is lost after this many heartbeat intervals without an event, as everywhere.
PATIENCE: Final = 2
# Of heartbeats that do not report their interval.
FREQ_S: Final = 2.0
FREQ_MAX_S: Final = 3_600.0
# Beyond this a time in microseconds is no BIGINT.
_TIME_MAX_S: Final = 9e12

_ONLINE: Final = "type = 'worker-online'"
_SIGNS: Final = "type IN ('worker-heartbeat', 'worker-online', 'worker-offline')"
# The facts of a life: how they follow from its events, and how those of two parts are merged.
_FACTS: Final = {
    "born": ("max(born)", "max"),
    "pid": ("max(pid)", "max"),
    "has_inc": ("bool_or(inc IS NOT NULL)", "bool_or"),
    "is_named": ("bool_or(type LIKE 'worker-%')", "bool_or"),
    "has_tasks": ("coalesce(bool_or(class NOT IN ('sent', 'custom')), false)", "bool_or"),
    "is_numbered": ("bool_or(seq IS NOT NULL)", "bool_or"),
    "first_seen": ("min(timestamp)", "min"),
    "last_seen": ("max(timestamp)", "max"),
    "first_online": (f"min(timestamp) FILTER (WHERE {_ONLINE})", "min"),
    "last_online": (f"max(timestamp) FILTER (WHERE {_ONLINE})", "max"),
    "last_heartbeat": ("max(timestamp) FILTER (WHERE type = 'worker-heartbeat')", "max"),
    "last_offline": ("max(timestamp) FILTER (WHERE type = 'worker-offline')", "max"),
    "last_own": (
        "max(struct(order_clock, timestamp, received)) FILTER (WHERE series IS NULL)", "max",
    ),
    "last_sign": (
        f"max(struct(timestamp, freq, active, sw_ident, sw_ver)) FILTER (WHERE {_SIGNS})", "max",
    ),
    "processed": ("max(processed)", "max"),
    "events_lost": ("max(lost)", "max"),
    "events_seen": ("count(1)", "sum"),
}  # fmt: skip


def births(events: DataFrame) -> DataFrame:
    """When processes that name no incarnation began a life (`BIRTHS`).

    The births of several parts are those of each, without repetitions.
    """
    made = query(
        f"""
        SELECT DISTINCT hostname, pid, timestamp AS born FROM {{events}}
        WHERE {_ONLINE} AND inc IS NULL AND pid IS NOT NULL AND coalesce(processed, 0L) <= 0
            AND abs(timestamp) < {_TIME_MAX_S}D
        """,  # noqa: S608 - our own names
        events=events,
    )
    return check(made, BIRTHS)


def known_births(facts: DataFrame) -> DataFrame:
    """The births that facts of cells tell of (`BIRTHS`)."""
    return check(
        facts.where("born IS NOT NULL").select("hostname", "pid", "born").distinct(), BIRTHS
    )


def with_lives(events: DataFrame, births: DataFrame) -> DataFrame:
    """The events with the `life` of each, and when that was `born`: null where nothing says so.

    All births of the events' senders must be given, also those before these events.
    """
    spans = query(
        """
        SELECT hostname AS born_host, pid AS born_pid, born,
            lead(born) OVER (PARTITION BY hostname, pid ORDER BY born) AS until
        FROM {births}
        """,
        births=births,
    )
    return query(
        """
        SELECT events.*, spans.born,
            coalesce(inc, CAST(round(spans.born * 1e6D) AS BIGINT), pid) AS life
        FROM {events} AS events LEFT JOIN {spans} AS spans
            ON inc IS NULL AND hostname = born_host AND pid = born_pid
            AND timestamp >= spans.born AND (until IS NULL OR timestamp < until)
        """,
        events=events,
        spans=broadcast(spans),
    )


def life_facts(events: DataFrame, births: DataFrame) -> DataFrame:
    """What each cell tells of each life; the key is (_cell, hostname, incarnation)."""
    facts = ", ".join(f"{text} AS {name}" for name, (text, _) in _FACTS.items())
    made = query(
        f"""
        SELECT _cell, hostname, life AS incarnation, {facts} FROM {{events}}
        GROUP BY _cell, hostname, life
        """,  # noqa: S608 - our own names
        events=with_lives(events, births),
    )
    return check(made, FACTS)


def merge_life_facts(facts: DataFrame) -> DataFrame:
    """The facts of each life, of those of all cells; the key is (hostname, incarnation)."""
    merged = ", ".join(f"{merge}({name}) AS {name}" for name, (_, merge) in _FACTS.items())
    return query(
        f"""
        SELECT hostname, incarnation, {merged} FROM {{facts}} GROUP BY hostname, incarnation
        """,  # noqa: S608 - our own names
        facts=facts,
    )


def outdated(facts: DataFrame, births: DataFrame) -> DataFrame:
    """The processes (hostname, pid) with a birth inside a life that these facts have as one."""
    return query(
        """
        SELECT DISTINCT facts.hostname, facts.pid FROM {facts} AS facts JOIN {births} AS births
            ON facts.hostname = births.hostname AND facts.pid = births.pid AND NOT has_inc
            AND births.born <= last_seen AND (facts.born IS NULL OR births.born > facts.born)
        """,
        facts=facts,
        births=births,
    )


def drifts(events: DataFrame, births: DataFrame) -> DataFrame:
    """How many events of each life took how long from sending to receipt (`DRIFTS`)."""
    made = query(
        """
        SELECT _cell, hostname, life AS incarnation,
            CAST(round((received - timestamp) * 1000) AS BIGINT) AS drift_ms, count(1) AS count
        FROM {events} WHERE received IS NOT NULL GROUP BY ALL
        """,
        events=with_lives(events, births),
    )
    return check(made, DRIFTS)


def merge_drifts(drifts: DataFrame) -> DataFrame:
    """The delays of each life, of those of all cells."""
    merged = drifts.groupBy("hostname", "incarnation", "drift_ms").sum("count")
    return merged.toDF("hostname", "incarnation", "drift_ms", "count")


def statuses(facts: DataFrame, log_ends: float) -> DataFrame:
    """Whether each life is online, offline or lost (hostname, incarnation, status)."""
    return _judged(facts, log_ends).select("hostname", "incarnation", "status")


def workers(facts: DataFrame, drifts: DataFrame, numbers: DataFrame, log_ends: float) -> DataFrame:
    """One row for each life of a worker.

    Of `merge_life_facts`, `merge_drifts` and `sequences.missing_numbers`.
    """
    made = query(
        """
        WITH medians AS (
            SELECT hostname, incarnation, min(drift_ms) / 1000D AS drift FROM (
                SELECT *, 2 * sum(count) OVER (PARTITION BY hostname, incarnation ORDER BY drift_ms)
                    >= sum(count) OVER (PARTITION BY hostname, incarnation) AS is_upper
                FROM {drifts}
            ) WHERE is_upper GROUP BY hostname, incarnation
        )
        SELECT judged.hostname, judged.incarnation, pid, status, online, last_heartbeat, last_seen,
            offline,
            IF(status = 'lost', greatest(last_seen, least(last_seen + patience, next_life)), NULL)
                AS lost,
            greatest(0D, coalesce(offline, last_seen) - online) AS uptime,
            processed, last_sign.active AS active, last_sign.freq AS freq, drift,
            last_sign.sw_ident AS sw_ident, last_sign.sw_ver AS sw_ver, events_seen,
            IF(is_numbered, coalesce(events_missing, 0L), NULL) AS events_missing, events_lost
        FROM {judged} AS judged
        LEFT JOIN medians ON judged.hostname = medians.hostname
            AND judged.incarnation <=> medians.incarnation
        LEFT JOIN {numbers} AS numbers ON judged.hostname = numbers.hostname
            AND judged.incarnation <=> numbers.incarnation
        """,
        judged=_judged(facts, log_ends),
        drifts=drifts,
        numbers=numbers,
    )
    return check(made, SCHEMA)


def _judged(facts: DataFrame, log_ends: float) -> DataFrame:
    """The facts of workers, with what follows from where the log ends."""
    return query(
        f"""
        WITH lives AS (
            SELECT *, coalesce(first_online, first_seen) AS online,
                is_named OR (has_tasks AND NOT bool_or(is_named) OVER (PARTITION BY hostname))
                    AS is_life,
                -- a process that names no incarnation may send on after it went, and then is back
                IF(last_offline < last_online OR (NOT has_inc AND last_offline < last_heartbeat),
                    NULL, last_offline) AS offline,
                {PATIENCE} * IF(last_sign.freq > 0 AND last_sign.freq <= {FREQ_MAX_S}D,
                    last_sign.freq, {FREQ_S}D) AS patience
            FROM {{facts}}
        ), ordered AS (
            SELECT *, lead(online) OVER (PARTITION BY hostname ORDER BY online, incarnation)
                AS next_life
            FROM lives WHERE is_life
        )
        SELECT *, CASE WHEN offline IS NOT NULL THEN 'offline'
            WHEN next_life IS NOT NULL THEN 'lost'
            WHEN last_heartbeat IS NOT NULL AND {log_ends!r}D - last_own.received > patience
                THEN 'lost'
            ELSE 'online' END AS status
        FROM ordered
        """,  # noqa: S608 - our own names
        facts=facts,
    )
