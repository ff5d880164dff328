"""Asks the result backend whether a task was revoked before this worker could hear of it.

A worker hears every revocation while it runs, and learns of earlier ones from its state file and
from other nodes. Where there are neither, the stored state is all that is left of a revocation: it
is REVOKED as soon as one worker has heard of it. So a task whose stored state is REVOKED by a
revocation is not started.

| message                        | asked | because                                                |
| ------------------------------ | ----- | ------------------------------------------------------ |
| has an eta                     | yes   | it may have waited for long: in a worker that was      |
|                                |       | killed, or in a delay queue of RabbitMQ                |
| was delivered before           | yes   | whoever had it may have been killed before it settled  |
| any other                      | no    | a round trip for each task would cost too much         |
| its result is ignored, or the  | no    | nothing is stored that could be read                   |
| backend keeps no results       |       |                                                        |

| stored state                   | the task                                                       |
| ------------------------------ | -------------------------------------------------------------- |
| REVOKED: revoked or terminated | is not started                                                 |
| the same, stored more than     | runs: somebody has sent the id again on purpose. Messages of   |
| `SKEW_MAX_S` before the        | Celery's clients do not tell when they were sent, and are not  |
| message was sent               | started                                                        |
| REVOKED: expired               | runs, if this message has not expired                          |
| anything else                  | runs                                                           |

Many messages are asked about together. Meanwhile their deliveries are held, as for an eta. Messages
without an eta that come while such ones wait go behind them, so that what was given back runs in
its old order. If the backend fails, or does not answer within `PATIENCE_S`, all go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Generic, Protocol

from umbel.cluster.revocations import SKEW_MAX_S
from umbel.exceptions import TaskRevokedError
from umbel.wire.limits import Refusal
from umbel.wire.times import parse_time
from umbel.worker.delivery.effects import D, Delivery, Effects
from umbel.worker.delivery.states import State

# How many are asked about in one round trip.
CHUNK: Final = 256
PATIENCE_S: Final = 10.0
REASONS: Final = frozenset({"revoked", "terminated"})


class Ways(Protocol[D]):
    """Where deliveries go from here."""

    def hold(self, delivery: D, wait_s: float, then: Callable[[D], None]) -> None:
        """Let it wait for `wait_s` at most, then call `then`."""

    def proceed(self, delivery: D) -> None:
        """It is not known to be revoked."""

    def discard(self, delivery: D, why: str) -> None:
        """It may not run."""


class StoredStates(Generic[D]):
    """The questions of one worker."""

    def __init__(self, ways: Ways[D], effects: Effects[D]) -> None:
        self._ways = ways
        self._do = effects
        self._waiting: list[D] = []  # not asked about yet
        self._asked: list[D] = []
        self._is_late = False  # the answer is, and nobody waits for it
        self.line_count = 0  # of deliveries here that have no eta

    def enter(self, delivery: D) -> None:
        """Let it go on when it is known not to be revoked, and no earlier one waits."""
        must_wait = _is_read(delivery) or (delivery.eta_s is None and self.line_count > 0)
        if self._is_late or not must_wait:
            self._ways.proceed(delivery)
            return
        self._ways.hold(delivery, PATIENCE_S, self._give_up)
        self._waiting.append(delivery)
        self.line_count += delivery.eta_s is None
        if not self._asked:
            self._ask()

    def _ask(self) -> None:
        while self._waiting:
            deliveries, self._waiting = self._waiting[:CHUNK], self._waiting[CHUNK:]
            ids = [one.id for one in deliveries if _is_read(one)]
            if ids:
                self._asked = deliveries
                self._do.read_states(ids, self._answered)
                return
            self._go_on(deliveries, {})

    def _answered(self, states: Mapping[str, Any]) -> None:
        deliveries, self._asked = self._asked, []
        self._is_late = False
        self._go_on(deliveries, states)
        self._ask()

    def _go_on(self, deliveries: Sequence[D], states: Mapping[str, Any]) -> None:
        self.line_count -= sum(one.eta_s is None for one in deliveries)
        for one in deliveries:
            if one.state is not State.HELD:
                continue  # it was settled or given back meanwhile
            meta = states.get(one.id)
            if meta is not None and is_revoked(meta, one.header.umbel_sent):
                self._ways.discard(one, "revoked")
            else:
                self._ways.proceed(one)

    def _give_up(self, _: D) -> None:
        """One of them has waited for too long: all go on, and so do those that come now."""
        self._do.states_are_late(PATIENCE_S)
        deliveries, self._waiting = [*self._asked, *self._waiting], []
        # Those that wait for their eta are still here when the answer comes, and are judged then.
        self._asked = [one for one in self._asked if one.eta_s is not None]
        self._is_late = True
        self._go_on(deliveries, {})


def _is_read(delivery: Delivery) -> bool:
    if delivery.eta_s is None and not delivery.redelivered:
        return False
    return delivery.policy.keeps_result(delivery.header)


def is_revoked(meta: Mapping[str, Any], sent_ms: Any) -> bool:
    """Whether a stored document says that a message, sent at this time, is revoked."""
    if meta.get("status") != "REVOKED":
        return False
    cause = meta.get("result")
    if not isinstance(cause, TaskRevokedError) or not REASONS.intersection(map(str, cause.args)):
        return False
    stored_s = _unix(meta.get("date_done"))
    if stored_s is None or type(sent_ms) is not int:
        return True
    return sent_ms / 1000 <= stored_s + SKEW_MAX_S


def _unix(moment: Any) -> float | None:
    try:
        found = moment if isinstance(moment, datetime) else parse_time(moment, UTC)
        return found.timestamp()
    except (Refusal, OverflowError, ValueError):
        return None
