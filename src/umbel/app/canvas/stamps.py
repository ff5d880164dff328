"""Stamps: headers that mark every call of a canvas, its links included.

A stamp is an option whose name is listed in `stamped_headers`; in the message it is found under
`stamps`. A visitor decides stamps per call; without one the same stamps go everywhere. A stamp
that is there already stays, or becomes a list of both with `append_stamps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umbel.app.canvas.chain import chain
from umbel.app.canvas.chord import chord
from umbel.app.canvas.group import group
from umbel.app.canvas.signature import Signature, as_list, signature


class StampingVisitor:
    """Decides the stamps of each call; override what is of interest.

    What a hook returns is added to the stamps from there on down. If it holds
    `stamped_headers`, only the names listed there are stamps and the others plain options.
    """

    def on_signature(self, sig: Signature, **headers: Any) -> Mapping[str, Any] | None:
        """One call."""
        return None

    def on_group_start(self, sig: group, **headers: Any) -> Mapping[str, Any] | None:
        """Before the members of a group."""
        return None

    def on_group_end(self, sig: group, **headers: Any) -> None:
        """After the members of a group."""

    def on_chain_start(self, sig: chain, **headers: Any) -> Mapping[str, Any] | None:
        """Before the steps of a chain."""
        return None

    def on_chain_end(self, sig: chain, **headers: Any) -> None:
        """After the steps of a chain."""

    def on_chord_header_start(self, sig: chord, **headers: Any) -> Mapping[str, Any] | None:
        """Before the parts of a chord."""
        return None

    def on_chord_header_end(self, sig: chord, **headers: Any) -> None:
        """After the parts of a chord."""

    def on_chord_body(self, sig: chord, **headers: Any) -> Mapping[str, Any] | None:
        """The body of a chord."""
        return None

    def on_callback(self, callback: Signature, **headers: Any) -> Mapping[str, Any] | None:
        """A call linked to success."""
        return None

    def on_errback(self, errback: Signature, **headers: Any) -> Mapping[str, Any] | None:
        """A call linked to failure."""
        return None


_QUIET = StampingVisitor()


def stamp(
    sig: Signature, visitor: StampingVisitor | None, append: bool, headers: Mapping[str, Any]
) -> None:
    """Stamp `sig`, its parts and its links, in place."""
    chosen = visitor if visitor is not None else _QUIET
    if isinstance(sig, chain):
        inner = _added(headers, chosen.on_chain_start(sig, **headers))
        for step in sig.tasks:
            stamp(step, visitor, append, inner)
        chosen.on_chain_end(sig, **inner)
    elif isinstance(sig, group):
        inner = _added(headers, chosen.on_group_start(sig, **headers))
        for member in sig.tasks:
            stamp(member, visitor, append, inner)
        chosen.on_group_end(sig, **inner)
    elif isinstance(sig, chord):
        inner = _added(headers, chosen.on_chord_header_start(sig, **headers))
        for part in sig.tasks:
            stamp(part, visitor, append, inner)
        chosen.on_chord_header_end(sig, **inner)
        if sig.body is not None:
            stamp(sig.body, visitor, append, _added(inner, chosen.on_chord_body(sig, **inner)))
    else:
        inner = _added(headers, chosen.on_signature(sig, **headers))
        _set(sig.options, inner, append)
    _stamp_links(sig, visitor, append, headers)


def _stamp_links(
    sig: Signature, visitor: StampingVisitor | None, append: bool, headers: Mapping[str, Any]
) -> None:
    chosen = visitor if visitor is not None else _QUIET
    for option, hook in (("link", chosen.on_callback), ("link_error", chosen.on_errback)):
        links = as_list(sig.options.get(option))
        if not links:
            continue
        made = [signature(link, app=sig._app) for link in links]
        for link in made:
            stamp(link, visitor, append, _added(headers, hook(link, **headers)))
        sig.options[option] = made


def _added(headers: Mapping[str, Any], more: Mapping[str, Any] | None) -> dict[str, Any]:
    inner = {**headers, **(more or {})}
    names = set(headers.get("stamped_headers", headers))
    if more:
        names |= set(more.get("stamped_headers", more))
    names.discard("stamped_headers")
    inner["stamped_headers"] = sorted(names)
    return inner


def _set(options: dict[str, Any], stamps: Mapping[str, Any], append: bool) -> None:
    before = set(options.get("stamped_headers") or ())
    names = before | set(stamps["stamped_headers"])
    for name, value in stamps.items():
        if name == "stamped_headers":
            continue
        if append and name in before and options.get(name) != value:
            both = as_list(options.get(name))
            options[name] = both + [v for v in as_list(value) if v not in both]
        elif name not in before:
            options[name] = value
    if names:
        options["stamped_headers"] = sorted(names)
