"""The operator `|`: what comes out of the left is given to the right.

| left | right | gives |
|---|---|---|
| task | anything | chain |
| group | anything | chord with the right as body |
| chord | anything | the same chord, its body followed by the right |
| chain ending in a group | anything | chain whose last step is a chord |
| chain | anything | longer chain |

A group of one task on the right is that task. Neither side is changed.
"""

from __future__ import annotations

from typing import Any

from umbel.app.canvas.chain import chain
from umbel.app.canvas.chord import chord
from umbel.app.canvas.group import group
from umbel.app.canvas.signature import Signature


def pipe(left: Signature, right: Any) -> Any:
    """`left | right`."""
    if not isinstance(right, Signature):
        return NotImplemented
    app = left.known_app() or right.known_app()
    if isinstance(left, group):
        return chord(left.clone(), body=right.clone(), app=app)
    if isinstance(left, chord):
        joined = left.clone()
        joined.body = pipe(joined.body, right) if joined.body is not None else right.clone()
        return joined
    before, after = _steps(left), _steps(right)
    if before and isinstance(before[-1], group) and after:
        body = after[0] if len(after) == 1 else chain(*after, app=app)
        before, after = before[:-1], [chord(before[-1], body=body, app=app)]
        if not before:
            return after[0]
    return chain(*before, *after, app=app)


def _steps(sig: Signature) -> list[Signature]:
    if isinstance(sig, chain):
        return sig.unchain_tasks()
    if isinstance(sig, group) and len(sig.tasks) == 1 and not sig.options:
        return [sig.tasks[0].clone()]
    return [sig.clone()]
