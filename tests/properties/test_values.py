"""What is sent comes back equal, or the sender gets an error: never a different value."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import size
from tests.unit.app.pump import pump
from tests.values import ANYTHING, CARRIED, SERIALIZERS, expected, same
from umbel.app.canvas import chain, chord, group
from umbel.app.context import Context
from umbel.app.umbel import Umbel
from umbel.broker.amqp import tables
from umbel.broker.amqp.shapes import FLAGS_AT, Shapes
from umbel.cluster.election_words import Heard, read_elect
from umbel.exceptions import Ignore
from umbel.wire import control, events
from umbel.wire.content import EncodeError, accept_set, decode, encode
from umbel.wire.tasks import TaskHeader
from umbel.worker.execution.jobs import Job, decode_job, encode_job

ALL = accept_set(SERIALIZERS)
every_serializer = pytest.mark.parametrize("serializer", SERIALIZERS)


@every_serializer
@settings(max_examples=size(150, 2000))
@given(data=st.data())
def test_what_a_serializer_carries_comes_back_equal(serializer: str, data: Any) -> None:
    value = data.draw(CARRIED[serializer])
    assert same(decode(*encode(value, serializer), accept=ALL), expected(value, serializer))


@every_serializer
@settings(max_examples=size(300, 5000))
@given(value=ANYTHING)
def test_anything_else_is_refused_by_whoever_writes_it(serializer: str, value: Any) -> None:
    try:
        encoded = encode(value, serializer)
    except EncodeError:
        return
    assert same(decode(*encoded, accept=ALL), expected(value, serializer))


# -- through tasks, without a broker -----------------------------------------------------------


class Failed(Exception):
    """Raised by a task, with the value as its argument."""


@contextmanager
def application(serializer: str) -> Iterator[Umbel]:
    app = Umbel(
        "values",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        set_as_current=False,
        task_serializer=serializer,
        result_serializer=serializer,
        accept_content=[*SERIALIZERS],
        result_extended=True,
        task_default_queue=str(uuid.uuid4()),
    )

    @app.task(name="echo")
    def echo(value: Any, *_: Any) -> Any:
        return value

    @app.task(name="collect")
    def collect(values: Any) -> Any:
        return values

    @app.task(name="fail")
    def fail(value: Any) -> None:
        raise Failed(value, 1)

    @app.task(name="note", bind=True)
    def note(self: Any, value: Any) -> None:
        self.update_state(state="NOTED", meta=value)
        raise Ignore

    @app.task(name="replace", bind=True)
    def replace(self: Any, value: Any) -> None:
        raise self.replace(app.signature("echo", (value,)))

    yield app
    app.close()


def run(app: Umbel) -> None:
    pump(app, app.conf.task_default_queue)


@every_serializer
@settings(max_examples=size(40, 400))
@given(data=st.data())
def test_a_value_goes_through_a_task_as_argument_and_as_result(serializer: str, data: Any) -> None:
    value = data.draw(CARRIED[serializer])
    wanted = expected(value, serializer)
    with application(serializer) as app:
        results = [
            app.send_task("echo", (value,)),
            app.send_task("echo", (), {"value": value}),
            app.send_task("replace", (value,)),
            chain(app.signature("echo", (value,)), app.signature("echo")).apply_async(),
        ]
        linked = app.signature("echo", task_id=str(uuid.uuid4()))
        results.append(app.AsyncResult(linked.options["task_id"]))
        app.send_task("echo", (value,), link=linked)
        noted, failed = app.send_task("note", (value,)), app.send_task("fail", (value,))
        run(app)
        for result in results:
            assert same(result.get(timeout=0), wanted), result.id
        assert (noted.state, same(noted.info, wanted)) == ("NOTED", True)
        assert failed.state == "FAILURE"
        assert same(failed.result.args[0], wanted)
        assert failed.args is not None
        assert same(failed.args[0], wanted)
        assert app.tasks["echo"].apply((value,)).get() is value


@every_serializer
@settings(max_examples=size(20, 200))
@given(data=st.data())
def test_a_value_goes_through_groups_chords_and_maps(serializer: str, data: Any) -> None:
    value = data.draw(CARRIED[serializer])
    wanted = expected(value, serializer)
    with application(serializer) as app:
        pair = group(app.signature("echo", (value,)), app.signature("echo", (value,)), app=app)
        both = pair.apply_async()
        joined = chord(pair.clone(), app.signature("collect"), app=app).apply_async()
        task = app.tasks["echo"]
        mapped = task.map([value, value]).apply_async()
        starred = task.starmap([(value,), (value, 1)]).apply_async()
        chunked = task.chunks([(value,), (value,)], 1).apply_async()
        run(app)
        for result in (both, joined, mapped, starred):
            assert same(result.get(timeout=0), [wanted, wanted]), result
        assert same(chunked.get(timeout=0), [[wanted], [wanted]])


# -- other ways --------------------------------------------------------------------------------


@settings(max_examples=size(60, 600))
@given(CARRIED["json"])
def test_a_value_goes_through_commands_and_their_replies(value: Any) -> None:
    request = control.Request(method="echo", arguments={"value": value})
    written = control.write_request(request)
    read = control.read_request(
        written.body, written.content_type, written.content_encoding, written.headers, accept=ALL
    )
    assert same(read.arguments, expected({"value": value}, "json"))
    reply = control.write_reply("w@here", value, ticket="t")
    answer = control.read_reply(
        reply.body, reply.content_type, reply.content_encoding, reply.headers, accept=ALL
    )
    assert same(answer.value, expected(value, "json"))


@settings(max_examples=size(60, 600))
@given(CARRIED["json"])
def test_the_action_of_an_election_goes_through_the_candidates_events(value: Any) -> None:
    event = {
        "type": "worker-elect", "hostname": "w@here", "timestamp": 1.0, "clock": 1, "pid": 1,
        "id": "e", "topic": "note", "action": value, "cver": 1,
    }  # fmt: skip
    reading = events.read(
        events.encode(event), events.CONTENT_TYPE, events.CONTENT_ENCODING, accept=ALL
    )
    (read,) = reading.events
    assert same(read["action"], expected(value, "json"))
    heard = read_elect(read)
    assert isinstance(heard, Heard)


@settings(max_examples=size(60, 600))
@given(CARRIED["json"])
def test_headers_and_stamps_reach_another_process_as_they_came(value: Any) -> None:
    header = TaskHeader(task="t", id="i", stamps={"stamp": value}, stamped_headers=["stamp"])
    job = Job("i", "t", {"own": value}, b"", "application/json", "utf-8", header=header)
    there = decode_job(encode_job(job))
    assert there.header is not None
    assert there.header.stamps is not None
    assert same(there.headers["own"], expected(value, "json"))
    assert same(there.header.stamps["stamp"], expected(value, "json"))


def test_an_object_with_a_method_as_tuple_is_a_value_like_any_other() -> None:
    class Money:
        def as_tuple(self) -> tuple[int, ...]:
            return (1, 2)

        def __json__(self) -> dict[str, int]:
            return {"cents": 12}

    with application("json") as app:
        app.backend.store("t", Money(), "SUCCESS", request=Context(id="t"))
        assert app.AsyncResult("t").get(timeout=0) == {"cents": 12}


@settings(max_examples=size(100, 1000))
@given(st.dictionaries(st.text(max_size=20), ANYTHING, max_size=3))
def test_headers_go_through_rabbitmq_as_they_are_or_are_refused(headers: dict[str, Any]) -> None:
    try:
        tables.check_headers(headers)
    except EncodeError:
        return
    written = tables.properties({"application_headers": headers})
    read = Shapes().read(bytes(FLAGS_AT) + written)["application_headers"]
    assert read.keys() == headers.keys()
    for name, value in headers.items():
        assert read[name] == expected(value, "amqp") or same(read[name], expected(value, "amqp"))
