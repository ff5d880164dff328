"""Carrying elections out: the claim, the task that goes with it, and handlers of other topics.

For the topic `task` the action is a signature. Its id is the id of the election, so that its result
can be awaited and a duplicate recognised. Where the register can, claiming and sending are one
step; elsewhere the message is sent after the claim, confirmed, and a failure is said.

Other topics are handled by functions of the application (`@app.election_handler("topic")`), which
run on the winner, one after another, on a thread of their own. When the worker ends they have
`CLOSE_S` to do so too.

A node stands only for what it could carry out (`check`): a topic that it knows, a signature of
which a message can be made, a task that it may elect. Everybody can publish such things, so they
are looked at when they come, whoever they come from. A claim that the broker does not answer is
repeated for as long as the election lives; one that it refuses, `REFUSALS_MAX` times. Then this
node gives it up, and others may still succeed.

When nobody stands, one node claims the register for a refusal, and stores a FAILURE with the reason
as the result (`umbel.cluster.refusals`). An id that has a state already keeps it, so that nobody
can spoil the result of another task. Nothing else of the action is obeyed: no errbacks, no chord.
"""

from __future__ import annotations

import logging
import re
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from umbel.app.context import Context
from umbel.app.elections import TASK, call_of, check_size, check_words
from umbel.broker.registers.claims import Claim
from umbel.broker.registers.register import Register, register_for
from umbel.cluster import election_words as elect
from umbel.cluster.refusals import ClaimRefusal, Fail
from umbel.exceptions import NotForElection

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.election")

__all__ = ["Carrier", "Hands", "NotForElection"]

FAILURE, PENDING = "FAILURE", "PENDING"
CLOSE_S: Final = 3.0
# With the pauses of `cluster.election` about half a minute: a broker that is short of something,
# or fails over, has that long to change its mind.
REFUSALS_MAX: Final = 20
FAILING_MAX: Final = 1_000
# Of AMQP: the broker has understood, and does not do it.
_REPLY_CODE = re.compile(r"\((?:3|4)\d\d\)")


