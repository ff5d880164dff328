"""What a result backend is, and how one is found from its address.

A backend keeps one document per task, tells watchers when a task ends, and, where it can,
counts the parts of chords. Methods raise `BackendError` when the store cannot be reached in
the time that the settings allow; `get_meta` of an unknown id is PENDING, never an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from umbel.app.results.codec import Codec
from umbel.app.results.watching import OnMeta, Watch
from umbel.broker.sessions.connections import masked
from umbel.exceptions import BackendError, ImproperlyConfigured

if TYPE_CHECKING:
    from umbel.app.context import Context
    from umbel.app.umbel import Umbel

# Address scheme -> where its class is. Looked up on first use, so that an application without
# Redis never imports its client.
_KINDS = {
    "redis": "umbel.app.results.redis:RedisBackend",
    "rediss": "umbel.app.results.redis:RedisBackend",
    "redis+socket": "umbel.app.results.redis:RedisBackend",
    "socket": "umbel.app.results.redis:RedisBackend",
    "unix": "umbel.app.results.redis:RedisBackend",
    "sentinel": "umbel.app.results.redis:RedisBackend",
    "embedded": "umbel.app.results.redis:RedisBackend",
    "rpc": "umbel.app.results.rpc:RpcBackend",
    "disabled": "umbel.app.results.disabled:DisabledBackend",
    "cache+memory": "umbel.app.results.memory:MemoryBackend",
}


class Backend(ABC):
    """Base of all backends."""

    supports_chords: ClassVar[bool] = False
    keeps_results: ClassVar[bool] = True  # where anybody can look them up

    def __init__(self, app: Umbel, url: str) -> None:
        self.app = app
        self.url = url

    @cached_property
    def codec(self) -> Codec:
        """How values are stored; follows the settings at first use."""
        return Codec(self.app)

    @property
    def shown_url(self) -> str:
        """The address without its password."""
        return masked(self.url)

    @property
    def reply_to(self) -> str | None:
        """What outgoing messages name as the place for replies; None: the application's id."""
        return None

    def before_send(self, task_ids: Sequence[str]) -> None:  # noqa: B027 - most need nothing
        """Called before messages with these ids go out."""

    # -- documents ---------------------------------------------------------------------

    @abstractmethod
    def store(
        self,
        task_id: str,
        result: Any,
        state: str,
        *,
        traceback: str | None = None,
        request: Context | None = None,
    ) -> None:
        """Store a state; a SUCCESS that is stored already is never overwritten."""

    @abstractmethod
    def get_many(self, task_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The documents of many tasks; PENDING for those that are unknown."""

    def get_meta(self, task_id: str) -> dict[str, Any]:
        """The document of one task: status, result, traceback, children, ..."""
        return self.get_many((task_id,))[task_id]

    @abstractmethod
    def forget(self, task_id: str) -> None:
        """Delete the document of a task."""

    @abstractmethod
    def watch(self, task_ids: Iterable[str], on_meta: OnMeta, *, every: bool = False) -> Watch:
        """Have `on_meta` called once for the end of each task, also if it has ended already.

        With `every`, states before the end are told as well. Called on any thread. Never
        blocks on the network, so that an event loop may call it.
        """

    # -- groups and chords -------------------------------------------------------------

    def save_group(self, group_id: str, result: Any) -> None:
        """Keep a group's result tuple for `restore_group`."""
        raise self._cannot("save groups")

    def restore_group(self, group_id: str) -> Any:
        """The result tuple of a saved group, or None."""
        raise self._cannot("restore groups")

    def delete_group(self, group_id: str) -> None:
        """Forget a saved group."""
        raise self._cannot("delete groups")

    def save_structure(self, group_id: str, result: Any) -> None:
        """Keep the shape of a chord's header that has groups inside."""
        self.save_group(group_id, result)

    def start_chord(self, group_id: str, size: int) -> None:
        """Announce how many parts of a chord will report."""
        raise self._cannot("count the parts of a chord")

    def add_to_chord(self, group_id: str, count: int = 1) -> None:
        """Announce that `count` more parts have joined a running chord."""
        raise self._cannot("count the parts of a chord")

    def chord_part(self, request: Context, state: str, result: Any) -> None:
        """A part has ended; if it was the last one, send the body, or fail it."""
        raise self._cannot("count the parts of a chord")

    # -- life --------------------------------------------------------------------------

    def cleanup(self) -> None:  # noqa: B027 - most need nothing
        """Delete what has expired, where the store does not do that itself."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """Close connections and end threads; the backend opens them again when used."""

    def after_fork(self) -> None:  # noqa: B027 - most need nothing
        """Drop what belongs to the parent process, without touching its connections."""

    def _cannot(self, what: str) -> BackendError:
        return BackendError(
            f"the result backend {self.shown_url!r} cannot {what}: use a Redis address such as "
            "redis://localhost/0"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shown_url}>"


def backend_for(app: Umbel, url: str | None) -> Backend:
    """The backend that an address names; nothing is opened yet."""
    address = url or "disabled://"
    scheme = address.partition("://")[0].lower()
    place = _KINDS.get(scheme)
    if place is None:
        raise ImproperlyConfigured(
            f"result_backend {masked(address)!r} names the unknown kind {scheme!r}: choose one of "
            + ", ".join(f"{kind}://" for kind in _KINDS)
        )
    module, _, name = place.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except ImportError as exc:
        raise ImproperlyConfigured(
            f"result_backend {masked(address)!r} needs a package that is not installed: {exc}"
        ) from None
    backend: Backend = kind(app, address)
    return backend
