"""`app.control`: commands to running nodes.

Commands that change something return at once unless `reply=True` is given; then they return the
replies as `[{node name: answer}, ...]`. All of them take what `broadcast` takes: `destination`,
`pattern` and `matcher`, `reply`, `timeout`, `limit`, `callback`. Names, arguments and shapes are
Celery's, so that its nodes obey too; `pause`, `resume` and `queue_lengths` are Umbel's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError

from umbel.app import elections
from umbel.app.control.inspection import Inspect
from umbel.app.control.mailbox import Mailbox, OnReply
from umbel.broker.sessions.connections import connection_of, masked

if TYPE_CHECKING:
    from kombu import Connection

    from umbel.app.umbel import Umbel

Replies = list[dict[str, Any]] | None
TERM = "SIGTERM"
# These tell when they were sent: all workers then note the same time. Celery's ignore it.
STAMPED = frozenset({"revoke", "terminate", "revoke_by_stamped_headers"})


class Control:
    """Commands to all nodes, or to some; safe to share between threads."""

    def __init__(self, app: Umbel) -> None:
        self.app = app
        self.mailbox = Mailbox(app)

    def inspect(
        self,
        destination: Sequence[str] | None = None,
        timeout: float = 1.0,
        callback: OnReply | None = None,
        connection: Connection | None = None,
        limit: int | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
    ) -> Inspect:
        """Questions to nodes; see `Inspect`."""
        return Inspect(
            destination, timeout, callback, connection, self.app, limit, pattern, matcher
        )

    def broadcast(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        destination: Sequence[str] | None = None,
        connection: Connection | None = None,
        reply: bool = False,
        timeout: float | None = 1.0,
        limit: int | None = None,
        callback: OnReply | None = None,
        channel: Any = None,
        pattern: str | None = None,
        matcher: str | None = None,
        **extra: Any,
    ) -> Replies:
        """Send a command to nodes; `extra` are more of its arguments.

        `connection`, or the one of `channel`, says where to connect; it is not used itself.

        Without `reply` it returns when the broker has the message. With it, when `limit` replies
        have come, when every node in `destination` has answered, or after `timeout` seconds;
        `callback` gets each reply at once. Raises `kombu.exceptions.OperationalError` when the
        broker is away.
        """
        chosen = {**(arguments or {}), **extra}
        if command in STAMPED:
            chosen.setdefault("stamp", time.time())
        to: dict[str, Any] = {"destination": destination, "pattern": pattern, "matcher": matcher}
        place = channel if connection is None else connection
        mailbox = self.mailbox if place is None else Mailbox(self.app, connection_of(place))
        try:
            if not reply:
                mailbox.cast(command, chosen, **to)
                return None
            return mailbox.call(
                command,
                chosen,
                timeout_s=_seconds(timeout),
                limit=limit,
                callback=callback,
                **to,
            )
        finally:
            if place is not None:
                mailbox.close()

    # -- who is there --------------------------------------------------------------------

    def ping(
        self, destination: Sequence[str] | None = None, timeout: float = 1.0, **options: Any
    ) -> list[dict[str, Any]]:
        """Who is there: `[{node name: {"ok": "pong"}}, ...]`."""
        options["reply"] = True
        return self.broadcast("ping", None, destination, timeout=timeout, **options) or []

    def heartbeat(self, destination: Sequence[str] | None = None, **options: Any) -> Replies:
        """Have nodes send a heartbeat event now."""
        return self.broadcast("heartbeat", None, destination, **options)

    def shutdown(self, destination: Sequence[str] | None = None, **options: Any) -> Replies:
        """Have workers finish what they run, and end. They do not answer."""
        return self.broadcast("shutdown", None, destination, **options)

    # -- tasks ---------------------------------------------------------------------------

    def revoke(
        self,
        task_id: str | Sequence[str],
        destination: Sequence[str] | None = None,
        terminate: bool = False,
        signal: str | int | None = TERM,
        **options: Any,
    ) -> Replies:
        """Have workers skip a task, or several; with `terminate` also end it if it runs."""
        ids = task_id if isinstance(task_id, str) else list(task_id)
        arguments = {"task_id": ids, "terminate": terminate, "signal": signal or TERM}
        return self.broadcast("revoke", arguments, destination, **options)

    def terminate(
        self,
        task_id: str | Sequence[str],
        destination: Sequence[str] | None = None,
        signal: str | int | None = TERM,
        **options: Any,
    ) -> Replies:
        """Revoke a task, or several, and end what runs."""
        return self.revoke(task_id, destination, terminate=True, signal=signal, **options)

    def revoke_by_stamped_headers(
        self,
        headers: Mapping[str, Any] | Sequence[str],
        destination: Sequence[str] | None = None,
        terminate: bool = False,
        signal: str | int | None = TERM,
        **options: Any,
    ) -> Replies:
        """Revoke every task that has one of these stamps: `{name: value or values}`."""
        stamps = dict(headers) if isinstance(headers, Mapping) else list(headers)
        arguments = {"headers": stamps, "terminate": terminate, "signal": signal or TERM}
        return self.broadcast("revoke_by_stamped_headers", arguments, destination, **options)

    def rate_limit(
        self,
        task_name: str,
        rate_limit: str | float | None,
        destination: Sequence[str] | None = None,
        **options: Any,
    ) -> Replies:
        """Set how often a task may start, per worker: 10 (per second), '5/m'; 0 is any number."""
        arguments = {"task_name": task_name, "rate_limit": rate_limit}
        return self.broadcast("rate_limit", arguments, destination, **options)

    def time_limit(
        self,
        task_name: str,
        soft: float | None = None,
        hard: float | None = None,
        destination: Sequence[str] | None = None,
        **options: Any,
    ) -> Replies:
        """Set how many seconds a task may take; None is for ever."""
        arguments = {"task_name": task_name, "hard": hard, "soft": soft}
        return self.broadcast("time_limit", arguments, destination, **options)

    def election(
        self,
        id: str,  # noqa: A002
        topic: str,
        action: Any = None,
        connection: Connection | None = None,
        **options: Any,
    ) -> Replies:
        """Have the nodes elect one of them, which acts.

        Raises `NotForElection` for what nobody could be elected for, before anything is sent. What
        only workers can judge, such as the topic, they refuse: when none of them stands, the result
        of this id is a FAILURE with the reason. Nodes without gossip take no part, and do not
        answer.
        """
        arguments = elections.request(self.app, id, topic, action)
        return self.broadcast("election", arguments, connection=connection, **options)

    # -- pools ---------------------------------------------------------------------------

    def pool_grow(
        self, n: int = 1, destination: Sequence[str] | None = None, **options: Any
    ) -> Replies:
        """Add `n` slots to pools."""
        return self.broadcast("pool_grow", {"n": n}, destination, **options)

    def pool_shrink(
        self, n: int = 1, destination: Sequence[str] | None = None, **options: Any
    ) -> Replies:
        """Take `n` slots from pools."""
        return self.broadcast("pool_shrink", {"n": n}, destination, **options)

    def pool_restart(
        self,
        modules: Sequence[str] | None = None,
        reload: bool = False,
        reloader: Any = None,
        destination: Sequence[str] | None = None,
        **options: Any,
    ) -> Replies:
        """Replace the processes of pools, importing modules anew if asked to."""
        arguments = {"modules": modules, "reload": reload, "reloader": reloader}
        return self.broadcast("pool_restart", arguments, destination, **options)

    def autoscale(
        self,
        max: int,  # noqa: A002
        min: int,  # noqa: A002
        destination: Sequence[str] | None = None,
        **options: Any,
    ) -> Replies:
        """Set between which sizes pools grow and shrink by themselves."""
        return self.broadcast("autoscale", {"max": max, "min": min}, destination, **options)

    # -- queues --------------------------------------------------------------------------

    def add_consumer(
        self,
        queue: str,
        exchange: str | None = None,
        exchange_type: str = "direct",
        routing_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        destination: Sequence[str] | None = None,
        **more: Any,
    ) -> Replies:
        """Have workers consume from one more queue; `options` are those of the queue."""
        arguments = {
            "queue": queue,
            "exchange": exchange,
            "exchange_type": exchange_type,
            "routing_key": routing_key,
            **(options or {}),
        }
        return self.broadcast("add_consumer", arguments, destination, **more)

    def cancel_consumer(
        self, queue: str, destination: Sequence[str] | None = None, **options: Any
    ) -> Replies:
        """Have workers consume from a queue no longer."""
        return self.broadcast("cancel_consumer", {"queue": queue}, destination, **options)

    def pause(
        self, queue: str, destination: Sequence[str] | None = None, **options: Any
    ) -> Replies:
        """Have nobody take messages from a queue until `resume`, who joins later included.

        Given a destination or a pattern, only those workers are meant, and only while they run.
        """
        to_all = destination is None and options.get("pattern") is None
        arguments = pause_arguments(queue, to_all=to_all)
        return self.broadcast("pause", arguments, destination, **options)

    def resume(
        self, queue: str, destination: Sequence[str] | None = None, **options: Any
    ) -> Replies:
        """Have a paused queue consumed again."""
        to_all = destination is None and options.get("pattern") is None
        arguments = pause_arguments(queue, to_all=to_all)
        return self.broadcast("resume", arguments, destination, **options)

    def queue_lengths(
        self, destination: Sequence[str] | None = None, timeout: float = 1.0, **options: Any
    ) -> list[dict[str, Any]]:
        """How many messages wait in the queues that each worker consumes from."""
        options["reply"] = True
        return self.broadcast("queue_lengths", None, destination, timeout=timeout, **options) or []

    def purge(self, connection: Connection | None = None) -> int:
        """Remove every waiting message from the application's queues; how many there were."""
        app = self.app
        own = app.connection() if connection is None else connection.clone()
        errors = (*own.connection_errors, OSError)
        try:
            with own as opened:
                opened.connect()
                return sum(_purge(opened, app.queues.find(name)) for name in app.queues.consumed)
        except errors as exc:
            raise OperationalError(
                f"queues could not be emptied on {masked(own.as_uri())}: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

    discard_all = purge

    # -- events --------------------------------------------------------------------------

    def enable_events(self, destination: Sequence[str] | None = None, **options: Any) -> Replies:
        """Have workers send events of tasks."""
        return self.broadcast("enable_events", None, destination, **options)

    def disable_events(self, destination: Sequence[str] | None = None, **options: Any) -> Replies:
        """Have workers send no events of tasks."""
        return self.broadcast("disable_events", None, destination, **options)

    def close(self) -> None:
        """Close the connections for requests and replies; the next command opens them again."""
        self.mailbox.close()
        self.app.publisher.close_idle()


def pause_arguments(queue: str, *, to_all: bool) -> dict[str, Any]:
    """What `pause` and `resume` carry: told to all, a time, as of two commands the later holds."""
    return {"queue": queue, "stamp": time.time()} if to_all else {"queue": queue}


def _seconds(timeout: float | None) -> float:
    if timeout is None or not math.isfinite(timeout) or timeout < 0:
        raise ValueError(
            f"timeout={timeout!r}: who waits for replies needs a number of seconds, as nobody "
            "knows how many will come"
        )
    return float(timeout)


def _purge(connection: Connection, queue: Any) -> int:
    # A queue that is not there closes the channel: each gets its own.
    try:
        with connection.channel() as channel:
            return int(queue(channel).purge() or 0)
    except connection.channel_errors:
        return 0
