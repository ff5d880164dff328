"""What a worker holds of a revoked task is settled at once, and stays away for good."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Queue

from tests.ears import Ears
from tests.inside import Inside
from tests.integration.commanded import Start, Tasks, tell
from tests.servers import RedisServer, wait_until
from tests.sites import APP, Site
from tests.workers import WorkerProcess
from umbel.app.results import AsyncResult
from umbel.exceptions import TaskRevokedError
from umbel.worker.runtime.delivery_driver import TaskDelivery

# Nobody tells a worker what it has missed, and on Redis a dead one's messages come back soon.
ALONE = ("--without-mingle", "--without-gossip")
SHORT = {
    "broker_transport_options": {
        "visibility_timeout": 2.0,
        "unacked_restore_interval": 0.25,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 1,
    }
}


def ask(site: Site, command: str, **arguments: Any) -> Any:
    """What the only worker answers."""
    replies = site.app.control.broadcast(command, arguments, reply=True, timeout=5, limit=1)
    assert replies, f"no answer to {command}"
    return next(iter(replies[0].values()))


def wait_until_held(site: Site, *results: AsyncResult) -> None:
    wanted = {result.id for result in results}
    wait_until(
        lambda: ask(site, "query_task", ids=sorted(wanted)).keys() == wanted, 20, "held tasks"
    )


def wait_until_settled(site: Site) -> None:
    wait_until(lambda: site.taken() == 0, 20, "the messages to be settled")
    assert site.waiting() == 0


def kill(worker: WorkerProcess) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()


@pytest.mark.parametrize("pool", ["threads", "prefork", "gevent", "asyncio"])
def test_a_message_that_waits_in_a_worker_is_settled_when_its_task_is_revoked(
    site: Site, pool: str
) -> None:
    """For its eta, a rate limit, or a place in the pool; acknowledged early or late."""
    with Ears(site.broker_url) as ears:
        args = ("-E", "--prefetch-multiplier", "4", *ALONE)
        worker = site.worker(pool, *args, concurrency=1, settings=SHORT)
        ask(site, "rate_limit", task_name=f"{APP}.add", rate_limit="1/h")
        assert site.works()  # the only one in this hour
        site.send("wait", "busy")
        site.wait_until_begun("busy")
        wait_until(lambda: site.taken() == 0, what="its early acknowledgement")
        stamps = {"stamped_headers": ["team"], "team": ["red"]}
        revoked = [
            site.send("record", "due later", countdown=600),
            site.send("record_late", "due later, late", countdown=600),
            site.send("add", 1, 1),
            site.send("record", "behind"),
            site.send("record_late", "behind, late"),
        ]
        stamped = [
            site.send("record", "stamped, due later", countdown=600, **stamps),
            site.send("record", "stamped, behind", **stamps),
        ]
        wait_until_held(site, *revoked, *stamped)
        ask(site, "revoke", task_id=[result.id for result in revoked])
        ask(site, "revoke_by_stamped_headers", headers={"team": "red"})
        wait_until_settled(site)  # while the pool is still busy
        for result in (*revoked, *stamped):
            with pytest.raises(TaskRevokedError):
                result.get(timeout=20)
            ears.wait_for("task-revoked", uuid=result.id)
        assert ask(site, "scheduled") == ask(site, "reserved") == []
        kill(worker)
        site.worker("threads", *ALONE, settings=SHORT)
        after = site.send("record", "after")
        assert after.get(timeout=30) == 1
        assert site.order() == ["busy", "after"]
        for result in (*revoked, *stamped):
            assert len(ears.of("task-revoked", uuid=result.id)) == 1
            assert result.state == "REVOKED"


def test_a_solo_worker_settles_what_is_revoked_while_it_runs_a_task(redis_site: Site) -> None:
    site = redis_site
    with Ears(site.broker_url) as ears:
        site.worker("solo", "-E", *ALONE)
        held = site.send("record", "held", countdown=600)
        wait_until_held(site, held)
        site.send("wait", "busy")
        site.wait_until_begun("busy")
        ask(site, "revoke", task_id=held.id)
        with pytest.raises(TaskRevokedError):
            held.get(timeout=20)  # although the loop stands still
        site.open_gate("busy")
        wait_until_settled(site)
        assert len(ears.wait_for("task-revoked", uuid=held.id)) == 1
        assert site.works()


@pytest.mark.parametrize("options", [{}, {"countdown": 3}], ids=["behind another", "with an eta"])
def test_what_a_killed_worker_could_not_settle_is_not_started_by_the_next_one(
    site: Site, options: dict[str, Any]
) -> None:
    """Nobody is left who has heard of the revocation: the stored state is all that tells of it."""
    holder = site.worker("threads", *ALONE, concurrency=1, settings=SHORT)
    busy = site.send("wait", "busy")
    site.wait_until_begun("busy")
    wait_until(lambda: site.taken() == 0, what="its early acknowledgement")
    revoked = site.send("record", "revoked", **options)
    kept = site.send("record", "kept", **options)
    wait_until_held(site, revoked, kept)
    holder.signal(signal.SIGSTOP)
    hearer = site.worker("threads", "-Q", "other", *ALONE, settings=SHORT)
    ask(site, "revoke", task_id=revoked.id)
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=20)
    kill(holder)
    kill(hearer)
    second = site.worker("threads", *ALONE, settings=SHORT)
    second.wait_for(rf"Discarding revoked task: {APP}\.record\[{revoked.id}\]")
    assert kept.get(timeout=30) == 1
    assert site.order() == ["busy", "kept"]
    assert (revoked.state, busy.state) == ("REVOKED", "PENDING")
    wait_until_settled(site)


def test_what_another_node_tells_to_be_revoked_is_settled(site: Site, tmp_path: Path) -> None:
    path = str(tmp_path / "keeper.db")
    keeper = site.worker("threads", "-n", "keeper@test", "-Q", "other", "--statedb", path)
    task_id = "told-by-another-node"
    ask(site, "revoke", task_id=task_id)
    assert keeper.stop() == 0
    holder = site.worker("threads", "-n", "holder@test")
    # Its result is ignored, so that the stored state does not tell before the other node does.
    held = site.send("ignored", "held", task_id=task_id, countdown=600)
    wait_until_held(site, held)
    site.worker("threads", "-n", "keeper@test", "-Q", "other", "--statedb", path)
    wait_until_settled(site)
    holder.wait_for(rf"Discarding revoked task: {APP}\.ignored\[{task_id}\]")


def held_in(inside: Inside, count: int) -> None:
    # Without a revocation they would be looked at after a minute.
    wait_until(lambda: inside.worker.deliveries.prefetch.held == count, 40, f"{count} held tasks")


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_thousands_of_held_tasks_are_revoked_together_and_one_by_one(
    request: pytest.FixtureRequest, redis_url: str, commanded: Start, tasks: Tasks, kind: str
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    inside = commanded(url, redis_url)
    client = inside.client
    window = inside.worker.deliveries.prefetch.window
    count, single = 3_000, 100
    sent = client.send_many(client.signature("note", (n,), countdown=600) for n in range(count))
    ids = [result.id for result in sent]
    held_in(inside, count)
    for one in ids[:single]:
        client.control.revoke(one)
    assert tell(inside, "revoke", task_id=ids[single:])
    held_in(inside, 0)
    wait_until(lambda: not inside.worker.busy, 60, "their results")
    worker = inside.worker
    assert worker.deliveries.prefetch.window == window
    assert not worker.deliveries.reserved
    assert not worker.deliveries._by_task_id
    states = client.backend.get_many(ids)
    assert {meta["status"] for meta in states.values()} == {"REVOKED"}
    # Cancelled timers stay in the schedule for a while, and hold nothing.
    gc.collect()
    assert sum(1 for one in gc.get_objects() if isinstance(one, TaskDelivery)) < 10
    assert client.send_task("note", ("after",)).get(timeout=20) is None
    assert tasks.ran == ["after"]
    assert inside.stop() == 0


def test_ordinary_tasks_do_not_read_the_result_backend(
    redis_url: str, redis_server: RedisServer, commanded: Start, tasks: Tasks
) -> None:
    def reads() -> int:
        return int(
            redis_server.client().info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"]
        )

    inside = commanded(redis_url, redis_url)
    before = reads()
    for number in range(50):
        inside.send("note", number)
    wait_until(lambda: len(tasks.ran) == 50, what="all tasks")
    assert reads() == before
    for number in range(50):
        inside.send("note", number, countdown=0.5)
    wait_until(lambda: len(tasks.ran) == 100, what="all tasks")
    assert 0 < reads() - before <= 50


@pytest.fixture
def start_delayed(amqp_url: str, redis_url: str, tasks: Tasks) -> Any:
    made: list[Inside] = []

    def start() -> Inside:
        jobs = Queue(
            "jobs",
            Exchange("jobs", type="topic"),
            routing_key="jobs",
            queue_arguments={"x-queue-type": "quorum"},
        )
        settings = {
            "broker_url": amqp_url,
            "result_backend": redis_url,
            "task_queues": [jobs],
            "task_default_queue": "jobs",
        }
        made.append(Inside(settings, tasks.register, without_mingle=True, without_gossip=True))
        return made[-1].start()

    yield start
    for one in made:
        one.close()


def test_what_waits_in_a_delay_queue_of_the_broker_is_not_started_by_a_later_worker(
    start_delayed: Callable[[], Inside], tasks: Tasks
) -> None:
    first = start_delayed()
    revoked = first.send("note", "revoked", countdown=3)
    kept = first.send("note", "kept", countdown=3)
    assert tell(first, "revoke", task_id=revoked.id)
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=20)
    first.stop()
    second = start_delayed()
    assert kept.get(timeout=30) is None
    again = second.client.AsyncResult(revoked.id)
    wait_until(
        lambda: second.worker.counters.received == 2 and not second.worker.deliveries.reserved
    )
    assert (tasks.ran, again.state) == (["kept"], "REVOKED")
