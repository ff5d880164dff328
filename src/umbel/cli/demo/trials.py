"""Two things that go wrong in the demo: tasks that are called back, and connections that are cut.

Both are judged by results alone, as whoever has sent the tasks would judge them.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing, suppress
from typing import Any

from rich.console import Console

from umbel.app.results.arrivals import arrivals
from umbel.cli.demo import tasks

PARKED_COUNT = 40
PARKED_S = 3.0
CUT_COUNT = 300
ENDS_TIMEOUT_S = 30.0


def revoke_some(console: Console) -> bool:
    """Send tasks for later, and call every other one back; whether only those did not run."""
    with console.status(f"{PARKED_COUNT} tasks wait for their time; every other one is revoked"):
        sent = [tasks.add.apply_async((n, n), countdown=PARKED_S).id for n in range(PARKED_COUNT)]
        unwanted = sent[::2]
        replies = tasks.app.control.revoke(unwanted, reply=True, timeout=2.0)
        metas = _ends(sent)
    states = {task_id: meta["status"] for task_id, meta in metas.items()}
    expected = {task_id: "REVOKED" if task_id in unwanted else "SUCCESS" for task_id in sent}
    right = states == expected
    counts = Counter(states.values())
    _say(
        console,
        f"revocation: {len(unwanted)} of {len(sent)} waiting tasks were revoked, "
        f"{len(replies or ())} workers took note: {counts['REVOKED']} did not run, "
        f"{counts['SUCCESS']} did",
        right,
    )
    return right


def cut_connections(console: Console) -> bool:
    """Cut every connection to the broker while tasks are sent and run; whether none was lost."""
    began = time.monotonic()
    with console.status("every connection to the broker is cut, in the middle of the work"):
        calls = [tasks.work_for.s(0.01, n) for n in range(CUT_COUNT)]
        results = tasks.app.send_many(calls[: CUT_COUNT // 2])
        cut = _cut()
        results += tasks.app.send_many(calls[CUT_COUNT // 2 :])
        metas = _ends([result.id for result in results])
    values = [metas.get(result.id, {}).get("result") for result in results]
    right = values == list(range(CUT_COUNT))
    lost = CUT_COUNT - len(metas)
    _say(
        console,
        f"broken connection: {cut} connections were cut with {CUT_COUNT} tasks under way; "
        f"{lost or 'none'} lost, after {time.monotonic() - began:.1f} s",
        right,
    )
    return right


def _cut() -> int:
    """Have the broker hang up on everybody but this client; on how many."""
    backend: Any = tasks.app.backend  # of the embedded broker, which is a Redis
    return sum(
        int(backend.client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"))
        for kind in ("normal", "pubsub")
    )


def _ends(task_ids: list[str]) -> dict[str, dict[str, Any]]:
    """What became of the tasks, of those that ended in time."""
    ended: dict[str, dict[str, Any]] = {}
    with (
        suppress(TimeoutError),
        closing(arrivals(tasks.app.backend, task_ids, ENDS_TIMEOUT_S)) as metas,
    ):
        for meta in metas:
            ended[meta["task_id"]] = meta
    return ended


def _say(console: Console, line: str, right: bool) -> None:
    console.print(
        line, style=None if right else "red", markup=False, highlight=False, soft_wrap=True
    )
