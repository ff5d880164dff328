"""Short tasks go to pool processes several at a time: what is in a process's hand is not begun."""

from __future__ import annotations

import os
import signal

import pytest

from tests.servers import wait_until
from tests.sites import Site
from umbel.exceptions import TaskRevokedError

WIDE = {"worker_prefetch_multiplier": 16}


def teach(site: Site, task: str) -> None:
    """Let the workers see that such tasks are short."""
    sent = []
    for number in range(30):
        site.open_gate(f"lesson-{number}")
        sent.append(site.send(task, f"lesson-{number}"))
    for result in sent:
        result.get(timeout=30)


def test_tasks_behind_one_that_turns_out_long_run_at_once(redis_site: Site) -> None:
    site = redis_site
    site.worker("prefork", settings=WIDE)
    teach(site, "wait_late")
    long = site.send("wait_late", "long", ignore_result=True)
    tokens = [f"short-{number}" for number in range(12)]
    for token in tokens:
        site.open_gate(token)
        site.send("wait_late", token, ignore_result=True)
    wait_until(lambda: all(site.runs(token) for token in tokens), 20, "the short ones")
    assert [site.runs(token) for token in ("long", *tokens)] == [1] * 13
    assert site.order()[30:].index("long") < 12, "it began among them"
    active = site.app.control.inspect(timeout=5).active() or {}
    assert [one["id"] for tasks in active.values() for one in tasks] == [long.id]
    site.open_gate("long")
    assert site.works()


def test_a_task_that_is_revoked_in_the_hand_of_a_process_does_not_run(redis_site: Site) -> None:
    site = redis_site
    site.worker("prefork", concurrency=1, settings=WIDE)
    teach(site, "wait")
    site.send("wait", "long", ignore_result=True)
    behind = [site.send("wait", f"behind-{number}") for number in range(5)]
    site.wait_until_begun("long")
    wait_until(lambda: site.waiting() == 0, what="a worker that has them all")
    replies = site.app.control.revoke(behind[2].id, reply=True, timeout=5)
    assert len(replies) == 1
    for number in range(5):
        site.open_gate(f"behind-{number}")
    site.open_gate("long")
    for number in (0, 1, 3, 4):
        assert behind[number].get(timeout=30) == f"behind-{number}"
    with pytest.raises(TaskRevokedError):
        behind[2].get(timeout=30)
    assert site.runs("behind-2") == 0


@pytest.mark.parametrize("task", ["wait", "wait_late"])
def test_a_warm_stop_gives_back_what_a_process_has_in_hand(redis_site: Site, task: str) -> None:
    site = redis_site
    worker = site.worker("prefork", concurrency=1, settings=WIDE)
    teach(site, task)
    site.send(task, "long", ignore_result=True)
    site.wait_until_begun("long")
    for number in range(5):
        site.send(task, f"behind-{number}", ignore_result=True)
    wait_until(lambda: site.waiting() == 0, what="a worker that has them all")
    worker.signal(signal.SIGTERM)
    site.wait_until_waiting(5)
    site.open_gate("long")
    assert worker.wait() == 0
    assert [site.runs(f"behind-{number}") for number in range(5)] == [0] * 5
    for number in range(5):
        site.open_gate(f"behind-{number}")
    site.worker("prefork", concurrency=1)
    wait_until(lambda: site.runs("behind-4") == 1, 20, "the next worker")
    assert [token for token in site.order() if token.startswith("behind")] == [
        f"behind-{number}" for number in range(5)
    ]


@pytest.mark.parametrize("task", ["wait", "wait_late"])
def test_a_killed_process_takes_one_task_with_it_and_its_hand_runs_once(
    redis_site: Site, task: str
) -> None:
    site = redis_site
    site.worker("prefork", concurrency=1, settings=WIDE)
    teach(site, task)
    tokens = [f"behind-{number}" for number in range(8)]
    site.send(task, "long", ignore_result=True)
    for token in tokens:
        site.open_gate(token)
        site.send(task, token, ignore_result=True)
    os.kill(site.wait_until_begun("long"), signal.SIGKILL)
    for _ in range(2):  # for a second run; the first may take one with it
        site.open_gate("long")
    wait_until(lambda: all(site.runs(token) for token in tokens), 20, "those behind it")
    wait_until(lambda: site.waiting() == 0 and not site.notes.hlen("unacked"), what="quiet")
    assert [site.runs(token) for token in tokens] == [1] * 8
    assert site.works()
