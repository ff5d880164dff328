"""Importing the modules that define tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from umbel.app.umbel import Umbel

_numbers = itertools.count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a module (or a package, with `tasks`) of a fresh name that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_module(text: str = "", **modules: str) -> str:
        name = f"loaded_{next(_numbers)}"
        if not modules:
            (tmp_path / f"{name}.py").write_text(text)
            return name
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        for module, content in modules.items():
            (tmp_path / name / f"{module}.py").write_text(content)
        return name

    return write_module


def app_with(**options: object) -> Umbel:
    return Umbel("modules", broker="memory://", set_as_current=True, **options)  # type: ignore[arg-type]


TASK = "from umbel import shared_task\n@shared_task\ndef job():\n    return 1\n"


def test_modules_named_anywhere_are_imported_when_asked_for(write: Callable[..., str]) -> None:
    a, b, c = write(TASK), write(TASK), write(TASK)
    app = app_with(include=[a], imports=(b,))
    app.conf.include = (c,)
    assert f"{a}.job" not in app.tasks
    app.load_modules()
    assert {f"{a}.job", f"{b}.job", f"{c}.job"} <= set(app.tasks)


def test_one_module_may_be_named_without_a_list(write: Callable[..., str]) -> None:
    name = write(TASK)
    app = app_with(include=name)
    app.load_modules()
    assert f"{name}.job" in app.tasks


def test_related_modules_are_found_where_they_exist(write: Callable[..., str]) -> None:
    has, has_not, plain = write(tasks=TASK), write(other="x = 1"), write("x = 1")
    app = app_with()
    app.autodiscover_tasks([has, has_not, plain])
    assert f"{has}.tasks.job" not in app.tasks
    app.load_modules()
    assert f"{has}.tasks.job" in app.tasks


def test_packages_may_be_a_function_and_the_related_name_another(
    write: Callable[..., str],
) -> None:
    name = write(jobs=TASK)
    app = app_with()
    app.autodiscover_tasks(lambda: [name], related_name="jobs", force=True)
    assert f"{name}.jobs.job" in app.tasks


def test_one_package_may_be_named_without_a_list(write: Callable[..., str]) -> None:
    name = write(tasks=TASK)
    app = app_with()
    app.autodiscover_tasks(name, force=True)
    assert f"{name}.tasks.job" in app.tasks


def test_without_a_related_name_the_package_itself_is_imported(write: Callable[..., str]) -> None:
    name = write(TASK)
    app = app_with()
    app.autodiscover_tasks([name], related_name=None, force=True)
    assert f"{name}.job" in app.tasks


def test_errors_inside_a_module_are_seen(write: Callable[..., str]) -> None:
    app = app_with(include=[write("import no_such_module_here")])
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        app.load_modules()
    broken = write(tasks="raise RuntimeError('broken')")
    with pytest.raises(RuntimeError, match="broken"):
        app_with().autodiscover_tasks([broken], force=True)
    needs = write(tasks="import no_such_module_there")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_there"):
        app_with().autodiscover_tasks([needs], force=True)


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        app_with().autodiscover_tasks(["no_such_package"], force=True)


def test_loading_again_imports_only_what_is_new(write: Callable[..., str]) -> None:
    counted = write("import builtins\nbuiltins._loads = getattr(builtins, '_loads', 0) + 1\n")
    app = app_with(include=[counted])
    app.load_modules()
    later = write(tasks=TASK)
    app.autodiscover_tasks([later])
    app.load_modules()
    import builtins

    assert builtins._loads == 1  # type: ignore[attr-defined]
    assert f"{later}.tasks.job" in app.tasks
