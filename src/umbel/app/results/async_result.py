"""`AsyncResult`: a handle on what one task returns, now or later.

A handle asks its backend until the task has ended and remembers the answer from then on.
A failed task's exception is raised with the worker's traceback as its cause. Waiting inside a
task can block the very worker that should run what is waited for, so it is refused unless
the caller allows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from umbel.app.context import current_request
from umbel.app.current import current_app
from umbel.app.results.arrivals import arrivals, arrivals_async
from umbel.app.results.tuples import as_tuple, result_from_tuple
from umbel.wire.results import READY_STATES

if TYPE_CHECKING:
    from umbel.app.results.backend import Backend
    from umbel.app.results.group_result import GroupResult
    from umbel.app.umbel import Umbel

FAILED_STATES = frozenset({"FAILURE", "REVOKED"})
_joins_allowed: ContextVar[bool] = ContextVar("umbel_joins_allowed", default=False)


class RemoteTraceback(Exception):
    """The traceback of the worker, shown as the cause of a failed task's exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@contextmanager
def allow_join_result() -> Iterator[None]:
    """Allow waiting for results inside a task, for the duration of the block."""
    token = _joins_allowed.set(True)
    try:
        yield
    finally:
        _joins_allowed.reset(token)


def refuse_wait_in_task(what: str) -> None:
    """Raise when this is inside a task that a worker runs and waiting is not allowed."""
    request = current_request()
    if request is None or request.id is None or request.is_eager or _joins_allowed.get():
        return
    raise RuntimeError(
        f"waiting for {what} inside task {request.task}[{request.id}] can block the worker that "
        "should run it: use a chain or a callback, or allow it with "
        "get(disable_sync_subtasks=False)"
    )


