"""Both libraries behind one face: clients in this process, workers in processes of their own.

A `Client` sends by name only, as a program that does not have the tasks' code; it offers what
the two libraries spell alike, so one test serves both. `Marks` reads what tasks leave behind.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
import uuid
from pathlib import Path
from typing import Any

import celery
import celery.canvas
import celery.exceptions
import redis

import umbel
import umbel.exceptions
from tests.servers import wait_until
from tests.workers import READY, Program, shifted_clock

WAIT_S = 30.0
# For groups: a Celery client looks at them twice a second unless told to look more often.
OFTEN: Any = {"timeout": WAIT_S, "interval": 0.01}
CELERY, UMBEL = "celery", "umbel"


class Client:
    """An application without tasks that sends and waits."""

    def __init__(self, library: str, **settings: Any) -> None:
        self.library = library
        self.is_celery = library == CELERY
        self.errors: types.ModuleType
        self._canvas: Any
        if self.is_celery:
            self.app: Any = celery.Celery("client", set_as_current=False)
            self.app.conf.update(settings)
            self.errors, self._canvas = celery.exceptions, celery.canvas
        else:
            self.app = umbel.Umbel("client", set_as_current=False, **settings)
            self.errors, self._canvas = umbel.exceptions, umbel

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        """Send one task; keyword arguments of the task itself go in `kwargs`."""
        return self.app.send_task(f"t.{name}", args, options.pop("kwargs", None), **options)

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        """Send one task and wait for its value."""
        return self.send(name, *args, **options).get(timeout=WAIT_S)

    def s(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.app.signature(f"t.{name}", args=args, kwargs=kwargs)

    def si(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.app.signature(f"t.{name}", args=args, kwargs=kwargs, immutable=True)

    def chain(self, *steps: Any) -> Any:
        return self._canvas.chain(*steps, app=self.app)

    def group(self, *members: Any) -> Any:
        return self._canvas.group(members, app=self.app)

    def chord(self, header: Any, body: Any) -> Any:
        return self._canvas.chord(header, body, app=self.app)

    def map(self, name: str, items: Any) -> Any:
        return self._canvas.xmap(self.s(name), items, app=self.app)

    def starmap(self, name: str, items: Any) -> Any:
        return self._canvas.xstarmap(self.s(name), items, app=self.app)

    def chunks(self, name: str, items: Any, n: int) -> Any:
        return self._canvas.chunks(self.s(name), items, n, app=self.app)

    def close(self) -> None:
        if self.is_celery:
            backend = self.app.backend
            # Celery's results unsubscribe when they are collected, long after this if a failed
            # test's traceback holds them.
            backend.remove_pending_result = lambda result: result
            with contextlib.suppress(Exception):
                backend.result_consumer.stop()
            client = getattr(backend, "client", None)
            if client is not None:
                client.connection_pool.disconnect()
        self.app.close()


class Marks:
    """What tasks tell the test, and the gates at which they wait."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def name(self) -> str:
        """A mark that nobody else uses."""
        return f"mark-{uuid.uuid4()}"

    def wait(self, mark: str, timeout_s: float = WAIT_S) -> Any:
        """The next mark of that name; fails the test if none comes."""
        wait_until(lambda: self.count(mark), timeout_s, f"the mark {mark!r}")
        return json.loads(self._client.lpop(mark))

    def count(self, mark: str) -> int:
        return int(self._client.llen(mark))

    def all(self, mark: str) -> list[Any]:
        return [json.loads(value) for value in self._client.lrange(mark, 0, -1)]

    def open(self, gate: str) -> None:
        """Let one task through that waits at `<gate>:open`."""
        self._client.rpush(f"{gate}:open", "1")


def start_worker(
    library: str,
    settings: dict[str, Any],
    *,
    marks_url: str,
    cwd: Path,
    pool: str = "prefork",
    concurrency: int = 2,
    name: str | None = None,
    shift_s: float = 0.0,
) -> Program:
    """Start a worker of one of the libraries and wait until it is ready."""
    module = f"tests.interop.{library}_node"
    arguments = ["-P", pool, "-c", str(concurrency), "-l", "info", "-n", name or f"{library}@%h"]
    if library == CELERY:
        arguments += ["--without-gossip", "--without-mingle"]
    program = Program(
        [sys.executable, "-m", library, "-A", module, "worker", *arguments],
        cwd=cwd,
        env={
            "INTEROP_SETTINGS": json.dumps(settings),
            "INTEROP_MARKS": marks_url,
            **(shifted_clock(shift_s) if shift_s else {}),
        },
        fresh=bool(shift_s),
    )
    try:
        program.wait_for(READY)
    except BaseException:
        program.kill()
        raise
    return program
