"""Commands that keep tasks from running, or end them."""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from umbel.cluster.revocations import BAD_HEADER, Revocations
from umbel.exceptions import TaskRevokedError
from umbel.worker.control.commands.registry import command
from umbel.worker.control.panel import CommandState
from umbel.worker.runtime.delivery_driver import TaskDelivery

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

# So often, and so long apart, is a task looked for that may just be beginning.
BEGINNING_LOOKS, BEGINNING_S = 3, 0.01
# How long a solo worker may take to leave a task before the answer says that it has not.
ENDING_S = 0.4
READ_MAX = 100  # stored results at a time
ENDED_ELSEWHERE = frozenset({"PENDING", "RECEIVED", "RETRY", "REJECTED"})


# These may run beside the loop: one that stands still in a task must not begin the next one first.
@command(anywhere=True, stamped=True)
def revoke(
    state: CommandState,
    task_id: Any = None,
    terminate: Any = False,
    signal: Any = None,
    stamp: Any = None,
    **_: Any,
) -> dict[str, str]:
    """Do not run these tasks; with `terminate` end those that run."""
    worker, ids = state.worker, _ids(task_id)
    number = signal_number(signal)
    _revoke(state, ids, stamp, "terminate" if terminate else "revoke")
    if not terminate:
        return {"ok": f"tasks {_shown(ids)} flagged as revoked"}
    ended = _terminate(
        state, (held for one in sorted(ids) for held in worker.deliveries.of(one)), number
    )
    if not ended:
        return {"ok": "terminate: tasks unknown"}
    return {"ok": f"terminate: {', '.join(ended)}{_still_running(state, ended)}"}


@command(anywhere=True, stamped=True)
def terminate(
    state: CommandState, signal: Any = None, task_id: Any = None, stamp: Any = None, **_: Any
) -> dict[str, str]:
    """Revoke these tasks and end those that run."""
    return revoke(state, task_id, terminate=True, signal=signal, stamp=stamp)


@command(anywhere=True, stamped=True)
def revoke_by_stamped_headers(
    state: CommandState,
    headers: Any = None,
    terminate: Any = False,
    signal: Any = None,
    stamp: Any = None,
    **_: Any,
) -> dict[str, str]:
    """Do not run tasks that carry one of these stamps; with `terminate` end those that run."""
    worker, number = state.worker, signal_number(signal)
    refused = worker.revocations.counts[BAD_HEADER]
    changed = worker.revocations.revoke_headers(headers, worker.wall(), stamp)
    if worker.revocations.counts[BAD_HEADER] > refused:
        raise ValueError(f"headers {headers!r:.200}: give {{name: value}} or ['name=value']")
    worker.learn_revoked(changed, "revoke_by_stamped_headers")
    shown = _headers_shown(headers)
    if not terminate:
        return {"ok": f"headers {shown} flagged as revoked, but not terminated"}
    given = Revocations(time.time)  # not all that are revoked: what runs was left alone before
    given.revoke_headers(headers, time.time())

    held = list(worker.deliveries.reserved.values())
    stamped = (one for one in held if given.matching(one.header.stamps) is not None)
    ended = _terminate(state, stamped, number)
    if not ended:
        return {"ok": f"headers {shown} were not terminated"}
    return {"ok": f"headers {shown} revoked{_still_running(state, ended)}"}


def signal_number(given: Any) -> int:
    """A signal from its number or name; SIGTERM when none is given."""
    if given is None or given == "":
        return int(signals.SIGTERM)
    try:
        if (isinstance(given, int) and not isinstance(given, bool)) or str(given).isdecimal():
            return int(signals.Signals(int(given)))
        name = str(given).upper()
        return int(signals.Signals[name if name.startswith("SIG") else f"SIG{name}"])
    except (KeyError, ValueError):
        raise ValueError(f"signal {given!r}: give a name such as SIGKILL, or a number") from None


def _ids(given: Any) -> set[str]:
    ids = [given] if isinstance(given, str) else given
    wrong = not isinstance(ids, (list, tuple, set)) or not all(isinstance(one, str) for one in ids)
    if wrong or not ids:
        raise ValueError(f"task_id {given!r:.200}: give the id of a task, or a list of them")
    return set(ids)


def _shown(ids: set[str]) -> str:
    return "{" + ", ".join(repr(one) for one in sorted(ids)) + "}"


def _headers_shown(given: Any) -> dict[str, Any]:
    """`["name=value"]`, as command lines send it, looks like `{"name": "value"}`."""
    if isinstance(given, dict):
        return given
    found: dict[str, Any] = {}
    for text in given:
        name, _, value = str(text).partition("=")
        found.setdefault(name, []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}


def _revoke(state: CommandState, ids: set[str], stamp: Any, method: str) -> None:
    worker = state.worker
    changed = worker.revocations.revoke(sorted(ids), worker.wall(), stamp)
    worker.learn_revoked(changed, method, ids)
    # What is held here is stored when it is settled, unless a task that runs on the loop is first.
    running = (request.id for request in list(worker.deliveries.active.values()))
    here = running if worker.pool.blocks_loop else (one for one in ids if worker.deliveries.of(one))
    elsewhere = ids.difference(here)
    if elsewhere and state.app.backend.keeps_results:
        # Whoever waits for the result learns of it now, not when the message comes up.
        worker.store_aside(partial(_store_revoked, state, sorted(elsewhere)))


def _store_revoked(state: CommandState, ids: Sequence[str]) -> None:
    backend = state.app.backend
    for start in range(0, len(ids), READ_MAX):  # those that have ended come with their results
        for one, meta in backend.get_many(ids[start : start + READ_MAX]).items():
            if meta.get("status") in ENDED_ELSEWHERE:
                backend.store(one, TaskRevokedError("revoked"), "REVOKED")


def _terminate(state: CommandState, chosen: Iterable[TaskDelivery], number: int) -> list[str]:
    return [request.id for request in chosen if _end(state.worker, request, number)]


def _still_running(state: CommandState, ended: list[str]) -> str:
    """What the answer adds where a task cannot be ended from outside, as solo runs it inside."""
    worker = state.worker
    if not worker.pool.blocks_loop:
        return ""
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until:
        running = {request.id for request in list(worker.deliveries.active.values())}
        if not running.intersection(ended):
            return ""
        time.sleep(BEGINNING_S)
    return f" (still running: a {worker.pool.name} worker ends a task when its code is in Python)"


def _end(worker: Worker, request: TaskDelivery, number: int) -> bool:
    """End a task; False when the pool does not have it: then it is revoked before it gets there."""
    # The pool knows better than the machine, which hears of a begun task a moment later.
    if worker.pool.cancel(request.id, number):
        return True
    if not worker.pool.blocks_loop or request.timer is not None:
        return False
    # Beside the loop: it may be between the last look at revocations and its first step.
    for _ in range(BEGINNING_LOOKS):
        time.sleep(BEGINNING_S)
        if worker.pool.cancel(request.id, number):
            return True
    return False
