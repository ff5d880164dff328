"""What becomes of running tasks when the connection is lost: let run, or cancelled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sites import Site
from tests.workers import WorkerProcess


def cut(site: Site, request: pytest.FixtureRequest, worker: WorkerProcess) -> None:
    """Close the worker's connections from the broker's side, and wait for the next one."""
    lines = len(worker.lines)
    if site.broker_url.startswith("redis"):
        server = request.getfixturevalue("redis_server")
        # The one that messages are taken through, and not those of tasks at their gates.
        for client in server.client().client_list():
            if "t" in client["flags"]:  # it is told of changes
                server.client().client_kill_filter(_id=client["id"], skipme=True)
    else:
        request.getfixturevalue("rabbitmq_server").close_connections()
    worker.wait_for("onnection to .* lost", start=lines)
    worker.wait_for(r"\bready\b", start=lines)


def start(site: Site, cancel: bool) -> WorkerProcess:
    settings: dict[str, Any] = {"worker_cancel_long_running_tasks_on_connection_loss": cancel}
    return site.worker("prefork", settings=settings)


def test_a_late_acknowledged_task_whose_delivery_is_void_is_cancelled_and_runs_again(
    site: Site, request: pytest.FixtureRequest
) -> None:
    """On RabbitMQ; on Redis a message outlives the connection, so nothing is cancelled."""
    if site.broker_url.startswith("redis"):
        worker = start(site, cancel=True)
        result = site.send("wait_late", "late")
        site.wait_until_begun("late")
        cut(site, request, worker)
        site.open_gate("late")
        assert result.get(timeout=30) == "late", "its message stayed with the worker"
        assert site.runs("late") == 1
        assert worker.stop() == 0
        assert site.waiting() == 0
        return
    worker = start(site, cancel=True)
    result = site.send("wait_late", "late")
    early = site.send("wait", "early")
    first = site.wait_until_begun("late")
    site.wait_until_begun("early")
    cut(site, request, worker)
    assert worker.wait_for(r"Task .*wait_late.* is cancelled: its message will be delivered again")
    second = site.wait_until_begun("late")
    assert first != second, "the process of the first run was ended"
    assert result.state == "PENDING", "it was not revoked: it goes on"
    site.open_gate("late")
    site.open_gate("early")
    assert result.get(timeout=30) == "late"
    assert early.get(timeout=30) == "early", "nobody would run it again"
    assert (site.runs("late"), site.runs("early")) == (2, 1)
    assert site.works()
    assert worker.stop() == 0
    assert site.waiting() == 0
    assert "REVOKED" not in worker.output
    assert "Traceback" not in worker.output


def test_a_late_acknowledged_task_runs_to_its_end_where_nothing_is_cancelled(
    site: Site, request: pytest.FixtureRequest
) -> None:
    """RabbitMQ delivers its message again, which it adopts; Redis leaves it with the worker."""
    worker = start(site, cancel=False)
    result = site.send("wait_late", "late")
    site.wait_until_begun("late")
    cut(site, request, worker)
    if site.broker_url.startswith("amqp"):
        worker.wait_for(r"wait_late\[[-0-9a-f]+\] was delivered again and goes on")
    site.open_gate("late")
    assert result.get(timeout=30) == "late"
    assert site.works()
    assert site.runs("late") == 1
    assert worker.stop() == 0, "an acknowledgement on the wrong channel would end the connection"
    assert site.waiting() == 0
    assert worker.output.count("lost: ") == 1
    assert "Traceback" not in worker.output
