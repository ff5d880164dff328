"""What Umbel's events say beyond Celery's: the one list of these fields.

All are optional: they are left out where nothing is known, and whoever reads events does without
them. Celery's monitors keep what they do not know as plain attributes of a task or a worker, so no
name here is one that those have already (`id`, `ready`, `alive`, `parent`, `root`, `info`).

The worker fills them in, `cluster.task_states` knows them, the recorder has a column for each
(`cluster.event_rows`), and `docs/events.md` has this table. They describe one event, and are not
folded into the task; its `queue` is that of `task-sent`, as with Celery.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_ENDS: Final = ("task-succeeded", "task-failed", "task-retried")
_WORKER: Final = ("worker-online", "worker-heartbeat", "worker-offline")


class Field(NamedTuple):
    """One field: its kind (as columns have them), the events that have it, and what it is."""

    kind: str
    events: tuple[str, ...]
    text: str


TASK_DETAILS: Final = {
    "queue": Field("text", ("task-received", "task-started"), "the queue that the message was in"),
    "group_id": Field("text", ("task-sent", "task-received"), "the group that the task belongs to"),
    "chord_id": Field("text", _ENDS, "the task that ends the chord of this one"),
    "redelivered": Field(
        "flag", ("task-received",), "true where the broker has delivered the message before"
    ),
    "deliveries": Field(
        "whole",
        ("task-received",),
        "how often it was delivered before: on Redis, and on quorum queues of RabbitMQ",
    ),
    "payload_bytes": Field(
        "whole", ("task-sent", "task-received"), "the size of the message's body"
    ),
    "code_version": Field(
        "text", ("task-started", *_WORKER), "`worker_code_version`, where that is set"
    ),
    "cpu_s": Field(
        "number",
        _ENDS,
        "seconds of CPU that the execution took, where it took at least 5 ms; pools prefork, solo "
        "and threads",
    ),
    "memory_peak_bytes": Field(
        "whole",
        _ENDS,
        "the most memory that the process had until then, earlier tasks included, where `cpu_s` "
        "is there; pools prefork and solo",
    ),
}
WORKER_DETAILS: Final = {
    "concurrency": Field("whole", _WORKER, "how many tasks may run at once"),
    "reserved": Field("whole", _WORKER, "tasks that were received and have not ended"),
    "queue_lengths": Field(
        "json", _WORKER, "messages that wait in each queue of the worker, with `-E`"
    ),
    "code_version": TASK_DETAILS["code_version"],
}
# In one heartbeat; more queues than these are left out.
QUEUE_LENGTHS_MAX: Final = 50


def details_of(kind: str) -> dict[str, str]:
    """The fields that an event of a task may have besides those of the fold, with their kinds."""
    return {name: field.kind for name, field in TASK_DETAILS.items() if kind in field.events}
