"""No results: storing does nothing, asking says what to set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from umbel.app.results.backend import Backend
from umbel.app.results.watching import OnMeta
from umbel.exceptions import BackendError


class DisabledBackend(Backend):
    """Keeps nothing."""

    keeps_results = False

    def store(self, task_id: str, result: Any, state: str, **_: Any) -> None:
        """Do nothing: nobody asked for results."""

    def get_many(self, task_ids: Iterable[str]) -> NoReturn:
        """Say that there is nothing to ask."""
        raise self._cannot("give results")

    def forget(self, task_id: str) -> None:
        """Do nothing: nothing is kept."""

    def watch(self, task_ids: Iterable[str], on_meta: OnMeta, *, every: bool = False) -> NoReturn:
        """Say that there is nothing to wait for."""
        raise self._cannot("give results")

    def _cannot(self, what: str) -> BackendError:
        return BackendError(
            f"no result backend is configured, so it cannot {what}: set result_backend, for "
            "example to redis://localhost/0 or rpc://"
        )
