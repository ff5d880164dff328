"""A live cluster of three workers, a dashboard, and a browser that looks at it."""

from __future__ import annotations

import os
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers import RedisServer, free_port, wait_until
from tests.unit.pipeline.published import World
from tests.workers import ROOT, Program, WorkerProcess

PASSWORD = "correct horse battery"
CHROMIUM = "/usr/bin/chromium"
SHOTS = ROOT / "build" / "screenshots"
TASKS = 5_000


@dataclass
class Cluster:
    """What there is to look at."""

    url: str
    app: Any
    workers: dict[str, WorkerProcess]
    dashboard: Program
    directory: Path
    redis: RedisServer


@pytest.fixture(scope="module")
def cluster(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("shop")
    for db in (200, 201):
        redis_server.client(db).flushdb()
    env = {"SHOP_BROKER": redis_server.url_of(200), "SHOP_BACKEND": redis_server.url_of(201)}
    secret = directory / "secret"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    tables = World(tasks=300).publish(directory / "tables")
    programs: list[Program] = []
    os.environ.update(env)
    try:
        from tests.browser.shop import app

        port = free_port()
        command = ["-m", "umbel", "-A", "tests.browser.shop", "dashboard", "--port", str(port),
                   "--password-file", str(secret), "--tables", str(tables)]  # fmt: skip
        dashboard = Program([sys.executable, *command], cwd=directory, env=env)
        programs.append(dashboard)
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _heard(url), 60, "the dashboard to listen")
        workers = {}
        for name in ("w1", "w2", "w3"):
            queues = "celery,mail" if name == "w3" else "celery"
            args = ["-n", f"{name}@shop", "-P", "threads", "-c", "4", "-E", "-Q", queues]
            args += ["-l", "warning"]
            workers[name] = WorkerProcess("tests.browser.shop", args, cwd=directory, env=env)
            programs.append(workers[name])
        for worker in workers.values():
            worker.wait_until_ready(60)
        yield Cluster(url, app, workers, dashboard, directory, redis_server)
    finally:
        for program in programs:
            program.kill()
        for name in env:
            os.environ.pop(name, None)


def _heard(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=2) as answer:
            return b"connected" in answer.read()
    except OSError:
        return False


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    program = CHROMIUM if Path(CHROMIUM).exists() else shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: run 'make setup'")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page of a browser of its own; whatever it complains of fails the test."""
    context = browser.new_context(viewport={"width": 1360, "height": 860}, base_url=cluster.url)
    made = context.new_page()
    made.set_default_timeout(15_000)
    complaints: list[str] = []
    made.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    made.on("pageerror", lambda exc: complaints.append(str(exc)))
    yield made
    SHOTS.mkdir(parents=True, exist_ok=True)
    context.close()
    assert complaints == []


@pytest.fixture
def admin(page: Any) -> Any:
    page.goto("/login")
    page.fill("#password", PASSWORD)
    page.click("main button")
    page.wait_for_url("**/")
    return page
