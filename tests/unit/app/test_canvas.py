"""Signatures and their compositions, executed on the memory transport."""

from __future__ import annotations

import copy
import json
import pickle
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.app.pump import messages, pump, run
from umbel.app.canvas import (
    Signature,
    StampingVisitor,
    chain,
    chord,
    chunks,
    group,
    maybe_signature,
    signature,
)
from umbel.app.results import AsyncResult, GroupResult
from umbel.app.umbel import Umbel
from umbel.exceptions import ChordError, ImproperlyConfigured


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel(
        "canvas", broker="memory://", backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
    )  # fmt: skip

    @made.task(name="add")
    def add(x: Any, y: Any = 0) -> Any:
        return x + y

    @made.task(name="mul")
    def mul(x: Any, y: Any = 2) -> Any:
        return x * y

    @made.task(name="total")
    def total(numbers: Any, extra: Any = 0) -> Any:
        return sum(numbers) + extra

    @made.task(name="echo")
    def echo(*args: Any, **kwargs: Any) -> Any:
        return [list(args), kwargs]

    @made.task(name="fail")
    def fail(*args: Any) -> None:
        raise ValueError("bad", 3)

    yield made
    made.close()


def go(app: Umbel) -> list[tuple[str, str]]:
    return pump(app, app.conf.task_default_queue)


def sent(app: Umbel) -> list[Any]:
    return messages(app, app.conf.task_default_queue)


def s(app: Umbel, name: str, *args: Any, **kwargs: Any) -> Signature:
    return app.tasks[name].s(*args, **kwargs)


# -- one signature -------------------------------------------------------------------------


def test_a_signature_is_a_dictionary_with_exactly_the_wires_keys(app: Umbel) -> None:
    sig = app.tasks["add"].signature((4,), {"y": 1}, countdown=3, immutable=True)
    assert json.loads(json.dumps(sig)) == {
        "task": "add", "args": [4], "kwargs": {"y": 1}, "options": {"countdown": 3},
        "subtask_type": None, "immutable": True,
    }  # fmt: skip


def test_arguments_given_later_go_before_the_stored_ones(app: Umbel) -> None:
    result = s(app, "echo", 2, k=1).apply_async((1,), {"m": 3})
    go(app)
    assert result.get(timeout=1) == [[1, 2], {"k": 1, "m": 3}]


def test_an_immutable_signature_ignores_arguments_given_later(app: Umbel) -> None:
    result = app.tasks["echo"].si(2).delay(1)
    go(app)
    assert result.get(timeout=1) == [[2], {}]


def test_a_copy_shares_nothing_that_is_changed_later(app: Umbel) -> None:
    sig = s(app, "add", 1).set(queue="a")
    sig.link(s(app, "mul"))
    for twin in (sig.clone(), copy.deepcopy(sig), copy.copy(sig).clone()):
        twin.options["link"][0].options["queue"] = "b"
        twin.set(queue="c")
        twin.link(s(app, "echo"))
    assert sig.options["queue"] == "a"
    assert sig.options["link"] == [s(app, "mul")]


def test_a_signature_survives_pickling_and_json_with_its_kind(app: Umbel) -> None:
    whole = chain(s(app, "add", 1, 2), group(s(app, "add", 1), s(app, "mul")), s(app, "total"))
    for twin in (pickle.loads(pickle.dumps(whole)), signature(json.loads(json.dumps(whole)))):
        assert isinstance(twin, chain)
        assert isinstance(twin.tasks[1], group)
        assert json.dumps(twin) == json.dumps(whole)


def test_freezing_fixes_the_id_that_applying_then_uses(app: Umbel) -> None:
    sig = s(app, "add", 1, 2)
    frozen = sig.freeze()
    assert sig.id == frozen.id
    assert sig.apply_async().id == frozen.id
    assert sig.options["reply_to"] == app.reply_to


def test_links_are_added_once_and_in_order(app: Umbel) -> None:
    sig = s(app, "add")
    sig.link(s(app, "mul"))
    sig.link(s(app, "mul"))
    sig.link(s(app, "echo"))
    assert [one.task for one in sig.options["link"]] == ["mul", "echo"]
    assert sig.on_error(s(app, "echo")) is sig
    assert [one.task for one in sig.flatten_links()] == ["add", "mul", "echo"]


