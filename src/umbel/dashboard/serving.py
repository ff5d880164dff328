"""Serving a dashboard until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from umbel.dashboard.application import make_for
from umbel.dashboard.connections import (
    HEAD_BYTES_MAX,
    Limits,
    Sparing,
    Table,
    protocol_for,
    watch_accepting,
)
from umbel.dashboard.site import Site

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.dashboard.settings import Settings

# Live updates never end by themselves.
GRACE_S = 3
TICKS_A_SECOND = 10  # of uvicorn's main loop


def serve(app: Umbel, settings: Settings, log_level: str = "warning") -> None:
    """Serve until a signal ends it; raises OSError where the address is taken."""
    Server(Site(app, settings), Limits.of_process(), log_level).run()


class Server(uvicorn.Server):
    """uvicorn, with bounds on connections and an end in order."""

    def __init__(self, site: Site, limits: Limits, log_level: str = "warning") -> None:
        self._site, self.table = site, Table(limits)
        config = uvicorn.Config(
            make_for(site),
            host=site.settings.host,
            port=site.settings.port,
            log_level=log_level,
            access_log=False,
            server_header=False,
            date_header=True,
            # Who the peer is decides about trust: no header may say otherwise.
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=math.ceil(limits.idle_s),
            backlog=limits.backlog,
            http=protocol_for(self.table),
            loop="asyncio",
            ws="none",
            lifespan="on",
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        logging.getLogger("uvicorn.error").addFilter(Sparing())
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Whoever asks it to end gets an end in order, and no signal once more afterwards."""
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: Any = None) -> None:
        """Begin to serve, ready for the moment when files run out."""
        watch_accepting(asyncio.get_running_loop(), self.table)
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Drop connections whose time is over, every second."""
        if counter % TICKS_A_SECOND == 0:
            self.table.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """Tell live updates to end, then end."""
        self._site.stopping = True
        await super().shutdown(sockets)