class Carrier:
    """Carries out what the election machine of one worker decides; claims come from one thread."""

    def __init__(self, worker: Worker) -> None:
        self._app = worker.app
        self._register: Register | None = None
        self._failing: dict[str, int] = {}  # how often the broker has refused; the oldest first
        self._hands = Hands(f"elected-{worker.plan.hostname}")
        self._storing = Hands(f"refusals-{worker.plan.hostname}")

    # -- what may be elected -----------------------------------------------------------

    def check(self, id_: Any, topic: Any, action: Any) -> None:
        """Refuse what this node could not carry out, before it stands; `NotForElection`."""
        check_words(id_, topic)
        check_size(id_, action)
        if topic == TASK:
            call_of(self._app, id_, action)
        elif topic not in self._app.election_handlers:
            known = ", ".join([TASK, *self._app.election_handlers])
            raise NotForElection(f"topic {topic!r:.100} of election {id_}: known are {known}")

    # -- claims ------------------------------------------------------------------------

    def claim(self, effect: elect.Claim) -> elect.Claimed | elect.ClaimFailed:
        """Ask the register whether this node is the first; sends the task if it is."""
        try:
            claim = self._claim(effect)
        except NotForElection as exc:
            return self._give_up(effect.id, str(exc))
        except Exception as exc:  # noqa: BLE001 - every transport has its own errors
            return self._failed(effect.id, f"{type(exc).__name__}: {exc}", self._is_refusal(exc))
        if claim.won and not claim.sent:
            refused = _REPLY_CODE.search(claim.reason) is not None
            reason = f"won, and not sent yet: {claim.reason}"
            return self._failed(effect.id, reason, refused, owns=True)
        self._failing.pop(effect.id, None)
        return elect.Claimed(effect.id, claim.won, claim.winner)

    def _claim(self, effect: elect.Claim) -> Claim:
        parcel = None
        if effect.topic == TASK:
            call = call_of(self._app, effect.id, effect.action)
            # The queue must be there: a claim is not repeated for want of it.
            self._app.publisher.run(lambda link: link.declare(call.destination))
            parcel = call.message
        return self._use().claim(effect.id, effect.token, parcel=parcel)

    def _use(self) -> Register:
        if self._register is None:
            self._register = register_for(self._app.connection(self._app.write_url))
        if self._register is None:
            raise NotForElection("this transport keeps no registers: there are no elections on it")
        return self._register

    def _is_refusal(self, exc: BaseException) -> bool:
        """Whether something else than the connection is the matter."""
        root = exc
        while root.__cause__ is not None:
            root = root.__cause__
        errors = self._app.connection(self._app.write_url).connection_errors
        return not isinstance(root, (*errors, OSError))

    def _failed(
        self, id_: str, reason: str, refused: bool, *, owns: bool = False
    ) -> elect.Claimed | elect.ClaimFailed:
        known = self._failing.get(id_)
        if known is None and len(self._failing) >= FAILING_MAX:
            del self._failing[next(iter(self._failing))]
        self._failing[id_] = count = (known or 0) + refused
        if count >= REFUSALS_MAX:
            return self._give_up(id_, reason, owns=owns)
        say = logger.warning if known is None else logger.debug
        say("election %s: no claim yet (%s)", id_, reason)
        return elect.ClaimFailed(id_, reason[:200])

    def _give_up(
        self, id_: str, reason: str, *, owns: bool = False
    ) -> elect.Claimed | elect.ClaimFailed:
        self._failing.pop(id_, None)
        logger.error("election %s: given up here (%s)", id_, reason)
        return elect.Claimed(id_, won=False, winner=None, reason=reason, owns=owns)

    # -- refusals ----------------------------------------------------------------------

    def claim_refusal(self, effect: ClaimRefusal) -> elect.Claimed | elect.ClaimFailed:
        """Ask the register whether somebody has held the election, and prevent it if not."""
        try:
            claim = self._use().claim(effect.id, effect.token)
        except NotForElection:
            return elect.Claimed(effect.id, won=False)
        except Exception as exc:  # noqa: BLE001 - every transport has its own errors
            logger.debug("election %s: the refusal is not claimed yet (%s)", effect.id, exc)
            return elect.ClaimFailed(effect.id)
        return elect.Claimed(effect.id, claim.won, claim.winner)

    def fail(self, effect: Fail) -> None:
        """Store the failure of an election that nobody holds, without waiting for it."""
        logger.warning("Election %s was refused, as no worker stands: %s", effect.id, effect.reason)
        request = Context(id=effect.id, correlation_id=effect.id, reply_to=effect.reply_to)
        error = NotForElection(
            f"election {effect.id} was refused, as no worker stands: {effect.reason}"
        )

        def store() -> None:
            backend = self._app.backend
            try:
                if backend.keeps_results and backend.get_meta(effect.id)["status"] != PENDING:
                    return
                backend.store(effect.id, error, FAILURE, request=request)
            except Exception:
                logger.exception("election %s: its failure could not be stored", effect.id)

        self._storing.do(store)

    # -- handlers ----------------------------------------------------------------------

    def act(self, effect: elect.Act) -> None:
        """This node was chosen: do it. The register has sent tasks already."""
        if effect.topic == TASK:
            return
        handler = self._app.election_handlers.get(effect.topic)
        if handler is None:
            logger.error("election %s: no handler of topic %r here", effect.id, effect.topic)
            return

        def run() -> None:
            try:
                handler(effect.action)
            except (Exception, SystemExit):
                logger.exception("election %s: the handler of %r failed", effect.id, effect.topic)

        self._hands.do(run)

    def close(self) -> None:
        """Let handlers that run end, for a while, and the connection go."""
        self._hands.close(CLOSE_S)
        self._storing.close(CLOSE_S)
        register, self._register = self._register, None
        if register is not None:
            register.close()


class Hands:
    """Runs one thing after another on a thread of its own, made when it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Any) -> None:
        """Have it done; called by one thread."""
        self._todo.put(work)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"umbel-{self._name}", daemon=True
            )
            self._thread.start()

    def close(self, patience_s: float) -> None:
        """Wait so long for what was begun."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._todo.put(None)
        thread.join(patience_s)
        if thread.is_alive():
            logger.error("a handler of an election did not end within %g s", patience_s)

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()
