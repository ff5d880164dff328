"""For all messages: read back as sent. For all rubbish: a refusal that names a reason."""

from __future__ import annotations

import json
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.messages import written
from umbel import Umbel
from umbel.app.results.codec import Codec
from umbel.exceptions import SecurityError
from umbel.wire.content import accept_set, dumps_json
from umbel.wire.failures import decode_failure, encode_failure
from umbel.wire.limits import Refusal
from umbel.wire.outgoing import write_task_v1
from umbel.wire.signatures import check_signature, signature_dict
from umbel.wire.tasks import (
    HEADER_FIELDS,
    read_body,
    read_header,
    read_v1,
    user_headers,
)

ACCEPT = accept_set(["json", "msgpack", "yaml"])
CODEC = Codec(Umbel("codec", broker="memory://", set_as_current=False))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = texts.filter(bool)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["task", "id", "args", "kwargs", "options", "subtask_type", "tasks"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=10,
)
signatures = st.builds(
    signature_dict, names, st.lists(values, max_size=2), st.dictionaries(texts, values, max_size=2)
)
maybe = st.none()


@settings(max_examples=60)
@given(
    name=names,
    id=names,
    args=st.lists(values, max_size=4),
    kwargs=st.dictionaries(texts, values, max_size=4),
    retries=st.integers(0, 2**53 - 1),
    time_limit=maybe | st.integers(0, 10**6) | st.floats(0, 10**6),
    group_id=maybe | names,
    callbacks=maybe | st.lists(signatures, max_size=2),
    chain=maybe | st.lists(signatures, max_size=2),
    chord=maybe | signatures,
    serializer=st.sampled_from(["json", "msgpack"]),
    compression=st.sampled_from([None, "gzip", "brotli"]),
    headers=st.dictionaries(texts.filter(lambda name: not name.startswith("x-")), values),
)
def test_a_task_is_read_as_it_was_sent(**call):
    sent = written(**call)
    header = read_header(json.loads(json.dumps(sent.headers)))
    assert (header.task, header.id, header.group) == (call["name"], call["id"], call["group_id"])
    assert header.retries == call["retries"]
    assert header.timelimit == (call["time_limit"], None)
    own = {k: v for k, v in call["headers"].items() if k not in HEADER_FIELDS | {"redelivered"}}
    assert user_headers(sent.headers) == own
    body = read_body(
        sent.body,
        sent.content_type,
        sent.content_encoding,
        compression=header.compression,
        accept=ACCEPT,
    )
    assert (body.args, body.kwargs) == (call["args"], call["kwargs"])
    assert (body.callbacks, body.chain, body.chord, body.errbacks) == (
        call["callbacks"],
        call["chain"],
        call["chord"],
        None,
    )
    assert body.hybrid is None


@settings(max_examples=60)
@given(names, names, st.lists(values, max_size=3), st.dictionaries(texts, values, max_size=3))
def test_a_task_of_protocol_1_is_read_as_it_was_sent(name, task_id, args, kwargs):
    sent = write_task_v1(name=name, id=task_id, args=args, kwargs=kwargs)
    header, body = read_v1(json.loads(sent.body))
    assert (header.task, header.id) == (name, task_id)
    assert (body.args, body.kwargs) == (args, kwargs)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(sorted(HEADER_FIELDS)) | st.text(max_size=3), anything))
def test_no_headers_make_reading_raise_anything_but_a_refusal(headers):
    with suppress(Refusal):
        header = read_header(headers)
        assert isinstance(header.retries, int)
        header.id.encode("utf-8")
    user_headers(headers)


@settings(max_examples=200)
@given(anything)
def test_no_decoded_value_makes_reading_raise_anything_but_a_refusal(value):
    for read in (read_v1, check_signature):
        with suppress(Refusal):
            read(value)
    with suppress(Refusal):
        read_v1({"task": "a", "id": "b", "args": value, "callbacks": value, "chord": value})


@settings(max_examples=200)
@given(st.binary(max_size=50))
def test_no_stored_bytes_make_reading_raise_anything(data):
    for found in (data, b"\0celery-compressed\0" + data):
        assert CODEC.read(found, "t")["task_id"] == "t"
        assert len(CODEC.read_part(found)) == 3


@given(names, values)
def test_results_survive_storage(task_id, result):
    found = CODEC.read(CODEC.stored(task_id, result, "SUCCESS", None, None), task_id)
    assert (found["task_id"], found["status"], found["result"]) == (task_id, "SUCCESS", result)
    part = CODEC.part(task_id, "SUCCESS", result)
    assert CODEC.read_part(part) == (task_id, "SUCCESS", result)


@given(
    st.sampled_from([ValueError, KeyError, RuntimeError, SecurityError]),
    st.lists(values, max_size=3),
)
def test_a_failure_comes_back_with_its_class_and_arguments(kind, args):
    found = decode_failure(json.loads(dumps_json(encode_failure(kind(*args)))))
    assert type(found) is kind
    assert list(found.args) == args


@settings(max_examples=200)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "exc_type": anything | st.sampled_from(["ValueError", "system", "path.join", "a.b"]),
            "exc_module": anything | st.sampled_from(["builtins", "os", "nowhere"]),
            "exc_message": anything,
        },
    )
    | anything
)
def test_no_stored_failure_makes_reading_raise_anything_but_a_security_error(data):
    try:
        found = decode_failure(data)
    except SecurityError:
        return
    assert isinstance(found, Exception)
    str(found), repr(found)
