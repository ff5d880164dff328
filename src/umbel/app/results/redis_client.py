"""From an address to a Redis client: plain, TLS, socket, sentinel, embedded.

The client itself never retries; patience is the backend's, in one place. RESP2 is used, as
pub/sub messages then look the same on every server version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from umbel.broker.sessions.connections import masked, resolve
from umbel.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

CONNECT_TIMEOUT_S = 5.0
# For redis-py None is a hundred connections.
NO_LIMIT = 2**31
# How long a thread waits for a connection of another one where there is a limit.
ACQUIRE_TIMEOUT_S = 20.0
_TLS_CHECKS = {"CERT_REQUIRED": "required", "CERT_OPTIONAL": "optional", "CERT_NONE": "none"}


def make_client(app: Umbel, url: str) -> redis.Redis:
    """A client for the address; connects when it is first used."""
    address = resolve(url, app.directory, app.conf.embedded_server)
    options = _options(app)
    scheme = address.partition("://")[0].lower()
    if scheme == "sentinel":
        return _sentinel(app, address, options)
    if scheme in ("redis+socket", "socket", "unix"):
        return _socket(address, options)
    return _network(app, address, options)


def _options(app: Umbel) -> dict[str, Any]:
    conf = app.conf
    chosen = {
        "socket_timeout": conf.redis_socket_timeout,
        "socket_connect_timeout": conf.redis_socket_connect_timeout or CONNECT_TIMEOUT_S,
        "max_connections": conf.redis_max_connections,
        "health_check_interval": conf.redis_backend_health_check_interval or 0,
    }
    given = conf.result_backend_transport_options
    chosen.update({name: given[name] for name in chosen.keys() & given.keys()})
    chosen["max_connections"] = chosen["max_connections"] or NO_LIMIT
    return {"protocol": 2, "retry": Retry(NoBackoff(), 0), **chosen}


def _pool(max_connections: int, **options: Any) -> redis.ConnectionPool:
    """Connections that threads share; where there is a limit they wait for each other."""
    if max_connections == NO_LIMIT:
        return redis.ConnectionPool(max_connections=NO_LIMIT, **options)
    return redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
        max_connections=max_connections, timeout=ACQUIRE_TIMEOUT_S, **options
    )


def _network(app: Umbel, address: str, options: dict[str, Any]) -> redis.Redis:
    parts = urlsplit(address)
    query: dict[str, Any] = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    check = query.get("ssl_cert_reqs")
    if check is not None:
        query["ssl_cert_reqs"] = _TLS_CHECKS.get(check, check)
    query.pop("virtual_host", None)
    tls = app.conf.redis_backend_use_ssl
    if parts.scheme == "rediss" or tls:
        if isinstance(tls, dict):
            query.update(tls)
        kind: Any = redis.SSLConnection
    else:
        kind = redis.Connection
    try:
        database = int(parts.path.strip("/") or 0)
        port = parts.port or 6379
    except ValueError:
        raise ImproperlyConfigured(
            f"result_backend {masked(address)!r}: write it as redis://host:port/number"
        ) from None
    query.pop("ssl", None)
    pool = _pool(
        connection_class=kind,
        host=parts.hostname or "localhost",
        port=port,
        db=database,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        socket_keepalive=True,
        **{**options, **query},
    )
    return redis.Redis(connection_pool=pool)


def _socket(address: str, options: dict[str, Any]) -> redis.Redis:
    parts = urlsplit(address)
    query = parse_qs(parts.query)
    number = (query.get("virtual_host") or query.get("db") or ["0"])[-1].strip("/") or "0"
    pool = _pool(
        connection_class=redis.UnixDomainSocketConnection,
        path=unquote(parts.path),
        db=int(number),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        **options,
    )
    return redis.Redis(connection_pool=pool)


def _sentinel(app: Umbel, address: str, options: dict[str, Any]) -> redis.Redis:
    transport = app.conf.result_backend_transport_options
    master = transport.get("master_name")
    if not master:
        raise ImproperlyConfigured(
            f"result_backend {masked(address)!r} needs the name of the master: set "
            "result_backend_transport_options = {'master_name': 'mymaster'}"
        )
    parts = [urlsplit(one) for one in address.split(";") if one]
    last = parts[-1]
    if last.password:
        options["password"] = unquote(last.password)
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        [(part.hostname or "localhost", part.port or 26379) for part in parts],
        sentinel_kwargs=transport.get("sentinel_kwargs"),
        min_other_sentinels=transport.get("min_other_sentinels", 0),
        db=int(last.path.strip("/") or 0),
        **options,
    )
    client: redis.Redis = sentinel.master_for(master)
    return client
