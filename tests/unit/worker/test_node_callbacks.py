"""`gossip.on`: who registers hears of every node once, from whichever thread and however often."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest

from tests.unit.worker.parts import idle_worker
from umbel import Umbel
from umbel.cluster.membership import Joined, Left, Lost, Node, Returned
from umbel.worker.blueprint import Blueprint, Step
from umbel.worker.membership.node_callbacks import Callbacks, NodeInfo

WAIT_S = 20.0


class Cluster:
    """Nodes that come and go by hand; `gossip.on` stands for the real one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.now = 100.0
        self.on = Callbacks(self.lock, lambda: self.now)

    def join(self, name: str, **fields: Any) -> None:
        self._note(Joined(Node(name, 7, 1)), "worker-heartbeat", fields)

    def leave(self, name: str, **fields: Any) -> None:
        self._note(Left(Node(name, 7, 1)), "worker-offline", fields)

    def lose(self, name: str) -> None:
        with self.lock:
            self.on.note([Lost(Node(name, 7, 1), 9.0)])
        self.on.deliver()

    def come_back(self, name: str) -> None:
        self._note(Returned(Node(name, 7, 1)), "worker-heartbeat", {})

    def _note(self, effect: Any, kind: str, fields: dict[str, Any]) -> None:
        event = {
            "type": kind, "hostname": effect.node.hostname, "timestamp": 50.0, "pid": 7, "inc": 1,
            "clock": 3, "freq": 2.0, "loadavg": [1.0, 2.0, 3.0], "active": 4, "processed": 5,
            "sw_ident": "py-umbel", "sw_ver": "1", **fields,
        }  # fmt: skip
        with self.lock:
            self.on.note([effect], event)
        self.on.deliver()


class Starts:
    """A step in a blueprint, started and stopped again and again like that of a consumer."""

    def __init__(self, kind: type[Step]) -> None:
        self.blueprint = Blueprint("test", [kind])
        self.blueprint.create(self)

    def reconnect(self) -> None:
        self.blueprint.stop(self)
        self.blueprint.start(self)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_who_registers_late_hears_of_the_nodes_that_are_there(cluster: Cluster) -> None:
    for name in ("a", "b", "gone", "back"):
        cluster.join(name)
    cluster.leave("gone")
    cluster.lose("back")
    cluster.come_back("back")
    seen: list[str] = []
    cluster.on.node_join.add(lambda node: seen.append(node.hostname))
    assert seen == ["a", "b", "back"]
    cluster.join("c")
    assert seen == ["a", "b", "back", "c"]
    lost: list[str] = []
    cluster.on.node_lost.add(lambda node: lost.append(node.hostname))
    assert lost == []


def test_the_node_is_what_it_was_when_the_change_came(cluster: Cluster) -> None:
    seen: list[NodeInfo] = []
    for callbacks in (cluster.on.node_join, cluster.on.node_leave, cluster.on.node_lost):
        callbacks.add(seen.append)
    cluster.join("a")
    cluster.leave("a", clock=9, active=0)
    cluster.join("a")
    cluster.lose("a")
    joined, left, _, lost = seen
    assert (joined.alive, left.alive, lost.alive) == (True, False, False)
    assert (joined.status_string, lost.status_string) == ("ONLINE", "OFFLINE")
    assert (joined.freq, joined.loadavg, joined.clock) == (2.0, [1.0, 2.0, 3.0], 3)
    assert (joined.pid, joined.inc, joined.id) == (7, 1, "a.7")
    assert (joined.active, joined.processed) == (4, 5)
    assert (joined.sw_ident, joined.sw_ver, joined.timestamp) == ("py-umbel", "1", 50.0)
    assert len(joined.heartbeats) == 1
    assert (left.clock, left.active) == (9, 0)
    assert (lost.clock, lost.loadavg) == (3, [1.0, 2.0, 3.0])
    assert {joined, left, lost} == {joined}, "the same node by its name, as in Celery"


def test_they_are_sets(cluster: Cluster) -> None:
    on, seen = cluster.on, list[str]()

    def one(node: Any) -> None:
        seen.append("one")

    def two(node: Any) -> None:
        seen.append("two")

    on.node_join.add(one)
    on.node_join |= {one, two}
    assert (len(on.node_join), one in on.node_join, set(on.node_join)) == (2, True, {one, two})
    assert on.node_join == {one, two}
    assert on.node_join | {print} == {one, two, print}
    on.node_join.discard(print)
    with pytest.raises(KeyError):
        on.node_join.remove(print)
    on.node_join.remove(one)
    cluster.join("a")
    assert seen == ["two"]
    on.node_join = {one}  # type: ignore[assignment]
    assert set(on.node_join) == {one}
    on.node_join.clear()
    assert not on.node_join
    with pytest.raises(TypeError, match="7 is not a function"):
        on.node_join.add(7)  # type: ignore[arg-type]


def test_a_lambda_of_one_line_is_one_function_wherever_it_is_registered(cluster: Cluster) -> None:
    seen: list[str] = []

    def register(*words: str) -> None:
        for word in words:
            cluster.on.node_join.add(lambda node, word=word: seen.append(word))

    for _ in range(3):
        register("x", "y")
    cluster.join("a")
    assert sorted(seen) == ["x", "y"]


