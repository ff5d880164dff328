"""The ten consumer steps: their places, requirements and switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue

from umbel import Umbel
from umbel.exceptions import ImproperlyConfigured
from umbel.worker.blueprint import Step, sort_steps
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.steps import CONSUMER_STEPS
from umbel.worker.runtime.worker import Worker

BY_NAME = {kind.label(): kind for kind in CONSUMER_STEPS}
Make = Callable[..., Worker]


@pytest.fixture
def make() -> Iterator[Make]:
    apps: list[Umbel] = []

    def made(
        options: WorkerOptions | None = None, steps: tuple[type[Step], ...] = (), **settings: Any
    ) -> Worker:
        settings = {"broker_url": "memory://", "result_backend": "disabled://", **settings}
        app = Umbel("a", set_as_current=False, **settings)
        apps.append(app)
        app.steps["consumer"].update(steps)
        return Worker(app, options or WorkerOptions(pool="solo"))

    yield made
    for app in apps:
        app.close()


def on(worker: Worker) -> list[str]:
    return [step.label() for step in worker.consumer.blueprint.steps]


def test_there_are_ten_steps_and_each_starts_after_what_it_requires() -> None:
    order = [kind.label() for kind in sort_steps("consumer", list(CONSUMER_STEPS))]
    assert len(order) == 10
    for name, kind in BY_NAME.items():
        for wanted in kind.requires:
            assert order.index(wanted) < order.index(name)
    assert order[-1] == "Evloop"
    assert "Mingle" in BY_NAME["Gossip"].requires
    assert "Events" in BY_NAME["Mingle"].requires


@pytest.mark.parametrize(
    ("step", "option"),
    [
        ("Mingle", "without_mingle"),
        ("Gossip", "without_gossip"),
        ("Heart", "without_heartbeat"),
    ],
)
def test_an_option_switches_a_step_off_by_its_name(make: Make, step: str, option: str) -> None:
    options = WorkerOptions(pool="solo", **{option: True})
    worker = make(options)
    assert step not in on(worker)
    assert BY_NAME[step].why_off(worker.app, options) == "--" + option.replace("_", "-")


def test_remote_control_has_a_setting(make: Make) -> None:
    worker = make(worker_enable_remote_control=False)
    assert "Control" not in on(worker)
    why = BY_NAME["Control"].why_off(worker.app, worker.options)
    assert why == "worker_enable_remote_control"


def test_delayed_delivery_is_on_where_a_quorum_queue_is_declared(make: Make) -> None:
    quorum = Queue(
        "q", Exchange("q", type="topic"), "q", queue_arguments={"x-queue-type": "quorum"}
    )
    assert "DelayedDelivery" not in on(make())
    assert "DelayedDelivery" in on(make(task_queues=[quorum]))
    detected = make(task_queues=[quorum], worker_detect_quorum_queues=False)
    assert "DelayedDelivery" not in on(detected)


class Agent:
    def __init__(self, connection: Any) -> None:
        """Nothing."""


def test_the_agent_is_on_where_one_is_named(make: Make) -> None:
    assert "Agent" not in on(make())
    assert "Agent" in on(make(worker_agent=Agent))
    assert "Agent" in on(make(worker_agent="collections:OrderedDict"))


@pytest.mark.parametrize("name", ["nowhere.Agent", "collections:Agent", "Agent"])
def test_an_agent_that_can_not_be_loaded_is_refused_by_name(make: Make, name: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"worker_agent names '{name}'"):
        make(worker_agent=name)


def test_a_step_of_a_user_may_require_ours_by_class_and_by_name(make: Make) -> None:
    class ByName(Step):
        requires = ("Tasks",)

    class ByPath(Step):
        requires = ("celery.worker.consumer:Tasks",)  # as projects that move over have it

    class ByClass(Step):
        requires = (ByName, BY_NAME["Connection"])

    names = on(make(steps=(ByClass, ByName, ByPath)))
    assert names.index("Tasks") < names.index("ByName") < names.index("ByClass")
    assert names.index("Tasks") < names.index("ByPath")
    assert names[-1] == "Evloop"


def test_a_step_may_stay_out_by_its_own_decision(make: Make) -> None:
    class Shy(Step):
        def include(self, parent: Any) -> bool:
            return False

    assert "Shy" not in on(make(steps=(Shy,)))


def test_what_would_never_start_is_refused_by_name(make: Make) -> None:
    class After(Step):
        requires = ("Evloop",)

    with pytest.raises(ImproperlyConfigured, match="'After' requires 'Evloop', which is always"):
        make(steps=(After,))

    class Last(Step):
        last = True

    with pytest.raises(ImproperlyConfigured, match="only one step can be the last"):
        make(steps=(Last,))
