"""Mingling: carries out what the mingle machine wants, over remote control.

At the start, and after every lost connection, `run` greets all nodes and returns when all that are
known have answered and nothing is left to exchange. Later, heartbeats tell whether another node
knows other revocations than we do; then the two exchange them, on a thread of its own.

All are heard first, so that nobody's clock is missed, then there is one exchange after another with
those who know something else. What is told of many revocations is packed (`wire.packs`).

Who answers tells the time that the nodes go by. A worker that starts takes it over before anything
else (`cluster.agreed_time`), as what is exchanged carries such times.

Where signing is required only signed answers count (`app.trust`). What others tell of revocations
and pauses is taken over as far as `control_allow` lets somebody command it.

How it fails: whoever does not answer is not waited for longer than the machine says. What the
broker raises goes to the caller; the machine is left to the next tick of gossip.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from umbel.app.control.mailbox import mailboxes_for
from umbel.broker.census import listeners
from umbel.cluster import mingle
from umbel.wire.packs import packed_digest, packed_lives, unpacked_digest, unpacked_lives
from umbel.wire.reprs import shown_name

if TYPE_CHECKING:
    from kombu import Connection

    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.mingle")

LOOK_S = 0.02
# What revokes the kinds of things that are told.
_COMMANDS = {"tasks": "revoke", "headers": "revoke_by_stamped_headers"}


class Enough(Exception):
    """There is nothing left to wait for."""


class AllHeard(Exception):
    """Everybody who was expected has answered the greeting."""


class Mingling:
    """One worker's side; the machine is shared by threads under a lock."""

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._clock = clock
        self._machine = mingle.Mingle(worker.plan.hostname, revocations=worker.revocations)
        self._lock = threading.Lock()
        self._greeting = self._exchanging = False
        self._expected: set[str] | None = None  # to answer a greeting; None: nobody knows
        self._heard: set[str] = set()
        self._times_ahead: list[float] | None = []  # of those who answer; None after the start
        self._reported: set[str] = set()  # reasons for which something was refused

    # -- at the start --------------------------------------------------------------------

    def run(self, connection: Connection) -> mingle.Done | None:
        """Catch up with the others; None when there was nobody, or the worker is to stop."""
        app = self._worker.app
        expected = listeners(connection, mailboxes_for(app))
        if expected is not None:
            expected.discard(self._worker.plan.hostname)
            if not expected:
                return None
        self._greeting, self._expected, self._heard = True, expected, set()
        try:
            self._settle(self._step(mingle.Begin(expected)))
            while self._machine.busy and not self._worker.stop_wanted.wait(LOOK_S):
                self._settle(())
        except Enough as end:
            done: mingle.Done = end.args[0]
            return done
        finally:
            self._greeting = False
        return None

    def _settle(self, effects: Iterable[mingle.Effect]) -> None:
        """Do all of it, and what follows from it; raises `Enough`."""
        todo = deque(effects)
        while not self._worker.stop_wanted.is_set():
            while todo:
                todo.extend(self._carry_out(todo.popleft()))
            todo.extend(self._step(mingle.Tick()))
            if not todo:
                return

    def _carry_out(self, effect: mingle.Effect) -> list[mingle.Effect]:
        """Do one thing; what follows from it."""
        if isinstance(effect, mingle.Done):
            raise Enough(effect)
        if isinstance(effect, mingle.Hello):
            return self._greet(effect)
        self._take_over(effect)
        return []

    def _greet(self, effect: mingle.Hello) -> list[mingle.Effect]:
        following: list[mingle.Effect] = []

        def on_reply(reply: dict[str, Any]) -> None:
            for hostname, value in reply.items():
                following.extend(self._answered(hostname, value))
            if effect.destination is None and self._all_heard():
                raise AllHeard

        to: dict[str, Any] = {}
        if effect.destination is not None:
            to["destination"] = [effect.destination]
        timeout_s = mingle.WINDOW_S if effect.destination is None else mingle.EXCHANGE_S
        arguments = _packed(effect.arguments)
        if "digest" in arguments:
            arguments |= self._paused()
        with contextlib.suppress(AllHeard):
            self._worker.app.control.mailbox.call(
                "hello", arguments, timeout_s=timeout_s, callback=on_reply, signed_only=True, **to
            )
        self._adopt_time()
        return following

    def _adopt_time(self) -> None:
        """Go by the time of those who were there before, once."""
        times_ahead, self._times_ahead = self._times_ahead, None
        if times_ahead and self._worker.wall.adopt(times_ahead):
            logger.warning(
                "the clock of this host differs by %.1f s from that of the other nodes: "
                "revocations and pauses are judged by theirs",
                -self._worker.wall.shift_s,
            )

    def _answered(self, hostname: str, value: Any) -> list[mingle.Effect]:
        self._heard.add(hostname)
        if isinstance(value, dict):
            value = _unpacked(value)
            nodes = value.get("nodes")
            if isinstance(nodes, list) and len(nodes) <= mingle.PEERS_MAX:
                self._expect({n for n in nodes if isinstance(n, str)})
            at = value.get("at")
            if type(at) is float and self._times_ahead is not None:
                self._times_ahead.append(at - self._worker.wall())
        return self._step(mingle.Answered(hostname, value))

    def _all_heard(self) -> bool:
        return self._expected is not None and self._expected <= self._heard

    def _expect(self, names: set[str]) -> None:
        """Somebody who answered knows who is there."""
        self._expected = names - {self._worker.plan.hostname}
        with self._lock:
            self._machine.expect(self._expected)

    def _take_over(self, effect: mingle.Effect) -> None:
        worker, now = self._worker, self._worker.wall()
        if isinstance(effect, mingle.Witness):
            worker.app.clock.adjust(effect.clock)
        elif isinstance(effect, mingle.Merge):
            told = self._permitted(effect.told)
            worker.learn_revoked(worker.revocations.merge(told, now), "mingle")
        elif isinstance(effect, mingle.MergeIds) and worker.may("revoke"):
            worker.learn_revoked(worker.revocations.merge_ids(effect.ids, now), "mingle")
        elif isinstance(effect, mingle.MergePauses):
            worker.consumption.take_over(effect.told)
        self._report_refused(None)

    def _permitted(self, told: Any) -> Any:
        """What a node tells of revocations, without what nobody may revoke here."""
        if not isinstance(told, dict):
            return told
        return {
            kind: lives
            for kind, lives in told.items()
            if self._worker.may(_COMMANDS.get(kind, "revoke"))
        }

    def _step(self, what: mingle.Input) -> list[mingle.Effect]:
        with self._lock:
            return self._machine.step(what, self._clock())

    # -- the other side ------------------------------------------------------------------

    def answer(self, arguments: dict[str, Any], *, is_new: bool = True) -> dict[str, Any] | None:
        """Reply to the `hello` of another node.

        What it tells is taken over unless it may be a copy of an old greeting; then this node asks
        by itself when the heartbeats of the other one differ.
        """
        worker, own = self._worker, self._worker.plan.hostname
        arguments = _unpacked(arguments)
        told = arguments.get("told")
        # Who may not revoke here may not do so by a greeting either.
        arguments["told"] = self._permitted(told) if is_new or told is None else {}
        if not is_new or not worker.may("revoke"):
            arguments["revoked"] = []
        found = mingle.answer(own, arguments, worker.revocations, worker.wall())
        if found is None:
            return None
        worker.learn_revoked(found.changed, "mingle")
        if is_new and arguments.get("paused"):
            worker.consumption.take_over(arguments["paused"])
        self._report_refused(arguments.get("from_node"))
        reply = {**_packed(found.reply), "clock": worker.app.clock.forward()}
        nodes = worker.gossip.names()
        if "digest" not in reply:
            return reply
        if nodes:
            reply["nodes"] = nodes
        return {**reply, "at": worker.wall(), **self._paused()}

    def _paused(self) -> dict[str, Any]:
        """Which queues are paused, for nodes of our kind; nothing where none was ever."""
        told = self._worker.consumption.told()
        return {"paused": told} if told else {}

    # -- what is refused -----------------------------------------------------------------

    def refused(self) -> dict[str, int]:
        """What was refused of the greetings, revocations and pauses of others, by reason."""
        found = Counter(self._machine.counts)
        found.update(dict(self._worker.revocations.counts))
        found.update(dict(self._worker.consumption.refused))
        return dict(found)

    def _report_refused(self, sender: Any) -> None:
        """Log the first of each kind."""
        for reason in sorted(self.refused().keys() - self._reported):
            self._reported.add(reason)
            logger.warning(
                "A part of what %s sent of revocations and pauses was refused (%s). Others of "
                "this kind are only counted.",
                shown_name(sender) if isinstance(sender, str) else "another node",
                reason,
            )

    # -- later ---------------------------------------------------------------------------

    def summary(self) -> str:
        """What heartbeats tell of our revocations, and of the queues that are paused."""
        revoked = mingle.summary_of(self._worker.revocations)
        return revoked + self._worker.consumption.summary()

    def compared(self, hostname: str, summary: Any) -> None:
        """Another node's heartbeat told this of its revocations."""
        self._step(mingle.Compared(hostname, summary == self.summary()))

    def gone(self, hostname: str) -> None:
        """Nobody waits for a node that is lost or has left."""
        self._step(mingle.Gone(hostname))

    def tick(self) -> None:
        """Exchange with a node that has differed from us for long, on a thread of its own."""
        if self._exchanging or self._greeting:
            return
        effects = self._step(mingle.Tick())
        if effects:
            self._exchanging = True
            thread = threading.Thread(
                target=self._exchange, args=(effects,), name="umbel-mingle", daemon=True
            )
            thread.start()

    def _exchange(self, effects: list[mingle.Effect]) -> None:
        try:
            self._settle(effects)
        except Enough:
            pass
        except Exception as exc:  # noqa: BLE001 - the next heartbeat tells whether it is needed
            logger.warning("revocations could not be exchanged: %s", exc)
        finally:
            self._exchanging = False
            self._worker.app.publisher.close_idle()


def _packed(fields: dict[str, Any]) -> dict[str, Any]:
    packed = {"told": packed_lives, "digest": packed_digest}
    return {name: packed.get(name, _same)(value) for name, value in fields.items()}


def _unpacked(fields: dict[str, Any]) -> dict[str, Any]:
    unpacked = {"told": unpacked_lives, "digest": unpacked_digest}
    return {name: unpacked.get(name, _same)(value) for name, value in fields.items()}


def _same(value: Any) -> Any:
    return value
