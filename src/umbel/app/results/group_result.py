"""`GroupResult`: a handle on the results of several tasks, in order.

Waiting watches all members at once. With `propagate` the first failure that arrives is raised
without waiting for the others. Members may be groups themselves; values then nest alike.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from umbel.app.current import current_app
from umbel.app.results.arrivals import arrivals, arrivals_async, late
from umbel.app.results.async_result import AsyncResult, raise_failure, refuse_wait_in_task
from umbel.app.results.tuples import as_tuple, result_from_tuple
from umbel.wire.results import READY_STATES

if TYPE_CHECKING:
    from umbel.app.results.backend import Backend
    from umbel.app.umbel import Umbel

Member = Any  # AsyncResult or GroupResult


class GroupResult:
    """A handle on the results of a group."""

    def __init__(
        self,
        id: str | None = None,  # noqa: A002 - the name that callers use
        results: Iterable[Member] | None = None,
        app: Umbel | None = None,
        parent: Member | None = None,
    ) -> None:
        self.id = id
        self.results: list[Member] = list(results or ())
        self._app = app
        self.parent = parent

    @property
    def app(self) -> Umbel:
        """The application."""
        return self._app if self._app is not None else current_app()

    @property
    def backend(self) -> Backend:
        """Where the results are kept."""
        return self.app.backend

    @property
    def children(self) -> list[Member]:
        """The members."""
        return self.results

    # -- waiting -----------------------------------------------------------------------

    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        interval: float | None = None,
        callback: Callable[[str, Any], Any] | None = None,
        no_ack: bool = True,
        on_message: Callable[[dict[str, Any]], Any] | None = None,
        disable_sync_subtasks: bool = True,
        on_interval: Any = None,
    ) -> list[Any]:
        """Wait for all members and give their values, in the members' order.

        `callback(task_id, value)` is called for each as it arrives. `interval`, `no_ack` and
        `on_interval` are taken for compatibility: nothing is polled.
        """
        if disable_sync_subtasks:
            refuse_wait_in_task(f"group {self.id}")
        for result in self._arriving(timeout, on_message):
            if propagate:
                raise_failure(result._meta or {"status": ""})
            if callback is not None:
                callback(result.id, result.result)
        return self._values()

    join = get
    join_native = get

    def _arriving(
        self, timeout: float | None, on_message: Callable[[dict[str, Any]], Any] | None = None
    ) -> Iterator[AsyncResult]:
        """The members at the bottom, each once, as they end."""
        started = time.monotonic()
        waiting: dict[str, list[AsyncResult]] = {}
        for leaf in self._leaves():
            if leaf._meta is not None:
                yield leaf
            else:
                waiting.setdefault(leaf.id, []).append(leaf)
        if not waiting:
            return
        left_s = None if timeout is None else timeout - (time.monotonic() - started)
        if left_s is not None and left_s <= 0:
            yield from self._there(waiting, timeout)
            return
        with closing(arrivals(self.backend, waiting, left_s)) as metas:
            for meta in metas:
                if on_message is not None:
                    on_message(meta)
                for leaf in waiting[meta["task_id"]]:
                    leaf._meta = meta
                    yield leaf

    def _there(
        self, waiting: dict[str, list[AsyncResult]], timeout: float | None
    ) -> Iterator[AsyncResult]:
        # A time-out of nothing still takes what is there already.
        missing = []
        for task_id, meta in self.backend.get_many(waiting).items():
            if meta["status"] not in READY_STATES:
                missing.append(task_id)
                continue
            for leaf in waiting[task_id]:
                leaf._meta = meta
                yield leaf
        if missing:
            raise late(missing, timeout)

    def iterate(
        self, timeout: float | None = None, propagate: bool = True, interval: float = 0
    ) -> Iterator[Any]:
        """The values as they arrive, in no particular order."""
        for result in self._arriving(timeout):
            if propagate:
                raise_failure(result._meta or {"status": ""})
            yield result.result

    def iter_native(
        self, timeout: float | None = None, **_: Any
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Pairs of id and document as they arrive."""
        for result in self._arriving(timeout):
            assert result._meta is not None
            yield result.id, result._meta

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._await().__await__()

    async def _await(self) -> list[Any]:
        async for result in self:
            raise_failure(result._meta or {"status": ""})
        return self._values()

    async def __aiter__(self) -> AsyncIterator[AsyncResult]:
        """The members as they end: `async for result in group_result: result.result`."""
        waiting: dict[str, list[AsyncResult]] = {}
        for leaf in self._leaves():
            if leaf._meta is not None:
                yield leaf
            else:
                waiting.setdefault(leaf.id, []).append(leaf)
        if not waiting:
            return
        metas = arrivals_async(self.backend, waiting)
        try:
            async for meta in metas:
                for leaf in waiting[meta["task_id"]]:
                    leaf._meta = meta
                    yield leaf
        finally:
            await metas.aclose()

    def then(
        self,
        callback: Callable[[GroupResult], Any],
        on_error: Callable[[GroupResult], Any] | None = None,
        weak: bool = False,
    ) -> GroupResult:
        """Call `callback(self)` when every member has ended, on the backend's thread."""
        by_id: dict[str, list[AsyncResult]] = {}
        for leaf in self._leaves():
            if leaf._meta is None:
                by_id.setdefault(leaf.id, []).append(leaf)

        def finish() -> None:
            well = all(leaf.successful() for leaf in self._leaves())
            (callback if well or on_error is None else on_error)(self)

        def tell(meta: dict[str, Any]) -> None:
            # Only the backend's thread comes here, so counting needs no lock.
            for leaf in by_id.pop(meta["task_id"], ()):
                leaf._meta = meta
            if not by_id:
                finish()

        if by_id:
            self.backend.watch(list(by_id), tell)
        else:
            finish()
        return self

    # -- looking -----------------------------------------------------------------------

    def _leaves(self) -> Iterator[AsyncResult]:
        for member in self.results:
            if isinstance(member, GroupResult):
                yield from member._leaves()
            else:
                yield member

    def _values(self) -> list[Any]:
        return [
            member._values() if isinstance(member, GroupResult) else member.result
            for member in self.results
        ]

    def _states(self) -> list[str]:
        """The states of all members, asked for in one go."""
        leaves = list(self._leaves())
        unknown = {leaf.id for leaf in leaves if leaf._meta is None}
        metas = self.backend.get_many(unknown) if unknown else {}
        states = []
        for leaf in leaves:
            meta = leaf._meta or metas[leaf.id]
            if meta["status"] in READY_STATES:
                leaf._meta = meta
            states.append(meta["status"])
        return states

    def ready(self) -> bool:
        """Whether every member has ended."""
        return all(state in READY_STATES for state in self._states())

    def successful(self) -> bool:
        """Whether every member has ended well."""
        return all(state == "SUCCESS" for state in self._states())

    def failed(self) -> bool:
        """Whether any member has failed."""
        return "FAILURE" in self._states()

    def waiting(self) -> bool:
        """Whether any member has not ended."""
        return not self.ready()

    def completed_count(self) -> int:
        """How many members have ended well."""
        return self._states().count("SUCCESS")

    def maybe_throw(self, *_: Any, **__: Any) -> None:
        """Raise the exception of the first member that has failed."""
        for leaf in self._leaves():
            leaf.maybe_throw()

    maybe_reraise = maybe_throw

    # -- acting ------------------------------------------------------------------------

    def save(self, backend: Backend | None = None) -> None:
        """Store the list of members, for `restore`."""
        assert self.id is not None, "a group that is saved has an id"
        (backend or self.backend).save_group(self.id, self.as_tuple())

    @classmethod
    def restore(
        cls,
        id: str,  # noqa: A002 - the name callers know
        backend: Backend | None = None,
        app: Umbel | None = None,
    ) -> GroupResult | None:
        """A group that was saved, or None."""
        chosen = app if app is not None else current_app()
        data = (backend or chosen.backend).restore_group(id)
        if data is None:
            return None
        found = result_from_tuple(data, chosen)
        return found if isinstance(found, cls) else None

    def delete(self, backend: Backend | None = None) -> None:
        """Delete the saved list of members."""
        assert self.id is not None, "a group that was saved has an id"
        (backend or self.backend).delete_group(self.id)

    def forget(self) -> None:
        """Delete the results of all members."""
        for member in self.results:
            member.forget()

    def revoke(
        self,
        connection: Any = None,
        terminate: bool = False,
        signal: str | int | None = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Tell every worker not to run the members."""
        ids = [leaf.id for leaf in self._leaves()]
        return self.app.control.revoke(
            ids,
            terminate=terminate,
            signal=signal,
            connection=connection,
            reply=wait,
            timeout=1.0 if timeout is None else timeout,
        )

    # -- as a value --------------------------------------------------------------------

    def add(self, result: Member) -> None:
        """Add a member unless it is there."""
        if result not in self.results:
            self.results.append(result)

    def as_tuple(self) -> tuple[Any, Any]:
        """The form in which it is stored."""
        return as_tuple(self), [member.as_tuple() for member in self.results]

    def as_list(self) -> list[str]:
        """The ids of the members and of what came before."""
        return [leaf.id for leaf in self._leaves()]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.results)

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GroupResult):
            return NotImplemented
        return (self.id, self.results) == (other.id, other.results)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<GroupResult: {self.id} [{', '.join(str(m.id) for m in self.results)}]>"

    def __reduce__(self) -> Any:
        return type(self), (self.id, self.results, None, self.parent)
