"""What a page is: its facts, the templates that show them, and which parts of it are live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.dashboard.site import Site

Params = Mapping[str, str]
Facts = dict[str, Any]


class NotFound(Exception):
    """There is no such thing; the text says what was looked for."""


class BadQuestion(Exception):
    """The address asks for something that makes no sense; the text says what would."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page. `live` are the templates of the parts that are sent anew when they change.

    The last argument of `facts` is whether they may hold details: arguments, results and the texts
    of errors. If not, nothing in them may depend on details.
    """

    name: str
    path: str
    title: str
    facts: Callable[[Site, Params, bool], Facts]
    live: tuple[str, ...] = ()
    interval_s: float = 0.25


def whole(params: Params, name: str, default: int, low: int, high: int) -> int:
    """A number of the address, within bounds; the default for what is none."""
    text = params.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        return default
    return min(max(int(text), low), high)
