"""Where logical clocks did not do what they must: one row for each finding, with both events.

| kind                | what was found                                                          |
| ------------------- | ----------------------------------------------------------------------- |
| went back           | an event has a lower clock than the one that its sender numbered before |
| jump                | a clock is ahead of the one before it by more than one message may move |
|                     | it (`umbel.cluster.clock.JUMP_MAX`)                                      |
| missing             | a node sends events of this type without a clock: the first of them     |
| effect before cause | a clock is not greater than that of what must come before: of receipt   |
|                     | than of sending the same attempt (by a client in step), of the start    |
|                     | than of receipt, of the end than of the start, of a child's event than  |
|                     | of the start of its parent, in the same family                          |

Only clocks are compared, never times. `went back` and `jump` need numbered events, which Celery's
workers do not send; a sending, a start, a retry and a candidacy have a clock that was set aside for
them, so they are no measure for others. Celery's messages carry no clock, so its tasks may well
begin before their cause: a true finding about the order of the log. Where events are missing
(`gaps`), a later event of the same kind may stand for the one that is lost.

| column        | what it is                                                                    |
| ------------- | ----------------------------------------------------------------------------- |
| hostname      | the node whose event is wrong                                                 |
| incarnation   | its life                                                                      |
| kind          | see above                                                                     |
| uuid          | the task, of events of tasks                                                  |
| type, clock, timestamp | the event that is wrong                                              |
| other_hostname, other_type, other_clock, other_timestamp | the event that it is compared with |
| count         | how many such events there are: 1, or those without a clock                   |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.pipeline.queries import query
from umbel.pipeline.tables.sequences import wrong_pairs
from umbel.pipeline.tables.shapes import check, fields

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    hostname STRING, incarnation BIGINT, kind STRING, uuid STRING, type STRING, clock BIGINT,
    timestamp DOUBLE, other_hostname STRING, other_type STRING, other_clock BIGINT,
    other_timestamp DOUBLE, count BIGINT
"""
_EVENT: Final = "struct(order_clock, timestamp, type, hostname, incarnation)"
UNCLOCKED: Final = """
    _cell BIGINT, hostname STRING, incarnation BIGINT, type STRING,
    first STRUCT<timestamp: DOUBLE, uuid: STRING>, count BIGINT
"""
_ENDS: Final = "('succeeded', 'failed', 'retried', 'revoked', 'rejected')"


def of_senders(blocks: DataFrame, unclocked: DataFrame) -> DataFrame:
    """Findings about what each sender numbered, and about events without a clock.

    Of all blocks of numbers (`sequences.blocks`) and of `unclocked` events.
    """
    in_sequence = query(
        """
        SELECT hostname, incarnation,
            IF(after.clock < before.clock, 'went back', 'jump') AS kind, after.uuid, after.type,
            after.clock, after.timestamp, hostname AS other_hostname, before.type AS other_type,
            before.clock AS other_clock, before.timestamp AS other_timestamp, 1L AS count
        FROM {pairs}
        """,
        pairs=wrong_pairs(blocks),
    )
    missing = query(
        """
        SELECT hostname, incarnation, 'missing' AS kind, min(first).uuid AS uuid, type,
            CAST(NULL AS BIGINT), min(first).timestamp, CAST(NULL AS STRING), CAST(NULL AS STRING),
            CAST(NULL AS BIGINT), CAST(NULL AS DOUBLE), sum(count) AS count
        FROM {unclocked} GROUP BY hostname, incarnation, type
        """,
        unclocked=unclocked,
    )
    return check(in_sequence.union(missing), SCHEMA)


def of_tasks(events: DataFrame, roots: DataFrame) -> DataFrame:
    """Findings about events of tasks, of all events of whole families.

    `roots` has the family of each task (uuid, root).
    """
    found = _in_a_task(events).union(_children(events, roots))
    return check(found.toDF(*fields(SCHEMA).names), SCHEMA)


def unclocked(events: DataFrame) -> DataFrame:
    """Events without a clock, by cell, sender and type (`UNCLOCKED`)."""
    made = query(
        """
        SELECT _cell, hostname, incarnation, type, min(struct(timestamp, uuid)) AS first,
            count(1) AS count
        FROM {events} WHERE clock IS NULL GROUP BY _cell, hostname, incarnation, type
        """,
        events=events,
    )
    return check(made, UNCLOCKED)


