"""`umbel sim`: what it prints, and how it ends."""

from __future__ import annotations

import json

import pytest

from umbel.cli.main import run


def test_one_seed_is_told_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "--seed", "3", "--nodes", "3", "--faults", "pause"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed 3: ")
    assert any("ACTS on e1" in line for line in lines)
    assert any("calm      all faults end" in line for line in lines)
    assert lines[-2].startswith("trace ")
    assert lines[-1] == "all checks held"


def test_the_same_words_print_the_same_play(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        run(["sim", "--seed", "9", "--seconds", "5", "--json"])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    facts = json.loads(printed[0])
    assert facts["seed"] == 9
    assert facts["violations"] == []
    assert facts["repeat"] == "umbel sim --seed 9 --seconds 5"
    assert len(facts["hash"]) == 16
    assert {"at_s", "who", "text"} == facts["story"][0].keys()


def test_many_seeds_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "--seeds", "20", "--nodes", "2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("seeds 1 to 20: 0 failed; ")
    assert "seeds per second" in line
    assert run(["sim", "--seeds", "5", "--faults", "none", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["seeds"], facts["failed"], facts["failures"]) == (5, 0, [])


def test_a_failing_seed_prints_itself_and_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["sim", "--nodes", "3", "--faults", "none", "--mutation", "no-register"]
    assert run([*words, "--seeds", "3"]) == 1
    printed = capsys.readouterr().out
    assert "seed 2 fails:\n  at most one action per election: e2 by w" in printed
    line = "umbel sim --seed 2 --nodes 3 --faults none --mutation no-register"
    assert f"  repeat it: {line}\n" in printed
    assert run(line.split()[1:]) == 1
    printed = capsys.readouterr().out
    assert "VIOLATION at most one action per election" in printed
    assert "VIOLATED at most one action per election" in printed
    assert run([*words, "--seed", "2", "--seeds", "1", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["failures"][0]["repeat"] == line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--faults", "rain"], "unknown fault 'rain': choose some of loss, dup"),
        (["--faults", "loss,,dup"], "unknown fault ''"),
        (["--nodes", "0"], "--nodes"),
        (["--mutation", "no-sense"], "--mutation"),
        (["--seconds", "nan"], "--seconds"),
    ],
)
def test_a_wrong_word_is_refused_with_the_way_out(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sim", *words]) == 2
    assert said in capsys.readouterr().err
