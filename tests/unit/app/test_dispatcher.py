"""The dispatcher: stamps, groups, batches, a bound, and what is left at the end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue

from tests.servers import free_port, wait_until
from umbel import Umbel
from umbel.app.events import Events
from umbel.app.events import dispatcher as dispatching
from umbel.app.events.dispatcher import Dispatcher
from umbel.app.events.publisher import event_exchange
from umbel.app.events.stamper import Life, Stamper, new_incarnation
from umbel.cluster.backoff import Backoff
from umbel.wire.event_forms import TaskStarted
from umbel.wire.events import check, read

ACCEPT = frozenset({"application/json"})


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel("events", broker="memory://", backend="disabled://", set_as_current=False)
    made.conf.event_exchange = f"celeryev-{time.time_ns()}"  # the memory is shared by all tests
    yield made
    made.close()


class Tap:
    """Sees messages as they are, before anybody reads them."""

    def __init__(self, app: Umbel) -> None:
        self.messages: list[tuple[str, dict[str, Any], bytes]] = []
        self.connection: Connection = app.connection()
        self.connection.connect()
        exchange = event_exchange(app.conf.event_exchange, self.connection)
        queue = Queue(f"tap-{time.time_ns()}", exchange, "#", auto_delete=True)
        self.consumer = Consumer(
            self.connection.channel(), [queue], on_message=self._seen, no_ack=True, accept=None
        )
        self.consumer.consume()

    def _seen(self, message: Any) -> None:
        body = message.body if isinstance(message.body, bytes) else message.body.encode()
        self.messages.append((message.delivery_info["routing_key"], message.headers, body))

    def drain(self) -> list[tuple[str, dict[str, Any], bytes]]:
        while True:
            try:
                self.connection.drain_events(timeout=0.2)
            except TimeoutError:
                return self.messages

    def events(self) -> list[dict[str, Any]]:
        return [
            event
            for _, _, body in self.drain()
            for event in read(body, "application/json", "utf-8", accept=ACCEPT).events
        ]


@pytest.fixture
def tap(app: Umbel) -> Iterator[Tap]:
    made = Tap(app)
    yield made
    made.consumer.cancel()
    made.connection.close()


def test_an_event_says_who_when_and_the_how_manieth(app: Umbel, tap: Tap) -> None:
    before = time.time()
    with app.events.Dispatcher("a@test") as dispatcher:
        dispatcher.send("task-progress", uuid="1", done=3)
        dispatcher.send("task-progress", uuid="1", done=4)
    first, second = tap.events()
    assert first["hostname"] == "a@test"
    assert before <= first["timestamp"] <= time.time()
    assert (first["seq"], second["seq"]) == (1, 2)
    assert first["clock"] < second["clock"]
    assert first["inc"] == second["inc"] > 10**15
    assert {"pid", "utcoffset", "uuid", "done"} <= first.keys()


def test_two_dispatchers_of_one_name_are_two_incarnations(app: Umbel) -> None:
    one, other = app.events.Dispatcher("a@test"), app.events.Dispatcher("a@test")
    assert one.stamper.inc < other.stamper.inc
    numbers = [new_incarnation() for _ in range(100)]
    assert numbers == sorted(set(numbers))


def test_task_events_travel_together_and_all_others_alone(app: Umbel, tap: Tap) -> None:
    app.conf.event_flush_interval = 0.2
    with app.events.Dispatcher("a@test") as dispatcher:
        for number in range(5):
            dispatcher.send("task-x", uuid=str(number))
        dispatcher.send("worker-heartbeat", freq=2.0)
        dispatcher.send("worker-heartbeat", freq=2.0)
        dispatcher.send("task-y", uuid="5")
    keys = [key for key, _, _ in tap.drain()]
    assert keys.count("worker.heartbeat") == 2
    assert len([key for key in keys if key.startswith("task.")]) <= 3
    for _, headers, body in tap.messages:
        assert headers == {"hostname": "a@test"}
        if body.startswith(b"["):
            assert b"worker-" not in body
    assert [event["seq"] for event in tap.events()] == list(range(1, 9))


def test_only_the_groups_that_are_on_go_out(app: Umbel, tap: Tap) -> None:
    with app.events.Dispatcher("a@test", groups={"worker"}) as dispatcher:
        dispatcher.send("task-x", uuid="1")
        dispatcher.send("worker-x")
        assert dispatcher.enable_group("task") is True
        assert dispatcher.enable_group("task") is False
        dispatcher.send("task-x", uuid="2")
        assert dispatcher.disable_group("task") is True
        assert dispatcher.disable_group("task") is False
        dispatcher.send("task-x", uuid="3")
        dispatcher.disable()
        dispatcher.send("worker-x")
        dispatcher.enable()
    events = tap.events()
    assert [event["type"] for event in events] == ["worker-x", "task-x"]
    assert events[1]["uuid"] == "2"
    assert [event["seq"] for event in events] == [1, 2], "what is not sent has no number"


def test_a_dispatcher_of_all_groups_can_be_told_to_leave_one_out(app: Umbel) -> None:
    dispatcher = app.events.Dispatcher("a@test")
    assert dispatcher.sends("task")
    assert dispatcher.disable_group("task") is True
    assert not dispatcher.sends("task")
    assert dispatcher.sends("worker")


def test_many_threads_share_one_row_of_numbers(app: Umbel, tap: Tap) -> None:
    dispatcher = app.events.Dispatcher("a@test")

    def send() -> None:
        for number in range(200):
            dispatcher.send("task-x", uuid=str(number))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dispatcher.close()
    events = tap.events()
    assert sorted(event["seq"] for event in events) == list(range(1, 1601))
    assert len({event["clock"] for event in events}) == 1600
    assert (dispatcher.sent, dispatcher.lost) == (1600, 0)


def test_without_a_broker_the_oldest_are_dropped_and_every_loss_is_counted() -> None:
    app = Umbel(
        "events",
        broker=f"redis://127.0.0.1:{free_port()}/0",
        backend="disabled://",
        set_as_current=False,
        event_buffer_max=10,
    )
    dispatcher = Dispatcher(app, "a@test")
    for number in range(25):
        dispatcher.send("task-x", uuid=str(number))
    assert dispatcher.lost == 15
    assert [event["uuid"] for event in dispatcher._buffer] == [str(n) for n in range(15, 25)]
    began = time.monotonic()
    dispatcher.close(timeout_s=0.3)
    assert time.monotonic() - began < 10
    assert (dispatcher.sent, dispatcher.lost) == (0, 25)
    assert dispatcher.stamper.seq == dispatcher.sent + dispatcher.lost
    app.close()


class Gate:
    """A publisher that opens when it is told to."""

    def __init__(self) -> None:
        self.is_open = self.may_open = False
        self.tries = 0
        self.published: list[dict[str, Any]] = []

    def open(self) -> None:
        self.tries += 1
        if not self.may_open:
            raise ConnectionError("not yet")
        self.is_open = True

    def publish(self, events: list[dict[str, Any]]) -> None:
        self.published += events

    def close(self, *, lost: bool = False) -> None:
        self.is_open = False


def test_a_good_bye_tells_of_what_was_dropped_for_its_own_sake(app: Umbel) -> None:
    dispatcher, gate = Dispatcher(app, "a@test"), Gate()
    dispatcher._publisher, dispatcher._buffer_max = gate, 10  # type: ignore[assignment]
    for number in range(12):
        dispatcher.send("task-x", uuid=str(number))
    dispatcher.send("worker-offline", lost=dispatcher.lost)
    gate.may_open = True
    dispatcher.close()
    assert gate.published[-1]["lost"] == dispatcher.lost == 3
    assert len(gate.published) + dispatcher.lost == dispatcher.stamper.seq


def test_who_waits_and_who_knows_that_the_broker_is_back_cut_the_pause_short(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "RETRY", Backoff(1_000.0, 1_000.0))
    dispatcher, gate = Dispatcher(app, "a@test"), Gate()
    dispatcher._publisher = gate  # type: ignore[assignment]
    dispatcher.send("task-x", uuid="1")
    wait_until(lambda: gate.tries == 1, what="the first try")
    dispatcher.hurry()
    wait_until(lambda: gate.tries == 2, what="a try at once")
    gate.may_open = True
    dispatcher.close()
    assert [event["uuid"] for event in gate.published] == ["1"]
    assert dispatcher.lost == 0


def test_what_comes_while_others_are_sent_gathers_again(app: Umbel) -> None:
    app.conf.event_flush_interval = 2.0
    dispatcher, gate = Dispatcher(app, "a@test"), Gate()
    sizes: list[int] = []

    def publish(events: list[dict[str, Any]]) -> None:
        sizes.append(len(events))
        if len(sizes) == 1:
            dispatcher.send("task-x", uuid="meanwhile")

    gate.may_open, gate.publish = True, publish  # type: ignore[method-assign]
    dispatcher._publisher = gate  # type: ignore[assignment]
    dispatcher.send("task-x", uuid="first")
    wait_until(lambda: bool(sizes), what="the first message")
    for number in range(20):
        dispatcher.send("task-x", uuid=str(number))
    dispatcher.close()
    assert sizes == [1, 21]


def test_what_json_can_not_hold_is_replaced_and_nothing_is_raised(app: Umbel, tap: Tap) -> None:
    with app.events.Dispatcher("a@test") as dispatcher:
        dispatcher.send(
            "task-x", uuid="1", odd=object(), text="\udc80", big=10**400, number=float("inf")
        )
    (event,) = tap.events()
    assert event["text"] == "\\udc80"
    assert "object object" in event["odd"]


def test_a_list_too_big_for_its_readers_goes_out_in_parts(app: Umbel, tap: Tap) -> None:
    app.conf.event_flush_interval = 5.0
    with app.events.Dispatcher("a@test") as dispatcher:
        for number in range(500):
            dispatcher.send("task-failed", uuid=str(number), traceback="\n" * 16_000)
    events = tap.events()
    assert [event["uuid"] for event in events] == [str(number) for number in range(500)]
    assert dispatcher.sent == 500
    assert {key for key, _, _ in tap.messages} == {"task.multi"}


def test_heartbeats_come_from_the_thread_until_they_are_stopped(app: Umbel, tap: Tap) -> None:
    dispatcher = app.events.Dispatcher("a@test")
    beats = threading.Semaphore(0)

    def fields() -> dict[str, Any]:
        beats.release()
        return {"freq": 0.02}

    dispatcher.start()
    dispatcher.beat(0.02, fields)
    for _ in range(3):
        assert beats.acquire(timeout=10)
    dispatcher.stop_beating()
    dispatcher.close()
    events = tap.events()
    assert len(events) >= 3
    assert {event["type"] for event in events} == {"worker-heartbeat"}


def test_an_interval_that_becomes_shorter_is_kept_at_once(app: Umbel) -> None:
    dispatcher = Dispatcher(app, "a@test")
    beats = threading.Semaphore(0)
    dispatcher.beat_slower(1e6)
    dispatcher.beat(0.02, lambda: (beats.release(), {})[1])
    dispatcher.start()
    assert beats.acquire(timeout=10)
    assert not beats.acquire(timeout=0.1), "the next one is hours away"
    dispatcher.beat_slower(1.0)
    for _ in range(3):
        assert beats.acquire(timeout=10)
    dispatcher.close()


def test_nothing_is_taken_after_the_end(app: Umbel, tap: Tap) -> None:
    dispatcher = app.events.Dispatcher("a@test")
    dispatcher.send("task-x", uuid="1")
    dispatcher.close()
    dispatcher.send("task-x", uuid="2")
    dispatcher.close()
    assert [event["uuid"] for event in tap.events()] == ["1"]
    assert not [t for t in threading.enumerate() if t.name == "umbel-events-a@test"]


def stamped(dispatcher: Dispatcher, uuid: str) -> TaskStarted:
    by = dispatcher.stamper
    seq, clock = by.count()
    return TaskStarted(by.hostname, by.pid, by.utcoffset, clock, time.time(), seq, by.inc, uuid)


def test_forms_travel_with_the_other_events_of_tasks_in_their_order(app: Umbel, tap: Tap) -> None:
    app.conf.event_flush_interval = 0.2
    with app.events.Dispatcher("a@test") as dispatcher:
        dispatcher.keep(stamped(dispatcher, "1"))
        dispatcher.send("task-x", uuid="2")
        dispatcher.keep(stamped(dispatcher, "3"))
        dispatcher.flush()
        dispatcher.keep(stamped(dispatcher, "4"))
        dispatcher.flush()
        dispatcher.send("worker-x")
    events = tap.events()
    assert [event["seq"] for event in events] == [1, 2, 3, 4, 5]
    assert [event["uuid"] for event in events[:4]] == ["1", "2", "3", "4"]
    assert [event["clock"] for event in events] == sorted(event["clock"] for event in events)
    keys = [key for key, _, _ in tap.messages]
    assert keys == ["task.multi", "task.started", "worker.x"]
    assert all(headers == {"hostname": "a@test"} for _, headers, _ in tap.messages)


def test_an_event_with_a_number_that_comes_after_the_end_counts_as_lost(app: Umbel) -> None:
    dispatcher = app.events.Dispatcher("a@test")
    dispatcher.keep(stamped(dispatcher, "1"))
    dispatcher.close()
    dispatcher.keep(stamped(dispatcher, "2"))
    assert (dispatcher.sent, dispatcher.lost, dispatcher.stamper.seq) == (1, 1, 2)


def test_a_task_tells_of_itself_under_the_name_of_its_node(app: Umbel, tap: Tap) -> None:
    @app.task(bind=True, name="t")
    def t(self: Any) -> None:
        self.send_event("task-progress", done=1)

    result = t.apply(task_id="the-id")
    assert result.successful()
    app.close()
    (event,) = tap.events()
    assert (event["type"], event["uuid"], event["done"]) == ("task-progress", "the-id", 1)


def test_whoever_sends_events_in_a_worker_does_so_as_a_part_of_its_life(
    app: Umbel, tap: Tap
) -> None:
    life = app.events.life = Life("w1@test")
    assert app.events.default_dispatcher().hostname == app.origin, "its life has not begun"
    with app.events.Dispatcher("w1@test", stamper=Stamper("w1@test", app.clock)) as worker:
        life.begin(worker.stamper.inc)
        worker.send("worker-online")
    for dispatcher in (
        app.events.default_dispatcher(),
        app.events.default_dispatcher("w1@test"),
        app.events.Dispatcher(),
        app.events.Dispatcher("w1@test"),
    ):
        with dispatcher:
            dispatcher.send("task-progress", uuid="1")
    with app.events.Dispatcher("other@test") as other:
        other.send("worker-online")
    online, first, second, third, fourth, stranger = tap.events()
    lives = {(event["hostname"], event["pid"], event["inc"]) for event in tap.events()[:5]}
    assert lives == {("w1@test", os.getpid(), worker.stamper.inc)}
    assert "umbel_series" not in online
    assert first["umbel_series"] == second["umbel_series"], "one dispatcher, left open"
    assert [event["seq"] for event in (online, first, second, third, fourth)] == [1, 1, 2, 1, 1]
    assert len({event["umbel_series"] for event in (first, third, fourth)}) == 3
    assert stranger["inc"] != worker.stamper.inc
    assert "umbel_series" not in stranger


def test_a_forked_process_belongs_to_the_life_of_the_worker_that_begins_after_the_fork(
    app: Umbel,
) -> None:
    life = app.events.life = Life("w1@test")
    begun_r, begun_w = os.pipe()
    told_r, told_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(begun_r, 1)
        stamper = app.events.new_stamper()
        os.write(told_w, json.dumps(stamper.make("task-progress", {"uuid": "1"})).encode())
        os._exit(0)
    life.begin(4711)
    os.write(begun_w, b"!")
    event = json.loads(os.read(told_r, 10_000))
    os.waitpid(pid, 0)
    for fd in (begun_r, begun_w, told_r, told_w):
        os.close(fd)
    assert (event["hostname"], event["pid"], event["inc"]) == ("w1@test", os.getpid(), 4711)
    assert (event["seq"], check(event)) == (1, "")
    assert event["umbel_series"] > 0


def test_threads_that_begin_to_send_at_once_share_one_thread_for_it(app: Umbel, tap: Tap) -> None:
    dispatcher, barrier = app.events.default_dispatcher(), threading.Barrier(8)

    def send(number: int) -> None:
        barrier.wait(10)
        with dispatcher:
            dispatcher.send("task-x", uuid=str(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    assert sorted(event["seq"] for event in tap.events()) == list(range(1, 9))


def test_a_client_that_wants_to_tells_of_what_it_sends(app: Umbel, tap: Tap) -> None:
    app.conf.task_send_sent_event = True
    one = app.send_task("t", (1,), {"x": 2}, countdown=60)
    two = app.send_many([app.signature("t", (n,)) for n in range(3)])
    events = tap.events()
    assert [event["uuid"] for event in events] == [one.id, *(result.id for result in two)]
    first = events[0]
    assert first["type"] == "task-sent"
    assert (first["name"], first["args"], first["kwargs"]) == ("t", "(1,)", "{'x': 2}")
    assert (first["queue"], first["exchange"], first["routing_key"]) == ("celery", "", "celery")
    assert first["eta"] is not None
    assert first["hostname"] == app.origin
    assert "sync" not in first, "this process has heard nobody"
    assert [key for key, _, _ in tap.messages] == ["task.sent", "task.multi"]


def test_a_client_that_heard_others_says_that_its_clock_means_something(
    app: Umbel, tap: Tap
) -> None:
    app.conf.task_send_sent_event = True
    app.clock.adjust(500)
    app.send_task("t")
    (event,) = tap.events()
    assert event["sync"] is True
    assert event["clock"] > 500


def test_that_an_event_is_lost_does_not_make_the_task_look_unsent(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing else makes only the second of two messages fail.
    def fail(*_: object) -> None:
        raise ConnectionError("no")

    app.conf.task_send_sent_event = True
    monkeypatch.setattr("umbel.app.publish.publish_events", fail)
    assert app.send_task("t").id
    events: Events = app.events
    assert events.sent_lost == 1


def test_closing_the_application_sends_what_its_dispatcher_still_has(app: Umbel, tap: Tap) -> None:
    app.conf.event_flush_interval = 5.0
    app.events.default_dispatcher().send("task-x", uuid="1")
    app.close()
    wait_until(lambda: len(tap.events()) == 1, what="the event")
