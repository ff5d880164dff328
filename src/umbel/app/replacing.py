"""`self.replace(sig)`: another signature takes the place of the running task.

The new one gets the id of the old, so whoever waits for the old task waits for the new one;
callbacks, errbacks, the rest of the chain and the chord go over to it. What ends in a group ends
in a list of its values instead: one id can stand for one value only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from umbel.exceptions import Ignore, ImproperlyConfigured

if TYPE_CHECKING:
    from umbel.app.context import Context
    from umbel.app.task import Task

# A task that replaces itself for ever is a loop nobody sees; this many steps end it.
REPLACE_DEPTH_MAX = 1_000


class ReplacedInline(Ignore):
    """Ends a body whose replacement was run inline; `value` is the task's value."""

    def __init__(self, value: Any) -> None:
        super().__init__("Replaced by new task")
        self.value = value


def replace(task: Task, sig: Any) -> NoReturn:
    """Send `sig` in the place of the call that is being executed, or run it inline."""
    from umbel.app.canvas import signature

    request = task.request
    if request.id is None:
        raise RuntimeError(
            f"{task.name} was called as a function: only a task that was sent, or run with "
            "apply(), can be replaced"
        )
    nesting = (request.replaced_task_nesting or 0) + 1
    if nesting > REPLACE_DEPTH_MAX:
        raise RecursionError(f"task {task.name}[{request.id}] was replaced {nesting} times")
    replacement = _ending_in_one(task, signature(sig, app=task.app).clone())
    _mark(replacement, nesting)
    if request.is_eager:
        lineage = {"parent_id": request.parent_id, "root_id": request.root_id}
        raise ReplacedInline(replacement.apply(task_id=request.id, **lineage).get())
    for callback in request.callbacks or ():
        replacement.link(callback)
    for errback in request.errbacks or ():
        replacement.link_error(errback)
    if request.reply_to:
        _last_step(replacement).set(reply_to=request.reply_to)
    replacement.apply_async(**_options(request), add_to_parent=False)
    raise Ignore("Replaced by new task")


def _options(request: Context) -> dict[str, Any]:
    options = {
        "task_id": request.id,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "group_id": request.group,
        "group_index": request.group_index,
        "chord": request.chord,
        "chain": request.chain,
        "reply_to": request.reply_to,
    }
    return {key: value for key, value in options.items() if value is not None}


def _ending_in_one(task: Task, sig: Any) -> Any:
    """`sig` with a group at its end made a chord that gathers the group's values."""
    from umbel.app.canvas import chain, chord, group

    if isinstance(sig, (group, chain)) and not sig.tasks:
        raise ImproperlyConfigured(
            f"{task.name} is replaced by an empty {sig.subtask_type}, which would never end"
        )
    if isinstance(sig, group):
        return chord(sig, body=task.app.tasks["celery.accumulate"].s(index=0), app=task.app)
    if isinstance(sig, chain):
        last = sig.tasks[-1]
        # A group of one at the end of a chain is that task.
        if not (isinstance(last, group) and len(last.tasks) == 1):
            sig.tasks = [*sig.tasks[:-1], _ending_in_one(task, last)]
    elif isinstance(sig, chord) and sig.body is not None:
        sig.body = _ending_in_one(task, sig.body)
    return sig


def _mark(sig: Any, nesting: int) -> None:
    sig.set(replaced_task_nesting=nesting)
    if sig.subtask_type == "chain":
        for step in sig.tasks:
            _mark(step, nesting)


def _last_step(sig: Any) -> Any:
    # The one whose result has the old task's id: its report goes to whoever waits for that.
    while sig.subtask_type == "chain" and sig.tasks:
        sig = sig.tasks[-1]
    return sig
