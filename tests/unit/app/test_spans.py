"""Spans of sending and running, with the real SDK; and that nobody pays who has not asked."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from umbel import Umbel
from umbel.app import spans
from umbel.app.context import Context
from umbel.app.trace import Tracer
from umbel.exceptions import ImproperlyConfigured

EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def provider() -> None:
    """One for the whole process: the API lets it be set once."""
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(made)


@pytest.fixture(autouse=True)
def told() -> Iterator[None]:
    EXPORTER.clear()
    yield
    EXPORTER.clear()


def app_with(**settings: Any) -> Umbel:
    return Umbel("spans", broker="memory://", set_as_current=False, **settings)


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = app_with(task_trace_spans=True)
    yield made
    made.close()


def finished(name: str) -> ReadableSpan:
    (found,) = [span for span in EXPORTER.get_finished_spans() if span.name == name]
    return found


def sent_headers(app: Umbel, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Messages are kept here instead of being published."""
    kept: list[dict[str, Any]] = []
    publisher = app.publisher
    monkeypatch.setattr(publisher, "send", lambda parcel, *_: kept.append(parcel.headers))
    monkeypatch.setattr(
        publisher, "send_many", lambda parcels, *_: kept.extend(one.headers for one in parcels)
    )
    return kept


def run(app: Umbel, name: str, headers: dict[str, Any] | None, *args: Any, **fields: Any) -> Any:
    tracer = spans.tracer_class(app)(app.tasks[name], app, "w1@test")
    request = Context(
        id="task-1", task=name, headers=headers, hostname="w1@test", called_directly=False,
        ignore_result=True, **fields,
    )  # fmt: skip
    if tracer.task.is_async:
        return asyncio.run(tracer.run_async(request, args, {}))
    return tracer(request, args, {})


def test_a_run_belongs_to_the_trace_of_what_sent_it(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="add")
    def add(x: int, y: int) -> int:
        return x + y

    kept = sent_headers(app, monkeypatch)
    with trace.get_tracer("test").start_as_current_span("checkout") as outer:
        sent = add.delay(2, 2)
    assert run(app, "add", kept[0], 2, 2).value == 4
    send, ran = finished("send add"), finished("run add")
    assert send.kind is SpanKind.PRODUCER
    assert ran.kind is SpanKind.CONSUMER
    assert send.parent.span_id == outer.get_span_context().span_id
    assert ran.parent.span_id == send.context.span_id
    assert ran.context.trace_id == outer.get_span_context().trace_id
    assert kept[0]["traceparent"].split("-")[1] == f"{ran.context.trace_id:032x}"
    assert send.attributes["messaging.message.id"] == sent.id
    assert send.attributes["messaging.destination.name"] == "celery"
    assert ran.attributes["umbel.task.state"] == "SUCCESS"
    assert ran.attributes["umbel.node"] == "w1@test"


def test_the_error_in_a_span_has_no_secret(app: Umbel) -> None:
    @app.task(name="fail")
    def fail(text: str) -> None:
        raise OSError(text)

    run(app, "fail", None, "no redis://:hunter2@h with password=hunter2")
    span = finished("run fail")
    (event,) = span.events
    assert event.attributes["exception.type"] == "OSError"
    assert "redis://:**@h with password=**" in event.attributes["exception.message"]
    assert "OSError: no redis://:**@h" in event.attributes["exception.stacktrace"]
    assert "hunter2" not in span.to_json()


def test_what_a_task_sends_belongs_to_its_run(app: Umbel, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task(name="child")
    def child() -> None: ...

    @app.task(name="parent")
    async def parent() -> None:
        child.delay()

    kept = sent_headers(app, monkeypatch)
    run(app, "parent", None)
    assert finished("send child").parent.span_id == finished("run parent").context.span_id
    assert len(kept) == 1


def test_each_call_of_a_batch_has_a_span_of_its_own(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="add")
    def add(x: int) -> int:
        return x

    kept = sent_headers(app, monkeypatch)
    app.send_many([add.s(n) for n in range(3)])
    assert len({headers["traceparent"] for headers in kept}) == 3
    assert len(EXPORTER.get_finished_spans()) == 3


def test_a_failure_is_told_with_its_error(app: Umbel) -> None:
    @app.task(name="fails")
    def fails() -> None:
        raise ValueError("no stock")

    assert run(app, "fails", None).state == "FAILURE"
    span = finished("run fails")
    assert span.status.status_code is StatusCode.ERROR
    assert "no stock" in span.status.description
    assert [event.attributes["exception.type"] for event in span.events] == ["ValueError"]


def test_a_retry_is_no_error_and_goes_on_in_the_same_trace(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="unsteady", bind=True)
    def unsteady(self: Any) -> None:
        raise self.retry(exc=OSError("busy"), countdown=0)

    kept = sent_headers(app, monkeypatch)
    old = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert run(app, "unsteady", old, args=[], kwargs={}).state == "RETRY"
    ran, again = finished("run unsteady"), finished("send unsteady")
    assert ran.status.status_code is StatusCode.UNSET
    assert f"{ran.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert again.parent.span_id == ran.context.span_id
    assert kept[0]["traceparent"].split("-")[2] == f"{again.context.span_id:016x}"


def test_a_message_that_could_not_be_sent_is_told_as_an_error(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="add")
    def add() -> None: ...

    def refuse(*_: Any) -> None:
        raise OSError("no way")

    monkeypatch.setattr(app.publisher, "send", refuse)
    with pytest.raises(OSError, match="no way"):
        add.delay()
    assert finished("send add").status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("broken", ["", "00-zz-zz-01", "x" * 5_000, 7, None, ["a"], {"b": 1}])
def test_a_context_that_can_not_be_read_begins_a_trace(app: Umbel, broken: Any) -> None:
    @app.task(name="add")
    def add() -> int:
        return 1

    assert run(app, "add", {"traceparent": broken, "tracestate": broken}).state == "SUCCESS"
    assert finished("run add").parent is None


def test_inline_runs_are_spans_as_well() -> None:
    app = app_with(task_trace_spans=True, task_always_eager=True)

    @app.task(name="add")
    def add() -> int:
        return 1

    assert add.delay().get() == 1
    assert finished("run add").kind is SpanKind.INTERNAL


def test_nobody_pays_who_has_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with()

    @app.task(name="add")
    def add() -> None: ...

    kept = sent_headers(app, monkeypatch)
    monkeypatch.setattr(propagate, "inject", lambda *_: pytest.fail("asked for a context"))
    add.delay()
    assert "traceparent" not in kept[0]
    assert spans.tracer_class(app) is Tracer
    assert EXPORTER.get_finished_spans() == ()
    assert app._spans([]) is app._spans([])  # nothing is made


def test_without_the_package_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImproperlyConfigured, match=r"pip install 'umbel\[otel\]'"):
        spans.Spans(app_with(task_trace_spans=True))
