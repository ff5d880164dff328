"""`self.replace(sig)`: another signature takes the place of the running task.

The new one gets the id of the old, so whoever waits for the old task waits for the new one;
callbacks, errbacks, the rest of the chain and the chord go over to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umbel.exceptions import Ignore, ImproperlyConfigured

if TYPE_CHECKING:
    from umbel.app.task import Task

# A task that replaces itself for ever is a loop nobody sees; this many steps end it.
REPLACE_DEPTH_MAX = 1_000


def replace(task: Task, sig: Any) -> Any:
    """Send `sig` in the place of the call that is being executed; run inline, its value."""
    from umbel.app.canvas import chord, group

    request = task.request
    nesting = (request.replaced_task_nesting or 0) + 1
    if nesting > REPLACE_DEPTH_MAX:
        raise RecursionError(f"task {task.name}[{request.id}] was replaced {nesting} times")
    if isinstance(sig, group):
        if not sig.tasks:
            raise ImproperlyConfigured(
                f"{task.name} is replaced by an empty group, which would never end"
            )
        sig = chord(sig, body=task.app.tasks["celery.accumulate"].s(), app=task.app)
    replacement = sig.clone()
    for callback in request.callbacks or ():
        replacement.link(callback)
    for errback in request.errbacks or ():
        replacement.link_error(errback)
    replacement.set(replaced_task_nesting=nesting)
    options = {
        "task_id": request.id,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "group_id": request.group,
        "group_index": request.group_index,
        "chord": request.chord,
        "chain": request.chain,
        "reply_to": request.reply_to,
        "add_to_parent": False,
    }
    chosen = {key: value for key, value in options.items() if value is not None}
    if request.is_eager:
        return replacement.apply().get()
    replacement.apply_async(**chosen)
    raise Ignore("Replaced by new task")
