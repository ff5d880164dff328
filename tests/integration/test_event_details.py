"""What events say beyond Celery's, on real brokers: queue, group, chord, redelivery, cost, load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ears import Ears
from tests.sites import APP, QUEUE, Site
from umbel import chord
from umbel.wire.event_fields import TASK_DETAILS, WORKER_DETAILS

Event = dict[str, Any]
OWN = TASK_DETAILS.keys() | WORKER_DETAILS.keys()


@pytest.fixture
def ears(site: Site) -> Iterator[Ears]:
    with Ears(site.broker_url) as made:
        yield made


@pytest.mark.parametrize(
    ("pool", "cost"),
    [
        ("prefork", {"cpu_s", "memory_peak_bytes"}),
        ("solo", {"cpu_s", "memory_peak_bytes"}),
        ("threads", {"cpu_s"}),
        ("gevent", set()),
        ("asyncio", set()),
    ],
)
def test_a_task_tells_its_queue_its_size_and_what_it_took(
    ears: Ears, site: Site, pool: str, cost: set[str]
) -> None:
    site.worker(pool, "-E", settings={"worker_code_version": "v7"})
    result = site.send("grind", "a token", 200_000)
    result.get(timeout=60)
    (ended,) = ears.wait_for("task-succeeded", uuid=result.id)
    (received,) = ears.of("task-received", uuid=result.id)
    (started,) = ears.of("task-started", uuid=result.id)
    assert (received["queue"], started["queue"]) == (QUEUE, QUEUE)
    assert 20 < received["payload_bytes"] < 1_000
    assert started["code_version"] == "v7"
    assert received.keys() & OWN == {"queue", "payload_bytes"}
    assert ended.keys() & OWN == cost
    if "cpu_s" in cost:
        assert 0.01 < ended["cpu_s"] < ended["runtime"] + 1
    if "memory_peak_bytes" in cost:
        assert ended["memory_peak_bytes"] > 5_000_000
    failed = site.send("fail", "so sad")
    (ended,) = ears.wait_for("task-failed", uuid=failed.id)
    assert ended.keys() & OWN <= cost  # a short one is not measured


def test_parts_of_a_chord_name_their_group_and_the_task_that_ends_it(
    ears: Ears, site: Site
) -> None:
    site.worker("prefork", "-E")
    add, echo = f"{APP}.add", f"{APP}.echo"
    parts = [site.app.signature(add, (n, n)) for n in range(3)]
    result = chord(parts, app=site.app)(site.app.signature(echo))
    assert result.get(timeout=60) == [0, 2, 4]
    ears.wait_for("task-succeeded", uuid=result.id)
    received = ears.wait_for("task-received", 3, name=add)
    ends = [ears.wait_for("task-succeeded", uuid=event["uuid"])[0] for event in received]
    assert len({event["group_id"] for event in received}) == 1
    assert {event["chord_id"] for event in ends} == {result.id}
    (last,) = ears.of("task-succeeded", uuid=result.id)
    assert "chord_id" not in last


def test_a_message_that_comes_again_says_so(ears: Ears, site: Site) -> None:
    site.worker("prefork", "-E", concurrency=1)
    result = site.send("die_late", "late", 2)
    result.get(timeout=60)
    first, *again = ears.wait_for("task-received", 3, uuid=result.id)
    assert "redelivered" not in first
    assert [event["redelivered"] for event in again] == [True, True]
    if site.broker_url.startswith("redis"):  # a classic queue of RabbitMQ does not count
        assert [event["deliveries"] for event in again] == [1, 2]


def test_heartbeats_tell_the_load_and_with_task_events_what_waits(ears: Ears, site: Site) -> None:
    for number in range(12):
        site.send("wait", f"t{number}")
    options = ("--heartbeat-interval", "0.3", "--prefetch-multiplier", "1")
    name, version = "loaded@test", {"worker_code_version": "v7"}
    site.worker("threads", "-E", "-n", name, *options, settings=version)

    def telling() -> list[Event]:
        beats = ears.of("worker-heartbeat", hostname=name)
        return [beat for beat in beats if "queue_lengths" in beat and beat["active"] == 2]

    ears.wait(telling, "a heartbeat with the lengths of queues")
    beat = telling()[-1]
    assert (beat["concurrency"], beat["code_version"]) == (2, "v7")
    assert 2 <= beat["reserved"] <= 12
    assert beat["queue_lengths"].keys() == {QUEUE}
    assert beat["queue_lengths"][QUEUE] >= 12 - beat["reserved"] - 2
    for number in range(12):
        site.open_gate(f"t{number}")


def test_without_task_events_the_broker_is_not_asked_for_lengths(ears: Ears, site: Site) -> None:
    site.worker("threads", "-n", "quiet@test", "--heartbeat-interval", "0.3")
    beats = ears.wait_for("worker-heartbeat", 8, hostname="quiet@test")  # it would ask after 0.5 s
    assert all("queue_lengths" not in beat and "code_version" not in beat for beat in beats)
    assert all(beat["concurrency"] == 2 for beat in beats)


def test_sent_events_tell_size_and_group(ears: Ears, site: Site) -> None:
    site.app.conf.task_send_sent_event = True
    site.app.send_task(f"{APP}.add", (1, 2), task_id="sized", group_id="g1")
    (sent,) = ears.wait_for("task-sent", uuid="sized")
    assert (sent["group_id"], sent["queue"]) == ("g1", QUEUE)
    assert 20 < sent["payload_bytes"] < 1_000
