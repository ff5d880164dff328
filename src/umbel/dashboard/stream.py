"""Live updates: server-sent events with those fragments of a page that have changed.

Each client gets at most one update in a quarter of a second, however many events come, and a page
that takes long to make is made more rarely: no more than a tenth of the time goes into one. When
nothing has happened for a second the ages on the page are brought up to date. A client that does
not read is not written to; one that is gone is noticed when it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from starlette.concurrency import run_in_threadpool

from umbel.dashboard.pages.page import BadQuestion, NotFound, Page, Params
from umbel.wire.events import encode

if TYPE_CHECKING:
    from umbel.dashboard.guard import Visit
    from umbel.dashboard.site import Site

UPDATE_MIN_S: Final = 0.25
QUIET_S: Final = 1.0
PING_S: Final = 15.0
SHARE_MAX: Final = 10  # one part in so many of the time


async def updates(site: Site, page: Page, params: Params, visit: Visit) -> AsyncIterator[bytes]:
    """The stream of one client."""
    site.live_clients += 1
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
        site.live_clients -= 1


async def _rest(site: Site, rest_s: float) -> None:
    """Wait, but not beyond the end of the dashboard, which waits for its streams."""
    until_s = time.monotonic() + rest_s
    while not site.stopping and (left_s := until_s - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, UPDATE_MIN_S))


def _message(event: str, data: dict[str, str]) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + encode(dict(data)) + b"\n\n"
