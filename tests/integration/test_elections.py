"""Elections among real workers: each is held, and each acts once, whoever is killed or stopped.

`ELECTIONS` is how many each cluster holds; in `make soak` all sizes of clusters hold 500.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Producer

from tests.ears import Ears
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.sites import APP, Site
from tests.sizes import FULL, size
from tests.workers import Program, WorkerProcess, run_umbel
from umbel.app.events.publisher import event_exchange
from umbel.app.results import AsyncResult
from umbel.broker.registers.register import register_for
from umbel.cluster.election_words import node_of
from umbel.wire.events import OWN_EXCHANGE

ELECTIONS = int(os.environ.get("ELECTIONS", size(10, 500)))
SEED = int(os.environ.get("ELECTIONS_SEED", "6"))
# So many are held at a time, and during each such round one worker is killed or stopped.
ROUND = 10
SIZES = {
    "prefork": (1, 2, 3, 5, 8) if FULL else (1, 3, 5),
    "solo": (1, 2, 3, 5, 8) if FULL else (1, 2, 8),
}
DECISION_S = 5.0
WORK = "work"
# Claimed on RabbitMQ by who is killed before it could send: a moment that is seldom hit.
GAPS_SHARE_MAX = 0.02


def ask(site: Site, command: str, node: str, **arguments: Any) -> Any:
    """What one node answers."""
    replies = site.app.control.broadcast(
        command, arguments, destination=[node], reply=True, timeout=20
    )
    assert replies, f"{node} does not answer {command}"
    return replies[0][node]


def signature(site: Site, task: str, *args: Any, **options: Any) -> Any:
    return site.app.signature(f"{APP}.{task}", args=args, options=options)


# -- many, with faults -----------------------------------------------------------------------


class Cluster:
    """Workers that elect; the elected tasks run elsewhere, so that killing an elector kills none.

    Every worker has a name of its own, also one that takes the place of another.
    """

    def __init__(self, site: Site, pool: str, seed: int) -> None:
        self.site, self.pool = site, pool
        self.dice = random.Random(seed)
        self.workers: dict[str, WorkerProcess] = {}
        self.elected: list[str] = []
        self.gaps: list[str] = []  # claimed by who died before it could send; RabbitMQ only
        self.hit_winners = 0  # elections whose winner was killed or stopped meanwhile
        self.slowest_s = 0.0
        self._count = 0
        self._starting: list[WorkerProcess] = []
        register = register_for(site.app.connection())
        assert register is not None
        self._register = register
        self.runner = site.worker(
            "threads", "-n", "runner@test", "-Q", WORK, "--without-gossip", "--without-mingle",
            concurrency=4,
        )  # fmt: skip

    def grow(self, size: int) -> None:
        """Have so many workers, all of them ready."""
        while len(self.workers) < size:
            self._start()
        while self._starting:
            self._starting.pop().wait_until_ready()

    def hold(self, count: int) -> None:
        """Hold so many elections, some at a time."""
        for start in range(0, count, ROUND):
            self.grow(len(self.workers))
            self._round(min(ROUND, count - start))
            for name, worker in {**self.workers, "runner": self.runner}.items():
                assert worker.process.poll() is None, f"{name} ended: {worker.output[-3_000:]}"

    def _round(self, count: int) -> None:
        victim = self.dice.choice(sorted(self.workers))
        # Nobody would be left to know of it if the only one was killed.
        kills = len(self.workers) > 1 and self.dice.random() < 0.5
        ids = [f"{self.pool}-{uuid.UUID(int=self.dice.getrandbits(128))}" for _ in range(count)]
        hit_s, back_s = self.dice.uniform(0, 1.2), self.dice.uniform(0.5, 1.5)
        again_later = []
        for number, id_ in enumerate(ids):
            election = signature(self.site, "record", id_, queue=WORK, task_id=id_)
            election.election()
            if number % 4 == 1:
                election.election()
            elif number % 4 == 3:
                again_later.append(election)
        began = time.monotonic()
        time.sleep(hit_s)
        self._harm(victim, kills)
        if len(self.workers) == 1 and not kills:
            time.sleep(back_s)
            self.workers[victim].signal(signal.SIGCONT)
            began = time.monotonic()
        open_ = self._await(ids, began)
        if not kills:
            self.workers[victim].signal(signal.SIGCONT)
        self._account(open_, victim, kills)
        if len(self.workers) > 1:
            won = [self._winner(id_) for id_ in ids]
            self.hit_winners += sum(one is not None and node_of(one) == victim for one in won)
        for election in again_later:
            election.election()
        self.elected += ids

    def _harm(self, victim: str, kills: bool) -> None:
        if kills:
            self.workers.pop(victim).kill()
            self._start()
        else:
            self.workers[victim].signal(signal.SIGSTOP)

    def close(self) -> None:
        self._register.close()

    def _start(self) -> None:
        self._count += 1
        name = f"w{self._count}@test"
        worker = self.site.worker(self.pool, "-n", name, "-Q", "idle", concurrency=1, wait=False)
        self.workers[name] = worker
        self._starting.append(worker)

    def _await(self, ids: list[str], began: float) -> list[str]:
        """Wait for the results; those that have none in time."""
        left = list(ids)
        while left and time.monotonic() < began + DECISION_S:
            left = [id_ for id_ in left if not self._ran(id_)]
            time.sleep(0.01)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        return left

    def _ran(self, id_: str) -> bool:
        return self.site.runs(id_) > 0

    def _account(self, late: list[str], victim: str, killed: bool) -> None:
        """Only RabbitMQ knows a moment between claiming and sending, and only for the victim."""
        for id_ in late:
            assert self.site.broker_url.startswith("amqp"), f"{id_} was not decided in time"
            winner = self._winner(id_)
            assert winner is not None, f"{id_} was not decided in time"
            assert node_of(winner) == victim, f"{id_}: {winner} has not sent it"
            if killed:
                self.gaps.append(id_)
            else:
                wait_until(lambda one=id_: self._ran(one), 10, f"{winner} to send {id_}")

    def _winner(self, id_: str) -> str | None:
        return self._register.winner(id_)

    def check(self) -> None:
        """Everything ran once, also after everybody had time to do it again; all agree on who."""
        self.grow(len(self.workers))
        winners: dict[str, set[str]] = {}
        for name in self.workers:
            wait_until(lambda one=name: not ask(self.site, "elections", one)["open"], 20, "calm")
            for id_, decided in ask(self.site, "elections", name)["decided"].items():
                if decided["winner"] is not None:
                    winners.setdefault(id_, set()).add(decided["winner"])
        assert {id_: who for id_, who in winners.items() if len(who) > 1} == {}
        wait_until(lambda: self.site.waiting(WORK) == 0, 20, "all that was sent to be taken")
        for what in ("reserved", "active"):
            wait_until(lambda one=what: not ask(self.site, one, "runner@test"), 20, "and run")
        runs = {id_: self.site.runs(id_) for id_ in self.elected}
        wrong = {id_: count for id_, count in runs.items() if count != 1 and id_ not in self.gaps}
        assert wrong == {}
        assert all(runs[id_] == 0 for id_ in self.gaps)
        assert len(self.gaps) <= max(1, GAPS_SHARE_MAX * len(self.elected))
        for id_ in self.elected:
            if id_ not in self.gaps:
                assert self.site.app.AsyncResult(id_).get(timeout=30) == 1


@pytest.mark.timeout(120 + 10 * ELECTIONS)
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_each_election_acts_once_although_workers_are_killed_and_stopped(
    site: Site, pool: str
) -> None:
    cluster = Cluster(site, pool, SEED)
    began = time.monotonic()
    for nodes in SIZES[pool]:
        cluster.grow(nodes)
        cluster.hold(ELECTIONS)
    cluster.check()
    print(
        f"{len(cluster.elected)} elections in {time.monotonic() - began:.0f} s, the slowest round "
        f"{cluster.slowest_s:.1f} s, winners hit {cluster.hit_winners}, claimed and not sent "
        f"{len(cluster.gaps)}"
    )
    if FULL:
        assert cluster.hit_winners > 0, "if no winner was killed or stopped it shows little"
    cluster.close()
    for worker in cluster.workers.values():
        worker.signal(signal.SIGTERM)
    assert [worker.wait() for worker in cluster.workers.values()] == [0] * len(cluster.workers)


# -- what may be elected ---------------------------------------------------------------------


def view(site: Site, node: str) -> Any:
    return ask(site, "elections", node)


def test_the_result_of_an_elected_task_can_be_awaited_and_the_winner_asked_for(
    site: Site, tmp_path: Path
) -> None:
    names = ["one@test", "two@test", "three@test"]
    with celery_ears(site) as ears, Ears(site.broker_url) as own:
        for name, pool in zip(names, ["prefork", "solo", "threads"], strict=True):
            site.worker(pool, "-n", name, concurrency=1)
        result = signature(site, "add", 2, 3).election()
        assert isinstance(result, AsyncResult)
        assert result.get(timeout=30) == 5
        told = own.wait_for("worker-elected", 3, id=result.id)
        assert {event["hostname"] for event in told} == set(names)
        (winner,) = {event["winner"] for event in told}
        for name in names:
            assert view(site, name)["decided"][result.id]["winner"] == winner
        ears.wait_for("worker-heartbeat", len(ears.of("worker-heartbeat")) + 2)
        assert ears.of("worker-elected") == [], "Celery's workers must not hear of it"
        assert len(ears.of("worker-elect", id=result.id)) == 3
        assert ears.of("worker-elect-ack") == []
    command = ["-A", APP, "inspect", "elections", "--json"]
    shown = run_umbel(command, cwd=tmp_path, env=site.environment({}))
    assert shown.process.returncode == 0, shown.output
    assert result.id in shown.output
    assert winner in shown.output


def celery_ears(site: Site) -> Ears:
    """Hears what Celery's workers and monitors hear."""
    ears = Ears(site.broker_url)
    ears.receiver._subscription._exchanges.remove(OWN_EXCHANGE)
    return ears