class AsyncResult:
    """A handle on the result of one task."""

    def __init__(
        self,
        id: str,  # noqa: A002 - the name that callers use
        backend: Backend | None = None,
        app: Umbel | None = None,
        parent: AsyncResult | GroupResult | None = None,
    ) -> None:
        if id is None:
            raise ValueError("a result needs the id of its task, got None")
        self.id = id
        self._app = app
        self._backend = backend
        self.parent = parent
        self.ignored = False  # nothing is kept, so nobody waits for it
        self._meta: dict[str, Any] | None = None

    @property
    def app(self) -> Umbel:
        """The application."""
        return self._app if self._app is not None else current_app()

    @property
    def backend(self) -> Backend:
        """Where the result is kept."""
        return self._backend if self._backend is not None else self.app.backend

    @property
    def task_id(self) -> str:
        """The id of the task."""
        return self.id

    # -- waiting -----------------------------------------------------------------------

    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        interval: float | None = None,
        no_ack: bool = True,
        follow_parents: bool = True,
        callback: Callable[[str, Any], Any] | None = None,
        on_message: Callable[[dict[str, Any]], Any] | None = None,
        disable_sync_subtasks: bool = True,
    ) -> Any:
        """Wait for the end of the task and give its value, or raise its exception.

        `on_message` is called with every state that is reported meanwhile. `interval` and
        `no_ack` are taken for compatibility: nothing is polled. Raises `TimeoutError` when
        `timeout` seconds have passed; the task itself goes on.
        """
        if self.ignored:
            return None
        if disable_sync_subtasks:
            refuse_wait_in_task(f"task {self.id}")
        meta = self._final() or self._wait(timeout, propagate and follow_parents, on_message)
        if propagate:
            raise_failure(meta)
        if callback is not None:
            callback(self.id, meta["result"])
        return meta["result"]

    wait = get

    def _wait(
        self, timeout: float | None, follow_parents: bool, on_message: Callable[[Any], Any] | None
    ) -> dict[str, Any]:
        # A chain breaks where a step fails or is revoked; its last step may then never report.
        steps = {step.id: step for step in self._parents()} if follow_parents else {}
        ids = {self.id, *steps}
        with closing(arrivals(self.backend, ids, timeout, every=on_message is not None)) as metas:
            for meta in metas:
                step = steps.get(meta["task_id"], self)
                if on_message is not None and step is self:
                    on_message(meta)
                if meta["status"] not in READY_STATES:
                    continue
                step._meta = meta
                if step is self or meta["status"] in FAILED_STATES:
                    return meta
        raise AssertionError("arrivals end with the last id or with TimeoutError")

    def _parents(self) -> Iterator[AsyncResult]:
        node = self.parent
        while isinstance(node, AsyncResult):
            if node._meta is None:
                yield node
            node = node.parent

    def __await__(self) -> Generator[Any, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        if self.ignored:
            return None
        if self._meta is None:
            metas = arrivals_async(self.backend, (self.id,))
            try:
                async for meta in metas:
                    self._meta = meta
            finally:
                await metas.aclose()
        assert self._meta is not None
        raise_failure(self._meta)
        return self._meta["result"]

    def then(
        self,
        callback: Callable[[AsyncResult], Any],
        on_error: Callable[[AsyncResult], Any] | None = None,
        weak: bool = False,
    ) -> AsyncResult:
        """Call `callback(self)` when the task has ended, on the backend's thread.

        With `on_error`, that is called instead for a task that did not succeed.
        """

        def tell(meta: dict[str, Any]) -> None:
            self._meta = meta
            failed = meta["status"] != "SUCCESS"
            (on_error if failed and on_error is not None else callback)(self)

        self.backend.watch((self.id,), tell)
        return self

    # -- looking -----------------------------------------------------------------------

    def _final(self) -> dict[str, Any] | None:
        if self._meta is not None:
            return self._meta
        meta = self.backend.get_meta(self.id)
        if meta["status"] in READY_STATES:
            self._meta = meta
            return meta
        return None

    def _look(self) -> dict[str, Any]:
        if self._meta is not None:
            return self._meta
        meta = self.backend.get_meta(self.id)
        if meta["status"] in READY_STATES:
            self._meta = meta
        return meta

    @property
    def state(self) -> str:
        """PENDING (or unknown), STARTED, RETRY, FAILURE, REVOKED, SUCCESS, or the task's own."""
        return str(self._look()["status"])

    status = state

    @property
    def result(self) -> Any:
        """The value, the exception, or what the task reported with its own state."""
        return self._look()["result"]

    info = result

    @property
    def traceback(self) -> str | None:
        """The worker's traceback of a failed or retried task."""
        text: str | None = self._look().get("traceback")
        return text

    def _field(name: str, doc: str) -> Any:  # type: ignore[misc]  # noqa: N805
        return property(lambda self: self._look().get(name), doc=doc)

    name = _field("name", "The task's name (with `result_extended`).")
    args = _field("args", "The arguments (with `result_extended`).")
    kwargs = _field("kwargs", "The keyword arguments (with `result_extended`).")
    worker = _field("worker", "The worker that ran it (with `result_extended`).")
    retries = _field("retries", "How often it was retried (with `result_extended`).")
    queue = _field("queue", "The queue it came from (with `result_extended`).")
    date_done = _field("date_done", "When it ended.")
    del _field

    @property
    def children(self) -> list[AsyncResult | GroupResult] | None:
        """What the task sent itself, once it has ended."""
        found = self._look().get("children")
        return None if found is None else [result_from_tuple(c, self.app) for c in found]

    def ready(self) -> bool:
        """Whether the task has ended."""
        return self.state in READY_STATES

    def successful(self) -> bool:
        """Whether the task has ended well."""
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        """Whether the task has failed."""
        return self.state == "FAILURE"

    def maybe_throw(self, propagate: bool = True, callback: Any = None) -> Any:
        """The value so far; raises if the task has failed."""
        meta = self._look()
        if propagate:
            raise_failure(meta)
        if callback is not None:
            callback(self.id, meta["result"])
        return meta["result"]

    maybe_reraise = maybe_throw

    def iterdeps(self, intermediate: bool = False) -> Iterator[tuple[Any, Any]]:
        """This task and all that came of it, with the handle each one came from."""
        stack: deque[tuple[Any, Any]] = deque([(None, self)])
        while stack:
            parent, node = stack.popleft()
            yield parent, node
            if intermediate or node.ready():
                stack.extend((node, child) for child in node.children or ())
            else:
                raise IncompleteStream(f"task {node.id} has not ended, its children are unknown")

    def collect(self, intermediate: bool = False, **options: Any) -> Iterator[tuple[Any, Any]]:
        """Wait for this task and all that came of it; gives pairs of handle and value."""
        stack: deque[Any] = deque([self])
        while stack:
            node = stack.popleft()
            yield node, node.get(**options)
            stack.extend(node.children or ())

    # -- acting ------------------------------------------------------------------------

    def forget(self) -> None:
        """Delete the result, and those of the tasks before it in its chain."""
        self._meta = None
        if self.parent is not None:
            self.parent.forget()
        self.backend.forget(self.id)

    def revoke(
        self,
        connection: Any = None,
        terminate: bool = False,
        signal: str | int | None = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Tell every worker not to run the task; with `terminate`, to end it if it runs."""
        return self.app.control.revoke(
            [self.id],
            terminate=terminate,
            signal=signal,
            connection=connection,
            reply=wait,
            timeout=1.0 if timeout is None else timeout,
        )

    # -- as a value --------------------------------------------------------------------

    def as_tuple(self) -> tuple[Any, Any]:
        """The form in which it is stored; ancestors beyond `PARENTS_MAX` are left out."""
        return as_tuple(self), None

    def as_list(self) -> list[str]:
        """The ids of this task and those before it."""
        ids, node = [self.id], self.parent
        while isinstance(node, AsyncResult):
            ids.append(node.id)
            node = node.parent
        return [*ids, *(node.as_list() if node is not None else [])]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, AsyncResult):
            return self.id == other.id
        return self.id == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __str__(self) -> str:
        return str(self.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.id}>"

    def __reduce__(self) -> Any:
        return type(self), (self.id, None, None, self.parent)


class IncompleteStream(Exception):
    """The tree of tasks is not complete yet."""


def raise_failure(meta: dict[str, Any]) -> None:
    """Raise the exception of a failed or revoked task."""
    if meta["status"] not in FAILED_STATES:
        return
    exc = meta["result"]
    if not isinstance(exc, BaseException):
        exc = RuntimeError(exc)
    text = meta.get("traceback")
    if text and exc.__cause__ is None and exc.__traceback__ is None:
        exc.__cause__ = RemoteTraceback(text)
    raise exc.with_traceback(None)
