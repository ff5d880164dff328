"""The pages about frameworks, tracing and deploying: what they show is built and run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pages import blocks, commands, parse
from tests.servers import free_port, wait_until
from tests.workers import Program, WorkerProcess, program_environment

NAMED = re.compile(r"^# (\S+\.(?:py|yaml|service))\n")


def lay_out(page: str, directory: Path, kind: str = "python") -> list[str]:
    """Write the blocks that begin with the name of a file to such files."""
    names = []
    for block in blocks(page, kind):
        found = NAMED.match(block)
        if found:
            path = directory / found[1].lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
            names.append(found[1])
    return names


def run(directory: Path, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv], cwd=directory, env=program_environment(directory), timeout=100,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (argv, done.stdout, done.stderr)
    return done.stdout


def worker_of(page: str) -> tuple[str, list[str]]:
    """The application and the options of the first worker that a page starts."""
    first = next(one for one in commands(page) if " worker" in one.line)
    words = shlex.split(first.line)
    return words[2], words[4:]


def serve(
    page: str, word: str, start: Callable[..., Program], cwd: Path, *more: str
) -> tuple[str, Program]:
    """Start the server as the page does, but on a free port; its address."""
    (line,) = [one.line for one in commands(page) if word in one.line]
    port = free_port()
    words = shlex.split(line.replace("8000", str(port)))
    program = start([sys.executable, *words[1:], *more], cwd=cwd)
    wait_until(lambda: _listens(port), 30, word)
    return f"http://127.0.0.1:{port}", program


def fetch(url: str, method: str = "GET") -> Any:
    asked = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return json.loads(answer.read())


def test_the_site_of_the_django_page_charges_an_order(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    page = "docs/django.md"
    names = lay_out(page, tmp_path)
    assert {"mysite/background.py", "shop/tasks.py", "manage.py"} <= set(names)
    for line in [one.line for one in commands(page) if "migrat" in one.line]:
        run(tmp_path, *shlex.split(line)[1:])
    app, options = worker_of(page)
    worker = WorkerProcess(app, options, cwd=tmp_path)
    try:
        worker.wait_until_ready()
        url, _ = serve(page, "runserver", start, tmp_path, "--noreload")
        order = fetch(f"{url}/checkout")["order"]
        ask = (
            "import django; django.setup(); from shop.models import Order; "
            f"print(Order.objects.get(pk={order}).paid)"
        )
        told = "import os; os.environ['DJANGO_SETTINGS_MODULE'] = 'mysite.settings'; "
        wait_until(lambda: "True" in run(tmp_path, "-c", told + ask), 30, "the order to be paid")
        # The prefix of the settings was understood.
        limit = run(
            tmp_path, "-c", "from mysite.worker import app; print(app.conf.task_time_limit)"
        )
        assert float(limit) == 60
    finally:
        worker.kill()


def test_the_service_of_the_fastapi_page_sends_looks_and_waits(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    page = "docs/fastapi.md"
    assert lay_out(page, tmp_path) == ["shop.py", "api.py"]
    app, options = worker_of(page)
    worker = WorkerProcess(app, options, cwd=tmp_path)
    try:
        worker.wait_until_ready()
        url, program = serve(page, "uvicorn", start, tmp_path)
        task = fetch(f"{url}/orders/7", "POST")["task"]
        wanted = {"state": "SUCCESS", "result": {"order": 7, "charged": True}}
        wait_until(lambda: fetch(f"{url}/tasks/{task}") == wanted, 20, "the result")
        assert fetch(f"{url}/orders/8/now", "POST") == {"order": 8, "charged": True}
        assert fetch(f"{url}/tasks/nobody-sent-this") == {"state": "PENDING"}
        assert program.stop() in (0, -15)
        assert "Traceback" not in program.output
    finally:
        worker.kill()


def test_the_spans_of_the_tracing_example_are_one_trace_across_processes(tmp_path: Path) -> None:
    page = "docs/integrations.md"
    lay_out(page, tmp_path)
    (call,) = [one for one in commands(page) if " call " in one.line]
    (served,) = [one.line for one in commands(page) if "traced worker" in one.line]
    worker = WorkerProcess("traced", shlex.split(served)[4:], cwd=tmp_path).wait_until_ready()
    done = run(tmp_path, "-m", *shlex.split(call.line))
    sent = _spans(done)
    wait_until(lambda: _is_done(tmp_path), 20, "what it sends to be run")
    worker.stop()
    spans = sent + _spans(worker.output)
    names = sorted(span["name"] for span in spans)
    assert names == ["run traced.pack", "run traced.ship", "send traced.pack", "send traced.ship"]
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    by_name = {span["name"]: span for span in spans}
    parents = {
        "run traced.ship": "send traced.ship",
        "send traced.pack": "run traced.ship",
        "run traced.pack": "send traced.pack",
    }
    for child, parent in parents.items():
        assert by_name[child]["parent_id"] == by_name[parent]["context"]["span_id"]
    assert by_name["send traced.ship"]["parent_id"] is None


def test_lines_of_tasks_carry_their_id_as_the_page_says(tmp_path: Path) -> None:
    lay_out("docs/integrations.md", tmp_path)
    plain, as_json = [
        shlex.split(one.line)[4:]
        for one in commands("docs/integrations.md")
        if "-A billing" in one.line
    ]
    for options in (plain, as_json):
        worker = WorkerProcess("billing", [*options, "-c", "1"], cwd=tmp_path).wait_until_ready()
        try:
            code = (
                "from billing import invoice; r = invoice.delay(7); r.get(timeout=20); print(r.id)"
            )
            task_id = run(tmp_path, "-c", code).strip()
            line = worker.wait_for("invoice 7 has no address").string
        finally:
            worker.kill()
        if options is plain:
            assert f"WARNING billing.invoice[{task_id}] invoice 7 has no address" in line
        else:
            told = json.loads(line)
            assert (told["task_id"], told["task_name"]) == (task_id, "billing.invoice")
            assert (told["level"], told["logger"]) == ("WARNING", "billing")
    run(tmp_path, "own_logs.py")


# -- deploying ---------------------------------------------------------------------------------

UNITS = blocks("docs/deploying.md", "ini")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: NAMED.match(unit)[1].rpartition("/")[2])
def test_units_of_systemd_are_right(unit: str, tmp_path: Path) -> None:
    read = ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read_string(unit)
    assert set(read) == {"DEFAULT", "Unit", "Service", "Install"}
    words = shlex.split(read["Service"]["ExecStart"].replace("%i", "w1").replace("%H", "host"))
    assert words[0] == "/srv/shop/.venv/bin/umbel"
    parse(["umbel", *words[1:]])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not here")
    name = NAMED.match(unit)
    assert name is not None
    path = tmp_path / name[1].rpartition("/")[2].replace("@.", "@w1.")
    # Neither the program nor the user is on this machine.
    path.write_text(unit.replace(words[0], "/bin/true").replace("User=shop", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert path.name not in done.stderr + done.stdout, done.stderr
    # A wrong word would have been told.
    path.write_text(path.read_text().replace("Restart=", "Restrat="))
    worse = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Restrat" in worse.stderr


def test_the_compose_file_is_right() -> None:
    (text,) = blocks("docs/deploying.md", "yaml")
    read = yaml.safe_load(text)
    services = read["services"]
    assert set(services) == {"redis", "worker", "recorder", "dashboard"}
    allowed = {
        "build", "command", "depends_on", "environment", "healthcheck", "image", "ports", "restart",
        "secrets", "stop_grace_period", "user", "volumes",
    }  # fmt: skip
    for name, service in services.items():
        assert set(service) <= allowed, name
        assert ("image" in service) != ("build" in service), name
        assert set(service.get("depends_on", {})) <= set(services)
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in services[needed]
        assert set(service.get("secrets", ())) <= set(read["secrets"])
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source.startswith("./") or source in read["volumes"]
        if name != "redis":
            words = shlex.split(service["command"])
            parse(words)
            assert service["environment"]["UMBEL_BROKER_URL"].startswith("redis://redis/")
    # Never to the whole world without somebody's wish.
    assert services["dashboard"]["ports"] == ["127.0.0.1:5577:5577"]
    (image,) = blocks("docs/deploying.md", "dockerfile")
    assert [line.split()[0] for line in image.splitlines()[1:]] == [
        "FROM", "RUN", "WORKDIR", "COPY",
    ]  # fmt: skip


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _spans(output: str) -> list[dict[str, Any]]:
    """The objects that the console's exporter has printed among other lines."""
    read = json.JSONDecoder().raw_decode
    starts = [match.start() for match in re.finditer(r"^\{", output, re.MULTILINE)]
    return [read(output[start:])[0] for start in starts]


def _is_done(directory: Path) -> bool:
    code = (
        "from traced import app; asked = app.control.inspect(timeout=5); "
        "print(sum(len(one) for told in (asked.active(), asked.reserved()) "
        "for one in told.values()))"
    )
    return run(directory, "-c", code).split()[-1:] == ["0"]