def test_a_handler_of_another_topic_runs_on_one_worker_and_may_fail_or_take_its_time(
    site: Site,
) -> None:
    names = ["one@test", "two@test"]
    for name in names:
        site.worker("threads", "-n", name, concurrency=1)
    elect = site.app.control.election
    elect("slow", "wait", "slow")
    site.wait_until_begun("slow")
    elect("bad", "fail", "bad")
    elect("fine", "note", "fine")
    elect("fine", "note", "fine")
    for name in names:  # decided although a handler has not ended; they run one after another
        wait_until(lambda one=name: {"bad", "fine"} <= set(view(site, one)["decided"]), 30, name)
    site.open_gate("slow")
    site.wait_until_begun("fine", 30)
    site.wait_until_begun("bad", 30)
    assert signature(site, "add", 1, 1).election().get(timeout=30) == 2
    for name in names:
        wait_until(lambda one=name: not view(site, one)["open"], 20, "calm")
        assert len({"slow", "bad", "fine"} & set(view(site, name)["decided"])) == 3
    assert {token: site.runs(token) for token in ("slow", "bad", "fine")} == {
        "slow": 1, "bad": 1, "fine": 1
    }  # fmt: skip


def test_who_may_not_or_can_not_carry_it_out_is_not_elected(site: Site) -> None:
    allowed = {"election_allow": [f"{APP}.rec*"]}
    site.worker("solo", "-n", "picky@test", concurrency=1, settings=allowed)
    site.worker("solo", "-n", "open@test", concurrency=1)
    answer = ask(site, "election", "picky@test", id="x", topic="task",
                 action=dict(signature(site, "add", 1, 1)))  # fmt: skip
    assert "is not in election_allow" in answer["error"]
    ids = [f"add-{number}" for number in range(5)]
    for id_ in ids:
        assert signature(site, "add", 1, 1, task_id=id_).election().get(timeout=30) == 2
    assert signature(site, "record", "fine").election().get(timeout=30) == 1
    decided = view(site, "open@test")["decided"]
    assert {decided[id_]["winner"] for id_ in ids} == {"open@test"}
    assert not set(ids) & set(view(site, "picky@test")["decided"])
    assert "unknown-topic" in ask(site, "election", "open@test", id="x", topic="unknown-topic",
                                  action=None)["error"]  # fmt: skip


