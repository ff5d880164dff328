"""Spans for OpenTelemetry: one around sending a task, one around running it, linked by its message.

Switched on with `task_trace_spans`, which needs the package opentelemetry-api; where spans go is
decided by whoever sets up the SDK, in the same process. The context of a message travels as
`traceparent` (W3C) among the caller's own headers, where instrumented Celery peers read and write
it too. What a task sends while it runs, and what follows it (chains, callbacks, retries), belongs
to its span.

Spans are an aid: nothing that goes wrong with them may keep a task from being sent or run. The
SDK keeps that promise for exporters; a context that can not be read begins a new trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from umbel.app.trace import FAILURE, RETRY, Traced, Tracer, traceback_text
from umbel.exceptions import ImproperlyConfigured
from umbel.version import __version__
from umbel.wire.redaction import by_name

if TYPE_CHECKING:
    from umbel.app.calls import Call
    from umbel.app.context import Context
    from umbel.app.umbel import Umbel

SCOPE = "umbel"
FLUSH_MS = 2_000


class Spans:
    """Makes the spans of one application."""

    def __init__(self, app: Umbel) -> None:
        try:
            from opentelemetry import context, propagate, trace
        except ModuleNotFoundError as exc:
            raise ImproperlyConfigured(
                f"task_trace_spans needs the package {exc.name}: pip install 'umbel[otel]'"
            ) from None
        self._context, self._propagate, self._trace = context, propagate, trace
        # Asked for through a proxy: a provider may be set after the application is made.
        self._tracer = trace.get_tracer(SCOPE, __version__)
        self._app = app

    @contextlib.contextmanager
    def sending(self, batch: Sequence[Call]) -> Iterator[None]:
        """Around the publishing of calls; puts the context of its span into each message."""
        spans = [self._begin_send(call) for call in batch]
        try:
            yield
        except BaseException as exc:
            rules = by_name(self._app.conf.task_redact_names)
            shown = _error(rules.text(str(exc)), rules.text(traceback_text(exc)))
            for span in spans:
                span.record_exception(exc, shown)
                span.set_status(self._trace.StatusCode.ERROR, rules.error_repr(exc))
            raise
        finally:
            for span in spans:
                span.end()

    def _begin_send(self, call: Call) -> Any:
        to = call.destination
        span = self._tracer.start_span(
            f"send {call.name}",
            kind=self._trace.SpanKind.PRODUCER,
            attributes={
                **self._about(call.name, call.id, "send"),
                "messaging.destination.name": to.routing_key or to.exchange or "",
            },
        )
        self._propagate.inject(call.message.own, self._trace.set_span_in_context(span))
        return span

    @contextlib.contextmanager
    def running(self, name: str, request: Context) -> Iterator[Any]:
        """Around one run of a task, as a part of what has sent it."""
        sent_by = self._context.get_current()
        if request.headers:
            sent_by = self._propagate.extract(_texts(request.headers), sent_by)
        attributes = {
            **self._about(name, request.id or "", "process"),
            "umbel.task.retries": request.retries,
        }
        if request.hostname:
            attributes["umbel.node"] = request.hostname
        kind = self._trace.SpanKind
        with self._tracer.start_as_current_span(
            f"run {name}",
            context=sent_by,
            kind=kind.INTERNAL if request.is_eager else kind.CONSUMER,
            attributes=attributes,
        ) as span:
            yield span

    def ended(self, span: Any, traced: Traced) -> None:
        """Tell in a span what became of its task."""
        span.set_attribute("umbel.task.state", traced.state)
        if traced.state in (FAILURE, RETRY) and isinstance(traced.value, BaseException):
            cause = getattr(traced.value, "exc", None) if traced.state == RETRY else traced.value
            if isinstance(cause, BaseException):
                span.record_exception(cause, _error(traced.text, traced.traceback))
        if traced.state == FAILURE:
            span.set_status(self._trace.StatusCode.ERROR, traced.text)

    def flush(self) -> None:
        """Send out what is gathered: for a process that is about to end without a word."""
        provider = self._trace.get_tracer_provider()
        flush = getattr(provider, "force_flush", None)  # the SDK's; the bare API gathers nothing
        if flush is not None:
            flush(FLUSH_MS)

    @staticmethod
    def _about(name: str, task_id: str, operation: str) -> dict[str, Any]:
        return {
            "messaging.system": "celery",  # the protocol, whatever carries it
            "messaging.operation.type": operation,
            "messaging.message.id": task_id,
            "umbel.task.name": name,
        }


class SpanTracer(Tracer):
    """A tracer of tasks whose every run is a span."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._spans = Spans(self.app)

    def __call__(self, request: Context, args: Any, kwargs: Any) -> Traced:
        """Run a plain function in a span."""
        with self._spans.running(self.task.name, request) as span:
            traced = super().__call__(request, args, kwargs)
            self._spans.ended(span, traced)
        return traced

    async def run_async(self, request: Context, args: Any, kwargs: Any) -> Traced:
        """Run an `async def` in a span."""
        with self._spans.running(self.task.name, request) as span:
            traced = await super().run_async(request, args, kwargs)
            self._spans.ended(span, traced)
        return traced


def tracer_class(app: Umbel) -> type[Tracer]:
    """What runs the tasks of an application."""
    return SpanTracer if app.conf.task_trace_spans else Tracer


def flusher(app: Umbel) -> Callable[[], None]:
    """What a process that ends without running exit handlers calls last."""
    return (lambda: Spans(app).flush()) if app.conf.task_trace_spans else _nothing


def _nothing() -> None:
    """There are no spans."""


def _error(message: str, stacktrace: str) -> dict[str, str]:
    """What takes the place of the exception's own words, which may hold secrets."""
    return {"exception.message": message, "exception.stacktrace": stacktrace}


def _texts(headers: dict[str, Any]) -> dict[str, str]:
    # Anybody may have written them.
    return {name: value for name, value in headers.items() if isinstance(value, str)}
