"""The settings of one application: checked when they are set, plain attributes when read.

A value comes from one of four places; the stronger wins, whatever the order of the calls:

    code (constructor, `conf.update`, `conf.x = ...`)  >  environment  >  config object  >  default

Every current value lies in the instance's `__dict__`, so that reading one is a plain attribute
access without a lock. Writers hold a lock, check everything first and then swap all values in
one step: a refused update changes nothing, and a reader sees all of an update or none of it.

A name that is not a setting, or a value of the wrong kind, raises `ImproperlyConfigured` with
the name, the value (secrets masked) and the way out. What Celery knows and Umbel does not do
is kept, and warned of once per process (`app.inert_settings`).
"""

from __future__ import annotations

import copy
import difflib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from umbel.app import config_objects
from umbel.app.inert_settings import INERT, NAMES, modern_name
from umbel.app.setting_kinds import Misfit
from umbel.app.settings import SETTINGS
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.masking import masked

# Weakest first.
_LAYERS = ("object", "environment", "code")
_SHOWN_CHARS_MAX = 120

# Celery's own variables, honoured so that a deployment moves over unchanged.
CELERY_ENVIRONMENT = {
    "CELERY_BROKER_URL": "broker_url",
    "CELERY_BROKER_READ_URL": "broker_read_url",
    "CELERY_BROKER_WRITE_URL": "broker_write_url",
    "CELERY_RESULT_BACKEND": "result_backend",
}
# Variables with our prefix that are options of the command line, not settings.
RESERVED_ENVIRONMENT = frozenset(
    {"UMBEL_APP", "UMBEL_CONFIG_MODULE", "UMBEL_LOG_LEVEL", "UMBEL_TRACEBACK"}
)


class UnknownSetting(ImproperlyConfigured, AttributeError, KeyError):
    """No setting has this name; also what attribute and item access raise by convention."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class SettingWarning(UserWarning):
    """A setting was accepted and has no effect; the text says why."""


class Conf(Mapping[str, Any]):
    """All settings of an application, as attributes and as items."""

    __hash__ = object.__hash__

    def __init__(self) -> None:
        defaults = {name: copy.deepcopy(_default(name)) for name in (*SETTINGS, *INERT)}
        self.__dict__.update(
            defaults,
            revision=0,
            _defaults=defaults,
            _layers={layer: {} for layer in _LAYERS},
            _lock=threading.Lock(),
        )

    # -- reading -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Reached on a miss only. Python itself asks for underscored names (copy, inspect).
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse_name(name)

    def __getitem__(self, name: str) -> Any:
        if name not in NAMES:
            _refuse_name(name)
        return self.__dict__[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_defaults"])

    def __len__(self) -> int:
        return len(NAMES)

    def __contains__(self, name: object) -> bool:
        return name in NAMES

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"<Conf {self.masked()!r}>"

    def changed(self) -> dict[str, Any]:
        """What was set by anybody, or altered in place."""
        given = {name for layer in self._layers.values() for name in layer}
        values = self.__dict__
        return {n: values[n] for n in self if n in given or values[n] != _default(n)}

    def masked(self, with_defaults: bool = False) -> dict[str, Any]:
        """What was set (or everything), as plain values without secrets."""
        shown = dict(self.items()) if with_defaults else self.changed()
        return {name: masked(name, value) for name, value in shown.items()}

    # -- writing -----------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        self._apply("code", {name: value})

    def __setitem__(self, name: str, value: Any) -> None:
        self._apply("code", {name: value})

    def __delattr__(self, name: str) -> None:
        """Forget what code set; the environment, the config object or the default is back."""
        if name not in NAMES:
            _refuse_name(name)
        with self._lock:
            self._layers["code"].pop(name, None)
            self._publish({name})

    __delitem__ = __delattr__

    def update(self, given: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Set several settings from code: all of them, or none if one is refused."""
        self._apply("code", {**(given or {}), **more})

    def load_object(self, source: Any, namespace: str | None = None) -> None:
        """Take the settings of a module, class, instance, dictionary, or the dotted name of one.

        With a namespace only names like `CELERY_TASK_SERIALIZER` count; without one every public
        lower-case name must be a setting.
        """
        found = config_objects.read(source, namespace)
        given = {spelled.setting: spelled.value for spelled in found}
        self._apply("object", given, {spelled.setting: spelled.name for spelled in found})

    def load_environment(
        self, environ: Mapping[str, str] | None = None, prefix: str = "UMBEL_"
    ) -> None:
        """Take `UMBEL_<SETTING>` variables, and the few that Celery reads; empty ones are unset.

        Lists and dictionaries are JSON. A variable that resembles a setting is refused like any
        misspelt one; one that does not is somebody else's, and only warned of.
        """
        variables = os.environ if environ is None else environ
        texts = {s: variables[v] for v, s in CELERY_ENVIRONMENT.items() if variables.get(v)}
        names = {s: v for v, s in CELERY_ENVIRONMENT.items() if variables.get(v)}
        for variable, text in variables.items():
            if not text or not variable.startswith(prefix) or variable in RESERVED_ENVIRONMENT:
                continue
            name = variable.removeprefix(prefix).lower()
            if name in NAMES:
                texts[name], names[name] = text, variable
            else:
                _doubt_variable(variable, name)
        given = {name: _parsed(name, text, names[name]) for name, text in texts.items()}
        self._apply("environment", given, names)

    def _apply(
        self, layer: str, given: Mapping[str, Any], spelled: Mapping[str, str] | None = None
    ) -> None:
        names = spelled or {}
        checked = {n: _checked(n, value, names.get(n, n)) for n, value in given.items()}
        with self._lock:
            self._layers[layer].update(checked)
            self._publish(checked.keys())
        for name in checked.keys() & INERT.keys():
            if checked[name] != INERT[name][0]:
                _warn_once(name, f"setting {name!r} has no effect: {INERT[name][1]}")

    def _publish(self, names: Any) -> None:
        """Make the strongest values of these settings the current ones, in one step."""
        current = {}
        for name in names:
            current[name] = self._defaults[name]
            for layer in self._layers.values():
                if name in layer:
                    current[name] = layer[name]
        self.__dict__.update(current, revision=self.revision + 1)


