"""The far side of a pool: from an order to an outcome.

Runs wherever the pool runs it: a child process, a thread, a greenlet, an event loop. It decodes
the body, builds the request, hands it to the tracer of the task, and turns whatever happens
into an `Outcome`. It raises nothing of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import structs

from umbel.app.context import Context
from umbel.app.spans import tracer_class
from umbel.app.trace import Traced, Tracer, fail
from umbel.wire.compression import decompress
from umbel.wire.content import as_bytes, decode
from umbel.wire.limits import Limits, Refusal
from umbel.wire.tasks import (
    TaskBody,
    TaskHeader,
    hybrid_header,
    read_body,
    read_header,
    read_v1,
    user_headers,
)
from umbel.worker.coroutines import drive
from umbel.worker.orders import Order, Outcome
from umbel.worker.pools.base import OrderEnded, disarm_soft_limit, failure_of

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

try:
    from greenlet import GreenletExit
except ModuleNotFoundError:
    _GREENLET_EXIT: tuple[type[BaseException], ...] = ()
else:
    _GREENLET_EXIT = (GreenletExit,)

logger = logging.getLogger("umbel.task")

UNDECODABLE = "UNDECODABLE"


class Runner:
    """Executes the orders of one application."""

    def __init__(self, app: Umbel, hostname: str) -> None:
        self.app = app
        self.hostname = hostname
        self._tracers: dict[str, Tracer] = {}
        self._accept = app.accept
        self._limits = app.limits

    def __call__(self, order: Order) -> Outcome:
        """Run an order to its end in this thread."""
        started = time.monotonic()
        self._witness(order)
        try:
            tracer = self._tracers.get(order.task) or self._tracer(order.task)
            request, body = self.open(order)
        except Refusal as refusal:
            return _refused(refusal)
        except Exception as exc:  # noqa: BLE001 - becomes the outcome
            return self._unopened(order, exc, started)
        try:
            if tracer.task.is_async:
                traced = drive(lambda: tracer.run_async(request, body.args, body.kwargs))
            else:
                traced = tracer(request, body.args, body.kwargs)
        except Exception as exc:  # noqa: BLE001 - a limit that struck next to the body
            traced = tracer.failed(request, body.args, body.kwargs, exc)
        return self._outcome(traced, time.monotonic() - started)

    async def run_async(self, order: Order) -> Outcome:
        """Run an order whose body is an `async def` on the loop of the caller."""
        started = time.monotonic()
        self._witness(order)
        try:
            tracer = self._tracers.get(order.task) or self._tracer(order.task)
            request, body = self.open(order)
        except Refusal as refusal:
            return _refused(refusal)
        except Exception as exc:  # noqa: BLE001 - becomes the outcome
            return await asyncio.to_thread(self._unopened, order, exc, started)
        traced = await tracer.run_async(request, body.args, body.kwargs)
        return self._outcome(traced, time.monotonic() - started)

    def _witness(self, order: Order) -> None:
        """Where the task runs the clock may be behind the one that sent the order."""
        clock = self.app.clock
        if order.clock > clock.value:
            clock.adjust(order.clock)

    def _outcome(self, traced: Traced, runtime_s: float) -> Outcome:
        return Outcome(
            traced.state,
            runtime_s,
            traced.text,
            traced.traceback,
            traced.requeue,
            clock=traced.clock or self.app.clock.value,
        )

    def is_async(self, order: Order) -> bool:
        """Whether the body of the order's task is an `async def`."""
        task = self.app.tasks.get(order.task)
        return task is not None and task.is_async

    def _tracer(self, name: str) -> Tracer:
        tracer = self._tracers[name] = tracer_class(self.app)(
            self.app.tasks[name],
            self.app,
            self.hostname,
            after_body=disarm_soft_limit,
            ended_by=(OrderEnded, *_GREENLET_EXIT),
        )
        return tracer

    def _unopened(self, order: Order, exc: Exception, started: float) -> Outcome:
        """Not foreseen: the caller is told all the same."""
        try:
            header = order.header or TaskHeader(task=order.task, id=order.id)
            fail(self.app, None, OrderContext(order, header, TaskBody([], {}), self.hostname), exc)
        except Exception:
            logger.exception("task %s[%s]: its failure was not recorded", order.task, order.id)
        return failure_of(exc, time.monotonic() - started)

    def open_or_empty(self, order: Order, header: TaskHeader) -> Context:
        """The request of an order; without arguments where its body can not be read."""
        try:
            return self.open(order)[0]
        except Refusal:
            return OrderContext(order, header, TaskBody([], {}), self.hostname)

    def open(self, order: Order) -> tuple[Context, TaskBody]:
        """Decode an order; raises `Refusal`."""
        if order.header is None and "task" not in order.headers:
            return self._open_v1(order)
        header = order.header or read_header(order.headers)
        body = read_body(
            order.body,
            order.content_type,
            order.content_encoding,
            compression=header.compression,
            accept=self._accept,
            limits=self._limits,
        )
        if body.hybrid is not None:
            header = hybrid_header(_given(header), body.hybrid)
        return OrderContext(order, header, body, self.hostname), body

    def _open_v1(self, order: Order) -> tuple[Context, TaskBody]:
        decoded = order.decoded
        if decoded is None:
            decoded = decode_v1(
                order.body,
                order.content_type,
                order.content_encoding,
                compression=order.headers.get("compression"),
                accept=self._accept,
                limits=self._limits,
            )
        header, body = read_v1(decoded)
        own = structs.replace(order, headers=user_headers(order.headers))
        return OrderContext(own, header, body, self.hostname), body


