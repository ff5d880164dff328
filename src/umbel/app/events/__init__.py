"""Events: what nodes tell of themselves and of tasks.

`app.events` makes the parts: a `Dispatcher` sends, a `Receiver` listens, a `State` folds what it
hears into the cluster as it is now. One dispatcher per process serves tasks that send events of
their own.

In a worker, and in the processes that it forks, whoever sends events under no name or under the
name of the worker sends them as a part of the worker's life (`stamper`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kombu import Connection

from umbel.app.events.dispatcher import CLOSE_S, SharedDispatcher
from umbel.app.events.dispatcher import Dispatcher as EventDispatcher
from umbel.app.events.stamper import Event, Life, Stamper
from umbel.app.events.stream import EventStream
from umbel.broker.sessions.connections import connection_of

if TYPE_CHECKING:
    from umbel.app.calls import Call
    from umbel.app.events.receiver import Handler
    from umbel.app.events.receiver import Receiver as EventReceiver
    from umbel.app.events.state import State as ClusterState
    from umbel.app.events.state import Worker
    from umbel.app.umbel import Umbel
    from umbel.cluster.clock import Clock


class Events:
    """The events of one application."""

    def __init__(self, app: Umbel, life: Life | None = None) -> None:
        self._app = app
        self.life = life  # of the worker that this process is, or was forked from
        self._lock = threading.Lock()
        self._shared: dict[str, EventDispatcher] = {}
        self._stamper: Stamper | None = None
        self._stream: EventStream | None = None
        self.synchronised = False  # this process is a worker: its clock is the cluster's
        self.sent_lost = 0  # task-sent events that did not go out

    def Dispatcher(  # noqa: N802
        self,
        connection: Any = None,
        hostname: str | None = None,
        enabled: bool = True,
        channel: Any = None,
        buffer_while_offline: bool = True,
        app: Umbel | None = None,
        serializer: str | None = None,
        groups: Iterable[str] | None = None,
        delivery_mode: int = 1,
        buffer_group: Iterable[str] | None = None,
        buffer_limit: int = 24,
        on_send_buffered: Callable[[], object] | None = None,
        *,
        stamper: Stamper | None = None,
    ) -> EventDispatcher:
        """Something to send events with; `close` it.

        `connection` says where to connect: a connection of the application or of kombu, a channel
        (`channel` is the same) or a URL; None is the application's broker. A name without `://` in
        its place is the hostname. No or empty `groups` are all groups. Celery's other arguments
        have no effect: events are transient JSON, task events travel together in any case, and
        `event_buffer_max` bounds the buffer.
        """
        app = app or self._app
        if isinstance(connection, str) and "://" not in connection:
            if hostname is not None:
                raise TypeError(
                    f"{connection!r} is neither a connection nor a broker URL, "
                    f"and the hostname is {hostname!r}: leave one of them out"
                )
            connection, hostname = None, connection
        return EventDispatcher(
            app,
            hostname,
            connection=_place(app, channel if connection is None else connection),
            groups=groups or None,
            enabled=enabled,
            buffer_while_offline=buffer_while_offline,
            stamper=stamper,
        )

    def Receiver(  # noqa: N802
        self,
        channel: Any = None,
        handlers: Mapping[str, Handler] | None = None,
        routing_key: str = "#",
        node_id: str | None = None,
        app: Umbel | None = None,
        queue_prefix: str | None = None,
        accept: Iterable[str] | None = None,
        queue_ttl: float | None = None,
        queue_expires: float | None = None,
        queue_exclusive: bool | None = None,
        queue_durable: bool | None = None,
        *,
        connection: Any = None,
        types: Collection[str] | None = None,
        state: Any = None,
        wakeup: bool = True,
        clock: Clock | None = None,
    ) -> EventReceiver:
        """Something to receive events with.

        `channel` or `connection` says where to connect: a connection of the application or of
        kombu, a channel or a URL; None is the application's broker. The name of the queue is
        `queue_prefix` and `node_id`, a random id without one.
        """
        from umbel.app.events.receiver import Receiver

        app = app or self._app
        return Receiver(
            app,
            connection=_place(app, channel if connection is None else connection),
            handlers=handlers,
            routing_key=routing_key,
            node_id=node_id,
            queue_prefix=queue_prefix,
            accept=accept,
            queue_ttl=queue_ttl,
            queue_expires=queue_expires,
            queue_exclusive=queue_exclusive,
            queue_durable=queue_durable,
            types=types,
            state=state,
            wakeup=wakeup,
            clock=clock,
        )

    def State(  # noqa: N802
        self,
        callback: Callable[[ClusterState, Any], object] | None = None,
        *,
        max_workers: int = 5_000,
        max_tasks: int = 10_000,
        max_workers_in_memory: int | None = None,
        max_tasks_in_memory: int | None = None,
        on_node_join: Callable[[Worker], object] | None = None,
        on_node_leave: Callable[[Worker], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> ClusterState:
        """The state of the cluster, empty yet: give it events.

        Celery's names of `max_workers` and `max_tasks` are taken too.
        """
        from umbel.app.events.state import State

        return State(
            max_workers=max_workers if max_workers_in_memory is None else max_workers_in_memory,
            max_tasks=max_tasks if max_tasks_in_memory is None else max_tasks_in_memory,
            callback=callback,
            on_node_join=on_node_join,
            on_node_leave=on_node_leave,
            clock=clock,
        )

    @property
    def stream(self) -> EventStream:
        """Where events are kept for recorders, on Redis."""
        if self._stream is None:
            conf = self._app.conf
            self._stream = EventStream(conf.event_stream, conf.event_stream_max)
        return self._stream

    def new_stamper(self, hostname: str | None = None) -> Stamper:
        """A new series of numbers; under the name of the worker it belongs to the worker's life."""
        life, clock = self.life, self._app.clock
        if life is not None and life.inc and hostname in (None, life.hostname):
            return Stamper(life.hostname, clock, life)
        return Stamper(hostname or self._app.origin, clock)

    def default_dispatcher(
        self,
        hostname: str | None = None,
        enabled: bool = True,
        buffer_while_offline: bool = False,
    ) -> EventDispatcher:
        """The dispatcher that this process shares, per node name; closed with the application.

        Without a name it is the worker's, in a worker and its pool processes. A `with` block sends
        what it has put in, and leaves the dispatcher open for others. If somebody has closed it,
        there is a new one. One that is not `enabled` is not shared. `buffer_while_offline` has no
        effect: there is always a buffer.
        """
        if not enabled:
            return EventDispatcher(self._app, hostname, enabled=False)
        if not isinstance(hostname, str | None):
            raise TypeError(f"hostname must be a name such as 'w1@host', not {hostname!r}")
        life = self.life
        own = life.hostname if life is not None and life.inc else self._app.origin
        name = hostname or own
        with self._lock:
            made = self._shared.get(name)
            if made is None or made.is_closed:
                made = self._shared[name] = SharedDispatcher(self._app, name)
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

    def after_fork(self) -> Events:
        """What a forked process goes on with: the life of the worker, and nothing else."""
        return Events(self._app, self.life)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left and end; each dispatcher tries for at most `timeout_s`."""
        with self._lock:
            shared, self._shared = self._shared, {}
        for dispatcher in shared.values():
            dispatcher.close(timeout_s)


def _place(app: Umbel, given: Any) -> Connection | None:
    """The connection that tells where to connect; None is the application's broker."""
    if given is None:
        return None
    if isinstance(given, str) and "://" in given:
        return app.connection(given)
    return connection_of(given)


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
        "payload_bytes": len(call.message.body),
        **({"group_id": headers["group"]} if headers.get("group") else {}),
    }
