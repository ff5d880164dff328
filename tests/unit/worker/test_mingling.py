"""Mingling: what is asked and answered, when it ends, and who is exchanged with later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.responders import SILENCE, Responder
from tests.servers import wait_until
from tests.unit.worker.parts import idle_worker
from umbel import Umbel
from umbel.cluster import mingle
from umbel.cluster.membership import Heard as SignOfLife
from umbel.cluster.node import Heard
from umbel.wire.packs import PACKED_MIN
from umbel.worker.membership.gossip import Gossip
from umbel.worker.runtime.worker import Worker

EARLY_S = 0.8
NAMES = iter(range(1_000))


class Cluster:
    """Workers that mingle over the memory of this process, and nodes that answer them."""

    def __init__(self) -> None:
        # A control exchange of its own: the memory is shared by all tests.
        self.settings: dict[str, Any] = {
            "broker_url": "memory://", "result_backend": "disabled://",
            "control_exchange": f"mingling-{next(NAMES)}",
        }  # fmt: skip
        self.apps: list[Umbel] = []
        self.nodes: list[Responder] = []

    def app(self) -> Umbel:
        self.apps.append(Umbel("mingling", set_as_current=False, **self.settings))
        return self.apps[-1]

    def worker(self, name: str, *revoked: str) -> Worker:
        worker = idle_worker(self.app(), hostname=name)
        worker.revocations.revoke(revoked, time.time())
        return worker

    def listen(self, worker: Worker) -> Worker:
        """Let a worker answer `hello`."""
        self.answer(worker.plan.hostname, worker.mingling.answer)
        return worker

    def answer(self, name: str, handler: Callable[[dict[str, Any]], Any]) -> Responder:
        self.nodes.append(Responder(self.app(), name, {"hello": handler}))
        return self.nodes[-1]

    def join(self, worker: Worker) -> tuple[mingle.Done | None, float]:
        with worker.app.connection() as connection:
            connection.connect()
            began = time.monotonic()
            done = worker.mingling.run(connection)
            return done, time.monotonic() - began

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        for app in self.apps:
            app.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def test_who_is_alone_asks_nobody(cluster: Cluster) -> None:
    done, took_s = cluster.join(cluster.worker("a@test"))
    assert done is None
    assert took_s < EARLY_S


def test_two_who_differ_know_the_same_afterwards(cluster: Cluster) -> None:
    many = [f"task-{number}" for number in range(3 * PACKED_MIN)]
    old = cluster.listen(cluster.worker("old@test", "common", *many))
    new = cluster.worker("new@test", "common", "own")
    old.revocations.revoke_headers({"team": ["red"]}, time.time())
    done, took_s = cluster.join(new)
    assert done == mingle.Done(("old@test",), ())
    assert took_s < EARLY_S
    assert new.revocations.all() == old.revocations.all()
    assert len(new.revocations) == len(many) + 3
    assert new.revocations.headers() == {"team": ["red"]}


def test_all_are_heard_before_the_first_exchange_and_then_there_is_one_at_a_time(
    cluster: Cluster,
) -> None:
    ids = [f"task-{number}" for number in range(PACKED_MIN)]
    log: list[str] = []
    now = time.time()
    for number in range(5):
        worker = cluster.worker(f"n{number}@test")
        worker.revocations.revoke(ids, now)

        def hello(arguments: dict[str, Any], one: Worker = worker) -> Any:
            log.append("exchange" if "told" in arguments else "greeting")
            return one.mingling.answer(arguments)

        cluster.answer(worker.plan.hostname, hello)
    new = cluster.worker("new@test")
    done, _ = cluster.join(new)
    assert done is not None
    assert len(done.answered) == 5
    assert log == ["greeting"] * 5 + ["exchange"], "after the first one all others agree"
    assert sorted(new.revocations.ids()) == sorted(ids)


def test_a_celery_worker_is_told_our_ids_before_it_ends(cluster: Cluster) -> None:
    asked: list[dict[str, Any]] = []

    def hello(arguments: dict[str, Any]) -> Any:
        asked.append(arguments)
        return {"revoked": ["theirs"], "clock": 70}

    cluster.answer("celery@test", hello)
    new = cluster.worker("new@test", "ours")
    cluster.join(new)
    assert set(new.revocations.ids()) == {"ours", "theirs"}
    assert [one["revoked"] for one in asked] == [[], ["ours"]]
    assert new.app.clock.value > 70


def test_nodes_that_somebody_names_are_waited_for_and_stale_ones_are_not(cluster: Cluster) -> None:
    known = cluster.worker("known@test")

    def hello(arguments: dict[str, Any]) -> Any:
        reply = known.mingling.answer(arguments)
        return {**reply, "nodes": ["known@test", "new@test"]} if reply else None

    cluster.answer("known@test", hello)
    cluster.answer("dead@test", lambda _: SILENCE)  # bound, as who was killed is on Redis
    done, took_s = cluster.join(cluster.worker("new@test"))
    assert took_s < EARLY_S
    assert done == mingle.Done(("known@test",), ())


def test_it_ends_at_once_when_the_worker_is_to_stop(cluster: Cluster) -> None:
    new = cluster.worker("new@test", "ours")

    def hello(_: Any) -> Any:
        new.stop_wanted.set()
        return {"revoked": [], "clock": 3, "digest": {"tasks": {"0": "1"}, "headers": {}}}

    cluster.answer("odd@test", hello)
    done, took_s = cluster.join(new)
    assert done is None
    assert took_s < mingle.WINDOW_S + EARLY_S


# -- the answer ------------------------------------------------------------------------------


def test_ones_own_greeting_is_answered_with_nothing(cluster: Cluster) -> None:
    worker = cluster.worker("a@test")
    assert worker.mingling.answer({"from_node": "a@test", "revoked": ["x"]}) is None
    assert "x" not in worker.revocations


def test_who_can_not_know_the_others_does_not_name_them(cluster: Cluster) -> None:
    worker = cluster.worker("a@test")
    greeting = {"from_node": "b@test", "revoked": [], "digest": {"tasks": {}, "headers": {}}}
    assert "nodes" not in (worker.mingling.answer(greeting) or {})
    worker.gossip.node.settled_at = 0.0
    assert (worker.mingling.answer(greeting) or {})["nodes"] == ["a@test"]
    worker.gossip = Gossip(worker)  # as where it is switched off
    assert "nodes" not in (worker.mingling.answer(greeting) or {})


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"from_node": None}, {"from_node": 7, "revoked": 7}, {"revoked": [None, {}, ""]},
        {"digest": 7}, {"digest": {}}, {"digest": {"packed": "%"}}, {"digest": [], "told": []},
        {"digest": {"tasks": {"a": "g"}}, "told": {"tasks": {"x": "soon"}}},
        {"digest": {"packed": None}, "told": {"packed": "AAAA"}},
        {"told": {"tasks": {"x": [float("inf"), 1]}}},
        {"digest": {"tasks": {}, "headers": {}}, "told": {"tasks": {"y": [1, 2, 3]}}},
    ],
)  # fmt: skip
def test_a_greeting_of_any_shape_is_answered_and_changes_nothing(
    cluster: Cluster, arguments: dict[str, Any]
) -> None:
    worker = cluster.worker("a@test", "known")
    reply = worker.mingling.answer(arguments)
    assert reply is not None
    assert reply["clock"] > 0
    assert worker.revocations.ids() == ["known"]


def test_where_nobody_may_revoke_greetings_are_answered_and_not_believed(cluster: Cluster) -> None:
    cluster.settings["control_allow"] = "read-only"
    closed = cluster.listen(cluster.worker("closed@test", "known"))
    cluster.settings["control_allow"] = "all"
    new = cluster.worker("new@test", "new")
    done, _ = cluster.join(new)
    assert done is not None
    assert set(new.revocations.ids()) == {"known", "new"}, "what it knows it tells"
    assert closed.revocations.ids() == ["known"]
    closed.mingling.answer({"from_node": "celery@test", "revoked": ["forged"]})
    assert closed.revocations.ids() == ["known"]


def test_who_joins_takes_over_which_queues_are_paused_and_tells_what_it_knows(
    cluster: Cluster,
) -> None:
    old = cluster.listen(cluster.worker("old@test"))
    new = cluster.worker("new@test")
    now = time.time()
    old.consumption.say("old", now, paused=True)
    new.consumption.say("new", now, paused=True)
    assert old.gossip.summary() != new.gossip.summary() != ""
    cluster.join(new)
    assert old.consumption.paused == new.consumption.paused == {"old", "new"}
    assert old.gossip.summary() == new.gossip.summary()
    reply = old.mingling.answer({"from_node": "celery@test", "revoked": []})
    assert reply is not None
    assert "paused" not in reply, "Celery's workers know no pauses"


def test_where_nobody_may_pause_a_pause_is_known_and_not_obeyed(cluster: Cluster) -> None:
    cluster.settings["control_allow"] = "read-only"
    closed = cluster.worker("closed@test")
    told = {"celery": [time.time(), True]}
    closed.mingling.answer({"from_node": "a@test", "digest": {}, "paused": told})
    assert closed.gossip.node.pauses.told() == told
    assert closed.consumption.paused == set()
    assert [queue.name for queue in closed.consumption.queues] == ["celery"]


@pytest.mark.parametrize(
    ("paused", "reason"),
    [
        (7, "not-pauses"), (["celery"], "not-pauses"), ({"celery": True}, "bad-word"),
        ({"celery": [2**70, True]}, "bad-word"), ({"": [1.0, True]}, "bad-queue"),
    ],
)  # fmt: skip
def test_a_greeting_that_pauses_in_a_wrong_way_changes_a_counter(
    cluster: Cluster, paused: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cluster.worker("a@test")
    for _ in range(3):
        worker.mingling.answer({"from_node": "b@test\n", "digest": {}, "paused": paused})
    assert worker.consumption.paused == set()
    assert worker.gossip.node.pauses.counts == {reason: 3}
    assert worker.mingling.refused()[reason] == 3
    (line,) = [one.message for one in caplog.records if f"({reason})" in one.message]
    assert "'b@test\\n'" in line


# -- later -----------------------------------------------------------------------------------


def compare(own: Worker, other: Worker) -> None:
    """Let one hear a heartbeat of another one."""
    name = other.plan.hostname
    own.gossip.do(Heard(name, SignOfLife(name, 1, 1, 2.0), 1, summary=other.gossip.summary()))


def test_who_differs_for_longer_than_two_heartbeats_is_asked_on_a_thread_of_its_own(
    cluster: Cluster,
) -> None:
    other = cluster.listen(cluster.worker("other@test", "missed"))
    own = cluster.worker("own@test")
    now = time.monotonic()
    own.gossip = Gossip(own, lambda: now)
    compare(own, other)
    own.mingling.tick()
    assert "missed" not in own.revocations, "it may be on its way"
    now += mingle.PATIENCE_S + 0.1
    own.mingling.tick()
    wait_until(lambda: "missed" in own.revocations, what="the exchange")
    assert own.gossip.summary() == other.gossip.summary()
    compare(own, other)
    assert not own.gossip.node.mingle.differing


def test_a_greeting_that_failed_does_not_end_the_exchanges(cluster: Cluster) -> None:
    other = cluster.listen(cluster.worker("other@test", "missed"))
    own = cluster.worker("own@test")
    mailbox = own.app.control.mailbox
    real = mailbox.call

    def fail(*args: Any, **options: Any) -> Any:
        mailbox.call = real  # type: ignore[method-assign]
        raise RuntimeError("on purpose")

    mailbox.call = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        cluster.join(own)
    compare(own, other)
    own.gossip._clock = lambda: time.monotonic() + 60

    def asked() -> bool:
        own.mingling.tick()
        return "missed" in own.revocations

    wait_until(asked, what="the exchange")


def test_what_a_greeting_tells_that_may_be_a_copy_is_not_taken_over(cluster: Cluster) -> None:
    worker, other = cluster.worker("a@test", "own"), cluster.worker("b@test", "theirs")
    told = other.revocations.difference({"tasks": {}, "headers": {}})
    greeting = {
        "from_node": "b@test", "revoked": ["id"], "digest": other.revocations.digest(),
        "told": told, "paused": {"celery": [time.time(), True]},
    }  # fmt: skip
    reply = worker.mingling.answer(greeting, is_new=False)
    assert reply is not None
    assert set(reply["told"]["tasks"]) == {"own"}, "it is answered all the same"
    assert worker.revocations.ids() == ["own"]
    assert worker.gossip.node.pauses.told() == {}
    worker.mingling.answer(greeting)
    assert sorted(worker.revocations.ids()) == ["id", "own", "theirs"]
    assert "celery" in worker.gossip.node.pauses.told()
