"""A Celery and an Umbel worker on one Redis queue, and one of them is killed again and again.

An Umbel worker is killed at any moment. A Celery worker has moments in which it has taken a
message that is in no list any more and in no note yet, and who kills it then loses the message,
with or without us. So it is killed when there is none such: all stand still, and are looked at.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from tests import guard
from tests.interop.peers import CELERY, UMBEL, Client, Marks
from tests.servers import RedisServer, wait_until
from tests.sizes import size
from tests.workers import Program

TASKS, KILLS = size(500, 20_000), size(4, 50)
OPTIONS = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 1,
}
KEYS = ("celery", "celery\x06\x163", "celery\x06\x166", "celery\x06\x169")


@contextlib.contextmanager
def standing_still(workers: list[Program]) -> Iterator[None]:
    for worker in workers:
        guard.kill_group(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            guard.kill_group(worker.pid, signal.SIGCONT)


def known(broker: Redis, done: set[int]) -> set[int]:
    """The numbers that are in a list, or noted, or done."""
    waiting = [json.loads(raw) for key in KEYS for raw in broker.lrange(key, 0, -1)]
    noted = [json.loads(note)[0] for note in broker.hvals("unacked")]
    # `argsrepr` is "('<mark>', <number>)".
    texts = [envelope["headers"]["argsrepr"] for envelope in (*waiting, *noted)]
    return done | {int(text.rsplit(",", 1)[1].strip(" )")) for text in texts}


@pytest.mark.slow
@pytest.mark.timeout(size(120, 1800))
def test_nothing_is_lost_while_either_worker_is_killed(
    marks: Marks,
    own_redis: RedisServer,
    new_settings: Callable[..., Any],
    new_client: Callable[..., Client],
    crew: Callable[..., Program],
) -> None:
    settings = new_settings("redis", broker_transport_options=OPTIONS)
    broker = own_redis.client(int(settings["broker_url"].rpartition("/")[2]))
    client, mark = new_client(UMBEL, settings), marks.name()
    sent = 0

    def send_some() -> None:
        nonlocal sent
        upto = min(TASKS, sent + -(-TASKS // KILLS))
        client.app.send_many([client.s("number", mark, n) for n in range(sent, upto)])
        sent = upto

    def done() -> set[int]:
        return {int(value) for value in own_redis.client().smembers(mark)}

    def nobody_is_between(workers: list[Program], doomed: Program) -> bool:
        with standing_still(workers):
            if known(broker, done()) != set(range(sent)):
                return False
            doomed.kill()
            return True

    workers = {library: crew(library, settings) for library in (UMBEL, CELERY)}
    for kill in range(KILLS):
        begun = sent
        send_some()
        half = (begun + sent) // 2
        wait_until(lambda least=half: len(done()) >= least, 60, f"{half} tasks")
        library = (UMBEL, CELERY)[kill % 2]
        doomed = workers.pop(library)
        if library == UMBEL:
            doomed.kill()
        else:
            everybody = [doomed, *workers.values()]
            wait_until(lambda: nobody_is_between(everybody, doomed), 30, "a good moment")  # noqa: B023 - called at once
        workers[library] = crew(library, settings)
    assert sent == TASKS
    wait_until(lambda: len(done()) == TASKS, 60, "every task")
    wait_until(lambda: broker.hlen("unacked") == 0, 30, "every acknowledgement")
    assert sum(broker.llen(key) for key in KEYS) == 0
