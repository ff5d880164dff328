"""Which messages RabbitMQ keeps for their eta, and under which key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.common import Broadcast

from umbel import Umbel
from umbel.app.routes import Destination
from umbel.broker.tasks import delayed

AMQP = "amqp://guest@127.0.0.1:1//"
QUORUM = {"x-queue-type": "quorum"}


def queues() -> list[Queue]:
    return [
        Queue("jobs", Exchange("topics", type="topic"), "jobs.key", queue_arguments=QUORUM),
        Queue("plain", Exchange("directs", type="direct"), "plain.key", queue_arguments=QUORUM),
        Broadcast("all"),
    ]


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel("a", broker=AMQP, set_as_current=False, task_queues=queues())
    yield made
    made.close()


def sent(app: Umbel, delay_s: float = 5, url: Any = AMQP, **options: Any) -> Destination:
    return app.router.delayed(app.router.destination(options), delay_s, url)


def is_delayed(to: Destination) -> bool:
    return (to.exchange == "celery_delayed_27") is bool(to.delay_kind) is True


def test_the_delay_is_the_front_of_the_key_in_28_bits() -> None:
    assert delayed.route(5, "a.b") == ("celery_delayed_27", "0." * 25 + "1.0.1.a.b")
    assert delayed.route(2**28 - 1, "k") == ("celery_delayed_27", "1." * 28 + "k")


@pytest.mark.parametrize("delay_s", [-1, 0, 0.99, 2**28, 10.0**12])
def test_delays_that_the_ladder_can_not_keep_are_left_to_the_worker(delay_s: float) -> None:
    assert delayed.route(delay_s, "k") is None


def test_a_key_is_needed_to_find_the_way_back() -> None:
    assert delayed.route(5, "") is None


def test_a_topic_exchange_delays(app: Umbel) -> None:
    to = sent(app, queue="jobs")
    assert is_delayed(to)
    assert to.routing_key.endswith(".1.0.1.jobs.key")
    assert to.queue.name == "jobs", "it is declared, and tied to where the delay ends"
    assert is_delayed(sent(app, exchange="topics", routing_key="jobs.key"))


@pytest.mark.parametrize(
    "options",
    [
        {"queue": "plain"},
        {"queue": "all"},
        {"exchange": "directs", "routing_key": "plain.key"},
        {"exchange": "somebody-elses", "routing_key": "x"},  # who knows of what kind it is
        {"exchange": "", "routing_key": "jobs"},
        {"queue": "jobs", "exchange": "elsewhere", "routing_key": "x"},
    ],
    ids=str,
)
def test_what_would_not_find_its_way_is_left_to_the_worker(
    app: Umbel, options: dict[str, Any]
) -> None:
    to = app.router.destination(options)
    assert app.router.delayed(to, 5, AMQP) == to


@pytest.mark.parametrize("exchange", ["celery_delayed_delivery", "celery_delayed_0"])
def test_a_message_that_was_delayed_before_gets_a_new_delay_in_the_place_of_the_old(
    app: Umbel, exchange: str
) -> None:
    first = sent(app, 2, queue="jobs")
    to = sent(app, 5, exchange=exchange, routing_key=first.routing_key)
    assert is_delayed(to)
    assert to.routing_key == "0." * 25 + "1.0.1.jobs.key"


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"task_queues": queues()}, "redis://127.0.0.1:1/0"),
        ({"task_queues": [Queue("jobs", Exchange("topics", type="topic"), "jobs.key")]}, AMQP),
        ({"task_queues": queues(), "worker_detect_quorum_queues": False}, AMQP),
    ],
    ids=["redis", "classic", "switched-off"],
)
def test_only_rabbitmq_with_a_quorum_queue_delays(settings: dict[str, Any], url: str) -> None:
    app = Umbel("a", broker=url, set_as_current=False, **settings)
    to = app.router.destination({"queue": "jobs"})
    assert app.router.delayed(to, 5, url) == to
    app.close()
