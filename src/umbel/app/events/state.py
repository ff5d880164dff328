"""The cluster as its events tell it: which workers there are, and what became of each task.

A `State` is fed with events, in whatever order and however often they come, and may be asked at
any time, by any thread. A task is always what `umbel.cluster.task_states.fold` makes of its
events, so two monitors that have heard the same agree, whatever came late to one of them.

Adding an event is cheap: it is put in its place. State, name and all other fields are worked out
when somebody asks for them. Lists of tasks are sorted when they are asked for.

It is bounded. When there are more than `max_tasks` tasks, the one that was silent the longest is
forgotten; the same holds for workers. `evicted_tasks` and `evicted_workers` count them. What comes
later about a forgotten task makes a new one, which knows only that. A task is among the children
of one other task at most, so the children are bounded by the tasks.

Events must be well formed (`umbel.wire.events.check`; a `Receiver` takes care of it). Their other
fields may hold anything: what makes no sense is left out. `event` raises nothing but what the
callback raises, and then the event has been taken.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Final, TypeVar

from umbel.app.events.state_items import Event, Life, Task, Worker
from umbel.cluster.task_states import CUSTOM, FIELD_CLASSES, position, read

__all__ = ["State", "Task", "Worker"]

_CALLS: Final = FIELD_CLASSES["parent_id"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class State:
    """See the module's text.

    `callback(state, event)` is called after each event, under the lock of the state, which the
    callback's own thread may enter again. `on_node_join(worker)` is called before it when a life of
    a worker begins, `on_node_leave(worker)` at its `worker-offline`. `clock` is the monotonic time.
    """

    def __init__(
        self,
        *,
        max_workers: int = 5_000,
        max_tasks: int = 10_000,
        callback: Callable[[State, Event], object] | None = None,
        on_node_join: Callable[[Worker], object] | None = None,
        on_node_leave: Callable[[Worker], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        calls = {
            "callback": callback, "on_node_join": on_node_join, "on_node_leave": on_node_leave,
        }  # fmt: skip
        for name, call in calls.items():
            if call is not None and not callable(call):
                raise TypeError(f"{name} must be a function, not {call!r}")
        for name, most in {"max_workers": max_workers, "max_tasks": max_tasks}.items():
            if type(most) is not int:
                raise TypeError(f"{name} must be a whole number, not {most!r}")
            if most < 1:
                raise ValueError(f"{name} must be at least 1, not {most}")
        self.max_workers, self.max_tasks = max_workers, max_tasks
        self.event_count = 0  # all that came
        self.task_count = 0  # tasks that were new when they came
        self.evicted_workers = 0
        self.evicted_tasks = 0
        self._callback = callback
        self._on_node_join, self._on_node_leave = on_node_join, on_node_leave
        self._now = clock
        self._lock = threading.RLock()
        self._workers: OrderedDict[str, Worker] = OrderedDict()  # the longest silent first
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._children: dict[str, dict[str, None]] = {}
        self.workers: Mapping[str, Worker] = _Table(self._workers, self._lock)
        self.tasks: Mapping[str, Task] = _Table(self._tasks, self._lock)

    def event(self, event: Event) -> Task | Worker | None:
        """Take an event; gives the task or the worker that it is about."""
        with self._lock:
            self.event_count += 1
            kind = event["type"]
            item: Task | Worker | None = None
            if kind[:5] == "task-":
                item = self._on_task(event)
            elif kind[:7] == "worker-" and "umbel_series" not in event:  # else a pool process
                item = self._worker(event["hostname"])
                before = item.life
                item.tell(event, self._now())
                self._call_hooks(item, before)
            if self._callback is not None:
                self._callback(self, event)
            return item

    # -- questions ---------------------------------------------------------------------

    def alive_workers(self) -> list[Worker]:
        """The workers that are there now."""
        return [worker for worker in self.workers.values() if worker.alive]

    def tasks_by_time(
        self, limit: int | None = None, reverse: bool = True
    ) -> list[tuple[str, Task]]:
        """The tasks by their last events, the latest first; `reverse=False` turns it round."""
        return _sorted(self.tasks.values(), _last, limit, reverse)

    def tasks_by_type(
        self, name: str, limit: int | None = None, reverse: bool = True
    ) -> list[tuple[str, Task]]:
        """The tasks of one name, as `tasks_by_time` sorts them."""
        found = [task for task in self.tasks.values() if task.name == name]
        return _sorted(found, _last, limit, reverse)

    def tasks_by_worker(
        self, hostname: str, limit: int | None = None, reverse: bool = True
    ) -> list[tuple[str, Task]]:
        """The tasks that one worker had last, as `tasks_by_time` sorts them."""
        found = [task for task in self.tasks.values() if task.worker == hostname]
        return _sorted(found, _last, limit, reverse)

    def tasks_in_order(self, limit: int | None = None) -> list[tuple[str, Task]]:
        """The tasks in causal order, by their first events: who sent comes before what he sent."""
        return _sorted(self.tasks.values(), _first, limit, reverse=False)

    def task_types(self) -> list[str]:
        """The names of the tasks that are known."""
        return sorted({name for task in self.tasks.values() if (name := task.name) is not None})

    def children(self, uuid: str) -> list[Task]:
        """The tasks that a task has sent, in causal order."""
        with self._lock:
            found = [self._tasks[child] for child in self._children.get(uuid, ())]
        return sorted(found, key=_first)

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON; one moment, not a mixture of two."""
        with self._lock:
            return {
                "event_count": self.event_count,
                "task_count": self.task_count,
                "evicted_workers": self.evicted_workers,
                "evicted_tasks": self.evicted_tasks,
                "workers": {name: worker.as_dict() for name, worker in self._workers.items()},
                "tasks": {uuid: task.as_dict() for uuid, task in self._tasks.items()},
            }

    def freeze_while(
        self, fun: Callable[..., Answer], *args: Any, clear_after: bool = False, **kwargs: Any
    ) -> Answer:
        """Call `fun` while no event is taken; clear afterwards if wanted, also when it fails."""
        with self._lock:
            try:
                return fun(*args, **kwargs)
            finally:
                if clear_after:
                    self.clear()

    def clear(self, ready: bool = True) -> None:
        """Forget workers, counts and the tasks that have ended; all tasks if not `ready`."""
        with self._lock:
            kept = [task for task in self._tasks.values() if ready and not task.ready]
            self._workers.clear()
            self._tasks.clear()
            self._children.clear()
            for task in kept:
                self._tasks[task.uuid] = task
                task.listed_under = None
                self._list_child(task)
            self.event_count = self.task_count = 0
            self.evicted_workers = self.evicted_tasks = 0

    def __repr__(self) -> str:
        return f"<State events={self.event_count} tasks={len(self._tasks)}>"

    # -- events ------------------------------------------------------------------------

    def _on_task(self, event: Event) -> Task:
        one = read(event)
        task = self._tasks.get(one.uuid)
        if task is None:
            task = self._new_task(one.uuid)
        else:
            self._tasks.move_to_end(one.uuid)
            one.uuid = task.uuid  # the text is kept once
        name = one.event_class
        if task.add(one) and name in _CALLS and one.parent_id != task.listed_under:  # type: ignore[attr-defined]
            self._list_child(task)
        # Clients and pool processes may send events of their own: those say nothing of a worker.
        if name not in ("sent", CUSTOM):
            worker = self._worker(one.hostname)
            one.hostname = worker.hostname
            worker.hear(one.pid, one.inc, one.clock, self._now())
        return task

    def _call_hooks(self, worker: Worker, before: Life | None) -> None:
        now = worker.life
        if now is None:
            if before is not None and self._on_node_leave is not None:
                self._on_node_leave(worker)
        elif self._on_node_join is not None and not _is_same(before, now):
            self._on_node_join(worker)

    def _new_task(self, uuid: str) -> Task:
        if len(self._tasks) >= self.max_tasks:
            _, oldest = self._tasks.popitem(last=False)
            self._unlist_child(oldest)
            self.evicted_tasks += 1
        task = self._tasks[uuid] = Task(uuid)
        self.task_count += 1
        return task

    def _worker(self, hostname: str) -> Worker:
        worker = self._workers.get(hostname)
        if worker is not None:
            self._workers.move_to_end(hostname)
            return worker
        if len(self._workers) >= self.max_workers:
            self._workers.popitem(last=False)
            self.evicted_workers += 1
        worker = self._workers[hostname] = Worker(hostname, self._now)
        return worker

    def _list_child(self, task: Task) -> None:
        """Keep the task among the children of its parent, which may have changed."""
        parent = task.parent_id
        if parent == task.listed_under:
            return
        self._unlist_child(task)
        # A task that is retried may call itself its parent.
        if parent is not None and parent != task.uuid:
            self._children.setdefault(parent, {})[task.uuid] = None
            task.listed_under = parent

    def _unlist_child(self, task: Task) -> None:
        parent, task.listed_under = task.listed_under, None
        siblings = self._children.get(parent) if parent is not None else None
        if siblings is not None:
            siblings.pop(task.uuid, None)
            if not siblings:
                del self._children[parent]  # type: ignore[arg-type]


