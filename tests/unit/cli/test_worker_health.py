"""Health checks: the file and the port."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.servers import wait_until
from umbel.exceptions import ImproperlyConfigured
from umbel.worker.observe import endpoint
from umbel.worker.observe.health import HealthFile, HealthServer


class FakeWorker:
    live = True
    ready = True
    refused_queues: ClassVar[dict[str, str]] = {}

    def is_live(self, patience_s: float) -> bool:
        return self.live

    def is_ready(self) -> bool:
        return self.ready


@pytest.fixture
def patient() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def server(patient: FakeWorker) -> Iterator[HealthServer]:
    server = HealthServer(patient, 0)
    server.start()
    yield server
    server.stop()


def ask(server: HealthServer, path: str) -> tuple[int, dict[str, object]]:
    url = f"http://127.0.0.1:{server.port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def raw(server: HealthServer, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(data)
        received = b""
        while chunk := sock.recv(4096):
            received += chunk
        return received


def test_the_port_tells_live_and_ready_apart(server: HealthServer, patient: FakeWorker) -> None:
    assert ask(server, "/live") == (200, {"live": True})
    assert ask(server, "/ready?x=1") == (200, {"ready": True})
    patient.ready = False
    assert ask(server, "/live")[0] == 200
    assert ask(server, "/ready") == (503, {"ready": False})
    patient.ready, patient.live = True, False
    assert ask(server, "/live") == (503, {"live": False})
    assert ask(server, "/ready") == (503, {"ready": False})


def test_other_questions_are_refused(server: HealthServer) -> None:
    assert ask(server, "/")[0] == 404
    assert raw(server, b"POST /live HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405")
    head = raw(server, b"HEAD /live HTTP/1.0\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert head.endswith(b"\r\n\r\n")


def test_garbage_does_no_harm(server: HealthServer) -> None:
    assert raw(server, b"\0\xff\n\n").startswith(b"HTTP/1.1 400")
    assert raw(server, b"\n\n").startswith(b"HTTP/1.1 400")
    for data in (b"", b"x" * 100_000):
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock,
            contextlib.suppress(OSError),  # it hangs up on us, as it should
        ):
            sock.sendall(data)
    assert ask(server, "/live")[0] == 200


def test_silent_clients_do_not_keep_others_out(server: HealthServer) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
        for _ in range(endpoint.CONNECTIONS_MAX * 3)
    ]
    try:
        assert ask(server, "/live")[0] == 200
    finally:
        for sock in silent:
            sock.close()


def test_a_silent_client_is_dropped_in_time(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "CLIENT_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        assert sock.recv(1) == b""


def test_an_answer_costs_less_than_ten_milliseconds_of_cpu(server: HealthServer) -> None:
    ask(server, "/live")
    before = time.process_time()
    for _ in range(50):
        raw(server, b"GET /ready HTTP/1.1\r\n\r\n")  # our own side of it counts too
    assert (time.process_time() - before) / 50 < 0.010


def test_a_port_that_is_taken_is_refused(server: HealthServer, patient: FakeWorker) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"health port {server.port} can not be opened"):
        HealthServer(patient, server.port).start()


def test_the_port_is_free_after_stop(server: HealthServer, patient: FakeWorker) -> None:
    server.stop()
    again = HealthServer(patient, server.port)
    again.start()
    again.stop()


def test_the_file_is_there_while_the_worker_is_well(patient: FakeWorker, tmp_path: Path) -> None:
    path = tmp_path / "health"
    patient.ready = False
    file = HealthFile(patient, str(path), interval_s=0.01)
    file.start()
    assert not path.exists()
    patient.ready = True
    file.renew()
    wait_until(path.exists, what="the health file")
    assert json.loads(path.read_text())["pid"] == os.getpid()
    first = path.stat().st_mtime_ns
    wait_until(lambda: path.stat().st_mtime_ns > first, what="the file to be renewed")
    patient.live = False
    wait_until(lambda: not path.exists(), what="the file to go")
    patient.live = True
    wait_until(path.exists, what="the file to be back")
    file.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_file_left_by_a_killed_worker_is_taken_over(patient: FakeWorker, tmp_path: Path) -> None:
    path = tmp_path / "health"
    path.write_text('{"umbel_health": "ready", "pid": 1}')
    patient.ready = False
    file = HealthFile(patient, str(path), interval_s=10)
    file.start()
    assert not path.exists()
    file.stop()


@pytest.mark.parametrize("foreign", ["file", "directory"])
def test_what_is_not_ours_is_never_overwritten(
    patient: FakeWorker, tmp_path: Path, foreign: str
) -> None:
    path = tmp_path / "precious"
    if foreign == "file":
        path.write_text("data")
    else:
        path.mkdir()
    with pytest.raises(ImproperlyConfigured, match="exists and is no health file"):
        HealthFile(patient, str(path)).start()
    assert path.exists()


def test_a_place_that_can_not_be_written_is_refused(patient: FakeWorker) -> None:
    with pytest.raises(ImproperlyConfigured, match="can not be written: No such file"):
        HealthFile(patient, "/no/such/place/health").start()
