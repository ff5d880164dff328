"""Connections to brokers: addresses, failover lists, and the embedded server.

Everything that opens a broker connection comes through `connect`. It turns the embedded
address into the private server of this directory, gives polling transports a short interval,
and refuses an address that no transport can serve before anything is started.

Nobody waits for an answer without a bound: the other side may be gone without a word. On Redis
the sockets have a time-out, on AMQP every wait has (`broker/amqp/bounded.py`).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES, pyamqp, resolve_transport
from redis.backoff import NoBackoff
from redis.retry import Retry

from umbel.broker.amqp.bounded import BoundedConnection, bound
from umbel.broker.amqp.transport import OURS
from umbel.broker.embedded import server as embedded
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.masking import masked_url

# In-process and file transports look for messages at this interval when a queue is empty.
POLLING_INTERVAL_S = 0.05
# One lease per directory, kept while the process lives.
_leases: dict[Path, embedded.Lease] = {}
_POLLING_TRANSPORTS = frozenset({"memory", "filesystem"})
_RABBITMQ_TRANSPORTS = ("amqp", "pyamqp", "librabbitmq")
_REDIS_TRANSPORTS = frozenset({"redis", "rediss", "sentinel", "valkey", "valkeys"})
# The longest wait for an answer, with a heartbeat that would allow more, and without one.
ANSWER_MAX_S, ANSWER_PATIENT_S = 10.0, 30.0
ANSWER_MIN_S = 1.0
GOODBYE_S = 2.0
# How Redis connections are made when there is no time left.
_HURRIED: dict[str, Any] = {
    "socket_timeout": 0.2,
    "socket_connect_timeout": 0.2,
    "retry": Retry(NoBackoff(), 0),
}


def addresses(url: str | Sequence[str]) -> list[str]:
    """The broker addresses in `url`: a list, or one string with `;` between them."""
    parts = url.split(";") if isinstance(url, str) else [p for u in url for p in u.split(";")]
    return [part.strip() for part in parts if part.strip()]


def masked(url: str | Sequence[str]) -> str:
    """The addresses as they may be shown: without passwords."""
    return ";".join(masked_url(part) for part in addresses(url))


def is_embedded(url: str | Sequence[str]) -> bool:
    """Whether `url` means the private server of this directory."""
    found = addresses(url)
    return len(found) == 1 and found[0].startswith(embedded.EMBEDDED_URL)


def is_rabbitmq(url: str | Sequence[str]) -> bool:
    """Whether the first of these addresses is one of AMQP."""
    return addresses(url)[0].lower().startswith(_RABBITMQ_TRANSPORTS)


def resolve(url: str, directory: Path | None, program: str | None = None) -> str:
    """The address to connect to; joins (or starts) the embedded server when it is meant."""
    if not url.startswith(embedded.EMBEDDED_URL):
        return url
    chosen = (directory or Path()).absolute()
    lease = _leases.get(chosen)
    if lease is None:
        lease = _leases.setdefault(chosen, embedded.join(directory, program))
    return lease.url


def leave_embedded() -> None:
    """Let go of every embedded server that this process has joined; done at exit anyway."""
    while _leases:
        _leases.popitem()[1].close()


def check(url: str | Sequence[str], setting: str = "broker_url") -> None:
    """Refuse addresses that name no transport that is installed here."""
    found = addresses(url)
    if not found:
        raise ImproperlyConfigured(
            f"{setting} is empty: give an address such as redis://localhost/0, or leave it out "
            "for the embedded broker"
        )
    for one in found:
        _check_one(one, setting)


def _check_one(url: str, setting: str) -> None:
    if url.startswith(embedded.EMBEDDED_URL):
        return
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ImproperlyConfigured(
            f"{setting} {masked_url(url)!r} is not an address: "
            "it must look like redis://host:port/db or amqp://user:password@host:port/vhost"
        )
    try:
        urlsplit(url).port  # noqa: B018 - the access is the check
    except ValueError as exc:
        raise ImproperlyConfigured(f"{setting} {masked(url)!r}: {exc}") from None
    name = scheme.split("+", 1)[0].lower()
    try:
        resolve_transport(name)
    except KeyError:
        known = ", ".join(sorted(set(TRANSPORT_ALIASES) - {"pyamqp", "librabbitmq"}))
        raise ImproperlyConfigured(
            f"{setting} {masked(url)!r} names the unknown transport {name!r}: "
            f"choose one of embedded, {known}"
        ) from None
    except ImportError as exc:
        raise ImproperlyConfigured(
            f"{setting} {masked(url)!r} needs a package that is not installed: {exc}"
        ) from None


def connect(
    url: str | Sequence[str],
    *,
    directory: Path | None = None,
    embedded_server: str | None = None,
    transport_options: Mapping[str, Any] | None = None,
    redis_transport: str = "umbel",
    amqp_transport: str = "umbel",
    **options: Any,
) -> Connection:
    """A new, unopened connection to the first of these brokers that will answer."""
    check(url)
    resolved = [resolve(one, directory, embedded_server) for one in addresses(url)]
    scheme = resolved[0].split(":", 1)[0].split("+", 1)[0].lower()
    chosen = _bounded(scheme, transport_options or {}, options)
    target: Any = resolved if len(resolved) > 1 else resolved[0]
    made = BrokerConnection(target, transport_options=chosen, **options)
    made.answer_timeout_s = answer_timeout_s(options.get("heartbeat"))
    made.redis_transport, made.amqp_transport = redis_transport, amqp_transport
    return made


def another(template: Connection, **changes: Any) -> Connection:
    """A new, unopened connection to the brokers of `template`, which may be kombu's own.

    Waits are bounded as those of `connect` are. The template itself is neither used nor closed.
    """
    if isinstance(template, BrokerConnection):
        made: Connection = template.clone(**changes)
        return made
    options = {**template.info(), **changes}
    scheme = str(template.transport_cls).lower()
    options["transport_options"] = _bounded(scheme, options["transport_options"] or {}, options)
    made = BrokerConnection(**options)
    made.answer_timeout_s = answer_timeout_s(options["heartbeat"])
    return made


def connection_of(given: Any) -> Connection:
    """The connection that this is, or that this channel belongs to; raises TypeError."""
    if isinstance(given, Connection):
        return given
    # A channel of kombu's knows its transport or, on AMQP, its established connection.
    client = getattr(getattr(given, "connection", None), "client", None)
    if isinstance(client, Connection):
        return client
    raise TypeError(
        f"connection must be a kombu Connection, a channel of one or a broker URL, not {given!r}: "
        "use app.connection(), or leave it out for the application's own broker"
    )


def _bounded(
    scheme: str, transport_options: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The transport options, with a bound to every wait that has none."""
    chosen = dict(transport_options)
    if scheme in _POLLING_TRANSPORTS:
        chosen.setdefault("polling_interval", POLLING_INTERVAL_S)
    elif scheme in _REDIS_TRANSPORTS:
        # Half of it: until the next question is asked there goes some time too.
        chosen.setdefault("socket_timeout", answer_timeout_s((options.get("heartbeat") or 0) / 2))
        if options.get("connect_timeout"):
            chosen.setdefault("socket_connect_timeout", options["connect_timeout"])
    return chosen


