"""Mingling: carries out the greetings that the machine of this node wants, over remote control.

At the start, and after every lost connection, `run` greets all nodes and returns when all that are
known have answered and nothing is left to exchange. Later, heartbeats tell whether another node
knows other revocations or pauses than we do; then the two exchange them, on a thread of its own.

All are heard first, so that nobody's clock is missed, then there is one exchange after another with
those who know something else. What is told of many revocations is packed (`wire.packs`). What is
taken over, and from whom, is decided in `cluster.node`.

Where signing is required only signed answers count (`app.trust`).

How it fails: whoever does not answer is not waited for longer than the machine says. What the
broker raises goes to the caller; the machine is left to the next tick of gossip.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from umbel.app.control.mailbox import mailboxes_for
from umbel.broker.broadcast.census import listeners
from umbel.cluster import mingle
from umbel.cluster.node import CallEnded, Effect, Greeted, Input, Reply
from umbel.wire.packs import packed_digest, packed_lives, unpacked_digest, unpacked_lives
from umbel.wire.reprs import shown_name

if TYPE_CHECKING:
    from kombu import Connection

    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.mingle")

LOOK_S = 0.02


class AllAnswered(Exception):
    """Everybody who was expected has answered the greeting."""


class Mingling:
    """One worker's side; one conversation at a time, on whichever thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._greeting = self._exchanging = False
        self._reported: set[str] = set()  # reasons for which something was refused

    @property
    def _machine(self) -> mingle.Mingle:
        return self._worker.gossip.node.mingle

    def _do(self, what: Input) -> list[Effect]:
        return self._worker.gossip.do(what)

    # -- our side ------------------------------------------------------------------------

    def run(self, connection: Connection) -> mingle.Done | None:
        """Catch up with the others; None when there was nobody, or the worker is to stop."""
        expected = listeners(connection, mailboxes_for(self._worker.app))
        if expected is not None:
            expected.discard(self._worker.plan.hostname)
            if not expected:
                return None
        self._greeting = True
        try:
            done = self._settle(self._do(mingle.Begin(expected)))
            while done is None and self._machine.busy:
                if self._worker.stop_wanted.wait(LOOK_S):
                    return None
                done = self._settle(())
            return done
        finally:
            self._greeting = False

    def tick(self) -> None:
        """Exchange with a node that has differed from us for long, on a thread of its own."""
        if self._exchanging or self._greeting:
            return
        effects = self._do(mingle.Tick())
        if effects:
            self._exchanging = True
            thread = threading.Thread(
                target=self._exchange, args=(effects,), name="umbel-mingle", daemon=True
            )
            thread.start()

    def _exchange(self, effects: list[Effect]) -> None:
        try:
            self._settle(effects)
        except Exception as exc:  # noqa: BLE001 - the next heartbeat tells whether it is needed
            logger.warning("revocations could not be exchanged: %s", exc)
        finally:
            self._exchanging = False
            self._worker.app.publisher.close_idle()

    def _settle(self, effects: Iterable[Effect]) -> mingle.Done | None:
        """Send all greetings, and those that follow from their answers, up to the end."""
        todo = deque(effects)
        while not self._worker.stop_wanted.is_set():
            while todo:
                effect = todo.popleft()
                if isinstance(effect, mingle.Done):
                    return effect
                if isinstance(effect, mingle.Hello):
                    todo.extend(self._greet(effect))
            todo.extend(self._do(mingle.Tick()))
            if not todo:
                break
        return None

    def _greet(self, effect: mingle.Hello) -> list[Effect]:
        to: dict[str, Any] = {}
        timeout_s = mingle.WINDOW_S
        if effect.destination is not None:
            to["destination"], timeout_s = [effect.destination], mingle.EXCHANGE_S

        def on_reply(reply: dict[str, Any]) -> None:
            for hostname, value in reply.items():
                read = _unpacked(value) if isinstance(value, dict) else value
                self._do(mingle.Answered(hostname, read))
            if effect.destination is None and self._machine.all_answered:
                raise AllAnswered

        with contextlib.suppress(AllAnswered):
            self._worker.app.control.mailbox.call(
                "hello", _packed(effect.arguments), timeout_s=timeout_s, callback=on_reply,
                signed_only=True, **to,
            )  # fmt: skip
        following = self._do(CallEnded())
        self._report_refused(None)
        return following

    # -- the other side ------------------------------------------------------------------

    def answer(self, arguments: dict[str, Any], *, is_new: bool = True) -> dict[str, Any] | None:
        """Reply to the `hello` of another node.

        What it tells is taken over unless it may be a copy of an old greeting; then this node asks
        by itself when the heartbeats of the other one differ.
        """
        effects = self._do(Greeted(_unpacked(arguments), is_new))
        self._report_refused(arguments.get("from_node"))
        return next((_packed(one.fields) for one in effects if isinstance(one, Reply)), None)

    # -- what is refused -----------------------------------------------------------------

    def refused(self) -> dict[str, int]:
        """What was refused of the greetings, revocations and pauses of others, by reason."""
        node = self._worker.gossip.node
        found = Counter(node.mingle.counts)
        found.update(dict(node.revocations.counts))
        found.update(dict(node.pauses.counts))
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


def _packed(fields: dict[str, Any]) -> dict[str, Any]:
    packed = {"told": packed_lives, "digest": packed_digest}
    return {name: packed.get(name, _same)(value) for name, value in fields.items()}


def _unpacked(fields: dict[str, Any]) -> dict[str, Any]:
    unpacked = {"told": unpacked_lives, "digest": unpacked_digest}
    return {name: unpacked.get(name, _same)(value) for name, value in fields.items()}


def _same(value: Any) -> Any:
    return value
