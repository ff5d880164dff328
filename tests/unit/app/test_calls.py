"""From the options of a call to the message: every option, its default, and its refusal."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests.unit.app.pump import messages, pump, run
from umbel.app.calls import Call, prepare
from umbel.app.canvas import chain, chord, group
from umbel.app.context import Context, Frame, current_frame
from umbel.app.publish import RetryPolicy
from umbel.app.umbel import Umbel


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel(
        "calls",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
        set_as_current=False,
    )

    @made.task(name="add")
    def add(x: Any, y: Any = 0) -> Any:
        return x + y

    yield made
    made.close()


def call(app: Umbel, name: str = "add", args: Any = (1, 2), **options: Any) -> Call:
    return prepare(app, name, args, {}, options, app.tasks.get(name))


def headers(app: Umbel, **options: Any) -> dict[str, Any]:
    return call(app, **options).message.headers


def properties(app: Umbel, **options: Any) -> dict[str, Any]:
    return call(app, **options).message.properties


def embed(app: Umbel, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(app, **options).message.body)[2]
    return found


def taken(app: Umbel) -> list[Any]:
    return messages(app, app.conf.task_default_queue)


# -- the plain message ---------------------------------------------------------------------


def test_a_plain_call_has_every_header_that_peers_expect(app: Umbel) -> None:
    made = call(app, task_id="the-id")
    headers = made.message.headers
    assert time.time() * 1000 - headers.pop("umbel_sent") < 60_000
    assert headers == {
        "lang": "py", "task": "add", "id": "the-id", "shadow": None, "eta": None, "expires": None,
        "group": None, "group_index": None, "retries": 0, "timelimit": [None, None],
        "root_id": "the-id", "parent_id": None, "argsrepr": "(1, 2)", "kwargsrepr": "{}",
        "origin": f"gen{os.getpid()}@{socket.gethostname()}", "ignore_result": None,
        "replaced_task_nesting": 0, "stamped_headers": None, "stamps": {}, "umbel_clock": 1,
    }  # fmt: skip
    assert made.message.properties == {
        "correlation_id": "the-id", "reply_to": app.reply_to, "delivery_mode": 2, "priority": 0,
    }  # fmt: skip
    assert json.loads(made.message.body) == [
        [1, 2], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None},
    ]  # fmt: skip


def test_every_call_gets_an_id_of_its_own(app: Umbel) -> None:
    assert call(app).id != call(app).id


def test_a_task_id_may_be_any_text_or_a_uuid_and_nothing_else(app: Umbel) -> None:
    given = uuid.uuid4()
    assert headers(app, task_id="order 7/ä")["id"] == "order 7/ä"
    made = call(app, task_id=given)
    assert made.id == made.message.headers["id"] == str(given)
    with pytest.raises(TypeError, match="task_id=7 of add: give text"):
        call(app, task_id=7)


def test_arguments_must_be_a_list_and_a_mapping(app: Umbel) -> None:
    with pytest.raises(TypeError, match="args of task 'add' must be a list or tuple"):
        call(app, args="ab")
    with pytest.raises(TypeError, match="kwargs of task 'add' must be a mapping"):
        prepare(app, "add", (), [("x", 1)], {}, None)


def test_arguments_are_checked_before_anything_is_sent(app: Umbel) -> None:
    with pytest.raises(TypeError, match=r"add\(x: 'Any', y: 'Any' = 0\).*: missing a required"):
        app.tasks["add"].delay()
    with pytest.raises(TypeError, match="too many positional arguments"):
        app.tasks["add"].apply_async((1, 2, 3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        app.tasks["add"].apply_async((1,), {"z": 3})
    assert taken(app) == []


def test_arguments_are_not_checked_where_the_task_says_so(app: Umbel) -> None:
    @app.task(name="loose", typing=False)
    def loose(x: int) -> None:
        """Takes one argument."""

    loose.delay()
    app.send_task("add", (1, 2, 3))
    assert [message.headers["task"] for message in taken(app)] == ["loose", "add"]


# -- times ---------------------------------------------------------------------------------


def test_a_countdown_becomes_an_eta(app: Umbel) -> None:
    before = datetime.now(UTC)
    eta = datetime.fromisoformat(headers(app, countdown=30)["eta"])
    assert timedelta(seconds=30) <= eta - before < timedelta(seconds=31)
    assert eta.utcoffset() == timedelta(0)
    assert headers(app, countdown=timedelta(minutes=1))["eta"] is not None


def test_a_countdown_of_nothing_is_no_eta(app: Umbel) -> None:
    assert headers(app, countdown=0)["eta"] is None
    assert headers(app, countdown=0.0)["eta"] is None
    assert headers(app, countdown=None)["eta"] is None


def test_a_countdown_wins_over_an_eta(app: Umbel) -> None:
    made = headers(app, countdown=5, eta=datetime(2050, 1, 1, tzinfo=UTC))
    assert datetime.fromisoformat(made["eta"]).year < 2050


def test_an_eta_keeps_its_zone(app: Umbel) -> None:
    eta = datetime(2050, 5, 1, 12, tzinfo=timezone(timedelta(hours=3)))
    assert headers(app, eta=eta)["eta"] == "2050-05-01T12:00:00+03:00"
    assert headers(app, eta="2050-05-01T12:00:00+03:00")["eta"] == "2050-05-01T12:00:00+03:00"


def test_a_time_without_a_zone_is_read_in_the_applications(app: Umbel) -> None:
    naive = datetime(2050, 7, 1, 12)  # noqa: DTZ001 - the point of the test
    assert headers(app, eta=naive)["eta"] == "2050-07-01T12:00:00+00:00"
    app.conf.timezone = "Europe/Berlin"
    assert headers(app, eta=naive)["eta"] == "2050-07-01T12:00:00+02:00"
    assert headers(app, expires=naive)["expires"] == "2050-07-01T12:00:00+02:00"
    assert headers(app, expires="2050-07-01T12:00:00")["expires"] == "2050-07-01T12:00:00+02:00"


def test_expires_is_a_time_and_a_lifetime_in_milliseconds(app: Umbel) -> None:
    before = datetime.now(UTC)
    made = call(app, expires=90.5).message
    assert made.properties["expiration"] == "90500"
    expires = datetime.fromisoformat(made.headers["expires"])
    assert timedelta(seconds=90.5) <= expires - before < timedelta(seconds=92)
    assert call(app, expires=timedelta(minutes=1)).message.properties["expiration"] == "60000"
    when = datetime.now(ZoneInfo("Asia/Tokyo")) + timedelta(hours=1)
    dated = call(app, expires=when).message
    assert dated.headers["expires"] == when.isoformat()
    assert 3_590_000 < int(dated.properties["expiration"]) <= 3_600_000


def test_what_has_expired_already_has_no_lifetime_left(app: Umbel) -> None:
    made = call(app, expires=datetime(2020, 1, 1, tzinfo=UTC)).message
    assert made.properties["expiration"] == "0"
    assert made.headers["expires"] == "2020-01-01T00:00:00+00:00"


def test_a_lifetime_too_long_for_the_broker_is_left_to_the_worker(app: Umbel) -> None:
    # RabbitMQ refuses more milliseconds than 32 bits hold, and closes the channel over it.
    made = call(app, expires=timedelta(days=60)).message
    assert made.headers["expires"] is not None
    assert "expiration" not in made.properties
    assert "expiration" in call(app, expires=timedelta(days=49)).message.properties


@pytest.mark.parametrize("option", ["countdown", "expires"])
@pytest.mark.parametrize("value", ["5", True, [1], 1 + 2j])
def test_a_delay_that_is_no_number_is_refused(app: Umbel, option: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{option}=.* of add: give"):
        call(app, **{option: value})


@pytest.mark.parametrize("option", ["countdown", "expires"])
@pytest.mark.parametrize("value", [1e15, float("inf"), float("nan")])
def test_a_delay_beyond_the_calendar_is_refused(app: Umbel, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}=.* of add lies beyond the year 9999"):
        call(app, **{option: value})


def test_an_eta_that_is_no_time_is_refused(app: Umbel) -> None:
    with pytest.raises(TypeError, match="eta=5 of add: give a datetime"):
        call(app, eta=5)
    with pytest.raises(ValueError, match="eta='soon' of add"):
        call(app, eta="soon")
    with pytest.raises(ValueError, match="expires='soon' of add"):
        call(app, expires="soon")


def test_times_are_local_when_utc_is_off(app: Umbel) -> None:
    app.conf.update(enable_utc=False, timezone="Asia/Tokyo")
    assert headers(app, countdown=3)["eta"].endswith("+09:00")


# -- how it is sent ------------------------------------------------------------------------


def test_limits_go_out_hard_one_first(app: Umbel) -> None:
    assert headers(app, time_limit=10, soft_time_limit=5.5)["timelimit"] == [10, 5.5]
    with pytest.raises(TypeError, match="time_limit='10' of add"):
        call(app, time_limit="10")
    with pytest.raises(ValueError, match="soft_time_limit=-1 of add"):
        call(app, soft_time_limit=-1)


def test_a_priority_is_a_small_whole_number(app: Umbel) -> None:
    assert properties(app, priority=9)["priority"] == 9
    app.conf.task_default_priority = 4
    assert properties(app)["priority"] == 4
    assert properties(app, priority=0)["priority"] == 0
    for wrong in (-1, 256, 1.5, "3", True):
        with pytest.raises(ValueError, match=r"priority=.* of add: give a whole number"):
            call(app, priority=wrong)


@pytest.mark.parametrize(
    ("serializer", "content_type"),
    [("json", "application/json"), ("msgpack", "application/x-msgpack"),
     ("yaml", "application/x-yaml")],
)  # fmt: skip
def test_the_serializer_is_the_callers_or_the_settings(
    app: Umbel, serializer: str, content_type: str
) -> None:
    assert call(app, serializer=serializer).message.content_type == content_type
    app.conf.task_serializer = serializer
    assert call(app).message.content_type == content_type


def test_pickle_is_refused(app: Umbel) -> None:
    with pytest.raises(Exception, match="pickle"):
        call(app, serializer="pickle")


def test_compression_is_named_in_a_header(app: Umbel) -> None:
    made = call(app, args=("x" * 1000, 1), compression="gzip").message
    assert made.headers["compression"] == "application/x-gzip"
    assert made.body[:2] == b"\x78\x9c"
    app.conf.task_compression = "bzip2"
    assert headers(app)["compression"] == "application/x-bz2"


def test_the_callers_headers_stand_beside_the_protocols(app: Umbel) -> None:
    made = headers(app, headers={"tenant": "blue", "task": "stolen"}, task_id="i")
    assert made["tenant"] == "blue"
    assert made["task"] == "add"


def test_representations_and_shadow_may_be_given(app: Umbel) -> None:
    made = headers(app, argsrepr="(***)", kwargsrepr="{***}", shadow="add for blue")
    assert (made["argsrepr"], made["kwargsrepr"]) == ("(***)", "{***}")
    assert made["shadow"] == "add for blue"


def test_links_travel_as_a_list(app: Umbel) -> None:
    add = app.tasks["add"]
    made = embed(app, link=add.s(5), link_error=[add.si(1), add.si(2)])
    assert [one["args"] for one in made["callbacks"]] == [[5]]
    assert [one["args"] for one in made["errbacks"]] == [[1], [2]]
    assert [one["immutable"] for one in made["errbacks"]] == [True, True]
    assert embed(app, link=[])["callbacks"] is None


def test_stamps_are_named_and_carried(app: Umbel) -> None:
    made = headers(app, stamped_headers=["colour"], colour="blue")
    assert made["stamped_headers"] == ["colour"]
    assert made["stamps"] == {"colour": "blue"}


def test_whether_the_result_is_kept_is_the_callers_then_the_tasks_word(app: Umbel) -> None:
    @app.task(name="silent", ignore_result=True)
    def silent() -> None:
        """Keeps nothing."""

    silent.delay()
    silent.apply_async(ignore_result=False)
    app.send_many([silent.s(), silent.s().set(ignore_result=False), app.tasks["add"].s(1)])
    app.tasks["add"].delay(1)
    # By name: the worker's task decides.
    app.send_task("silent")
    assert [message.headers["ignore_result"] for message in taken(app)] == [
        True, False, True, False, False, False, None,
    ]  # fmt: skip
    assert prepare(app, "silent", (), {}, {}, silent).ignore_result
    assert not call(app).ignore_result
    assert call(app, ignore_result=True).ignore_result


def test_nobody_waits_for_a_result_that_is_not_kept(app: Umbel) -> None:
    quiet = app.task(name="quiet", ignore_result=True)(lambda: 1)
    assert quiet.delay().get(timeout=1) is None
    assert app.tasks["add"].apply_async((1,), ignore_result=True).get(timeout=1) is None
    assert asyncio.run(awaited(quiet.delay())) is None
    assert not quiet.apply_async(ignore_result=False).ignored


async def awaited(result: Any) -> Any:
    async with asyncio.timeout(1):
        return await result


def test_a_misspelt_option_is_refused_and_a_foreign_one_is_not(app: Umbel) -> None:
    with pytest.raises(TypeError, match="unknown option coutdown=3: did you mean 'countdown'"):
        call(app, coutdown=3)
    with pytest.raises(TypeError, match="did you mean 'routing_key'"):
        call(app, routingkey="x")
    assert call(app, on_behalf_of="peer").id


def test_a_tasks_attributes_are_defaults_of_its_calls(app: Umbel) -> None:
    @app.task(
        name="own", queue="own", priority=6, serializer="msgpack", compression="zlib", expires=60,
        time_limit=20, soft_time_limit=10, delivery_mode=1,
    )  # fmt: skip
    def own() -> None:
        """Does nothing."""

    made = prepare(app, "own", (), {}, {}, own)
    assert made.destination.routing_key == "own"
    assert made.message.properties["priority"] == 6
    assert made.message.properties["expiration"] == "60000"
    assert made.message.properties["delivery_mode"] == 1
    assert made.message.content_type == "application/x-msgpack"
    assert made.message.headers["compression"] == "application/x-gzip"
    assert made.message.headers["timelimit"] == [20, 10]
    said = prepare(app, "own", (), {}, {"priority": 0, "serializer": "json", "time_limit": 5}, own)
    assert said.message.properties["priority"] == 0
    assert said.message.content_type == "application/json"
    assert said.message.headers["timelimit"] == [5, 10]


def test_a_call_by_name_takes_the_attributes_of_a_task_that_is_known(app: Umbel) -> None:
    @app.task(name="known", priority=8)
    def known() -> None:
        """Does nothing."""

    app.send_task("known")
    app.send_task("unknown", ("any", "arguments"), {"k": 1}, priority=2)
    assert [m.properties["priority"] for m in taken(app)] == [8, 2]


def test_the_retry_policy_is_the_settings_with_the_callers_changes(app: Umbel) -> None:
    app.conf.task_publish_retry_policy = {"max_retries": 7, "interval_start": 1}

    def policy(**options: Any) -> RetryPolicy:
        return call(app, **options).policy or app.forms.policy()

    changed = policy(retry_policy={"interval_start": 2})
    assert (changed.max_retries, changed.start_s) == (7, 2)
    assert policy().start_s == 1
    assert policy(retry=False).max_retries == 0
    app.conf.task_publish_retry_policy["interval_start"] = 3  # altered in place
    assert policy().start_s == 3
    app.conf.task_publish_retry = False
    assert policy().max_retries == 0
    assert policy(retry=True).max_retries == 7


# -- calls made inside tasks ---------------------------------------------------------------


def test_a_call_inside_a_task_names_its_parent_and_root(app: Umbel) -> None:
    @app.task(name="outer")
    def outer() -> None:
        app.tasks["add"].delay(1, 1)
        app.send_task("unknown")
        app.tasks["add"].apply_async((1,), root_id="r", parent_id="p")

    outer.apply_async(task_id="o", root_id="top")
    run(app, taken(app)[0])
    found = [(m.headers["root_id"], m.headers["parent_id"]) for m in taken(app)]
    assert found == [("top", "o"), ("top", "o"), ("r", "p")]


def test_a_task_called_as_a_function_inside_another_does_not_hide_it(app: Umbel) -> None:
    @app.task(name="inner")
    def inner() -> str:
        return app.tasks["add"].delay(1, 1).id

    @app.task(name="outer")
    def outer() -> str:
        return inner()

    result = outer.apply_async(task_id="o")
    pump(app, app.conf.task_default_queue)
    sent = result.get(timeout=5)
    meta = app.backend.get_meta("o")
    assert [child.id for child in result.children] == [sent], meta
    assert app.backend.get_meta(sent)["parent_id"] == "o"


def test_the_priority_of_a_task_is_inherited_where_the_setting_says_so(app: Umbel) -> None:
    request = Context(id="o", called_directly=False, delivery_info={"priority": 5})
    token = current_frame.set(Frame(app.tasks["add"], request, None))
    try:
        assert properties(app)["priority"] == 0
        app.conf.task_inherit_parent_priority = True
        assert properties(app)["priority"] == 5
        assert properties(app, priority=1)["priority"] == 1
    finally:
        current_frame.reset(token)


# -- protocol 1 ----------------------------------------------------------------------------


def test_protocol_1_has_everything_in_its_body(app: Umbel) -> None:
    app.conf.task_protocol = 1
    made = call(app, task_id="i", countdown=5, headers={"own": 1}).message
    body = json.loads(made.body)
    assert made.headers == {"own": 1}
    assert (body["task"], body["id"], body["args"], body["utc"]) == ("add", "i", [1, 2], True)
    assert body["eta"] is not None


def test_protocol_1_carries_a_chain_as_callbacks(app: Umbel) -> None:
    app.conf.task_protocol = 1
    add = app.tasks["add"]
    result = chain(add.s(1, 1), add.s(10), add.s(100)).apply_async()
    body = json.loads(taken(app)[0].body)
    second = body["callbacks"][0]
    third = second["options"]["link"][0]
    assert (second["args"], third["args"]) == ([10], [100])
    assert third["options"]["task_id"] == result.id


# -- many at a time ------------------------------------------------------------------------


def test_many_calls_go_out_in_order_and_give_results_in_order(app: Umbel) -> None:
    add = app.tasks["add"]
    results = app.send_many(add.s(n, n).set(task_id=f"t{n}") for n in range(20))
    assert [result.id for result in results] == [f"t{n}" for n in range(20)]
    assert [message.headers["id"] for message in taken(app)] == [f"t{n}" for n in range(20)]
    assert app.send_many([]) == []


@pytest.mark.parametrize("bad", [{"args": (object(),)}, {"args": (1, 2, 3)}, {"priority": 999}])
def test_one_bad_call_sends_nothing_of_the_batch(app: Umbel, bad: dict[str, Any]) -> None:
    add = app.tasks["add"]
    wrong = add.signature(**{"args": (1,), **bad})
    with pytest.raises((TypeError, ValueError)):
        app.send_many([add.s(1), chain(add.s(1), add.s(2)), group([add.s(3)]), wrong])
    assert taken(app) == []


def test_compositions_take_their_place_among_many(app: Umbel) -> None:
    add = app.tasks["add"]

    @app.task(name="total")
    def total(numbers: Any) -> Any:
        return sum(numbers)

    made = app.send_many(
        [
            add.s(1, 1),
            chain(add.s(1, 1), add.s(5)),
            group([add.s(1, 2), add.s(3, 4)]),
            chord([add.s(1, 1), add.s(2, 2)], total.s()),
            add.s(9, 9),
        ]
    )
    pump(app, app.conf.task_default_queue)
    assert [one.get(timeout=5) for one in made] == [2, 7, [3, 7], 6, 18]


def test_many_calls_do_not_change_the_signatures(app: Umbel) -> None:
    add = app.tasks["add"]
    sigs = [add.s(1), chain(add.s(1), add.s(2))]
    before = json.dumps(sigs)
    first, second = app.send_many(sigs), app.send_many(sigs)
    assert json.dumps(sigs) == before
    assert {one.id for one in first}.isdisjoint(one.id for one in second)


def test_many_calls_may_be_plain_dictionaries_and_tasks_unknown_here(app: Umbel) -> None:
    sigs = [dict(app.tasks["add"].s(1)), dict(app.signature("far.away", (2,)))]
    app.send_many(sigs)
    assert [message.headers["task"] for message in taken(app)] == ["add", "far.away"]


def test_many_calls_inside_a_task_are_its_children(app: Umbel) -> None:
    add = app.tasks["add"]

    @app.task(name="outer")
    def outer() -> list[str]:
        sent = app.send_many([add.s(1, 1), chain(add.s(1, 1), add.s(1)), add.s(2, 2)])
        return [one.id for one in sent]

    result = outer.delay()
    pump(app, app.conf.task_default_queue)
    ids = result.get(timeout=5)
    children = [child.id for child in result.children]
    assert len(children) == 3
    assert (children[0], children[2]) == (ids[0], ids[2])


def test_many_calls_run_here_when_everything_runs_inline(app: Umbel) -> None:
    app.conf.task_always_eager = True
    add = app.tasks["add"]
    results = app.send_many([add.s(1, 2), chain(add.s(1, 1), add.s(1))])
    assert [one.get() for one in results] == [3, 3]
    assert taken(app) == []