class _Table(Mapping[str, Item]):
    """A view that can be walked through while events come: one sees a copy of the moment."""

    __slots__ = ("_items", "_lock")

    def __init__(self, items: Mapping[str, Item], lock: threading.RLock) -> None:
        self._items, self._lock = items, lock

    def __getitem__(self, key: str) -> Item:
        return self._items[key]

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._copy())

    def values(self) -> ValuesView[Item]:
        return self._copy().values()

    def items(self) -> ItemsView[str, Item]:
        return self._copy().items()

    def _copy(self) -> dict[str, Item]:
        with self._lock:
            return dict(self._items)

    def __repr__(self) -> str:
        return repr(self._copy())


def _is_same(before: Life | None, now: Life) -> bool:
    """Whether a life goes on; it may tell more of its name."""
    if before is None:
        return False
    return all(was in (None, one) for was, one in zip(before, now, strict=True))


def _last(task: Task) -> tuple[Any, ...]:
    last = task.last
    return () if last is None else (position(last), last.type, task.uuid)


def _first(task: Task) -> tuple[Any, ...]:
    first = task.first
    return () if first is None else (position(first), first.type, task.uuid)


def _sorted(
    tasks: Any, key: Callable[[Task], tuple[Any, ...]], limit: int | None, reverse: bool
) -> list[tuple[str, Task]]:
    if limit is None:
        found = sorted(tasks, key=key, reverse=reverse)
    else:
        pick = heapq.nlargest if reverse else heapq.nsmallest
        found = pick(limit, tasks, key=key)
    return [(task.uuid, task) for task in found]