def test_what_a_step_registers_again_takes_the_place_of_what_it_registered_before(
    cluster: Cluster,
) -> None:
    seen: Counter[str] = Counter()

    class Fresh:
        def __init__(self, word: str) -> None:
            self.word = word

        def __call__(self, node: Any) -> None:
            seen[f"{self.word} {node.hostname}"] += 1

        def method(self, node: Any) -> None:
            seen[f"method {node.hostname}"] += 1

    class Follow(Step):
        turn = 0

        def start(self, parent: Any) -> None:
            self.turn += 1
            on = cluster.on.node_join
            for word in (f"x{self.turn}", f"y{self.turn}"):
                on.add(lambda node, word=word: seen.update([f"{word} {node.hostname}"]))
            on.add(Fresh("object"))
            on.add(Fresh("").method)
            on.add(partial(Fresh.__call__, Fresh("partial")))
            if self.turn == 1:
                on.add(lambda node: seen.update([f"once {node.hostname}"]))

    cluster.join("a")
    starts = Starts(Follow)
    for _ in range(3):
        starts.reconnect()
    cluster.join("b")
    kinds = ("object", "method", "partial", "once")
    assert seen == {
        **{f"{word} a": 1 for word in ("x1", "y1", *kinds)},
        **{f"{word} b": 1 for word in ("x3", "y3", *kinds)},
    }


def test_a_step_that_cleans_up_after_itself_hears_of_those_who_came_meanwhile(
    cluster: Cluster,
) -> None:
    seen: list[str] = []

    class Careful(Step):
        def joined(self, node: Any) -> None:
            seen.append(node.hostname)

        def start(self, parent: Any) -> None:
            cluster.on.node_join.add(self.joined)

        def stop(self, parent: Any) -> None:
            cluster.on.node_join.discard(self.joined)

    cluster.join("a")
    starts = Starts(Careful)
    starts.blueprint.start(starts)
    for name in ("b", "c"):
        starts.blueprint.stop(starts)
        cluster.join(name)
        assert name not in seen
        starts.blueprint.start(starts)
    assert seen == ["a", "b", "c"]


def test_two_steps_of_one_class_body_do_not_take_each_others_places(cluster: Cluster) -> None:
    seen: list[str] = []

    class Base(Step):
        def start(self, parent: Any) -> None:
            me = [self.label()]
            cluster.on.node_join.add(lambda node: seen.extend(me))

    class One(Base): ...

    class Two(Base): ...

    blueprint = Blueprint("test", [One, Two])
    blueprint.create(None)
    for _ in range(3):
        blueprint.stop(None)
        blueprint.start(None)
    cluster.join("a")
    assert sorted(seen) == ["One", "Two"]


@pytest.mark.parametrize("without", [True, False])
def test_steps_of_both_blueprints_can_register_from_the_first_moment(without: bool) -> None:
    class OfWorker(Step):
        def __init__(self, parent: Any, **options: Any) -> None:
            parent.gossip.on.node_join.add(print)

    class OfConsumer(Step):
        requires = ("Gossip",)

        def create(self, parent: Any) -> None:
            parent.gossip.on.node_lost.add(print)

    app = Umbel("app", broker="memory://", backend="disabled://", set_as_current=False)
    app.steps["worker"].add(OfWorker)
    app.steps["consumer"].add(OfConsumer)
    worker = idle_worker(app, without_gossip=without)
    assert print in worker.gossip.on.node_join
    assert print in worker.consumer.gossip.on.node_lost
    assert not worker.gossip.enabled
    app.close()


def test_a_callback_that_fails_or_changes_the_set_does_not_disturb_the_others(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    on = cluster.on

    def fail(node: Any) -> None:
        raise SystemExit("on purpose")

    def once(node: Any) -> None:
        seen.append(f"once {node.hostname}")
        on.node_join.remove(once)
        on.node_join.add(other)

    def other(node: Any) -> None:
        seen.append(f"other {node.hostname}")

    on.node_join |= {fail, once}
    cluster.join("a")
    cluster.join("b")
    assert seen == ["once a", "other a", "other b"]
    assert caplog.text.count("a callback about nodes failed") == 2


def test_registering_under_a_lock_that_the_callback_takes_does_not_stop_gossip(
    cluster: Cluster,
) -> None:
    """No lock of ours is held while a function of theirs runs."""
    theirs, inside, done = threading.Lock(), threading.Event(), threading.Event()

    def joined(node: Any) -> None:
        inside.set()
        with theirs:
            done.set()

    cluster.on.node_join.add(joined)
    with theirs:
        gossip = threading.Thread(target=cluster.join, args=("a",), daemon=True)
        gossip.start()
        assert inside.wait(WAIT_S)
        cluster.on.node_join.add(print)
        cluster.on.node_lost.add(print)
    assert done.wait(WAIT_S)
    gossip.join(WAIT_S)
    cluster.on.node_join.discard(print)


def test_changes_during_a_registration_are_neither_doubled_nor_missed_nor_out_of_order() -> None:
    for _ in range(50):
        cluster, there, seen = Cluster(), set[str](), Counter[str]()

        def joined(node: Any, there: set[str] = there, seen: Counter[str] = seen) -> None:
            there.add(node.hostname)
            seen[node.hostname] += 1

        def lost(node: Any, there: set[str] = there) -> None:
            there.discard(node.hostname)

        def change(cluster: Cluster = cluster) -> None:
            for number in range(100):
                cluster.join(f"n{number}")
                if number % 3 == 0:
                    cluster.lose(f"n{number}")

        gossip = threading.Thread(target=change)
        cluster.on.node_lost.add(lost)
        gossip.start()
        cluster.on.node_join.add(joined)
        gossip.join(WAIT_S)
        cluster.on.deliver()
        assert there == {f"n{number}" for number in range(100) if number % 3}
        assert set(seen.values()) == {1}
