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

Many messages are asked about together. Meanwhile their requests are held, as for an eta. Messages
without an eta that come while such ones wait go behind them, so that what was given back runs in
its old order. If the backend fails, or does not answer within `PATIENCE_S`, all go on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.revocations import SKEW_MAX_S
from umbel.exceptions import BackendError, TaskRevokedError
from umbel.wire.limits import Refusal
from umbel.wire.times import parse_time

if TYPE_CHECKING:
    from umbel.worker.request import Request
    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.worker")

# How many are asked about in one round trip.
CHUNK: Final = 256
PATIENCE_S: Final = 10.0
REASONS: Final = frozenset({"revoked", "terminated"})


class StoredStates:
    """The questions of one worker. On the loop thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting: list[Request] = []  # not asked about yet
        self._asked: list[Request] = []
        self._is_late = False  # the answer is, and nobody waits for it
        self.line_count = 0  # of requests here that have no eta

    def enter(self, request: Request) -> None:
        """Let the request go on when it is known not to be revoked, and no earlier one waits."""
        must_wait = _is_read(request) or (request.eta is None and self.line_count > 0)
        if self._is_late or not must_wait:
            request.strategy.proceed(request)
            return
        self._worker.hold(request, PATIENCE_S, self._give_up)
        self._waiting.append(request)
        self.line_count += request.eta is None
        if not self._asked:
            self._ask()

    def _ask(self) -> None:
        while self._waiting:
            requests, self._waiting = self._waiting[:CHUNK], self._waiting[CHUNK:]
            ids = [request.id for request in requests if _is_read(request)]
            if ids:
                self._asked = requests
                states: dict[str, dict[str, Any]] = {}
                self._worker.aside(
                    partial(self._read, ids, states), partial(self._answered, states)
                )
                return
            self._go_on(requests, {})

    def _read(self, ids: Sequence[str], states: dict[str, dict[str, Any]]) -> None:
        """On the side thread."""
        try:
            states.update(self._worker.app.backend.get_many(ids))
        except BackendError as exc:
            logger.warning(
                "The stored states of %d tasks cannot be read, so they run unless this worker "
                "knows that they are revoked: %s", len(ids), exc,
            )  # fmt: skip

    def _answered(self, states: Mapping[str, Any]) -> None:
        requests, self._asked = self._asked, []
        self._is_late = False
        self._go_on(requests, states)
        self._ask()

    def _go_on(self, requests: Sequence[Request], states: Mapping[str, Any]) -> None:
        held = self._worker.tally.reserved
        self.line_count -= sum(request.eta is None for request in requests)
        for request in requests:
            if request.timer is None or id(request) not in held:
                continue  # it was settled or given back meanwhile
            meta = states.get(request.id)
            if meta is not None and is_revoked(meta, request.header.umbel_sent):
                request.strategy.discard(request, "revoked")
            else:
                request.strategy.proceed(request)

    def _give_up(self, _: Request) -> None:
        """One of them has waited for too long: all go on, and so do those that come now."""
        logger.warning(
            "The result backend has not answered for %g s: tasks run unless this worker knows that "
            "they are revoked", PATIENCE_S,
        )  # fmt: skip
        requests, self._waiting = [*self._asked, *self._waiting], []
        # Those that wait for their eta are still here when the answer comes, and are judged then.
        self._asked = [request for request in self._asked if request.eta is not None]
        self._is_late = True
        self._go_on(requests, {})


def _is_read(request: Request) -> bool:
    if request.eta is None and not request.job.redelivered:
        return False
    return request.strategy.keeps_result(request.header)


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