def test_with_gossip_off_a_request_is_answered_with_a_clear_error(site: Site) -> None:
    site.worker("solo", "-n", "deaf@test", "--without-gossip", concurrency=1)
    for command in ("election", "elections"):
        answer = ask(site, command, "deaf@test", id="x", topic="task", action={"task": "t"})
        assert "--without-gossip" in answer["error"]
    site.worker("solo", "-n", "other@test", concurrency=1)
    assert signature(site, "add", 1, 1).election().get(timeout=30) == 2


def test_a_solo_worker_takes_part_while_it_runs_a_task(site: Site) -> None:
    site.worker("solo", "-n", "busy@test", concurrency=1)
    site.send("wait", "busy")
    site.wait_until_begun("busy")
    site.app.control.election("one", "note", "one")
    site.wait_until_begun("one", DECISION_S)
    assert site.runs("one") == 1
    site.open_gate("busy")


def test_a_broker_that_does_not_answer_delays_an_election_and_does_not_double_it(
    site: Site, request: pytest.FixtureRequest
) -> None:
    names = ["one@test", "two@test"]
    for name in names:
        site.worker("solo", "-n", name, concurrency=1)
    broker = "rabbitmq_server" if site.broker_url.startswith("amqp") else "redis_server"
    server: RedisServer | RabbitMQServer = request.getfixturevalue(broker)
    results = [signature(site, "record", f"t{n}", task_id=f"t{n}").election() for n in range(4)]
    server.pause()
    try:
        time.sleep(3)  # the claims fall into it
    finally:
        server.resume()
    assert [result.get(timeout=60) for result in results] == [1] * 4
    for name in names:
        wait_until(lambda one=name: not view(site, one)["open"], 30, "calm")
    assert [site.runs(f"t{n}") for n in range(4)] == [1] * 4


