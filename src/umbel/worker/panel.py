"""The panel: what a worker does with a control message.

One barrier: whatever the message holds, nothing is raised. In this order: it is read, it advances
the clock, it must be for this node, it must not have expired, it must be signed where that is
required, the command must be allowed, and then it runs. Refusals are counted by kind, logged, and
answered where somebody waits for an answer, except to those who have not shown that they may ask.

Commands that touch the worker's tables or its connection run on the loop's thread, or greenlet. A
pidbox with one of its own carries those over and waits for a moment; a loop that is inside of a
task, as with the solo pool, carries the command out afterwards, and the answer says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from umbel.app.commands import Command, Commands, NoReply
from umbel.wire.control import Request, is_expired, is_for, read_request
from umbel.wire.limits import Refusal
from umbel.wire.reprs import safe_repr
from umbel.wire.signing import Distrust, Nonces, is_signed, verify

if TYPE_CHECKING:
    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.control")

# Clocks of hosts differ; a command is refused when it expired longer ago than this.
EXPIRED_GRACE_S = 5.0
# A command that has to wait for the loop does so for less than a client waits for its answer.
LOOP_PATIENCE_S = 0.7
# So often does a loop turn that sees its inbox only between two waits for the broker.
TURN_S = 0.3

EXPIRED, DENIED, UNKNOWN = "expired", "denied", "unknown-command"
UNREADABLE = "unreadable"

Answer = Callable[[Request, Any], None]


class CommandState:
    """What a command sees of its worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.app = worker.app
        self.hostname = worker.plan.hostname

    @property
    def consumer(self) -> Any:
        """The consumer of the worker."""
        return self.worker.consumer

    @property
    def tally(self) -> Any:
        """What the worker counts and holds."""
        return self.worker.tally


class Panel:
    """Obeys the commands to one worker."""

    def __init__(self, worker: Worker, builtin: Commands) -> None:
        self._worker = worker
        self._state = CommandState(worker)
        self._commands = Commands(builtin)
        for command in worker.app.own_commands:
            self._commands.add(command)
        conf = worker.app.conf
        self._accept = worker.app.accept
        self._allow = conf.control_allow
        self._signing = conf.control_signing
        self._key = (conf.control_signing_key or "").encode()
        self._exchange = f"{conf.control_exchange}.pidbox"
        self._nonces = Nonces(time.time())
        self.refused: Counter[str] = Counter()
        self.handled = 0
        self.failed = 0
        self.pidbox: Any = None
        self.loop_thread: int | None = None  # of a loop to which commands are carried over
        self._turns: Any = None

    def carry_over(self, *, blind: bool) -> None:
        """Carry commands over to the caller's thread, the loop's; `blind` if no inbox wakes it."""
        self.loop_thread = threading.get_ident()
        if self._turns is not None:
            self._turns.cancel()
        self._turns = self._worker.timer.call_repeatedly(TURN_S, _turn) if blind else None

    def soon(self, work: Callable[[], None]) -> None:
        """Do something on the loop's thread; a connection that it finds broken is rebuilt."""
        worker = self._worker

        def run() -> None:
            try:
                work()
            except worker.connection_errors as exc:
                worker.consumer.failure = exc

        worker.inbox.post(run)

    def handle(self, message: Any, answer: Answer) -> bool:
        """Obey one message; `answer` sends a reply. False when the command failed."""
        try:
            request = self._read(message)
            if request is None:
                return True
            return self._obey(request, answer)
        except Refusal as refusal:
            self._refuse(refusal.reason, refusal.text)
            return True
        except Exception:
            logger.exception("a control message could not be handled")
            self.failed += 1
            return False

    def _read(self, message: Any) -> Request | None:
        """The request, if this node is to obey it; raises `Refusal`."""
        request = read_request(
            message.body,
            message.content_type,
            message.content_encoding,
            message.headers,
            accept=self._accept,
        )
        self._state.app.clock.forward()
        if not is_for(request, self._state.hostname):
            return None
        now = time.time()
        if is_expired(request, now, EXPIRED_GRACE_S):
            late_s = now - (request.expires or 0)
            self._refuse(EXPIRED, f"{request.method} expired {late_s:.1f} s ago")
            return None
        self._check_signature(message, now)
        return request

    def _check_signature(self, message: Any, now: float) -> None:
        if self._signing == "off":
            return
        if self._signing == "optional" and not is_signed(message.headers):
            return
        verify(
            message.body,
            message.headers,
            self._key,
            now,
            self._nonces,
            exchange=self._exchange,
            content_type=message.content_type,
        )

    def _obey(self, request: Request, answer: Answer) -> bool:
        command = self._commands.get(request.method)
        if command is None:
            self._refuse(UNKNOWN, f"there is no command {request.method!r}")
            answer(request, {"error": repr(KeyError(request.method))})
            return False
        if not self.allows(command):
            text = (
                f"{command.name} is not allowed here: control_allow is "
                f"{safe_repr(self._allow, 200)}"
            )
            self._refuse(DENIED, text)
            answer(request, {"error": text})
            return True
        self.handled += 1
        try:
            value = self._run(command, request.arguments)
        except NoReply:
            return True
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - it becomes the answer
            self.failed += 1
            logger.warning("control command %s failed: %s", command.name, safe_repr(exc, 500))
            answer(request, {"error": safe_repr(exc)})
            return False
        answer(request, value)
        return True

    def may(self, name: str) -> bool:
        """Whether a command of this name is there and allowed."""
        command = self._commands.get(name)
        return command is not None and self.allows(command)

    def allows(self, command: Command) -> bool:
        """Whether the settings let this worker obey the command."""
        allow = self._allow
        if allow == "all":
            return True
        if allow == "read-only":
            return command.reads
        return command.name in allow or any(alias in allow for alias in command.aliases)

    def _run(self, command: Command, arguments: dict[str, Any]) -> Any:
        here = threading.get_ident()
        if command.anywhere or self.loop_thread is None or here == self.loop_thread:
            return command.run(self._state, **arguments)
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                outcome.set_result(command.run(self._state, **arguments))
            except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
                outcome.set_exception(exc)

        self._worker.inbox.post(run)
        try:
            return outcome.result(LOOP_PATIENCE_S)
        except TimeoutError:
            if outcome.done():
                raise
            return {"ok": f"{command.name} will be carried out when the worker's loop turns again"}

    def unreadable(self, exc: Exception) -> None:
        """Something came that could not even be made a message."""
        self._refuse(UNREADABLE, f"{type(exc).__name__}: {safe_repr(exc, 200)}")

    def _refuse(self, reason: str, text: str) -> None:
        self.refused[reason] += 1
        say = logger.warning if self.refused[reason] == 1 else logger.debug
        say("control message refused (%s): %s", reason, text)


def _turn() -> None:
    """That the loop looks at its timers is all that is wanted."""


__all__ = ["CommandState", "Distrust", "Panel"]
