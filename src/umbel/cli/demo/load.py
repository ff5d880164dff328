"""What the demo sends, and what must come back.

Every call is an `Expectation`: the ids to wait for, and the state and value that its last task
must end with. Nothing is random, so that a wrong answer is a wrong answer every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from umbel import AsyncResult, chain, chord
from umbel.cli.demo import tasks

CHAIN_LENGTH = 3
CHORD_WIDTH = 8


@dataclass(slots=True, frozen=True)
class Expectation:
    """One call and the only right answer to it."""

    kind: str
    id: str
    ids: tuple[str, ...]
    status: str
    value: Any

    def is_met_by(self, meta: dict[str, Any]) -> bool:
        """Whether the stored document says what it must."""
        result = meta["result"]
        if isinstance(result, BaseException):
            result = type(result).__name__
        return bool(meta["status"] == self.status and result == self.value)


def kinds(scale: float) -> dict[str, int]:
    """How many calls of each kind; `scale` 1 makes some three thousand tasks."""
    shares = {
        "fast": 1_500, "slow": 120, "waiting": 120, "failing": 100, "retried": 100,
        "eta": 150, "chain": 80, "chord": 40,
    }  # fmt: skip
    return {kind: max(1, round(count * scale)) for kind, count in shares.items()}


def send(kind: str, count: int) -> Iterable[Expectation]:
    """Send all calls of one kind."""
    if kind == "fast":
        results = tasks.app.send_many([tasks.add.s(n, n) for n in range(count)])
        return [_one(kind, result, 2 * n) for n, result in enumerate(results)]
    make = _SENDERS[kind]
    return [make(n) for n in range(count)]


def _one(kind: str, result: AsyncResult, value: Any, status: str = "SUCCESS") -> Expectation:
    return Expectation(kind, result.id, (result.id,), status, value)


def _slow(n: int) -> Expectation:
    return _one("slow", tasks.work_for.delay(0.02 + n % 5 / 50, n), n)


def _waiting(n: int) -> Expectation:
    return _one("waiting", tasks.wait_for.delay(0.1 + n % 5 / 10, n), n)


def _failing(n: int) -> Expectation:
    return _one("failing", tasks.order.delay(n), "OutOfStock", "FAILURE")


def _retried(n: int) -> Expectation:
    return _one("retried", tasks.unsteady.delay(1 + n % 3), 1 + n % 3)


def _eta(n: int) -> Expectation:
    return _one("eta", tasks.add.apply_async((n, 1), countdown=0.5 + n % 20 / 10), n + 1)


def _chain(n: int) -> Expectation:
    result = chain(tasks.add.s(n, 1), *(tasks.add.s(1) for _ in range(CHAIN_LENGTH - 1)))()
    ids, node = [], result
    while node is not None:
        ids.append(node.id)
        node = node.parent
    return Expectation("chain", result.id, tuple(ids), "SUCCESS", n + CHAIN_LENGTH)


def _chord(n: int) -> Expectation:
    result = chord([tasks.add.s(n, part) for part in range(CHORD_WIDTH)], tasks.total.s())()
    parts = [part.id for part in result.parent.results]
    value = CHORD_WIDTH * n + sum(range(CHORD_WIDTH))
    return Expectation("chord", result.id, (result.id, *parts), "SUCCESS", value)


_SENDERS: dict[str, Callable[[int], Expectation]] = {
    "slow": _slow,
    "waiting": _waiting,
    "failing": _failing,
    "retried": _retried,
    "eta": _eta,
    "chain": _chain,
    "chord": _chord,
}
