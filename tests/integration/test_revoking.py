"""Revoked tasks do not run: waiting, held, due later, on a worker that was down."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.ears import Ears
from tests.servers import wait_until
from tests.sites import APP, Site
from tests.workers import WorkerProcess
from umbel.exceptions import TaskRevokedError


def tell(site: Site, command: str, **arguments: Any) -> Any:
    """What the only worker answers."""
    replies = site.app.control.broadcast(command, arguments, reply=True, timeout=5, limit=1)
    assert replies, f"no answer to {command}"
    return next(iter(replies[0].values()))


def test_what_waits_and_what_is_held_is_told_at_once_and_never_runs(site: Site) -> None:
    with Ears(site.broker_url) as ears:
        worker = site.worker("threads", "-E", "--prefetch-multiplier", "2", concurrency=1)
        site.send("wait", "busy")
        site.wait_until_begun("busy")
        waiting = site.send("record", "waiting")
        held = site.send("record", "held", countdown=2)
        stamped = site.send("record", "stamped", stamped_headers=["team"], team=["red"])
        spared = site.send("record", "spared", stamped_headers=["team"], team=["blue"])
        queued = site.send("record", "queued")  # beyond what the worker prefetches
        wait_until(lambda: len(tell(site, "scheduled")) == 1, what="the held one")
        ids = {waiting.id, held.id, queued.id}
        shown = ", ".join(repr(one) for one in sorted(ids))
        assert tell(site, "revoke", task_id=sorted(ids)) == {
            "ok": f"tasks {{{shown}}} flagged as revoked"
        }
        headers = {"team": ["red"]}
        assert tell(site, "revoke_by_stamped_headers", headers=headers) == {
            "ok": f"headers {headers} flagged as revoked, but not terminated"
        }
        assert set(tell(site, "revoked")) == ids
        for result in (waiting, held, queued):
            # Whoever waits is told before the slot is free, or the eta has come.
            with pytest.raises(TaskRevokedError):
                result.get(timeout=30)
        site.open_gate("busy")
        assert spared.get(timeout=30) == 1
        with pytest.raises(TaskRevokedError):
            stamped.get(timeout=30)
        for result in (waiting, held, queued, stamped):
            (event,) = ears.wait_for("task-revoked", uuid=result.id)
            assert (event["terminated"], event["signum"], event["expired"]) == (False, None, False)
            assert result.state == "REVOKED"
        assert site.order() == ["busy", "spared"]
        assert worker.stop() == 0
    assert site.waiting() == 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_runs_is_ended_and_the_next_one_runs(site: Site, pool: str) -> None:
    with Ears(site.broker_url) as ears:
        site.worker(pool, "-E", concurrency=1)
        result = site.send("spin", 60)
        ears.wait_for("task-started", uuid=result.id)
        site.app.control.revoke(result.id)
        assert tell(site, "active")[0]["id"] == result.id, "it is only not begun any more"
        assert tell(site, "terminate", task_id=[result.id, "other"], signal="SIGTERM") == {
            "ok": f"terminate: {result.id}"
        }
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
        (event,) = ears.wait_for("task-revoked", uuid=result.id)
        assert (event["terminated"], event["signum"]) == (True, signal.SIGTERM)
        stamped = site.send("spin", 60, stamped_headers=["team"], team=["red"])
        ears.wait_for("task-started", uuid=stamped.id)
        assert tell(site, "revoke_by_stamped_headers", headers=["team=red"], terminate=True) == {
            "ok": "headers {'team': 'red'} revoked"
        }
        ears.wait_for("task-revoked", uuid=stamped.id)
        assert site.works()


def with_state(site: Site, path: Path) -> WorkerProcess:
    return site.worker("threads", "-n", "keeper@test", "--statedb", str(path))


@pytest.mark.parametrize(
    ("kind", "end"),
    [("redis", signal.SIGTERM), ("redis", signal.SIGKILL), ("amqp", signal.SIGKILL)],
)
def test_what_was_revoked_is_still_so_when_the_worker_comes_back(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, end: int
) -> None:
    """With a state file, whatever became of the worker."""
    site: Site = request.getfixturevalue(f"{kind}_site")
    path = tmp_path / "keeper.db"
    worker = with_state(site, path)
    clock = tell(site, "clock")["clock"]
    revoked = uuid.uuid4().hex
    assert tell(site, "revoke", task_id=revoked) == {
        "ok": f"tasks {{{revoked!r}}} flagged as revoked"
    }
    tell(site, "revoke_by_stamped_headers", headers={"team": "red"})
    os.kill(worker.pid, end)
    worker.wait()
    result = site.send("record", "revoked", task_id=revoked)
    stamped = site.send("record", "stamped", stamped_headers=["team"], team=["red"])
    after = site.send("record", "after")
    again = with_state(site, path)
    again.wait_for("state file .*: 2 revocations")
    assert after.get(timeout=30) == 1
    again.wait_for(rf"Discarding revoked task: {APP}\.record\[{revoked}\]")
    for one in (result, stamped):
        with pytest.raises(TaskRevokedError):
            one.get(timeout=30)
    assert site.order() == ["after"]
    assert tell(site, "revoked") == [revoked]
    assert tell(site, "clock")["clock"] > clock


def test_a_solo_worker_ends_a_task_that_sleeps_and_says_when_it_cannot(redis_site: Site) -> None:
    site = redis_site
    site.worker("solo", concurrency=1)
    sleeping = site.send("sleep_late", "sleeping", 60)
    site.wait_until_begun("sleeping")
    assert tell(site, "revoke", task_id=[sleeping.id], terminate=True) == {
        "ok": f"terminate: {sleeping.id}"
    }
    with pytest.raises(TaskRevokedError):
        sleeping.get(timeout=20)
    grinding = site.send("grind", "grinding", 6_000_000)
    site.wait_until_begun("grinding")
    answer = tell(site, "revoke", task_id=[grinding.id], terminate=True)["ok"]
    assert answer.startswith(f"terminate: {grinding.id} (still running")
    with pytest.raises(TaskRevokedError):
        grinding.get(timeout=60)
    assert site.works()