def _default(name: str) -> Any:
    return INERT[name][0] if name in INERT else SETTINGS[name].default


def _checked(name: str, value: Any, spelled: str) -> Any:
    if name not in NAMES:
        _refuse_name(name, value, spelled)
    if name in INERT:
        return value
    try:
        return SETTINGS[name].kind.check(value)
    except Misfit as exc:
        _refuse_value(name, spelled, value, exc)


def _parsed(name: str, text: str, variable: str) -> Any:
    if name in INERT:
        return text
    try:
        kind = SETTINGS[name].kind
        return kind.check(kind.parse(text))
    except Misfit as exc:
        _refuse_value(name, variable, text, exc)


_UNGIVEN = object()


def _refuse_name(name: str, value: Any = _UNGIVEN, spelled: str = "") -> NoReturn:
    spelled = spelled or name
    given = "" if value is _UNGIVEN else f" (value {_shown(name, value)})"
    what = f"unknown setting {spelled!r}{given}"
    modern = modern_name(spelled)
    if modern is not None:
        raise UnknownSetting(f"{what}: it is called {_alike(modern, name, spelled)!r} now")
    close = difflib.get_close_matches(name.lower(), NAMES, 1, 0.7)
    if close:
        raise UnknownSetting(f"{what}: did you mean {_alike(close[0], name, spelled)!r}?")
    raise UnknownSetting(
        f"{what}: docs/settings.md lists them all; "
        "a name in a config module that is not a setting must start with an underscore"
    )


def _alike(right: str, name: str, spelled: str) -> str:
    """The right name in the spelling of the wrong one: with its prefix, in upper case."""
    prefix = spelled[: len(spelled) - len(name)]
    return prefix + right.upper() if prefix else right


def _refuse_value(name: str, spelled: str, value: Any, why: Misfit) -> NoReturn:
    raise ImproperlyConfigured(f"setting {spelled!r} is {_shown(name, value)}: it {why}") from None


def _shown(name: str, value: Any) -> str:
    text = repr(masked(name, value))
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "..."


def _doubt_variable(variable: str, name: str) -> None:
    close = difflib.get_close_matches(name, NAMES, 1, 0.8)
    if close:
        right = _alike(close[0], name, variable)
        raise UnknownSetting(f"unknown setting {variable!r}: did you mean {right!r}?")
    _warn_once(variable, f"the environment variable {variable!r} names no setting: ignored")


_warned: set[str] = set()


def _warn_once(key: str, text: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(text, SettingWarning, stacklevel=4)
