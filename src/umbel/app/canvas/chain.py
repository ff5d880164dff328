"""A chain: calls one after the other, each given what the one before it returned.

What goes out is the first step; the others travel with it, reversed, in its `chain` option,
each with its task id fixed. On the way there the steps are made uniform:

- nested chains are taken apart, empty groups dropped, a group of one task is that task;
- a group followed by a step becomes a chord with that step as its body, so a group remains
  only as the last step, and the result of the chain is then a `GroupResult`;
- only the last step carries what the chain as a whole was given: id, link, group and chord.

The options `link_error` goes to every step, all others (queue, countdown, ...) to the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from umbel.app.canvas.group import group
from umbel.app.canvas.plan import Plan, Planned, apply_planned, require_chords
from umbel.app.canvas.signature import Signature, adopted, as_list, own, signature

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

TAIL_OPTIONS = ("task_id", "group_id", "group_index", "chord")


class chain(Signature):  # noqa: N801 - the name on the wire and in callers' code
    """Calls one after the other."""

    def __init__(self, *tasks: Any, app: Umbel | None = None, **options: Any) -> None:
        super().__init__("celery.chain", (), {}, options, subtask_type="chain", app=app)
        parts: Iterable[Any] = tasks
        if len(tasks) == 1 and not isinstance(tasks[0], dict):
            parts = tasks[0]
        self.tasks = [signature(task, app=app) for task in parts]

    @classmethod
    def from_wire(cls, data: dict[str, Any], app: Umbel | None) -> chain:
        """Read a chain and its steps."""
        tasks = (data.get("kwargs") or {}).get("tasks") or ()
        made = cls(*(adopted(task, app) for task in tasks), app=app)
        made["args"] = tuple(data.get("args") or ())
        made["options"] = data.get("options") or {}
        made["immutable"] = bool(data.get("immutable"))
        return made

    @property
    def tasks(self) -> list[Signature]:
        """The steps, in order."""
        value: list[Signature] = self.kwargs["tasks"]
        return value

    @tasks.setter
    def tasks(self, tasks: list[Signature]) -> None:
        self.kwargs["tasks"] = tasks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Send the chain."""
        return self.apply_async(args, kwargs) if self.tasks else None

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send the first step with the others on its back; gives the last step's result."""
        if self.app.conf.task_always_eager:
            return self.apply(args, kwargs, **options)
        return apply_planned(self, args, kwargs, options)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run the steps inline, one after the other; stops at the first that does not succeed."""
        steps = [step.clone() for step in _flat(self.tasks)]
        if not steps:
            raise ValueError("an empty chain has nothing to run: give it at least one signature")
        tail = {name: options.pop(name) for name in TAIL_OPTIONS if name in options}
        for callback in as_list(options.pop("link", None)) + as_list(self.options.get("link")):
            steps[-1].link(callback)
        args = () if self.immutable else tuple(args or ())
        last = steps[0].apply((*args, *self.args), kwargs, **(options | _only(steps, 0, tail)))
        for place, step in enumerate(steps[1:], 1):
            if not last.successful():
                break
            before = last
            last = step.apply((before.get(),), **_only(steps, place, tail))
            last.parent = before
        return last

    def plan(self, plan: Plan, args: Any, kwargs: Any, options: dict[str, Any]) -> Planned:
        """The first step is planned with the rest of the chain as its option."""
        _, _, merged = self.merged((), {}, options)
        self["options"] = {}
        link, link_error = merged.pop("link", None), merged.pop("link_error", None)
        after = merged.pop("chain", None) or []
        tail = {name: merged.pop(name) for name in TAIL_OPTIONS if name in merged}
        given = () if self.immutable else tuple(args or ())
        self.tasks = steps = unrolled(self.tasks)
        for callback in as_list(link):
            steps[-1].link(callback)
        for errback in as_list(link_error):
            for step in steps:
                step.link_error(own(errback))
        result = self.freeze(
            tail.get("task_id"), tail.get("group_id"), tail.get("chord"),
            group_index=tail.get("group_index"),
        )  # fmt: skip
        rest = [*after, *reversed(steps[1:])]
        if any(needs_chord(step) for step in steps):
            require_chords(plan.app)
        if rest:
            merged["chain"] = rest
        planned = steps[0].plan(plan, (*given, *self.args), kwargs, merged)
        return Planned(result if len(steps) > 1 else planned.result, planned.first)

    def freeze(
        self,
        _id: str | None = None,
        group_id: str | None = None,
        chord: Any = None,
        root_id: str | None = None,
        parent_id: str | None = None,
        group_index: int | None = None,
    ) -> Any:
        """Fix the ids of all steps; gives the last one's result, whose parents are the others."""
        self.tasks = steps = unrolled(self.tasks)
        last = len(steps) - 1
        before: Any = None
        for place, step in enumerate(steps):
            if place == last:
                result = step.freeze(_id, group_id, chord, root_id=root_id, group_index=group_index)
            else:
                result = step.freeze(root_id=root_id)
            _oldest(result).parent = before
            before = result
        if parent_id is not None:
            steps[0].options["parent_id"] = parent_id
        self.options["task_id"] = before.id
        return before

    def set_immutable(self, immutable: bool) -> None:
        """Whether arguments given to the chain are ignored by its first step."""
        self["immutable"] = immutable

    def unchain_tasks(self) -> list[Signature]:
        """Copies of the steps, with what the chain as a whole was given put where it belongs."""
        steps = [step.clone() for step in self.tasks]
        if not steps:
            return steps
        for name, value in self.options.items():
            if name == "link":
                for callback in as_list(value):
                    steps[-1].link(callback)
            elif name == "link_error":
                for errback in as_list(value):
                    for step in steps:
                        step.link_error(own(errback))
            else:
                steps[-1 if name in TAIL_OPTIONS else 0].options.setdefault(name, value)
        if self.args:
            steps[0]["args"] = (*self.args, *steps[0].args)
        return steps

    def known_app(self) -> Umbel | None:
        """The application of the chain or of its first step."""
        return self._app or (self.tasks[0].known_app() if self.tasks else None)

    def __len__(self) -> int:
        return len(self.tasks)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.tasks)) or "chain()"


