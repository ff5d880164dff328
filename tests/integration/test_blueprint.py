"""Blueprints from the command line: shown, extended by users, refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.workers import Program, WorkerProcess, run_umbel

SHOP = """
from umbel import Umbel
from umbel.worker.blueprint import Step

app = Umbel("shop")

class Lamp(Step):
    requires = ("Pool",)
    def start(self, parent):
        print("lamp on", flush=True)
    def stop(self, parent):
        print("lamp off", flush=True)

class Shade(Step):
    requires = ("Tasks", "Connection")
    def start(self, parent):
        print("shade down for", type(parent).__name__, flush=True)
    def stop(self, parent):
        print("shade up", flush=True)

app.steps["worker"].add(Lamp)
app.steps["consumer"].add(Shade)
"""
CYCLE = """
class Hen(Step):
    requires = ("Egg",)
class Egg(Step):
    requires = (Hen,)
app.steps["consumer"].update({Hen, Egg})
"""
UNKNOWN = """
class Hen(Step):
    requires = ("Rooster",)
app.steps["worker"].add(Hen)
"""


def shop(directory: Path, more: str = "") -> Path:
    (directory / "shop.py").write_text(SHOP + more)
    return directory


def shown(directory: Path, *options: str) -> str:
    program = run_umbel(["-A", "shop", "worker", *options], cwd=directory)
    assert program.process.returncode == 0, program.output
    assert not (directory / ".umbel").exists(), "the embedded broker was started"
    return program.output


@pytest.mark.parametrize("option", ["--show-blueprint", "--show-blueprint=text"])
def test_the_blueprint_is_shown_without_a_broker(tmp_path: Path, option: str) -> None:
    text = shown(shop(tmp_path), option)
    assert text.startswith("worker:")
    for label in ("Timer", "Lamp", "Connection", "Gossip", "Shade", "Evloop"):
        assert label in text


def test_the_blueprint_is_shown_as_a_graph_and_as_a_picture(tmp_path: Path) -> None:
    directory = shop(tmp_path)
    dot = shown(directory, "--show-blueprint=dot")
    assert '"consumer.Shade" -> "consumer.Tasks";' in dot
    assert '"worker.Lamp" -> "worker.Pool";' in dot
    # What is switched off says so in words that XML does not take everywhere.
    svg = shown(directory, "--without-gossip", "--without-mingle", "--show-blueprint=svg")
    root = ET.fromstring(svg)
    assert {"Lamp", "Shade", "Gossip"} <= {element.text for element in root.iter()}


def refused(directory: Path, *options: str) -> Program:
    program = run_umbel(["-A", "shop", "worker", *options], cwd=directory)
    assert program.process.returncode == 2, program.output
    assert len(program.lines) == 1, program.output
    assert not (directory / ".umbel").exists(), "something was started"
    return program


@pytest.mark.parametrize("options", [(), ("--show-blueprint",)], ids=["start", "show"])
def test_steps_that_require_each_other_are_refused_in_one_line(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    line = refused(shop(tmp_path, CYCLE), *options).output
    assert "Hen -> Egg -> Hen" in line or "Egg -> Hen -> Egg" in line


def test_a_requirement_that_nobody_fulfils_is_refused_in_one_line(tmp_path: Path) -> None:
    line = refused(shop(tmp_path, UNKNOWN)).output
    assert "step 'Hen' requires 'Rooster'" in line
    assert "known steps: Timer, Hub, Pool, Autoscaler, StateDB, Consumer, Lamp, Hen" in line


def test_steps_of_users_start_and_stop_with_the_worker(
    tmp_path: Path, redis_url: str, worker: Callable[..., WorkerProcess]
) -> None:
    env = {"UMBEL_BROKER_URL": redis_url, "UMBEL_RESULT_BACKEND": "disabled://"}
    process = worker("shop", ["-P", "threads", "-c", "1"], cwd=shop(tmp_path), env=env)
    assert process.stop() == 0
    told = re.findall(r"(?:lamp|shade) .*", process.output)
    assert told == ["lamp on", "shade down for Consumer", "shade up", "lamp off"]
