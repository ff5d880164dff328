"""The thread that learns of results on Redis.

One thread per process and backend, started by the first watch, with one subscribed connection.
Callers never touch that connection: they change what is wanted and wake the thread, which
brings the subscriptions in line in one command for many tasks.

No wake-up is lost: a document is read *after* its subscription is confirmed, so a result is
either found or announced; after a reconnect everything that is wanted is subscribed and read
again. A final state may therefore be told twice, and the first time ends the interest. When
nobody waits the thread holds no subscription and sleeps until it is woken. While somebody
waits, a silent connection is checked with a PING now and then, since a peer that vanished
without a word would otherwise never be noticed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
from collections.abc import Callable, Iterable
from typing import Any

from umbel.app.results.watching import OnMeta, Watch, Watchers
from umbel.cluster.backoff import Backoff

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 30.0
RETRY = Backoff(0.05, 2.0)
SUBSCRIBE_CHUNK = 500


class Reader:
    """Watches task ids by pub/sub."""

    def __init__(
        self,
        *,
        connect: Callable[[], Any],  # gives the connection pool
        fetch: Callable[[list[str]], Iterable[dict[str, Any]]],
        read: Callable[[str, bytes], dict[str, Any]],
        channel: Callable[[str], str],
        broken: tuple[type[BaseException], ...],
    ) -> None:
        self._pool = connect
        self._fetch = fetch
        self._read = read
        self._channel = channel
        self._broken = broken
        self._watchers = Watchers(self._wake)
        self._lock = threading.Lock()
        self._fresh: set[str] = set()  # ids whose documents are to be read
        self._thread: threading.Thread | None = None
        self._wake_fds: tuple[int, int] | None = None
        self._closed = False

    def watch(self, task_ids: Iterable[str], on_meta: OnMeta, every: bool) -> Watch:
        """Begin a watch; `on_meta` runs on the reader's thread."""
        ids = list(task_ids)
        watch = self._watchers.add(ids, on_meta, every)
        with self._lock:
            self._fresh.update(ids)
            if self._thread is None:
                self._start()
        self._wake()
        return watch

    def close(self) -> None:
        """End the thread; those who still wait are told nothing."""
        with self._lock:
            thread, self._closed = self._thread, True
        if thread is not None:
            self._wake()
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def abandon(self) -> None:
        """Forget the thread of the parent process after a fork."""
        fds, self._wake_fds = self._wake_fds, None
        for fd in fds or ():
            with contextlib.suppress(OSError):
                os.close(fd)

    def _start(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._wake_fds = reading, writing
        self._thread = threading.Thread(target=self._run, name="umbel-results", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        # Under the lock, as a descriptor that is closed meanwhile may be somebody else's.
        with self._lock:
            fds = self._wake_fds
            if fds is not None:
                # A full pipe means that the thread will wake anyhow.
                with contextlib.suppress(BlockingIOError):
                    os.write(fds[1], b"x")

    def _run(self) -> None:
        assert self._wake_fds is not None
        fds = self._wake_fds
        failures = 0
        selector = selectors.DefaultSelector()
        selector.register(fds[0], selectors.EVENT_READ)
        try:
            while not self._closed:
                if not self._watchers.wanted():
                    self._drain(selector, None, fds[0])
                    continue
                session = None
                try:
                    session = Session(self, self._pool(), selector, fds[0])
                    failures = 0
                    session.run()
                except self._broken as exc:
                    failures += 1
                    say = logger.warning if failures == 1 else logger.debug
                    say("The connection to the result backend was lost, retrying: %s", exc)
                    self._drain(selector, RETRY.pause_s(failures), fds[0])
                except Exception:
                    logger.exception("waiting for results failed; beginning again")
                    self._drain(selector, RETRY.longest_s, fds[0])
                finally:
                    if session is not None:
                        session.close()
        finally:
            selector.close()
            with self._lock:
                if self._wake_fds == fds:
                    self._wake_fds = None
                    for fd in fds:
                        os.close(fd)

    def _drain(self, selector: selectors.BaseSelector, timeout_s: float | None, fd: int) -> None:
        if selector.select(timeout_s):
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)

    def take_fresh(self) -> set[str]:
        """The ids whose documents are to be read, once."""
        with self._lock:
            fresh, self._fresh = self._fresh, set()
        return fresh


class Session:
    """One connection's life: subscriptions follow what is wanted until it breaks."""

    def __init__(
        self, reader: Reader, pool: Any, selector: selectors.BaseSelector, wake_fd: int
    ) -> None:
        self._reader = reader
        self._watchers = reader._watchers
        self._pool = pool
        self._selector = selector
        self._wake_fd = wake_fd
        self._connection = pool.get_connection()
        self._socket = self._connection._sock
        self._ids: dict[bytes, str] = {}  # channel -> id, subscribed
        self._confirmed: set[str] = set()
        self._pinged = False
        selector.register(self._socket, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the connection breaks or the reader is closed."""
        self._align(self._watchers.wanted())
        while not self._reader._closed:
            ready = self._selector.select(PING_INTERVAL_S if self._ids else None)
            if not ready:
                self._check_alive()
                continue
            if any(key.fileobj == self._wake_fd for key, _ in ready):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_fd, 4096)
                self._align(self._reader.take_fresh())
            if any(key.fileobj is self._socket for key, _ in ready):
                self._receive()

    def _align(self, fresh: set[str]) -> None:
        wanted = self._watchers.wanted()
        have = set(self._ids.values())
        for command, ids in (("SUBSCRIBE", wanted - have), ("UNSUBSCRIBE", have - wanted)):
            names = {self._reader._channel(task_id).encode(): task_id for task_id in ids}
            channels = list(names)
            for start in range(0, len(channels), SUBSCRIBE_CHUNK):
                chunk = channels[start : start + SUBSCRIBE_CHUNK]
                self._connection.send_command(command, *chunk, check_health=False)
            if command == "SUBSCRIBE":
                self._ids.update(names)
            else:
                for channel, task_id in names.items():
                    del self._ids[channel]
                    self._confirmed.discard(task_id)
        # Those not confirmed yet are read when they are.
        self._deliver(fresh & self._confirmed)

    def _receive(self) -> None:
        confirmed: set[str] = set()
        while True:
            reply = self._connection.read_response(disconnect_on_error=False)
            self._pinged = False
            if isinstance(reply, list) and len(reply) == 3:
                kind, channel, data = reply
                task_id = self._ids.get(channel)
                if task_id is not None and kind == b"subscribe":
                    confirmed.add(task_id)
                elif task_id is not None and kind == b"message":
                    self._watchers.deliver(self._reader._read(task_id, data))
            if not self._connection.can_read(timeout=0):
                break
        self._confirmed |= confirmed
        self._deliver(confirmed)

    def _deliver(self, ids: set[str]) -> None:
        if ids:
            for meta in self._reader._fetch(sorted(ids)):
                self._watchers.deliver(meta)
        if self._ids and len(self._watchers.wanted()) < len(self._ids):
            self._reader._wake()  # something ended: its subscription can go

    def _check_alive(self) -> None:
        if self._pinged:
            raise ConnectionResetError("the result backend has not answered a ping")
        self._pinged = True
        self._connection.send_command("PING", check_health=False)

    def close(self) -> None:
        """Give the connection up; a subscribed one is of no other use."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._socket)
        with contextlib.suppress(Exception):
            self._connection.disconnect()
        with contextlib.suppress(Exception):
            self._pool.release(self._connection)
