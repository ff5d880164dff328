"""A group: calls side by side.

Every member carries the group's id and its place; groups inside groups are flattened. Members
may be chains and chords. The result is a `GroupResult` of the members' results, in order; that
of an empty group is ready at once and empty. Options given to the group go to every member and
win over the members' own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from umbel.app.canvas.plan import Plan, Planned, apply_planned
from umbel.app.canvas.signature import Signature, adopted, as_list, signature

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel


class group(Signature):  # noqa: N801 - the name on the wire and in callers' code
    """Calls side by side."""

    def __init__(self, *tasks: Any, app: Umbel | None = None, **options: Any) -> None:
        super().__init__("celery.group", (), {}, options, subtask_type="group", app=app)
        parts: Iterable[Any] = tasks
        if len(tasks) == 1:
            only = tasks[0]
            if isinstance(only, group):
                parts = only.tasks
            elif not isinstance(only, dict):
                parts = only
        self.tasks = [signature(task, app=app) for task in parts]

    @classmethod
    def from_wire(cls, data: dict[str, Any], app: Umbel | None) -> group:
        """Read a group and its members."""
        tasks = (data.get("kwargs") or {}).get("tasks") or ()
        made = cls([adopted(task, app) for task in tasks], app=app)
        made["args"] = tuple(data.get("args") or ())
        made["options"] = data.get("options") or {}
        made["immutable"] = bool(data.get("immutable"))
        return made

    @property
    def tasks(self) -> list[Signature]:
        """The members, in order."""
        value: list[Signature] = self.kwargs["tasks"]
        return value

    @tasks.setter
    def tasks(self, tasks: list[Signature]) -> None:
        self.kwargs["tasks"] = tasks

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Send the group."""
        return self.apply_async(args, **options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send every member in one batch; gives a `GroupResult`."""
        if self.app.conf.task_always_eager:
            return self.apply(args, kwargs, **options)
        return apply_planned(self, args, kwargs, options)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run the members inline, one after the other."""
        _, _, merged = self.merged((), {}, options)
        group_id = merged.pop("task_id", None) or str(uuid.uuid4())
        merged["group_id"] = group_id
        given = (*(args or ()), *self.args)
        results = [
            member.clone().apply(given, kwargs, **merged) for member in flattened(self.tasks)
        ]
        return self.app.GroupResult(group_id, results)

    def plan(self, plan: Plan, args: Any, kwargs: Any, options: dict[str, Any]) -> Planned:
        """Every member is planned with the group's id; followed by a step it is a chord."""
        given = (*(args or ()), *self.args)
        _, _, merged = self.merged((), {}, options)
        after = merged.pop("chain", None)
        if after:
            return _as_chord(self, after).plan(plan, given, kwargs, merged)
        if merged.pop("link", None):
            raise TypeError(
                "a group has no one return value to call back with: make it the header of a "
                "chord, chord(group, body), or link its members"
            )
        for errback in as_list(merged.pop("link_error", None)):
            self.link_error(errback)
        group_id = merged.pop("task_id", None) or str(uuid.uuid4())
        chord, owner = merged.pop("chord", None), merged.pop("group_id", None)
        merged.pop("group_index", None)
        results = []
        for index, member in enumerate(flattened(self.tasks)):
            chosen = dict(merged)
            # The last step of a chain in a chord's header reports to that chord, not to us.
            chosen["group_id"] = member.options.get("group_id") or owner or group_id
            chosen["group_index"] = index
            chosen["chord"] = chord
            results.append(member.plan(plan, given, kwargs, chosen).result)
        result = plan.app.GroupResult(group_id, results)
        return Planned(result, result)

    def freeze(
        self,
        _id: str | None = None,
        group_id: str | None = None,
        chord: Any = None,
        root_id: str | None = None,
        parent_id: str | None = None,
        group_index: int | None = None,
    ) -> Any:
        """Fix the group's id and its members' ids.

        The members learn the group's id only when they are sent: peers may choose another one
        for a header that they send, and keep what a member says already.
        """
        options = self.options
        own_id = options.get("task_id") or _id or str(uuid.uuid4())
        options["task_id"] = own_id
        self.tasks = flattened(self.tasks)
        results = [
            member.freeze(
                group_id=group_id, chord=chord, root_id=root_id, parent_id=parent_id,
                group_index=index,
            )
            for index, member in enumerate(self.tasks)
        ]  # fmt: skip
        return self.app.GroupResult(own_id, results)

    def link(self, callback: Any) -> Any:
        """Link to the first member; the callback gets no return value, as it is not the whole."""
        if not self.tasks:
            raise TypeError("an empty group cannot be linked: nothing in it can succeed")
        linked = signature(callback).clone()
        linked.set_immutable(True)
        return self.tasks[0].link(linked)

    def link_error(self, errback: Any) -> Any:
        """Link to every member; gives the errbacks."""
        return tuple(member.link_error(signature(errback).clone()) for member in self.tasks)

    def set_immutable(self, immutable: bool) -> None:
        """Whether the members ignore arguments given to the group."""
        for member in self.tasks:
            member.set_immutable(immutable)

    def skew(self, start: float = 1.0, stop: float | None = None, step: float = 1.0) -> group:
        """Give each member a countdown of its own: `start`, `start + step`, ... below `stop`."""
        delay = start
        for member in self.tasks:
            member.set(countdown=delay)
            delay = delay + step if stop is None or delay + step < stop else start
        return self

    def known_app(self) -> Umbel | None:
        """The application of the group or of its first member."""
        return self._app or (self.tasks[0].known_app() if self.tasks else None)

    def __len__(self) -> int:
        return len(self.tasks)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.tasks))})"


def flattened(tasks: Iterable[Signature]) -> list[Signature]:
    """The members with groups inside taken apart and empty chains left out."""
    flat: list[Signature] = []
    for task in tasks:
        if isinstance(task, group):
            flat.extend(flattened(task.tasks))
        elif task.subtask_type != "chain" or task.kwargs["tasks"]:
            flat.append(task)
    return flat


def _as_chord(header: group, after: list[Any]) -> Signature:
    from umbel.app.canvas.chord import chord

    body = signature(after[-1], app=header.known_app()).clone()
    made = chord(header, body=body, app=header.known_app())
    if after[:-1]:
        made.options["chain"] = after[:-1]
    header["options"] = {}
    return made
