"""Whether a worker is well, for whoever supervises it.

*Live*: the loop has turned within `PATIENCE_S`; a worker that is not should be restarted. *Ready*:
it takes messages from all of its queues. A worker that waits for its broker, or whose broker
refuses a queue, is live and not ready.

Two ways to ask, each with a thread of its own so that a stuck loop can be told:

- a file that is renewed every `INTERVAL_S` while the worker is both, and is gone otherwise, so
  that either its existence or its age may be tested; it never exists half-written;
- `/live` and `/ready` on a port of 127.0.0.1: 200 or 503 with a line of JSON.

Both are refused with `ImproperlyConfigured` at the start if the place is not to be had.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from umbel.exceptions import ImproperlyConfigured
from umbel.files import file_mode
from umbel.worker.observe.endpoint import Answer, Endpoint, Routes, json_answer

logger = logging.getLogger("umbel.health")

PATIENCE_S = 60.0
INTERVAL_S = 2.0
_MARK = '{"umbel_health"'


class Patient(Protocol):
    """The part of a worker that health is about."""

    def is_live(self, patience_s: float) -> bool:
        """Whether the loop turns."""

    def is_ready(self) -> bool:
        """Whether messages are taken."""

    @property
    def refused_queues(self) -> dict[str, str]:
        """Queues that the broker refuses, and why."""


class HealthFile:
    """Keeps a file while the worker is live and ready."""

    def __init__(
        self,
        worker: Patient,
        path: str,
        *,
        interval_s: float = INTERVAL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._worker = worker
        self._path = Path(path)
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._wake = threading.Event()
        self._stopping = False
        self._failed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Claim the path; what another worker left there is removed."""
        self._claim()
        self._thread = threading.Thread(target=self._run, name="umbel-health-file", daemon=True)
        self._thread.start()

    def renew(self, _worker: Any = None) -> None:
        """Look now rather than at the next interval: for `worker.on_ready`."""
        self._wake.set()

    def stop(self) -> None:
        """Remove the file."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self._interval_s + 1.0)
            self._thread = None
        self._remove()

    def _claim(self) -> None:
        try:
            self._refuse_foreign()
            self._write()
            self._path.unlink()
        except OSError as exc:
            raise ImproperlyConfigured(
                f"health file {str(self._path)!r} can not be written: "
                f"{exc.strerror or exc}; give a path that can"
            ) from None

    def _refuse_foreign(self) -> None:
        if not self._path.exists():
            return
        if self._path.is_file():
            with self._path.open("rb") as file:
                begin = file.read(len(_MARK))
            if begin in (b"", _MARK.encode()):
                return
        raise ImproperlyConfigured(
            f"health file {str(self._path)!r} exists and is no health file: remove it or give "
            "another path"
        )

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._look()
                self._failed = False
            except OSError as exc:
                if not self._failed:  # told once, until it works again
                    logger.error("health file %s: %s", self._path, exc)
                self._failed = True
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _look(self) -> None:
        worker = self._worker
        if worker.is_live(self._patience_s) and worker.is_ready():
            self._write()
        else:
            self._remove()

    def _write(self) -> None:
        text = json.dumps({"umbel_health": "ready", "pid": os.getpid(), "at": time.time()})
        descriptor, temporary = tempfile.mkstemp(prefix=".umbel-health-", dir=self._path.parent)
        try:
            os.fchmod(descriptor, file_mode())
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)
        try:
            Path(temporary).replace(self._path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class HealthServer(Endpoint):
    """Answers `/live` and `/ready` over HTTP on the loopback interface."""

    def __init__(self, worker: Patient, port: int, *, patience_s: float = PATIENCE_S) -> None:
        super().__init__("health", port, routes(worker, patience_s))


def routes(worker: Patient, patience_s: float = PATIENCE_S) -> Routes:
    """What to ask a port about the health of a worker."""

    def live() -> Answer:
        well = worker.is_live(patience_s)
        return json_answer(_status(well), {"live": well})

    def ready() -> Answer:
        well = worker.is_live(patience_s) and worker.is_ready()
        refused = worker.refused_queues
        more = {"refused_queues": dict(refused)} if refused else {}
        return json_answer(_status(well), {"ready": well, **more})

    return {"/live": live, "/ready": ready}


def _status(well: bool) -> HTTPStatus:
    return HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
