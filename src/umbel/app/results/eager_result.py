"""`EagerResult`: the result of a task that was run inline. It needs no backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from umbel.app.results.async_result import AsyncResult, raise_failure


class EagerResult(AsyncResult):
    """The result of a task that was run inline."""

    def __init__(
        self,
        id: str,  # noqa: A002 - the name that callers use
        ret_value: Any,
        state: str,
        traceback: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(id)
        self._meta = {
            "task_id": id,
            "status": state,
            "result": ret_value,
            "traceback": traceback,
            "children": [],
            "name": name,
        }

    def get(self, timeout: float | None = None, propagate: bool = True, *_: Any, **__: Any) -> Any:
        """The value, or raise the exception."""
        assert self._meta is not None
        if propagate:
            raise_failure(self._meta)
        return self._meta["result"]

    wait = get

    def then(
        self,
        callback: Callable[[AsyncResult], Any],
        on_error: Callable[[AsyncResult], Any] | None = None,
        weak: bool = False,
    ) -> AsyncResult:
        """Call back at once."""
        failed = not self.successful()
        (on_error if failed and on_error is not None else callback)(self)
        return self

    def ready(self) -> bool:
        """It has always ended."""
        return True

    def forget(self) -> None:
        """Nothing is stored."""

    def revoke(self, *_: Any, **__: Any) -> None:
        """It has ended; this changes its state only."""
        assert self._meta is not None
        self._meta["status"] = "REVOKED"

    def __reduce__(self) -> Any:
        meta = self._meta or {}
        return EagerResult, (
            self.id, meta["result"], meta["status"], meta["traceback"], meta["name"],
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<EagerResult: {self.id}>"
