"""Executions of tasks: one row for each, with how it went.

The events of a task at one worker, in their order, are read as: a start begins an execution, the
next end closes it. A worker that is given a task again, or two workers that run it at once, make
several. Tasks that were revoked, expired or rejected before they began have none.

Events can be lost. An end without a start is an execution of which the start is missing, and the
other way round; an end that is told twice, without a receipt or start between, is one. A task that
no worker knows (`NotRegistered`) was never begun.

| column        | what it is                                                                  |
| ------------- | --------------------------------------------------------------------------- |
| uuid          | the task                                                                    |
| attempt       | 1 for its first execution, in the order of events                           |
| name          | the task's name, as in `tasks`                                              |
| worker        | the node that ran it                                                        |
| incarnation   | the life of the node, as in `workers`                                       |
| received      | when the node had it, before this execution, Unix seconds                   |
| waited        | seconds from when this attempt was due to its start. It was due when it was |
|               | sent (or received, where nobody saw it sent), or at its eta if that is      |
|               | later; 0 if it was started before its eta. Null where that is not known, or |
|               | it was started before it was sent, by the clocks of their hosts             |
| started       | when its code began; null when that event is missing                        |
| ended         | when it ended; null when that event is missing, or it runs                  |
| outcome       | SUCCESS, FAILURE, RETRY, REVOKED, REJECTED, CANCELLED; without an end       |
|               | RUNNING, or LOST when its worker was, or began the task anew                |
| runtime       | seconds, as the worker measured them; else from start to end                |
| reason        | `exception`, `worker lost`, `time limit`, `retry`, `expired`, `terminated`, |
|               | `revoked`, `rejected`, `requeued`, `cancelled`; of LOST `worker lost`,      |
|               | `worker offline` or `event lost`; null for SUCCESS and RUNNING              |
| exception     | what a failed or retried execution raised                                   |
| missing       | `start` or `end`: which event of it is not in the log; null if none         |
| started_clock | the clock of the start                                                      |
| ended_clock   | the clock of the end                                                        |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.pipeline.queries import query
from umbel.pipeline.tables.due import waited
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    uuid STRING, attempt BIGINT, name STRING, worker STRING, incarnation BIGINT, received DOUBLE,
    waited DOUBLE, started DOUBLE, ended DOUBLE, outcome STRING, runtime DOUBLE, reason STRING,
    exception STRING, missing STRING, started_clock BIGINT, ended_clock BIGINT
"""
# What each type of event is to an execution; another end in the same place says the same again.
STEPS: Final = {
    "task-sent": "name",
    "task-received": "receipt",
    "task-started": "start",
    "task-succeeded": "end",
    "task-failed": "end",
    "task-revoked": "end",
    "task-retried": "interim end",
    "task-rejected": "interim end",
    "task-cancelled": "interim end",
}
_STEPS: Final = " ".join(f"WHEN '{kind}' THEN '{step}'" for kind, step in STEPS.items())
_PLACE: Final = "order_clock, timestamp, origin, type, tie"
_HERE: Final = f"OVER (PARTITION BY uuid, hostname ORDER BY {_PLACE})"
_SO_FAR: Final = "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
_BEFORE: Final = f"OVER (PARTITION BY uuid, hostname ORDER BY {_PLACE} {_SO_FAR})"
# Clocks of clients that are not in step are no order: these go by time.
_BY_TIME: Final = f"ORDER BY timestamp, order_clock, type, tie {_SO_FAR}"
_IS_OPEN: Final = "(ended IS NULL AND ended_clock IS NULL)"
_IS_LOST: Final = "(_ran_anew OR coalesce(status IN ('lost', 'offline'), false))"


def attempts(events: DataFrame, names: DataFrame) -> DataFrame:
    """One row for each execution, of all events of some tasks; what has not ended is not judged.

    The events have their `life` (`workers.with_lives`); `names` has the names and queues of `tasks`
    (uuid, name, _queue).
    """
    made = query(
        f"""
        SELECT placed.uuid, CAST(attempt AS BIGINT) AS attempt, name, hostname AS worker,
            life AS incarnation, coalesce(s.had.timestamp, e.had.timestamp) AS received,
            {waited("s.timestamp", "s.queued", "s.eta")} AS waited,
            s.timestamp AS started, e.timestamp AS ended,
            CASE e.type WHEN 'task-succeeded' THEN 'SUCCESS' WHEN 'task-failed' THEN 'FAILURE'
                WHEN 'task-retried' THEN 'RETRY' WHEN 'task-revoked' THEN 'REVOKED'
                WHEN 'task-rejected' THEN 'REJECTED' WHEN 'task-cancelled' THEN 'CANCELLED'
                END AS outcome,
            coalesce(e.runtime, IF(e.timestamp >= s.timestamp, e.timestamp - s.timestamp, NULL))
                AS runtime,
            CASE e.type WHEN 'task-retried' THEN 'retry'
                WHEN 'task-failed' THEN CASE
                    WHEN e.exception LIKE '%WorkerLost%' THEN 'worker lost'
                    WHEN e.exception LIKE '%TimeLimitExceeded%' THEN 'time limit'
                    ELSE 'exception' END
                WHEN 'task-revoked' THEN CASE WHEN e.expired THEN 'expired'
                    WHEN e.terminated THEN 'terminated' ELSE 'revoked' END
                WHEN 'task-rejected' THEN IF(coalesce(e.requeue, false), 'requeued', 'rejected')
                WHEN 'task-cancelled' THEN 'cancelled' END AS reason,
            e.exception AS exception, IF(s IS NULL, 'start', NULL) AS missing,
            s.order_clock AS started_clock, e.order_clock AS ended_clock, ran_anew AS _ran_anew,
            _queue
        FROM {{placed}} AS placed LEFT JOIN {{names}} AS names ON placed.uuid = names.uuid
        """,  # noqa: S608 - our own names
        placed=executions(events),
        names=names,
    )
    check(made.drop("_ran_anew", "_queue"), SCHEMA)
    return made


