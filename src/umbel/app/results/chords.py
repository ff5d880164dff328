"""The end of a chord: its parts become the argument of its body, or the body fails.

Called by whoever holds the claim, once. A part that failed or was revoked fails the body with
`ChordError`, which names the first such part in order. A body that cannot be sent fails too,
so that nobody waits for it in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from umbel.exceptions import ChordError

if TYPE_CHECKING:
    from umbel.app.context import Context
    from umbel.app.results.backend import Backend

logger = logging.getLogger(__name__)

FAILED_STATES = frozenset({"FAILURE", "REVOKED"})


def joined(backend: Backend, parts: Sequence[bytes], structure: Any) -> list[Any]:
    """The values of all parts, in order; raises `ChordError` when one did not succeed."""
    values: dict[str, Any] = {}
    flat = []
    for raw in parts:
        task_id, state, value = backend.codec.read_part(raw)
        if state in FAILED_STATES:
            error = ChordError(f"Dependency {task_id} raised {value!r}")
            raise error from (value if isinstance(value, BaseException) else None)
        values[task_id] = value
        flat.append(value)
    return flat if structure is None else _shaped(backend, structure, values)


def send_body(backend: Backend, request: Context, values: list[Any]) -> None:
    """Send the body with the values; what prevents that is stored as its failure."""
    from umbel.app.canvas import signature

    body = signature(request.chord, app=backend.app)
    try:
        body.apply_async((values,), add_to_parent=False)
    except Exception as exc:
        logger.exception("the body of chord %s could not be sent", request.group)
        fail_body(backend, request, ChordError(f"Callback error: {exc!r}"))


def fail_body(backend: Backend, request: Context, exc: ChordError) -> None:
    """Store the failure of the body, call its errbacks, fail what would follow it."""
    from umbel.app.canvas import signature
    from umbel.app.duties import fail_signature

    logger.warning("chord %s failed: %s", request.group, exc)
    fail_signature(backend.app, signature(request.chord, app=backend.app), exc, errbacks=True)


def _shaped(backend: Backend, structure: Any, values: dict[str, Any]) -> list[Any]:
    from umbel.app.results import GroupResult, result_from_tuple

    group = result_from_tuple(structure, backend.app)
    if not isinstance(group, GroupResult):
        raise ChordError(f"Join error: the saved group of the chord is no group: {structure!r}")
    missing = [task_id for task_id in group.as_list() if task_id not in values]
    for task_id, meta in (backend.get_many(missing) if missing else {}).items():
        if meta["status"] != "SUCCESS":
            raise ChordError(f"Dependency {task_id} raised {meta['result']!r}")
        values[task_id] = meta["result"]

    def fill(node: GroupResult) -> list[Any]:
        return [
            fill(member) if isinstance(member, GroupResult) else values[member.id]
            for member in node.results
        ]

    return fill(group)
