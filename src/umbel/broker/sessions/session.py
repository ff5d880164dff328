"""Holding a connection to a broker: open it, notice that it is lost, wait, open another one.

`opened` opens a connection, `opening` opens it for a block that prepares it. Every broker of its
list is tried once; pauses are for the caller, as only the caller knows what ends them.

An `Outage` is kept by each thread that connects again by itself. Its first failure is logged as a
warning, those that follow for debugging only, and its end once. It also says how long to wait: the
pauses grow, with jitter, and a broker that refuses for good is asked once a minute.

A `Session` is a thread that holds one connection after another until `stop`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Final

from kombu import Connection

from umbel.broker.sessions.connections import hang_up
from umbel.broker.sessions.permanent import ASK_AGAIN_S, described, permanent
from umbel.cluster.backoff import Backoff

USUAL: Final = Backoff(0.1, 5.0)


@contextlib.contextmanager
def opening(connection: Connection) -> Iterator[Connection]:
    """Open a connection for a block that prepares it; hang up if either fails."""
    try:
        others = max(len(connection.alt) - 1, 0)
        connection.ensure_connection(max_retries=others, interval_start=0, interval_step=0)
        yield connection
    except BaseException as exc:
        # After an error of a channel the connection works, and the broker expects a good-bye.
        hang_up(connection, lost=not isinstance(exc, connection.channel_errors))
        raise


def opened(connection: Connection) -> Connection:
    """Open a connection; hang up if no broker of its list can be reached."""
    with opening(connection):
        return connection


class Outage:
    """What one thread logs and how long it waits while it cannot reach its broker."""

    def __init__(
        self,
        logger: logging.Logger,
        purpose: str,
        backoff: Backoff = USUAL,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """`purpose` completes "Cannot …" and "Can … again" in the log."""
        self._logger, self._purpose = logger, purpose
        self._backoff, self._dice = backoff, dice
        self._failures = 0
        self._is_known = False

    def failure(self, exc: Exception, *, is_news: bool = True) -> float:
        """Log a failure, only the first as a warning; returns the pause before the next try.

        Without `is_news` not even the first is one.
        """
        self._failures += 1
        pause_s = self._backoff.pause_s(self._failures, self._dice())
        if permanent(exc) is not None:
            pause_s = ASK_AGAIN_S
        is_news = is_news and self._failures == 1
        self._is_known = self._is_known or is_news
        self._logger.log(
            logging.WARNING if is_news else logging.DEBUG, "Cannot %s: %s. Retrying in %.1f s",
            self._purpose, described(exc).rstrip("."), pause_s,
        )  # fmt: skip
        return pause_s

    def over(self) -> None:
        """It works; costs nothing when it did before."""
        if self._is_known:
            self._logger.info("Can %s again", self._purpose)
        self._failures, self._is_known = 0, False


class Session:
    """A thread that holds one connection after another until `stop`; to be started once."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        use: Callable[[Connection, Session], None],
        outage: Outage,
        *,
        name: str,
        on_failure: Callable[[Exception], bool] = lambda _: True,
    ) -> None:
        """`connect` makes an unopened connection, and `use` gets it when it is open.

        `use` subscribes, calls `began`, and returns when `stopping` is set; the session then closes
        the connection in order. Whatever it raises means that the connection is lost. `on_failure`
        says of each failure whether it is worth a warning.
        """
        self._connect, self._use = connect, use
        self._outage, self._on_failure = outage, on_failure
        self.ready = threading.Event()
        self.stopping = threading.Event()
        self.failure: Exception | None = None  # the last one, while it is not overcome
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def began(self) -> None:
        """Called by `use`: the connection serves its purpose from now on."""
        self.failure = None
        self._outage.over()
        self.ready.set()

    def stop(self, timeout_s: float) -> None:
        """End, which ends a pause at once; wait for it this long."""
        self.stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self.stopping.is_set():
            try:
                with opening(self._connect()) as connection:
                    if not self.stopping.is_set():  # a stop need not have waited for us
                        self._use(connection, self)
                hang_up(connection)
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                self.ready.clear()
                self.failure = exc
                if not self.stopping.is_set():
                    pause_s = self._outage.failure(exc, is_news=self._on_failure(exc))
                    self.stopping.wait(pause_s)
        self.ready.clear()