class BrokerConnection(Connection):
    """kombu's connection, with our transports, and a bound to its patience with AMQP brokers."""

    answer_timeout_s = ANSWER_PATIENT_S
    # Ours, or those of the libraries.
    redis_transport = amqp_transport = "umbel"

    def get_transport_cls(self) -> Any:
        """The class of the transport to this broker."""
        found = super().get_transport_cls()
        if self.redis_transport == "umbel" and found.__module__ == "kombu.transport.redis":
            from umbel.broker.redis import transport_for  # not needed elsewhere, and takes a while

            return transport_for(found)
        return OURS.get(found, found) if self.amqp_transport == "umbel" else found

    def create_transport(self) -> Any:
        """Another one after each change of brokers."""
        transport = super().create_transport()
        if isinstance(transport, pyamqp.Transport):
            ours = isinstance(transport, tuple(OURS.values()))
            kind = transport.Connection if ours else BoundedConnection
            transport.Connection = partial(kind, answer_timeout_s=self.answer_timeout_s)
        return transport

    def clone(self, **changes: Any) -> Any:
        """Another one to the same brokers, as patient and of the same kind."""
        made = super().clone(**changes)
        for name in ("answer_timeout_s", "redis_transport", "amqp_transport"):
            setattr(made, name, getattr(self, name))
        return made


def answer_timeout_s(heartbeat_s: float | None) -> float:
    """How long an answer of a broker is waited for."""
    if not heartbeat_s:
        return ANSWER_PATIENT_S
    return max(ANSWER_MIN_S, min(float(heartbeat_s), ANSWER_MAX_S))


def hang_up(connection: Connection, *, lost: bool = False, polled_elsewhere: bool = False) -> None:
    """Close a connection without caring whether the other side is still there.

    What it waits with is closed too, unless that belongs to somebody's loop (`polled_elsewhere`):
    kombu would leave it to the garbage collector.

    A lost one is not said good-bye to, nor one from which the broker does not read, and the answer
    of others is waited for a moment only; the socket is closed all the same, also where the broker
    ended the conversation.
    """
    established = getattr(connection, "_connection", None)
    lost = lost or getattr(established, "blocked", None) is not None
    cycle = getattr(getattr(connection, "_transport", None), "cycle", None)
    poller = getattr(cycle, "poller", None)
    channels = list(getattr(cycle, "_channels", ()))
    if not lost:
        with contextlib.suppress(Exception):
            bound(connection, GOODBYE_S)
            connection.close()
    collect = getattr(established, "collect", None)
    if collect is not None:
        with contextlib.suppress(Exception):
            collect()
    if lost:
        for channel in channels:  # closing them would delete queues, and wait for the answer
            getattr(channel, "auto_delete_queues", set()).clear()
        with contextlib.suppress(Exception):
            connection.collect()
        for channel in channels:  # on Redis each has sockets of its own, subscriptions too
            with contextlib.suppress(Exception):
                channel._disconnect_pools()
    if poller is not None and not polled_elsewhere:
        with contextlib.suppress(Exception):
            poller.close()


def cut(connection: Connection) -> None:
    """End every wait for the other side, from any thread: whoever waits sees a lost connection."""
    established = getattr(connection, "_connection", None)
    transport = getattr(established, "_transport", None)  # of AMQP
    if transport is not None:
        _shut(transport.sock)
    for channel in list(getattr(getattr(connection, "_transport", None), "channels", ())):
        for pool in _pools(channel):
            # What is asked next would connect again, and wait as long as before.
            pool.connection_kwargs.update(_HURRIED)
            for one in [*pool._in_use_connections, *pool._available_connections]:
                for name, value in _HURRIED.items():
                    setattr(one, name, value)
                _shut(one._sock)


def _pools(channel: Any) -> list[Any]:
    """Those of a channel on Redis."""
    fetcher = getattr(channel, "fetcher", None)
    found = [getattr(channel, name, None) for name in ("_pool", "_async_pool")]
    return [pool for pool in (*found, getattr(fetcher, "pool", None)) if pool is not None]


def _shut(sock: Any) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def driver(connection: Connection) -> str:
    """The kind of transport behind a connection: `redis`, `amqp`, `memory`, ..."""
    return str(connection.transport.driver_type)
