"""What becomes of a task, end to end: limits, rejections, retries, expiry, states, pools."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.servers import wait_until
from tests.sites import Site
from umbel.exceptions import (
    MaxRetriesExceededError,
    SoftTimeLimitExceeded,
    TaskRevokedError,
    TimeLimitExceeded,
)

POOLS = ["prefork", "threads", "gevent", "asyncio", "solo"]
LIMITING = ["prefork", "threads", "asyncio", "gevent"]


def concurrency_of(pool: str) -> int:
    return 1 if pool == "solo" else 2


# -- time limits ---------------------------------------------------------------------------


@pytest.mark.parametrize("pool", LIMITING)
def test_time_limits_of_the_task_and_of_the_call_hold(redis_site: Site, pool: str) -> None:
    site = redis_site
    worker = site.worker(pool)
    assert site.send("spin_soft", 30).get(timeout=30) == "told to end"
    with pytest.raises(TimeLimitExceeded):
        site.send("spin_hard", 30).get(timeout=30)
    with pytest.raises(SoftTimeLimitExceeded):
        site.send("spin", 30, soft_time_limit=0.2).get(timeout=30)
    with pytest.raises(TimeLimitExceeded):
        site.send("spin", 30, time_limit=0.3).get(timeout=30)
    assert site.send("async_spin", 30, soft_time_limit=0.2).get(timeout=30) == "told to end"
    with pytest.raises(TimeLimitExceeded):
        site.send("async_spin", 30, time_limit=0.3).get(timeout=30)
    assert site.send("spin", 0.05, time_limit=5, soft_time_limit=4).get(timeout=30) == "to the end"
    assert site.works()
    assert worker.stop() == 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_time_limits_of_the_worker_hold_where_the_task_has_none(
    redis_site: Site, pool: str
) -> None:
    site = redis_site
    site.worker(pool, "--soft-time-limit", "0.2", "--time-limit", "5")
    with pytest.raises(SoftTimeLimitExceeded):
        site.send("spin", 30).get(timeout=30)
    assert site.works()


# -- rejected, ignored, unacknowledged -----------------------------------------------------


def test_a_rejected_task_goes_back_to_its_queue_or_away_as_it_asked(site: Site) -> None:
    site.worker("threads")
    again = site.send("reject", "again", True, 2)
    gone = site.send("reject", "gone", False)
    assert again.get(timeout=30) == 3
    assert site.works()
    assert (site.runs("again"), site.runs("gone")) == (3, 1)
    assert gone.state == "PENDING"
    wait_until(lambda: site.waiting() == 0, what="an empty queue")
    wait_until(lambda: site.notes.hlen("unacked") == 0, what="every message to be settled")


def test_an_ignored_task_keeps_the_state_that_it_gave_itself(site: Site) -> None:
    site.worker("threads", concurrency=1)
    ignored = site.send("ignore", "aside")
    assert site.works()
    assert ignored.state == "PUT ASIDE"
    assert ignored.info == {"token": "aside"}
    assert site.runs("aside") == 1


def test_a_failed_task_that_is_not_to_be_acknowledged_is_rejected(site: Site) -> None:
    site.worker("threads", concurrency=1)
    failed = site.send("fail_unacked", "bad")
    with pytest.raises(ValueError, match="on purpose"):
        failed.get(timeout=30)
    assert site.works()
    assert site.runs("bad") == 1
    assert site.waiting() == 0
    wait_until(lambda: site.notes.hlen("unacked") == 0, what="the message to be settled")


# -- retries -------------------------------------------------------------------------------


def test_retries_end_with_success_or_with_the_last_error(site: Site) -> None:
    site.worker("prefork")
    always = site.send("retry_always", "always")
    until = site.send("retry_until", "until", 3)
    bare = site.send("retry_bare")
    assert until.get(timeout=30) == 3
    with pytest.raises(ValueError, match="still wrong"):
        always.get(timeout=30)
    with pytest.raises(MaxRetriesExceededError):
        bare.get(timeout=30)
    assert (site.runs("always"), site.runs("until")) == (3, 4)


def test_errors_that_are_retried_wait_longer_each_time(redis_site: Site) -> None:
    site = redis_site
    site.worker("threads")
    result = site.send("autoretry", "flaky", 3)
    exempt = site.send("autoretry", "exempt", 1, "ConnectionResetError")
    never = site.send("autoretry", "never", 99)
    first, second, third, fourth = result.get(timeout=30)
    assert second - first >= 0.1
    assert third - second >= 0.2
    assert fourth - third >= 0.4
    with pytest.raises(ConnectionResetError):
        exempt.get(timeout=30)
    with pytest.raises(ConnectionError, match="flaky"):
        never.get(timeout=30)
    assert (site.runs("exempt"), site.runs("never")) == (1, 4)


# -- times ---------------------------------------------------------------------------------


def test_tasks_with_an_eta_run_in_the_order_of_their_times(site: Site) -> None:
    site.worker("threads", concurrency=1)
    now = datetime.now(UTC)
    for n, delay_s in enumerate([1.2, 0.6, 0.9, 0.3]):
        site.send("record", f"{n}", eta=now + timedelta(seconds=delay_s))
    site.send("record", "at once")
    last = site.send("record", "past", eta=now - timedelta(days=1))
    last.get(timeout=30)
    assert time.time() < now.timestamp() + 0.9, "a task that is due waited for one that is not"
    wait_until(lambda: len(site.order()) == 6, what="six tasks")
    assert site.order() == ["at once", "past", "3", "1", "2", "0"]
    assert time.time() >= now.timestamp() + 1.2


def test_many_held_tasks_do_not_keep_others_from_running(site: Site) -> None:
    site.worker("threads", concurrency=1)
    for n in range(30):
        site.send("record", f"held-{n}", countdown=3600)
    assert site.works()
    site.wait_until_waiting(0)


def test_held_tasks_do_not_use_up_the_window_of_a_quorum_queue(amqp_site: Site) -> None:
    site = amqp_site
    site.app.conf.task_default_queue_type = "quorum"
    worker = site.worker("threads", concurrency=1, settings={"task_default_queue_type": "quorum"})
    for n in range(10):
        site.send("record", f"held-{n}", countdown=3600)
    assert site.works()
    site.wait_until_waiting(0)
    assert worker.stop() == 0
    site.wait_until_waiting(10)


def test_an_expired_task_is_revoked_without_being_run(site: Site) -> None:
    site.worker("threads", concurrency=1)
    past = datetime.now(UTC) - timedelta(seconds=1)
    expired = site.send("record", "expired", expires=past)
    held = site.send("record", "held", countdown=0.3, expires=0.1)
    for result in (expired, held):
        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(timeout=30)
    assert site.send("record", "fresh", expires=60).get(timeout=30) == 1
    assert (site.runs("expired"), site.runs("held")) == (0, 0)
    assert site.waiting() == 0


# -- states --------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
def test_states_and_results_are_kept_as_the_task_says(redis_site: Site, pool: str) -> None:
    site = redis_site
    site.worker(pool, concurrency=concurrency_of(pool))
    tracked = site.send("tracked", "tracked")
    pid = site.wait_until_begun("tracked")
    assert tracked.state == "STARTED"
    assert tracked.info["pid"] == pid
    site.open_gate("tracked")
    assert tracked.get(timeout=30) == "done"
    progress = site.send("progress", "progress")
    site.wait_until_begun("progress")
    assert (progress.state, progress.info) == ("PROGRESS", {"done": 40, "of": 100})
    site.open_gate("progress")
    assert progress.get(timeout=30) == "done"
    assert site.send("replaced", 20, 22).get(timeout=30) == 42
    ignored = site.send("ignored", "ignored")
    ignored_by_call = site.send("add", 1, 1, ignore_result=True)
    site.wait_until_begun("ignored")
    assert site.works()
    assert (ignored.state, ignored_by_call.state) == ("PENDING", "PENDING")


@pytest.mark.parametrize("pool", POOLS)
def test_coroutine_tasks_run_on_every_pool(redis_site: Site, pool: str) -> None:
    site = redis_site
    site.worker(pool, concurrency=concurrency_of(pool))
    results = [site.send("async_add", n, n) for n in range(10)]
    together = [site.send("async_spin", 0.1) for _ in range(4)]
    assert [result.get(timeout=30) for result in results] == [2 * n for n in range(10)]
    assert [result.get(timeout=30) for result in together] == ["to the end"] * 4
    with pytest.raises(ValueError, match="on purpose"):
        site.send("async_fail").get(timeout=30)
    assert site.send("async_send", 20, 22).get(timeout=30) == 42
    cancelled = site.send("async_cancel")
    with pytest.raises(BaseException, match="on purpose") as caught:
        cancelled.get(timeout=30)
    assert type(caught.value).__name__ == "CancelledError"
    assert site.works()


# -- pool processes ------------------------------------------------------------------------


def test_a_pool_process_is_replaced_after_so_many_tasks(redis_site: Site) -> None:
    site = redis_site
    site.worker("prefork", "--max-tasks-per-child", "3", concurrency=1)
    pids = [site.send("pid").get(timeout=30) for _ in range(9)]
    assert [len(set(pids[n : n + 3])) for n in (0, 3, 6)] == [1, 1, 1]
    assert len(set(pids)) == 3


def test_a_pool_process_is_replaced_when_it_is_too_big(redis_site: Site) -> None:
    site = redis_site
    site.worker("prefork", "--max-memory-per-child", str(200 * 1024), concurrency=1)
    pid = site.send("pid").get(timeout=30)
    assert site.send("pid").get(timeout=30) == pid
    assert site.send("hoard", 200).get(timeout=30) == pid
    assert site.send("pid").get(timeout=30) != pid
