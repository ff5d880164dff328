"""The live source: one thread hears every event and folds it; whoever shows it reads.

The thread owns the receiver, which connects again by itself when the broker goes; while it is away
the pages show what was known, and `condition` says so. Should the receiver end for a reason of its
own (wrong settings), the reason is told and it is tried again.

What is kept is bounded: `tasks_max` tasks, twice as many executions, the first `OWN_STATES_MAX`
states of the user's own, and what `figures` and `elections` keep. One lock: an event holds it for
microseconds, a reader while it copies.

`version` grows with every event. Live pages look at it, so nobody is woken a thousand times a
second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from umbel.app.events.receiver import Receiver
from umbel.app.events.state import State, Task
from umbel.cluster.task_states import CUSTOM, class_of, state_of_type
from umbel.dashboard.live.elections import ElectionBook
from umbel.dashboard.live.executions import Executions
from umbel.dashboard.live.figures import Figures
from umbel.wire.events import Event
from umbel.wire.redaction import by_name, redact_event
from umbel.wire.secret_texts import mask_addresses

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.dashboard")

TASKS_MAX: Final = 10_000
OWN_STATES_MAX: Final = 1_000
RETRY_S: Final = 5.0
END_S: Final = 3.0
# A task that failed is kept with its traceback: nobody reads more of it than this.
TEXT_CHARS_MAX: Final = 4_000
_LONG: Final = ("traceback", "exception", "result", "args", "kwargs")


class Live:
    """See the module's text."""

    def __init__(
        self,
        app: Umbel,
        *,
        tasks_max: int = TASKS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self.now_s = clock
        self.lock = threading.RLock()
        self.state = State(max_tasks=tasks_max, clock=clock)
        self.executions = Executions(2 * tasks_max)
        self.elections = ElectionBook()
        self.figures = Figures()
        self.own_states: set[str] = set()  # that tasks were in, of the user's own
        self.version = 0
        self.began_s = clock()
        self._receiver = Receiver(app, handlers={"*": self.event})
        self._failure = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umbel-dashboard", daemon=True)

    # -- life --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen; returns at once, whether there is a broker or not."""
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._stopping.set()
        self._receiver.close()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._receiver.capture()
            except Exception as exc:  # told on every page, and tried again
                self._failure = mask_addresses(f"{type(exc).__name__}: {exc}")
                logger.exception("events can not be received: trying again")
                self._stopping.wait(RETRY_S)

    # -- what comes in -----------------------------------------------------------------

    def event(self, event: Event) -> None:
        """Take one well-formed event."""
        redact_event(event, by_name(self.app.conf.task_redact_names))
        for name in _LONG:
            text = event.get(name)
            if type(text) is str and len(text) > TEXT_CHARS_MAX:
                # The end of a traceback tells most.
                keep_end = name == "traceback"
                event[name] = text[-TEXT_CHARS_MAX:] if keep_end else text[:TEXT_CHARS_MAX]
        now_s = self.now_s()
        with self.lock:
            self.version += 1
            item = self.state.event(event)
            sent = item.records.get("sent") if isinstance(item, Task) else None
            execution = self.executions.event(event, sent)
            self.figures.event(event, execution, now_s)
            kind = event["type"]
            if kind in ("worker-elect", "worker-elected"):
                self.elections.event(event, now_s)
            elif kind[:5] == "task-" and class_of(kind) == CUSTOM:
                self._note_state(state_of_type(kind))

    def _note_state(self, state: str) -> None:
        if len(self.own_states) < OWN_STATES_MAX:
            self.own_states.add(state)

    # -- how it stands -----------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether events are heard."""
        return self._receiver.wait_ready(0)

    @property
    def condition(self) -> str:
        """What is wrong with the broker; empty when all is well."""
        if self.is_connected:
            return ""
        if self._failure:
            return self._failure
        if self._receiver.reconnect_count or self.version:
            return "the broker is gone: connecting again"
        return "connecting to the broker"

    @property
    def missing_count(self) -> int:
        """How many events never came, by their sequence numbers."""
        return self._receiver.sequences.missing_count

    @property
    def refused_count(self) -> int:
        """How much came that was no event."""
        return sum(self._receiver.counts.values())

    @property
    def reconnect_count(self) -> int:
        """How often the connection broke."""
        return self._receiver.reconnect_count
