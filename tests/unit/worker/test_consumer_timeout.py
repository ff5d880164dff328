"""RabbitMQ's consumer timeout: which limit holds, who is warned, and what goes back in time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Exchange, Queue

from umbel import Umbel
from umbel.worker.runtime.consumer_timeout import DEFAULT_S, LOOK_MAX_S, RETURN_AT, ConsumerTimeout

CHANNEL = object()
CLOSED = (
    "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. "
    "Timeout value used: 90000 ms. This timeout value can be configured"
)


class Timer:
    """Keeps what is to be called again and again."""

    def __init__(self) -> None:
        self.every_s: float | None = None
        self.cancelled = False

    def call_repeatedly(self, every_s: float, call: Any, arguments: Any) -> Timer:
        self.every_s, self.call, self.arguments = every_s, call, arguments
        return self

    def cancel(self) -> None:
        self.cancelled = True


class Site:
    """A worker with tasks, and a connection of some kind."""

    def __init__(self, app: Umbel, kind: str = "amqp", time_limit_s: float | None = None) -> None:
        self.app = app
        self.now = 0.0
        self.timer = Timer()
        self.plan = SimpleNamespace(time_limit_s=time_limit_s)
        self.active: dict[int, Any] = {}
        self.waiting: dict[int, Any] = {}
        self.deliveries = self
        self.returned: list[Any] = []
        self.timeout = ConsumerTimeout(self, lambda: self.now)  # type: ignore[arg-type]
        transport = SimpleNamespace(driver_type=kind)
        self.consumer: Any = SimpleNamespace(
            connection=SimpleNamespace(transport=transport), channel=CHANNEL
        )

    def hold(self, tag: int) -> Any:
        message = SimpleNamespace(channel=CHANNEL, delivery_tag=tag)
        request = SimpleNamespace(message=message, settled=False)
        self.waiting[id(request)] = request
        return request

    def unsettled(self) -> list[Any]:
        return [one for one in self.waiting.values() if not one.settled]

    def return_waiting(self, requests: list[Any]) -> None:
        for request in requests:
            del self.waiting[id(request)]
            self.returned.append(request)

    def look(self, now: float) -> list[Any]:
        self.now = now
        before = len(self.returned)
        self.timer.call(*self.timer.arguments)
        return self.returned[before:]


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel("t", broker="memory://", backend="disabled://", set_as_current=False)

    @made.task(name="late", acks_late=True)
    def late() -> None: ...

    @made.task(name="late.limited", acks_late=True, time_limit=60)
    def limited() -> None: ...

    @made.task(name="late.long", acks_late=True, time_limit=7200)
    def long() -> None: ...

    @made.task(name="early", time_limit=7200)
    def early() -> None: ...

    yield made
    made.close()


def argued(milliseconds: Any) -> Queue:
    arguments = {"x-consumer-timeout": milliseconds}
    return Queue(f"q{milliseconds}", Exchange("e"), "k", queue_arguments=arguments)


@pytest.mark.parametrize(
    ("setting", "queues", "limit_s"),
    [
        (None, [], DEFAULT_S),
        (600, [], 600),
        (0, [], None),
        (600, [argued(120_000), argued(240_000)], 120),
        (0, [argued(120_000)], 120),
        (600, [argued("soon"), argued(0)], 600),
    ],
)
def test_the_limit_is_that_of_the_queues_or_the_setting_or_rabbitmqs_own(
    app: Umbel, setting: Any, queues: list[Queue], limit_s: float | None
) -> None:
    app.conf.broker_consumer_timeout = setting
    for queue in queues:
        app.queues.add(queue)
    assert Site(app).timeout.limit_s == limit_s


def test_a_queue_with_an_argument_has_no_other_limit(app: Umbel) -> None:
    app.queues.select([app.queues.add(argued(7_200_000)).name])
    assert Site(app).timeout.limit_s == 7200


def test_what_the_server_names_goes_before_the_setting(app: Umbel) -> None:
    app.conf.broker_consumer_timeout = 600
    site = Site(app)
    app.queues.add(argued(100_000))
    line = site.timeout.explain(Exception(CLOSED))
    assert line is not None
    assert "within 90 s (consumer_timeout)" in line
    assert site.timeout.limit_s == 90


def test_a_running_task_is_named_when_the_channel_is_closed(app: Umbel) -> None:
    site = Site(app)
    site.active = {n: SimpleNamespace(name="late", id=f"id-{n}", settled=n == 0) for n in range(13)}
    line = site.timeout.explain(Exception(CLOSED))
    assert line is not None
    assert "late[id-1], " in line
    assert "id-0" not in line, "it was acknowledged"
    assert line.endswith("and 2 more")


@pytest.mark.parametrize(
    "text", ["", "PRECONDITION_FAILED - unknown delivery tag 3", "connection reset by peer"]
)
def test_other_reasons_are_left_to_others(app: Umbel, text: str) -> None:
    site = Site(app)
    assert site.timeout.explain(Exception(text)) is None
    assert site.timeout.limit_s == DEFAULT_S


def test_a_server_that_names_no_value_leaves_the_limit_as_it_was(app: Umbel) -> None:
    site = Site(app)
    assert site.timeout.explain(Exception("delivery acknowledgement on channel 2 timed out"))
    assert site.timeout.limit_s == DEFAULT_S


def test_late_tasks_that_may_take_longer_are_named_once(
    app: Umbel, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(app)
    site.timeout.begin(site.consumer)
    site.timeout.begin(site.consumer)
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    text = record.getMessage()
    assert "late (no time limit), late.long (up to 7200 s)" in text
    assert "late.limited" not in text
    assert "early" not in text
    assert "its default is assumed" in text


def test_nobody_is_warned_where_every_task_ends_in_time(
    app: Umbel, caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.broker_consumer_timeout = 7200
    site = Site(app, time_limit_s=300)
    site.timeout.begin(site.consumer)
    assert not caplog.records


@pytest.mark.parametrize(("kind", "setting"), [("redis", None), ("memory", None), ("amqp", 0)])
def test_nothing_is_done_where_there_is_no_limit(
    app: Umbel, caplog: pytest.LogCaptureFixture, kind: str, setting: Any
) -> None:
    app.conf.broker_consumer_timeout = setting
    site = Site(app, kind)
    site.timeout.begin(site.consumer)
    site.timeout.end()
    assert site.timer.every_s is None
    assert not caplog.records


def test_what_waits_goes_back_before_the_limit_and_not_long_before(app: Umbel) -> None:
    site = Site(app)
    site.timeout.begin(site.consumer)
    every_s = site.timer.every_s
    assert every_s == LOOK_MAX_S
    first = site.hold(1)
    assert not site.look(0)
    second = site.hold(2)
    assert not site.look(every_s)
    due = DEFAULT_S * RETURN_AT
    assert not site.look(due - 1)
    assert site.look(due) == [first]
    assert site.look(due + every_s) == [second]
    assert not site.look(DEFAULT_S)


def test_deliveries_of_another_channel_and_settled_ones_are_not_touched(app: Umbel) -> None:
    site = Site(app)
    site.timeout.begin(site.consumer)
    site.hold(1).settled = True
    site.hold(2).message.channel = object()
    kept = site.hold(3)
    site.look(0)
    assert site.look(DEFAULT_S) == [kept]


def test_tags_begin_anew_with_a_channel(app: Umbel) -> None:
    site = Site(app)
    site.timeout.begin(site.consumer)
    site.hold(1000)
    site.look(0)
    site.timeout.end()
    assert site.timer.cancelled
    site.waiting.clear()
    site.timeout.begin(site.consumer)
    site.hold(1)
    assert not site.look(DEFAULT_S)
