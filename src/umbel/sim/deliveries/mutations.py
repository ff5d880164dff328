"""Machines of deliveries with one thing wrong, to see that the checks find it.

`umbel sim --what deliveries --mutation ack-dropped --seeds 2000`
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from umbel.sim.deliveries import checks
from umbel.sim.deliveries.plays import Parts
from umbel.sim.deliveries.tasks import CheckedDelivery
from umbel.worker.delivery.effects import ACK, RETURN
from umbel.worker.delivery.machine import Deliveries


class AckDropped(Deliveries[CheckedDelivery]):
    """Every fifth task is not acknowledged."""

    def settle(self, delivery: Any, how: str) -> None:
        if how != ACK or not delivery.id.endswith(("0", "5")):
            super().settle(delivery, how)


class AckBeforeRun(Deliveries[CheckedDelivery]):
    """Late-acknowledged tasks are acknowledged on receipt."""

    def arrived(self, delivery: Any) -> None:
        super().arrived(delivery)
        self.settle(delivery, ACK)


class DebtForgotten(Deliveries[CheckedDelivery]):
    """The window never widens again after a lost connection."""

    def _owe_no_more(self, delivery: Any) -> None:
        delivery.owed = False


class GivenBackTwice(Deliveries[CheckedDelivery]):
    """A warm stop gives everything back two times."""

    def give_back(self) -> None:
        waiting = list(self.reserved.values())
        super().give_back()
        for one in waiting:
            if id(one) not in self.reserved:
                self._do.settle(one.message, RETURN)


class OldestFirst(Deliveries[CheckedDelivery]):
    """A warm stop gives the oldest message back first."""

    def give_back(self) -> None:
        self.recall()
        self.reserved = dict(reversed(self.reserved.items()))
        super().give_back()


class NoAdoption(Deliveries[CheckedDelivery]):
    """A message that comes again is not recognised."""

    def came_again(self, message: Any, header: Any) -> bool:
        return False


class NoRecent(Deliveries[CheckedDelivery]):
    """What was settled just before a connection was lost is not remembered."""

    def connection_lost(self, *, cancel: bool, reduce: bool) -> None:
        if self.redeliveries.recent is not None:
            self.redeliveries.recent.clear()
        super().connection_lost(cancel=cancel, reduce=reduce)


class LeavingForgotten(Deliveries[CheckedDelivery]):
    """Messages whose outcome is being stored are not seen to when the connection is lost."""

    def connection_lost(self, *, cancel: bool, reduce: bool) -> None:
        self.leaving.clear()
        super().connection_lost(cancel=cancel, reduce=reduce)


class OrphansForgotten(Deliveries[CheckedDelivery]):
    """What waited when the connection was lost is not given back."""

    def connection_back(self, *, tied: bool) -> None:
        self._orphans.clear()
        super().connection_back(tied=tied)


class RevokedRun(Deliveries[CheckedDelivery]):
    """Nobody looks whether a task is revoked."""

    def _objection(self, delivery: Any) -> str | None:
        return None

    def discard_waiting(self, deliveries: Any, why: str) -> None:
        """They wait on."""


class ParkedForEver(Deliveries[CheckedDelivery]):
    """Parked tasks are not looked at again."""

    def judge_again(self, delivery: Any) -> None:
        """They wait on."""


class HeldUncounted(Deliveries[CheckedDelivery]):
    """Tasks that wait for their eta take the place of others."""

    def hold(self, delivery: Any, wait_s: float, then: Any) -> None:
        is_new = delivery.timer is None
        super().hold(delivery, wait_s, then)
        if is_new:
            self.prefetch.held -= 1


class Mutation(NamedTuple):
    """What is different, a rule that must be found broken, and faults that show it soon."""

    parts: Parts
    rule: str
    faults: tuple[str, ...] = ()


MUTATIONS: Final = {
    "ack-dropped": Mutation(Parts(AckDropped), checks.NOTHING_STAYS),
    "ack-before-run": Mutation(Parts(AckBeforeRun), checks.NOT_LOST),
    "debt-forgotten": Mutation(Parts(DebtForgotten), checks.WINDOW),
    "given-back-twice": Mutation(Parts(GivenBackTwice), checks.SETTLED_ONCE),
    "oldest-first": Mutation(Parts(OldestFirst), checks.ORDER),
    "no-adoption": Mutation(Parts(NoAdoption), checks.RUNS_ONCE),
    "no-recent": Mutation(Parts(NoRecent), checks.RUNS_ONCE),
    "leaving-forgotten": Mutation(Parts(LeavingForgotten), checks.SETTLED_ONCE),
    "orphans-forgotten": Mutation(Parts(OrphansForgotten), checks.LEASES),
    "revoked-run": Mutation(Parts(RevokedRun), checks.REVOKED),
    "parked-for-ever": Mutation(Parts(ParkedForEver), checks.NOTHING_STAYS),
    "held-uncounted": Mutation(Parts(HeldUncounted), checks.WINDOW),
}
