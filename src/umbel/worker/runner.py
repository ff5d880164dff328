"""The far side of a pool: from an order to an outcome.

Runs wherever the pool runs it: a child process, a thread, a greenlet, an event loop. It decodes
the body, builds the request, hands it to the tracer of the task, and turns whatever happens
into an `Outcome`. It raises nothing of its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec import structs

from umbel.app.context import Context
from umbel.app.eager import run_coroutine
from umbel.app.trace import Traced, Tracer
from umbel.wire.limits import Refusal
from umbel.wire.tasks import (
    TaskBody,
    TaskHeader,
    hybrid_header,
    read_body,
    read_header,
    read_v1,
    user_headers,
)
from umbel.worker.orders import Order, Outcome
from umbel.worker.pools.base import disarm_soft_limit, failure_of

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

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
        try:
            tracer = self._tracer(order.task)
            request, body = self.open(order)
        except Refusal as refusal:
            return _refused(refusal)
        except Exception as exc:
            return failure_of(exc, time.monotonic() - started)
        if tracer.task.is_async:
            traced = run_coroutine(lambda: tracer.run_async(request, body.args, body.kwargs))
        else:
            traced = tracer(request, body.args, body.kwargs)
        return _outcome(traced, time.monotonic() - started)

    async def run_async(self, order: Order) -> Outcome:
        """Run an order whose body is an `async def` on the loop of the caller."""
        started = time.monotonic()
        try:
            tracer = self._tracer(order.task)
            request, body = self.open(order)
        except Refusal as refusal:
            return _refused(refusal)
        except Exception as exc:
            return failure_of(exc, time.monotonic() - started)
        traced = await tracer.run_async(request, body.args, body.kwargs)
        return _outcome(traced, time.monotonic() - started)

    def is_async(self, order: Order) -> bool:
        """Whether the body of the order's task is an `async def`."""
        task = self.app.tasks.get(order.task)
        return task is not None and task.is_async

    def _tracer(self, name: str) -> Tracer:
        tracer = self._tracers.get(name)
        if tracer is None:
            task = self.app.tasks[name]
            tracer = Tracer(task, self.app, self.hostname, after_body=disarm_soft_limit)
            self._tracers[name] = tracer
        return tracer

    def open_or_empty(self, order: Order, header: TaskHeader) -> Context:
        """The request of an order; without arguments where its body can not be read."""
        try:
            return self.open(order)[0]
        except Refusal:
            return context_for(order, header, TaskBody([], {}))

    def open(self, order: Order) -> tuple[Context, TaskBody]:
        """Decode an order; raises `Refusal`."""
        if order.decoded is not None:
            header, body = read_v1(order.decoded)
        else:
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
        return context_for(order, header, body), body


def context_for(order: Order, header: TaskHeader, body: TaskBody) -> Context:
    """The request as a task sees it."""
    properties = order.properties
    return Context(
        id=header.id,
        task=header.task,
        args=body.args,
        kwargs=body.kwargs,
        retries=header.retries,
        eta=header.eta,
        expires=header.expires,
        timelimit=header.timelimit,
        group=header.group,
        group_index=header.group_index,
        chord=body.chord,
        chain=body.chain,
        callbacks=body.callbacks,
        errbacks=body.errbacks,
        root_id=header.root_id or header.id,
        parent_id=header.parent_id,
        reply_to=properties.get("reply_to"),
        correlation_id=properties.get("correlation_id"),
        shadow=header.shadow,
        origin=header.origin,
        lang=header.lang,
        argsrepr=header.argsrepr,
        kwargsrepr=header.kwargsrepr,
        ignore_result=header.ignore_result,
        replaced_task_nesting=header.replaced_task_nesting,
        stamped_headers=header.stamped_headers,
        stamps=header.stamps,
        delivery_info=order.delivery_info,
        properties=properties,
        headers=order.headers,
        content_type=order.content_type,
        hostname=order.hostname,
        called_directly=False,
    )


def _given(header: TaskHeader) -> dict[str, Any]:
    return {name: value for name, value in structs.asdict(header).items() if value is not None}


def _outcome(traced: Traced, runtime_s: float) -> Outcome:
    return Outcome(traced.state, runtime_s, traced.text, traced.traceback, traced.requeue)


def _refused(refusal: Refusal) -> Outcome:
    return Outcome(UNDECODABLE, 0.0, refusal.text, "", False, refusal.reason)
