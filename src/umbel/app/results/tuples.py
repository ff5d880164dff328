"""Result handles as nested tuples, the form in which they are stored and sent.

One task is `[[id, parent], null]`, a group `[[id, parent], [members]]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.app.results.async_result import AsyncResult
    from umbel.app.results.group_result import GroupResult
    from umbel.app.umbel import Umbel


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
