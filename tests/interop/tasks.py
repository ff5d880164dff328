"""The tasks of both kinds of workers: one source, given to a Celery and to an Umbel application.

The two must offer the same to a task's author, so nothing here knows which one it runs on.
What a test wants to see beyond results (a callback ran, how often, on which worker) is noted
as a *mark*: JSON pushed to a Redis list that the test reads.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from typing import Any

import redis

from tests.interop.worker_only import Shortage

SHOWN = (
    "id", "root_id", "parent_id", "group", "group_index", "retries", "shadow", "hostname",
    "stamped_headers", "stamps", "timelimit", "correlation_id", "ignore_result",
)  # fmt: skip
BLOCK_MAX_S = 60
# A Celery worker sends a retry first and then stores RETRY, over whatever the next execution
# has stored by then; so the next one must not be too quick.
RETRY_S = 0.1


def leave(mark: str, value: Any = None) -> None:
    """Tell the test something."""
    with closing(redis.Redis.from_url(os.environ["INTEROP_MARKS"])) as client:
        client.rpush(mark, json.dumps(value))


def wait_for_permission(gate: str) -> None:
    """Block until the test opens the gate."""
    with closing(redis.Redis.from_url(os.environ["INTEROP_MARKS"])) as client:
        if client.blpop([gate], timeout=BLOCK_MAX_S) is None:
            raise TimeoutError(gate)


def add_tasks(app: Any) -> None:
    """Register everything with `app`."""
    _add_plain(app)
    _add_failing(app)
    _add_observers(app)
    _add_senders(app)


def _add_plain(app: Any) -> None:
    @app.task(name="t.add")
    def add(x: Any, y: Any = 10) -> Any:
        return x + y

    @app.task(name="t.report", bind=True)
    def report(self: Any, count: int) -> int:
        for done in range(count):
            self.send_event("task-progress", done=done)
        return count

    @app.task(name="t.sum")
    def total(numbers: list[Any], extra: int = 0) -> Any:
        return sum(numbers) + extra

    @app.task(name="t.echo")
    def echo(*args: Any, **kwargs: Any) -> Any:
        return [list(args), kwargs]

    @app.task(name="t.types")
    def types(**values: Any) -> Any:
        return {"seen": {name: type(v).__name__ for name, v in values.items()}, "back": values}

    @app.task(name="t.size")
    def size(text: str) -> Any:
        return [len(text), text]

    @app.task(name="t.ignored", ignore_result=True)
    def ignored(mark: str) -> str:
        leave(mark)
        return "never seen"


def _add_failing(app: Any) -> None:
    @app.task(name="t.fail")
    def fail(*_: Any) -> None:
        raise ValueError("bad", 3)

    @app.task(name="t.lack")
    def lack(item: str) -> None:
        raise Shortage(item, 7)

    @app.task(name="t.flaky", bind=True)
    def flaky(self: Any, failures: int, delay: float = RETRY_S) -> Any:
        if self.request.retries < failures:
            try:
                raise ConnectionError("not yet")
            except ConnectionError as exc:
                raise self.retry(exc=exc, countdown=delay) from None
        return [self.request.retries, self.request.id, self.request.headers]

    @app.task(name="t.gives_up", bind=True, max_retries=1, default_retry_delay=RETRY_S)
    def gives_up(self: Any, with_cause: bool) -> None:
        raise self.retry(exc=ValueError("at last") if with_cause else None)

    @app.task(name="t.auto", bind=True, autoretry_for=(KeyError,), retry_backoff=False,
              default_retry_delay=RETRY_S, max_retries=3)  # fmt: skip
    def auto(self: Any) -> int:
        if self.request.retries < 2:
            raise KeyError("again")
        return int(self.request.retries)

    @app.task(name="t.sleep")
    def sleep(seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return "slept"


def _add_observers(app: Any) -> None:
    @app.task(name="t.request", bind=True)
    def request(self: Any, *_: Any, header: str | None = None) -> dict[str, Any]:
        shown = {name: getattr(self.request, name, None) for name in SHOWN}
        shown["own_header"] = self.request.get(header) if header else None
        shown["headers"] = {
            name: value
            for name, value in (self.request.headers or {}).items()
            if name.startswith("shop-")
        }
        return shown

    @app.task(name="t.now")
    def now() -> float:
        return time.time()

    @app.task(name="t.mark", bind=True)
    def mark(self: Any, *args: Any, mark: str) -> Any:
        request = self.request
        leave(mark, {"args": args, "id": request.id, "parent": request.parent_id,
                     "root": request.root_id, "worker": request.hostname})  # fmt: skip
        return args[0] if args else None

    @app.task(name="t.new_errback")
    def new_errback(request: Any, exc: Any, traceback: Any, mark: str) -> None:
        leave(mark, {"id": request.id, "error": repr(exc), "has_traceback": bool(traceback)})

    @app.task(name="t.old_errback")
    def old_errback(failed_id: str, mark: str | None = None) -> None:
        leave(mark or failed_id, {"id": failed_id})

    @app.task(name="t.gate", bind=True, track_started=True)
    def gate(self: Any, mark: str) -> str:
        leave(f"{mark}:reached", self.request.hostname)
        wait_for_permission(f"{mark}:open")
        return "through"

    @app.task(name="t.late", bind=True, acks_late=True)
    def late(self: Any, mark: str) -> Any:
        info = self.request.delivery_info or {}
        leave(f"{mark}:reached", self.request.hostname)
        wait_for_permission(f"{mark}:open")
        return [self.request.hostname, bool(info.get("redelivered"))]

    @app.task(name="t.number", acks_late=True, ignore_result=True)
    def number(mark: str, value: int) -> None:
        with closing(redis.Redis.from_url(os.environ["INTEROP_MARKS"])) as client:
            client.sadd(mark, value)

    @app.task(name="t.where", bind=True)
    def where(self: Any, number: int) -> Any:
        return [number, self.request.hostname]

    @app.task(name="t.progress", bind=True)
    def progress(self: Any, mark: str) -> str:
        self.update_state(state="PROGRESS", meta={"done": 3, "of": 4})
        leave(f"{mark}:reached")
        wait_for_permission(f"{mark}:open")
        return "done"


def _add_senders(app: Any) -> None:
    @app.task(name="t.spawn", bind=True)
    def spawn(self: Any, x: int) -> str:
        app.signature("t.add", (x, 1)).delay()
        app.signature("t.add", (x, 2)).delay()
        return "spawned"

    @app.task(name="t.replaced", bind=True)
    def replaced(self: Any, x: int) -> None:
        raise self.replace(app.signature("t.add", (x, 100)))

    @app.task(name="t.replaced_by_chain", bind=True)
    def replaced_by_chain(self: Any, x: int) -> None:
        steps = app.signature("t.add", (x, 100)) | app.signature("t.add", (1000,))
        raise self.replace(steps)

    @app.task(name="t.replaced_by_group", bind=True)
    def replaced_by_group(self: Any, n: int) -> None:
        made = app.signature(
            {
                "task": "celery.group",
                "args": (),
                "kwargs": {"tasks": [app.signature("t.add", (i, 100)) for i in range(n)]},
                "options": {},
                "subtask_type": "group",
                "immutable": False,
            }
        )
        raise self.replace(made)