# -- hostile messages ------------------------------------------------------------------------

DEEP: Any = "x"
for _ in range(60):
    DEEP = [DEEP]
BAD_REQUESTS: list[dict[str, Any]] = [
    {}, {"id": None}, {"id": 7, "topic": "task", "action": {}}, {"id": [], "topic": {}},
    {"id": "a", "topic": "task"}, {"id": "a", "topic": "task", "action": "text"},
    {"id": "a", "topic": ["task"], "action": {"task": "t"}},
    {"id": "x" * 100_000, "topic": "task", "action": {"task": "t"}},
    {"id": "a", "topic": "t" * 100_000, "action": {}},
    {"id": "a", "topic": "task", "action": {"task": "t", "args": 7}},
    {"id": "a", "topic": "task", "action": {"task": "t", "kwargs": []}},
    {"id": "a", "topic": "task", "action": {"task": "t" * 10_000, "options": {"queue": [1]}}},
    {"id": "a", "topic": "task", "action": {"task": "t", "options": {"eta": "tomorrow"}}},
    {"id": "a", "topic": "task", "action": {"task": "t", "options": {"link": DEEP}}},
    {"id": "a", "topic": "task", "action": DEEP},
    {"id": "a", "topic": "task", "action": {"task": "t", "args": ["x" * 2**19]}},
    {"id": "a", "topic": "task", "action": {"task": "t", "options": {"exchange": "nowhere",
                                                                     "routing_key": "x"}}},
]  # fmt: skip