def test_replace_exchanges_whole_sections_in_a_copy(app: Umbel) -> None:
    sig = s(app, "add", 1, y=2)
    other = sig.replace(args=(9,), kwargs={}, options={"queue": "z"})
    assert (other.args, other.kwargs, other.options) == ((9,), {}, {"queue": "z"})
    assert sig.args == (1,)


def test_maybe_signature_leaves_none_alone(app: Umbel) -> None:
    assert maybe_signature(None) is None
    assert isinstance(maybe_signature({"task": "x"}, app), Signature)


def test_an_unregistered_task_is_sent_by_name(app: Umbel) -> None:
    app.signature("elsewhere.work", (1,)).delay()
    assert [m.headers["task"] for m in sent(app)] == ["elsewhere.work"]


# -- chains --------------------------------------------------------------------------------


def test_a_chain_hands_each_value_on_and_links_the_results(app: Umbel) -> None:
    result = (s(app, "add", 1, 2) | s(app, "add", 4) | s(app, "mul", 10)).apply_async()
    assert go(app) == [("add", "SUCCESS"), ("add", "SUCCESS"), ("mul", "SUCCESS")]
    assert result.get(timeout=1) == 70
    assert result.parent.get(timeout=1) == 7
    assert result.parent.parent.get(timeout=1) == 3
    assert result.parent.parent.parent is None


def test_the_first_step_carries_the_others_reversed_with_their_ids(app: Umbel) -> None:
    result = chain(s(app, "add", 1, 2), s(app, "add", 4), s(app, "mul", 10)).apply_async()
    (message,) = sent(app)
    _, _, embed = json.loads(message.body)
    assert [step["task"] for step in embed["chain"]] == ["mul", "add"]
    assert [step["options"]["task_id"] for step in embed["chain"]] == [result.id, result.parent.id]
    assert all(step["options"]["reply_to"] for step in embed["chain"])
    assert message.headers["id"] == result.parent.parent.id


def test_applying_twice_gives_new_ids_and_leaves_the_signature_alone(app: Umbel) -> None:
    whole = chain(s(app, "add", 1, 1), group(s(app, "add", 1), s(app, "mul")), s(app, "total"))
    before = json.dumps(whole)
    first, second = whole.apply_async(), whole.apply_async((), queue=None)
    assert json.dumps(whole) == before
    assert first.id != second.id
    go(app)
    assert first.get(timeout=1) == second.get(timeout=1) == 7


def test_what_a_chain_is_given_goes_to_its_last_step_or_to_all(app: Umbel) -> None:
    whole = chain(s(app, "add", 1), s(app, "mul"))
    result = whole.apply_async(
        (2,), task_id="last", link=s(app, "echo"), link_error=s(app, "fail"), priority=7
    )
    assert result.id == "last"
    (message,) = sent(app)
    args, _, embed = json.loads(message.body)
    assert args == [2, 1]
    assert message.properties["priority"] == 7
    assert [e["task"] for e in embed["errbacks"]] == ["fail"]
    (last,) = embed["chain"]
    assert [c["task"] for c in last["options"]["link"]] == ["echo"]
    assert [c["task"] for c in last["options"]["link_error"]] == ["fail"]
    assert embed["callbacks"] is None


def test_chains_inside_chains_are_taken_apart(app: Umbel) -> None:
    inner = chain(s(app, "add", 1), chain(s(app, "add", 2), s(app, "add", 3)))
    result = chain(s(app, "add", 0, 0), inner, s(app, "mul", 10)).apply_async()
    assert len(go(app)) == 5
    assert result.get(timeout=1) == 60


def test_what_an_inner_chain_was_given_keeps_its_place_in_the_outer_one(app: Umbel) -> None:
    inner = chain(s(app, "add", 1), s(app, "add", 2)).set(priority=3, task_id="inner")
    inner.link(s(app, "echo"))
    inner.link_error(s(app, "fail"))
    for whole in (s(app, "add", 0) | inner | s(app, "mul"), chain(s(app, "add", 0), inner)):
        whole.apply_async()
        (message,) = sent(app)
        chained = json.loads(message.body)[2]["chain"]
        second, first = chained[-2:]
        assert first["options"]["priority"] == 3
        assert "link" not in first["options"]
        assert second["options"]["task_id"] == "inner"
        assert [one["task"] for one in second["options"]["link"]] == ["echo"]
        assert all(
            [e["task"] for e in one["options"]["link_error"]] == ["fail"] for one in (first, second)
        )
        assert "priority" not in second["options"]


