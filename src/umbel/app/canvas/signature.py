"""One call as a value: `Signature`.

A signature is a dictionary with exactly the wire's keys: task, args, kwargs, options,
subtask_type, immutable. Arguments given when it is applied go *before* the stored ones; an
immutable signature ignores them. Applying never changes the signature; `freeze`, `set`, `link`
and `stamp` do, as their purpose is to prepare it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from umbel.app.canvas.plan import Plan, Planned
from umbel.app.current import current_app
from umbel.app.results import AsyncResult
from umbel.broker.ids import fresh_id
from umbel.exceptions import NotRegistered

if TYPE_CHECKING:
    from umbel.app.canvas.stamps import StampingVisitor
    from umbel.app.task import Task
    from umbel.app.umbel import Umbel


def _key(name: str) -> Any:
    def read(self: Signature) -> Any:
        return self[name]

    def write(self: Signature, value: Any) -> None:
        self[name] = value

    return property(read, write, doc=f"The wire key `{name}`.")


class Signature(dict[str, Any]):
    """A call that can be stored, sent, linked and combined before it is made."""

    TYPES: ClassVar[dict[str, type[Signature]]] = {}

    task = _key("task")
    args = _key("args")
    kwargs = _key("kwargs")
    options = _key("options")
    subtask_type = _key("subtask_type")
    immutable = _key("immutable")

    _app: Umbel | None
    _type: Task | None

    def __init__(
        self,
        task: Any = None,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        type: Task | None = None,  # noqa: A002 - the name that callers use
        subtask_type: str | None = None,
        immutable: bool = False,
        app: Umbel | None = None,
        **more_options: Any,
    ) -> None:
        self._app = app
        self._type = type
        if isinstance(task, dict):
            super().__init__(_complete(task))
            return
        if not isinstance(task, str) and task is not None:
            self._type = task
            task = task.name
        super().__init__(
            task=task,
            args=tuple(args or ()),
            kwargs=dict(kwargs or {}),
            options={**(options or {}), **more_options},
            subtask_type=subtask_type,
            immutable=immutable,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any], app: Umbel | None = None) -> Signature:
        """The signature that `data` (fresh from the wire, or one already) describes."""
        kind = cls.TYPES.get(data.get("subtask_type") or "")
        if kind is not None:
            return kind.from_wire(data, app)
        return Signature(data, app=app)

    @classmethod
    def from_wire(cls, data: dict[str, Any], app: Umbel | None) -> Signature:
        """Build this very class from wire data; composites read their parts here."""
        return cls(data, app=app)

    # -- making the call ---------------------------------------------------------------

    def __call__(self, *partial_args: Any, **partial_kwargs: Any) -> Any:
        """Run the task here and now, as a plain function call."""
        args, kwargs, _ = self.merged(partial_args, partial_kwargs, {})
        return self.type(*args, **kwargs)

    def delay(self, *partial_args: Any, **partial_kwargs: Any) -> Any:
        """`apply_async` with the arguments written as in a call."""
        return self.apply_async(partial_args, partial_kwargs)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send the call; `args` go before the stored ones, `options` win over the stored ones."""
        args, kwargs, options = self.merged(args, kwargs, options)
        task = self.registered()
        if task is not None:
            return task.apply_async(args, kwargs, **options)
        return self.app.send_task(self.task, args, kwargs, **options)

    def election(self) -> Any:
        """Have the workers elect one of them, which sends the call, once; the result to wait for.

        The id of the task is that of the election. Workers without gossip take no part. Raises
        `NotForElection` for what nobody could be elected for, before anything is sent; when every
        worker refuses, the result is a FAILURE with the reason.
        """
        from umbel.app import elections

        app = self.app
        task_id = self.options.get("task_id")
        task_id = str(uuid.uuid4()) if task_id is None else task_id
        action = self.clone()
        action.options.update(reply_to=app.reply_to)
        request = elections.request(app, task_id, elections.TASK, action)
        action.options["task_id"] = request["id"]
        app.backend.before_send((request["id"],))
        app.control.broadcast("election", request)
        return app.AsyncResult(request["id"])

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run the call inline and give an `EagerResult`."""
        args, kwargs, options = self.merged(args, kwargs, options)
        return self.type.apply(args, kwargs, **options)

    def plan(self, plan: Plan, args: Any, kwargs: Any, options: dict[str, Any]) -> Planned:
        """Add what must be sent for this call to `plan`.

        A composition changes itself and its parts, so give it a copy; a plain call does not.
        """
        args, kwargs, merged = self.merged(args, kwargs, options)
        task_id = merged.get("task_id")
        if not task_id:
            merged["task_id"] = task_id = fresh_id()
        if "reply_to" not in merged:
            merged["reply_to"] = plan.reply_to
        plan.calls.append((self["task"], args, kwargs, merged))
        result = AsyncResult(task_id, None, plan.app)
        return Planned(result, result)

    def merged(
        self, args: Any, kwargs: Any, options: Mapping[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Arguments and options of the call with those given now added."""
        mine = self["options"]
        if not (args or kwargs or options):
            return self["args"], self["kwargs"], dict(mine)
        stamped = mine.get("stamped_headers") or ()
        # None means "not given"; a stamp, once set, stays what it is.
        chosen = {
            **mine,
            **{
                name: value for name, value in options.items()
                if value is not None and not (name in stamped and name in mine)
            },
        }  # fmt: skip
        if stamped and options.get("stamped_headers"):
            chosen["stamped_headers"] = sorted({*stamped, *options["stamped_headers"]})
        if self.immutable:
            return self.args, self.kwargs, chosen
        return (
            (*args, *self.args) if args else self.args,
            {**self.kwargs, **kwargs} if kwargs else self.kwargs,
            chosen,
        )

    # -- preparing ---------------------------------------------------------------------

    def clone(self, args: Any = None, kwargs: Any = None, **options: Any) -> Self:
        """A copy that shares nothing that applying or preparing it changes."""
        args, kwargs, chosen = self.merged(args, kwargs, options)
        copy = type(self).from_wire(
            {
                "task": self.task,
                "args": tuple(args),
                "kwargs": dict(kwargs),
                "options": own(chosen),
                "subtask_type": self.subtask_type,
                "immutable": self.immutable,
            },
            self._app,
        )
        copy._type = self._type
        return copy  # type: ignore[return-value]

    partial = clone
    __deepcopy__ = lambda self, memo: self.clone()  # noqa: E731

    def replace(self, args: Any = None, kwargs: Any = None, options: Any = None) -> Self:
        """A copy in which the given sections are exchanged as a whole."""
        copy = self.clone()
        for name, value in (("args", args), ("kwargs", kwargs), ("options", options)):
            if value is not None:
                copy[name] = value
        return copy

    def set(self, immutable: bool | None = None, **options: Any) -> Self:
        """Set options in place; gives the signature itself."""
        if immutable is not None:
            self.set_immutable(immutable)
        self.options.update(options)
        return self

    def set_immutable(self, immutable: bool) -> None:
        """Whether arguments given later are ignored."""
        self["immutable"] = immutable

    def freeze(
        self,
        _id: str | None = None,
        group_id: str | None = None,
        chord: Any = None,
        root_id: str | None = None,
        parent_id: str | None = None,
        group_index: int | None = None,
    ) -> Any:
        """Fix the task id (an id that is there already is kept) and give the result to come."""
        options = self.options
        task_id = options.get("task_id") or _id or str(uuid.uuid4())
        options["task_id"] = task_id
        given = {
            "group_id": group_id, "chord": chord, "root_id": root_id, "parent_id": parent_id,
            "group_index": group_index,
        }  # fmt: skip
        options.update({name: value for name, value in given.items() if value is not None})
        options.setdefault("reply_to", self.app.reply_to)
        return self.result(task_id)

    def result(self, task_id: str) -> AsyncResult:
        """The result of a call of this task with that id."""
        return self.app.AsyncResult(task_id)

    # -- links -------------------------------------------------------------------------

    def link(self, callback: Any) -> Any:
        """Send `callback` with the return value when the task succeeds; gives the callback."""
        return add_to_list(self.options, "link", callback)

    def link_error(self, errback: Any) -> Any:
        """Call or send `errback` when the task fails; gives the errback."""
        return add_to_list(self.options, "link_error", errback)

    def on_error(self, errback: Any) -> Self:
        """`link_error` that gives the signature itself."""
        self.link_error(errback)
        return self

    def flatten_links(self) -> list[Signature]:
        """This signature and, recursively, everything linked to its success."""
        found: list[Signature] = [self]
        for link in as_list(self.options.get("link")):
            found.extend(signature(link, app=self._app).flatten_links())
        return found

    def stamp(
        self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **headers: Any
    ) -> Self:
        """Mark this call, its parts and its links with headers that monitors and revokes see."""
        from umbel.app.canvas.stamps import stamp

        stamp(self, visitor, append_stamps, headers)
        return self

    # -- operators ---------------------------------------------------------------------

    def __or__(self, other: Any) -> Any:
        from umbel.app.canvas.pipe import pipe

        return pipe(self, other)

    def __ror__(self, other: Any) -> Any:
        # Dictionaries merge with `|`; calls, as dictionaries or not, follow each other.
        return signature(other) | self if isinstance(other, dict) else NotImplemented

    def __ior__(self, other: Any) -> Any:
        return self.__or__(other)

    def __invert__(self) -> Any:
        return self.apply_async().get()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return signature, (dict(self),)

    def __json__(self) -> dict[str, Any]:
        return dict(self)

    def __repr__(self) -> str:
        parts = [repr(arg) for arg in self.args]
        parts += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.task}({', '.join(parts)})"

    # -- what it refers to -------------------------------------------------------------

    @property
    def app(self) -> Umbel:
        """The application: the one given, the task's, or the current one."""
        app = self.known_app()
        return app if app is not None else current_app()

    def known_app(self) -> Umbel | None:
        """The application, when the signature itself tells which."""
        if self._app is not None:
            return self._app
        return self._type.app if self._type is not None else None

    def registered(self) -> Task | None:
        """The task itself, if it is registered here."""
        if self._type is not None:
            return self._type
        try:
            return self.app.tasks[self.task]
        except NotRegistered:
            return None

    @property
    def type(self) -> Task:
        """The task itself; raises `NotRegistered` if it is not known here."""
        return self._type if self._type is not None else self.app.tasks[self.task]

    @property
    def name(self) -> str:
        """The task's name."""
        return str(self.task)

    @property
    def id(self) -> str | None:
        """The task id, once frozen."""
        value: str | None = self.options.get("task_id")
        return value


