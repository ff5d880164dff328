"""The metrics of real workers, asked over HTTP."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.inside import Inside
from tests.servers import wait_until
from tests.sites import APP, Site
from tests.workers import WorkerProcess, run_umbel
from umbel import Umbel
from umbel.worker.observe.metrics import PAGE_AGE_MIN_S, Metrics

POOLS = ["prefork", "threads", "gevent", "asyncio", "solo"]


class Scraper:
    """Asks one worker."""

    def __init__(self, process: WorkerProcess) -> None:
        self.address = process.wait_for(r"metrics at (http://[\d.]+:\d+)/metrics")[1]

    def page(self, path: str = "/metrics") -> str:
        with urllib.request.urlopen(self.address + path, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def value(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.page()):
            for sample in family.samples:
                if sample.name == f"umbel_{name}" and sample.labels == labels:
                    return sample.value
        return 0.0

    def wait_for(self, expected: float, name: str, **labels: str) -> None:
        what = f"{name}{labels} to be {expected}"
        wait_until(lambda: self.value(name, **labels) == expected, 10 + PAGE_AGE_MIN_S, what)

    def finished(self, task: str, state: str, count: int) -> None:
        self.wait_for(count, "tasks_finished_total", task=f"{APP}.{task}", state=state)


@pytest.mark.parametrize("pool", POOLS)
def test_tasks_are_counted_whatever_the_pool(redis_site: Site, pool: str) -> None:
    site = redis_site
    process = site.worker(pool, "--metrics-port", "0", concurrency=1 if pool == "solo" else 2)
    scraper = Scraper(process)
    for number in range(5):
        site.send("add", number, 1)
    site.send("fail")
    assert site.send("retry_until", "again", 1).get(timeout=30) == 1
    scraper.finished("add", "SUCCESS", 5)
    scraper.finished("fail", "FAILURE", 1)
    scraper.finished("retry_until", "RETRY", 1)
    scraper.finished("retry_until", "SUCCESS", 1)
    add = f"{APP}.add"
    assert scraper.value("tasks_received_total", task=add) == 5
    assert scraper.value("tasks_started_total", task=add) == 5
    assert scraper.value("task_runtime_seconds_count", task=add) == 5
    assert scraper.value("task_runtime_seconds_sum", task=add) < 5
    assert scraper.value("task_queue_wait_seconds_count", task=add, since="sent") == 5
    assert scraper.value("messages_received_total") == 8
    assert scraper.value("ready") == 1
    assert scraper.value("pool_size") == (1 if pool == "solo" else 2)
    assert re.search(rf'umbel_info{{hostname="celery@.+",pool="{pool}",version=', scraper.page())
    assert process.stop() == 0


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_worker_that_is_busy_answers(redis_site: Site, pool: str) -> None:
    site = redis_site
    process = site.worker(pool, "--metrics-port", "0", concurrency=1)
    scraper = Scraper(process)
    site.send("wait", "t")
    site.wait_until_begun("t")
    scraper.wait_for(1, "tasks_active")
    site.open_gate("t")
    scraper.finished("wait", "SUCCESS", 1)
    assert scraper.value("tasks_active") == 0


def test_messages_that_can_not_be_run_are_counted_by_kind(site: Site) -> None:
    scraper = Scraper(site.worker("threads", "--metrics-port", "0"))
    with site.app.connection() as connection, connection.Producer() as producer:
        for body, headers, kind in (
            (b"{", {"task": f"{APP}.add", "id": "1"}, "application/json"),
            (b"{}", {}, "application/json"),
            (b"x", {"task": f"{APP}.add", "id": "2"}, "application/x-python-serialize"),
        ):
            producer.publish(
                body,
                routing_key="celery",
                headers=headers,
                content_type=kind,
                content_encoding="utf-8",
            )
    site.app.send_task("no.such.task")
    scraper.wait_for(1, "messages_refused_total", kind="unregistered")
    scraper.wait_for(1, "messages_refused_total", kind="undecodable")
    scraper.wait_for(1, "messages_refused_total", kind="unknown-message")
    scraper.wait_for(1, "messages_refused_total", kind="content-disallowed")
    assert site.works()


def test_lost_connections_limits_and_lost_processes_are_counted(redis_site: Site) -> None:
    site = redis_site
    scraper = Scraper(site.worker("prefork", "--metrics-port", "0"))
    site.send("die_late", "t", 1)
    scraper.finished("die_late", "REQUEUED", 1)
    scraper.finished("die_late", "SUCCESS", 1)
    site.send("spin_hard", 30)
    scraper.finished("spin_hard", "FAILURE", 1)
    assert 0.25 < scraper.value("task_runtime_seconds_sum", task=f"{APP}.spin_hard") < 5


def test_a_rebuilt_connection_is_counted(broker_url: str) -> None:
    def tasks(app: Umbel) -> None:
        app.task(name="noop")(lambda: None)

    def measure(worker: Any) -> None:
        worker.metrics = Metrics(worker)

    inside = Inside({"broker_url": broker_url}, tasks, prepare=measure)
    try:
        inside.start()
        inside.break_connection()
        assert b"\numbel_reconnects_total 1.0\n" in inside.worker.metrics.page()  # type: ignore[union-attr]
    finally:
        inside.close()


def test_many_that_ask_at_once_keep_no_task_waiting(redis_site: Site) -> None:
    site = redis_site
    scraper = Scraper(site.worker("threads", "--metrics-port", "0"))
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            assert "umbel_info" in scraper.page()

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    try:
        results = [site.send("add", n, n) for n in range(200)]
        assert [result.get(timeout=30) for result in results] == [2 * n for n in range(200)]
    finally:
        done.set()
        for asker in askers:
            asker.join(20)


# -- the port ------------------------------------------------------------------------------


def test_health_may_be_asked_at_the_same_port(redis_site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = redis_site.worker("threads", "--metrics-port", port, "--health-port", port)
    scraper = Scraper(process)
    assert scraper.address.endswith(port)
    assert scraper.page("/live") == '{"live": true}\n'
    assert scraper.page("/ready") == '{"ready": true}\n'
    assert "umbel_ready 1.0" in scraper.page()
    assert "health checks at" not in process.output


def test_another_address_may_be_set(redis_site: Site) -> None:
    process = redis_site.worker(
        "threads", "--metrics-port", "0", settings={"metrics_address": "127.0.0.2"}
    )
    scraper = Scraper(process)
    assert scraper.address.startswith("http://127.0.0.2:")
    assert "umbel_info" in scraper.page()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text("from umbel import Umbel\napp = Umbel('shop')\n")
    return tmp_path


def test_a_taken_port_is_one_line(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = run_umbel(["-A", "shop", "worker", "--metrics-port", str(port)], cwd=directory)
    assert (ran.process.returncode, ran.lines) == (
        2,
        [f"umbel: metrics port {port} can not be opened: Address already in use; choose another"],
    )


def test_a_missing_library_is_one_line(directory: Path) -> None:
    (directory / "prometheus_client.py").write_text(
        "raise ModuleNotFoundError(name='prometheus_client')\n"
    )
    ran = run_umbel(["-A", "shop", "worker", "--metrics-port", "0"], cwd=directory)
    assert ran.process.returncode == 2
    assert ran.output == (
        "umbel: --metrics-port needs prometheus_client: install it with "
        "pip install 'umbel[metrics]'"
    )
