"""Events: what nodes tell of themselves and of tasks.

`app.events` makes the parts: a `Dispatcher` sends, a `Receiver` listens, a `State` folds what it
hears into the cluster as it is now. One dispatcher per process serves tasks that send events of
their own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from umbel.app.events.dispatcher import Dispatcher as EventDispatcher
from umbel.app.events.stamper import Event, Stamper
from umbel.app.events.stream import EventStream

if TYPE_CHECKING:
    from umbel.app.calls import Call
    from umbel.app.events.receiver import Receiver as EventReceiver
    from umbel.app.events.state import State as ClusterState
    from umbel.app.umbel import Umbel


class Events:
    """The events of one application."""

    def __init__(self, app: Umbel) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._shared: dict[str, EventDispatcher] = {}
        self._stamper: Stamper | None = None
        self._stream: EventStream | None = None
        self.synchronised = False  # this process is a worker: its clock is the cluster's
        self.sent_lost = 0  # task-sent events that did not go out

    def Dispatcher(self, hostname: str | None = None, **options: Any) -> EventDispatcher:  # noqa: N802
        """Something to send events with; `close` it."""
        return EventDispatcher(self._app, hostname, **options)

    def Receiver(self, connection: Any = None, **options: Any) -> EventReceiver:  # noqa: N802
        """Something to receive events with."""
        from umbel.app.events.receiver import Receiver

        return Receiver(self._app, connection=connection, **options)

    def State(self, **options: Any) -> ClusterState:  # noqa: N802
        """The state of the cluster, empty yet: give it events."""
        from umbel.app.events.state import State

        return State(**options)

    @property
    def stream(self) -> EventStream:
        """Where events are kept for recorders, on Redis."""
        if self._stream is None:
            conf = self._app.conf
            self._stream = EventStream(conf.event_stream, conf.event_stream_max)
        return self._stream

    def default_dispatcher(self, hostname: str | None = None) -> EventDispatcher:
        """The dispatcher that this process shares, per node name; closed with the application."""
        name = hostname or self._app.origin
        with self._lock:
            made = self._shared.get(name)
            if made is None:
                made = self._shared[name] = EventDispatcher(self._app, name)
            return made

    def sent(self, batch: Sequence[Call]) -> list[Event]:
        """The `task-sent` events for messages that go out now.

        A process that has heard the clock of others, or is a worker, says so: its clock then
        tells what came first, and receivers keep it.
        """
        with self._lock:
            if self._stamper is None:
                self._stamper = Stamper(self._app.origin, self._app.clock)
            stamper = self._stamper
        sync = {"sync": True} if self.synchronised or self._app.clock.witnessed else {}
        # The clock of the message: whoever receives it has a greater one.
        return [
            stamper.make(
                "task-sent", {**_sent_fields(call), **sync}, call.message.headers.get("umbel_clock")
            )
            for call in batch
        ]

    def close(self) -> None:
        """Send what is left and end."""
        with self._lock:
            shared, self._shared = self._shared, {}
        for dispatcher in shared.values():
            dispatcher.close()


def _sent_fields(call: Call) -> dict[str, Any]:
    headers, to = call.message.headers, call.destination
    return {
        "uuid": call.id,
        "name": headers.get("shadow") or call.name,
        "root_id": headers.get("root_id") or call.id,
        "parent_id": call.parent_id,
        "args": headers.get("argsrepr"),
        "kwargs": headers.get("kwargsrepr"),
        "retries": headers.get("retries") or 0,
        "eta": headers.get("eta"),
        "expires": headers.get("expires"),
        "queue": to.queue.name if to.queue is not None else None,
        "exchange": to.exchange,
        "routing_key": to.routing_key,
    }
