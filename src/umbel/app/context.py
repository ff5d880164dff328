"""What a running task knows about its own call: `self.request`.

One `Context` belongs to one execution. It is found through a context variable, so that
threads, greenlets and coroutines each see their own, and tasks that call tasks inline nest.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.app.task import Task


class Context:
    """The fields of one call; the defaults describe a task called as a plain function."""

    id: str | None = None
    task: str | None = None
    args: Any = None
    kwargs: Any = None
    retries: int = 0
    eta: str | None = None
    expires: Any = None
    timelimit: Any = None  # (hard, soft): hard first, as on the wire
    group: str | None = None
    group_index: int | None = None
    chord: Any = None  # signature dict of the chord's body
    chain: Any = None  # signature dicts, reversed: the next one is last
    callbacks: Any = None
    errbacks: Any = None
    root_id: str | None = None
    parent_id: str | None = None
    reply_to: str | None = None
    correlation_id: str | None = None
    shadow: str | None = None
    origin: str | None = None
    lang: str | None = None
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    ignore_result: bool | None = None
    replaced_task_nesting: int = 0
    stamped_headers: Any = None
    stamps: Any = None
    delivery_info: Any = None  # {"exchange", "routing_key", "priority", "redelivered"}
    properties: Any = None
    headers: Any = None  # the caller's own headers
    content_type: str | None = None
    hostname: str | None = None  # node name of the worker
    is_eager: bool = False
    called_directly: bool = True

    _children: list[Any] | None = None
    _told: bool = True  # somebody wants the result as text

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields

    @property
    def children(self) -> list[Any]:
        """Results of the tasks that this one sent, in order."""
        if self._children is None:
            self._children = []
        return self._children

    def __getattr__(self, name: str) -> Any:
        # Only for names that are no field: the caller's own headers are read like fields too.
        headers = self.headers
        if headers and name in headers:
            return headers[name]
        raise AttributeError(f"a task's request has no field and no header {name!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """The field or the caller's own header `name`, or `default`."""
        return getattr(self, name, default)

    def __repr__(self) -> str:
        return f"<Context: {self.__dict__!r}>"


class Frame:
    """One running task on the stack of this thread, greenlet or coroutine."""

    __slots__ = ("outer", "request", "task")

    def __init__(self, task: Task, request: Context, outer: Frame | None) -> None:
        self.task = task
        self.request = request
        self.outer = outer


current_frame: ContextVar[Frame | None] = ContextVar("umbel_current_frame", default=None)


def current_request() -> Context | None:
    """The request of the innermost running task, if one runs here.

    A task that a task calls as a plain function is a part of that task.
    """
    frame = current_frame.get()
    found = frame.request if frame is not None else None
    while frame is not None and frame.request.called_directly:
        frame = frame.outer
    return frame.request if frame is not None else found


def current_task() -> Task | None:
    """The innermost running task, if one runs here."""
    frame = current_frame.get()
    return frame.task if frame is not None else None
