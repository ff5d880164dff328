"""Finding the application that -A names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from umbel.cli.apps import find_app
from umbel.cli.errors import CommandFailed

Project = Callable[[dict[str, str]], Path]

APP = "from umbel import Umbel\n{name} = Umbel({main!r}, broker='memory://')\n"


def app_text(name: str = "app", main: str = "shop") -> str:
    return APP.format(name=name, main=main)


@pytest.mark.parametrize("name", ["app", "umbel", "celery", "anything"])
def test_a_module_alone_means_its_application_whatever_it_is_called(
    project: Project, name: str
) -> None:
    project({"shop.py": f"from umbel import Umbel as U\n{name} = U('shop', broker='memory://')\n"})
    assert find_app("shop").main == "shop"


def test_an_attribute_may_be_named_after_a_colon_or_a_dot(project: Project) -> None:
    project({"shop.py": app_text("one", "first") + app_text("two", "second")})
    assert find_app("shop:two").main == "second"
    assert find_app("shop.one").main == "first"


def test_a_dotted_attribute_is_followed(project: Project) -> None:
    project({"shop.py": app_text("app") + "class Box: inner = app\n"})
    assert find_app("shop:Box.inner").main == "shop"


@pytest.mark.parametrize("submodule", ["umbel", "celery"])
def test_a_package_is_searched_in_its_usual_submodules(project: Project, submodule: str) -> None:
    project({"pkg/__init__.py": "", f"pkg/{submodule}.py": app_text()})
    assert find_app("pkg").main == "shop"


def test_a_package_that_has_an_application_itself_is_enough(project: Project) -> None:
    project({"pkg/__init__.py": app_text(main="outer"), "pkg/celery.py": app_text(main="inner")})
    assert find_app("pkg").main == "outer"


def test_the_usual_name_wins_over_other_applications(project: Project) -> None:
    project({"shop.py": app_text("other", "other") + app_text("app", "right")})
    assert find_app("shop").main == "right"


WRONG: list[tuple[str, dict[str, str], str]] = [
    ("shp", {"shop.py": app_text()}, "no module named 'shp'.*did you mean 'shop'"),
    ("pkg.shp", {"pkg/__init__.py": "", "pkg/shop.py": ""}, "did you mean 'pkg.shop'"),
    ("shop:ap", {"shop.py": app_text()}, "no attribute 'ap': did you mean shop:app"),
    ("shop:x", {"shop.py": "a = 1"}, "no attribute 'x', and no application at all"),
    ("shop:x", {"shop.py": app_text("theone")}, "its applications are theone"),
    ("shop:", {"shop.py": app_text()}, "a name is missing after the colon"),
    (":app", {}, "give MODULE or MODULE:APP"),
    ("shop.py", {"shop.py": app_text()}, "is a file name: give the module, such as -A shop"),
    ("./pkg/shop.py", {}, "-A pkg.shop"),
    ("my-shop", {}, "'my-shop' is not the name of a module"),
    ("shop:app", {"shop.py": "app = 7"}, "is of type int, not an Umbel application"),
    ("shop", {"shop.py": "app = 7"}, "is of type int"),
    ("shop", {"shop.py": ""}, "has no Umbel application: make one"),
    ("shop", {"shop.py": app_text("a", "1") + app_text("b", "2")}, "several.*-A shop:a, -A shop:b"),
    ("shop", {"shop.py": "import nowhere"}, r"No module named 'nowhere' \(shop.py:1\)"),
    ("shop", {"shop.py": "\n\n1/0"}, r"ZeroDivisionError: division by zero \(shop.py:3\)"),
    ("shop", {"shop.py": "x = (\n"}, r"SyntaxError: .*\(shop.py:1\)"),
    ("shop", {"shop.py": "import sys\nsys.exit(5)"}, r"sys.exit\(5\) \(shop.py:2\)"),
    (
        "shop",
        {"shop.py": "from umbel import Umbel\napp = Umbel('shop', task_serialiser='json')"},
        r"did you mean 'task_serializer'.*\(shop.py:2\)",
    ),
    ("pkg", {"pkg/__init__.py": "", "pkg/celery.py": "1/0"}, r"division by zero \(pkg/celery.py"),
]


@pytest.mark.parametrize(
    ("spec", "files", "said"), WRONG, ids=[f"{s}-{t[:20]}" for s, _, t in WRONG]
)
def test_what_is_wrong_is_said(
    project: Project, spec: str, files: dict[str, str], said: str
) -> None:
    project(files)
    with pytest.raises(CommandFailed, match=said) as caught:
        find_app(spec)
    assert caught.value.code == 2


def test_an_application_of_celery_is_recognised(project: Project, monkeypatch: Any) -> None:
    project(
        {"shop.py": "class Celery: pass\nCelery.__module__ = 'celery.app.base'\napp = Celery()"}
    )
    with pytest.raises(CommandFailed, match="change its import to 'from umbel import Umbel'"):
        find_app("shop:app")
