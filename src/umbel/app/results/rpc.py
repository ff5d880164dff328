"""Results as messages: each client has a queue, workers send documents there.

The queue's name is what the client's tasks carry as `reply_to`. The client consumes it on one
thread, begun before its first task goes out, and keeps the latest document of each task. That
memory is bounded: past `UNCLAIMED_MAX` the oldest are dropped and counted. Results are seen
by the sending process only, cannot be read twice by different processes, and are lost with
the queue when the client's connection breaks while a worker reports; chords do not work.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from umbel.app.results.backend import Backend
from umbel.app.results.codec import pending
from umbel.app.results.replies import ReplyConsumer
from umbel.app.results.watching import OnMeta, Watch, Watchers
from umbel.wire.outgoing import Parcel
from umbel.wire.results import READY_STATES

if TYPE_CHECKING:
    from umbel.app.context import Context
    from umbel.app.publish import Link
    from umbel.app.umbel import Umbel

logger = logging.getLogger(__name__)

UNCLAIMED_MAX = 8192


class RpcBackend(Backend):
    """Sends and receives results through the broker."""

    keeps_results = False

    def __init__(self, app: Umbel, url: str) -> None:
        super().__init__(app, url)
        self.dropped_count = 0
        self._reset()

    def _reset(self) -> None:
        self._queue_name = str(uuid.uuid4())
        self._lock = threading.Lock()
        self._documents: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._watchers = Watchers()
        self._consumer: ReplyConsumer | None = None

    @property
    def reply_to(self) -> str | None:
        """The name of this process's queue."""
        return self._queue_name

    def before_send(self, task_ids: Sequence[str]) -> None:
        """Be consuming before a reply can come; raises `BackendError` if the broker is away."""
        self._begin().wait_ready()

    def _begin(self) -> ReplyConsumer:
        consumer = self._consumer
        if consumer is None:
            with self._lock:
                consumer = self._consumer
                if consumer is None:
                    consumer = self._consumer = ReplyConsumer(
                        self.app, self._queue_name, self._received, self.shown_url
                    )
        return consumer

    # -- the worker's side -------------------------------------------------------------

    def store(
        self,
        task_id: str,
        result: Any,
        state: str,
        *,
        traceback: str | None = None,
        request: Context | None = None,
    ) -> None:
        """Send the document to whoever sent the task; nowhere if that is unknown."""
        reply_to = getattr(request, "reply_to", None)
        if not reply_to:
            return
        encoded = self.codec.document(task_id, result, state, traceback, request)
        properties = {
            "correlation_id": getattr(request, "correlation_id", None) or task_id,
            "delivery_mode": 2 if self.app.conf.result_persistent else 1,
        }
        parcel = Parcel(
            encoded.body,
            {},
            properties,
            encoded.content_type,
            encoded.content_encoding,
            "",
            reply_to,
        )

        def publish(link: Link) -> None:
            link.outlet.hand_over(parcel)

        self.app.publisher.run(publish)

    # -- the client's side -------------------------------------------------------------

    def _received(self, task_id: str | None, body: Any, content_type: str, encoding: str) -> None:
        """A reply has come; on the consumer's thread. Raises `Refusal` for what is unreadable."""
        raw = body.encode("utf-8") if isinstance(body, str) else bytes(body)
        meta = self.codec.loads(raw, content_type, encoding)
        chosen = meta.get("task_id") if isinstance(meta, dict) else None
        chosen = chosen if isinstance(chosen, str) else task_id
        if chosen is None:
            logger.warning("a reply without a task id was dropped")
            return
        document = self.codec.opened(meta, chosen)
        with self._lock:
            known = self._documents.get(chosen)
            if known is not None and known["status"] in READY_STATES:
                return
            self._documents[chosen] = document
            self._documents.move_to_end(chosen)
            while len(self._documents) > UNCLAIMED_MAX:
                self._documents.popitem(last=False)
                self.dropped_count += 1
        self._watchers.deliver(document)

    def get_many(self, task_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What has been received so far."""
        with self._lock:
            return {
                task_id: self._documents.get(task_id) or pending(task_id) for task_id in task_ids
            }

    def forget(self, task_id: str) -> None:
        """Drop what was received."""
        with self._lock:
            self._documents.pop(task_id, None)

    def watch(self, task_ids: Iterable[str], on_meta: OnMeta, *, every: bool = False) -> Watch:
        """Watch; what has been received already is told before this returns."""
        ids = list(task_ids)
        watch = self._watchers.add(ids, on_meta, every)
        self._begin()
        for meta in self.get_many(ids).values():
            if meta["status"] != "PENDING":
                self._watchers.deliver(meta)
        return watch

    def close(self) -> None:
        """End the consumer; what was received is forgotten."""
        consumer = self._consumer
        if consumer is not None:
            consumer.close()
        self._reset()

    def after_fork(self) -> None:
        """A queue and a consumer of its own for the child."""
        self._reset()
