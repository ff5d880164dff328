"""Two elections of the demo: one that goes smoothly, and one whose winner-to-be is killed."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from umbel.app.events.receiver import Receiver
from umbel.cli.demo import tasks

if TYPE_CHECKING:
    from umbel.cli.demo.cluster import Cluster

DECISION_TIMEOUT_S = 15.0
CANDIDATES_TIMEOUT_S = 0.3
SETTLE_S = 1.0


class Witness:
    """Listens to the cluster: who stands for election, and what was started how often."""

    def __init__(self) -> None:
        self._receiver = Receiver(tasks.app, handlers={"*": self._hear}, wakeup=False)
        self._thread = threading.Thread(target=self._receiver.capture, daemon=True)
        self._heard = threading.Condition()
        self._candidates: dict[str, dict[str, tuple[int, str]]] = {}
        self._started: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self._receiver.wait_ready(DECISION_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.stop()
        self._thread.join(5)
        self._receiver.close()

    def _hear(self, event: dict[str, Any]) -> None:
        node = event["hostname"]
        with self._heard:
            if event["type"] == "worker-elect":
                rank = event["clock"], f"{node}.{event['pid']}"
                self._candidates.setdefault(str(event.get("id")), {})[node] = rank
            elif event["type"] == "task-started":
                self._started.setdefault(event["uuid"], []).append(node)
            self._heard.notify_all()

    def first_in_rank(self, election_id: str, count: int) -> str | None:
        """The candidate that will try first, when so many have said that they stand."""
        with self._heard:
            self._heard.wait_for(
                lambda: len(self._candidates.get(election_id, {})) >= count, CANDIDATES_TIMEOUT_S
            )
            known = self._candidates.get(election_id, {})
            return min(known, key=known.__getitem__) if known else None

    def executions(self, task_id: str) -> list[str]:
        """The nodes on which a task was started, as often as it was."""
        with self._heard:
            return list(self._started.get(task_id, ()))


def hold_elections(cluster: Cluster, console: Console) -> bool:
    """Hold both; whether each was carried out exactly once."""
    with Witness() as witness:
        calm = _elect(witness, cluster, console, kill=False)
        rough = _elect(witness, cluster, console, kill=True)
    return calm and rough


def _elect(witness: Witness, cluster: Cluster, console: Console, *, kill: bool) -> bool:
    began = time.monotonic()
    result = tasks.lead.s().election()
    killed = None
    if kill:
        killed = witness.first_in_rank(result.id, len(cluster.alive()))
        if killed is not None:
            cluster.kill(killed)
    leader = None
    with contextlib.suppress(TimeoutError):
        leader = result.get(timeout=DECISION_TIMEOUT_S)
    took_s = time.monotonic() - began
    time.sleep(SETTLE_S)  # a second execution would show by now
    count = len(witness.executions(result.id))
    what = f"{killed} was first in rank and got killed; " if killed else ""
    console.print(
        f"election: {what}carried out {count} time{'s' if count != 1 else ''}, "
        f"on {leader or 'nobody'}, after {took_s:.1f} s",
        style=None if count == 1 else "red",
        markup=False,
        soft_wrap=True,
    )
    return count == 1 and leader is not None
