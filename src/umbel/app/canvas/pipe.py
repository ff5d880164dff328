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
    steps = [*_steps(left), *_steps(right)]
    if isinstance(left, chain) and left.tasks and isinstance(left.tasks[-1], group):
        before = _steps(left)
        rest = _steps(right)
        body = rest[0] if len(rest) == 1 else chain(*rest, app=app)
        steps = [*before[:-1], chord(before[-1], body=body, app=app)]
        if len(steps) == 1:
            return steps[0]
    joined_chain = left.clone() if isinstance(left, chain) else chain(app=app)
    joined_chain.tasks = steps
    joined_chain._app = app
    return joined_chain


def _steps(sig: Signature) -> list[Signature]:
    if isinstance(sig, chain):
        # A chain with options of its own stays one step, so that they keep their meaning.
        return [sig.clone()] if sig.options else [task.clone() for task in sig.tasks]
    if isinstance(sig, group) and len(sig.tasks) == 1 and not sig.options:
        return [sig.tasks[0].clone()]
    return [sig.clone()]