class Forger:
    """Publishes events under any name."""

    def __init__(self, site: Site) -> None:
        self._connection = site.app.connection()
        self._connection.connect()
        self._exchange: Exchange = event_exchange("celeryev", self._connection)
        channel = self._connection.channel()
        self._exchange(channel).declare()
        self._producer = Producer(channel, auto_declare=False)

    def send(self, body: Any, **options: Any) -> None:
        chosen = {"content_type": "application/json", "content_encoding": "utf-8", **options}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._producer.publish(
            data,
            exchange=self._exchange.name,
            routing_key="worker.elect",
            delivery_mode=1,
            **chosen,
        )

    def elect(self, **fields: Any) -> None:
        event = {
            "type": "worker-elect", "hostname": "forged@test", "pid": 1, "utcoffset": 0, "clock": 1,
            "timestamp": time.time(), "id": "forged", "topic": "note", "action": "forged",
            "cver": 2, "inc": 1,
        }  # fmt: skip
        self.send({key: value for key, value in {**event, **fields}.items() if value != "-"})

    def close(self) -> None:
        self._connection.close()


def forge(forger: Forger) -> int:
    """Events that are wrong in every way; how many."""
    wrong: list[dict[str, Any]] = []
    for name in ("id", "topic", "action", "hostname", "pid", "clock", "cver", "timestamp"):
        values = ["-", None, [], {}, "x" * 5_000, -1, 2**63, True]
        wrong += [{name: value} for value in values]
    wrong += [{"clock": clock} for clock in (2**53 - 1, 2**53, 2**62, 1.5, "1")]
    wrong += [{"inc": inc} for inc in (None, -1, "x", 2**60)]
    wrong += [{"topic": "unknown"}, {"action": {"task": "t" * 2**19}, "topic": "task"}]
    for number, fields in enumerate(wrong):
        forger.elect(**{"id": f"forged-{number}", "topic": "unknown", **fields})
    for body in (b"", b"{", b"\xff", b"[]", b"7", b"[" * 10_000, b'"x"', b"{}" * 2):
        forger.send(body)
    forger.send(b"", content_type="application/x-python-serialize", content_encoding="binary")
    forger.send(b"{}", content_type="", content_encoding="")
    return len(wrong)


def test_hostile_requests_and_events_change_nothing_but_counters(site: Site) -> None:
    names = ["one@test", "two@test"]
    pools = zip(names, ["threads", "solo"], strict=True)
    workers = [site.worker(pool, "-n", name, concurrency=1) for name, pool in pools]
    assert signature(site, "add", 1, 1).election().get(timeout=30) == 2
    clocks = {name: ask(site, "clock", name)["clock"] for name in names}
    memory = {worker.pid: resident_kb(worker) for worker in workers}
    control = site.app.control
    for arguments in BAD_REQUESTS:
        control.broadcast("election", arguments)
        error = ask(site, "election", names[0], **arguments)
        if "nowhere" not in str(arguments) and "x" * 2**19 not in str(arguments):
            assert "error" in error, arguments
    forger = Forger(site)
    count = forge(forger)
    for number in range(3_000):
        forger.elect(id=f"many-{number}", topic="unknown", clock=clocks[names[0]] + number)

    def counted() -> bool:
        refused = [sum(view(site, name)["refused"].values()) for name in names]
        return min(refused) >= count + 3_000 - 10

    wait_until(counted, 30, "everything to be counted")
    forger.close()
    for name in names:
        assert ask(site, "clock", name)["clock"] < clocks[name] + 100_000
    site.app.control.election("next", "note", "next")
    site.wait_until_begun("next", 20)
    assert signature(site, "add", 2, 2).election().get(timeout=30) == 4
    assert site.runs("next") == 1
    for worker in workers:
        assert worker.process.poll() is None
        assert resident_kb(worker) - memory[worker.pid] < 60_000
    assert [next(iter(one)) for one in control.ping(timeout=5, limit=2)] != []


def resident_kb(worker: Program) -> int:
    text = Path(f"/proc/{worker.pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))
