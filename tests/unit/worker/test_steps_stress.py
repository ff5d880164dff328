"""Every step started and stopped in every state, twice, and in random order.

Two subjects. A model blueprint, whose steps fail at random, shows what the blueprint promises.
Our own steps, on the memory transport, show that each of them keeps the same contract: `stop`
and `terminate` are harmless before a start and after a stop, and a start after a stop works.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue

from tests.inside import Inside
from tests.servers import wait_until
from umbel import Umbel
from umbel.worker.blueprint import Blueprint, State, Step
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.worker import Worker

ROUNDS, MOVES = 60, 40


# -- a model -----------------------------------------------------------------------------


class Failure(Exception):
    """On purpose."""


class Model:
    """What its steps do, and what they must never do."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.up: list[str] = []  # in the order in which they were started
        self.broken: list[str] = []
        self.trouble = 0.0
        self.blueprint: Blueprint | None = None

    def maybe_fail(self) -> None:
        if self.dice.random() < self.trouble:
            raise Failure


def kind(name: str, *requires: Any) -> type[Step]:
    class Made(Step):
        def start(self, parent: Model) -> None:
            if name in parent.up:
                parent.broken.append(f"{name} started twice")
            for needed in requires:
                label = needed if isinstance(needed, str) else needed.label()
                if label not in parent.up:
                    parent.broken.append(f"{name} started before {label}")
            parent.up.append(name)
            parent.maybe_fail()
            if parent.dice.random() < parent.trouble:
                assert parent.blueprint is not None
                parent.blueprint.stop(parent)  # as a connection does that is not wanted any more

        def stop(self, parent: Model) -> None:
            if name not in parent.up:
                parent.broken.append(f"{name} stopped without a start")
            elif parent.up[-1] != name:
                parent.broken.append(f"{name} stopped before {parent.up[-1]}")
            with contextlib.suppress(ValueError):
                parent.up.remove(name)
            parent.maybe_fail()

    Made.name, Made.requires = name, requires
    return Made


def model_blueprint() -> Blueprint:
    a = kind("A")
    b = kind("B", a)
    return Blueprint(
        "model", [kind("D", "B", "C"), kind("C", "A"), b, a, kind("E", "D"), kind("F")]
    )


def the_seed() -> int:
    return int(os.environ.get("UMBEL_TEST_SEED", random.SystemRandom().randrange(2**32)))


def test_a_blueprint_keeps_its_promises_in_any_order_of_calls_with_steps_that_fail() -> None:
    seed = the_seed()
    print(f"UMBEL_TEST_SEED={seed}")
    dice = random.Random(seed)
    for _ in range(ROUNDS):
        model, blueprint = Model(dice), model_blueprint()
        model.blueprint = blueprint
        blueprint.create(model)
        model.trouble = dice.choice([0.0, 0.1, 0.4])
        for _ in range(MOVES):
            move: Callable[[Any], None] = dice.choice(
                [
                    blueprint.start,
                    blueprint.stop,
                    lambda parent, own=blueprint: own.stop(parent, terminate=True),
                    blueprint.restart,
                ]
            )
            before = list(model.up)
            with contextlib.suppress(Failure):
                move(model)
                if move == blueprint.start and blueprint.state is State.RUNNING:
                    assert len(model.up) == len(blueprint.steps)
            if move not in (blueprint.start, blueprint.restart):
                assert model.up == [], f"{model.up} outlived a stop of {before}"
        blueprint.stop(model)
        assert model.up == []
        assert model.broken == [], f"seed {seed}"


# -- our own steps -----------------------------------------------------------------------


class Agent:
    """Counts its lives."""

    alive = 0

    def __init__(self, connection: Any) -> None:
        assert connection is not None

    def start(self) -> None:
        Agent.alive += 1

    def stop(self) -> None:
        Agent.alive -= 1


def settings() -> dict[str, Any]:
    quorum = Queue(
        "q", Exchange("q", type="topic"), "q", queue_arguments={"x-queue-type": "quorum"}
    )
    return {
        "broker_url": "memory://",
        "result_backend": "disabled://",
        "task_queues": [Queue("plain"), quorum],
        "worker_agent": Agent,
    }


