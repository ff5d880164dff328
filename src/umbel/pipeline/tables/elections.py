"""Elections: who stood, who was chosen, and whether it was done once.

Candidates say that they stand (`worker-elect`), winners are told by everybody who learns of them
(`worker-elected`, between Umbel's nodes). See `umbel.cluster.election`. A node that does not stand
sends a `worker-elect` where Celery's workers need it, with `stands` false: it is no candidate.

| column        | what it is                                                                    |
| ------------- | ----------------------------------------------------------------------------- |
| id            | the election                                                                  |
| topic         | `task`, or what a handler of the application is for                           |
| requested     | when the first candidate stood, Unix seconds                                  |
| requested_clock | the clock of that                                                           |
| candidates    | those who stood: hostname, origin, incarnation, clock and rank, from 1 on, in |
|               | the order in which they try; at most `CANDIDATES_MAX`                         |
| decided       | when the first one told the winner                                            |
| decided_clock | the clock of that                                                             |
| decided_after | seconds from `requested` to `decided`                                         |
| winner        | the node that was chosen, of several the first by name; null where nobody     |
|               | told: Celery's workers never do                                               |
| winners       | every node that anybody told as the winner                                    |
| disagreement  | whether those are more than one                                               |
| acks          | `worker-elect-ack` events: Celery's workers wait for them                     |
| executions    | of the topic `task`: how often the task was run, by its starts or its ends,   |
|               | whichever are more; what ended in a retry is not counted                      |
| verdict       | `exactly once`, `none`, `more`. Of tasks by their executions, as far as events |
|               | tell (workers with `-E`); of other topics by the winners that were told.      |
|               | `open` where it was not yet done when the log ends: it was requested less than |
|               | `OPEN_S` before and has no winner, or its task was sent, or waits for a retry, |
|               | and was neither run nor dropped within `TASK_OPEN_S`                          |

How old something is when the log ends (`umbel.pipeline.watermarks`) is judged by when events were
received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.cluster.election import LIFE_S
from umbel.pipeline.queries import query
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CANDIDATES_MAX: Final = 1_000
# Candidates take turns for 4.5 s, and repeat claims that fail. Longer: a failure is told later;
# shorter: an election that a slow broker decides late counts as failed meanwhile.
OPEN_S: Final = 60.0
# Nobody waits for the decision any longer, and the task of a decided one may have to queue.
TASK_OPEN_S: Final = LIFE_S
SCHEMA: Final = """
    id STRING, topic STRING, requested DOUBLE, requested_clock BIGINT,
    candidates ARRAY<STRUCT<hostname: STRING, origin: STRING, incarnation: BIGINT, clock: BIGINT,
        rank: INT>>,
    decided DOUBLE, decided_clock BIGINT, decided_after DOUBLE, winner STRING,
    winners ARRAY<STRING>, disagreement BOOLEAN, acks BIGINT, executions BIGINT, verdict STRING
"""


# Beside the columns: what `judged` goes by, the task's id, and the cells of the election's events.
HIDDEN: Final = """
    _asked DOUBLE, _heard DOUBLE, _dropped BOOLEAN, _task STRING, _cells ARRAY<BIGINT>
"""


def elections(events: DataFrame) -> DataFrame:
    """One row for each election, without a verdict where nothing was done; `HIDDEN` columns too.

    Of all events of these elections and of their tasks.
    """
    held = query(
        """
        SELECT id, max(topic) FILTER (WHERE type = 'worker-elect') AS topic,
            min(struct(timestamp, order_clock)) FILTER (WHERE stands) AS request,
            array_sort(collect_set(IF(stands,
                struct(order_clock AS clock, origin, hostname, incarnation), NULL))) AS stood,
            min(struct(timestamp, order_clock))
                FILTER (WHERE type = 'worker-elected' AND winner IS NOT NULL) AS decision,
            array_sort(collect_set(IF(type = 'worker-elected', winner, NULL))) AS winners,
            count_if(type = 'worker-elect-ack') AS acks,
            min(received) FILTER (WHERE type = 'worker-elect') AS asked,
            max(received) FILTER (WHERE type = 'worker-elected' AND winner IS NOT NULL) AS told,
            -- Celery's signatures have an id of their own, which its workers keep
            max(IF(type = 'worker-elect', get_json_object(raw, '$.action.options.task_id'), NULL))
                AS task_id,
            array_sort(collect_set(_cell)) AS cells
        FROM (
            SELECT *, type = 'worker-elect'
                AND coalesce(get_json_object(raw, '$.stands'), '') != 'false' AS stands
            FROM {events}
            WHERE type IN ('worker-elect', 'worker-elect-ack', 'worker-elected')
                AND id IS NOT NULL
        ) GROUP BY id
        """,
        events=events,
    )
    ran = query(
        """
        WITH ids AS (
            SELECT id AS election, explode(array_distinct(array(id, task_id))) AS uuid FROM {held}
            WHERE topic = 'task'
        )
        SELECT election, greatest(count_if(class = 'started'), count_if(
                class IN ('succeeded', 'failed', 'retried') OR class = 'revoked' AND terminated
            )) - count_if(class = 'retried') AS executions,
            bool_or(class = 'revoked' OR class = 'rejected' AND NOT coalesce(requeue, false))
                AS dropped,
            max(received) AS heard
        FROM {events} AS events JOIN ids ON events.uuid = ids.uuid
        WHERE class IS NOT NULL GROUP BY election
        """,
        held=held,
        events=events,
    )
    made = query(
        f"""
        WITH counted AS (
            SELECT held.*, IF(topic = 'task', coalesce(ran.executions, 0L), NULL) AS executions,
                coalesce(dropped, false) AS dropped, greatest(told, heard) AS sent
            FROM {{held}} AS held LEFT JOIN {{ran}} AS ran ON held.id = ran.election
        )
        SELECT id, topic, request.timestamp AS requested, request.order_clock AS requested_clock,
            transform(slice(stood, 1, {CANDIDATES_MAX}), (one, n) -> named_struct(
                'hostname', one.hostname, 'origin', one.origin, 'incarnation', one.incarnation,
                'clock', one.clock, 'rank', n + 1)) AS candidates,
            decision.timestamp AS decided, decision.order_clock AS decided_clock,
            decision.timestamp - request.timestamp AS decided_after,
            get(winners, 0) AS winner, winners, size(winners) > 1 AS disagreement, acks, executions,
            CASE coalesce(executions, size(winners)) WHEN 0 THEN NULL
                WHEN 1 THEN 'exactly once' ELSE 'more' END AS verdict,
            asked AS _asked, sent AS _heard, dropped AS _dropped, task_id AS _task, cells AS _cells
        FROM counted
        """,  # noqa: S608 - our own names
        held=held,
        ran=ran,
    )
    return check(made, f"{SCHEMA}, {HIDDEN}")


def judged(elections: DataFrame, log_ends: float) -> DataFrame:
    """The elections with a verdict where nothing was done when the log ends; the same columns."""
    is_open = f"""
        CASE WHEN _dropped THEN false
            WHEN _heard IS NULL THEN {log_ends!r}D - _asked <= {OPEN_S}D
            ELSE {log_ends!r}D - _heard <= {TASK_OPEN_S}D END
    """
    verdict = f"""
        IF(coalesce(executions, size(winners)) = 0,
            IF(coalesce({is_open}, false), 'open', 'none'), verdict)
    """
    return elections.selectExpr(
        *(f"{verdict} AS verdict" if name == "verdict" else name for name in elections.columns)
    )
