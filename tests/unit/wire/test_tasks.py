"""Task messages: ours are a peer's, a peer's are read, and all others are refused by field."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from celery import Celery
from kombu import serialization

from tests.messages import written
from umbel.wire.compression import compress
from umbel.wire.content import accept_set
from umbel.wire.limits import Limits, Refusal
from umbel.wire.outgoing import write_task_v1
from umbel.wire.signatures import signature_dict
from umbel.wire.tasks import (
    HEADER_FIELDS,
    hybrid_header,
    read_body,
    read_header,
    read_v1,
    user_headers,
)

ACCEPT = accept_set(["json", "msgpack", "yaml"])
JSON = ("application/json", "utf-8")
NO_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
SIG = signature_dict("w.add", [1])

peer = Celery("peer", broker="memory://", set_as_current=False)

CALLS = [
    {"args": (), "kwargs": {}},
    {"args": (2, "x", None), "kwargs": {"y": 3}},
    {
        "args": ([[[[1]]]],),
        "kwargs": {"k": "v"},
        "eta": "2026-11-15T19:38:48.413148+00:00",
        "expires": "2026-11-15T20:38:48+00:00",
        "group_id": "g",
        "group_index": 3,
        "retries": 2,
        "time_limit": 10,
        "soft_time_limit": 2.5,
        "root_id": "r",
        "parent_id": "p",
        "shadow": "s",
        "reply_to": "q",
        "ignore_result": True,
        "replaced_task_nesting": 1,
        "callbacks": [SIG],
        "errbacks": [SIG],
        "chain": [SIG, SIG],
        "chord": SIG,
    },
]


def refusal_of(call, *args, **kwargs) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize("call", CALLS, ids=range(3))
def test_we_write_the_message_that_a_peer_writes(call):
    theirs = peer.amqp.as_task_v2("t1", "w.add", origin="gen1@h", **call)
    ours = written("w.add", "t1", origin="gen1@h", **{"ignore_result": False, **call})
    assert ours.headers == json.loads(json.dumps(theirs.headers))
    assert theirs.properties.items() <= ours.properties.items()
    assert json.loads(ours.body) == json.loads(json.dumps(theirs.body))
    assert (ours.content_type, ours.content_encoding) == JSON


@pytest.mark.parametrize("call", CALLS, ids=range(3))
def test_we_read_the_message_that_a_peer_writes(call):
    theirs = peer.amqp.as_task_v2("t1", "w.add", **call)
    content_type, encoding, body = serialization.dumps(theirs.body, "json")
    header = read_header(theirs.headers)
    for name, value in theirs.headers.items():
        found = getattr(header, name)
        assert (list(found) if isinstance(found, tuple) else found) == value
    found = read_body(body, content_type, encoding, accept=ACCEPT)
    assert found.args == list(call["args"])
    assert found.kwargs == call["kwargs"]
    for name in NO_EMBED:
        assert getattr(found, name) == call.get(name)


V1_ONLY = {"ignore_result", "replaced_task_nesting", "chain", "root_id", "parent_id", "shadow"}


@pytest.mark.parametrize("call", CALLS, ids=range(3))
def test_protocol_1_is_written_and_read_as_a_peer_does(call):
    call = {name: value for name, value in call.items() if name not in V1_ONLY}
    theirs = peer.amqp.as_task_v1("t1", "w.add", **call)
    ours = write_task_v1(name="w.add", id="t1", **call)
    assert json.loads(ours.body) == json.loads(json.dumps(theirs.body))
    assert ours.headers == theirs.headers == {}
    header, body = read_v1(json.loads(json.dumps(theirs.body)))
    assert (header.task, header.id) == ("w.add", "t1")
    assert header.group == call.get("group_id")
    assert header.retries == call.get("retries", 0)
    assert header.eta == call.get("eta")
    assert header.timelimit == (call.get("time_limit"), call.get("soft_time_limit"))
    assert body.args == list(call["args"])
    assert body.chain is None
    assert body.callbacks == call.get("callbacks")
    assert header.argsrepr


def test_times_of_protocol_1_without_an_offset_are_utc_unless_it_says_otherwise():
    message = {"task": "w.add", "id": "t1", "eta": "2026-11-15T19:38:48"}
    assert read_v1(message)[0].eta == "2026-11-15T19:38:48+00:00"
    assert read_v1({**message, "utc": True})[0].eta == "2026-11-15T19:38:48+00:00"
    assert read_v1({**message, "utc": False})[0].eta == "2026-11-15T19:38:48"
    assert refusal_of(read_v1, {**message, "eta": "10000-01-01"}).reason == "invalid-task"


def test_taskset_is_the_group_of_protocol_1():
    assert read_v1({"task": "a", "id": "b", "taskset": "g"})[0].group == "g"
    assert read_v1({"task": "a", "id": "b", "taskset": None, "group": "h"})[0].group == "h"


@pytest.mark.parametrize("decoded", [None, 5, "x", [], [[], {}, {}], {}, {"id": "x"}])
def test_what_is_no_task_at_all_is_an_unknown_message(decoded):
    assert refusal_of(read_v1, decoded).reason == "unknown-message"


@pytest.mark.parametrize(
    "broken",
    [{"id": 5}, {"args": {}}, {"args": None}, {"kwargs": []}, {"callbacks": 5}, {"task": None}],
    ids=repr,
)
def test_a_broken_protocol_1_message_is_refused_by_field(broken):
    refusal = refusal_of(read_v1, {"task": "w.add", "id": "t", **broken})
    assert refusal.reason == "invalid-task"
    assert repr(next(iter(broken))) in refusal.text


def test_task_and_id_are_enough():
    header = read_header({"task": "w.add", "id": "t1"})
    assert (header.retries, header.replaced_task_nesting, header.timelimit) == (0, 0, None)


def test_nulls_stand_for_defaults():
    nulls = dict.fromkeys(HEADER_FIELDS - {"task", "id"})
    header = read_header({"task": "w.add", "id": "t1", **nulls})
    assert (header.retries, header.replaced_task_nesting) == (0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 5),
        ("id", None),
        ("id", ""),
        ("id", "\ud800"),
        ("id", b"bytes"),
        ("task", True),
        ("task", ["w.add"]),
        ("task", ""),
        ("task", "\udfff"),
        ("lang", 1),
        ("shadow", 1),
        ("eta", 5),
        ("eta", True),
        ("eta", datetime(2026, 1, 1, tzinfo=UTC)),
        ("expires", 90.5),
        ("group", 7),
        ("group", "\ud800"),
        ("group_index", "1"),
        ("group_index", -1),
        ("group_index", True),
        ("retries", "0"),
        ("retries", 1.0),
        ("retries", True),
        ("retries", -1),
        ("retries", 2**53),
        ("retries", 10**4000),
        ("timelimit", 5),
        ("timelimit", "ab"),
        ("timelimit", []),
        ("timelimit", [1]),
        ("timelimit", [1, 2, 3]),
        ("timelimit", ["1", None]),
        ("timelimit", [True, None]),
        ("timelimit", [-1, None]),
        ("timelimit", [float("nan"), None]),
        ("timelimit", [None, float("inf")]),
        ("timelimit", {"hard": 1, "soft": 2}),
        ("root_id", 5),
        ("root_id", "\ud800"),
        ("parent_id", False),
        ("parent_id", "\ud800"),
        ("argsrepr", []),
        ("kwargsrepr", {}),
        ("origin", 1),
        ("ignore_result", 1),
        ("ignore_result", "true"),
        ("replaced_task_nesting", "x"),
        ("stamped_headers", "abc"),
        ("stamped_headers", [1]),
        ("stamps", []),
        ("stamps", {1: 2}),
        ("compression", 1),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_header_of_the_wrong_type_is_refused_by_name(field, value):
    refusal = refusal_of(read_header, {"task": "w.add", "id": "t1", field: value})
    assert refusal.reason == "invalid-task"
    assert repr(field) in refusal.text
    assert len(refusal.text) < 400
    refusal.text.encode("utf-8")


def test_missing_headers_are_named():
    assert "'id' is missing" in refusal_of(read_header, {"task": "w.add"}).text
    assert "'task' is missing" in refusal_of(read_header, {"id": "t"}).text


@pytest.mark.parametrize("headers", [None, [], "x", 5, {1: 2, "task": "a", "id": "b"}])
def test_headers_that_are_no_mapping_of_text_are_refused(headers):
    assert refusal_of(read_header, headers).reason == "invalid-task"


def test_ids_may_be_any_text():
    header = read_header({"task": "päck.tâche", "id": "☃ 1", "group": "ü"})
    assert header.id == "☃ 1"


def test_the_callers_own_headers_are_told_from_all_others():
    sent = written("w.add", headers={"my": "h", "id": "hijack", "trace": {"a": 1}})
    assert sent.headers["id"] == "t"
    arrived = {
        **sent.headers,
        "redelivered": True,
        "x-death": [{}],
        "x-first-death-queue": "q",
        "x-last-death-reason": "r",
        "x-delivery-count": 1,
        "compression": "application/x-gzip",
    }
    assert user_headers(arrived) == {"my": "h", "trace": {"a": 1}}
    assert user_headers({}) == {}


def test_headers_of_protocol_1_never_make_it_look_like_protocol_2():
    sent = write_task_v1(name="w.add", id="t", headers={"my": "h", "task": "x"})
    assert sent.headers == {"my": "h"}


@pytest.mark.parametrize("method", ["gzip", "bzip2", "lzma", "brotli"])
@pytest.mark.parametrize("serializer", ["json", "msgpack", "yaml"])
def test_a_compressed_task_survives(serializer, method):
    sent = written("w.add", args=[1, "x"], chord=SIG, serializer=serializer, compression=method)
    header = read_header(sent.headers)
    assert header.compression is not None
    body = read_body(
        sent.body,
        sent.content_type,
        sent.content_encoding,
        compression=header.compression,
        accept=ACCEPT,
    )
    assert (body.args, body.chord) == ([1, "x"], SIG)


def test_a_task_that_is_not_compressed_does_not_say_so():
    assert "compression" not in written("w.add").headers


def test_a_short_body_may_be_too_big():
    body = b"[[1234567890],{},{}]"
    assert read_body(body, *JSON, accept=ACCEPT, limits=Limits(body_bytes=20)).args == [1234567890]
    limits = Limits(body_bytes=19)
    assert refusal_of(read_body, body, *JSON, accept=ACCEPT, limits=limits).reason == "too-big"


def test_a_compressed_bomb_is_too_big_and_unaccepted_content_is_not_even_unfolded():
    bomb, method = compress(b" " * 10_000_000, "gzip")
    refusal = refusal_of(
        read_body, bomb, *JSON, compression=method, accept=ACCEPT, limits=Limits(body_bytes=10**6)
    )
    assert refusal.reason == "too-big"
    refusal = refusal_of(
        read_body, bomb, "application/x-yaml", "", compression=method, accept=accept_set(["json"])
    )
    assert refusal.reason == "content-disallowed"


@pytest.mark.parametrize(
    ("decoded", "named"),
    [
        ([[], {}], "[args, kwargs, embed]"),
        ([[], {}, {}, {}], "[args, kwargs, embed]"),
        (None, "[args, kwargs, embed]"),
        ({"no": "args"}, "[args, kwargs, embed]"),
        ([{}, {}, {}], "'args'"),
        (["abc", {}, {}], "'args'"),
        ([None, {}, {}], "'args'"),
        ([[], [], {}], "'kwargs'"),
        ([[], None, {}], "'kwargs'"),
        ([[], {}, []], "'embed'"),
        ([[], {}, {"callbacks": 5}], "'callbacks'"),
        ([[], {}, {"callbacks": ["w.add"]}], "signature"),
        ([[], {}, {"errbacks": [{"task": 5}]}], "'task'"),
        ([[], {}, {"chain": "x"}], "'chain'"),
        ([[], {}, {"chord": [SIG]}], "signature"),
        ({"args": 5}, "'args'"),
    ],
    ids=repr,
)
def test_a_body_of_the_wrong_shape_is_refused_by_name(decoded, named):
    refusal = refusal_of(read_body, json.dumps(decoded), *JSON, accept=ACCEPT)
    assert refusal.reason == "invalid-task"
    assert named in refusal.text


def test_keyword_names_must_be_text():
    body = b"\x93\x90\x81\x01\x02\xc0"  # [[], {1: 2}, None] in msgpack
    refusal = refusal_of(read_body, body, "application/x-msgpack", "binary", accept=ACCEPT)
    assert "'kwargs'" in refusal.text


def test_a_single_callback_counts_as_a_list_and_a_null_embed_as_none():
    body = read_body(json.dumps([[], {}, {"callbacks": SIG}]), *JSON, accept=ACCEPT)
    assert body.callbacks == [SIG]
    assert read_body(b"[[],{},null]", *JSON, accept=ACCEPT).chord is None


def test_a_hybrid_takes_from_its_body_what_its_headers_leave_out():
    decoded = {
        "task": "ignored",
        "id": "ignored",
        "args": [1],
        "kwargs": {"y": 2},
        "retries": 3,
        "eta": "2026-11-15T19:38:48",
        "callbacks": [SIG],
    }
    body = read_body(json.dumps(decoded), *JSON, accept=ACCEPT)
    assert (body.args, body.kwargs, body.callbacks) == ([1], {"y": 2}, [SIG])
    assert body.hybrid is not None
    header = hybrid_header({"task": "w.add", "id": "t1", "my": "h"}, body.hybrid)
    assert (header.task, header.id, header.retries) == ("w.add", "t1", 3)
    assert header.eta == "2026-11-15T19:38:48+00:00"


def test_wrong_arguments_of_the_sender_are_type_errors():
    with pytest.raises(TypeError, match=r"args of task 'w\.add'"):
        written("w.add", args="abc")
    with pytest.raises(TypeError, match=r"kwargs of task 'w\.add'"):
        write_task_v1(name="w.add", id="t", kwargs=[1])  # type: ignore[arg-type]


def test_properties_are_those_of_the_message():
    sent = written("w.add", reply_to="q", priority=5, expires_in_s=90.5)
    assert sent.properties == {
        "correlation_id": "t",
        "reply_to": "q",
        "delivery_mode": 2,
        "priority": 5,
        "expiration": "90500",
    }
    assert "expiration" not in written("w.add").properties


def test_stamps_travel_in_their_two_headers():
    sent = written("w.add", stamped_headers=["b"], stamps={"b": [1]})
    header = read_header(sent.headers)
    assert (header.stamped_headers, header.stamps) == (["b"], {"b": [1]})
