"""What a worker was asked to be: names, and settings under options."""

from __future__ import annotations

import os
import socket

import pytest

from umbel import Umbel
from umbel.exceptions import ImproperlyConfigured
from umbel.worker.runtime.options import WorkerOptions, node_name, plan_for


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box.example.org")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, "celery@box.example.org"),
        ("w1", "w1@box.example.org"),
        ("w1@elsewhere", "w1@elsewhere"),
        ("w1@%h", "w1@box.example.org"),
        ("w1@%n.%d", "w1@w1.example.org"),
        ("%n@%h", "box@box.example.org"),
        ("w%%1@%d", "w%1@example.org"),
        ("100%@%h", "100%@box.example.org"),
    ],
)
def test_a_node_name_is_completed_and_its_marks_are_filled_in(given: str, name: str) -> None:
    assert node_name(given) == name


def test_options_go_over_settings_and_settings_over_defaults() -> None:
    app = Umbel("plan", set_as_current=False, worker_concurrency=3, task_time_limit=60)
    plan = plan_for(app, WorkerOptions(pool="threads", time_limit=9))
    assert (plan.concurrency, plan.time_limit_s, plan.soft_time_limit_s) == (3, 9, None)
    assert plan.prefetch_multiplier == 4


def test_a_solo_worker_has_a_concurrency_of_one() -> None:
    app = Umbel("plan", set_as_current=False)
    assert plan_for(app, WorkerOptions(pool="solo", concurrency=8)).concurrency == 1


def test_a_soft_limit_that_is_not_below_the_hard_one_is_refused() -> None:
    app = Umbel("plan", set_as_current=False, task_time_limit=5)
    with pytest.raises(ImproperlyConfigured, match="not below the hard time limit"):
        plan_for(app, WorkerOptions(pool="threads", soft_time_limit=5))


def test_processes_are_bound_to_the_cpus_that_the_worker_may_use_if_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Umbel("plan", set_as_current=False)
    assert plan_for(app, WorkerOptions()).cpus == ()
    own = tuple(sorted(os.sched_getaffinity(0)))
    assert plan_for(app, WorkerOptions(cpu_affinity=True)).cpus == own
    app.conf.worker_cpu_affinity = True
    assert plan_for(app, WorkerOptions()).cpus == own
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ImproperlyConfigured, match="leave out worker_cpu_affinity"):
        plan_for(app, WorkerOptions())
