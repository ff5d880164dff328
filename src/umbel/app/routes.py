"""Where a task goes: queues, routes, and the destination of one message.

`Queues` knows the declared queues and makes missing ones. `Router` asks the configured routes
(a map with globs or patterns, functions, objects with `route_for_task`, or dotted names of
these) and merges the answer under the options that the caller gave. The outcome is a
`Destination`, which says all that a publisher needs.

A direct exchange is skipped: unless the caller names both exchange and routing key, the
message goes to the default exchange with the queue's name, the queue being declared first.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu import Exchange, Queue
from kombu.common import Broadcast

from umbel.broker.sessions.connections import is_rabbitmq
from umbel.broker.tasks import delayed as delays
from umbel.exceptions import ImproperlyConfigured, QueueNotFound

if TYPE_CHECKING:
    from umbel.app.conf import Conf

RouteSource = Callable[..., Any]

# The options that say where a message goes, as opposed to how.
ADDRESS = ("queue", "exchange", "routing_key")


class Destination(NamedTuple):
    """Where one message is published, and what has to exist there before."""

    exchange: str
    routing_key: str
    queue: Queue | None
    delivery_mode: int
    declare: Exchange | None = None
    delay_kind: str = ""  # of the queues that delay it on the broker, where they do

    @property
    def needs_queue(self) -> bool:
        """Whether a message has to reach a queue: not with fanout, or an exchange of others."""
        if self.queue is not None or not self.exchange:
            return True
        declared = self.declare
        return declared is not None and not declared.passive and declared.type != "fanout"


class _Read(NamedTuple):
    """What was made of the setting `task_routes`."""

    given: Any
    sources: list[RouteSource]
    is_table: bool


class Queues(dict[str, Queue]):
    """The queues of one application; `consume_from` is the selection of a worker.

    A queue that was made because somebody sent to it belongs to others: a worker consumes only
    what was declared or selected.
    """

    def __init__(self, conf: Conf) -> None:
        super().__init__()
        self._conf = conf
        self._aliases: dict[str, Queue] = {}
        self._sent_to: set[str] = set()
        self.revision = 0  # of what is in here; grows with every change
        self.consume_from: dict[str, Queue] | None = None
        declared: Iterable[Any] = conf.task_queues or ()
        items = declared.items() if isinstance(declared, Mapping) else ((None, q) for q in declared)
        for name, queue in items:
            self.add(_as_queue(name, queue))
        if not self:
            self.add(self.make(conf.task_default_queue))

    def __setitem__(self, name: str, queue: Queue) -> None:
        super().__setitem__(name, queue)
        self.revision += 1

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.revision += 1

    def make(self, name: str) -> Queue:
        """A queue that nobody declared: durable, bound to a direct exchange of its own."""
        conf = self._conf
        default = name == conf.task_default_queue
        exchange_name = (conf.task_default_exchange if default else None) or name
        exchange_type = (conf.task_default_exchange_type if default else None) or "direct"
        routing_key = (conf.task_default_routing_key if default else None) or name
        arguments: dict[str, Any] = {}
        queue_type = getattr(conf, "task_default_queue_type", "classic")
        if queue_type and queue_type != "classic":
            arguments["x-queue-type"] = queue_type
        return Queue(
            name,
            Exchange(exchange_name, type=exchange_type, durable=True),
            routing_key=routing_key,
            queue_arguments=arguments or None,
        )

    def add(self, queue: Queue) -> Queue:
        """Declare `queue` here, with the application-wide defaults filled in."""
        self._put(queue)
        self._sent_to.discard(queue.name)
        if self.consume_from is not None:
            self.consume_from[queue.name] = queue
        return queue

    def _put(self, queue: Queue) -> Queue:
        conf = self._conf
        if queue.exchange is None or not queue.exchange.name:
            queue.exchange = Exchange(queue.name, type="direct", durable=True)
            queue.routing_key = queue.routing_key or queue.name
        if not queue.routing_key:
            # Peers take the same one; a fanout on Redis reaches only who has agreed on it.
            queue.routing_key = conf.task_default_routing_key or conf.task_default_queue
        highest = conf.task_queue_max_priority
        argued = "x-max-priority" in (queue.queue_arguments or {})
        if highest is not None and queue.max_priority is None and not argued:
            queue.max_priority = highest
        if queue.alias:
            self._aliases[queue.alias] = queue
        self[queue.name] = queue
        return queue

    def find(self, name: str) -> Queue:
        """The queue of that name; made when `task_create_missing_queues` allows it."""
        queue = self.get(name) or self._aliases.get(name)
        if queue is None:
            if not self._conf.task_create_missing_queues:
                raise QueueNotFound(
                    f"queue {name!r} is not in task_queues and task_create_missing_queues is off: "
                    f"declare it or choose one of {', '.join(sorted(self))}"
                )
            self._sent_to.add(name)
            queue = self._put(self.make(name))
        return queue

    def select(self, names: Iterable[str]) -> None:
        """A worker consumes from these queues only."""
        self.consume_from = {name: self.find(name) for name in names}

    def deselect(self, names: Iterable[str]) -> None:
        """A worker consumes from all queues but these."""
        excluded = set(names)
        self.consume_from = {
            name: queue for name, queue in self.consumed.items()
            if name not in excluded and queue.alias not in excluded
        }  # fmt: skip

    @property
    def consumed(self) -> dict[str, Queue]:
        """What a worker consumes from."""
        if self.consume_from is not None:
            return dict(self.consume_from)
        return {name: queue for name, queue in self.copy().items() if name not in self._sent_to}


def direct_queue(node: str) -> Queue:
    """The queue that only the worker of that name consumes (`worker_direct`)."""
    return Queue(f"{node}.dq2", Exchange("C.dq2", type="direct"), routing_key=node)


def _as_queue(name: str | None, declared: Any) -> Queue:
    if isinstance(declared, Queue):
        return declared
    if isinstance(declared, str):
        return Queue(declared)
    if isinstance(declared, Mapping):
        options = dict(declared)
        kind = options.pop("exchange_type", "direct")
        own = options.pop("name", None) or name
        exchange = options.pop("exchange", None)
        key = options.pop("binding_key", None) or (None if exchange else own)
        exchange = exchange or own
        if isinstance(exchange, str):
            exchange = Exchange(exchange, type=kind, durable=True)
        return Queue(own, exchange, **{"routing_key": key, **options})
    raise ImproperlyConfigured(
        f"task_queues holds {declared!r}: give kombu.Queue objects, names, or dictionaries"
    )


class Router:
    """Merges what the routes say about a task with what its caller said."""

    def __init__(self, conf: Conf, queues: Queues) -> None:
        self._conf = conf
        self._queues = queues
        self._read = _Read(None, [], True)

    def _routes(self) -> _Read:
        # Settings may change after the first message; what was read of them is kept as one value.
        read, given = self._read, self._conf.task_routes
        if read.given is not given:
            routes = [_loaded(route) for route in _as_list(given)]
            is_table = all(isinstance(route, Mapping) for route in routes)
            read = self._read = _Read(given, [_as_source(route) for route in routes], is_table)
        return read

    @property
    def is_table(self) -> bool:
        """Whether the routes look at nothing but the names of tasks."""
        return self._routes().is_table

    def options_for(
        self, options: dict[str, Any], name: str, args: Any, kwargs: Any, task: Any
    ) -> dict[str, Any]:
        """`options` with the first route that has an answer filled in underneath.

        Where the caller named the destination a route says only the rest: priority, serializer.
        """
        for source in self._routes().sources:
            route = source(name, args, kwargs, options, task=task)
            if route is not None:
                found = {"queue": route} if isinstance(route, str) else dict(route)
                if is_addressed(options):
                    found = {key: value for key, value in found.items() if key not in ADDRESS}
                return {**found, **{k: v for k, v in options.items() if v is not None}}
        return options

    def delayed(self, to: Destination, delay_s: float, url: Any) -> Destination:
        """Where a message goes that the broker itself keeps for a while: RabbitMQ, quorum queues.

        The same destination where the broker can not: the worker keeps the message then.
        """
        if not to.exchange or not self._conf.worker_detect_quorum_queues:
            return to
        if not is_rabbitmq(url):
            return to
        if not _can_delay(to) or not delays.any_quorum(self._queues.copy().values()):
            return to
        found = delays.route(delay_s, to.routing_key)
        if found is None:
            return to
        kind = self._conf.broker_native_delayed_delivery_queue_type
        return to._replace(exchange=found[0], routing_key=found[1], delay_kind=kind)

    def destination(self, options: Mapping[str, Any]) -> Destination:
        """The destination that `queue`, `exchange`, `exchange_type` and `routing_key` name."""
        conf = self._conf
        exchange, routing_key = options.get("exchange"), options.get("routing_key")
        mode = options.get("delivery_mode")
        delivery_mode = _delivery_mode(conf.task_default_delivery_mode if mode is None else mode)
        queue = options.get("queue")
        if isinstance(exchange, Exchange):
            key = routing_key if routing_key is not None else exchange.name
            return Destination(exchange.name, key, None, delivery_mode, exchange)
        if not queue and exchange is not None and routing_key is not None:
            return Destination(
                exchange, routing_key, None, delivery_mode, self._known_exchange(exchange)
            )
        kind = options.get("exchange_type")
        if not queue and exchange and kind and kind != "direct":
            declared = Exchange(exchange, type=kind, durable=True)
            return Destination(exchange, routing_key or exchange, None, delivery_mode, declared)
        if not isinstance(queue, Queue):
            queue = self._queues.find(queue or conf.task_default_queue)
        return _through_queue(queue, exchange, routing_key, delivery_mode)

    def _known_exchange(self, name: str) -> Exchange | None:
        # Publishing to an exchange that is not there makes RabbitMQ close the channel, and lose
        # what follows there: one that is not ours to declare is asked for.
        if not name:
            return None
        known = (queue.exchange for queue in self._queues.copy().values())
        asked = Exchange(name, passive=True)
        return next((exchange for exchange in known if exchange.name == name), asked)


def is_addressed(options: Mapping[str, Any]) -> bool:
    """Whether the options say all about where the message goes."""
    return options.get("queue") is not None or (
        options.get("exchange") is not None and options.get("routing_key") is not None
    )


def _through_queue(queue: Queue, exchange: Any, key: str | None, mode: int) -> Destination:
    if isinstance(queue, Broadcast):
        # Each consumer has a queue of its own there; one made here would have no reader.
        target = queue.exchange
        return Destination(target.name, key or queue.routing_key or "", None, mode, target)
    if exchange is not None and key is not None:
        return Destination(exchange, key, queue, mode)
    if queue.exchange.type == "direct":
        return Destination("", queue.name, queue, mode)
    return Destination(exchange or queue.exchange.name, key or queue.routing_key, queue, mode)


def _can_delay(to: Destination) -> bool:
    """Whether the key behind the delay brings the message to where it would have gone.

    Workers tie topic exchanges to the one where delays end. A message that was delayed before
    names the exchange where it left the ladder, and is sent again by the same key.
    """
    if to.queue is not None:
        own = to.queue.exchange
        return own.name == to.exchange and own.type != "direct"
    if to.exchange in delays.EXCHANGES:
        return True
    return to.declare is not None and to.declare.type not in ("direct", "fanout")


def _delivery_mode(mode: Any) -> int:
    if mode in (1, "transient"):
        return 1
    if mode in (2, "persistent"):
        return 2
    raise ImproperlyConfigured(f"delivery_mode {mode!r}: choose 1 (transient) or 2 (persistent)")


def _as_list(routes: Any) -> list[Any]:
    if not routes:
        return []
    return list(routes) if isinstance(routes, (list, tuple)) else [routes]


def _loaded(route: Any) -> Any:
    while isinstance(route, str):
        route = _load(route)
    return route


def _as_source(route: Any) -> RouteSource:
    if isinstance(route, Mapping):
        return _map_source(route)
    if hasattr(route, "route_for_task"):
        method = (route() if isinstance(route, type) else route).route_for_task
        return lambda name, args, kwargs, options, task=None: method(name, args, kwargs)
    if callable(route):
        return route
    raise ImproperlyConfigured(
        f"task_routes holds {route!r}: give a dictionary, a function, or a dotted name of one"
    )


def _map_source(table: Mapping[Any, Any]) -> RouteSource:
    exact: dict[str, Any] = {}
    patterns: list[tuple[re.Pattern[str], Any]] = []
    for key, value in table.items():
        if isinstance(key, re.Pattern):
            patterns.append((key, value))
        elif "*" in key or "?" in key or "[" in key:
            patterns.append((re.compile(fnmatch.translate(key)), value))
        else:
            exact[key] = value

    def source(name: str, args: Any, kwargs: Any, options: Any, task: Any = None) -> Any:
        found = exact.get(name)
        if found is not None:
            return found
        return next((value for pattern, value in patterns if pattern.match(name)), None)

    return source


def _load(dotted: str) -> Any:
    module_name, _, attribute = dotted.replace(":", ".").rpartition(".")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ImproperlyConfigured(
            f"task_routes names {dotted!r}, which can not be loaded: {exc}"
        ) from exc
