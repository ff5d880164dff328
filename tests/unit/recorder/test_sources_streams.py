"""Redis as a source: a consumer group that loses nothing to the death of a recorder."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from celery import Celery

from tests.servers import RedisServer, wait_until
from umbel import Umbel
from umbel.app.events.publisher import Publisher
from umbel.recorder.sources import source_for
from umbel.recorder.sources.messages import Message
from umbel.recorder.sources.peers import Peers, is_numbered, opened
from umbel.recorder.sources.streams import GROUP, StreamSource
from umbel.wire.events import encode

STREAM = "umbel.events"
PATIENT_S = 60.0


class Bench:
    """Sources on one stream, and somebody who puts entries into it."""

    def __init__(self, url: str, client: redis.Redis) -> None:
        self.app = Umbel("sources", broker=url, backend="disabled://", set_as_current=False)
        self.client = client
        self.sources: list[StreamSource] = []

    def source(self, name: str = "one", *, claim_after_s: float = PATIENT_S) -> StreamSource:
        made = StreamSource(self.app, name, claim_after_s=claim_after_s)
        made.open()
        self.sources.append(made)
        return made

    def put(self, *texts: str) -> None:
        for text in texts:
            self.client.xadd(STREAM, {"e": text}, nomkstream=True)

    def pending(self) -> int:
        return int(self.client.xpending(STREAM, GROUP)["pending"])

    def consumers(self) -> set[bytes]:
        return {one["name"] for one in self.client.xinfo_consumers(STREAM, GROUP)}

    def close(self) -> None:
        for source in self.sources:
            source.close()
        self.app.close()


@pytest.fixture
def bench(redis_url: str, redis_server: RedisServer) -> Iterator[Bench]:
    made = Bench(redis_url, redis_server.client(int(redis_url.rsplit("/", 1)[1])))
    yield made
    made.close()


def taken(source: StreamSource, count: int) -> list[Message]:
    """So many messages; more would fail."""
    found: list[Message] = []
    wait_until(lambda: found.extend(source.poll(0.05)) or len(found) >= count, 10, "messages")
    assert len(found) == count
    return found


def bodies(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages]


def test_what_was_put_is_taken_in_order_and_acknowledged_once_it_is_done(bench: Bench) -> None:
    source = bench.source()
    bench.put("a", "b", "c")
    found = taken(source, 3)
    assert bodies(found) == [b"a", b"b", b"c"]
    assert {message.content_type for message in found} == {"application/json"}
    assert bench.pending() == 3
    source.acknowledge([message.token for message in found[:2]])
    assert bench.pending() == 1
    assert source.poll(0) == []
    assert source.lag() == 0
    assert bench.client.xlen(STREAM) == 1, "what is done is taken out"


def test_what_another_group_may_want_stays_in_the_stream(bench: Bench) -> None:
    source = bench.source()
    bench.client.xgroup_create(STREAM, "others", "0")
    bench.put("a", "b")
    source.acknowledge([message.token for message in taken(source, 2)])
    assert bench.pending() == 0
    assert bench.client.xlen(STREAM) == 2


def test_several_share_the_work(bench: Bench) -> None:
    one, two = bench.source("one"), bench.source("two")
    found = []
    for number in range(20):
        bench.put(str(number))
        found += (one if number % 2 else two).poll(0.5)
    assert [int(message.body) for message in found] == list(range(20))


def test_what_is_put_before_anybody_opens_waits(bench: Bench) -> None:
    bench.source("one").close()
    bench.put("waits")
    assert bodies(taken(bench.source("two"), 1)) == [b"waits"]


def test_a_recorder_that_comes_back_under_its_name_gets_its_own_first(bench: Bench) -> None:
    bench.put()
    before = bench.source("same")
    bench.put("a", "b")
    taken(before, 2)
    before.hang_up()  # as if killed
    bench.put("c")
    assert bodies(taken(bench.source("same"), 3)) == [b"a", b"b", b"c"]


def test_after_a_lost_connection_tokens_are_valid_and_nothing_comes_twice(bench: Bench) -> None:
    source = bench.source()
    bench.put("a", "b")
    first = taken(source, 2)
    # The answer to this one was lost with the connection.
    bench.put("lost on the way")
    bench.client.xreadgroup(GROUP, "one", {STREAM: ">"})
    source.hang_up()
    source.acknowledge([first[0].token])
    source.open()
    bench.put("new")
    assert bodies(taken(source, 2)) == [b"lost on the way", b"new"]
    assert bench.pending() == 3, "what was done meanwhile is told now"


def test_the_entries_of_a_dead_recorder_are_taken_over_and_it_is_removed(bench: Bench) -> None:
    dead = bench.source("dead")
    bench.put("a", "b")
    taken(dead, 2)
    dead.hang_up()
    heir = bench.source("heir", claim_after_s=0.2)
    found = taken(heir, 2)
    assert bodies(found) == [b"a", b"b"]
    heir.acknowledge([message.token for message in found])
    wait_until(lambda: heir.poll(0.05) == [] and bench.consumers() == {b"heir"}, 10, "removal")
    assert bench.pending() == 0


def test_a_recorder_that_only_idles_is_not_taken_for_dead(bench: Bench) -> None:
    slow = bench.source("slow")
    bench.put("a")
    taken(slow, 1)
    heir = bench.source("heir", claim_after_s=3.0)

    def idle() -> bool:
        slow.idle()
        assert heir.poll(0.2) == []
        (told,) = [
            one for one in bench.client.xinfo_consumers(STREAM, GROUP) if one["name"] == b"slow"
        ]
        assert told["idle"] < 2_900
        pending = bench.client.xpending_range(STREAM, GROUP, "-", "+", 1)
        return bool(pending[0]["time_since_delivered"] > 3_500)

    wait_until(idle, 20, "the entry to be old")


def test_pending_entries_that_the_bound_has_dropped_are_counted_and_settled(bench: Bench) -> None:
    source = bench.source("same")
    bench.put("a", "b", "c")
    taken(source, 3)
    source.hang_up()
    bench.client.xtrim(STREAM, maxlen=1, approximate=False)
    again = bench.source("same")
    assert bodies(taken(again, 1)) == [b"c"]
    again.poll(0)
    assert again.dropped_count == 2
    assert bench.pending() == 1


def test_a_consumer_with_nothing_pending_goes_at_the_end_and_one_with_something_stays(
    bench: Bench,
) -> None:
    done, busy = bench.source("done"), bench.source("busy")
    bench.put("a")
    taken(busy, 1)
    done.poll(0)
    done.close()
    busy.close()
    assert bench.consumers() == {b"busy"}
    assert bench.pending() == 1


def test_a_stream_that_somebody_deletes_is_made_anew(bench: Bench) -> None:
    source = bench.source()
    bench.put("a")
    found = taken(source, 1)
    bench.client.delete(STREAM)
    with pytest.raises(ConnectionError, match=r"NOGROUP|no such key"):
        wait_until(lambda: source.poll(0.05), 5)
    source.open()
    source.acknowledge([message.token for message in found])
    bench.put("b")
    assert bodies(taken(source, 1)) == [b"b"]


def test_what_nobody_of_us_has_put_there_is_handed_on_as_it_is(bench: Bench) -> None:
    source = bench.source()
    bench.client.xadd(STREAM, {"other": b"\xff"})
    (message,) = taken(source, 1)
    assert message.content_type is None
    assert json.loads(message.body) == {"other": "\ufffd"}


def test_a_server_that_is_away_is_a_connection_error(
    bench: Bench, redis_server: RedisServer
) -> None:
    source = bench.source()
    bench.put("a")
    found = taken(source, 1)
    redis_server.stop()
    try:
        with pytest.raises(ConnectionError):
            source.poll(0.1)
        source.hang_up()
        source.acknowledge([message.token for message in found])
        with pytest.raises(ConnectionError):
            source.open()
    finally:
        redis_server.start()
    source.open()
    assert bench.pending() == 0
    source.hang_up()
    with pytest.raises(ConnectionError):
        source.poll(0)


def test_the_broker_says_which_source_it_is(bench: Bench) -> None:
    assert isinstance(source_for(bench.app, "one"), StreamSource)


# -- pub/sub -------------------------------------------------------------------------------


def test_celerys_events_come_by_pub_sub_and_ours_by_the_stream_alone(
    bench: Bench, redis_url: str
) -> None:
    source = bench.source()
    assert source._peers.wait_ready(10)
    with bench.app.events.Dispatcher("ours@test") as ours:
        ours.send("task-sent", uuid="1")
        ours.send("worker-heartbeat")
    with closing(Celery("peer", broker=redis_url, set_as_current=False)) as peer:
        with peer.connection() as connection:
            peer.events.Dispatcher(connection, hostname="theirs@test").send("worker-online")
        found = taken(source, 3)
    told = [(json.loads(m.body)["hostname"], m.token is None, m.unnumbered_only) for m in found]
    assert sorted(told) == [
        ("ours@test", False, False), ("ours@test", False, False), ("theirs@test", True, True),
    ]  # fmt: skip


def test_without_a_stream_everything_comes_by_pub_sub(redis_url: str) -> None:
    app = Umbel(
        "sources", broker=redis_url, backend="disabled://", set_as_current=False, event_stream=""
    )
    source = StreamSource(app, "one")
    with closing(app), closing(source):
        source.open()
        assert source._peers.wait_ready(10)
        with app.events.Dispatcher("ours@test") as ours:
            ours.send("task-sent", uuid="1")
        (message,) = taken(source, 1)
        assert (message.token, message.unnumbered_only) == (None, False)


def enveloped(body: bytes) -> bytes:
    """As kombu publishes it."""
    told = {
        "body": base64.b64encode(body).decode(), "content-encoding": "utf-8",
        "content-type": "application/json", "headers": {"hostname": "a@test"},
        "properties": {"body_encoding": "base64"},
    }  # fmt: skip
    return json.dumps(told).encode()


def test_what_nobody_takes_is_bounded_and_the_oldest_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("umbel.recorder.sources.peers.WAITING_MAX", 3)
    app = Umbel("peers", broker="memory://", backend="disabled://", set_as_current=False)
    with closing(app):
        peers = Peers(app, unnumbered_only=True)
        for number in range(5):
            peers._hear(enveloped(b'{"n":%d}' % number))
        assert bodies(peers.take(2)) == [b'{"n":2}', b'{"n":3}']
        assert bodies(peers.take(9)) == [b'{"n":4}']
        assert peers.dropped_count == 2
        monkeypatch.setattr("umbel.recorder.sources.peers.WAITING_BYTES_MAX", 100)
        for _ in range(3):
            peers._hear(enveloped(b"x" * 40))
        assert len(peers.take(9)) == 2


def test_the_beginning_of_our_events_is_known_whatever_is_in_them(
    make_events: Callable[[], list[dict[str, Any]]],
) -> None:
    for event in make_events():
        assert is_numbered(enveloped(encode(event)))
        assert is_numbered(enveloped(encode([event, event])))
    for other in (
        b'{"hostname": "a", "inc":1}',
        b'{"type":"task-x","hostname":"a\\"b","pid":1}',
        b'{"type":"t","hostname":"h","data":{"seq":1,"inc":1}}',
        b"",
        b"[]",
    ):
        assert not is_numbered(enveloped(other))
        assert opened(enveloped(other)).body == other
    for none in (b"", b"x", b"[]", b'{"body": 7, "properties": {}}', b'{"body": "!", "x": 1}'):
        assert not is_numbered(none)
        assert opened(none) == Message(none, None, None, None, None)


@pytest.fixture
def make_events() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    app = Umbel("peers", broker="memory://", backend="disabled://", set_as_current=False)

    def make() -> list[dict[str, Any]]:
        stamper = app.events.Dispatcher("a@test").stamper
        return [
            stamper.make("task-received", {"uuid": "1", "args": '"inc":'}),
            stamper.make("worker-heartbeat", {}),
            stamper.make("task-started", {"uuid": "1", "timestamp": 1.5e9}, 2**52),
            stamper.make("task-progress", {"uuid": "1"}, blind=True),
        ]

    yield make
    app.close()


def test_the_publisher_and_the_source_agree_on_the_key_behind_a_prefix(redis_url: str) -> None:
    app = Umbel(
        "sources", broker=redis_url, backend="disabled://", set_as_current=False,
        broker_transport_options={"global_keyprefix": "ours:"},
    )  # fmt: skip
    source, publisher = StreamSource(app, "one"), Publisher(app)
    with closing(app), closing(source), closing(publisher):
        source.open()
        publisher.open()
        publisher.publish([{"type": "worker-online", "hostname": "a", "timestamp": 1.0, "inc": 1}])
        found: list[Message] = []  # pub/sub, which all hear, may bring it too
        wait_until(
            lambda: found.extend(source.poll(0.05)) or any(m.token for m in found), 10, "the event"
        )
        (message,) = [m for m in found if m.token is not None]
        assert json.loads(message.body)["type"] == "worker-online"
