"""Two Celery workers and three of ours, one cluster: they know of each other, and nobody is harmed.

What is promised of elections in such a cluster stands in docs/guarantees: Celery's workers decide
without a register, so one of each kind may act; of ours at most one does.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.interop.peers import CELERY, UMBEL, Client, Marks
from tests.servers import RedisServer, wait_until
from tests.workers import READY, Program

CREW = {
    "c1@mix": (CELERY, "prefork"),
    "u1@mix": (UMBEL, "prefork"),
    "u2@mix": (UMBEL, "threads"),
    "c2@mix": (CELERY, "threads"),
    "u3@mix": (UMBEL, "solo"),
}
ELECTIONS = 10
WAIT_S = 30.0


@dataclass
class Mixed:
    """The cluster, and a client of each kind."""

    settings: dict[str, Any]
    marks: Marks
    marks_url: str
    cwd: Path
    clients: dict[str, Client]
    workers: dict[str, Program] = field(default_factory=dict)

    def start(self, name: str, library: str, pool: str, *args: str) -> Program:
        command = [sys.executable, "-m", library, "-A", f"tests.interop.{library}_node", "worker"]
        level = "debug" if library == CELERY else "info"
        options = ["-P", pool, "-c", "1", "-n", name, "-l", level]
        program = Program(
            [*command, *options, *args],
            cwd=self.cwd,
            env={"INTEROP_SETTINGS": json.dumps(self.settings), "INTEROP_MARKS": self.marks_url},
        )
        self.workers[name] = program
        program.wait_for(READY)
        if library == CELERY:  # on Redis it subscribes after it has called itself ready
            wait_until(lambda: self._answers(name), WAIT_S, f"{name} to hear commands")
        return program

    def _answers(self, name: str) -> bool:
        control = self.clients[UMBEL].app.control
        return bool(control.ping(destination=[name], timeout=0.5))

    def ask(self, command: str, name: str, **arguments: Any) -> Any:
        """What one node answers."""
        replies = self.clients[UMBEL].app.control.broadcast(
            command, arguments, destination=[name], reply=True, timeout=WAIT_S
        )
        assert replies, f"{name} does not answer {command}"
        return replies[0][name]

    def revoked(self, name: str) -> set[str]:
        return set(self.ask("revoked", name))

    def unharmed(self) -> None:
        """Every worker lives, answers, and works."""
        for name, worker in self.workers.items():
            assert worker.process.poll() is None, f"{name} ended: {worker.output[-4_000:]}"
            assert self.ask("ping", name) == {"ok": "pong"}
        for client in self.clients.values():
            assert client.run("add", 2, 2) == 4

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        for worker in self.workers.values():
            worker.kill()


@pytest.fixture(params=["redis", "amqp"])
def mixed(
    request: pytest.FixtureRequest,
    own_redis: RedisServer,
    marks: Marks,
    new_settings: Callable[..., Any],
    tmp_path: Path,
) -> Iterator[Mixed]:
    settings = new_settings(request.param)
    clients = {library: Client(library, **settings) for library in (CELERY, UMBEL)}
    made = Mixed(settings, marks, own_redis.url_of(0), tmp_path, clients)
    try:
        yield made
    finally:
        made.close()


def test_they_mingle_gossip_and_revoke_both_ways(mixed: Mixed) -> None:
    first = mixed.start("c1@mix", *CREW["c1@mix"])
    mixed.ask("revoke", "c1@mix", task_id=["known-to-celery"])
    clock = mixed.ask("clock", "c1@mix")["clock"]
    ours = mixed.start("u1@mix", *CREW["u1@mix"])
    assert "known-to-celery" in mixed.revoked("u1@mix"), "taken over at the start"
    assert mixed.ask("clock", "u1@mix")["clock"] >= clock
    mixed.ask("revoke", "u1@mix", task_id=["known-to-us"])
    mixed.start("u2@mix", *CREW["u2@mix"])
    second = mixed.start("c2@mix", *CREW["c2@mix"])
    second.wait_for(r"mingle: sync with 3 nodes")
    assert mixed.revoked("c2@mix") == {"known-to-celery", "known-to-us"}
    wait_until(lambda: "known-to-us" in mixed.revoked("u2@mix"), WAIT_S, "ours to tell each other")
    for client, id_ in ((CELERY, "by-celery"), (UMBEL, "by-us")):
        mixed.clients[client].app.control.revoke(id_)
        for name in mixed.workers:
            wait_until(lambda n=name, i=id_: i in mixed.revoked(n), WAIT_S, f"{name} to know")
    # Each kind sees the other join, go and be lost.
    first.wait_for(r"u1@mix joined the party")
    ours.wait_for(r"c2@mix joined")
    mixed.workers.pop("u2@mix").kill()
    first.wait_for(r"missed heartbeat from u2@mix", WAIT_S)
    mixed.workers.pop("c2@mix").kill()
    ours.wait_for(r"c2@mix was lost", WAIT_S)
    last = mixed.start("u3@mix", *CREW["u3@mix"])
    first.wait_for(r"u3@mix joined the party")
    assert mixed.workers.pop("u3@mix").stop() == 0
    first.wait_for(r"u3@mix left", WAIT_S)
    assert "c1@mix was lost" not in last.output + ours.output
    mixed.unharmed()


BAD_ELECTIONS: list[tuple[str, Any]] = [
    ("nobody-knows", {"task": "t.add"}),
    ("task", {"task": "t.add", "options": {"countdown": "soon"}}),
    ("task", None),
]


@pytest.mark.timeout(240)
def test_elections_asked_for_by_either_side_harm_nobody(mixed: Mixed) -> None:
    for name, (library, pool) in CREW.items():
        mixed.start(name, library, pool)
    celeries = [name for name, (library, _) in CREW.items() if library == CELERY]
    for name in celeries:
        for other in CREW:
            if other != name:
                mixed.workers[name].wait_for(f"{other} joined the party")
    ran: dict[str, str] = {}
    for library, client in mixed.clients.items():
        for _ in range(ELECTIONS):
            mark = mixed.marks.name()
            elect(client, mark)
            ran[mark] = library
    # Bad ones, of either side: unknown topics, no signature, an action that nobody can send.
    for client in mixed.clients.values():
        for topic, action in BAD_ELECTIONS:
            arguments = {"id": str(uuid.uuid4()), "topic": topic, "action": action}
            # Not by `election`, which refuses some of them on our side.
            client.app.control.broadcast("election", arguments)
    wait_until(lambda: not any(undecided(mixed, name) for name in CREW if name[0] == "u"), WAIT_S,
               "all elections to be decided")  # fmt: skip
    mixed.unharmed()
    counts = {mark: mixed.marks.count(mark) for mark in ran}
    print(f"how often elected tasks ran, on {mixed.settings['broker_url'][:5]}:")
    for library in mixed.clients:
        print(library, Counter(counts[mark] for mark, asked in ran.items() if asked == library))
    # Ours are careful; what Celery's workers make of it is theirs.
    assert all(count <= 1 + len(celeries) for count in counts.values())
    assert sum(count >= 1 for count in counts.values()) > 0


def elect(client: Client, mark: str) -> None:
    """Have one node send a task that leaves a mark."""
    task_id = str(uuid.uuid4())
    action = client.app.signature("t.ignored", args=(mark,)).clone(task_id=task_id)
    client.app.control.election(task_id, "task", dict(action))


def undecided(mixed: Mixed, name: str) -> dict[str, Any]:
    found: dict[str, Any] = mixed.ask("elections", name)["open"]
    return found


def test_a_single_celery_worker_among_ours_is_not_harmed_either(mixed: Mixed) -> None:
    """With less than two others it would be, and is among its own kind, too."""
    theirs = mixed.start("c1@mix", *CREW["c1@mix"])
    for name in ("u1@mix", "u3@mix"):
        mixed.start(name, *CREW[name])
        theirs.wait_for(f"{name} joined the party")
    marks = [mixed.marks.name() for _ in range(ELECTIONS)]
    client = mixed.clients[UMBEL]
    for mark in marks:
        elect(client, mark)
    client.app.control.election(str(uuid.uuid4()), "nobody-knows", {"task": "t.add"})
    for name in ("u1@mix", "u3@mix"):
        wait_until(lambda one=name: not undecided(mixed, one), WAIT_S, "all to be decided")
    mixed.unharmed()
    counts = Counter(mixed.marks.count(mark) for mark in marks)
    print(f"how often elected tasks ran: {counts}")
    assert max(counts) <= 2