def _sendings(events: DataFrame) -> DataFrame:
    """The receipts of each attempt at each worker, and the sending of that attempt.

    A retry is sent by the task itself, with the same id and the next number of `retries`: it is no
    cause of the receipt of the attempt before it. What is delivered again was sent once. If one of
    several sendings has no clock to compare with, nobody can tell which receipts it caused.
    """
    return query(
        f"""
        WITH told AS (
            SELECT uuid, coalesce(retries, 0L) AS retries, class, {_EVENT} AS event,
                IF(class = 'sent', NULL, hostname) AS worker,
                IF(class = 'sent', NULL, incarnation) AS life
            FROM {{events}} WHERE class IN ('sent', 'received')
        ), firsts AS (
            SELECT uuid, retries, worker, life,
                min(IF(class = 'sent', event, NULL)) AS sent,
                min(IF(class = 'received', event, NULL)) AS received
            FROM told GROUP BY uuid, retries, worker, life
        )
        SELECT uuid, min(sent) OVER (PARTITION BY uuid, retries) AS cause, received AS effect
        FROM firsts
        """,  # noqa: S608 - our own names
        events=events,
    )


def _executions(events: DataFrame) -> DataFrame:
    """The first receipt, start and end of each task at each worker, one as the other's cause."""
    return query(
        f"""
        WITH firsts AS (
            SELECT uuid,
                min(IF(class = 'received', {_EVENT}, NULL)) AS received,
                min(IF(class = 'started', {_EVENT}, NULL)) AS started,
                min(IF(class IN {_ENDS}, {_EVENT}, NULL)) AS ended,
                count_if(class = 'received') AS receipts, count_if(class = 'started') AS starts,
                count_if(class IN {_ENDS}) AS ends
            FROM {{events}}
            WHERE class IN ('received', 'started') OR class IN {_ENDS} AND clock IS NOT NULL
            GROUP BY uuid, hostname, incarnation
        )
        SELECT uuid, inline(array(
            struct(IF(receipts >= starts, received, NULL) AS cause, started AS effect),
            struct(IF(starts >= ends, started, NULL) AS cause, ended AS effect)))
        FROM firsts
        """,  # noqa: S608 - our own names
        events=events,
    )


def _in_a_task(events: DataFrame) -> DataFrame:
    """Sending, receipt, start and end of one task."""
    return query(
        """
        SELECT effect.hostname, effect.incarnation, 'effect before cause' AS kind, uuid,
            effect.type, effect.order_clock, effect.timestamp, cause.hostname, cause.type,
            cause.order_clock, cause.timestamp, 1L AS count
        FROM {pairs}
        WHERE effect.order_clock <= cause.order_clock AND effect.order_clock > 0
        """,
        pairs=_sendings(events).union(_executions(events)),
    )


def _children(events: DataFrame, roots: DataFrame) -> DataFrame:
    """What a task sends comes after its first start."""
    return query(
        f"""
        WITH first_of AS (
            SELECT uuid, max(parent_id) AS parent_id,
                min({_EVENT}) FILTER (WHERE order_clock > 0) AS event
            FROM {{events}} WHERE class IS NOT NULL GROUP BY uuid
        ), starts AS (
            SELECT uuid, min({_EVENT}) AS started
            FROM {{events}} WHERE class = 'started' AND order_clock > 0 GROUP BY uuid
        ), pairs AS (
            SELECT first_of.uuid, event, first_of.parent_id, started
            FROM first_of JOIN starts ON first_of.parent_id = starts.uuid
            WHERE parent_id != first_of.uuid AND event.order_clock <= started.order_clock
        )
        SELECT event.hostname, event.incarnation, 'effect before cause' AS kind, pairs.uuid,
            event.type, event.order_clock, event.timestamp, started.hostname, started.type,
            started.order_clock, started.timestamp, 1L AS count
        FROM pairs JOIN {{roots}} AS own ON pairs.uuid = own.uuid
        JOIN {{roots}} AS parents ON pairs.parent_id = parents.uuid
        WHERE own.root = parents.root
        """,  # noqa: S608 - our own names
        events=events,
        roots=roots,
    )
