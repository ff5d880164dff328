"""Workers know who is there: each change is told once, and nobody is accused by who was away."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Producer

from tests.inside import Inside
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.sites import Site
from tests.strangers import Stranger
from umbel.app.events.publisher import event_exchange
from umbel.cluster.membership import GRACE_S, NODES_MAX
from umbel.worker.runtime.worker import Worker

BEAT_S = 1.0
QUICK = {"worker_heartbeat_interval": BEAT_S, "worker_gossip_interval": 0.25}
OBSERVER = "inside@test"
# After two heartbeats, and the look that finds it; machines are busy.
LOST_WITHIN_S = 2 * BEAT_S + 5.0


class Observer:
    """A worker in this process that writes down what it is told of the others."""

    def __init__(self, site: Site, **options: Any) -> None:
        self.seen: list[tuple[str, str, int | None]] = []
        settings = {"broker_url": site.broker_url, "result_backend": site.backend_url, **QUICK}
        self.inside = Inside(settings, lambda app: None, prepare=self._prepare, **options).start()

    @property
    def worker(self) -> Worker:
        return self.inside.worker

    def _prepare(self, worker: Worker) -> None:
        worker.gossip.on.node_join.add(lambda node: self._note("join", node))
        worker.gossip.on.node_join.add(self._fail)
        worker.gossip.on.node_leave.add(lambda node: self._note("leave", node))
        worker.gossip.on.node_lost.add(lambda node: self._note("lost", node))

    def _fail(self, node: Any) -> None:
        raise ValueError("on purpose")

    def _note(self, word: str, node: Any) -> None:
        self.seen.append((word, node.hostname, node.pid))

    def words(self, name: str) -> list[str]:
        return [word for word, hostname, _ in self.seen if hostname == name]

    def wait(self, name: str, *words: str, timeout_s: float = 20.0) -> None:
        what = f"{name}: {words}, not {self.words(name)}"
        wait_until(lambda: self.words(name) == list(words), timeout_s, what)

    def hears(self, name: str) -> None:
        """Wait for another sign of life."""
        gossip = self.worker.gossip
        known = gossip.membership.member(name)
        before = known.heard_at_s if known is not None else 0.0

        def again() -> bool:
            member = gossip.membership.member(name)
            return member is not None and member.heard_at_s > before

        wait_until(again, 20, f"a sign of life of {name}")

    def close(self) -> None:
        self.inside.stop()
        self.inside.close()


@pytest.fixture
def observe() -> Iterator[Callable[..., Observer]]:
    made: list[Observer] = []

    def make(site: Site, **options: Any) -> Observer:
        made.append(Observer(site, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_change_is_told_once_per_life(site: Site, observe: Callable[..., Observer]) -> None:
    early = site.worker("solo", "-n", "early@test", concurrency=1, settings=QUICK)
    observer = observe(site)
    observer.wait("early@test", "join", timeout_s=5)
    peer = site.worker("solo", "-n", "peer@test", concurrency=1, settings=QUICK)
    observer.wait("peer@test", "join", timeout_s=5)
    peer.signal(signal.SIGSTOP)
    began = time.monotonic()
    observer.wait("peer@test", "join", "lost", timeout_s=LOST_WITHIN_S)
    assert time.monotonic() - began > BEAT_S, "one heartbeat may be late"
    early.wait_for(r"peer@test was lost: silent for \d", 20)
    peer.signal(signal.SIGCONT)
    observer.wait("peer@test", "join", "lost", "join")
    assert peer.stop() == 0
    observer.wait("peer@test", "join", "lost", "join", "leave")
    again = site.worker("solo", "-n", "peer@test", concurrency=1, settings=QUICK)
    observer.wait("peer@test", "join", "lost", "join", "leave", "join")
    again.kill()
    observer.wait("peer@test", "join", "lost", "join", "leave", "join", "lost")
    pids = [pid for _, name, pid in observer.seen if name == "peer@test"]
    assert pids == [peer.pid] * 4 + [again.pid] * 2
    assert observer.words("early@test") == ["join"]
    assert observer.words(OBSERVER) == []
    # Who was stopped itself has accused nobody, though it heard nobody for as long.
    assert "@test was lost" not in peer.output


def test_a_cut_connection_is_made_anew_and_nobody_is_lost_by_it(
    site: Site, observe: Callable[..., Observer], request: pytest.FixtureRequest
) -> None:
    peer = site.worker("solo", "-n", "peer@test", concurrency=1, settings=QUICK)
    observer = observe(site)
    observer.wait("peer@test", "join")
    gossip = observer.worker.gossip
    for count in range(1, 4):
        if site.broker_url.startswith("redis"):
            server: RedisServer = request.getfixturevalue("redis_server")
            server.client().client_kill_filter(_type="pubsub")
        else:
            rabbitmq: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
            rabbitmq.close_connections()
        wait_until(lambda n=count: gossip._inlet.reconnect_count >= n, 20, "the loss")
        observer.hears("peer@test")
    assert observer.words("peer@test") == ["join"]
    assert "@test was lost" not in peer.output
    late = site.worker("solo", "-n", "late@test", concurrency=1, settings=QUICK)
    observer.wait("late@test", "join")
    assert late.stop() == 0
    observer.wait("late@test", "join", "leave")
    observer.inside.client.control.election("one", "note", "one")
    site.wait_until_begun("one")


@pytest.mark.parametrize(
    ("broker", "how"), [("redis", "killed"), ("redis", "paused"), ("amqp", "paused")]
)
def test_a_broker_that_is_away_for_long_makes_nobody_lost(
    observe: Callable[..., Observer], request: pytest.FixtureRequest, broker: str, how: str
) -> None:
    site: Site = request.getfixturevalue(f"{broker}_site")
    peer = site.worker("solo", "-n", "peer@test", concurrency=1, settings=QUICK)
    observer = observe(site, pool="solo", concurrency=1)
    observer.wait("peer@test", "join")
    observer.hears("peer@test")
    name = "rabbitmq_server" if broker == "amqp" else "redis_server"
    server: RedisServer | RabbitMQServer = request.getfixturevalue(name)
    (server.kill if how == "killed" else server.pause)()
    time.sleep(4 * BEAT_S)  # longer than a node may be silent
    (server.start if how == "killed" else server.resume)()
    for _ in range(3):
        observer.hears("peer@test")
    observer.worker.stop_wanted.wait(GRACE_S)  # until all are looked at again
    assert observer.words("peer@test") == ["join"]
    assert "@test was lost" not in peer.output


def test_clocks_of_others_are_witnessed_and_impossible_ones_are_counted(
    site: Site, observe: Callable[..., Observer]
) -> None:
    observer = observe(site)
    clock = observer.worker.app.clock
    gossip = observer.worker.gossip
    with site.app.connection() as connection:
        exchange = event_exchange("celeryev", connection)
        channel = connection.channel()
        exchange(channel).declare()
        producer = Producer(channel, auto_declare=False)

        def tell(value: Any) -> None:
            event = {
                "type": "worker-heartbeat", "hostname": "forged@test", "timestamp": time.time(),
                "clock": value, "pid": 1, "utcoffset": 0, "freq": 60,
            }  # fmt: skip
            producer.publish(
                json.dumps(event).encode(), exchange="celeryev", routing_key="worker.heartbeat",
                content_type="application/json", content_encoding="utf-8", delivery_mode=1,
                headers={"hostname": "forged@test"},
            )  # fmt: skip

        tell(100_000)
        wait_until(lambda: clock.value > 100_000, what="the clock to be witnessed")
        for value in (2**53 - 1, 2**70, -5, "x"):
            tell(value)
        producer.publish(
            b"\xff{", exchange="celeryev", routing_key="worker.heartbeat",
            content_type="application/json", content_encoding="utf-8", delivery_mode=1,
        )  # fmt: skip
    wait_until(lambda: sum(gossip.counts.values()) == 5, what="the others to be counted")
    assert clock.value < 200_000
    assert observer.words("forged@test") == ["join"]


def test_thousands_of_forged_heartbeats_hide_neither_a_new_worker_nor_a_killed_one(
    site: Site, observe: Callable[..., Observer]
) -> None:
    peer = site.worker("solo", "-n", "peer@test", concurrency=1, settings=QUICK)
    witness = site.worker("solo", "-n", "witness@test", concurrency=1, settings=QUICK)
    observer = observe(site)
    for name in ("peer@test", "witness@test"):
        observer.wait(name, "join")
    gossip, events = observer.worker.gossip, observer.worker.events
    assert events is not None
    gossip.on.node_join.discard(observer._fail)  # it would fail thousands of times
    ghosts = [f"ghost{number}@test" for number in range(NODES_MAX)]
    with Stranger(site.broker_url) as stranger:
        for ghost in ghosts:
            stranger.heartbeat(ghost, freq=86_400)
        wait_until(lambda: observer.words(ghosts[-3]), 60, "the forged heartbeats to be heard")
        late = site.worker("solo", "-n", "late@test", concurrency=1, settings=QUICK)
        observer.wait("late@test", "join")
        for _ in range(3):
            observer.hears("peer@test")
        assert events.beat_interval_s == BEAT_S, "strangers slow nobody down"
        assert gossip.membership.freq_max_s < 1_000
        peer.kill()
        observer.wait("peer@test", "join", "lost", timeout_s=LOST_WITHIN_S)
        witness.wait_for(r"peer@test was lost: silent for \d", LOST_WITHIN_S)
        assert late.stop() == 0
        observer.wait("late@test", "join", "leave")


def test_switched_off_it_is_off_and_the_worker_works(site: Site) -> None:
    worker = site.worker("solo", "--without-gossip", "--without-mingle", concurrency=1)
    assert site.works()
    assert "mingle" not in worker.output
    assert "joined" not in worker.output
    assert worker.stop() == 0


def test_where_the_transport_has_no_broadcasts_there_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name in ("queues", "control"):
        (tmp_path / name).mkdir()
    settings = {
        "broker_url": "filesystem://", "result_backend": "disabled://",
        "broker_transport_options": {
            "data_folder_in": str(tmp_path / "queues"), "data_folder_out": str(tmp_path / "queues"),
            "control_folder": str(tmp_path / "control"),
        },
        "worker_enable_remote_control": False,
    }  # fmt: skip
    inside = Inside(settings, lambda app: None).start()
    try:
        assert caplog.text.count("no gossip and no elections on filesystem") == 1
        assert caplog.text.count("no mingling on filesystem") == 1
        gossip = inside.worker.gossip
        gossip.on.node_join.add(print)
        assert (gossip.enabled, gossip.names()) == (False, [])
        with pytest.raises(ValueError, match="takes no part in elections"):
            gossip.request("one", "task", {"task": "t"})
    finally:
        inside.stop()
        inside.close()
