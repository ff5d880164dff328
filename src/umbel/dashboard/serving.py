"""Serving a dashboard until it is told to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from umbel.dashboard.application import make_for
from umbel.dashboard.site import Site

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.dashboard.settings import Settings

# Live updates never end by themselves.
GRACE_S = 3


def serve(app: Umbel, settings: Settings, log_level: str = "warning") -> None:
    """Serve until a signal ends it; raises OSError where the address is taken."""
    site = Site(app, settings)
    config = uvicorn.Config(
        make_for(site),
        host=settings.host,
        port=settings.port,
        log_level=log_level,
        access_log=False,
        server_header=False,
        date_header=True,
        # Who the peer is decides about trust: no header may say otherwise.
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=30,
        ws="none",
        lifespan="on",
        h11_max_incomplete_event_size=65_536,
    )
    _Server(config, site).run()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site

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

    async def shutdown(self, sockets: Any = None) -> None:
        """Tell live updates to end, then end."""
        self._site.stopping = True
        await super().shutdown(sockets)
