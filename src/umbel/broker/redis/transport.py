"""The transport, and what turns for it: kombu's hub, or a blocking `drain_events`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from queue import Empty
from typing import Any

from kombu.transport import redis as kombu_redis
from redis.exceptions import RedisError

from umbel.broker.redis.channel import Channel, SentinelChannel
from umbel.broker.redis.fetching import ACKS_WAIT_S, LOOK_AGAIN_S, Fetcher

# Without a loop that has timers, messages of others are looked for so often at most.
RESTORE_PAUSE_S = 1.0


class Poller(kombu_redis.MultiChannelPoller):
    """Turns the fetchers of all channels of a transport, and kombu's ways where there are none."""

    def __init__(self) -> None:
        super().__init__()
        self._fetchers: dict[int, Fetcher] = {}  # by descriptor
        self._restored_at = 0.0
        self._loop: Any = None  # that of `attach`
        self._on_readable: Any = None
        self._waking = False
        self._wake_fd: int | None = None

    def wake_on(self, fd: int) -> None:
        """Let a blocking wait end when this descriptor is readable."""
        if self._wake_fd is None:
            self._wake_fd = fd
            self.poller.register(fd, self.eventflags)

    def attach(self, loop: Any, on_readable: Any) -> None:
        """Be turned by this loop from now on."""
        self._loop, self._on_readable, self._waking = loop, on_readable, False
        for channel in self._channels:
            if channel.fetcher is not None:
                self.prepare(channel.fetcher)

    def prepare(self, fetcher: Fetcher) -> None:
        """This one begins to take."""
        if self._loop is not None:
            fetcher.wake_later = self._wake_later

    def _wake_later(self) -> None:
        if not self._waking:
            self._waking = True
            self._loop.call_later(ACKS_WAIT_S, self._woken)

    def _woken(self) -> None:
        self._waking = False  # that it turns is all

    def close(self) -> None:
        """Watch nothing any more."""
        super().close()
        self._fetchers.clear()

    def dismiss(self, fetcher: Fetcher) -> None:
        """This one takes no more."""
        for fd, known in list(self._fetchers.items()):
            if known is fetcher:
                del self._fetchers[fd]
                with contextlib.suppress(OSError):  # a closed one is watched no more
                    self._unregister_from_poll(fd)

    def on_poll_start(self) -> None:
        """Before every wait: send what is to be sent."""
        super().on_poll_start()
        now = time.monotonic()
        for channel in list(self._channels):
            fetcher = channel.fetcher
            if channel.ledger.returns and not self._newer_may_come(channel):
                channel.flush_returns()
            if fetcher is not None:
                with self._broken_off(fetcher):
                    fetcher.turn(now)
                fd = fetcher.fileno()
                if fd is not None and self._fetchers.get(fd) is not fetcher:
                    self._watch(fd, fetcher)

    @contextlib.contextmanager
    def _broken_off(self, fetcher: Fetcher) -> Iterator[None]:
        """A connection that fails is let go; who goes on all the same gets another one."""
        try:
            yield
        except (RedisError, OSError):
            self.dismiss(fetcher)
            fetcher.close()
            raise

    @staticmethod
    def _newer_may_come(channel: Any) -> bool:
        """At the end all go back in order: those on their way are the newest, and go first."""
        return not channel.active_queues and any(one.count for one in channel.ledger.asked)

    def _watch(self, fd: int, fetcher: Fetcher) -> None:
        self._fetchers[fd] = fetcher
        if self._loop is None:
            self.poller.register(fd, self.eventflags)
        else:
            self._loop.add_reader(fd, self._on_readable, fd)

    def _register_BRPOP(self, channel: Any) -> None:  # noqa: N802 - kombu's name
        if channel.fetcher is None:
            super()._register_BRPOP(channel)

    def on_readable(self, fileno: int) -> None:
        """Something has come on one of our sockets."""
        fetcher = self._fetchers.get(fileno)
        if fetcher is None:
            super().on_readable(fileno)
        else:
            with self._broken_off(fetcher):
                fetcher.on_readable()

    def handle_event(self, fileno: int, event: int) -> Any:
        """The same, for a blocking loop; true if that may end its wait."""
        if fileno == self._wake_fd:
            return True
        fetcher = self._fetchers.get(fileno)
        if fetcher is None:
            return super().handle_event(fileno, event)
        before = fetcher.delivered_count
        self.on_readable(fileno)
        return fetcher.delivered_count > before

    def get(self, callback: Any, timeout: float | None = None) -> None:
        """Wait until something was delivered; raises Empty after a while without."""
        self._in_protected_read = True
        try:
            self.maybe_refresh_binding_expiry()
            before = self._delivered_count
            self.on_poll_start()
            if self._delivered_count > before:
                return
            handled = [self.handle_event(*event) for event in self._poll(timeout)]
            if any(handled):
                return
            now = time.monotonic()
            if not handled:
                self.maybe_check_brpop_health()
            if now - self._restored_at >= RESTORE_PAUSE_S:
                self._restored_at = now
                self.maybe_restore_messages()
            raise Empty
        finally:
            self._in_protected_read = False
            while self.after_read:
                self.after_read.pop()()

    def _poll(self, timeout: float | None) -> Any:
        now = time.monotonic()
        waits = [one.patience_s(now) for one in self._fetchers.values()]
        if timeout is not None or self._paused_brpop:
            waits.append(LOOK_AGAIN_S if timeout is None else timeout)
        return self.poller.poll(min(waits) if waits else None) or ()

    @property
    def _delivered_count(self) -> int:
        return sum(one.delivered_count for one in self._fetchers.values())


class Transport(kombu_redis.Transport):
    """kombu's Redis transport with our channels."""

    Channel = Channel
    cycle: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cycle.poller.close()
        self.cycle = Poller()

    def wake_on(self, fd: int) -> None:
        """Let `drain_events` end its wait when this descriptor is readable."""
        self.cycle.wake_on(fd)

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver something, waiting for it no longer than `timeout`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left_s = timeout
        while True:
            try:
                self.cycle.get(self._deliver, timeout=left_s)
            except Empty:
                if deadline is not None:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError("timed out") from None
            else:
                return

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let this loop turn the fetchers."""
        super().register_with_event_loop(connection, loop)
        self.cycle.attach(loop, self.on_readable)


class SentinelTransport(Transport, kombu_redis.SentinelTransport):
    """The same, where sentinels know the server."""

    Channel = SentinelChannel


def transport_for(found: type) -> type:
    """Ours in the place of kombu's transport for Redis; any other one as it is."""
    if found is kombu_redis.Transport:
        return Transport
    if found is kombu_redis.SentinelTransport:
        return SentinelTransport
    return found
