"""Sites: brokers on which workers of the probe application run (tests/sites.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.embedding import wait_until_stopped
from tests.inside import Inside
from tests.integration import commanded as commanding
from tests.servers import RabbitMQServer, RedisServer
from tests.sites import Site
from tests.workers import WorkerProcess
from umbel import Umbel
from umbel.broker.embedded import server as embedded


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Like `worker`, but `wait=False` gives one that may not be ready yet."""
    workers: list[WorkerProcess] = []

    def start(
        app: str, args: Sequence[str] = (), *, wait: bool = True, **options: Any
    ) -> WorkerProcess:
        process = WorkerProcess(app, args, **{"cwd": tmp_path, **options})
        workers.append(process)
        return process.wait_until_ready() if wait else process

    yield start
    for process in workers:
        process.kill()


@pytest.fixture
def redis_site(
    redis_url: str, redis_server: RedisServer, start_worker: Callable[..., WorkerProcess]
) -> Iterator[Site]:
    """Redis for everything."""
    db = int(redis_url.rsplit("/", 1)[1])
    site = Site(
        redis_url,
        redis_url,
        start_worker,
        lambda queue: int(redis_server.client(db).llen(queue)),
        lambda _: int(redis_server.client(db).hlen("unacked")),
    )
    yield site
    site.close()


@pytest.fixture
def amqp_site(
    amqp_url: str,
    redis_url: str,
    rabbitmq_server: RabbitMQServer,
    start_worker: Callable[..., WorkerProcess],
) -> Iterator[Site]:
    """RabbitMQ, with results in Redis."""
    vhost = amqp_url.rsplit("/", 1)[1]
    site = Site(
        amqp_url,
        redis_url,
        start_worker,
        lambda queue: rabbitmq_server.queue_length(queue, vhost),
        lambda queue: rabbitmq_server.unacknowledged(queue, vhost),
    )
    yield site
    site.close()


@pytest.fixture(params=["redis", "amqp"])
def site(request: pytest.FixtureRequest) -> Site:
    """Both in turn: the test runs twice."""
    found: Site = request.getfixturevalue(f"{request.param}_site")
    return found


@pytest.fixture
def measure() -> Callable[[], float]:
    """Seconds since the last call."""
    last = time.monotonic()

    def elapsed() -> float:
        nonlocal last
        before, last = last, time.monotonic()
        return last - before

    return elapsed


@pytest.fixture
def tasks() -> commanding.Tasks:
    """What the tasks of a commanded worker did."""
    return commanding.Tasks()


@pytest.fixture
def commanded(tasks: commanding.Tasks) -> Iterator[commanding.Start]:
    """`commanded(url, backend, settings=..., pool=...)` gives a worker in this process."""
    made: list[Inside] = []

    def begin(url: str, backend: str = "disabled://", **options: Any) -> Inside:
        settings = {
            "broker_url": url,
            "result_backend": backend,
            **options.pop("settings", {}),
        }
        made.append(Inside(settings, tasks.register, **options))
        return made[-1].start()

    yield begin
    tasks.hold.set()
    for inside in made:
        inside.close()


@pytest.fixture
def make_sender() -> Iterator[Callable[..., Umbel]]:
    """Applications that are closed with the test."""
    made: list[Umbel] = []

    def make_app(broker: Any, **settings: Any) -> Umbel:
        chosen = {"backend": "disabled://", "set_as_current": False, **settings}
        made.append(Umbel("sending", broker=broker, **chosen))
        return made[-1]

    yield make_app
    for app in made:
        app.close()


@pytest.fixture
def idle_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test may stop; not started yet."""
    server = RedisServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def restricted(redis_server: RedisServer, redis_url: str) -> Iterator[Callable[[str], str]]:
    """`restricted(rules)` gives the address for a user who may not do some things."""
    admin = redis_server.client()

    def make(rules: str) -> str:
        admin.execute_command(
            "ACL", "SETUSER", "guest", "on", ">guest", "~*", "&*", "+@all", *rules.split()
        )
        return redis_url.replace("redis://", "redis://guest:guest@")

    yield make
    admin.execute_command("ACL", "DELUSER", "guest")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A project directory; the server that may run there is gone before it is removed."""
    directory = tmp_path / "project"
    directory.mkdir()
    yield directory
    for hold in list(embedded._holds.values()):
        while hold.home in embedded._holds:
            embedded.Lease(hold).close()
    wait_until_stopped(directory)
