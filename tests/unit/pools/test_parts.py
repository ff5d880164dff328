"""The small parts under the pools: names, jobs on the wire between processes, deadlines."""

from __future__ import annotations

import threading
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pools.bench import WAIT_S
from umbel.exceptions import ImproperlyConfigured
from umbel.worker.execution.jobs import (
    Job,
    JobResult,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)
from umbel.worker.execution.pools.base import POOL_NAMES, PoolOptions, pool_class
from umbel.worker.execution.pools.deadlines import Deadlines
from umbel.worker.execution.pools.prefork import frames
from umbel.worker.execution.pools.prefork.frames import BrokenFrame, FrameReader

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
    max_leaves=10,
)


def job_with(headers: dict[str, object]) -> Job:
    return Job("id", "task", headers, b"\0\xff", "t", "e", "x", "key", decoded=[headers])


@given(st.dictionaries(st.text("abc"), plain))
def test_a_job_survives_the_way_to_another_process(headers: dict[str, object]) -> None:
    job = job_with(headers)
    assert decode_job(encode_job(job)) == job


@pytest.mark.parametrize("odd", [10**300, -(10**300), "\ud800", ["\udfff", 2**64]])
def test_values_that_msgpack_lacks_survive_too(odd: object) -> None:
    job = job_with({"odd": odd})
    assert decode_job(encode_job(job)) == job


def test_lone_surrogates_in_a_result_become_question_marks() -> None:
    result = decode_result(encode_result(JobResult("SUCCESS", 1.5, "a\ud800", "", True)))
    assert result == JobResult("SUCCESS", 1.5, "a?", "", True)


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 9), min_size=1))
def test_frames_are_joined_from_any_pieces(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frames.frame(frames.FINISHED, n, p) for n, p in enumerate(payloads))
    reader, heard, position, turn = FrameReader(), [], 0, 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        heard += list(reader.feed(stream[position : position + size]))
        position, turn = position + size, turn + 1
    assert heard == [(frames.FINISHED, n, p) for n, p in enumerate(payloads)]


def test_what_is_no_frame_is_recognised() -> None:
    with pytest.raises(BrokenFrame):
        list(FrameReader().feed(b"print from a task, by mistake"))


def test_an_unknown_pool_is_refused_with_the_choices() -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        pool_class("prefrok")
    assert str(caught.value) == (
        "unknown pool 'prefrok': choose one of prefork, threads, gevent, asyncio, solo"
    )


def test_a_pool_whose_package_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = __import__("sys").modules
    monkeypatch.delitem(modules, "umbel.worker.execution.pools.gevent", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "gevent", None)
    with pytest.raises(ImproperlyConfigured, match=r"pip install 'umbel\[gevent\]'"):
        pool_class("gevent")


@pytest.mark.parametrize("name", POOL_NAMES)
def test_a_pool_of_none_is_refused(name: str) -> None:
    def run(job: Job) -> JobResult:
        raise NotImplementedError

    with pytest.raises(ImproperlyConfigured, match=f"concurrency 0 of the {name} pool"):
        pool_class(name)(PoolOptions(concurrency=0, run=run))


def test_deadlines_come_in_order_and_cancelled_ones_do_not() -> None:
    deadlines, heard, done = Deadlines("test"), [], threading.Event()
    now = monotonic()
    deadlines.call_at(now + 0.03, done.set)
    deadlines.call_at(now + 0.02, lambda: heard.append("second"))
    cancelled = deadlines.call_at(now + 0.015, lambda: heard.append("never"))
    deadlines.call_at(now + 0.01, lambda: heard.append("first"))
    cancelled.cancel()
    assert done.wait(WAIT_S)
    assert heard == ["first", "second"]
    deadlines.stop(wait_s=WAIT_S)


def test_cancelled_deadlines_do_not_pile_up() -> None:
    deadlines = Deadlines("test")
    for _ in range(10_000):
        deadlines.call_at(monotonic() + 3600, lambda: None).cancel()
    assert len(deadlines._heap) < 200
    deadlines.stop(wait_s=WAIT_S)