def test_a_group_at_the_end_of_a_chain_gives_a_group_result(app: Umbel) -> None:
    result = (s(app, "add", 1, 1) | group(s(app, "add", 1), s(app, "add", 2))).apply_async()
    assert isinstance(result, GroupResult)
    go(app)
    assert result.get(timeout=1) == [3, 4]
    assert result.parent.get(timeout=1) == 2


def test_a_group_of_one_task_in_a_chain_is_that_task(app: Umbel) -> None:
    result = (s(app, "add", 1, 1) | group(s(app, "add", 1)) | s(app, "mul", 5)).apply_async()
    assert len(go(app)) == 3
    assert result.get(timeout=1) == 15


def test_an_empty_chain_says_so(app: Umbel) -> None:
    with pytest.raises(ValueError, match="empty chain"):
        chain(app=app).apply_async()


def test_a_failing_step_fails_the_steps_after_it(app: Umbel) -> None:
    result = chain(s(app, "fail"), s(app, "add", 1), s(app, "mul")).apply_async()
    go(app)
    for node in (result, result.parent, result.parent.parent):
        with pytest.raises(ValueError, match="bad"):
            node.get(timeout=1)


def test_the_rest_of_a_chain_is_failed_through_chord_bodies_and_groups(app: Umbel) -> None:
    whole = chain(
        s(app, "fail"), group(s(app, "add", 1), s(app, "add", 2)), s(app, "total"),
        group(s(app, "add", 3), s(app, "add", 4)),
    )  # fmt: skip
    result = whole.apply_async()
    go(app)
    assert [leaf.state for leaf in result] == ["FAILURE", "FAILURE"]
    assert result.parent.state == "FAILURE"


# -- groups --------------------------------------------------------------------------------


def test_a_group_gives_values_in_order_and_marks_its_members(app: Umbel) -> None:
    result = group(s(app, "add", i) for i in range(3)).apply_async((10,))
    found = sent(app)
    assert [m.headers["group_index"] for m in found] == [0, 1, 2]
    assert {m.headers["group"] for m in found} == {result.id}
    for message in reversed(found):
        run(app, message)
    assert result.get(timeout=1) == [10, 11, 12]


def test_groups_inside_groups_are_flattened(app: Umbel) -> None:
    result = group(
        s(app, "add", 1), group(s(app, "add", 2), group(s(app, "add", 3))), chain(app=app)
    ).apply_async()
    assert len(result) == 3
    go(app)
    assert result.get(timeout=1) == [1, 2, 3]


def test_an_empty_group_is_ready_at_once(app: Umbel) -> None:
    result = group(app=app).apply_async()
    assert sent(app) == []
    assert result.ready()
    assert result.get(timeout=0) == []


def test_members_may_be_chains_and_chords(app: Umbel) -> None:
    result = group(
        s(app, "add", 1, 1) | s(app, "mul", 5),
        chord([s(app, "add", 1), s(app, "add", 2)], s(app, "total")),
    ).apply_async()
    go(app)
    assert result.get(timeout=1) == [10, 3]


def test_a_callback_on_a_group_is_refused_with_the_way_out(app: Umbel) -> None:
    with pytest.raises(TypeError, match="chord"):
        group(s(app, "add", 1), s(app, "add", 2)).apply_async(link=s(app, "mul"))


def test_skew_spreads_the_members_over_time(app: Umbel) -> None:
    made = group(s(app, "add", i) for i in range(3)).skew(start=1, step=2)
    assert [member.options["countdown"] for member in made.tasks] == [1, 3, 5]


# -- chords --------------------------------------------------------------------------------


def test_a_chord_gives_its_body_the_ordered_results_once(app: Umbel) -> None:
    result = chord([s(app, "add", i) for i in range(4)])(s(app, "echo"))
    for message in reversed(sent(app)):
        run(app, message)
    assert [task for task, _ in go(app)] == ["echo"]
    assert result.get(timeout=1) == [[[0, 1, 2, 3]], {}]
    assert isinstance(result.parent, GroupResult)
    assert result.parent.get(timeout=1) == [0, 1, 2, 3]


def test_a_part_that_runs_again_does_not_send_the_body_again(app: Umbel) -> None:
    chord([s(app, "add", 1), s(app, "add", 2)], s(app, "total")).apply_async()
    parts = sent(app)
    for message in (*parts, *parts):
        run(app, message)
    assert [task for task, _ in go(app)] == ["total"]


