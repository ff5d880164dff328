"""What a config module, class, instance or dictionary says, as names and values.

Without a namespace every public lower-case name that is neither a module nor callable is taken
for a setting, so that a misspelt one is noticed; names of one's own start with an underscore.
Upper-case names are constants of the module, except the settings of old, which are refused
rather than silently ignored. With a namespace only `NAMESPACE_...` names count, all of them.

Nothing is checked here: `app.conf` does that for every source alike.
"""

from __future__ import annotations
import __future__

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from umbel.app.inert_settings import NAMES, modern_name
from umbel.exceptions import ImproperlyConfigured


class Spelled(NamedTuple):
    """A setting as it was found: the name of the setting, the name there, the value."""

    setting: str
    name: str
    value: Any


def read(source: Any, namespace: str | None = None) -> list[Spelled]:
    """The settings that `source`, or what its dotted name leads to, gives."""
    found = load(source) if isinstance(source, str) else source
    if found is None:
        raise ImproperlyConfigured(
            "the config object is None: give a module, a class, a dictionary, or a dotted name"
        )
    if namespace:
        return list(_in_namespace(found, namespace.upper().rstrip("_") + "_"))
    return list(_all_names(found))


def load(dotted: str) -> Any:
    """What `pkg.module`, `pkg.module:attribute` or `pkg.module.attribute` names."""
    module_name, colon, path = dotted.partition(":")
    if colon:
        return _descend(_import(module_name, dotted), path, dotted)
    try:
        return _import(dotted, dotted)
    except _NotThere:
        parent, dot, attribute = dotted.rpartition(".")
        if not dot or attribute == "py":
            raise
        try:
            return getattr(_import(parent, dotted), attribute)
        except AttributeError:
            raise ImproperlyConfigured(
                f"config object {dotted!r} was not found: module {parent!r} has no {attribute!r}"
            ) from None


class _NotThere(ImproperlyConfigured):
    """The module itself is missing, rather than something that it imports."""


def _import(name: str, dotted: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name and (name == exc.name or name.startswith(exc.name + ".")):
            hint = f": write {name[:-3]!r}" if name.endswith(".py") else ""
            raise _NotThere(
                f"config module {dotted!r} was not found (no module named {exc.name!r})"
                f"{hint or ': check the name and the Python path'}"
            ) from None
        raise ImproperlyConfigured(_broken(dotted, exc)) from exc
    except Exception as exc:  # a config module may fail in any way
        raise ImproperlyConfigured(_broken(dotted, exc)) from exc


def _broken(dotted: str, exc: Exception) -> str:
    first_line = (str(exc).splitlines() or [""])[0]
    return f"config module {dotted!r} can not be imported: {type(exc).__name__}: {first_line}"


def _descend(found: Any, path: str, dotted: str) -> Any:
    for attribute in path.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise ImproperlyConfigured(
                f"config object {dotted!r} was not found: "
                f"{getattr(found, '__name__', found)!r} has no {attribute!r}"
            ) from None
    return found


def _names(source: Any) -> list[str]:
    if isinstance(source, Mapping):
        for key in source:
            if not isinstance(key, str):
                raise ImproperlyConfigured(
                    f"the config dictionary has the key {key!r}: names of settings are strings"
                )
        return list(source)
    return dir(source)


def _value(source: Any, name: str) -> Any:
    return source[name] if isinstance(source, Mapping) else getattr(source, name)


def _in_namespace(source: Any, prefix: str) -> Iterator[Spelled]:
    for name in _names(source):
        if name.startswith(prefix):
            yield Spelled(name.removeprefix(prefix).lower(), name, _value(source, name))


def _all_names(source: Any) -> Iterator[Spelled]:
    strict = isinstance(source, Mapping)
    for name in _names(source):
        if name.startswith("_"):
            continue
        if name not in NAMES and not strict:
            constant = name != name.lower() and modern_name(name) is None
            if constant or _is_furniture(_value(source, name)):
                continue
        yield Spelled(name, name, _value(source, name))


def _is_furniture(value: Any) -> bool:
    """Imports and functions, which a module has besides its settings."""
    return callable(value) or isinstance(value, (ModuleType, __future__._Feature))
