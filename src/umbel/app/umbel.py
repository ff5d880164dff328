"""The application: settings, tasks, and the way to the broker and the result backend.

An `Umbel` is cheap to make and opens nothing until it is used. It is safe to share between
threads. A forked child gets fresh connections and an identity of its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from kombu import Connection
from tzlocal import get_localzone

from umbel.app import calls, current
from umbel.app.canvas import Signature, chunks, signature
from umbel.app.canvas.plan import Plan
from umbel.app.commands import Commands
from umbel.app.conf import Conf
from umbel.app.context import current_request
from umbel.app.declaring import adopt, make_task, register
from umbel.app.forms import Forms
from umbel.app.modules import ModuleLoader
from umbel.app.publish import Publisher
from umbel.app.registry import TaskRegistry
from umbel.app.results import AsyncResult, GroupResult
from umbel.app.routes import Queues, Router
from umbel.app.steps import Steps
from umbel.app.task import Task, add_to_caller
from umbel.broker.sessions.connections import connect, is_embedded
from umbel.cluster.clock import Clock
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.content import accept_set
from umbel.wire.limits import Limits

if TYPE_CHECKING:
    from umbel.app.control import Control
    from umbel.app.events import Events
    from umbel.app.results.backend import Backend


T = TypeVar("T")
_NO_SPANS = contextlib.nullcontext()


class Umbel:
    """One application; see the module's text."""

    def __init__(
        self,
        main: str = "umbel",
        broker: str | list[str] | None = None,
        backend: str | None = None,
        *,
        include: Iterable[str] = (),
        config_source: Any = None,
        namespace: str | None = None,
        set_as_current: bool = True,
        task_cls: type[Task] = Task,
        **settings: Any,
    ) -> None:
        self.main = main
        self.task_cls = task_cls
        self.tasks = TaskRegistry()
        self.steps = {"worker": Steps(), "consumer": Steps()}
        self.modules = ModuleLoader(include)
        self.own_commands = Commands()
        self.election_handlers: dict[str, Callable[[Any], object]] = {}
        self._lock = threading.RLock()
        self._made: dict[str, Any] = {}
        self.clock = Clock(lock=threading.Lock())
        self._renew()
        self.conf = Conf()
        self.conf.load_environment(os.environ)
        if config_source is not None:
            self.config_from_object(config_source, namespace=namespace)
        explicit = {"broker_url": broker, "result_backend": backend}
        self.conf.update({**{k: v for k, v in explicit.items() if v is not None}, **settings})
        self._register_builtins()
        _watch_forks(self)
        current.announce(self)
        if set_as_current:
            current.set_current(self)

    def _register_builtins(self) -> None:
        from umbel.app.builtins import register_builtins

        register_builtins(self)

    # -- settings ----------------------------------------------------------------------

    def config_from_object(self, source: Any, *, namespace: str | None = None) -> None:
        """Read settings from a module, its dotted name, an object or a dictionary."""
        self.conf.load_object(source, namespace=namespace)

    @property
    def timezone(self) -> tzinfo:
        """The zone in which naive times are read."""
        name = self.conf.timezone
        if not name:
            return UTC if self.conf.enable_utc else get_localzone()
        if isinstance(name, tzinfo):
            return name
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError):
            raise ImproperlyConfigured(
                f"timezone {name!r} is not known here: give a name such as 'Europe/Berlin', or UTC"
            ) from None

    def now(self) -> datetime:
        """The time now, with its zone."""
        return datetime.now(UTC if self.conf.enable_utc else self.timezone)

    @property
    def directory(self) -> Path | None:
        """Where the embedded broker keeps its data; None means the working directory."""
        chosen = self.conf.embedded_directory
        return Path(chosen) if chosen else None

    @property
    def limits(self) -> Limits:
        """What a message may be at most."""
        conf = self.conf
        return Limits(
            body_bytes=conf.task_message_max_bytes,
            depth=conf.task_message_max_depth,
            integer_digits=conf.task_message_max_integer_digits,
        )

    @property
    def accept(self) -> frozenset[str]:
        """The content types that are read."""
        return accept_set(self.conf.accept_content)

    # -- tasks -------------------------------------------------------------------------

    def task(self, *args: Any, **options: Any) -> Any:
        """Make a function a task: `@app.task` or `@app.task(bind=True, queue='money')`."""
        if len(args) == 1 and callable(args[0]):
            return register(self, make_task(self, args[0], options))
        if args:
            raise TypeError("app.task takes keyword options only, such as @app.task(bind=True)")

        def decorate(fun: Callable[..., Any]) -> Task:
            return register(self, make_task(self, fun, options))

        return decorate

    def register_task(self, task: Task | type[Task]) -> Task:
        """Register an instance (or class) of a hand-written subclass of `Task`."""
        return adopt(self, task() if isinstance(task, type) else task)

    def control_command(self, fun: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Make a function a command that workers obey: `@app.control_command`.

        It is called as `fun(state, **arguments)`; what it returns is the answer. With `reads=True`
        it is an inspection, which changes nothing.
        """
        return self.own_commands.command(fun, **options)

    def election_handler(self, topic: str) -> Callable[[Callable[[Any], T]], Callable[[Any], T]]:
        """Have a function carry out elections of a topic: `@app.election_handler("rotate")`.

        It gets the action, on the one worker that was elected.
        """

        def decorate(fun: Callable[[Any], T]) -> Callable[[Any], T]:
            self.election_handlers[topic] = fun
            return fun

        return decorate

    def task_name(self, fun: Any) -> str:
        """The name of a task that was not given one: module and function."""
        module = self.main if fun.__module__ == "__main__" else fun.__module__
        return f"{module}.{fun.__name__}"

    def autodiscover_tasks(
        self,
        packages: Iterable[str] | Callable[[], Iterable[str]] = (),
        related_name: str | None = "tasks",
        force: bool = False,
    ) -> None:
        """Load `<package>.tasks` of every package when a worker starts, or now with `force`."""
        self.modules.discover(packages, related_name)
        if force:
            self.modules.load(self)

    def load_modules(self) -> None:
        """Import everything that `imports`, `include` and auto-discovery name."""
        self.modules.load(self)

    # -- sending -----------------------------------------------------------------------

    def send_task(
        self, name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> AsyncResult:
        """Send a task by name; it need not be known here."""
        return self.send(name, args, kwargs, options, self.tasks.get(name))

    def send(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        options: Mapping[str, Any],
        task: Task | None,
        ignore_result: bool | None = None,
    ) -> AsyncResult:
        """Send one call: what `apply_async` and `send_task` come down to."""
        call = calls.prepare(self, name, args, kwargs, options, task, ignore_result)
        if not call.ignore_result:
            self.backend.before_send((call.id,))
        policy = call.policy or self.forms.policy()
        with self._spans((call,)):
            self.publisher.send(call.message, call.destination, policy, self._sent((call,)))
        result = AsyncResult(call.id, None, self)
        result.ignored = call.ignore_result
        if options.get("add_to_parent", True):
            add_to_caller(result)
        return result

    def send_many(self, signatures: Iterable[Signature | dict[str, Any]]) -> list[Any]:
        """Send many calls in one go, in order, compositions included.

        All messages are encoded before the first goes out, so that a bad argument sends nothing.
        """
        chosen = [signature(one, app=self) for one in signatures]
        chosen = [one.group() if isinstance(one, chunks) else one for one in chosen]
        if self.conf.task_always_eager:
            return [one.apply_async() for one in chosen]
        plan = Plan(self)
        # A plain call is left as it is when it is planned; the parts of a composition are not.
        planned = [
            (one.clone() if one["subtask_type"] else one).plan(plan, (), {}, {}) for one in chosen
        ]
        plan.carry_out()
        if current_request() is not None:
            for one, (_, first) in zip(chosen, planned, strict=True):
                if one.options.get("add_to_parent", True):
                    add_to_caller(first)
        return [result for result, _ in planned]

    def publish_many(self, batch: Sequence[calls.Call]) -> None:
        """Publish what `calls.prepare` made, in as few round trips as the broker allows."""
        if not batch:
            return
        kept = [call.id for call in batch if not call.ignore_result]
        if kept:
            self.backend.before_send(kept)
        parcels = [call.message for call in batch]
        places = {id(call.destination): call.destination for call in batch}.values()
        policy = batch[0].policy or self.forms.policy()
        with self._spans(batch):
            self.publisher.send_many(parcels, places, policy, self._sent(batch))

    def _sent(self, batch: Sequence[calls.Call]) -> list[dict[str, Any]]:
        return self.events.sent(batch) if self.conf.task_send_sent_event else []

    def _spans(self, batch: Sequence[calls.Call]) -> contextlib.AbstractContextManager[None]:
        if not self.conf.task_trace_spans:
            return _NO_SPANS

        def make() -> Any:
            from umbel.app.spans import Spans

            return Spans(self)

        spans: contextlib.AbstractContextManager[None] = self._once("spans", make).sending(batch)
        return spans

    def signature(self, *args: Any, **kwargs: Any) -> Signature:
        """A call that is not made yet; see `umbel.signature`."""
        kwargs["app"] = self
        return signature(*args, **kwargs)

    def AsyncResult(self, id: str, **options: Any) -> AsyncResult:  # noqa: A002
        """A handle on the result of the task `id`."""
        return AsyncResult(id, app=self, **options)

    def GroupResult(self, id: str, results: Any = None, **options: Any) -> GroupResult:  # noqa: A002
        """A handle on the results of a group."""
        return GroupResult(id, results, app=self, **options)

    # -- what is made on first use -----------------------------------------------------

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        made = self._made.get(name)
        if made is None:
            with self._lock:
                made = self._made.get(name)
                if made is None:
                    made = self._made[name] = make()
        return made

    @property
    def queues(self) -> Queues:
        """The queues of this application."""
        queues: Queues = self._once("queues", lambda: Queues(self.conf))
        return queues

    @property
    def router(self) -> Router:
        """Where tasks go."""
        router: Router = self._once("router", lambda: Router(self.conf, self.queues))
        return router

    @property
    def forms(self) -> Forms:
        """What calls have in common."""
        forms: Forms = self._once("forms", lambda: Forms(self))
        return forms

    @property
    def publisher(self) -> Publisher:
        """The way out to the broker."""
        publisher: Publisher = self._once("publisher", lambda: Publisher(self))
        return publisher

    @property
    def backend(self) -> Backend:
        """Where results are kept."""

        def make() -> Backend:
            from umbel.app.results.backend import backend_for

            return backend_for(self, self.result_url)

        backend: Backend = self._once("backend", make)
        return backend

    @property
    def events(self) -> Events:
        """Events: sending, receiving, and the state of the cluster that they tell."""

        def make() -> Events:
            from umbel.app.events import Events

            return Events(self)

        events: Events = self._once("events", make)
        return events

    @property
    def control(self) -> Control:
        """Remote control of running nodes."""

        def make() -> Control:
            from umbel.app.control import Control

            return Control(self)

        control: Control = self._once("control", make)
        return control

    @property
    def result_url(self) -> str:
        """The result backend; with the embedded broker that is the default for results too."""
        url = self.conf.result_backend
        if url:
            return str(url)
        return "embedded://" if is_embedded(self.conf.broker_url) else "disabled://"

    @property
    def read_url(self) -> Any:
        """The broker that workers consume from."""
        return self.conf.broker_read_url or self.conf.broker_url

    @property
    def write_url(self) -> Any:
        """The broker that messages are sent to."""
        return self.conf.broker_write_url or self.conf.broker_url

    @property
    def reply_to(self) -> str:
        """Where replies to this process go."""
        return self.backend.reply_to or self.oid

    def connection(
        self, url: Any = None, *, heartbeat: float | None = None, confirm: bool = False
    ) -> Connection:
        """A new, unopened connection to the broker; `heartbeat` replaces the setting.

        With `confirm`, publishing returns when the broker has the message, where it can tell.
        """
        conf = self.conf
        transport_options = conf.broker_transport_options
        if confirm:
            transport_options = {**transport_options, "confirm_publish": True}
        options: dict[str, Any] = {
            "connect_timeout": conf.broker_connection_timeout,
            "heartbeat": conf.broker_heartbeat if heartbeat is None else heartbeat,
            "login_method": conf.broker_login_method,
            "failover_strategy": conf.broker_failover_strategy,
        }
        if conf.broker_use_ssl:
            options["ssl"] = conf.broker_use_ssl
        return connect(
            url or self.read_url,
            directory=self.directory,
            embedded_server=conf.embedded_server,
            transport_options=transport_options,
            redis_transport=conf.broker_redis_transport,
            amqp_transport=conf.broker_amqp_transport,
            **{key: value for key, value in options.items() if value is not None},
        )

    # -- life --------------------------------------------------------------------------

    def set_current(self) -> None:
        """Be the application that is meant when none is named."""
        current.set_current(self)

    set_default = set_current

    def close(self) -> None:
        """Close every connection; the application can be used again afterwards."""
        with self._lock:
            made, self._made = self._made, {}
        for name in ("control", "events", "publisher", "backend"):
            if name in made:
                made[name].close()

    def _renew(self) -> None:
        self.oid = str(uuid.uuid4())
        self.origin = calls.origin()

    def _after_fork(self) -> None:
        # The parent's sockets belong to the parent: they are dropped here, never closed.
        self._lock = threading.RLock()
        self.clock = Clock(self.clock.value, threading.Lock())
        made, self._made = self._made, {}
        backend = made.get("backend")
        if backend is not None:
            backend.after_fork()
            self._made["backend"] = backend
        for name in ("queues", "router"):
            if name in made:
                self._made[name] = made[name]
        if "events" in made:
            self._made["events"] = made["events"].after_fork()
        self._renew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Umbel {self.main}>"


def _watch_forks(app: Umbel) -> None:
    reference = weakref.ref(app)

    def renew() -> None:
        forked = reference()
        if forked is not None:
            forked._after_fork()

    os.register_at_fork(after_in_child=renew)
