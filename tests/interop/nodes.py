"""Workers as real programs, and how a Celery client talks to one of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import celery.exceptions
import pytest

from tests.interop.peers import Client, Marks
from tests.servers import RedisServer, wait_until
from tests.workers import Program

WAIT_S = 20.0


@dataclass(frozen=True)
class Node:
    """One worker, and how a Celery client talks to it."""

    name: str
    pool: str
    queue: str
    worker: Program
    client: Client
    marks: Marks

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        return self.client.send(task, *args, **{"queue": self.queue, **options})

    def inspect(self, method: str, *args: Any, **arguments: Any) -> Any:
        asked = self.client.app.control.inspect(destination=[self.name], timeout=WAIT_S)
        replies = getattr(asked, method)(*args, **arguments)
        assert list(replies) == [self.name]
        return replies[self.name]

    def control(self, command: str, **arguments: Any) -> Any:
        replies = self.client.app.control.broadcast(
            command, arguments, destination=[self.name], reply=True, timeout=WAIT_S
        )
        assert [list(reply) for reply in replies] == [[self.name]]
        return replies[0][self.name]

    @contextmanager
    def busy(self) -> Iterator[Any]:
        """A task runs, in the worker's only slot; it ends behind this."""
        mark = self.marks.name()
        running = self.send("gate", mark)
        self.marks.wait(f"{mark}:reached")
        try:
            yield running
        finally:
            self.marks.open(mark)
            running.get(timeout=WAIT_S)

    def wait_until_known(self, task_id: str, state: str) -> None:
        """Wait until the worker says that the task is there, in this state."""
        wait_until(
            lambda: self.inspect("query_task", task_id).get(task_id, [None])[0] == state,
            WAIT_S,
            f"{task_id} to be {state} on {self.name}",
        )

    def wait_until_it_answers(self) -> None:
        """A Celery worker says that it is ready before it hears what it is asked over Redis."""
        asked = self.client.app.control.inspect(destination=[self.name], timeout=0.5)
        wait_until(asked.ping, WAIT_S, f"{self.name} to answer")


def marks_url(server: RedisServer) -> str:
    """Where tasks leave marks; those that wait there may wait for long."""
    return f"{server.url_of(0)}?socket_timeout=60"


def start(
    library: str, settings: dict[str, Any], marks_url: str, cwd: Path, *arguments: str
) -> Program:
    """A worker; it is not ready yet."""
    module = f"tests.interop.{library}_node"
    return Program(
        [sys.executable, "-m", library, "-A", module, "worker", "-l", "info", *arguments],
        cwd=cwd,
        env={"INTEROP_SETTINGS": json.dumps(settings), "INTEROP_MARKS": marks_url},
    )


def revoked_for(result: Any) -> str:
    """Why a task was revoked, as its result tells; it must be told without delay."""
    with pytest.raises(celery.exceptions.TaskRevokedError) as found:
        result.get(timeout=WAIT_S)
    assert result.state == "REVOKED"
    return str(found.value)
