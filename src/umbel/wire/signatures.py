"""Signatures: the dictionaries that describe a call inside callbacks, chains and chords.

A signature from the wire is checked all the way down before anything acts on it: the types of
its fields, and the signatures inside groups, chains, chords and options. The result is still a
dictionary, with every field there. Nesting is bounded, so a signature that contains itself is
refused like any other that is too deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from umbel.wire.limits import INVALID_TASK, TOO_DEEP, Refusal
from umbel.wire.reprs import safe_repr

NESTING_MAX: Final = 100
"""Signatures inside signatures; a chain or group of any length counts as one level."""

FIELDS: Final = ("task", "args", "kwargs", "options", "subtask_type", "immutable")
SUBTASK_TYPES: Final = frozenset({None, "group", "chain", "chord"})
_LINKS: Final = ("link", "link_error", "chain")

_BAD_FIELD: Final = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$(?:\.(?P<field>\w+))?.*`$")
_MISSING: Final = re.compile(r"missing required field `(?P<field>\w+)`")


class _Shape(msgspec.Struct):
    """What the fields of a signature have to be; null stands for the default."""

    task: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    subtask_type: str | None = None
    immutable: bool | None = None


def signature_dict(
    task: str,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    subtask_type: str | None = None,
    immutable: bool = False,
) -> dict[str, Any]:
    """The dictionary of one call, with every field that peers expect."""
    return {
        "task": task,
        "args": list(args),
        "kwargs": dict(kwargs or {}),
        "options": dict(options or {}),
        "subtask_type": subtask_type,
        "immutable": immutable,
    }


def check_signature(value: Any) -> dict[str, Any]:
    """`value` as a signature with every field there, or a refusal that names what is wrong."""
    return _checked(value, 0)


def _checked(value: Any, nesting: int) -> dict[str, Any]:
    if nesting > NESTING_MAX:
        raise Refusal(
            TOO_DEEP, f"signatures are nested deeper than {NESTING_MAX}: send a flatter workflow"
        )
    if not isinstance(value, dict):
        raise Refusal(
            INVALID_TASK, f"a signature must be a mapping with 'task', got {safe_repr(value, 80)}"
        )
    shape = _shape_of(value)
    kwargs = shape.kwargs or {}
    options = shape.options or {}
    if shape.subtask_type not in SUBTASK_TYPES:
        raise Refusal(
            INVALID_TASK,
            f"signature field 'subtask_type': unknown {safe_repr(shape.subtask_type, 80)}:"
            " send one of null, group, chain, chord",
        )
    if shape.subtask_type is not None:
        _check_composite(shape.subtask_type, kwargs, nesting)
    for name in _LINKS:
        if options.get(name) is not None:
            _check_many(f"options.{name}", options[name], nesting)
    if isinstance(options.get("chord"), dict):
        _checked(options["chord"], nesting + 1)
    elif options.get("chord") is not None:
        raise _wrong("options.chord", options["chord"])
    return _completed(value, shape)


def _completed(value: dict[str, Any], shape: _Shape) -> dict[str, Any]:
    """The signature itself when nothing is missing, else a copy with the defaults in place."""
    for name in FIELDS:
        if name != "subtask_type" and value.get(name) is None:
            break
    else:
        if "subtask_type" in value:
            return value
    filled = signature_dict(
        shape.task,
        shape.args or (),
        shape.kwargs,
        shape.options,
        shape.subtask_type,
        shape.immutable or False,
    )
    return {**value, **filled}


def _check_composite(kind: str, kwargs: dict[str, Any], nesting: int) -> None:
    if kind in ("group", "chain"):
        _check_many("kwargs.tasks", kwargs.get("tasks"), nesting)
        return
    header = kwargs.get("header")
    _check_many("kwargs.header", header, nesting)
    if kwargs.get("body") is not None:
        _checked(kwargs["body"], nesting + 1)


def _check_many(name: str, value: Any, nesting: int) -> None:
    """A list of signatures, or one alone, as peers write both."""
    if isinstance(value, dict):
        _checked(value, nesting + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _checked(item, nesting + 1)
    else:
        raise _wrong(name, value)


def _wrong(name: str, value: Any) -> Refusal:
    return Refusal(
        INVALID_TASK,
        f"signature field {name!r}: expected signatures, got {safe_repr(value, 80)}",
    )


def _shape_of(value: dict[str, Any]) -> _Shape:
    try:
        return msgspec.convert(value, _Shape)
    except msgspec.ValidationError as exc:
        raise field_refusal("signature field", value, exc) from None
    except RecursionError:
        raise Refusal(TOO_DEEP, "a signature is nested too deep: send a flatter one") from None


def field_refusal(what: str, value: Mapping[str, Any], error: Exception) -> Refusal:
    """The refusal that names the field which `error` of msgspec is about, and its value."""
    text = str(error)
    missing = _MISSING.search(text)
    if missing:
        return Refusal(INVALID_TASK, f"{what} {missing['field']!r} is missing: it is required")
    found = _BAD_FIELD.match(text)
    if not found or not found["field"]:
        return Refusal(INVALID_TASK, f"{what}: {text[:200]}")
    name = found["field"]
    shown = safe_repr(value.get(name), 80)
    problem = found["what"].replace("`", "")
    return Refusal(INVALID_TASK, f"{what} {name!r}: {problem} (value {shown})")
