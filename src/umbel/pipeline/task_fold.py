"""The fold of tasks in Spark's own expressions, generated from `umbel.cluster.task_states`.

A *summary* has one row a task and one column a class of events: the greatest event of the class,
as a struct that begins with its place in the order (clock, timestamp, origin, type, tie). Structs
compare field by field, so `max` finds the last event and brings along what it said:

    summarise(events)   groupBy uuid, max of each class's struct
    tasks(summary)      the rules of the tables, one projection

`max` is associative, commutative and idempotent. So it does not matter in which order events come,
or how often.

Each struct has the fields of its class and no others: what is not there need not be shuffled. The
type is there for custom events only, the other classes have one type each. `present` tells a field
that is missing from one that is null (`event_rows.PRESENT_BIT`).

Moments (`eta`, `expires`), signals (`signum`) and `extra` are JSON, in the log and in `tasks`: a
number stays a number, and a text a text in quotes.

The text of the queries is SQL: Spark builds its plan from a text much faster than from calls.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.functions import expr

from umbel.cluster.event_rows import PRESENT_BIT
from umbel.cluster.task_states import (
    CLASS_FIELDS,
    CLASS_STATE,
    CLASSES,
    CUSTOM,
    EVENT_CLASS,
    FIELD_CLASSES,
    READY_STATES,
    STATE_CLASSES,
    TASK_FIELDS,
    TIMED_BY_ANY,
)

_TYPE: Final = {name: kind for kind, name in EVENT_CLASS.items()}
# What an event of a class is kept as; the order of events comes first.
SUMMARY_FIELDS: Final = {
    name: (
        *("order_clock", "timestamp", "origin"),
        *(("type",) if name == CUSTOM else ()),
        *("tie", "hostname", "present"),
        *CLASS_FIELDS[name],
        "extra",
    )
    for name in CLASSES
}
# The columns of events that the fold reads.
EVENT_COLUMNS: Final = tuple(
    dict.fromkeys(
        ["uuid", "class", *(field for fields in SUMMARY_FIELDS.values() for field in fields)]
    )
)


def summarise(events: DataFrame) -> DataFrame:
    """The summary of prepared events; those that are of no task are left out."""
    kept = (
        expr(f"max(CASE WHEN class = '{name}' THEN struct({', '.join(fields)}) END)").alias(name)
        for name, fields in SUMMARY_FIELDS.items()
    )
    return events.where("class IS NOT NULL").groupBy("uuid").agg(*kept)


def tasks(summary: DataFrame) -> DataFrame:
    """Every task with the fields of `task_states.TASK_FIELDS`, when it was finished, and queued.

    `finished` is when the event was sent that gave the task the state in which it ended. `queued`
    is when its last attempt was sent, or received where nobody saw that attempt sent.
    """
    placed = summary.selectExpr("*", *(f"{_key(name)} AS key_{name}" for name in CLASSES))
    compared = [f"key_{a} > key_{b} AS {_after(a, b)}" for a, b in _compared()]
    told = placed.selectExpr("*", *compared, *(f"{text} AS {at}" for at, text in _LAST.items()))
    held = told.selectExpr("*", f"{_holder()} AS holder")
    chosen = (f"{text} AS {field}" for field, text in _fields().items())
    whole = held.selectExpr(*chosen, f"{_of_holder('timestamp')} AS ended", f"{_QUEUED} AS queued")
    ready = ", ".join(f"'{state}'" for state in sorted(READY_STATES))
    finished = f"IF(state IN ({ready}), ended, NULL) AS finished"
    return whole.selectExpr(*TASK_FIELDS, finished, "queued")


# -- the rules, as SQL -------------------------------------------------------------------------

# As `umbel.cluster.task_summary.Summary.queued` has it.
_QUEUED: Final = """
    CASE WHEN received IS NOT NULL AND coalesce(received.retries, 0L) > coalesce(sent.retries, 0L)
        THEN received.timestamp ELSE coalesce(sent.timestamp, received.timestamp) END
"""


def _fields() -> dict[str, str]:
    """The fields of a task."""
    timed = ", ".join(f"'{name}'" for name in sorted(TIMED_BY_ANY))
    timing = f"IF(holder IN ({timed}), last, last_unreceived).key"
    made = {
        "uuid": "uuid",
        "state": f"CASE holder {_states()} END",
        **{name: f"{name}.timestamp" for name in CLASS_STATE},
        **{field: _field(field, classes) for field, classes in FIELD_CLASSES.items()},
        "worker": "last_unsent.said",
        "client": "sent.hostname",
        "timestamp": f"{timing}.timestamp",
        "clock": f"{timing}.order_clock",
        "extra": "last_extra.said",
    }
    assert made.keys() == set(TASK_FIELDS), made.keys() ^ set(TASK_FIELDS)
    return made


def _last(said: str, but: str = "") -> str:
    """The last event that has `said`, of all classes but one: its key, and what it says."""
    told = (
        f"IF({name}.{said} IS NULL, NULL, struct(key_{name} AS key, {name}.{said} AS said))"
        for name in CLASSES
        if name != but
    )
    return f"greatest({', '.join(told)})"


_LAST: Final = {
    "last": _last("hostname"),
    "last_unsent": _last("hostname", but="sent"),
    "last_unreceived": _last("hostname", but="received"),
    "last_extra": _last("extra"),
}


def _key(name: str) -> str:
    """The place of the last event of a class among those of all classes."""
    kind = f"{name}.type" if name == CUSTOM else f"'{_TYPE[name]}'"
    return (
        f"IF({name} IS NULL, NULL, struct({name}.order_clock, {name}.timestamp, "
        f"{name}.origin, {kind} AS type, {name}.tie))"
    )


def _after(one: str, other: str) -> str:
    """The name of the column that says whether the one class's last event is the later one."""
    return f"{one}_after_{other}"


def _compared() -> list[tuple[str, str]]:
    """The pairs of classes that some rule compares."""
    of_fields = [(a, b) for classes in FIELD_CLASSES.values() for a in classes for b in classes]
    of_state = [(name, "retried") for name in STATE_CLASSES]
    return list(dict.fromkeys((a, b) for a, b in [*of_fields, *of_state] if a != b))


def _holder() -> str:
    """The class that gives the state."""
    asked = " ".join(
        f"WHEN {name} IS NOT NULL AND coalesce({_after(name, 'retried')}, true) THEN '{name}'"
        for name in STATE_CLASSES
    )
    return f"CASE {asked} ELSE 'retried' END"


def _states() -> str:
    known = (f"WHEN '{name}' THEN '{state}'" for name, state in CLASS_STATE.items())
    return f"{' '.join(known)} ELSE upper(substr(custom.type, {len('task-') + 1}))"


def _of_holder(field: str) -> str:
    asked = " ".join(f"WHEN '{name}' THEN {name}.{field}" for name in CLASSES)
    return f"CASE holder {asked} END"


def _field(field: str, classes: tuple[str, ...]) -> str:
    """What the latest of the classes says that has the field at all."""
    if len(classes) == 1:
        return f"{classes[0]}.{field}"
    has = {name: f"coalesce({name}.present & {PRESENT_BIT[field]}, 0L) != 0" for name in classes}
    asked = " ".join(
        f"WHEN {has[name]}"
        + "".join(f" AND NOT ({has[b]} AND {_after(b, name)})" for b in classes if b != name)
        + f" THEN {name}.{field}"
        for name in classes
    )
    return f"CASE {asked} END"
