"""What a worker tells Prometheus, read back with Prometheus's own parser."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.servers import wait_until
from tests.unit.worker.parts import Message, finish_asides, idle_worker, task_message
from umbel import Umbel, __version__
from umbel.exceptions import ImproperlyConfigured
from umbel.worker.execution.jobs import JobResult
from umbel.worker.observe import endpoint
from umbel.worker.observe import metrics as module
from umbel.worker.observe.endpoint import Answer, Endpoint
from umbel.worker.observe.metrics import OTHER, Metrics
from umbel.worker.observe.refused_input import malformed
from umbel.worker.runtime.delivery_driver import TaskDelivery
from umbel.worker.runtime.worker import Worker

Samples = dict[tuple[Any, ...], float]


def make_worker(**options: Any) -> Worker:
    app = Umbel("unit", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.task(name="early")(lambda: None)
    app.task(name="late", acks_late=True)(lambda: None)
    worker = idle_worker(app, **options)
    worker.stop_wanted.set()  # nothing is dispatched: requests stay where a test can see them
    worker.metrics = Metrics(worker)
    return worker


def close(worker: Worker) -> None:
    worker._aside.shutdown()
    worker.inbox.close()
    worker.app.close()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(module, "PAGE_AGE_MIN_S", 0.0)
    monkeypatch.setattr(module, "PAGE_REST", 0)
    worker = make_worker()
    yield worker
    close(worker)


def samples(worker: Worker) -> Samples:
    """name, task and the values of other labels -> value"""
    assert worker.metrics is not None
    text = worker.metrics.page().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items(), key=_task_first))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _task_first(label: tuple[str, str]) -> tuple[bool, str]:
    return (label[0] != "task", label[0])


def received(worker: Worker, name: str, **fields: Any) -> TaskDelivery:
    message = task_message(name, channel=object(), **fields)
    return taken(worker, message)


def taken(worker: Worker, message: Message) -> TaskDelivery:
    worker.consumer.channel = message.channel
    worker.receiver(message)
    request = next(iter(worker.deliveries.reserved.values()))
    if worker.deliveries.ready:
        worker.deliveries.ready.pop()
        worker.deliveries.in_pool += 1
    return request


def result(state: str, runtime_s: float = 0.1) -> JobResult:
    return JobResult(state, runtime_s, "text", "traceback", detail="undecodable")


def test_what_a_fresh_worker_tells(worker: Worker) -> None:
    found = samples(worker)
    assert found["umbel_info", "unit@test", "solo", __version__] == 1
    assert found["umbel_start_time_seconds",] == worker.started_at
    assert found["umbel_pool_size",] == 1
    assert found["umbel_prefetch_window",] == worker.deliveries.prefetch.window > 0
    assert found["umbel_clock",] == worker.app.clock.value
    for name in (
        "ready", "messages_received_total", "tasks_reserved", "tasks_active", "tasks_held",
        "tasks_parked", "reconnects_total", "watchdog_rebuilds_total", "events_sent_total",
        "events_dropped_total", "clocks_refused_total",
    ):  # fmt: skip
        assert found[f"umbel_{name}",] == 0
    assert not any(len(key) == 2 for key in found)  # nothing by task


def test_numbers_that_the_worker_keeps_anyway_are_read_when_somebody_asks(worker: Worker) -> None:
    class Events:
        sent, lost = 7, 2

    counters, prefetch = worker.counters, worker.deliveries.prefetch
    worker.events = Events()  # type: ignore[assignment]
    counters.received, counters.connections_lost, counters.rebuilt_by_watchdog = 10, 3, 1
    counters.refused.update({"undecodable": 4, "too-big": 1})
    worker.gossip.counts["bad-clock"] = 8
    assert worker.panel is not None
    worker.panel.refused["denied"] = 9
    worker.app.control.mailbox.counts["stale"] = 11
    worker.revocations.counts["bad-life"] = 12
    prefetch.held, prefetch.parked = 5, 6
    worker.app.clock.adjust(40)
    worker.app.clock.adjust("x")
    found = samples(worker)
    assert found["umbel_messages_received_total",] == 10
    assert found["umbel_messages_refused_total", "undecodable"] == 4
    assert found["umbel_messages_refused_total", "too-big"] == 1
    assert found["umbel_events_refused_total", "bad-clock"] == 8
    assert found["umbel_control_refused_total", "denied"] == 9
    assert found["umbel_replies_refused_total", "stale"] == 11
    assert found["umbel_greetings_refused_total", "bad-life"] == 12
    assert malformed(worker) == {
        "tasks": {"undecodable": 4, "too-big": 1},
        "events": {"bad-clock": 8},
        "greetings": {"bad-life": 12},
    }
    assert found["umbel_reconnects_total",] == 3
    assert found["umbel_watchdog_rebuilds_total",] == 1
    assert (found["umbel_tasks_held",], found["umbel_tasks_parked",]) == (5, 6)
    assert (found["umbel_events_sent_total",], found["umbel_events_dropped_total",]) == (7, 2)
    assert (found["umbel_clock",], found["umbel_clocks_refused_total",]) == (41, 1)


def test_a_task_is_counted_when_it_comes_begins_and_ends(worker: Worker) -> None:
    request = received(worker, "early")
    found = samples(worker)
    assert found["umbel_tasks_received_total", "early"] == found["umbel_tasks_reserved",] == 1
    assert found["umbel_tasks_started_total", "early"] == 0
    request.accepted(1, time.monotonic())
    found = samples(worker)
    assert found["umbel_tasks_started_total", "early"] == found["umbel_tasks_active",] == 1
    assert found["umbel_task_queue_wait_seconds_count", "early", "received"] == 1
    request.finished(result("SUCCESS", 0.1))
    found = samples(worker)
    assert found["umbel_tasks_finished_total", "early", "SUCCESS"] == 1
    assert found["umbel_tasks_active",] == found["umbel_tasks_reserved",] == 0
    assert found["umbel_task_runtime_seconds_sum", "early"] == pytest.approx(0.1)
    assert found["umbel_task_runtime_seconds_bucket", "early", "0.05"] == 0
    assert found["umbel_task_runtime_seconds_bucket", "early", "0.1"] == 1
    assert found["umbel_task_runtime_seconds_bucket", "early", "+Inf"] == 1


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (lambda request: request.finished(result("FAILURE")), "FAILURE"),
        (lambda request: request.finished(result("RETRY")), "RETRY"),
        (lambda request: request.finished(result("IGNORED")), "IGNORED"),
        (lambda request: request.finished(result("REJECTED")), "REJECTED"),
        (lambda request: request.finished(result("UNDECODABLE", 0.0)), "UNDECODABLE"),
        (lambda request: request.hard_limit(1.0), "FAILURE"),
        (lambda request: request.terminated(15), "REVOKED"),
        (lambda request: request.lost("signal 9"), "REQUEUED"),
    ],
)
def test_every_end_is_counted_once(
    worker: Worker, end: Callable[[TaskDelivery], None], state: str
) -> None:
    request = received(worker, "late")
    request.accepted(1, time.monotonic())
    end(request)
    finish_asides(worker)
    found = samples(worker)
    ends = {key: count for key, count in found.items() if key[0] == "umbel_tasks_finished_total"}
    assert ends == {("umbel_tasks_finished_total", "late", state): 1}
    assert found["umbel_task_runtime_seconds_count", "late"] == 1


def test_a_task_that_was_dropped_with_its_connection_is_cancelled(worker: Worker) -> None:
    request = received(worker, "late")
    request.accepted(1, time.monotonic())
    request.cancelled = True
    request.terminated(15)
    assert samples(worker)["umbel_tasks_finished_total", "late", "CANCELLED"] == 1


def test_a_task_that_never_ran_has_no_runtime(worker: Worker) -> None:
    expired = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    worker.receiver(task_message("early", expires=expired))
    finish_asides(worker)
    found = samples(worker)
    assert found["umbel_tasks_received_total", "early"] == 1
    assert found["umbel_tasks_finished_total", "early", "REVOKED"] == 1
    assert found["umbel_task_runtime_seconds_count", "early"] == 0


# -- waiting -------------------------------------------------------------------------------


def waited(worker: Worker, after_s: float, message: Message) -> dict[str, float]:
    """since -> seconds, of a task that begins so long after its receipt."""
    request = taken(worker, message)
    assert request.received_at is not None
    request.accepted(1, request.received_at + after_s)
    name = "umbel_task_queue_wait_seconds_sum"
    return {key[2]: value for key, value in samples(worker).items() if key[0] == name}


def stamped(stamp: Any, **fields: Any) -> Message:
    message = task_message("early", channel=object(), **fields)
    message.headers["timestamp_in_ms"] = stamp
    return message


def test_a_wait_counts_from_the_receipt(worker: Worker) -> None:
    message = task_message("early", channel=object())
    assert waited(worker, 2.0, message) == {"received": pytest.approx(2.0)}


def test_a_wait_counts_from_the_eta(worker: Worker) -> None:
    eta = (datetime.now(UTC) + timedelta(seconds=10)).isoformat()
    message = task_message("early", channel=object(), eta=eta)
    assert waited(worker, 12.0, message) == {"received": pytest.approx(2.0, abs=0.5)}


def test_a_wait_counts_from_the_brokers_stamp_where_there_is_one(worker: Worker) -> None:
    message = stamped(int((time.time() - 60) * 1000))
    assert waited(worker, 2.0, message) == {"sent": pytest.approx(62.0, abs=0.5)}


@pytest.mark.parametrize("stamp", [0, -1, 2**63, 10**400, True, "1", None, "tomorrow"])
def test_a_stamp_that_can_not_be_right_does_not_count(worker: Worker, stamp: Any) -> None:
    if stamp == "tomorrow":
        stamp = int(time.time() * 1e3) + 10**7
    assert waited(worker, 2.0, stamped(stamp)) == {"received": pytest.approx(2.0)}


# -- bounds --------------------------------------------------------------------------------


def test_names_beyond_the_bound_are_counted_together(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TASK_NAMES_MAX", 2)
    for number in range(5):
        worker.app.task(name=f"task-{number}")(lambda: None)
        received(worker, f"task-{number}").finished(result("SUCCESS"))
    found = samples(worker)
    names = {key[1] for key in found if key[0] == "umbel_tasks_received_total"}
    assert names == {"task-0", "task-1", OTHER}
    assert found["umbel_tasks_finished_total", OTHER, "SUCCESS"] == 3


def test_names_that_prometheus_can_not_take_do_not_spoil_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PAGE_AGE_MIN_S", 0.0)
    monkeypatch.setattr(module, "PAGE_REST", 0)
    worker = make_worker(hostname="a\udc80b@c")
    try:
        name = 'a "quoted"\n\\name'
        worker.app.task(name=name)(lambda: None)
        received(worker, name)
        found = samples(worker)
        assert found["umbel_tasks_received_total", name] == 1
        assert found["umbel_info", "a?b@c", "solo", __version__] == 1
    finally:
        close(worker)


@pytest.mark.parametrize("name", ["PAGE_AGE_MIN_S", "PAGE_REST"])
def test_a_page_is_made_once_however_many_ask(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert worker.metrics is not None
    pages = []
    monkeypatch.setattr(module, "generate_latest", lambda _: pages.append(1) or b"page")
    monkeypatch.setattr(module, name, 1e9)
    assert {worker.metrics.page() for _ in range(100)} == {b"page"}
    assert pages == [1]


def test_workers_in_one_process_count_for_themselves(worker: Worker) -> None:
    other = make_worker()
    try:
        received(other, "early")
        assert ("umbel_tasks_received_total", "early") not in samples(worker)
        assert samples(other)["umbel_tasks_received_total", "early"] == 1
    finally:
        close(other)


# -- the port ------------------------------------------------------------------------------

LONG = b"x" * 5_000_000  # more than any socket buffer takes


@pytest.fixture
def port(worker: Worker) -> Iterator[Endpoint]:
    assert worker.metrics is not None

    def fail() -> Answer:
        raise ValueError("on purpose")

    def answer_at_length() -> Answer:
        return Answer(HTTPStatus.OK, LONG, "text/plain")

    routes = {**worker.metrics.routes(), "/long": answer_at_length, "/bad": fail}
    port = Endpoint("metrics", 0, routes)
    port.start()
    yield port
    port.stop()


def ask(port: Endpoint, path: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port.port}{path}", timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def test_the_port_answers_in_prometheus_text_format(port: Endpoint) -> None:
    status, kind, body = ask(port, "/metrics?x=1")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b"# TYPE umbel_tasks_finished_total counter" in body
    assert ask(port, "/")[0] == 404


def test_an_answer_longer_than_a_socket_takes_arrives_whole(port: Endpoint) -> None:
    assert ask(port, "/long")[2] == LONG


def test_clients_that_do_not_read_keep_nobody_out(port: Endpoint) -> None:
    lazy = []
    try:
        for _ in range(endpoint.CONNECTIONS_MAX * 2):
            sock = socket.create_connection(("127.0.0.1", port.port), timeout=5)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(b"GET /long HTTP/1.1\r\n\r\n")
            lazy.append(sock)
        assert ask(port, "/metrics")[0] == 200
        assert len(port._clients) <= endpoint.CONNECTIONS_MAX
    finally:
        for sock in lazy:
            sock.close()


def test_a_client_that_does_not_read_is_dropped_in_time(
    port: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", port.port), timeout=5) as sock:
        sock.sendall(b"GET /long HTTP/1.1\r\n\r\n")
        assert sock.recv(1) == b"H"
        wait_until(lambda: not port._clients, what="the client to be dropped")


def test_an_answer_that_fails_is_logged_once_and_ends_nothing(
    port: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    assert [ask(port, "/bad")[0] for _ in range(3)] == [500, 500, 500]
    assert [record.getMessage() for record in caplog.records] == ["/bad could not be answered"]
    assert ask(port, "/metrics")[0] == 200


def test_a_place_that_is_not_to_be_had_is_refused(port: Endpoint) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"metrics port {port.port} can not be opened"):
        Endpoint("metrics", port.port, {}).start()
    with pytest.raises(ImproperlyConfigured, match=r"port 0 of 203.0.113.1 can not be opened"):
        Endpoint("metrics", 0, {}, "203.0.113.1").start()


def test_the_port_may_be_on_another_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    port = Endpoint("metrics", 0, {}, "::1")
    port.start()
    socket.create_connection(("::1", port.port), timeout=5).close()
    port.stop()


STARVED = """
import json, logging, os, resource, socket, sys, time
from http import HTTPStatus
from umbel.worker.observe.endpoint import Endpoint, json_answer

logging.basicConfig(stream=sys.stdout, format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
port = Endpoint("health", 0, {"/": lambda: json_answer(HTTPStatus.OK, {})})
port.start()
client = socket.socket()
client.settimeout(20)
files = []
try:
    while True:
        files.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
client.connect(("127.0.0.1", port.port))
began, used = time.monotonic(), time.process_time()
client.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
client.settimeout(0.8)
try:
    client.recv(1)
except TimeoutError:
    pass
print("load", (time.process_time() - used) / (time.monotonic() - began))
for file in files:
    os.close(file)
client.settimeout(20)
print(client.recv(100).split(b"\\r\\n")[0])
port.stop()
"""


def test_a_port_without_files_left_neither_turns_without_end_nor_fills_the_log() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=60, check=True
    )
    lines = ran.stdout.splitlines()
    assert lines[0] == "the health port accepts nobody for now: Too many open files"
    name, load = lines[1].split()
    assert name == "load"
    assert float(load) < 0.1
    assert lines[2:] == ["b'HTTP/1.1 200 OK'"]
