"""What is prepared once says the same as what is prepared for each call; so do our envelopes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Connection
from kombu.utils.json import dumps, loads

from umbel.app.calls import prepare
from umbel.app.umbel import Umbel
from umbel.broker.tasks.batches import Parcel
from umbel.broker.tasks.envelopes import envelope
from umbel.wire.outgoing import Letterhead

texts = st.text(max_size=12)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=8)
    | st.datetimes()
    | st.uuids()
    | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(texts, values, max_size=4)
limits = st.none() | st.integers(1, 9) | st.floats(1, 9)
OPTIONS = {
    "queue": st.sampled_from(["celery", "video", "fresh"]),
    "routing_key": st.sampled_from(["celery", "video.mp4"]),
    "priority": st.integers(0, 12) | st.none(),
    "serializer": st.sampled_from(["json", "msgpack", "yaml"]),
    "compression": st.sampled_from(["gzip", None]),
    "delivery_mode": st.sampled_from([1, 2, "transient", None]),
    "expires": st.sampled_from([60, 90.5, "2090-01-02T03:04:05+00:00"]),
    "countdown": st.sampled_from([0, 30]),
    "time_limit": limits,
    "soft_time_limit": limits,
    "shadow": texts | st.none(),
    "ignore_result": st.booleans() | st.none(),
    "reply_to": texts,
    "root_id": texts,
    "parent_id": texts,
    "group_id": texts,
    "group_index": st.integers(0, 9),
    "retries": st.integers(0, 9),
    "headers": st.dictionaries(texts | st.sampled_from(["id", "task", "eta"]), texts, max_size=3),
    "argsrepr": texts,
    "chain": st.just([{"task": "t", "args": [], "kwargs": {}, "options": {}}]),
    "stamped_headers": st.just(["colour"]),
    "colour": st.just("blue"),
}


def made() -> Umbel:
    app = Umbel(
        "outgoing",
        broker="memory://",
        backend="disabled://",
        set_as_current=False,
        task_routes={"routed": {"queue": "video", "priority": 3, "shadow": "r", "countdown": 5}},
    )

    @app.task(name="plain")
    def plain(*args: Any, **kwargs: Any) -> None:
        """Is never run."""

    @app.task(name="own", queue="video", priority=4, expires=500, time_limit=60, redact=["x"])
    def own(x: Any = 0, *more: Any) -> None:
        """Is never run."""

    return app


@pytest.fixture(scope="module")
def warm() -> Iterator[Umbel]:
    app = made()
    yield app
    app.close()


def said(app: Umbel, name: str, args: Any, options: dict[str, Any]) -> Any:
    """A message without what differs from one call to the next."""
    parcel = prepare(app, name, args, {}, options, app.tasks.get(name)).message
    headers, properties = dict(parcel.headers), dict(parcel.properties)
    for name_, told in (("umbel_clock", int), ("umbel_sent", int), ("origin", str)):
        assert isinstance(headers.pop(name_), told)
    for moment in ("eta", "expires"):
        headers[moment] = headers[moment] and headers[moment][:4]
    if not options.get("reply_to"):
        properties.pop("reply_to")  # that of the application
    lifetime = properties.pop("expiration", None)
    rounded = None if lifetime is None else round(int(lifetime) / 60_000)
    return headers, properties, rounded, parcel._replace(own={}, properties={}, letterhead=None)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["plain", "own", "routed", "unknown"]),
    st.lists(st.integers(-(2**63), 2**64 - 1) | texts, max_size=3),  # all that msgpack can say
    st.fixed_dictionaries({"task_id": st.just("i")}, optional=OPTIONS),
)
def test_a_call_that_finds_its_form_says_what_the_first_of_its_kind_would(
    warm: Umbel, name: str, args: list[Any], options: dict[str, Any]
) -> None:
    cold = made()
    expected = said(cold, name, args, options)
    cold.close()
    # Others of the same kind, with other options of their own, come before.
    prepare(warm, name, args, {}, {**options, "headers": {"x": "y"}}, warm.tasks.get(name))
    assert said(warm, name, args, options) == expected
    assert said(warm, name, args, options) == expected


def same(one: Any, other: Any) -> bool:
    """Equality that tells 1 from True and from 1.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return bool(one == other) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=50),
    tables,
    tables,
    st.fixed_dictionaries(
        {"correlation_id": texts, "delivery_mode": st.sampled_from([1, 2])},
        optional={
            "reply_to": texts,
            "priority": st.integers(0, 255),
            "expiration": st.integers(0, 10**9).map(str),
            "app_id": texts,
        },
    ),
    texts,
)
def test_kombu_reads_from_our_envelope_what_it_would_have_written(
    body: bytes, common: Any, own: Any, properties: Any, queue: str
) -> None:
    common = {key: value for key, value in common.items() if key not in own}
    parcel = Parcel(body, own, properties, "a/b", "utf-8", "", queue, Letterhead(common))
    with Connection("memory://") as connection:
        channel = connection.channel()
        rest = dict(properties)
        priority = rest.pop("priority", None)
        expected = channel.prepare_message(body, priority, "a/b", "utf-8", parcel.headers, rest)
        channel._inplace_augment_message(expected, "", queue)
    for _ in range(2):  # the second time what was encoded of the letterhead is used again
        found, written = loads(envelope(parcel)), loads(dumps(expected))
        assert len(found["properties"].pop("delivery_tag")) == 36
        written["properties"].pop("delivery_tag")
        assert same(found, written), json.dumps([str(found), str(written)])
