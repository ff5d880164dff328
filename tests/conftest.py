"""Fixtures for all tests: private brokers, started when the first test asks for one.

- `redis_server`, `rabbitmq_server`   the servers themselves, one each per run (tests/servers.py)
- `redis_url`                         an empty Redis database of its own
- `amqp_url`                          a RabbitMQ virtual host of its own
- `broker_url`                        both in turn: the test runs twice
- `store_server`                      a stand-in for S3
- `start`                             starts programs and ends them with the test
- `worker`                            starts workers, waits until they are ready

A test that kills, pauses or restarts a server leaves it running again.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.servers import (
    DEFAULT_REDIS,
    REDIS,
    VALKEY,
    Missing,
    RabbitMQServer,
    RedisServer,
    StoreServer,
    old_redis_program,
    redis_program,
)
from tests.workers import Program, WorkerProcess

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# Tests start hundreds of processes: to compile all modules anew takes half of the time of a start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_numbers = itertools.count(1)


@atexit.register  # among the first that registers, so among the last to run
def _end_quietly() -> None:
    """duckdb's bindings count what the interpreter leaves at its end, behind pytest's last line."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


# What is measured here is spoilt by whatever runs beside it.
QUIET = {
    "test_ten_thousand_tasks_with_an_eta_run_once_and_on_time",
    "test_a_saturated_loop_handles_what_is_posted_within_a_fifth_of_a_second",
    "test_five_hundred_parked_tasks_do_not_delay_another_type",
    "test_going_round_when_nothing_else_is_there_costs_little",
    "test_many_breaks_on_rabbitmq_lose_nothing_and_leave_nothing_over",
    "test_many_breaks_on_redis_lose_nothing_and_leave_nothing_over",
    "test_rests_do_not_keep_a_fast_limit_from_being_used",
    "test_a_silent_broker_holds_a_stop_up_no_longer_than_that_after_the_last_task",
    "test_a_worker_on_the_embedded_broker_starts_quickly_and_idles_cheaply",
    "test_the_cluster_page_shows_every_node_and_stays_live",
    "test_the_timeline_draws_all_bars_and_pans_smoothly",
    "test_the_timeout_of_a_command_counts_from_its_beginning",
}


# These files run on Redis and on Valkey. All others run on the machine's Redis, or with
# TEST_REDIS=valkey on Valkey.
ON_BOTH = {
    "test_recorder.py",
    "test_registers.py",
    "test_sources_streams.py",
    "test_transport_redis.py",
    "test_wall_clocks.py",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    both = metafunc.definition.path.name in ON_BOTH and "redis_server" in metafunc.fixturenames
    if both and DEFAULT_REDIS == REDIS:
        metafunc.parametrize("redis_server", [REDIS, VALKEY], indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item, "originalname", item.name) in QUIET:
            item.add_marker(pytest.mark.quiet)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out groups of tests to several processes (tests/groups.py)."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from tests.groups import Groups

    return Groups(config, log)


@pytest.fixture(scope="session", autouse=True)
def _terminate_like_interrupt() -> Iterator[None]:
    """Clean up on SIGTERM too, as on an interrupt from the keyboard."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def redis_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    kind = getattr(request, "param", DEFAULT_REDIS)
    yield from _run(RedisServer, tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="session")
def rabbitmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQServer]:
    yield from _run(RabbitMQServer, tmp_path_factory.mktemp("rabbitmq"))


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    yield from _run(StoreServer, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def valkey_program() -> str:
    """The server that the embedded broker uses."""
    return _installed(redis_program, VALKEY)


@pytest.fixture(scope="session")
def old_redis() -> str:
    """Redis 6.2.14, which the embedded broker used before."""
    return _installed(old_redis_program)


def _installed(find: Callable[..., Any], *args: Any) -> Any:
    try:
        return find(*args)
    except Missing as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{exc} is not installed: run 'make setup'")


def _run(kind: Any, *args: Any) -> Iterator[Any]:
    server = _installed(kind, *args)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    db = next(_numbers) % RedisServer.DATABASES_COUNT
    redis_server.client(db).flushdb()
    return redis_server.url_of(db)


@pytest.fixture
def amqp_url(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    vhost = f"test-{next(_numbers)}"
    yield rabbitmq_server.add_vhost(vhost)
    rabbitmq_server.delete_vhost(vhost)


@pytest.fixture(params=["redis", "amqp"])
def broker_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """`start(command, cwd=..., env=...)` gives a running `Program`; cwd defaults to tmp_path."""
    programs: list[Program] = []

    def start_program(command: Sequence[str], **options: Any) -> Program:
        program = Program(command, **{"cwd": tmp_path, **options})
        programs.append(program)
        return program

    yield start_program
    for program in programs:
        program.kill()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """`worker(app, args, cwd=..., env=...)` gives a worker that is ready."""
    workers: list[WorkerProcess] = []

    def start_worker(app: str, args: Sequence[str] = (), **options: Any) -> WorkerProcess:
        process = WorkerProcess(app, args, **{"cwd": tmp_path, **options})
        workers.append(process)
        return process.wait_until_ready()

    yield start_worker
    for process in workers:
        process.kill()
