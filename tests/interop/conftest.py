"""Lines: a client of one library, a worker of the other, and the broker and backend between.

Every test that asks for `line` runs on all of them. A line's worker is started once and serves
all of its tests; pytest orders the tests so that one line is up at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.interop.peers import CELERY, UMBEL, Client, Marks, start_worker
from tests.servers import RabbitMQServer, RedisServer
from tests.workers import Program

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Kind:
    """What a line is made of."""

    client: str
    worker: str
    pool: str
    broker: str
    backend: str = "redis"
    extended: bool = False  # result_extended

    def __str__(self) -> str:
        between = self.broker if self.backend == "redis" else f"{self.broker}-{self.backend}"
        return f"{self.client}-to-{self.worker}-{self.pool}-on-{between}"


KINDS = [
    Kind(CELERY, UMBEL, "prefork", "redis"),
    Kind(UMBEL, CELERY, "prefork", "redis"),
    Kind(CELERY, UMBEL, "threads", "amqp", extended=True),
    Kind(UMBEL, CELERY, "threads", "amqp", extended=True),
    Kind(CELERY, UMBEL, "asyncio", "amqp", "rpc"),
    Kind(UMBEL, CELERY, "prefork", "amqp", "rpc"),
]


@dataclass(frozen=True)
class Line:
    """A client and what stands behind it."""

    kind: Kind
    client: Client
    worker: Program
    marks: Marks
    settings: dict[str, Any]
    redis: Any  # where results are kept, unless they are messages


@pytest.fixture(scope="session")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server of these tests: lines live longer than the other tests' databases."""
    server = RedisServer(tmp_path_factory.mktemp("interop-redis"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def marks(own_redis: RedisServer) -> Marks:
    return Marks(own_redis.client(0))


@pytest.fixture(scope="session")
def new_settings(own_redis: RedisServer, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`new_settings("redis"|"amqp", "redis"|"rpc")`: an empty broker and backend."""

    def make(broker: str, backend: str = "redis", **more: Any) -> dict[str, Any]:
        number = next(_numbers)
        redis_url = own_redis.url_of(number)
        if broker == "redis":
            broker_url = redis_url
        else:
            rabbitmq: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
            broker_url = rabbitmq.add_vhost(f"interop-{number}")
        chosen = {"redis": redis_url, "rpc": "rpc://"}[backend]
        return {"broker_url": broker_url, "result_backend": chosen, **more}

    return make


@pytest.fixture(scope="session", params=KINDS, ids=str)
def line(
    request: pytest.FixtureRequest,
    own_redis: RedisServer,
    marks: Marks,
    new_settings: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Line]:
    kind: Kind = request.param
    settings = new_settings(
        kind.broker,
        kind.backend,
        accept_content=["json", "msgpack", "yaml"],
        result_extended=kind.extended,
    )
    number = settings["result_backend"].rpartition("/")[2]
    worker = start_worker(
        kind.worker,
        settings,
        marks_url=own_redis.url_of(0),
        cwd=tmp_path_factory.mktemp("worker"),
        pool=kind.pool,
    )
    client = Client(kind.client, **settings)
    redis = own_redis.client(int(number)) if kind.backend == "redis" else None
    try:
        yield Line(kind, client, worker, marks, settings, redis)
    finally:
        client.close()
        worker.kill()


@pytest.fixture
def client(line: Line) -> Client:
    return line.client


@pytest.fixture
def chords(line: Line) -> Client:
    """A client whose backend can do chords."""
    if line.kind.backend == "rpc":
        pytest.skip("results as messages know no chords")
    return line.client


@pytest.fixture
def crew(
    own_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Program]]:
    """`crew(library, settings, ...)` starts a worker that ends with the test."""
    workers: list[Program] = []

    def hire(library: str, settings: dict[str, Any], **options: Any) -> Program:
        worker = start_worker(
            library,
            settings,
            marks_url=own_redis.url_of(0),
            cwd=tmp_path_factory.mktemp("worker"),
            **options,
        )
        workers.append(worker)
        return worker

    yield hire
    for worker in workers:
        worker.kill()


@pytest.fixture
def new_client() -> Iterator[Callable[..., Client]]:
    """`new_client(library, settings)` makes a client that is closed with the test."""
    clients: list[Client] = []

    def make(library: str, settings: dict[str, Any]) -> Client:
        made = Client(library, **settings)
        clients.append(made)
        return made

    yield make
    for one in clients:
        one.close()
