"""YAML: plain values only, and never more of them than the text is worth.

Only the safe constructors are used, so no tag can name a class or a function. Before anything
is built, the events of the document are counted: nesting, digits, and what it would amount to
with every reference (`*alias`) written out. Peers write references for values that occur
twice, so these are read; a document that multiplies itself, or contains itself, is refused.

What was written is read back and compared before it is sent: the package writes some values in a
form that it reads as another value, or not at all (offsets of seconds, tuples as keys).
"""

from __future__ import annotations

import re
from functools import cache
from math import isnan
from typing import Any, Final

from umbel.wire.jsontext import EncodeError, integer_too_large, too_deep, undecodable
from umbel.wire.limits import TOO_BIG, UNDECODABLE, Limits, Refusal
from umbel.wire.reprs import safe_repr

_NUMBER: Final = re.compile(r"[-+]?(?:0[xb][0-9a-fA-F_]+|[0-9_:.]+)")


@cache
def yaml_module() -> Any:
    """The yaml package, or None when it is not installed."""
    try:
        import yaml
    except ImportError:
        return None
    return yaml


def dumps_yaml(value: Any, limits: Limits) -> bytes:
    """`value` as YAML; raises `EncodeError` when it has no form that is read as the same."""
    yaml = yaml_module()
    try:
        text: bytes = yaml.dump(value, Dumper=_dumper(), sort_keys=False, encoding="utf-8")
    except Exception as exc:
        raise _refused(value, f"{safe_repr(exc, 200)}: pass plain values, or use json") from exc
    try:
        read = loads_yaml(text, limits)
    except Refusal as refusal:
        raise _refused(value, refusal.text) from None
    if not _same(value, read):
        raise _refused(value, f"it would be read as {safe_repr(read, 80)}: use json")
    return text


def _refused(value: Any, why: str) -> EncodeError:
    return EncodeError(f"cannot write {safe_repr(value, 80)} as yaml: {why}")


def _same(written: Any, read: Any) -> bool:
    if isinstance(written, list | tuple):
        return type(read) is list and len(read) == len(written) and all(map(_same, written, read))
    if isinstance(written, dict):
        return (
            type(read) is dict
            and read.keys() == written.keys()
            and all(_same(one, read[key]) for key, one in written.items())
        )
    if isinstance(written, float):
        return isinstance(read, float) and (read == written or (isnan(read) and isnan(written)))
    return isinstance(written, bool) is isinstance(read, bool) and bool(written == read)


def loads_yaml(data: bytes, limits: Limits) -> Any:
    """The value that `data` says; raises nothing but `Refusal`."""
    if len(data) > limits.yaml_bytes:
        raise Refusal(
            TOO_BIG,
            f"the yaml body has {len(data)} bytes, more than {limits.yaml_bytes}:"
            " send json or msgpack",
        )
    yaml = yaml_module()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml, yaml.parse(data, Loader=loader), limits)
        return yaml.load(data, Loader=loader)
    except Refusal:
        raise
    except RecursionError:
        raise too_deep(limits) from None
    except Exception as exc:  # noqa: BLE001 - yaml's own errors, and those of its constructors
        raise undecodable("yaml", exc) from None


def _check_events(yaml: Any, events: Any, limits: Limits) -> None:
    """Walk the document once, without building it, and refuse what would cost too much.

    For every open collection the walk keeps its anchor, the values it holds with references
    written out, and its height; a finished anchor is remembered with these two numbers.
    """
    anchors: dict[str, tuple[int, int]] = {}
    open_nodes: list[list[Any]] = [[None, 0, 0]]
    # Text written out in full cannot hold more values than bytes, so only references are capped.
    for event in events:
        count, height = 1, 0
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor not in anchors:
                raise Refusal(UNDECODABLE, f"the yaml body refers to {anchor!r} inside of itself")
            count, height = anchors[anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([anchor, 1, 0])
            if len(open_nodes) - 1 > limits.depth:
                raise too_deep(limits)
            continue
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, count, height = open_nodes.pop()
            height += 1
            if anchor is not None:
                anchors[anchor] = (count, height)
        elif isinstance(event, yaml.ScalarEvent):
            _check_number(event, limits)
            if anchor is not None:
                anchors[anchor] = (1, 0)
        else:
            continue
        parent = open_nodes[-1]
        parent[1] += count
        parent[2] = max(parent[2], height)
        if anchors:
            _check_expansion(parent[1], len(open_nodes) - 1 + height, limits)


def _check_expansion(count: int, depth: int, limits: Limits) -> None:
    """Refuse a document whose references make it too large or too deep."""
    if count > limits.alias_nodes:
        raise Refusal(
            TOO_BIG,
            f"the yaml body stands for more than {limits.alias_nodes} values:"
            " send fewer references",
        )
    if depth > limits.depth:
        raise too_deep(limits)


def _check_number(event: Any, limits: Limits) -> None:
    """Refuse a long scalar that would be read as a number; quoted text is not."""
    digits = len(event.value) - event.value.startswith(("-", "+"))
    if digits <= limits.integer_digits or not _NUMBER.fullmatch(event.value):
        return
    if event.implicit[0] or (event.tag or "").endswith((":int", ":float")):
        raise integer_too_large(limits)


@cache
def _dumper() -> Any:
    yaml = yaml_module()

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Writes subclasses of plain types, such as signatures, as the plain types."""

    represent = yaml.representer.SafeRepresenter
    for kind, method in (
        (dict, represent.represent_dict),
        (list, represent.represent_list),
        (tuple, represent.represent_list),
        (str, lambda dumper, value: represent.represent_str(dumper, str.__str__(value))),
        (int, lambda dumper, value: represent.represent_int(dumper, int(value))),
        (float, lambda dumper, value: represent.represent_float(dumper, float(value))),
    ):
        Dumper.add_multi_representer(kind, method)
    return Dumper