def test_every_part_carries_group_index_and_body(app: Umbel) -> None:
    result = chord([s(app, "add", 1), s(app, "add", 2)], s(app, "total")).apply_async()
    for index, message in enumerate(sent(app)):
        assert message.headers["group"] == result.parent.id
        assert message.headers["group_index"] == index
        body = json.loads(message.body)[2]["chord"]
        assert (body["task"], body["options"]["task_id"]) == ("total", result.id)


def test_a_group_followed_by_a_task_is_a_chord(app: Umbel) -> None:
    made = group(s(app, "add", 1), s(app, "add", 2)) | s(app, "total")
    assert isinstance(made, chord)
    result = (made | s(app, "mul", 10)).apply_async()
    go(app)
    assert result.get(timeout=1) == 30


def test_an_empty_header_runs_the_body_with_an_empty_list(app: Umbel) -> None:
    result = chord([], s(app, "total", 5)).apply_async()
    go(app)
    assert result.get(timeout=1) == 5


def test_only_the_last_step_of_a_chain_in_a_header_reports_to_the_chord(app: Umbel) -> None:
    result = chord([s(app, "add", 1) | s(app, "mul"), s(app, "add", 5)], s(app, "total"))()
    first, second = sent(app)
    embed = json.loads(first.body)[2]
    assert embed["chord"] is None
    assert embed["chain"][0]["options"]["chord"]["options"]["task_id"] == result.id
    assert embed["chain"][0]["options"]["group_id"] == result.parent.id
    assert json.loads(second.body)[2]["chord"]["options"]["task_id"] == result.id
    run(app, first)
    run(app, second)
    go(app)
    assert result.get(timeout=1) == 7


def test_a_chord_inside_a_chain_hands_the_rest_of_the_chain_to_its_body(app: Umbel) -> None:
    result = chain(
        s(app, "add", 1, 1), group(s(app, "add", 1), s(app, "add", 2)), s(app, "total"),
        s(app, "mul", 10), s(app, "add", 1),
    ).apply_async()  # fmt: skip
    go(app)
    assert result.get(timeout=1) == 71
    states = []
    node: Any = result
    while node is not None:
        states.append(node.get(timeout=1))
        node = node.parent
    assert states == [71, 70, 7, [3, 4], 2]


def test_chords_nest_in_headers_and_bodies(app: Umbel) -> None:
    inner = chord([s(app, "add", 1), s(app, "add", 2)], s(app, "total"))
    result = chord([inner, s(app, "add", 10)], s(app, "total") | s(app, "mul", 2)).apply_async()
    go(app)
    assert result.get(timeout=1) == 26
    two = group(s(app, "add", 1), s(app, "add", 2))
    twice = (two | group(s(app, "total", 1), s(app, "total", 2)) | s(app, "total")).apply_async()
    go(app)
    assert twice.get(timeout=1) == 9


def test_a_chain_that_ends_in_a_group_nests_its_values_in_the_chord(app: Umbel) -> None:
    header = [s(app, "add", 1) | group(s(app, "add", 1), s(app, "add", 2)), s(app, "add", 9)]
    result = chord(header, s(app, "echo")).apply_async()
    go(app)
    assert result.get(timeout=1) == [[[[2, 3], 9]], {}]


def test_a_failed_part_fails_the_body_and_what_follows_it(app: Umbel) -> None:
    result = chain(
        group(s(app, "add", 1), s(app, "fail").set(task_id="f1")), s(app, "total"), s(app, "mul")
    ).apply_async()
    go(app)
    for node in (result, result.parent):
        with pytest.raises(ChordError) as caught:
            node.get(timeout=1)
        assert str(caught.value) == "Dependency f1 raised ValueError('bad', 3)"


def test_a_failed_body_of_a_nested_chord_fails_the_outer_one(app: Umbel) -> None:
    inner = chord([s(app, "fail"), s(app, "add", 2)], s(app, "total"))
    result = chord([inner, s(app, "add", 10)], s(app, "total")).apply_async()
    go(app)
    with pytest.raises(ChordError, match=r"Dependency .* raised ChordError"):
        result.get(timeout=1)


