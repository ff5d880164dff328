"""Plays of deliveries: no seed may break a rule, and every mutation must be found.

A seed that fails prints itself and the command that repeats it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from umbel.cli.main import run as umbel
from umbel.sim.deliveries.checks import RUNS_ONCE
from umbel.sim.deliveries.mutations import MUTATIONS
from umbel.sim.deliveries.plays import FAULTS, Parts, Setting, play
from umbel.sim.games import DELIVERIES
from umbel.sim.runs import how_to_repeat, run
from umbel.worker.delivery.machine import Deliveries
from umbel.worker.delivery.states import (
    ALLOWED,
    MESSAGE_TRANSITIONS,
    TRANSITIONS,
    MessageState,
    State,
    meanings,
    table,
)

CHUNKS, SEEDS_PER_CHUNK = 10, 500
FOUND_WITHIN = 2_000


def failures(first: int, count: int, setting: Setting) -> list[str]:
    """What failed, and how to repeat it."""
    summary = run(range(first, first + count), setting, game=DELIVERIES)
    return [
        f"{how_to_repeat(one.seed, setting, DELIVERIES)}: {'; '.join(map(str, one.violations))}"
        for one in summary.failures
    ]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_five_thousand_seeds_break_no_rule(chunk: int) -> None:
    assert failures(chunk * SEEDS_PER_CHUNK, SEEDS_PER_CHUNK, Setting()) == []


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_alone_breaks_no_rule(kind: str) -> None:
    assert failures(0, 100, Setting(faults=(kind,))) == []


@pytest.mark.parametrize("nodes", [1, 2, 9, 20])
def test_any_number_of_workers_breaks_no_rule(nodes: int) -> None:
    assert failures(0, 60, Setting(nodes=nodes)) == []


def test_without_faults_every_task_runs_once_but_for_those_that_ask_for_more() -> None:
    for seed in range(200):
        figures = play(seed, Setting(faults=())).figures
        assert figures["lost"] == 0, seed


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_found(name: str) -> None:
    mutation = MUTATIONS[name]
    setting = Setting(parts=mutation.parts)
    for seed in range(FOUND_WITHIN):
        if any(one.rule == mutation.rule for one in play(seed, setting).violations):
            return
    pytest.fail(f"{name} was not found")


def test_the_same_seed_is_the_same_play_in_another_process() -> None:
    code = (
        "from umbel.sim.deliveries.plays import play\n"
        "print([play(seed).hash for seed in range(30)])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert found == {f"{[play(seed).hash for seed in range(30)]}\n"}


def test_the_command_plays_deliveries_and_names_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert umbel(["sim", "--what", "deliveries", "--seed", "3"]) == 0
    assert "all checks held" in capsys.readouterr().out
    words = ["sim", "--what", "deliveries", "--mutation", "ack-dropped", "--seeds", "10"]
    assert umbel(words) == 1
    repeated = r"umbel sim --what deliveries --seed \d+ --mutation ack-dropped"
    assert re.search(repeated, capsys.readouterr().out)
    for option in (["--faults", "partition"], ["--mutation", "no-register"]):
        assert umbel(["sim", "--what", "deliveries", *option]) != 0
        assert f"unknown {option[0][2:].rstrip('s')} {option[1]!r}" in capsys.readouterr().err


def test_the_page_shows_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deliveries.md").read_text()
    for text in (
        table(TRANSITIONS), table(MESSAGE_TRANSITIONS), meanings(State), meanings(MessageState),
    ):  # fmt: skip
        assert text in page


def test_every_state_can_be_reached_and_left() -> None:
    before = {one for one, _ in ALLOWED}
    after = {one for _, one in ALLOWED}
    assert set(State) - {State.RECEIVED} <= after
    assert set(State) - {State.GONE} <= before
    assert set(MessageState) <= before | after


def test_plays_go_through_every_line_of_the_table() -> None:
    """Every allowed pair of states was seen; a line that no play reaches may be wrong."""
    from umbel.sim.deliveries import tasks

    seen: set[tuple[object, object]] = set()

    class Noted(frozenset[tuple[object, object]]):
        def __contains__(self, pair: object) -> bool:
            seen.add(pair)  # type: ignore[arg-type]
            return super().__contains__(pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "ALLOWED", Noted(ALLOWED))
        for seed in range(600):
            play(seed)
    missing = {(a.name, b.name) for a, b in ALLOWED if (a, b) not in seen and a is not b}
    assert missing == set()


def test_rules_of_mutations_are_rules() -> None:
    from umbel.sim.deliveries import checks

    rules = {value for name, value in vars(checks).items() if re.fullmatch("[A-Z_]+", name)}
    assert {mutation.rule for mutation in MUTATIONS.values()} <= rules


# -- seeds that failed -------------------------------------------------------------------------


class StoringUnknown(Deliveries):
    """A message that comes again while the outcome of its task is being stored is not known."""

    def connection_lost(self, *, cancel: bool, reduce: bool) -> None:
        super().connection_lost(cancel=cancel, reduce=reduce)
        for one in self.leaving.values():
            self.redeliveries.ended(one)


def test_a_task_does_not_run_again_while_its_failure_is_being_stored() -> None:
    faults = ("cut", "child")
    assert play(1487, Setting(nodes=1, faults=faults)).violations == []
    without = play(1487, Setting(nodes=1, faults=faults, parts=Parts(StoringUnknown)))
    assert [one.rule for one in without.violations] == [RUNS_ONCE]
