"""A Celery and an Umbel worker that consume the same queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.peers import CELERY, OFTEN, UMBEL, WAIT_S, Client, Marks, start_worker
from tests.servers import RedisServer

PARTS = 200


@dataclass(frozen=True)
class Mixed:
    settings: dict[str, Any]
    redis: Any


@pytest.fixture(scope="module", params=["redis", "amqp"])
def mixed(
    request: pytest.FixtureRequest,
    own_redis: RedisServer,
    new_settings: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mixed]:
    """One worker of each library on one queue, both with little room."""
    settings = new_settings(request.param, worker_prefetch_multiplier=1)
    number = int(settings["result_backend"].rpartition("/")[2])
    workers = []
    try:
        for library, pool in ((CELERY, "prefork"), (UMBEL, "threads")):
            cwd: Path = tmp_path_factory.mktemp("worker")
            workers.append(
                start_worker(library, settings, marks_url=own_redis.url_of(0), cwd=cwd, pool=pool)
            )
        yield Mixed(settings, own_redis.client(number))
    finally:
        for worker in workers:
            worker.kill()


@pytest.fixture(params=[CELERY, UMBEL])
def client(
    request: pytest.FixtureRequest, mixed: Mixed, new_client: Callable[..., Client]
) -> Client:
    return new_client(request.param, mixed.settings)


def shares(hostnames: list[str]) -> Counter[str]:
    """How many tasks each library ran."""
    return Counter(hostname.partition("@")[0] for hostname in hostnames)


def test_a_chord_of_parts_on_both_workers_sends_its_body_once(
    client: Client, mixed: Mixed, marks: Marks
) -> None:
    mark = marks.name()
    header = [client.s("where", number) for number in range(PARTS)]
    result = client.chord(header, client.s("mark", mark=mark))()

    parts = result.get(timeout=WAIT_S)

    assert [number for number, _ in parts] == list(range(PARTS))
    ran = shares([hostname for _, hostname in parts])
    assert min(ran[CELERY], ran[UMBEL]) >= 1, ran
    client.group(*(client.s("add", 1, 1) for _ in range(20)))().get(**OFTEN)
    assert marks.count(mark) == 1
    assert mixed.redis.get(f"celery-taskset-meta-{result.parent.id}.c") == b"done"


def test_a_chord_with_failing_parts_on_both_workers_fails_once(
    client: Client, marks: Marks
) -> None:
    mark, never = marks.name(), marks.name()
    body = client.s("mark", mark=never)
    body.link_error(client.s("old_errback", mark=mark))
    header = [client.s("fail" if number % 5 == 0 else "where", number) for number in range(50)]

    result = client.chord(header, body)()

    with pytest.raises(client.errors.ChordError, match="Dependency"):
        result.get(timeout=WAIT_S, follow_parents=False)
    assert marks.wait(mark)["id"] == result.id
    client.group(*(client.s("add", 1, 1) for _ in range(20)))().get(**OFTEN)
    assert (marks.count(mark), marks.count(never)) == (0, 0)


def test_chains_hop_between_the_workers(client: Client) -> None:
    made = [
        client.chain(client.s("add", number, 0), *(client.s("add", 1) for _ in range(5)))
        for number in range(20)
    ]
    assert client.group(*made)().get(**OFTEN) == [number + 5 for number in range(20)]


def test_nested_canvases_hop_between_the_workers(client: Client) -> None:
    made = [
        client.chain(
            client.s("add", number, 1),
            client.group(*(client.s("add", i) for i in range(4))),
            client.s("sum"),
            client.group(client.s("add", 1), client.s("replaced_by_chain")),
            client.s("sum"),
        )()
        for number in range(6)
    ]
    values = [result.get(timeout=WAIT_S) for result in made]
    assert values == [2 * (4 * (number + 1) + 6) + 1101 for number in range(6)]


def test_retries_are_taken_up_by_either_worker(client: Client) -> None:
    results = [client.send("flaky", 3) for _ in range(20)]
    assert [result.get(timeout=WAIT_S)[:2] for result in results] == [
        [3, result.id] for result in results
    ]
