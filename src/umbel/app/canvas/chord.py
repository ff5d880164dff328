"""A chord: a group (the header) and a call (the body) given the list of the group's results.

Every part of the header carries the group's id, its place and the body. The backend counts the
parts; whoever finishes the last one sends the body. The number of parts is announced *before*
the first one goes out. What the chord as a whole is given (id, links, the rest of a chain, an
outer chord) belongs to the body; `countdown` and `eta` delay the header. With an empty header
the body runs at once with `[]`. If a part fails the body fails with `ChordError`.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from umbel.app.canvas.chain import chain, unrolled
from umbel.app.canvas.group import flattened, group
from umbel.app.canvas.plan import ChordStart, Plan, Planned, apply_planned, require_chords
from umbel.app.canvas.signature import Signature, adopted, as_list, maybe_signature, own, signature

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

# What belongs to the body alone, and what to the header alone; the rest goes to both.
BODY_OPTIONS = (
    "task_id", "link", "link_error", "chain", "chord", "group_id", "group_index", "shadow",
)  # fmt: skip
HEADER_OPTIONS = ("countdown", "eta", "parent_id", "add_to_parent")


class chord(Signature):  # noqa: N801 - the name on the wire and in callers' code
    """A group and the call that is given its results."""

    def __init__(
        self, header: Any, body: Any = None, *, app: Umbel | None = None, **options: Any
    ) -> None:
        super().__init__("celery.chord", (), {}, options, subtask_type="chord", app=app)
        self["kwargs"] = {
            "kwargs": {},
            "header": _as_group(header, app),
            "body": maybe_signature(body, app=app),
        }

    @classmethod
    def from_wire(cls, data: dict[str, Any], app: Umbel | None) -> chord:
        """Read a chord, its header (a list or a group) and its body."""
        kwargs = data.get("kwargs") or {}
        header, body = kwargs.get("header") or [], kwargs.get("body")
        if isinstance(header, dict):
            header = adopted(header, app)
        else:
            header = [adopted(part, app) for part in header]
        made = cls(header, None if body is None else adopted(body, app), app=app)
        made.kwargs["kwargs"] = dict(kwargs.get("kwargs") or {})
        made["args"] = tuple(data.get("args") or ())
        made["options"] = data.get("options") or {}
        made["immutable"] = bool(data.get("immutable"))
        return made

    @property
    def header(self) -> group:
        """The group whose results are waited for."""
        value: group = self.kwargs["header"]
        return value

    @property
    def tasks(self) -> list[Signature]:
        """The parts of the header."""
        return self.header.tasks

    @property
    def body(self) -> Any:
        """The call that is given the results; None until it is set."""
        return self.kwargs["body"]

    @body.setter
    def body(self, body: Any) -> None:
        self.kwargs["body"] = body

    def __call__(self, body: Any = None, **options: Any) -> Any:
        """Send the chord, with `body` if given; gives the body's result."""
        return self.apply_async((), {"body": body} if body is not None else {}, **options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Announce the parts, send them in one batch; gives the body's result."""
        made, kwargs = self._with_body(kwargs)
        if made.app.conf.task_always_eager:
            return made.apply(args, kwargs, **options)
        return apply_planned(made, args, kwargs, options)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run the parts inline, then the body with their results."""
        from umbel.app.results import EagerResult
        from umbel.exceptions import ChordError

        made, kwargs = self._with_body(kwargs)
        given = {name: options[name] for name in BODY_OPTIONS if name in options}
        body = made.body.clone()
        for name in ("link", "link_error"):
            for linked in as_list(given.pop(name, None)) + as_list(self.options.get(name)):
                getattr(body, name)(linked)
        parts = made.header.apply((*(args or ()), *self.args), {**self.kwargs["kwargs"], **kwargs})
        for part in parts.results:
            if not part.successful():
                error = ChordError(f"Dependency {part.id} raised {part.result!r}")
                result = EagerResult(
                    given.get("task_id") or body.id or str(uuid.uuid4()), error, "FAILURE"
                )
                break
        else:
            result = body.apply((parts.get(),), **given)
        result.parent = parts
        return result

    def plan(self, plan: Plan, args: Any, kwargs: Any, options: dict[str, Any]) -> Planned:
        """The parts are planned with the body in their options."""
        require_chords(plan.app)
        _, _, merged = self.merged((), {}, options)
        header = self.header
        # Once frozen the chord's own id is that of its header; the body has its own.
        if merged.get("task_id") == header.options.get("task_id"):
            merged.pop("task_id", None)
        for_body = {name: value for name, value in merged.items() if name not in HEADER_OPTIONS}
        for_header = {name: value for name, value in merged.items() if name not in BODY_OPTIONS}
        given = () if self.immutable else tuple(args or ())
        body, result = self._planned_body(for_body)
        members = flattened(header.tasks)
        group_id = header.options.get("task_id") or str(uuid.uuid4())
        if not members:
            return Planned(result, body.plan(plan, ([],), {}, {}).first)
        part_options = {**header.options, **for_header, "chord": body, "group_id": group_id}
        part_options.pop("task_id", None)
        start = len(plan.chords)
        parts = [
            member.plan(
                plan,
                (*given, *self.args, *header.args),
                {**self.kwargs["kwargs"], **kwargs},
                {**part_options, "group_index": index},
            ).result
            for index, member in enumerate(members)
        ]
        results = plan.app.GroupResult(group_id, parts)
        nested = any(hasattr(part, "results") for part in parts)
        size = sum(map(reports, members))
        plan.chords.insert(
            start, ChordStart(group_id, size, results.as_tuple() if nested else None)
        )
        _set_oldest_parent(result, results)
        return Planned(result, results)

    def _planned_body(self, options: dict[str, Any]) -> tuple[Signature, Any]:
        """The body as it travels (a chain as its first step with the rest) and its result."""
        body = self._need_body()
        link, link_error = options.pop("link", None), options.pop("link_error", None)
        for callback in as_list(link):
            body.link(callback)
        for errback in as_list(link_error):
            body.link_error(own(errback))
        task_id = options.pop("task_id", None)
        ends = {name: options.pop(name, None) for name in ("group_id", "chord", "group_index")}
        rest = options.pop("chain", None) or []
        result = body.freeze(task_id, **ends)
        if isinstance(body, chain):
            steps = unrolled(body.tasks)
            rest = [*rest, *reversed(steps[1:])]
            chain_args, body = body.args, steps[0]
            body["args"] = (*chain_args, *body.args)
        if rest:
            body.options["chain"] = [*rest, *(body.options.get("chain") or [])]
        for name, value in options.items():
            body.options[name] = value
        return body, result

    def freeze(
        self,
        _id: str | None = None,
        group_id: str | None = None,
        chord: Any = None,
        root_id: str | None = None,
        parent_id: str | None = None,
        group_index: int | None = None,
    ) -> Any:
        """Fix the ids of header and body; gives the body's result, the header's as its parent."""
        header = self.header
        if self.options.get("task_id") != header.options.get("task_id"):
            _id = self.options.get("task_id") or _id
        parts = header.freeze(root_id=root_id, parent_id=parent_id)
        self.options["task_id"] = parts.id
        result = self._need_body().freeze(
            _id, group_id=group_id, chord=chord, root_id=root_id, group_index=group_index
        )
        _set_oldest_parent(result, parts)
        return result

    def link(self, callback: Any) -> Any:
        """Link to the body."""
        self._need_body().link(callback)
        return callback

    def link_error(self, errback: Any) -> Any:
        """Link to the body; to the parts too with `task_allow_error_cb_on_chord_header`."""
        errback = signature(errback)
        if self.app.conf.task_allow_error_cb_on_chord_header:
            for part in self.tasks:
                linked = errback.clone()
                linked.set_immutable(True)
                part.link_error(linked)
        self._need_body().link_error(errback)
        return errback

    def set_immutable(self, immutable: bool) -> None:
        """Whether the parts ignore arguments given to the chord."""
        self.header.set_immutable(immutable)

    def known_app(self) -> Umbel | None:
        """The application of the chord, its header or its body."""
        found = self._app or self.header.known_app()
        return found or (self.body.known_app() if self.body is not None else None)

    def _with_body(self, kwargs: Any) -> tuple[chord, dict[str, Any]]:
        kwargs = dict(kwargs or {})
        body = kwargs.pop("body", None)
        if body is None:
            return self, kwargs
        made = self.clone()
        made.body = signature(body, app=self._app).clone()
        return made, kwargs

    def _need_body(self) -> Any:
        if self.body is None:
            raise ValueError(f"{self!r} has no body: give one, chord(header, body)")
        return self.body

    def __len__(self) -> int:
        return sum(map(reports, self.tasks))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"chord([{', '.join(map(repr, self.tasks))}], {self.body!r})"


def reports(sig: Signature) -> int:
    """How many parts will report to the chord whose header holds `sig`."""
    if isinstance(sig, group):
        return sum(map(reports, sig.tasks))
    if isinstance(sig, chain):
        return reports(sig.tasks[-1]) if sig.tasks else 0
    if isinstance(sig, chord):
        return reports(sig.body)
    return 1


def _as_group(header: Any, app: Umbel | None) -> group:
    if isinstance(header, dict):
        header = signature(header, app=app)
        if isinstance(header, group):
            return header
        header = header.tasks if isinstance(header, chain) else [header]
    return group([signature(part, app=app) for part in header], app=app)


def _set_oldest_parent(result: Any, parent: Any) -> None:
    while result.parent is not None:
        if result.parent.id == parent.id:
            return
        result = result.parent
    result.parent = parent


Signature.TYPES.update(chain=chain, group=group, chord=chord)
