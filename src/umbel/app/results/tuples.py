"""Result handles as nested tuples, the form in which they are stored and sent.

One task is `[[id, parent], null]`, a group `[[id, parent], [members]]`. Parents nest, so a long
chain would make a document deeper than readers accept: only the nearest ancestors are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.app.results.async_result import AsyncResult
    from umbel.app.results.group_result import GroupResult
    from umbel.app.umbel import Umbel

PARENTS_MAX = 20


def as_tuple(result: AsyncResult | GroupResult) -> tuple[Any, Any]:
    """`(id, parent)` of a handle, with at most `PARENTS_MAX` ancestors."""
    line = [result]
    while line[-1].parent is not None and len(line) <= PARENTS_MAX:
        line.append(line[-1].parent)
    above: Any = None
    for node in reversed(line[1:]):
        members = getattr(node, "results", None)
        above = (
            (node.id, above),
            None if members is None else [((member.id, None), None) for member in members],
        )
    return result.id, above


def result_from_tuple(data: Any, app: Umbel | None = None) -> AsyncResult | GroupResult:
    """The handle that a tuple describes; a handle is given back as it is."""
    from umbel.app.current import current_app
    from umbel.app.results.async_result import AsyncResult
    from umbel.app.results.group_result import GroupResult

    if isinstance(data, (AsyncResult, GroupResult)):
        return data
    chosen = app if app is not None else current_app()
    try:
        head, members = data
        task_id, parent = head if isinstance(head, (list, tuple)) else (head, None)
    except (TypeError, ValueError):
        raise ValueError(
            f"{data!r} is not a stored result handle: expected [[id, parent], members]"
        ) from None
    above = result_from_tuple(parent, chosen) if parent else None
    if members is None:
        return AsyncResult(task_id, app=chosen, parent=above)
    return GroupResult(
        task_id, [result_from_tuple(m, chosen) for m in members], app=chosen, parent=above
    )