def signature(varies: Any, *args: Any, app: Umbel | None = None, **kwargs: Any) -> Signature:
    """A signature from a name, a task, a dictionary or a signature (given back as it is)."""
    if isinstance(varies, Signature):
        if app is not None and varies._app is None:
            varies._app = app
        return varies
    if isinstance(varies, dict):
        return Signature.from_dict(varies, app=app)
    return Signature(varies, *args, app=app, **kwargs)


def maybe_signature(data: Any, app: Umbel | None = None) -> Any:
    """`signature(data)`, or None for None."""
    return None if data is None else signature(data, app=app)


def own(value: Any) -> Any:
    """A copy of options in which signatures and containers are private."""
    if isinstance(value, Signature):
        return value.clone()
    if isinstance(value, dict):
        return {name: own(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [own(item) for item in value]
    return value


def adopted(data: Any, app: Umbel | None) -> Signature:
    """A private signature from a signature or a dictionary; the original stays as it is."""
    if isinstance(data, Signature):
        return data.clone()
    return Signature.from_dict({**data, "options": own(data.get("options") or {})}, app=app)


def as_list(value: Any) -> list[Any]:
    """One or many, or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def add_to_list(options: dict[str, Any], name: str, value: Any) -> Any:
    """Append `value` to a list option unless it is there; gives the value."""
    items = as_list(options.get(name))
    if value not in items:
        items.append(value)
    options[name] = items
    return value


def _complete(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": data.get("task"),
        "args": tuple(data.get("args") or ()),
        "kwargs": data.get("kwargs") or {},
        "options": data.get("options") or {},
        "subtask_type": data.get("subtask_type"),
        "immutable": bool(data.get("immutable", False)),
    }
