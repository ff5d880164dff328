"""Commands that only ask: `app.control.inspect().active()`.

Each method sends one command and returns `{node name: answer}`, or None when nobody answered in
time. What an answer looks like is the node's affair; the shapes are those that Celery's nodes give.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from umbel.wire.patterns import GLOB, matches

if TYPE_CHECKING:
    from kombu import Connection

    from umbel.app.control.mailbox import OnReply
    from umbel.app.umbel import Umbel

Answers = dict[str, Any] | None


class DuplicateNodenameWarning(UserWarning):
    """Two nodes have one name: only one of their answers is shown."""


class Inspect:
    """Questions to all nodes, or to those that `destination` or `pattern` name."""

    def __init__(
        self,
        destination: Sequence[str] | None = None,
        timeout: float = 1.0,
        callback: OnReply | None = None,
        connection: Connection | None = None,
        app: Umbel | None = None,
        limit: int | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
    ) -> None:
        if app is None:
            from umbel.app.current import current_app

            app = current_app()
        self.app: Umbel = app
        self.destination = destination
        self.timeout = timeout
        self.callback = callback
        self.connection = connection
        self.limit = limit
        self.pattern = pattern
        self.matcher = matcher

    def _request(
        self, command: str, destination: Sequence[str] | None = None, **arguments: Any
    ) -> Answers:
        replies = self.app.control.broadcast(
            command,
            arguments=arguments,
            destination=destination or self.destination,
            callback=self.callback,
            connection=self.connection,
            limit=self.limit,
            timeout=self.timeout,
            reply=True,
            pattern=self.pattern,
            matcher=self.matcher,
        )
        if not replies:
            return None
        by_node = flatten_reply(replies)
        if not self.pattern:
            return by_node
        # A node may have answered that does not understand patterns.
        matcher = self.matcher or GLOB
        return {n: value for n, value in by_node.items() if matches(n, self.pattern, matcher)}

    def ping(self, destination: Sequence[str] | None = None) -> Answers:
        """Who is there: `{"ok": "pong"}` from each."""
        return self._request("ping", destination)

    def clock(self) -> Answers:
        """The logical clock: `{"clock": 12}`."""
        return self._request("clock")

    def active(self, safe: bool | None = None) -> Answers:
        """The tasks that run now; with `safe` their arguments are texts."""
        return self._request("active", safe=safe)

    def reserved(self, safe: bool | None = None) -> Answers:
        """The tasks that were taken from a queue and wait for a free slot."""
        return self._request("reserved")

    def scheduled(self, safe: bool | None = None) -> Answers:
        """The tasks that wait for their eta."""
        return self._request("scheduled")

    def query_task(self, *ids: str | Iterable[str]) -> Answers:
        """What nodes know of these tasks: `{id: [state, task]}`."""
        chosen: Any = ids
        if len(ids) == 1 and not isinstance(ids[0], str):
            chosen = ids[0]
        return self._request("query_task", ids=list(chosen))

    def revoked(self) -> Answers:
        """The ids of revoked tasks."""
        return self._request("revoked")

    def registered(self, *taskinfoitems: str, builtins: bool = False) -> Answers:
        """The tasks that nodes know, with these of their attributes."""
        more: dict[str, Any] = {"builtins": True} if builtins else {}
        return self._request("registered", taskinfoitems=list(taskinfoitems), **more)

    registered_tasks = registered

    def stats(self) -> Answers:
        """Counts, pool, broker and resources of each node."""
        return self._request("stats")

    def conf(self, with_defaults: bool = False) -> Answers:
        """The settings, without secrets; those that differ from the defaults, or all."""
        return self._request("conf", with_defaults=with_defaults)

    def active_queues(self) -> Answers:
        """The queues that nodes consume from."""
        return self._request("active_queues")

    def queue_lengths(self, *queues: str) -> Answers:
        """How many messages wait in each queue that a node consumes from, or in these."""
        return self._request("queue_lengths", **({"queues": list(queues)} if queues else {}))

    def elections(self) -> Answers:
        """Elections that are open, decided lately, or refused, as each node sees them."""
        return self._request("elections")

    def report(self) -> Answers:
        """A text for people: `{"ok": text}`."""
        return self._request("report")

    def memsample(self) -> Answers:
        """Take a sample of the memory in use."""
        return self._request("memsample")

    def memdump(self, samples: int = 10) -> Answers:
        """The samples taken so far, as text."""
        return self._request("memdump", samples=samples)

    def objgraph(self, type: str = "Request", n: int = 200, max_depth: int = 10) -> Answers:  # noqa: A002
        """Draw the objects of one type that are still referred to; the answer names the file."""
        return self._request("objgraph", num=n, max_depth=max_depth, type=type)

    def hello(self, from_node: str, revoked: Any = None) -> Answers:
        """Introduce a node: what others know that it should know."""
        return self._request("hello", from_node=from_node, revoked=revoked)


def flatten_reply(replies: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`[{node: answer}, ...]` as one dictionary; warns when a name comes twice."""
    by_node: dict[str, Any] = {}
    twice: set[str] = set()
    for reply in replies:
        twice.update(by_node.keys() & reply.keys())
        by_node.update(reply)
    if twice:
        warnings.warn(
            DuplicateNodenameWarning(
                f"several nodes answered as {', '.join(sorted(twice))}: give each worker a name "
                "of its own (-n)"
            ),
            stacklevel=3,
        )
    return by_node