@pytest.mark.parametrize("backend", ["disabled://", "rpc://"])
def test_a_chord_on_a_backend_that_cannot_count_sends_nothing(app: Umbel, backend: str) -> None:
    other = Umbel(
        "c", broker="memory://", backend=backend, task_default_queue=app.conf.task_default_queue,
        set_as_current=False,
    )  # fmt: skip
    parts = [other.signature("add", (1,)), other.signature("add", (2,))]
    for made in (
        chord(parts, other.signature("total"), app=other),
        chain(other.signature("add", (1,)), group(parts), other.signature("total"), app=other),
        group([chord(parts, other.signature("total")), other.signature("add")], app=other),
    ):
        with pytest.raises(ImproperlyConfigured, match="redis"):
            made.apply_async()
    assert sent(app) == []


def test_a_chord_without_a_body_says_so(app: Umbel) -> None:
    with pytest.raises(ValueError, match="no body"):
        chord([s(app, "add", 1)]).apply_async()


# -- maps and chunks -----------------------------------------------------------------------


def test_map_and_starmap_run_in_one_message(app: Umbel) -> None:
    mapped, starred = app.tasks["mul"].map([1, 2]), app.tasks["add"].starmap([(1, 2), (3, 4)])
    first, second = mapped.delay(), starred.delay()
    assert go(app) == [("celery.map", "SUCCESS"), ("celery.starmap", "SUCCESS")]
    assert first.get(timeout=1) == [2, 4]
    assert second.get(timeout=1) == [3, 7]


def test_chunks_are_a_group_of_starmaps(app: Umbel) -> None:
    result = app.tasks["add"].chunks(((i, i) for i in range(5)), 2).apply_async()
    assert len(go(app)) == 3
    assert result.get(timeout=1) == [[0, 2], [4, 6], [8]]
    assert isinstance(app.tasks["add"].chunks([(1, 1)], 1).clone(), chunks)


# -- inline --------------------------------------------------------------------------------


def test_compositions_run_inline_with_the_same_values(app: Umbel) -> None:
    parts = group(s(app, "add", 1), s(app, "add", 2))
    assert chain(s(app, "add", 1, 1), parts, s(app, "total")).apply().get() == 7
    assert parts.apply((1,)).get() == [2, 3]
    assert chord(parts, s(app, "total")).apply().get() == 3
    app.conf.task_always_eager = True
    assert (s(app, "add", 1, 1) | parts | s(app, "total")).apply_async().get() == 7
    assert sent(app) == []


def test_an_inline_chain_stops_at_a_failure(app: Umbel) -> None:
    result = chain(s(app, "fail"), s(app, "add", 1)).apply()
    with pytest.raises(ValueError, match="bad"):
        result.get()
    failed = chord([s(app, "fail")], s(app, "total")).apply()
    assert isinstance(failed.result, ChordError)


# -- callbacks, errbacks, children ---------------------------------------------------------


def test_callbacks_get_the_value_and_several_go_out_as_a_group(app: Umbel) -> None:
    sig = s(app, "add", 1, 2)
    sig.link(s(app, "mul", 10).set(task_id="a"))
    sig.link(app.tasks["echo"].si().set(task_id="b"))
    result = sig.apply_async()
    (first,) = sent(app)
    run(app, first)
    followers = sent(app)
    assert len({m.headers["group"] for m in followers}) == 1
    assert {m.headers["parent_id"] for m in followers} == {result.id}
    assert {m.headers["root_id"] for m in followers} == {result.id}
    for message in followers:
        run(app, message)
    assert app.AsyncResult("a").get(timeout=1) == 30
    assert app.AsyncResult("b").get(timeout=1) == [[], {}]


def test_an_errback_with_one_argument_is_sent_and_one_with_three_is_called(app: Umbel) -> None:
    seen: list[Any] = []

    @app.task(name="by_id")
    def by_id(task_id: str) -> str:
        return task_id

    @app.task(name="in_process")
    def in_process(request: Any, exc: Any, traceback: Any) -> None:
        seen.append((request.id, exc, traceback))

    sig = s(app, "fail").on_error(by_id.s().set(task_id="e")).on_error(in_process.s())
    result = sig.apply_async()
    assert go(app) == [("fail", "FAILURE"), ("by_id", "SUCCESS")]
    assert app.AsyncResult("e").get(timeout=1) == result.id
    ((failed_id, exc, text),) = seen
    assert failed_id == result.id
    assert repr(exc) == "ValueError('bad', 3)"
    assert "Traceback" in text


def test_the_errbacks_of_a_chord_body_run_when_a_part_fails(app: Umbel) -> None:
    body = s(app, "total").on_error(s(app, "echo").set(task_id="e"))
    body.options["link_error"] = [app.signature("remote.errback", task_id="r")]
    result = chord([s(app, "fail"), s(app, "add", 1)], body).apply_async()
    for message in sent(app):
        run(app, message)
    (errback,) = sent(app)
    assert errback.headers["task"] == "remote.errback"
    assert json.loads(errback.body)[0] == [result.id]


