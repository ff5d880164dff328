"""Blueprints: order, restart, refusal."""

from __future__ import annotations

from typing import Any

import pytest

from umbel.exceptions import ImproperlyConfigured
from umbel.worker.blueprint import Blueprint, State, Step, sort_steps
from umbel.worker.runtime.steps import CONSUMER_STEPS, WORKER_STEPS


def make(name: str, *requires: str, last: bool = False, fails_at: str = "") -> type[Step]:
    class Made(Step):
        def start(self, parent: Any) -> None:
            parent.append(f"start {name}")
            if fails_at == "start":
                raise OSError(name)

        def stop(self, parent: Any) -> None:
            parent.append(f"stop {name}")
            if fails_at == "stop":
                raise OSError(name)

        def terminate(self, parent: Any) -> None:
            parent.append(f"terminate {name}")

    Made.name, Made.requires, Made.last = name, requires, last
    return Made


def labels(kinds: list[type[Step]]) -> list[str]:
    return [kind.label() for kind in kinds]


def test_steps_start_after_what_they_require_and_stop_in_reverse() -> None:
    seen: list[str] = []
    blueprint = Blueprint("b", [make("C", "B"), make("A"), make("B", "A")])
    blueprint.create(seen)
    blueprint.start(seen)
    blueprint.stop(seen)
    assert seen == ["start A", "start B", "start C", "stop C", "stop B", "stop A"]


def test_steps_without_a_relation_keep_the_order_in_which_they_were_given() -> None:
    assert labels(sort_steps("b", [make("X"), make("A"), make("M")])) == ["X", "A", "M"]


def test_the_last_step_goes_last_wherever_it_was_given() -> None:
    assert labels(sort_steps("b", [make("L", last=True), make("A"), make("B")]))[-1] == "L"


def test_the_consumer_ends_in_its_loop_and_starts_with_its_connection() -> None:
    order = labels(sort_steps("consumer", list(CONSUMER_STEPS)))
    assert order[0] == "Connection"
    assert order[-1] == "Evloop"


def test_the_worker_starts_its_pool_before_it_consumes() -> None:
    order = labels(sort_steps("worker", list(WORKER_STEPS)))
    assert order == ["Timer", "Hub", "Pool", "Autoscaler", "StateDB", "Consumer"]


def test_an_unknown_requirement_is_refused_by_name() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"step 'A' requires 'Nope'.*known steps: A"):
        Blueprint("b", [make("A", "Nope")])


def test_a_cycle_is_refused_by_name() -> None:
    with pytest.raises(ImproperlyConfigured, match="A -> B -> A"):
        Blueprint("b", [make("A", "B"), make("B", "A")])


def test_two_steps_of_one_name_are_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="two steps are called 'A'"):
        Blueprint("b", [make("A"), make("A")])


def test_a_requirement_may_be_a_class_or_a_dotted_path() -> None:
    first = make("First")
    by_class, by_path = make("K"), make("P", "some.module:First")
    by_class.requires = (first,)
    assert labels(sort_steps("b", [by_path, by_class, first]))[0] == "First"


def test_a_step_that_is_not_included_is_neither_started_nor_stopped() -> None:
    seen: list[str] = []
    off = make("Off")
    off.include = lambda self, parent: False  # type: ignore[method-assign]
    blueprint = Blueprint("b", [make("A"), off])
    blueprint.create(seen)
    blueprint.start(seen)
    blueprint.stop(seen)
    assert seen == ["start A", "stop A"]


def test_what_failed_to_start_is_stopped_with_the_rest_and_nothing_after_it_started() -> None:
    seen: list[str] = []
    blueprint = Blueprint("b", [make("A"), make("B", "A", fails_at="start"), make("C", "B")])
    blueprint.create(seen)
    with pytest.raises(OSError, match="B"):
        blueprint.start(seen)
    blueprint.stop(seen)
    assert seen == ["start A", "start B", "stop B", "stop A"]


def test_a_step_that_fails_to_stop_does_not_keep_the_others_from_stopping() -> None:
    seen: list[str] = []
    blueprint = Blueprint("b", [make("A"), make("B", "A", fails_at="stop")])
    blueprint.create(seen)
    blueprint.start(seen)
    blueprint.stop(seen)
    assert seen[-1] == "stop A"
    assert blueprint.state is State.STOPPED


def test_a_restart_stops_and_starts_everything_and_stopping_twice_is_harmless() -> None:
    seen: list[str] = []
    blueprint = Blueprint("b", [make("A"), make("B", "A")])
    blueprint.create(seen)
    blueprint.start(seen)
    blueprint.restart(seen)
    blueprint.stop(seen)
    blueprint.stop(seen)
    half = ["start A", "start B", "stop B", "stop A"]
    assert seen == half + half


def test_a_step_may_end_the_start_of_those_after_it() -> None:
    seen: list[str] = []

    class Quits(Step):
        name = "Quits"

        def start(self, parent: Any) -> None:
            blueprint.stop(parent)

    blueprint = Blueprint("b", [Quits, make("Never", "Quits")])
    blueprint.create(seen)
    blueprint.start(seen)
    assert seen == []


def test_terminating_ends_every_started_step_at_once() -> None:
    seen: list[str] = []
    blueprint = Blueprint("b", [make("A"), make("B", "A")])
    blueprint.create(seen)
    blueprint.start(seen)
    blueprint.stop(seen, terminate=True)
    assert seen[2:] == ["terminate B", "terminate A"]
