"""Results on Redis, byte for byte as Celery keeps them.

Key and channel of a task are the same name, `celery-task-meta-<id>`. Storing is one script
call: look, write, publish. The end of a chord's part is one script call too; see `scripts`.

A chord's body is sent by whoever gets the claim. If that process dies before it has sent the
body, its claim expires; the part that it was executing is delivered again (when it is
acknowledged late), finds the chord complete but claimed, waits for the claim to end, and takes
it over. Between sending and marking the chord as done there is a moment in which a death
makes the body go out twice, under the same id.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from redis import exceptions as errors

from umbel.app.results import chords, scripts
from umbel.app.results.backend import Backend
from umbel.app.results.patience import pauses_s
from umbel.app.results.push import Reader
from umbel.app.results.redis_client import make_client
from umbel.app.results.watching import OnMeta, Watch
from umbel.cluster.backoff import Backoff
from umbel.exceptions import BackendError, ChordError
from umbel.wire.limits import Refusal

if TYPE_CHECKING:
    from umbel.app.context import Context
    from umbel.app.umbel import Umbel

logger = logging.getLogger(__name__)
T = TypeVar("T")

TASK_KEY, GROUP_KEY = "celery-task-meta-", "celery-taskset-meta-"
BROKEN = (errors.ConnectionError, errors.TimeoutError, errors.ReadOnlyError)
# One MGET of this many documents is read at a time, to bound memory.
MGET_CHUNK = 256
DONE_MARK_S = 300
PUBLISH_CLAIM_S = 30
# How long a part that finds the chord claimed by somebody else waits for that claim to end.
HELD_WAIT_MAX_S = 120.0
HELD_LOOKS = Backoff(0.02, 0.5)


class RedisBackend(Backend):
    """Keeps results on a Redis server."""

    supports_chords = True

    def __init__(self, app: Umbel, url: str) -> None:
        super().__init__(app, url)
        options = app.conf.result_backend_transport_options
        prefix = str(options.get("global_keyprefix") or "")
        if prefix and prefix[-1] not in ":_-.":
            prefix += "_"
        self._task_prefix = prefix + TASK_KEY
        self._group_prefix = prefix + GROUP_KEY
        self._ordered = bool(options.get("result_chord_ordered", True))
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._client: redis.Redis | None = None
        self._scripts: dict[str, Any] = {}
        self._reader = Reader(
            connect=lambda: self.client.connection_pool,
            fetch=self._fetch,
            read=self._read_channel,
            channel=self._task_key,
            broken=(*BROKEN, OSError),
        )

    @property
    def client(self) -> redis.Redis:
        """The client, made on first use; shared by all threads."""
        if self._client is None:
            with self._lock:
                if self._client is None:
                    client = make_client(self.app, self.url)
                    for source in (scripts.STORE, scripts.PART, scripts.RENEW, scripts.FINISH):
                        self._scripts[source] = client.register_script(source)
                    self._client = client
        return self._client

    def _task_key(self, task_id: str) -> str:
        return self._task_prefix + task_id

    def _group_key(self, group_id: str, part: str = "") -> str:
        return f"{self._group_prefix}{group_id}{part}"

    # -- documents ---------------------------------------------------------------------

    def store(
        self,
        task_id: str,
        result: Any,
        state: str,
        *,
        traceback: str | None = None,
        request: Context | None = None,
    ) -> None:
        """Store and publish in one round trip."""
        codec = self.codec
        payload = codec.stored(task_id, result, state, traceback, request)
        key, ttl = self._task_key(task_id), self._ttl_s(state)
        found = self._script(scripts.STORE, [key], [payload, ttl, 0])
        if not isinstance(found, int) and codec.read(found, task_id)["status"] != "SUCCESS":
            self._script(scripts.STORE, [key], [payload, ttl, 1])

    def get_many(self, task_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The documents, in as few round trips as memory allows."""
        ids = list(task_ids)
        found: dict[str, dict[str, Any]] = {}
        for start in range(0, len(ids), MGET_CHUNK):
            chunk = ids[start : start + MGET_CHUNK]
            keys = [self._task_key(task_id) for task_id in chunk]
            values = self._ensure(partial(self._mget, keys))
            for task_id, raw in zip(chunk, values, strict=True):
                found[task_id] = self.codec.read(raw, task_id)
        return found

    def forget(self, task_id: str) -> None:
        """Delete the document."""
        self._ensure(lambda: self.client.delete(self._task_key(task_id)))

    def watch(self, task_ids: Iterable[str], on_meta: OnMeta, *, every: bool = False) -> Watch:
        """Watch by subscription; the documents are read once that is confirmed."""
        return self._reader.watch(task_ids, on_meta, every)

    def _read_channel(self, task_id: str, raw: bytes) -> dict[str, Any]:
        return self.codec.read(raw, task_id)

    def _fetch(self, task_ids: list[str]) -> Iterable[dict[str, Any]]:
        # On the reader's thread, which has its own way with broken connections: no retries.
        for start in range(0, len(task_ids), MGET_CHUNK):
            chunk = task_ids[start : start + MGET_CHUNK]
            values = self._mget([self._task_key(task_id) for task_id in chunk])
            for task_id, raw in zip(chunk, values, strict=True):
                if raw is not None:
                    yield self.codec.read(raw, task_id)

    def _mget(self, keys: list[str]) -> list[bytes | None]:
        values: Any = self.client.mget(keys)
        return list(values)

    def _ttl_s(self, state: str | None = None) -> int:
        conf = self.app.conf
        ttl = conf.result_expires
        if state == "FAILURE":
            failed = conf.result_failure_expires
            ttl = failed if failed is not None else ttl
        seconds = getattr(ttl, "total_seconds", None)
        return int(seconds() if seconds is not None else ttl or 0)

    # -- groups ------------------------------------------------------------------------

    def save_group(self, group_id: str, result: Any) -> None:
        """Keep the group as long as results are kept."""
        payload, ttl = self.codec.dumps({"result": result}), self._ttl_s() or None
        self._ensure(lambda: self.client.set(self._group_key(group_id), payload, ex=ttl))

    def restore_group(self, group_id: str) -> Any:
        """The saved result tuple, or None."""
        raw = self._ensure(lambda: self.client.get(self._group_key(group_id)))
        return self._structure(raw)

    def delete_group(self, group_id: str) -> None:
        """Delete the saved group."""
        self._ensure(lambda: self.client.delete(self._group_key(group_id)))

    def _structure(self, raw: Any) -> Any:
        if raw is None:
            return None
        try:
            saved = self.codec.loads(raw)
        except Refusal as refusal:
            raise BackendError(f"a saved group cannot be read: {refusal.text}") from None
        return saved.get("result") if isinstance(saved, dict) else None

    # -- chords ------------------------------------------------------------------------

    def start_chord(self, group_id: str, size: int) -> None:
        """Set the number of parts; a chord that is applied again begins anew."""
        ttl = self._ttl_s() or None

        def announce() -> None:
            with self.client.pipeline(transaction=True) as pipe:
                pipe.delete(self._group_key(group_id, ".c"))
                pipe.set(self._group_key(group_id, ".s"), size, ex=ttl)
                pipe.execute()

        self._ensure(announce)

    def add_to_chord(self, group_id: str, count: int = 1) -> None:
        """Raise the number of parts; not tried again, as it must not count twice."""
        try:
            self.client.incrby(self._group_key(group_id, ".t"), count)
        except errors.RedisError as exc:
            raise self._lost(exc) from exc

    def chord_part(self, request: Context, state: str, result: Any) -> None:
        """Record the part; whoever completes the chord sends its body."""
        if not request.group or not request.id:
            return
        index = request.group_index
        place = "+inf" if index is None else str(index)
        token = uuid.uuid4().hex
        claim_s = max(5, int((self.app.conf.result_chord_join_timeout or 5.0) * 2))
        keys = [self._group_key(request.group, part) for part in (".j", ".t", ".s", ".d", ".c", "")]
        arguments = [
            f"{request.id}:{place}", self.codec.part(request.id, state, result), place,
            int(self._ordered), self._ttl_s(), claim_s, token,
        ]  # fmt: skip
        deadline, looks = time.monotonic() + HELD_WAIT_MAX_S, 0
        while True:
            verdict, *found = self._script(scripts.PART, keys, arguments)
            if verdict != b"held":
                break
            # Complete, yet claimed by another: this is a part that runs again. Its first
            # executor may have died with the claim, so the claim is waited out.
            if time.monotonic() > deadline:
                logger.error(
                    "chord %s stays claimed by somebody who does not end it", request.group
                )
                return
            looks += 1
            time.sleep(min(max(found[2], 10) / 1000, HELD_LOOKS.pause_s(looks)))
        if verdict == b"claimed":
            self._finish_chord(request, token, found[0], found[1])

    def _finish_chord(
        self, request: Context, token: str, parts: list[bytes], structure: bytes | None
    ) -> None:
        group_id = str(request.group)
        try:
            values = chords.joined(self, parts, self._structure(structure))
        except ChordError as exc:
            chords.fail_body(self, request, exc)
        except BackendError as exc:
            chords.fail_body(self, request, ChordError(f"Join error: {exc!r}"))
        else:
            claim = [self._group_key(group_id, ".c"), self._group_key(group_id, ".s")]
            if not self._script(scripts.RENEW, claim, [token, PUBLISH_CLAIM_S]):
                logger.warning("chord %s was taken over by another worker", group_id)
                return
            chords.send_body(self, request, values)
        keys = [self._group_key(group_id, part) for part in (".c", ".j", ".t", ".s", ".d")]
        self._script(scripts.FINISH, keys, [token, DONE_MARK_S])

    # -- the way there -----------------------------------------------------------------

    def _script(self, source: str, keys: list[str], arguments: list[Any]) -> Any:
        client = self.client
        script = self._scripts[source]
        return self._ensure(lambda: script(keys=keys, args=arguments, client=client))

    def _ensure(self, work: Callable[[], T]) -> T:
        """Do `work`; try again after a broken connection as long as the settings allow."""
        pauses = None
        while True:
            try:
                return work()
            except BROKEN as exc:
                if isinstance(exc, errors.AuthenticationError):
                    raise self._lost(exc) from exc
                pauses = pauses_s(self.app) if pauses is None else pauses
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise self._lost(exc) from exc
                logger.warning("result backend %s: %s; trying again", self.shown_url, exc)
                time.sleep(pause_s)
            except errors.RedisError as exc:
                raise self._lost(exc) from exc

    def _lost(self, exc: BaseException) -> BackendError:
        return BackendError(f"the result backend {self.shown_url!r} did not do its work: {exc}")

    def close(self) -> None:
        """End the reader and close all connections."""
        self._reader.close()
        client, self._client = self._client, None
        if client is not None:
            client.connection_pool.disconnect()
        self._reset()

    def after_fork(self) -> None:
        """Begin anew; the parent's sockets are left alone."""
        self._reader.abandon()
        self._reset()