def test_a_task_that_sends_tasks_remembers_them_as_children(app: Umbel) -> None:
    @app.task(name="parent")
    def parent() -> str:
        group(s(app, "add", 1), s(app, "add", 2)).apply_async()
        (s(app, "add", 1) | s(app, "mul")).apply_async()
        s(app, "add", 5).delay()
        return "sent"

    result = parent.delay()
    go(app)
    children = result.children
    assert [type(child) for child in children] == [GroupResult, AsyncResult, AsyncResult]
    values = [value for _, value in result.collect(timeout=1)]
    assert values[0] == "sent"
    assert all(value in values for value in (2, 5, [1, 2]))


# -- stamps --------------------------------------------------------------------------------


def test_stamps_mark_every_call_its_links_included(app: Umbel) -> None:
    linked = s(app, "add", 1, 2)
    linked.link(s(app, "mul"))
    whole = chain(linked, group(s(app, "add", 1), s(app, "add", 2)), s(app, "total"))
    whole.stamp(order="o7")
    whole.apply_async()
    seen = 0
    while batch := sent(app):
        for message in batch:
            assert message.headers["stamped_headers"] == ["order"], message.headers["task"]
            assert message.headers["stamps"] == {"order": "o7"}
            seen += 1
            run(app, message)
    assert seen == 5


def test_a_visitor_decides_stamps_per_call(app: Umbel) -> None:
    class Names(StampingVisitor):
        def on_signature(self, sig: Signature, **headers: Any) -> dict[str, Any]:
            return {"name": sig.task, "stamped_headers": ["name"]}

        def on_callback(self, callback: Signature, **headers: Any) -> dict[str, Any]:
            return {"linked": True}

    sig = s(app, "add")
    sig.link(s(app, "mul"))
    sig.stamp(visitor=Names())
    assert sig.options["name"] == "add"
    assert sig.options["stamped_headers"] == ["name"]
    assert sig.options["link"][0].options["stamped_headers"] == ["linked", "name"]


def test_a_stamp_stays_or_becomes_a_list(app: Umbel) -> None:
    sig = s(app, "add").stamp(k=1)
    assert sig.clone().stamp(k=2).options["k"] == 1
    assert sig.clone().stamp(append_stamps=True, k=2).options["k"] == [1, 2]


# -- built-in tasks ------------------------------------------------------------------------


def test_the_built_in_tasks_are_registered(app: Umbel) -> None:
    names = "map starmap chunks chain group chord chord_unlock accumulate backend_cleanup"
    assert {f"celery.{name}" for name in names.split()} <= set(app.tasks)


def test_groups_and_chords_work_when_sent_as_plain_tasks(app: Umbel) -> None:
    parts = [dict(s(app, "add", 1)), dict(s(app, "add", 2))]
    app.send_task("celery.group", kwargs={"tasks": parts, "group_id": "g"})
    body = dict(s(app, "total").set(task_id="b"))
    app.send_task("celery.chord", kwargs={"header": parts, "body": body})
    assert all(state == "SUCCESS" for _, state in go(app))
    assert app.AsyncResult("b").get(timeout=1) == 3


def test_chord_unlock_waits_for_the_parts_and_sends_the_body(app: Umbel) -> None:
    parts = group(s(app, "add", 1), s(app, "add", 2)).apply_async()
    body = s(app, "total").set(task_id="b")
    app.send_task(
        "celery.chord_unlock", (parts.id, body),
        kwargs={"interval": 0, "result": [part.as_tuple() for part in parts]},
    )  # fmt: skip
    first, second, unlock = sent(app)
    assert run(app, unlock).state == "RETRY"
    run(app, first)
    run(app, second)
    go(app)
    assert app.AsyncResult("b").get(timeout=1) == 3


def test_a_chain_of_a_thousand_steps_is_one_flat_message(app: Umbel) -> None:
    whole = chain(s(app, "add", 0, 0), *(s(app, "add", 1) for _ in range(999)))
    result = whole.apply_async()
    (message,) = sent(app)
    assert len(json.loads(message.body)[2]["chain"]) == 999
    run(app, message)
    assert app.AsyncResult(message.headers["id"]).get(timeout=1) == 0
    assert len(result.as_list()) == 1000
