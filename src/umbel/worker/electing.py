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
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from fnmatch import fnmatchcase
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from umbel.app.calls import Call, prepare_signature
from umbel.broker.claims import Claim
from umbel.broker.registers import Register, register_for
from umbel.cluster import election as elect
from umbel.wire.limits import Refusal
from umbel.wire.reprs import safe_repr
from umbel.wire.signatures import check_signature

if TYPE_CHECKING:
    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.election")

TASK: Final = "task"
CLOSE_S: Final = 3.0
# With the pauses of `cluster.election` about half a minute: a broker that is short of something,
# or fails over, has that long to change its mind.
REFUSALS_MAX: Final = 20
FAILING_MAX: Final = 1_000
# Of AMQP: the broker has understood, and does not do it.
_REPLY_CODE = re.compile(r"\((?:3|4)\d\d\)")


class NotForElection(ValueError):
    """Nobody can be elected for this; the text says why."""


class Carrier:
    """Carries out what the election machine of one worker decides; claims come from one thread."""

    def __init__(self, worker: Worker) -> None:
        self._app = worker.app
        self._register: Register | None = None
        self._failing: dict[str, int] = {}  # how often the broker has refused; the oldest first
        self._hands = Hands(worker.plan.hostname)

    # -- what may be elected -----------------------------------------------------------

    def check(self, id_: Any, topic: Any, action: Any) -> None:
        """Refuse what this node could not carry out, before it stands; `NotForElection`."""
        read = elect.read_request({"id": id_, "topic": topic, "action": action})
        if isinstance(read, str):
            raise NotForElection(
                f"{read}: election {safe_repr(id_, 100)}, topic {safe_repr(topic, 100)}; "
                "give both as text of 1 to 200 bytes"
            )
        if topic == TASK:
            self._call(id_, action)
        elif topic not in self._app.election_handlers:
            known = ", ".join([TASK, *self._app.election_handlers])
            raise NotForElection(f"topic {topic!r:.100} of election {id_}: known are {known}")

    def _call(self, id_: str, action: Any) -> Call:
        """The message that the action asks for."""
        try:
            checked = check_signature(action)
        except Refusal as refusal:
            raise NotForElection(f"the action is no signature: {refusal.text}") from None
        name, kind = checked["task"], checked["subtask_type"]
        if kind is not None:
            raise NotForElection(f"a {kind} can not be elected: elect a task that sends it")
        allowed = self._app.conf.election_allow
        if allowed is not None and not any(fnmatchcase(name, one) for one in allowed):
            raise NotForElection(f"task {name!r:.200} is not in election_allow")
        return self._prepared({**checked, "options": {**checked["options"], "task_id": id_}})

    def _prepared(self, signature: Mapping[str, Any]) -> Call:
        try:
            call = prepare_signature(self._app, signature)
        except Exception as exc:  # what options may hold, nobody knows
            raise NotForElection(
                f"no message can be made of the action: {safe_repr(exc, 300)}"
            ) from exc
        to = call.destination
        if not all(isinstance(one, str) for one in (to.exchange, to.routing_key)):
            raise NotForElection("the action names no place to send it to, by exchange and key")
        return call

    # -- claims ------------------------------------------------------------------------

    def claim(self, effect: elect.Claim) -> elect.Input:
        """Ask the register whether this node is the first; sends the task if it is."""
        try:
            claim = self._claim(effect)
        except NotForElection as exc:
            return self._give_up(effect.id, str(exc))
        except Exception as exc:  # noqa: BLE001 - every transport has its own errors
            return self._failed(effect.id, f"{type(exc).__name__}: {exc}", self._is_refusal(exc))
        if claim.won and not claim.sent:
            refused = _REPLY_CODE.search(claim.reason) is not None
            return self._failed(effect.id, f"won, and not sent yet: {claim.reason}", refused)
        self._failing.pop(effect.id, None)
        return elect.Claimed(effect.id, claim.won, claim.winner)

    def _claim(self, effect: elect.Claim) -> Claim:
        parcel = None
        if effect.topic == TASK:
            call = self._call(effect.id, effect.action)
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

    def _failed(self, id_: str, reason: str, refused: bool) -> elect.Input:
        known = self._failing.get(id_)
        if known is None and len(self._failing) >= FAILING_MAX:
            del self._failing[next(iter(self._failing))]
        self._failing[id_] = count = (known or 0) + refused
        if count >= REFUSALS_MAX:
            return self._give_up(id_, reason)
        say = logger.warning if known is None else logger.debug
        say("election %s: no claim yet (%s)", id_, reason)
        return elect.ClaimFailed(id_, reason[:200])

    def _give_up(self, id_: str, reason: str) -> elect.Input:
        self._failing.pop(id_, None)
        logger.error("election %s: given up here (%s)", id_, reason)
        return elect.Claimed(id_, won=False, winner=None)

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
                target=self._run, name=f"umbel-elected-{self._name}", daemon=True
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