def unrolled(tasks: Iterable[Signature]) -> list[Signature]:
    """The steps made uniform; raises for a chain without any."""
    from umbel.app.canvas.chord import chord

    flat = _flat(tasks)
    if not flat:
        raise ValueError("an empty chain has nothing to send: give it at least one signature")
    steps: list[Signature] = []
    for step in reversed(flat):
        if isinstance(step, group) and steps:
            body = steps.pop()
            steps.append(chord(step, body=body, app=step.known_app() or body.known_app()))
        else:
            steps.append(step)
    steps.reverse()
    return steps


def needs_chord(sig: Any) -> bool:
    """Whether applying `sig` will, at some point, need a chord."""
    kind, kwargs = sig.get("subtask_type"), sig.get("kwargs") or {}
    if kind == "chord":
        return True
    return kind in ("chain", "group") and any(map(needs_chord, kwargs.get("tasks") or ()))


def _flat(tasks: Iterable[Signature]) -> list[Signature]:
    flat: list[Signature] = []
    empty: list[Signature] = []
    for task in tasks:
        if isinstance(task, chain):
            flat.extend(_flat(task.unchain_tasks()))
        elif isinstance(task, group) and len(task.tasks) == 1:
            flat.extend(_flat([task.tasks[0]]))
        elif isinstance(task, group) and not task.tasks:
            empty.append(task)
        else:
            flat.append(task)
    # A chain of nothing but empty groups still has a result: the empty one.
    return flat or empty[:1]


def _oldest(result: Any) -> Any:
    while result.parent is not None:
        result = result.parent
    return result


def _only(steps: list[Signature], place: int, tail: dict[str, Any]) -> dict[str, Any]:
    return tail if place == len(steps) - 1 else {}