def judged(attempts: DataFrame, statuses: DataFrame) -> DataFrame:
    """The executions, those that have not ended judged by `workers.statuses`; same columns."""
    columns = (
        {
            "outcome": f"IF({_IS_OPEN}, IF({_IS_LOST}, 'LOST', 'RUNNING'), outcome)",
            "reason": f"IF({_IS_OPEN}, CASE WHEN status IN ('lost', 'offline') "
            "THEN concat('worker ', status) WHEN _ran_anew THEN 'event lost' END, reason)",
            "missing": f"IF({_IS_OPEN}, IF({_IS_LOST}, 'end', NULL), missing)",
        }.get(name, f"attempts.{name}")
        for name in attempts.columns
    )
    chosen = ", ".join(
        f"{text} AS {name}" for text, name in zip(columns, attempts.columns, strict=True)
    )
    return query(
        f"""
        SELECT {chosen} FROM {{attempts}} AS attempts LEFT JOIN {{statuses}} AS lives
            ON {_IS_OPEN} AND worker = lives.hostname
                AND attempts.incarnation <=> lives.incarnation
        """,  # noqa: S608 - our own names
        attempts=attempts,
        statuses=statuses,
    )


def executions(events: DataFrame) -> DataFrame:
    """Executions with their start `s` and their end `e`, of which one may be null.

    The events have their `life` (`workers.with_lives`). Of a start, `queued` is when its attempt
    was sent, or received; `had` is the receipt before it; and `eta` is that of the receipt, or of
    the sending where there is no receipt.
    """
    return query(
        f"""
        WITH sendings AS (
            -- Of a receipt: when this attempt was sent. Starts and ends have no number of retries.
            SELECT uuid, hostname, life, order_clock, timestamp, origin, type, tie, class, eta,
                runtime, exception, terminated, expired, requeue, CASE type {_STEPS} END AS step,
                last(IF(class = 'sent', timestamp, NULL), true) OVER (
                    PARTITION BY uuid, coalesce(retries, 0L) {_BY_TIME}) AS sent,
                last(IF(class = 'sent', struct(timestamp, eta), NULL), true) OVER (
                    PARTITION BY uuid {_BY_TIME}) AS last_sent,
                last(IF(class = 'retried', timestamp, NULL), true) OVER (
                    PARTITION BY uuid {_BY_TIME}) AS last_retried
            FROM {{events}} WHERE class IS NOT NULL
        ), steps AS (
            SELECT *, lag(step) {_HERE} AS prior,
                last(IF(step = 'receipt', struct(timestamp, coalesce(sent, timestamp) AS queued,
                    eta), NULL), true) {_BEFORE} AS had
            FROM sendings WHERE step != 'name'
        ), numbered AS (
            SELECT * EXCEPT (eta), IF(had IS NULL, last_sent.eta, had.eta) AS eta,
                coalesce(had.queued, IF(last_retried IS NULL, last_sent.timestamp, NULL)) AS queued,
                count_if(
                    step = 'start'
                    OR (step LIKE '%end' AND NOT coalesce(prior IN ('start', 'end'), false))
                ) {_BEFORE} AS number
            FROM steps
        ), executions AS (
            SELECT uuid, hostname, number,
                min(IF(step = 'start', struct({_PLACE}, life, had, queued, eta), NULL)) AS s,
                min(IF(step LIKE '%end', struct({_PLACE}, life, had, runtime, exception,
                    terminated, expired, requeue), NULL)) AS e
            FROM numbered WHERE step != 'receipt'
            GROUP BY uuid, hostname, number
        )
        SELECT *, coalesce(s.life, e.life) AS life,
            row_number() OVER (PARTITION BY uuid ORDER BY
                coalesce(s.order_clock, e.order_clock), coalesce(s.timestamp, e.timestamp),
                coalesce(s.origin, e.origin), number, hostname) AS attempt,
            lead(number) OVER (PARTITION BY uuid, hostname ORDER BY number) IS NOT NULL
                AS ran_anew
        FROM executions
        WHERE s IS NOT NULL OR e.type IN ('task-succeeded', 'task-retried', 'task-cancelled')
            OR (e.type = 'task-failed' AND NOT coalesce(e.exception LIKE 'NotRegistered%', false))
            OR (e.type = 'task-revoked' AND coalesce(e.terminated, false))
        """,  # noqa: S608 - our own names
        events=events,
    )
