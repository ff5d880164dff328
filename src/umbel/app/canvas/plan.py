"""What applying a canvas will do, before any of it is done.

A plan holds the plain calls to publish now, in order, and the chords whose part counts must
be known to the backend before their first part goes out. `carry_out` is the only place of the
canvas that does input and output. If a message can not be encoded, or announcing a chord fails,
nothing has been sent; if publishing fails half-way the chord's keys expire on their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from umbel.app.calls import prepare_checked
from umbel.app.context import current_request
from umbel.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from umbel.app.canvas.signature import Signature
    from umbel.app.forms import Form
    from umbel.app.results import AsyncResult, GroupResult
    from umbel.app.umbel import Umbel


class ChordStart(NamedTuple):
    """A chord to announce: how many parts will report, and the shape of nested results."""

    group_id: str
    size: int
    structure: Any  # result tuple of the header when it holds groups; else None


class Planned(NamedTuple):
    """What applying one part gives: its own result, and the result of what is sent first."""

    result: AsyncResult | GroupResult
    first: AsyncResult | GroupResult


@dataclass(slots=True)
class Plan:
    """The calls (name, args, kwargs, options) and chords of one `apply_async`."""

    app: Umbel
    reply_to: str = field(init=False)  # of calls that do not say
    calls: list[tuple[str, Any, Any, dict[str, Any]]] = field(default_factory=list)
    chords: list[ChordStart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reply_to = self.app.reply_to

    def carry_out(self) -> None:
        """Announce the chords, then publish every message in one batch.

        Everything is encoded first: what can not be sent leaves nothing behind.
        """
        forms: dict[str, Form] = {}
        batch = [prepare_checked(self.app, *call, forms) for call in self.calls]
        backend = self.app.backend
        for start in self.chords:
            if start.structure is not None:
                backend.save_structure(start.group_id, start.structure)
            backend.start_chord(start.group_id, start.size)
        self.app.publish_many(batch)


def apply_planned(
    sig: Signature, args: Any, kwargs: Any, options: dict[str, Any]
) -> AsyncResult | GroupResult:
    """Plan `sig` on a private copy, carry the plan out, and note the child in a running task."""
    app = sig.app
    add_to_parent = options.pop("add_to_parent", True)
    plan = Plan(app)
    planned = sig.clone().plan(plan, args or (), kwargs or {}, options)
    plan.carry_out()
    caller = current_request()
    if add_to_parent and caller is not None and caller.id is not None:
        caller.children.append(planned.first)
    return planned.result


def require_chords(app: Umbel) -> None:
    """Refuse a chord on a backend that cannot count its parts."""
    backend = app.backend
    if not backend.supports_chords:
        raise ImproperlyConfigured(
            f"a chord needs a result backend that counts its parts, and {backend.shown_url!r} "
            "does not: set result_backend to a Redis address such as redis://localhost/0"
        )
