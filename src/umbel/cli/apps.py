"""Finding the application that `-A` names.

    shop:app        the attribute `app` of the module `shop` (dots allowed on both sides)
    shop            the module: `app`, `umbel` or `celery` in it, or its only application;
                    a package: the same in it, then in `shop.umbel` and `shop.celery`
    shop.app        as `shop:app`, if there is no module of that name

The working directory comes first on the path. Whatever fails is told in one line: a module that
is not there, with the closest name; an error inside the user's module, with its place.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from umbel.cli.errors import CommandFailed, place

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

USUAL_NAMES = ("app", "umbel", "celery")
USUAL_SUBMODULES = ("umbel", "celery")


def find_app(spec: str) -> Umbel:
    """The application that `spec` names; `CommandFailed` says why there is none."""
    see_directory()
    module_name, colon, attribute = spec.partition(":")
    _check_spelling(spec, module_name)
    if colon:
        if not attribute:
            raise CommandFailed(f"application {spec!r}: a name is missing after the colon")
        return _attribute_app(spec, import_module(module_name), attribute)
    parent, _, last = module_name.rpartition(".")
    if parent and not _exists(module_name) and _exists(parent):
        module = import_module(parent)
        if hasattr(module, last):
            return _attribute_app(spec, module, last)
    return _module_app(import_module(module_name))


def load_modules(app: Umbel) -> None:
    """Import the modules with tasks that the application names."""
    with importing("the modules of the application"):
        app.load_modules()


def see_directory() -> None:
    """Modules of the working directory can be imported, as with `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def import_module(name: str) -> ModuleType:
    """Import a module of the user's, or say in one line why that did not work."""
    with importing(name):
        return importlib.import_module(name)


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Errors of an import become one line each."""
    try:
        yield
    except (KeyboardInterrupt, CommandFailed):
        raise
    except ModuleNotFoundError as exc:
        if exc.name and (name == exc.name or name.startswith(f"{exc.name}.")):
            raise CommandFailed(_not_found(exc.name)) from exc
        raise CommandFailed(f"cannot import {name}: {exc} ({place(exc)})") from exc
    except SystemExit as exc:
        raise CommandFailed(
            f"cannot import {name}: it ends the program with sys.exit({exc.code!r}) ({place(exc)})"
        ) from exc
    except BaseException as exc:  # the user's module may raise anything
        text = exc.msg if isinstance(exc, SyntaxError) else str(exc)
        said = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
        raise CommandFailed(f"cannot import {name}: {said} ({place(exc)})") from exc


def _check_spelling(spec: str, module_name: str) -> None:
    if not module_name:
        raise CommandFailed(f"application {spec!r}: give MODULE or MODULE:APP, such as shop:app")
    if module_name.endswith(".py") or os.sep in module_name:
        plain = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise CommandFailed(
            f"application {spec!r} is a file name: give the module, such as -A {plain or 'shop'}"
        )
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise CommandFailed(f"application {spec!r}: {module_name!r} is not the name of a module")


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except Exception:  # noqa: BLE001 - the parent package fails to import: told when it is imported
        return True


def _not_found(name: str) -> str:
    parent, _, last = name.rpartition(".")
    close = difflib.get_close_matches(last, _modules_in(parent), 1)
    right = f"{parent}.{close[0]}" if close and parent else "".join(close)
    hint = f"did you mean {right!r}?" if close else "check the spelling, or use --workdir"
    return f"no module named {name!r} in {Path.cwd()} or on the Python path: {hint}"


def _modules_in(package: str) -> list[str]:
    found = sys.modules.get(package)
    places = list(getattr(found, "__path__", ())) if package else [str(Path.cwd())]
    names: list[str] = []
    for directory in places:
        with contextlib.suppress(OSError):
            names += [
                entry.stem
                for entry in Path(directory).iterdir()
                if entry.stem.isidentifier() and (entry.suffix == ".py" or entry.is_dir())
            ]
    return names


def _attribute_app(spec: str, module: ModuleType, path: str) -> Umbel:
    from umbel.app.umbel import Umbel

    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise CommandFailed(_no_attribute(module, found, name))
        found = getattr(found, name)
    if isinstance(found, Umbel):
        return found
    if isinstance(found, ModuleType):
        return _module_app(found)
    raise CommandFailed(f"application {spec!r} {_what_it_is(found)}")


def _no_attribute(module: ModuleType, holder: Any, name: str) -> str:
    candidates = list(_apps_in(holder)) if isinstance(holder, ModuleType) else []
    everything = [attribute for attribute in vars(module) if not attribute.startswith("_")]
    close = difflib.get_close_matches(name, candidates, 1) or difflib.get_close_matches(
        name, everything, 1
    )
    what = f"module {module.__name__!r} has no attribute {name!r}"
    if close:
        return f"{what}: did you mean {module.__name__}:{close[0]}?"
    if candidates:
        return f"{what}: its applications are {', '.join(sorted(candidates))}"
    return f"{what}, and no application at all: make one with app = Umbel({module.__name__!r})"


def _what_it_is(found: Any) -> str:
    kind = type(found)
    if kind.__module__.partition(".")[0] == "celery":
        return "is a Celery application: change its import to 'from umbel import Umbel'"
    return f"is of type {kind.__name__}, not an Umbel application"


def _module_app(module: ModuleType) -> Umbel:
    found = _usual_app(module)
    if found is None and hasattr(module, "__path__"):
        for name in USUAL_SUBMODULES:
            full = f"{module.__name__}.{name}"
            if found is None and _exists(full):
                found = _usual_app(import_module(full)) or _only_app(sys.modules[full])
    found = found or _only_app(module)
    if found is None:
        for name in USUAL_NAMES:
            if name in vars(module) and not isinstance(vars(module)[name], ModuleType):
                raise CommandFailed(f"'{module.__name__}:{name}' {_what_it_is(vars(module)[name])}")
        raise CommandFailed(
            f"module {module.__name__!r} has no Umbel application: make one with "
            f"app = Umbel({module.__name__!r}), or name it with -A {module.__name__}:NAME"
        )
    return found


def _apps_in(module: ModuleType) -> dict[str, Umbel]:
    from umbel.app.umbel import Umbel

    return {name: value for name, value in vars(module).items() if isinstance(value, Umbel)}


def _usual_app(module: ModuleType) -> Umbel | None:
    apps = _apps_in(module)
    return next((apps[name] for name in USUAL_NAMES if name in apps), None)


def _only_app(module: ModuleType) -> Umbel | None:
    apps = _apps_in(module)
    distinct = {id(app) for app in apps.values()}
    if len(distinct) > 1:
        raise CommandFailed(
            f"module {module.__name__!r} has several applications: choose one of "
            + ", ".join(f"-A {module.__name__}:{name}" for name in sorted(apps))
        )
    return next(iter(apps.values()), None)
