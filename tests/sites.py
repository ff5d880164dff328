"""A site: a broker, a result backend, a client, and the workers that a test starts there.

The tasks are those of `tests/probe_app.py`. The broker may be anything; results and the notes
that tasks take are always in Redis, so that a test can look at them from outside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import redis

from tests.servers import wait_until
from tests.workers import WorkerProcess, shifted_clock
from umbel import Umbel
from umbel.app.results import AsyncResult

APP = "tests.probe_app"
QUEUE = "celery"


class Site:
    """Where workers of the probe application run."""

    def __init__(
        self,
        broker_url: str,
        backend_url: str,
        start: Callable[..., WorkerProcess],
        length_of: Callable[[str], int],
        taken_of: Callable[[str], int],
        **settings: Any,
    ) -> None:
        self.broker_url = broker_url
        self.backend_url = backend_url
        self.settings = settings
        self._start = start
        self._count = 0
        self._length_of = length_of
        self._taken_of = taken_of
        self.notes = redis.Redis.from_url(backend_url, socket_timeout=None)
        self.app = Umbel(
            "client", broker=broker_url, backend=backend_url, set_as_current=False, **settings
        )

    def worker(
        self,
        pool: str = "threads",
        *args: str,
        concurrency: int = 2,
        wait: bool = True,
        settings: Mapping[str, Any] | None = None,
        shift_s: float = 0.0,
    ) -> WorkerProcess:
        """Start a worker; `settings` go over those of the site, `shift_s` shifts its wall clock."""
        # No two workers have one name; those after the first need one.
        name = ["-n", f"celery@{self._count}"] if self._count and "-n" not in args else []
        self._count += 1
        command = ["-P", pool, "-c", str(concurrency), "-l", "info", *name, *args]
        env = self.environment(settings or {})
        if shift_s:
            env |= shifted_clock(shift_s)
        return self._start(APP, command, wait=wait, env=env, fresh=bool(shift_s))

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """The variables from which a worker reads its settings."""
        chosen = {
            "broker_url": self.broker_url,
            "result_backend": self.backend_url,
            **self.settings,
            **settings,
        }
        variables = {f"UMBEL_{name.upper()}": _text(value) for name, value in chosen.items()}
        return {"PROBE_URL": self.backend_url, **variables}

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult:
        """Send a task of the probe application."""
        return self.app.send_task(f"{APP}.{task}", args, **options)

    def works(self) -> bool:
        """Whether a task that is sent now comes back with the right result."""
        return bool(self.send("add", 2, 2).get(timeout=20) == 4)

    # -- what tasks do -----------------------------------------------------------------

    def wait_until_begun(self, token: str, timeout_s: float = 20.0) -> int:
        """Wait until a run of `token` begins; the process it runs in."""
        found = self.notes.blpop([f"begun:{token}"], timeout_s)
        assert found, f"no run of {token} began"
        return int(found[1])

    def open_gate(self, token: str) -> None:
        """Let a waiting run of `token` go on."""
        self.notes.rpush(f"gate:{token}", 1)

    def runs(self, token: str) -> int:
        """How many runs of `token` have begun."""
        return int(self.notes.hget("runs", token) or 0)

    def order(self) -> list[str]:
        """The tokens in the order in which they ran."""
        return [token.decode() for token in self.notes.lrange("order", 0, -1)]

    # -- what is in the broker ---------------------------------------------------------

    def waiting(self, queue: str = QUEUE) -> int:
        """How many messages are in the queue, ready to be delivered."""
        return self._length_of(queue)

    def taken(self, queue: str = QUEUE) -> int:
        """How many messages of the queue workers have and have not acknowledged."""
        return self._taken_of(queue)

    def wait_until_waiting(self, count: int, timeout_s: float = 10.0) -> None:
        """Wait until so many messages are in the queue."""
        wait_until(lambda: self.waiting() == count, timeout_s, f"{count} messages in the queue")

    def close(self) -> None:
        self.app.close()
        self.notes.close()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
