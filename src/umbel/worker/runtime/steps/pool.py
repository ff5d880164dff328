"""Pool: where task bodies run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from umbel.app.spans import flusher
from umbel.worker.blueprint import Step
from umbel.worker.execution.pools.base import PoolOptions, pool_class

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.worker")

# While it waits for tasks, a stopping worker looks so often whether it is to stop cold.
LOOK_S = 0.5
# How long a pool process that ends tries to send the last events of its tasks.
EVENTS_S = 2.0


class PoolStep(Step):
    """Makes, starts and stops the pool that the plan names."""

    name = "Pool"
    requires = ("Hub",)

    def create(self, parent: Worker) -> None:
        """Choose the pool; nothing is forked or started yet."""
        self._ended = False
        plan, runner = parent.plan, parent.runner
        parent.pool = pool_class(plan.pool)(
            PoolOptions(
                concurrency=plan.concurrency,
                run=runner,
                run_async=runner.run_async,
                is_async=runner.is_async,
                cpus=plan.cpus,
                max_tasks_per_child=plan.max_tasks_per_child,
                max_memory_per_child_kib=plan.max_memory_per_child_kib,
                child_ending=last_words(parent.app),
                loop=parent.inbox,
                on_room=parent.deliveries.dispatch,
                overdue=lambda: parent.inbox.post(parent.deliveries.reconsider),
                proc_alive_timeout_s=parent.app.conf.worker_proc_alive_timeout,
            )
        )

    def start(self, parent: Worker) -> None:
        """Begin to serve; a pool that has ended does not come back, so it gets a successor."""
        if self._ended:
            self.create(parent)
        parent.pool.start()

    def stop(self, parent: Worker) -> None:
        """Let running tasks end: the loop has seen to that, unless it lost its broker."""
        self._ended = True
        while not parent.pool.close_and_join(timeout_s=LOOK_S) and not parent.cold:
            parent.inbox.run()
            parent.check_patience()
        parent.inbox.run()  # what the pool has reported; it is silent once it is terminated
        parent.pool.terminate()
        parent.inbox.run()

    def terminate(self, parent: Worker) -> None:
        """Kill what runs."""
        self._ended = True
        parent.pool.terminate()


def last_words(app: Umbel) -> Callable[[], None]:
    """What a pool process does last: send the spans and events that its tasks have left."""
    flush_spans = flusher(app)

    def send() -> None:
        flush_spans()
        app.events.close(EVENTS_S)

    return send
