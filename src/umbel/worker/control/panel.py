"""The panel: what a worker does with a control message.

One barrier: whatever the message holds, nothing is raised. In this order: it is read, it advances
the clock, it must be for this node, it must be signed where that is required, it must not have
expired, the command must be allowed, it must be new, and then it runs. Refusals are counted by
kind, logged, and answered where somebody waits for an answer, except to those who have not shown
that they may ask.

A worker that has just started cannot tell a new command from a copy of one that was sent before
(`umbel.wire.signing`). A command that changes something then has to be proven new: its sender is
sent a challenge. What only looks does no harm when it is repeated and needs no proof; a greeting is
answered, and what it tells is not taken over.

When a command was sent and when it expires is judged by the time that the nodes agree on
(`cluster.agreed_time`), and by how long the message can have waited unread here (`wire.control`).

Commands that touch the worker's tables or its connection run on the loop's thread, or greenlet. A
pidbox with one of its own carries those over and waits for a moment; a loop that is inside of a
task, as with the solo pool, carries the command out afterwards, and the answer says so.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from umbel.app.commands import Command, Commands, NoReply, NotHere
from umbel.app.trust import Trust
from umbel.wire.control import (
    Request,
    clock_difference_s,
    exchange_name,
    is_expired,
    is_for,
    read_request,
)
from umbel.wire.limits import Refusal
from umbel.wire.redaction import by_name
from umbel.wire.reprs import safe_repr
from umbel.wire.signing import (
    CHALLENGE,
    LISTENING_S,
    REQUEST,
    UNPROVEN,
    Challenges,
    Distrust,
    Nonces,
)

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.control")

# Clocks of hosts differ; a command is refused when it expired longer ago than this.
EXPIRED_GRACE_S = 5.0
# A time that a command carries is taken as it is while the sender's clock differs by less.
STAMP_TOLERANCE_S = 1.0
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
    def counters(self) -> Any:
        """What the worker counts."""
        return self.worker.counters


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
        self.trust = Trust(worker.app)
        self._exchange = exchange_name(conf.control_exchange)
        self._nonces = Nonces(self.trust.now())
        self._challenges = Challenges(os.urandom(32))
        self._listens_since = time.monotonic()
        self.refused: Counter[str] = Counter()
        self.challenged = 0
        self.handled = 0
        self.failed = 0
        self.pidbox: Any = None
        self.loop_thread: int | None = None  # of a loop to which commands are carried over
        self._turns: Any = None

    @property
    def looked_at(self) -> float:
        """When the loop had read everything that had come before, for the last time."""
        return self._worker.turn_before

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
            is_new = self._judge(message, request, answer)
            if self._is_expired(request):
                return True
            return self._obey(request, answer, is_new)
        except Refusal as refusal:
            self._refuse(refusal.reason, refusal.text)
            return True
        except Exception:
            logger.exception("a control message could not be handled")
            self.failed += 1
            return False

    def _read(self, message: Any) -> Request | None:
        """The request, if it is for this node; raises `Refusal`."""
        request = read_request(
            message.body,
            message.content_type,
            message.content_encoding,
            message.headers,
            accept=self._accept,
        )
        self._state.app.clock.forward()
        return request if is_for(request, self._state.hostname) else None

    def _judge(self, message: Any, request: Request, answer: Answer) -> bool:
        """Whether the request is known to be new; raises `Distrust`."""
        try:
            return self.trust.judge(
                message, self._exchange, REQUEST, self._nonces, self._challenges
            )
        except Distrust as distrust:
            if distrust.provable:
                self._challenge(request, answer, distrust.text)
            raise

    def _is_expired(self, request: Request) -> bool:
        agreed, waited_s = self._worker.wall(), self._waited_s()
        if not is_expired(request, agreed, EXPIRED_GRACE_S, waited_s=waited_s):
            return False
        own = agreed - self._worker.wall.shift_s
        if request.sent_at is None and not is_expired(request, own, EXPIRED_GRACE_S):
            return False  # nothing tells by which of the two the sender goes
        late_s = own - (request.expires or 0)
        self._refuse(EXPIRED, f"{request.method} expired {late_s:.1f} s ago")
        return True

    def _waited_s(self) -> float | None:
        """How long a message that is handled now can have waited unread; None: nobody knows."""
        waited_s: float | None = 0.0 if self.pidbox is None else self.pidbox.waited_s()
        return waited_s

    def _obey(self, request: Request, answer: Answer, is_new: bool) -> bool:
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
            if command.name == "election":
                self._worker.gossip.deny(request.arguments, text)
            answer(request, {"error": text})
            return True
        if not is_new and not command.reads:
            self._demand_proof(command, request, answer)
            return True
        self.handled += 1
        try:
            value = self._run(command, self._arguments(command, request, is_new))
        except NoReply:
            return True
        except NotHere as exc:
            if request.destination:
                answer(request, {"error": str(exc)})
            return True
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - it becomes the answer
            self.failed += 1
            text = by_name(self._worker.app.conf.task_redact_names).error_repr(exc)
            logger.warning("control command %s failed: %s", command.name, text[:500])
            answer(request, {"error": text})
            return False
        answer(request, value)
        return True

    def _demand_proof(self, command: Command, request: Request, answer: Answer) -> None:
        """Have a command proven new, or refuse it where its sender cannot be asked."""
        text = (
            f"{command.name} may be a copy of a command that was sent before this worker started: "
            "it has to be signed again with a challenge, which needs a reply address"
        )
        if request.reply_to is None:
            raise Distrust(UNPROVEN, text)
        self._challenge(request, answer, text)

    def _challenge(self, request: Request, answer: Answer, text: str) -> None:
        self.challenged += 1
        challenge = self._challenges.current(self.trust.now())
        listening_s = time.monotonic() - self._listens_since
        answer(request, {"error": text, CHALLENGE: challenge, LISTENING_S: listening_s})

    def _arguments(self, command: Command, request: Request, is_new: bool) -> dict[str, Any]:
        """The arguments; a time of the sender's clock as our own would show it."""
        arguments = request.arguments
        if command.judges:
            return {**arguments, "is_new": is_new}
        stamp = arguments.get("stamp")
        if not command.stamped or isinstance(stamp, bool) or not isinstance(stamp, (int, float)):
            return arguments
        now, waited_s = self._worker.wall(), self._waited_s()
        moved_s = clock_difference_s(request, now, waited_s, STAMP_TOLERANCE_S)
        return {**arguments, "stamp": stamp + moved_s} if moved_s else arguments

    def may(self, name: str) -> bool:
        """Whether a command of this name is there and allowed."""
        command = self._commands.get(name)
        return command is not None and self.allows(command)

    def allows(self, command: Command) -> bool:
        """Whether the settings let this worker obey the command."""
        return command.is_allowed(self._allow)

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
