"""What taskiq's two brokers have in common: coroutines, a hundred at a time per process."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.peers.work import arguments, coroutines

VARIANTS = ("--no-parse", "defaults")


class Application:
    """A broker with the tasks, and a loop to send from."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        bodies = coroutines().items()
        self.tasks = {kind: broker.register_task(body, task_name=kind) for kind, body in bodies}
        self._runner: asyncio.Runner | None = None

    def send(self, kind: str, count: int) -> None:
        """`kiq`, each awaited."""
        if self._runner is None:
            self._runner = asyncio.Runner()
            self._runner.run(self.broker.startup())
        self._runner.run(self._send(kind, count))

    async def _send(self, kind: str, count: int) -> None:
        task = self.tasks[kind]
        for _ in range(count):
            await task.kiq(*arguments(kind))


def command(module: str, variant: str, processes: int) -> list[str]:
    """The worker's, which starts one process more that watches the others."""
    options = [] if variant == "defaults" else [variant]
    start = ["-m", "taskiq", "worker", f"{module}:broker", "--log-level", "ERROR"]
    return [*start, "--workers", str(processes), *options]
