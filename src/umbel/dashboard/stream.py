"""Live updates: server-sent events with those fragments of a page that have changed.

Each client gets at most one update in a quarter of a second, however many events come, and a page
that takes long to make is made more rarely: no more than a tenth of the time goes into one. When
nothing has happened for a second the ages on the page are brought up to date. A client that does
not read is not written to; one that is gone is noticed when it is.

At most `live_clients_max` have them at a time. When all places are taken, who has logged in takes
one of somebody who has not, and who has none yet takes one of the address that has the most.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.concurrency import run_in_threadpool

from umbel.dashboard.connections import to_drop
from umbel.dashboard.pages.page import BadQuestion, NotFound, Page, Params
from umbel.wire.events import encode

if TYPE_CHECKING:
    from umbel.dashboard.guard import Visit
    from umbel.dashboard.site import Site

UPDATE_MIN_S: Final = 0.25
QUIET_S: Final = 1.0
PING_S: Final = 15.0
SHARE_MAX: Final = 10  # one part in so many of the time


@dataclass(eq=False, slots=True)
class Place:
    """The place of one client."""

    rank: int  # whether it is of somebody who has logged in
    address: str
    since_s: float
    is_lost: bool = False


class Places:
    """Who has live updates; used on the loop of the server only."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._taken: set[Place] = set()

    def __len__(self) -> int:
        return len(self._taken)

    def has_room(self, visit: Visit) -> bool:
        """Whether somebody can have live updates, if need be in another one's place."""
        return len(self._taken) < self._count_max or self._giver(visit) is not None

    def enter(self, visit: Visit) -> Place:
        """Take a place; the other one's is lost to him."""
        giver = self._giver(visit) if len(self._taken) >= self._count_max else None
        if giver is not None:
            giver.is_lost = True
            self._taken.discard(giver)
        identity = visit.identity
        place = Place(int(identity.is_known), identity.address, time.monotonic())
        self._taken.add(place)
        return place

    def leave(self, place: Place) -> None:
        """Give a place back."""
        self._taken.discard(place)

    def _giver(self, visit: Visit) -> Place | None:
        rank, address = int(visit.identity.is_known), visit.identity.address
        counts = Counter(one.address for one in self._taken if one.rank == rank)
        might = [
            one
            for one in self._taken
            if one.rank < rank or (one.rank == rank and counts[one.address] > counts[address] + 1)
        ]
        return next(iter(to_drop(might, 1)), None)


async def updates(site: Site, page: Page, params: Params, visit: Visit) -> AsyncIterator[bytes]:
    """The stream of one client."""
    place = site.live_clients.enter(visit)
    try:
        yield b"retry: 1000\n\n"
        sent: dict[str, str] = {}
        version, made_s, told_s = -1, 0.0, time.monotonic()
        while not site.stopping:
            now_s = time.monotonic()
            if site.live.version == version and now_s - made_s < QUIET_S:
                await asyncio.sleep(UPDATE_MIN_S)
                continue
            version, made_s = site.live.version, now_s
            if place.is_lost or not site.is_current(visit):
                yield _message("gone", {"text": "live updates have ended: load the page again"})
                return
            try:
                made = await run_in_threadpool(site.fragments, page, params, visit)
            except (BadQuestion, NotFound) as exc:
                yield _message("gone", {"text": str(exc)})
                return
            cost_s = time.monotonic() - now_s
            changed = {name: html for name, html in made.items() if sent.get(name) != html}
            if changed or now_s - told_s > PING_S:
                told_s = now_s
                sent.update(changed)
                yield _message("fragments", changed)
            rest_s = max(UPDATE_MIN_S, page.interval_s, cost_s * SHARE_MAX)
            await _rest(site, max(0.05, rest_s - cost_s))
    finally:
        site.live_clients.leave(place)


async def _rest(site: Site, rest_s: float) -> None:
    """Wait, but not beyond the end of the dashboard, which waits for its streams."""
    until_s = time.monotonic() + rest_s
    while not site.stopping and (left_s := until_s - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, UPDATE_MIN_S))


def _message(event: str, data: dict[str, str]) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + encode(dict(data)) + b"\n\n"
