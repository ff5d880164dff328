"""A task from its events, one by one, in any order: the fast form of `task_states.fold`.

A summary keeps the greatest event of each class, and the first event of all for its place. Adding
an event, or another summary, is taking the maximum per class: associative, commutative and
idempotent. So events may come late or twice, and parts may be summed up in different places and
merged. What the task *is* follows from the summary when it is asked for; nothing is computed
before.

Records never change, and one is put in the place of another at once: one thread may write while
others read.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from umbel.cluster.task_states import (
    CUSTOM,
    FIELD_CLASSES,
    STATE_CLASSES,
    TASK_FIELDS,
    TIMED_BY_ANY,
    UNSET,
    Record,
    is_later,
    place,
    state_of,
)

# A custom type of Umbel's workers: the task was ended, as its message will be delivered again.
CANCELLED: Final = "task-cancelled"


class _Field:
    """A field of the task: what the latest of its classes says that says anything."""

    __slots__ = ("_classes", "_field")

    def __set_name__(self, owner: type, field: str) -> None:
        self._field, self._classes = field, FIELD_CLASSES[field]

    def __get__(self, task: Summary, owner: type | None = None) -> Any:
        found, answer = None, None
        for name in self._classes:
            one = task.records.get(name)
            if one is not None and (found is None or is_later(one, found)):
                value = getattr(one, self._field)
                if value is not UNSET:
                    found, answer = one, value
        return answer


class _Time:
    """When the last event of a class was sent, by its sender's wall clock."""

    __slots__ = ("_class",)

    def __set_name__(self, owner: type, name: str) -> None:
        self._class = name

    def __get__(self, task: Summary, owner: type | None = None) -> float | None:
        one = task.records.get(self._class)
        return None if one is None else one.timestamp


class Summary:
    """A task, as far as its events are known; see the module's text."""

    __slots__ = ("first", "last", "records", "uuid")

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.records: dict[str, Record] = {}
        self.first: Record | None = None  # the least of all, for its place only
        self.last: Record | None = None  # the greatest of all

    def add(self, one: Record) -> bool:
        """Take the record of an event of this task; whether it says anything new."""
        first, last = self.first, self.last
        if first is None or last is None:
            self.first = self.last = one
        elif one.clock > last.clock or is_later(one, last):
            self.last = one
        elif is_later(first, one):
            self.first = one
        records, name = self.records, one.event_class
        known = records.get(name)
        if known is None or is_later(one, known):
            records[name] = one
            return True
        return False

    def merge(self, other: Summary) -> None:
        """Take everything that another summary of the same task knows."""
        assert other.uuid == self.uuid, f"{other.uuid} is not {self.uuid}"
        for one in (other.first, *other.records.values()):
            if one is not None:
                self.add(one)

    name, args, kwargs, root_id, parent_id = _Field(), _Field(), _Field(), _Field(), _Field()
    retries, eta, expires = _Field(), _Field(), _Field()
    queue, exchange, routing_key = _Field(), _Field(), _Field()
    result, runtime, exception, traceback = _Field(), _Field(), _Field(), _Field()
    terminated, signum, expired, requeue = _Field(), _Field(), _Field(), _Field()
    sent, received, started, succeeded = _Time(), _Time(), _Time(), _Time()
    failed, retried, revoked, rejected = _Time(), _Time(), _Time(), _Time()

    @property
    def state(self) -> str:
        """The state of the task."""
        holder = self._holder()
        return "PENDING" if holder is None else state_of(holder)

    @property
    def timestamp(self) -> float | None:
        """When the task last changed, by a sender's wall clock."""
        one = self._timing()
        return None if one is None else one.timestamp

    @property
    def clock(self) -> int | None:
        """When the task last changed, by the logical clock."""
        one = self._timing()
        return None if one is None else one.clock

    @property
    def worker(self) -> str | None:
        """The node that had the task last."""
        one = self._last_but("sent")
        return None if one is None else one.hostname

    @property
    def client(self) -> str | None:
        """The node that sent the task last."""
        one = self.records.get("sent")
        return None if one is None else one.hostname

    @property
    def queued(self) -> float | None:
        """When the last attempt was sent, or received where nobody saw that attempt sent."""
        sent, received = self.records.get("sent"), self.records.get("received")
        if sent is None or (received is not None and _retries(received) > _retries(sent)):
            return None if received is None else received.timestamp
        return sent.timestamp

    @property
    def running(self) -> bool:
        """Whether the task is being run, in a state of its own or not."""
        holder = self._holder()
        if holder is None or holder.event_class not in ("started", CUSTOM):
            return False
        # A state of the user's own is stronger than most ends.
        ends = (self.records.get(name) for name in ("revoked", "rejected"))
        return holder.type != CANCELLED and not any(
            end is not None and is_later(end, holder) for end in ends
        )

    @property
    def extra(self) -> dict[str, Any] | None:
        """The fields that no table knows, of the last event that had any."""
        found: Record | None = None
        for one in tuple(self.records.values()):
            if one.extra and (found is None or is_later(one, found)):
                found = one
        return None if found is None else msgspec.json.decode(found.extra)

    def as_dict(self) -> dict[str, Any]:
        """The task, as `fold` gives it."""
        return {field: getattr(self, field) for field in TASK_FIELDS}

    def _holder(self) -> Record | None:
        """The event that gives the state."""
        records = self.records
        retried = records.get("retried")
        for name in STATE_CLASSES:
            one = records.get(name)
            if one is not None and (retried is None or is_later(one, retried)):
                return one
        return retried

    def _timing(self) -> Record | None:
        """The event that gives timestamp and clock."""
        holder = self._holder()
        if holder is None or holder.event_class in TIMED_BY_ANY:
            return self.last
        return self._last_but("received")

    def _last_but(self, left_out: str) -> Record | None:
        """The last event of all classes but one."""
        found = self.last
        if found is None or found.event_class != left_out:
            return found
        others = (one for name, one in tuple(self.records.items()) if name != left_out)
        return max(others, key=place, default=None)


def _retries(one: Record) -> int:
    return retries_of(getattr(one, "retries", None))


def retries_of(told: Any) -> int:
    """The number of retries in an event of a task; 0 where it has none."""
    return told if type(told) is int else 0
