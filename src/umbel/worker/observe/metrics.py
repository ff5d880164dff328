"""What a worker tells Prometheus.

Numbers that a worker keeps for itself are read when somebody asks. Only what becomes of tasks is
counted as it happens, in plain numbers, on the loop thread: a worker without a metrics port has no
`Metrics`, and pays for it with one comparison per turn of a task's life. Everything happens in the
main process whatever the pool is, so nothing has to be added up over processes.

Every worker has a registry of its own. Names of tasks are labels, `TASK_NAMES_MAX` at most: what
comes later counts as `(other)`. However many ask, a page serves for `PAGE_AGE_MIN_S`, and for
`PAGE_REST` times as long as it took to make: so little of the worker's time goes into pages.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from umbel.version import __version__
from umbel.worker.observe.endpoint import Answer, Routes
from umbel.worker.observe.refused_input import refused

if TYPE_CHECKING:
    from umbel.worker.runtime.delivery_driver import TaskDelivery
    from umbel.worker.runtime.worker import Worker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TASK_NAMES_MAX = 1_000
OTHER = "(other)"
PAGE_AGE_MIN_S = 1.0
PAGE_REST = 20
# What is said to have been sent longer ago than this, or later than now, comes from a wrong clock.
WAIT_MAX_S = 30 * 86_400.0
WAIT_MIN_S = -1.0
# Set by RabbitMQ where it was told to (message_interceptors.incoming.set_header_timestamp).
SENT_HEADER = "timestamp_in_ms"

BOUNDS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
)  # fmt: skip
# Metrics of what was refused, by source (`umbel.worker.observe.refused_input`).
_REFUSED: Final = {
    "tasks": ("messages", "Messages that cannot be run, by kind."),
    "control": ("control", "Control messages that were not obeyed, by kind."),
    "events": ("events", "Events of other nodes that were not believed, by kind."),
    "replies": ("replies", "Replies of other nodes that were dropped, by kind."),
    "greetings": ("greetings", "Parts of greetings of other nodes not taken over, by kind."),
}
_LE: Final = (*map(floatToGoString, BOUNDS_S), "+Inf")


class Durations:
    """How long something took, by size."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * len(_LE)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """The counts as Prometheus wants them: each includes the smaller ones."""
        return list(zip(_LE, map(float, accumulate(self.counts[:])), strict=True))


class _Series:
    """The numbers of one task type."""

    __slots__ = ("finished", "received", "runtime", "started", "waits")

    def __init__(self) -> None:
        self.received = 0
        self.started = 0
        self.finished: Counter[str] = Counter()
        self.runtime = Durations()
        self.waits: dict[str, Durations] = {}  # by what they are counted from


class Metrics(Collector):
    """The metrics of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._series: dict[str, _Series] = {}
        self._others = _Series()
        self._page, self._serves_until = b"", float("-inf")
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # -- what happens to tasks (on the loop thread) --------------------------------------

    def received(self, request: TaskDelivery) -> None:
        """A message became a request."""
        request.received_at = time.monotonic()
        self._of(request).received += 1

    def started(self, request: TaskDelivery, when: float) -> None:
        """The pool has begun at the monotonic time `when`."""
        series = self._of(request)
        series.started += 1
        since, wait_s = _wait(request, when)
        waits = series.waits.get(since)
        if waits is None:
            waits = series.waits[since] = Durations()
        waits.observe(wait_s)

    def finished(self, request: TaskDelivery, state: str, runtime_s: float | None = None) -> None:
        """It came to an end; without `runtime_s` it ran until now, if it was started."""
        series = self._of(request)
        series.finished[state] += 1
        if runtime_s is None and request.accepted_at is not None:
            runtime_s = time.monotonic() - request.accepted_at
        if runtime_s is not None:
            series.runtime.observe(runtime_s)

    def _of(self, request: TaskDelivery) -> _Series:
        name = request.header.task
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= TASK_NAMES_MAX:
                return self._others
            series = self._series[name] = _Series()
        return series

    # -- what is asked (on any thread) ---------------------------------------------------

    def routes(self) -> Routes:
        """What to ask a port."""
        return {"/metrics": lambda: Answer(HTTPStatus.OK, self.page(), CONTENT_TYPE)}

    def page(self) -> bytes:
        """All metrics in the text format, as they were a moment ago."""
        begun = time.monotonic()
        if begun >= self._serves_until:
            self._page = generate_latest(self.registry)
            ended = time.monotonic()
            self._serves_until = ended + max(PAGE_AGE_MIN_S, PAGE_REST * (ended - begun))
        return self._page

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        yield from self._of_worker()
        yield from self._of_window()
        yield from self._of_events()
        yield from self._of_tasks()

    def _of_worker(self) -> Iterator[Metric]:
        worker, counters = self._worker, self._worker.counters
        about = {
            "version": __version__,
            "hostname": _printable(worker.plan.hostname),
            "pool": worker.plan.pool,
        }
        yield InfoMetricFamily("umbel", "The worker.", value=about)
        yield _gauge("start_time_seconds", "Unix time at which it was made.", worker.started_at)
        yield _gauge("ready", "Whether it takes messages.", worker.is_ready())
        yield _counter("messages_received", "Messages taken from the broker.", counters.received)
        counts = refused(worker)
        for source, (name, text) in _REFUSED.items():
            family = CounterMetricFamily(f"umbel_{name}_refused", text, labels=["kind"])
            for kind, count in sorted(counts[source].items()):
                family.add_metric([kind], count)
            yield family
        yield _counter(
            "reconnects", "Connections to the broker that were lost.", counters.connections_lost
        )
        yield _counter(
            "watchdog_rebuilds",
            "Those of them that the watchdog gave up because of silence.",
            counters.rebuilt_by_watchdog,
        )

    def _of_window(self) -> Iterator[Metric]:
        worker, deliveries = self._worker, self._worker.deliveries
        prefetch = deliveries.prefetch
        yield _gauge("pool_size", "Tasks that can run at a time.", worker.pool.size)
        yield _gauge(
            "prefetch_window",
            "Messages that it asks for at a time; 0 is no limit.",
            prefetch.window,
        )
        yield _gauge("tasks_reserved", "Tasks received and not settled.", len(deliveries.reserved))
        yield _gauge("tasks_active", "Those of them that run.", len(deliveries.active))
        yield _gauge("tasks_held", "Those of them that wait for their eta.", prefetch.held)
        yield _gauge("tasks_parked", "Those of them that wait for a rate limit.", prefetch.parked)
        yield _gauge(
            "queues_refused",
            "Queues that the broker does not let it consume.",
            len(worker.refused_queues),
        )

    def _of_events(self) -> Iterator[Metric]:
        events, clock = self._worker.events, self._worker.app.clock
        sent, lost = (events.sent, events.lost) if events is not None else (0, 0)
        yield _counter("events_sent", "Events that the broker has taken.", sent)
        yield _counter("events_dropped", "Events that were lost.", lost)
        yield _gauge("clock", "The logical clock.", clock.value)
        yield _counter("clocks_refused", "Received clocks that were out of bounds.", clock.refused)

    def _of_tasks(self) -> Iterator[Metric]:
        received = CounterMetricFamily("umbel_tasks_received", "Tasks received.", labels=["task"])
        started = CounterMetricFamily("umbel_tasks_started", "Tasks begun.", labels=["task"])
        finished = CounterMetricFamily(
            "umbel_tasks_finished",
            "Tasks that came to an end, by state: SUCCESS, FAILURE, RETRY, REVOKED, REJECTED, "
            "IGNORED; UNDECODABLE bodies; REQUEUED with its process lost; CANCELLED with its "
            "connection lost.",
            labels=["task", "state"],
        )
        runtime = HistogramMetricFamily(
            "umbel_task_runtime_seconds", "How long tasks ran.", labels=["task"]
        )
        waits = HistogramMetricFamily(
            "umbel_task_queue_wait_seconds",
            "How long tasks waited until they began: since they were sent where the broker stamps "
            f"messages ({SENT_HEADER}), else since this worker received them; since their eta if "
            "that is later.",
            labels=["task", "since"],
        )
        every = sorted(self._series.copy().items())
        for name, series in [*every, (OTHER, self._others)]:
            if name == OTHER and not series.received:
                continue
            task = _printable(name)
            received.add_metric([task], series.received)
            started.add_metric([task], series.started)
            for state, count in sorted(dict(series.finished).items()):
                finished.add_metric([task, state], count)
            runtime.add_metric([task], series.runtime.buckets(), series.runtime.sum_s)
            for since, wait in sorted(series.waits.copy().items()):
                waits.add_metric([task, since], wait.buckets(), wait.sum_s)
        yield from (received, started, finished, runtime, waits)


def _wait(request: TaskDelivery, when: float) -> tuple[str, float]:
    """How long a request waited until `when`, and since what."""
    received_at = when if request.received_at is None else request.received_at
    headers = request.message.headers
    sent_ms = request.header.umbel_sent
    if sent_ms is None and headers:
        sent_ms = headers.get(SENT_HEADER)
    if sent_ms is None and request.eta_s is None:
        return "received", max(when - received_at, 0.0)
    monotonic_less_unix = time.monotonic() - time.time()
    due_at = float("-inf")
    if request.eta_s is not None:
        due_at = request.eta_s + monotonic_less_unix
    if type(sent_ms) is int and 0 < sent_ms < 2**53:
        wait_s = when - (sent_ms / 1000 + monotonic_less_unix)
        if WAIT_MIN_S <= wait_s <= WAIT_MAX_S:
            return "sent", max(min(wait_s, when - due_at), 0.0)
    return "received", max(when - max(received_at, due_at), 0.0)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"umbel_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"umbel_{name}", text, value=value)


def _printable(label: str) -> str:
    """A label can hold any text that has a UTF-8 form."""
    return label.encode("utf-8", "replace").decode()
