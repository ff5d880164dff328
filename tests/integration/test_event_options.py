"""Options of events mean what they mean in Celery, on real brokers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery
from kombu import Connection, Producer, Queue
from kombu.exceptions import OperationalError

from tests.proxy import Proxy
from tests.servers import free_port, wait_until
from umbel import Umbel
from umbel.app.events.publisher import event_exchange
from umbel.app.events.receiver import Receiver
from umbel.app.events.state import State
from umbel.broker.broadcast.listening import Listener
from umbel.broker.sessions.connections import connect
from umbel.recorder.sources import source_for

WAIT_S = 20.0
OPTIONS = {"blind", "retry", "retry_policy", "Event"}


class Tap:
    """Sees events as they are on the broker."""

    def __init__(self, url: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.headers: list[dict[str, Any]] = []
        connection = connect(url)
        exchange = event_exchange("celeryev", connection)
        queue = Queue(f"tap-{time.time_ns()}", exchange, "#", auto_delete=True)
        self._listener = Listener(connection, [queue], self._seen, self._refused)

    def _seen(self, message: Any) -> bool:
        found = json.loads(message.body)
        self.events += found if isinstance(found, list) else [found]
        self.headers.append(message.headers)
        return True

    def _refused(self, exc: Exception) -> None:
        raise AssertionError(exc)

    def wait(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + WAIT_S
        while len(self.events) < count:
            assert time.monotonic() < deadline, f"{count} events are wanted: {self.events}"
            self._listener.listen(0.2)
        assert len(self.events) == count
        return self.events

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def app(broker_url: str) -> Iterator[Umbel]:
    made = Umbel("options", broker=broker_url, backend="disabled://", set_as_current=False)
    yield made
    made.close()


@pytest.fixture
def elsewhere() -> Iterator[Umbel]:
    """Its own broker is not there."""
    url = f"redis://127.0.0.1:{free_port()}/0"
    made = Umbel("elsewhere", broker=url, backend="disabled://", set_as_current=False)
    yield made
    made.events.close(0.3)
    made.close()


@pytest.fixture
def tap(broker_url: str) -> Iterator[Tap]:
    made = Tap(broker_url)
    yield made
    made.close()


# -- blind, retry, utcoffset -------------------------------------------------------------------


def test_a_blind_event_carries_no_clock_and_does_not_move_the_clock(app: Umbel, tap: Tap) -> None:
    with app.events.Dispatcher(hostname="a@test") as dispatcher:
        dispatcher.send("custom-first")
        before = app.clock.value
        dispatcher.send("custom-blind", blind=True, x=1)
        dispatcher.send("task-blind", blind=True, uuid="1")
        assert app.clock.value == before
        dispatcher.send("custom-last", blind=False)
    first, *blind, last = tap.wait(4)
    assert [event["type"] for event in blind] == ["custom-blind", "task-blind"]
    assert all("clock" not in event for event in blind)
    assert last["clock"] == first["clock"] + 1
    assert [event["seq"] for event in tap.events] == [1, 2, 3, 4]
    assert not any(OPTIONS & event.keys() for event in tap.events)


def test_options_of_send_are_never_fields(app: Umbel, tap: Tap) -> None:
    with app.events.default_dispatcher() as dispatcher:
        dispatcher.send("custom-x", False, lambda: -5, True, {"max_retries": 1}, done=40)
        dispatcher.send(type="custom-x", retry=True, retry_policy={"max_retries": 1}, done=40)
    first, second = tap.wait(2)
    assert (first["utcoffset"], first["done"], second["done"]) == (-5, 40, 40)
    assert second["utcoffset"] == dispatcher.stamper.utcoffset
    assert not OPTIONS & (first.keys() | second.keys())


def test_options_of_a_tasks_send_event_are_never_fields(app: Umbel, tap: Tap) -> None:
    @app.task(bind=True, name="t")
    def t(self: Any) -> None:
        self.send_event("task-progress", False, {"max_retries": 1}, done=1)
        self.send_event("task-progress", retry=True, retry_policy=None, done=2)
        self.send_event("task-progress", blind=True, utcoffset=lambda: 3, done=3)

    assert t.apply(task_id="the-id").successful()
    events = tap.wait(3)
    assert [(event["uuid"], event["done"]) for event in events] == [
        ("the-id", n) for n in (1, 2, 3)
    ]
    assert not any(OPTIONS & event.keys() for event in events)
    assert [("clock" in event) for event in events] == [True, True, False]
    assert events[2]["utcoffset"] == 3


def test_a_factory_of_events_makes_what_is_sent(app: Umbel, tap: Tap) -> None:
    def shouting(type: str, **fields: Any) -> dict[str, Any]:  # noqa: A002
        return {**fields, "type": type, "note": fields["note"].upper()}

    with app.events.Dispatcher(hostname="a@test") as dispatcher:
        dispatcher.send("custom-x", Event=shouting, note="hello")
    (event,) = tap.wait(1)
    assert (event["type"], event["hostname"], event["note"]) == ("custom-x", "a@test", "HELLO")


# -- publish -----------------------------------------------------------------------------------


def test_publish_uses_the_producer_of_its_caller(app: Umbel, tap: Tap, broker_url: str) -> None:
    dispatcher = app.events.Dispatcher(hostname="a@test")
    with Connection(broker_url) as connection:
        producer = Producer(connection.channel())
        dispatcher.publish("custom-x", {"n": 1}, producer)
        dispatcher.publish(
            "worker-x", {"n": 2}, producer, blind=True, retry=True, utcoffset=lambda: 7,
            retry_policy={"max_retries": 1},
        )  # fmt: skip
        first, second = tap.wait(2)
        dispatcher.close()
        dispatcher.publish("custom-x", {"n": 3}, producer)  # the producer is still open
        assert tap.wait(3)[2]["n"] == 3
    assert (first["n"], first["hostname"], first["seq"]) == (1, "a@test", 1)
    assert "clock" in first
    assert (second["n"], second["utcoffset"], second["seq"]) == (2, 7, 2)
    assert "clock" not in second
    assert not OPTIONS & (first.keys() | second.keys())
    assert tap.headers == [dispatcher.headers] * 3
    assert (dispatcher.sent, dispatcher.lost) == (3, 0)


def test_publish_without_a_producer_uses_the_dispatchers_own_connection(
    app: Umbel, tap: Tap
) -> None:
    with app.events.Dispatcher(hostname="a@test") as dispatcher:
        dispatcher.publish("custom-x", {"n": 1}, dispatcher.producer)
        dispatcher.flush(errors=True, groups=True)
        assert tap.wait(1)[0]["n"] == 1


def test_what_a_producer_cannot_publish_waits_in_the_buffer_or_raises(app: Umbel, tap: Tap) -> None:
    impatient = {"max_retries": 1, "interval_start": 0.01, "interval_step": 0}
    nowhere = Connection(f"redis://127.0.0.1:{free_port()}/0", transport_options=impatient)
    with nowhere, app.events.Dispatcher(hostname="a@test") as dispatcher:
        dispatcher.publish("custom-x", {"n": 1}, Producer(nowhere))
        assert tap.wait(1)[0]["n"] == 1
    strict = app.events.Dispatcher(hostname="b@test", buffer_while_offline=False)
    with nowhere, strict, pytest.raises(OperationalError):
        strict.publish("custom-x", {"n": 2}, Producer(nowhere))


def test_publish_with_retry_outlives_a_broken_connection(
    app: Umbel, tap: Tap, broker_url: str
) -> None:
    parts = urlsplit(broker_url)
    assert parts.port is not None
    with Proxy(parts.port) as proxy:
        url = broker_url.replace(f":{parts.port}", f":{proxy.port}")
        with Connection(url) as connection, app.events.Dispatcher(hostname="a@test") as dispatcher:
            producer = Producer(connection)
            dispatcher.publish("custom-x", {"n": 1}, producer)
            tap.wait(1)  # a stock producer does not wait for the broker
            proxy.cut()
            policy = {"max_retries": 5, "interval_start": 0.05}
            dispatcher.publish("custom-x", {"n": 2}, producer, retry=True, retry_policy=policy)
            assert dispatcher.sent == 2, "with the producer, not by the buffer"
            assert [event["n"] for event in tap.wait(2)] == [1, 2]


# -- where to connect --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "kombu's", "a channel", "the keyword channel", "a URL"])
def test_a_dispatcher_connects_where_its_connection_leads(
    elsewhere: Umbel, app: Umbel, tap: Tap, broker_url: str, kind: str
) -> None:
    with app.connection() as ours, Connection(broker_url) as stock:
        arguments: dict[str, tuple[list[Any], dict[str, Any]]] = {
            "ours": ([ours, "a@test"], {}),
            "kombu's": ([stock], {"hostname": "a@test"}),
            "a channel": ([stock.channel(), "a@test", True], {}),
            "the keyword channel": ([None, "a@test"], {"channel": stock.channel()}),
            "a URL": ([broker_url, "a@test"], {}),
        }
        args, options = arguments[kind]
        with elsewhere.events.Dispatcher(*args, **options) as dispatcher:
            dispatcher.send("custom-x", n=1)
            (event,) = tap.wait(1)
        assert (event["n"], event["hostname"]) == (1, "a@test")
        assert dispatcher.flush()
        stock.default_channel.close()  # theirs was left open


def test_what_cannot_be_a_connection_raises_at_once(app: Umbel) -> None:
    for wrong in (5, object(), {"hostname": "a@test"}, ["a@test"], app):
        with pytest.raises(TypeError, match="connection"):
            app.events.Dispatcher(wrong)
        with pytest.raises(TypeError, match="connection"):
            app.events.Receiver(wrong)
    with pytest.raises(TypeError, match="hostname"):
        app.events.Dispatcher(None, app.connection())
    with pytest.raises(TypeError, match="hostname"):
        app.events.default_dispatcher(app.connection())
    with pytest.raises(TypeError, match="'a@test'"):
        app.events.Dispatcher("a@test", "b@test")
    with pytest.raises(TypeError, match="'a@test'"):
        app.events.Receiver("a@test")
    with pytest.raises(TypeError, match="groups"):
        app.events.Dispatcher(groups="task")
    with pytest.raises(TypeError, match="handlers"):
        app.events.Receiver(None, print)
    with pytest.raises(TypeError, match="producer"):
        app.events.Dispatcher().publish("custom-x", {}, app.connection())
    with pytest.raises(TypeError, match="callback"):
        app.events.State(5)
    with pytest.raises(TypeError, match="max_tasks"):
        app.events.State(max_tasks_in_memory="many")
    with pytest.raises(ValueError, match="max_workers"):
        app.events.State(max_workers_in_memory=0)


def test_an_event_that_no_broker_can_take_raises_and_holds_nothing_up(app: Umbel, tap: Tap) -> None:
    with app.events.Dispatcher(hostname="a@test") as dispatcher:
        for kind, fields in (
            ("custom-" + "x" * 300, {}), ("custom-x", {"hostname": object()}),
            ("custom-x", {"Event": lambda *_, **__: {"no": "type"}}),
            ("custom-x", {"Event": lambda *_, **__: 5}),
        ):  # fmt: skip
            with pytest.raises(TypeError):
                dispatcher.send(kind, **fields)
        dispatcher.send("custom-x", n=1)
        assert tap.wait(1)[0]["n"] == 1
    assert dispatcher.stamper.seq == dispatcher.sent + dispatcher.lost == 5


def test_a_name_in_the_place_of_the_connection_is_the_hostname(app: Umbel, tap: Tap) -> None:
    with app.events.Dispatcher("a@test") as dispatcher:
        dispatcher.send("custom-x")
    assert tap.wait(1)[0]["hostname"] == "a@test"


def test_arguments_of_celerys_dispatcher_are_taken(app: Umbel, tap: Tap) -> None:
    called: list[str] = []
    with (
        app.connection() as connection,
        app.events.Dispatcher(
            connection, "a@test", False, None, True, app, "json", ["custom"], 1, ["task"], 24, None
        ) as dispatcher,
    ):
        dispatcher.on_enabled.add(lambda: called.append("enabled"))
        dispatcher.on_disabled.add(lambda: called.append("disabled"))
        dispatcher.send("custom-x", n=0)
        dispatcher.disable()  # it is
        dispatcher.enable()
        dispatcher.send("custom-x", n=1)
        dispatcher.send("task-x", uuid="1")
        dispatcher.disable()
        dispatcher.send("custom-x", n=2)
    assert [event["n"] for event in tap.wait(1)] == [1]
    assert called == ["enabled", "disabled"]
    assert dispatcher.headers == {"hostname": "a@test"}
    assert dispatcher.buffer_while_offline is True


def test_a_dispatcher_takes_over_what_another_could_not_send(
    app: Umbel, tap: Tap, elsewhere: Umbel
) -> None:
    stuck = elsewhere.events.Dispatcher(hostname="a@test")
    for number in range(3):
        stuck.send("custom-x", n=number)
    with app.events.Dispatcher(hostname="b@test") as dispatcher:
        dispatcher.extend_buffer(stuck)
    stuck.close(0.3)
    events = tap.wait(3)
    assert [(event["hostname"], event["n"]) for event in events] == [
        ("a@test", number) for number in range(3)
    ]


# -- the shared dispatcher, and closed ones ----------------------------------------------------


def test_events_for_a_closed_dispatcher_count_as_lost(app: Umbel, tap: Tap) -> None:
    dispatcher = app.events.Dispatcher(hostname="a@test", groups=["task"])
    with dispatcher:
        dispatcher.send("task-x", uuid="1")
    dispatcher.send("task-x", uuid="2")
    dispatcher.send("custom-x")  # its group is off
    dispatcher.publish("task-x", {"uuid": "3"}, None)
    assert (dispatcher.sent, dispatcher.lost) == (1, 2)
    assert [event["uuid"] for event in tap.wait(1)] == ["1"]


def test_the_shared_dispatcher_outlives_its_with_blocks_and_is_made_anew_when_closed(
    app: Umbel, tap: Tap
) -> None:
    with app.events.default_dispatcher() as first:
        first.send("custom-x", n=1)
    with app.events.default_dispatcher("", True, False) as second:
        second.send("custom-x", n=2)
    assert first is second
    with app.events.default_dispatcher(enabled=False) as silent:
        silent.send("custom-x", n=0)
    assert silent is not first
    first.close()
    with app.events.default_dispatcher(hostname=None, buffer_while_offline=True) as third:
        third.send("custom-x", n=3)
    assert [event["n"] for event in tap.wait(3)] == [1, 2, 3]
    assert (first.lost, third.lost, silent.lost) == (0, 0, 0)


# -- events without a clock --------------------------------------------------------------------


def test_an_event_without_a_clock_has_one_for_every_handler(app: Umbel) -> None:
    seen: list[tuple[str, int]] = []
    state, later = State(), State()
    with (
        Receiver(app, state=state, wakeup=False) as one,
        Receiver(app, state=later, wakeup=False) as other,
        closing(Celery("peer", broker=app.conf.broker_url, set_as_current=False)) as peer,
    ):
        one.handlers["*"] = lambda event: seen.append((event["type"], event["clock"]))
        with app.events.Dispatcher(hostname="a@test") as ours, peer.connection() as connection:
            theirs = peer.events.Dispatcher(connection, hostname="b@test")
            ours.send("worker-heartbeat", freq=2.0, active=1)
            ours.send("worker-heartbeat", blind=True, freq=2.0, active=2)
            ours.send("task-progress", blind=True, uuid="1")
            assert ours.flush()
            theirs.send("worker-heartbeat", blind=True, freq=2.0)  # "clock": null
        app.clock.adjust(1_000)  # the receivers' own clock does not matter
        one.capture(4, WAIT_S)
        orders = [[(e["type"], e["clock"]) for e in other.itercapture(4, WAIT_S)]]
    assert orders == [seen]
    assert [clock for _, clock in seen] == [1, 0, 0, 0]
    assert state.workers["a@test"].active == later.workers["a@test"].active == 2
    assert state.workers["a@test"].clock == 1
    assert state.tasks["1"].clock == 0


def test_a_recorder_takes_a_blind_event_once_and_knows_that_it_has_no_clock(app: Umbel) -> None:
    with closing(source_for(app, "one")) as source:
        source.open()
        if hasattr(source, "_peers"):
            assert source._peers.wait_ready(WAIT_S)
        with app.events.Dispatcher(hostname="a@test") as dispatcher, app.connection() as connection:
            dispatcher.send("custom-x", blind=True, n=1)
            dispatcher.flush()
            dispatcher.publish("custom-x", {"n": 2}, Producer(connection), blind=True)
            dispatcher.send("custom-x", n=3)
        found: list[dict[str, Any]] = []
        wait_until(
            lambda: found.extend(json.loads(m.body) for m in source.poll(0.1)) or len(found) >= 3,
            what="three events",
        )
        assert [(event["n"], "clock" in event) for event in found] == [
            (1, False), (2, False), (3, True),
        ]  # fmt: skip


def test_a_channel_of_a_broadcast_is_no_argument_of_the_command(
    elsewhere: Umbel, broker_url: str
) -> None:
    with Connection(broker_url) as stock:
        for place in ({"channel": stock.channel()}, {"connection": stock}):
            assert elsewhere.control.broadcast("ping", **place) is None
    with pytest.raises(TypeError, match="connection"):
        elsewhere.control.broadcast("ping", channel=5)


# -- receivers and states with Celery's arguments ----------------------------------------------


def test_a_receiver_takes_celerys_arguments_in_their_order(elsewhere: Umbel, app: Umbel) -> None:
    seen: list[dict[str, Any]] = []
    with app.connection() as connection:
        receiver = elsewhere.events.Receiver(
            connection, {"*": seen.append}, "custom.#", "monitor", app, "mine", ["json"], 3.0, 60.0
        )
        receiver.wakeup = False
        with receiver, app.events.Dispatcher(hostname="a@test") as dispatcher:
            names = {queue.name for queue in receiver._subscription._listener._queues}
            dispatcher.send("custom-x", n=1)
            receiver.capture(1, WAIT_S)
    assert [event["n"] for event in seen] == [1]
    assert "mine.monitor" in names
    assert receiver.app is app


def test_a_receiver_listens_where_a_channel_a_stock_connection_or_a_url_leads(
    elsewhere: Umbel, app: Umbel, broker_url: str
) -> None:
    with Connection(broker_url) as stock:
        for place in (
            {"channel": stock.channel()}, {"channel": stock}, {"connection": stock},
            {"channel": broker_url},
        ):  # fmt: skip
            receiver = elsewhere.events.Receiver(**place, wakeup=False)
            with receiver, app.events.Dispatcher(hostname="a@test") as dispatcher:
                dispatcher.send("custom-x")
                receiver.capture(1, WAIT_S)


def test_a_state_takes_celerys_arguments(app: Umbel) -> None:
    called: list[Any] = []
    state = app.events.State(
        lambda state, event: called.append((state, event["type"])),
        max_workers_in_memory=1, max_tasks_in_memory=2,
        on_node_join=lambda worker: called.append(("join", worker.hostname)),
        on_node_leave=lambda worker: called.append(("leave", worker.hostname)),
    )  # fmt: skip
    common = {"hostname": "a@test", "timestamp": 1.0, "clock": 1}
    for kind in ("online", "heartbeat", "offline"):
        state.event({"type": f"worker-{kind}", **common})
    assert (state.max_workers, state.max_tasks) == (1, 2)
    assert called == [
        ("join", "a@test"), (state, "worker-online"), (state, "worker-heartbeat"),
        ("leave", "a@test"), (state, "worker-offline"),
    ]  # fmt: skip
