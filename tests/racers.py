"""Processes that all claim the same registers at the same time.

    python -m tests.racers URL PROCESSES IDS [PREFIX]

Each id is a race of its own: nobody claims it before all are there. Prints, as JSON, what every
process was told of every id: `{"answers": {token: [[won, winner], ...]}}`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from typing import Any

from umbel.broker.registers.register import Register, register_for
from umbel.broker.sessions.connections import connect
from umbel.broker.tasks.batches import Parcel

QUEUE = "jobs"
WAIT_S = 60.0


def parcel_for(election_id: str, token: str, queue: str = QUEUE) -> Parcel:
    """A message that says who sent it."""
    return Parcel(
        json.dumps([election_id, token]).encode(),
        {"task": "t", "id": election_id},
        {"delivery_mode": 2, "correlation_id": election_id, "priority": 0},
        "application/json",
        "utf-8",
        "",
        queue,
    )


def election_ids(count: int) -> list[str]:
    """The ids that are raced for."""
    return [f"race-{number}" for number in range(count)]


def race(register: Register, token: str, count: int, barrier: Any) -> list[tuple[bool, str]]:
    """Claim every id, with the others; what was answered."""
    register.winner("nobody-claims-this")  # so that it is connected
    answers = []
    for election_id in election_ids(count):
        barrier.wait(WAIT_S)
        claim = register.claim(election_id, token, parcel=parcel_for(election_id, token))
        assert claim.sent == claim.won, claim
        answers.append((claim.won, claim.winner))
    register.close()
    return answers


def connected(url: str, prefix: str = "") -> Register:
    """Registers on a connection of its own."""
    options = {"global_keyprefix": prefix} if prefix else {}
    register = register_for(connect(url, transport_options=options))
    assert register is not None
    return register


def race_threads(url: str, threads: int, count: int) -> dict[str, list[tuple[bool, str]]]:
    """The same with threads, where nothing is shared between processes."""
    answers: dict[str, list[tuple[bool, str]]] = {}
    barrier = threading.Barrier(threads)

    def run(token: str) -> None:
        answers[token] = race(connected(url), token, count, barrier)

    racers = [threading.Thread(target=run, args=(f"w{n}@h/1/2/3",)) for n in range(threads)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(WAIT_S)
    return answers


def _run(url: str, prefix: str, count: int, barrier: Any, answers: Any) -> None:
    token = f"worker@host/{os.getpid()}/1794771703123456/1"
    try:
        answers.put((token, race(connected(url, prefix), token, count, barrier)))
    except BaseException as exc:
        barrier.abort()
        answers.put((token, repr(exc)))


def main(url: str, processes: str, count: str, prefix: str = "") -> None:
    """Run the race and print the answers."""
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(int(processes)), context.Queue()
    arguments = (url, prefix, int(count), barrier, answers)
    racers = [context.Process(target=_run, args=arguments) for _ in range(int(processes))]
    for racer in racers:
        racer.start()
    found = dict(answers.get(timeout=WAIT_S * 2) for _ in racers)
    for racer in racers:
        racer.join(WAIT_S)
    print(json.dumps({"answers": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