@pytest.fixture
def worker() -> Iterator[Worker]:
    app = Umbel("stress", set_as_current=False, **settings())
    made = Worker(app, WorkerOptions(pool="threads", concurrency=2))
    made.stop_wanted.set()  # loops return at once
    yield made
    made.blueprint.stop(made, terminate=True)
    made.inbox.close()
    app.close()


def step_names() -> list[tuple[str, str]]:
    app = Umbel("stress", set_as_current=False, **settings())
    made = Worker(app, WorkerOptions(pool="threads", concurrency=1))
    names = [("worker", step.label()) for step in made.blueprint.steps]
    names += [("consumer", step.label()) for step in made.consumer.blueprint.steps]
    made.inbox.close()
    app.close()
    return names


@pytest.mark.parametrize(("of", "name"), step_names(), ids=lambda value: value)
def test_every_step_of_ours_may_be_stopped_in_every_state_and_started_again(
    worker: Worker, of: str, name: str
) -> None:
    parent: Any = worker if of == "worker" else worker.consumer
    step = parent.blueprint.step(name)
    before = parent.blueprint.steps[: parent.blueprint.steps.index(step)]
    endless = name in ("Evloop", "Consumer")  # unless the worker is to stop
    for _ in range(2):
        step.stop(parent)
        step.terminate(parent)
        worker.stop_wanted.clear()  # or nothing would connect
        for other in before:
            other.start(parent)
        if endless:
            worker.stop_wanted.set()
        step.start(parent)
        step.stop(parent)
        step.stop(parent)
        step.terminate(parent)
        for other in reversed(before):
            other.stop(parent)
            other.terminate(parent)
    assert worker.consumer.connection is None
    assert worker.consumer.channel is None
    assert len(worker.timer) == 0
    assert Agent.alive == 0


def test_the_consumer_comes_and_goes_in_any_order_of_calls(worker: Worker) -> None:
    seed = the_seed()
    print(f"UMBEL_TEST_SEED={seed}")
    dice = random.Random(seed)
    consumer = worker.consumer
    blueprint = consumer.blueprint
    worker.pool.start()
    # The loop itself would not return.
    blueprint.steps = [step for step in blueprint.steps if step.label() != "Evloop"]
    worker.stop_wanted.clear()
    for _ in range(150):
        move = dice.choice(["start", "stop", "terminate", "restart", "lost"])
        if move == "lost":
            consumer.lost = True
            worker.driver.connection_lost()
            blueprint.stop(consumer)
            consumer.lost = False
        elif move == "terminate":
            blueprint.stop(consumer, terminate=True)
        else:
            getattr(blueprint, move)(consumer)
        up = move in ("start", "restart")
        assert (consumer.connection is not None) is up, f"seed {seed}"
        assert (consumer.channel is not None) is up, f"seed {seed}"
        assert Agent.alive == int(up), f"seed {seed}"
        assert worker.deliveries.prefetch.window == worker.deliveries.prefetch.base
    blueprint.stop(consumer)
    assert len(worker.timer) == 0


def test_a_worker_may_be_stopped_from_several_threads_at_any_moment() -> None:
    """Warm, cold, twice, before it is ready, while it breaks: it ends, with a code that fits."""
    seed = the_seed()
    print(f"UMBEL_TEST_SEED={seed}")
    dice = random.Random(seed)
    for _ in range(8):
        began = threading.active_count()
        inside = Inside(settings(), lambda app: None, pool=dice.choice(["threads", "solo"]))
        inside.start(wait=dice.random() < 0.5)
        wishes = [dice.random() < 0.3 for _ in range(4)]
        delays_s = [dice.random() * 0.05 for _ in wishes]
        threads = [
            threading.Timer(delay_s, inside.worker.stop, kwargs={"cold": cold})
            for delay_s, cold in zip(delays_s, wishes, strict=True)
        ]
        for thread in threads:
            thread.start()
        if dice.random() < 0.5:
            inside.worker.consumer.failure = ConnectionError("broken by a test")
        code = inside.join()
        for thread in threads:
            thread.join()
        assert code == 1 if all(wishes) else code in (0, 1), f"seed {seed}"
        assert code == 0 or any(wishes), f"seed {seed}"
        assert Agent.alive == 0, f"seed {seed}"
        inside.close()
        wait_until(lambda own=began: threading.active_count() <= own, what="the last thread")
