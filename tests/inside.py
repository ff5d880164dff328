"""A worker in this process, for tests that measure or change what is inside of it.

Times are taken where things happen, not across processes. Everything that touches the worker's
tables goes through `call`, which runs on the loop's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tests.servers import wait_until
from umbel import Umbel
from umbel.worker.runtime.loops import synloop
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.worker import Worker

T = TypeVar("T")
WAIT_S = 20.0


class Inside:
    """One worker, on a thread of its own; `app` is a client that outlives it."""

    def __init__(
        self,
        settings: dict[str, Any],
        tasks: Callable[[Umbel], None],
        *,
        sync: bool = False,
        pool: str = "threads",
        concurrency: int = 2,
        prepare: Callable[[Worker], None] | None = None,
        **options: Any,
    ) -> None:
        self.client = Umbel("client", set_as_current=False, **settings)
        self.app = Umbel("inside", set_as_current=False, **settings)
        tasks(self.app)
        chosen = WorkerOptions(
            hostname="inside@test", pool=pool, concurrency=concurrency, **options
        )
        self.worker = Worker(self.app, chosen)
        if sync:
            self.worker.consumer.blueprint.step("Evloop").loop = synloop  # type: ignore[attr-defined]
        if prepare is not None:
            prepare(self.worker)
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker-inside", daemon=True)

    def _run(self) -> None:
        try:
            self.exit_code = self.worker.run()
        except BaseException as exc:
            self.error = exc

    def start(self, *, wait: bool = True) -> Inside:
        self._thread.start()
        if wait:
            self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.worker.ready_now or self.error, WAIT_S, "a worker that is ready")
        if self.error is not None:
            raise self.error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        return self.client.send_task(name, args, **options)

    def call(self, work: Callable[[], T], timeout_s: float = WAIT_S) -> T:
        """Run `work` on the loop's thread and return its value."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as exc:
                done.set_exception(exc)

        self.worker.inbox.post(run)
        return done.result(timeout_s)

    def break_connection(self) -> None:
        """Let the loop find its connection broken, and wait for the next one."""
        counters = self.worker.counters
        before, old = counters.connections_lost, self.worker.consumer.connection

        def fail() -> None:
            self.worker.consumer.failure = ConnectionError("broken by a test")

        self.call(fail)
        wait_until(lambda: counters.connections_lost > before, WAIT_S, "the loss")
        # Until then it looks as ready as it was.
        wait_until(lambda: self.worker.consumer.connection is not old, WAIT_S, "another one")
        self.wait_until_ready()

    def join(self, timeout_s: float = WAIT_S) -> int | None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the worker did not end"
        if self.error is not None:
            raise self.error
        return self.exit_code

    def stop(self, *, cold: bool = False) -> int | None:
        self.worker.stop(cold=cold)
        return self.join()

    def close(self) -> None:
        if self._thread.is_alive():
            self.worker.cold = True
            self.worker.stop(cold=True)
            self._thread.join(WAIT_S)
        elif self._thread.ident is None:
            self.app.close()
        self.client.close()


class Times:
    """Moments that threads write down."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def now(self) -> None:
        self.all.append(time.monotonic())

    def wait(self, count: int, timeout_s: float = WAIT_S) -> list[float]:
        wait_until(lambda: len(self.all) >= count, timeout_s, f"{count} moments")
        return self.all


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