def decode_v1(
    body: Any,
    content_type: str,
    content_encoding: str,
    *,
    compression: str | None,
    accept: frozenset[str],
    limits: Limits,
) -> Any:
    """The content of a message whose headers tell nothing; raises `Refusal`."""
    if compression:
        body = decompress(as_bytes(body, limits), compression, limits.body_bytes)
    return decode(body, content_type, content_encoding, accept=accept, limits=limits)


class OrderContext(Context):
    """The request as a task sees it; most of it is only looked up when somebody asks."""

    def __init__(self, order: Order, header: TaskHeader, body: TaskBody, hostname: str) -> None:
        self.__dict__ = {
            "id": header.id,
            "task": header.task,
            "args": body.args,
            "kwargs": body.kwargs,
            "chord": body.chord,
            "chain": body.chain,
            "callbacks": body.callbacks,
            "errbacks": body.errbacks,
            "ignore_result": header.ignore_result,
            "headers": order.headers,
            "hostname": hostname,
            "called_directly": False,
            "_told": order.told,
            "_order": order,
            "_header": header,
        }

    def __repr__(self) -> str:
        for name in (*_FROM_HEADER, *_FROM_ORDER):
            getattr(self, name)
        shown = {name: value for name, value in self.__dict__.items() if name[0] != "_"}
        return f"<Context: {shown!r}>"


class _Later:
    """A field of an `OrderContext` that is set when it is first read."""

    def __init__(self, name: str, read: Callable[[Any], Any]) -> None:
        self._name = name
        self._read = read

    def __get__(self, context: OrderContext, owner: type[OrderContext]) -> Any:
        value = context.__dict__[self._name] = self._read(context.__dict__)
        return value


_FROM_HEADER = (
    "retries", "eta", "expires", "timelimit", "group", "group_index", "parent_id", "shadow",
    "origin", "lang", "argsrepr", "kwargsrepr", "replaced_task_nesting", "stamped_headers",
    "stamps",
)  # fmt: skip
_FROM_ORDER = ("reply_to", "correlation_id", "delivery_info", "properties", "content_type")

for _name in _FROM_HEADER:
    setattr(OrderContext, _name, _Later(_name, lambda f, n=_name: getattr(f["_header"], n)))  # type: ignore[misc]
for _name in _FROM_ORDER:
    setattr(OrderContext, _name, _Later(_name, lambda f, n=_name: getattr(f["_order"], n)))  # type: ignore[misc]
OrderContext.root_id = _Later(  # type: ignore[assignment]
    "root_id", lambda fields: fields["_header"].root_id or fields["_header"].id
)


def _given(header: TaskHeader) -> dict[str, Any]:
    return {name: value for name, value in structs.asdict(header).items() if value is not None}


def _refused(refusal: Refusal) -> Outcome:
    return Outcome(UNDECODABLE, 0.0, refusal.text, "", False, refusal.reason)
