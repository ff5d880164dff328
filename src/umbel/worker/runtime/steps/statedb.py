"""StateDB: what this worker remembers from its former life, and will remember in the next.

The file is opened, locked and read when the worker is made, so that a file that can not be used
ends the start with one line. Revocations are written through by whoever makes them
(`Worker.keep_revoked`). A thread of its own saves the clock, however busy the loop is, and deletes
what has ended; it saves early when the clock has made a leap, so that the step which is added on
loading always covers what was not saved. A disk that fails is said once, and tried again.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from umbel.worker.blueprint import Step
from umbel.worker.runtime.statedb import CLOCK_STEP, StateDB, StateNotSaved

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.options import WorkerOptions
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.statedb")

LOOK_S = 1.0
SAVE_S = 10.0
PURGE_S = 300.0
JOIN_S = 5.0


class StateDBStep(Step):
    """Opens the state file and closes it."""

    name = "StateDB"
    requires = ("Pool",)

    def __init__(self, parent: Worker, **options: Any) -> None:
        self._saver: Saver | None = None

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """Off unless a file is named."""
        return "" if options.statedb or app.conf.worker_state_db else "no --statedb"

    def create(self, parent: Worker) -> None:
        """Open the file and take over what it holds."""
        assert parent.plan.statedb is not None
        statedb = StateDB.open(parent.plan.statedb)
        try:
            loaded = statedb.load(parent.revocations, parent.app.clock)
        except BaseException:
            statedb.close()
            raise
        parent.statedb = statedb
        logger.info(
            "state file %s: %d revocations, clock %d", statedb.path, loaded.revoked, loaded.clock
        )

    def start(self, parent: Worker) -> None:
        """Begin to save; what was stopped opens its file again."""
        if parent.statedb is None:
            self.create(parent)
        assert parent.statedb is not None
        self._saver = Saver(parent, parent.statedb)
        self._saver.start()

    def stop(self, parent: Worker) -> None:
        """Save the clock and let go of the file."""
        saver, self._saver = self._saver, None
        statedb, parent.statedb = parent.statedb, None
        if saver is not None:
            saver.stop()
        if statedb is not None:
            try:
                statedb.close(parent.app.clock.value)
            except StateNotSaved as exc:
                logger.error("%s", exc)


class Saver:
    """The thread that saves the clock and deletes what has ended."""

    def __init__(self, worker: Worker, statedb: StateDB, look_s: float = LOOK_S) -> None:
        self._worker = worker
        self._statedb = statedb
        self._look_s = look_s
        self._saved = worker.app.clock.value
        self._failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umbel-statedb", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a disk that hangs is not waited for any longer than this."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        save_in_s, purge_in_s = SAVE_S, PURGE_S
        while not self._ended.wait(self._look_s):
            save_in_s -= self._look_s
            purge_in_s -= self._look_s
            try:
                if save_in_s <= 0 or self._leapt():
                    save_in_s = SAVE_S
                    self.save()
                if purge_in_s <= 0:
                    purge_in_s = PURGE_S
                    self.purge()
                self._failing = False
            except StateNotSaved as exc:
                if not self._failing:
                    logger.error("%s", exc)
                self._failing = True
            except Exception:
                logger.exception("the state file is not looked after")

    def _leapt(self) -> bool:
        return not self._failing and self._worker.app.clock.value - self._saved > CLOCK_STEP // 4

    def save(self) -> None:
        """Save the clock if it has moved."""
        value = self._worker.app.clock.value
        if value != self._saved:
            self._statedb.save_clock(value)
            self._saved = value

    def purge(self) -> None:
        """Delete what has ended, in memory and on disk."""
        now = self._worker.wall()
        self._statedb.purge(now)
        self._worker.revocations.purge(now)
