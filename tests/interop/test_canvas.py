"""Chains, groups and maps across the two libraries; chords have a file of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interop.conftest import Line
from tests.interop.peers import OFTEN, WAIT_S, Client


def test_a_chain_passes_values_on(client: Client) -> None:
    result = client.chain(client.s("add", 1, 2), client.s("add", 10), client.s("add", 100))()

    if client.app.conf.result_backend == "rpc://":
        assert result.get(timeout=WAIT_S) == 113
        return
    assert result.get(timeout=WAIT_S) == 113
    assert result.parent.get(timeout=WAIT_S) == 13
    assert result.parent.parent.get(timeout=WAIT_S) == 3
    assert result.parent.parent.parent is None


def test_an_immutable_step_ignores_what_came_before(client: Client) -> None:
    assert client.chain(client.s("add", 1, 2), client.si("add", 5, 5))().get(timeout=WAIT_S) == 10


def test_a_chain_takes_arguments_for_its_first_step(client: Client) -> None:
    made = client.chain(client.s("add", 1), client.s("add", 10))
    assert made.apply_async((5,)).get(timeout=WAIT_S) == 16


def test_a_long_chain_ends(client: Client) -> None:
    steps = [client.s("add", 1) for _ in range(30)]
    assert client.chain(client.s("add", 0, 0), *steps)().get(timeout=WAIT_S) == 30


def test_steps_of_a_chain_know_their_parent_and_root(client: Client) -> None:
    result = client.chain(client.s("add", 1, 2), client.s("request"))()

    seen = result.get(timeout=WAIT_S)

    assert seen["id"] == result.id
    assert seen["parent_id"] == seen["root_id"] == result.parent.id


def test_a_step_that_fails_fails_the_chain(client: Client, line: Line) -> None:
    never = line.marks.name()
    result = client.chain(
        client.s("add", 1, 2), client.s("fail"), client.s("mark", mark=never), client.s("add", 1)
    )()

    with pytest.raises(ValueError, match="bad"):
        result.get(timeout=WAIT_S)

    assert line.marks.count(never) == 0
    if line.redis is not None:
        assert result.parent.parent.parent.get(timeout=WAIT_S) == 3
        assert result.parent.parent.state == "FAILURE"
        assert result.get(timeout=WAIT_S, propagate=False).args == ("bad", 3)


def test_the_errback_of_a_chain_runs_whichever_step_fails(client: Client, line: Line) -> None:
    mark = line.marks.name()
    made = client.chain(client.s("add", 1, 2), client.s("fail"), client.s("add", 1))

    result = made.apply_async(link_error=client.s("old_errback", mark=mark))

    assert line.marks.wait(mark)["id"] == result.parent.id


def test_the_callback_of_a_chain_gets_the_last_value(client: Client, line: Line) -> None:
    mark = line.marks.name()
    made = client.chain(client.s("add", 1, 2), client.s("add", 10))

    made.apply_async(link=client.s("mark", mark=mark))

    assert line.marks.wait(mark)["args"] == [13]


def test_a_retried_step_takes_the_rest_of_its_chain_along(client: Client) -> None:
    made = client.chain(client.s("flaky", 1), client.s("echo", "after"))
    (value, after), _ = made().get(timeout=WAIT_S)
    assert (value[0], after) == (1, "after")


def test_a_chain_with_a_countdown_starts_later(client: Client) -> None:
    made = client.chain(client.s("add", 1, 2), client.s("add", 1))
    assert made.apply_async(countdown=0.1).get(timeout=WAIT_S) == 4


def test_a_group_gives_its_values_in_order(client: Client) -> None:
    result = client.group(*(client.s("add", i, i) for i in range(20)))()

    assert result.get(**OFTEN) == [2 * i for i in range(20)]
    assert result.successful()
    assert result.completed_count() == 20
    assert len(result) == 20


def test_members_of_a_group_know_it(client: Client) -> None:
    result = client.group(*(client.s("request") for _ in range(3)))()

    seen = result.get(**OFTEN)

    assert {one["group"] for one in seen} == {result.id}
    assert [one["group_index"] for one in seen] == [0, 1, 2]


def test_arguments_given_to_a_group_go_to_every_member(client: Client) -> None:
    made = client.group(client.s("add", 1), client.s("add", 2))
    assert made.apply_async((10,)).get(**OFTEN) == [11, 12]


def test_a_group_with_a_failing_member_raises_its_error(client: Client) -> None:
    result = client.group(client.s("add", 1, 1), client.s("fail"))()

    with pytest.raises(ValueError, match="bad"):
        result.get(**OFTEN)

    values = result.get(**OFTEN, propagate=False)
    assert values[0] == 2
    assert isinstance(values[1], ValueError)
    assert result.failed()


def test_groups_in_groups_give_all_values(client: Client) -> None:
    inner = client.group(client.s("add", 1, 1), client.s("add", 2, 2))
    result = client.group(inner, client.s("add", 3, 3), client.group(client.s("add", 4, 4)))()

    assert flat(result.get(**OFTEN)) == [2, 4, 6, 8]


def test_chains_in_a_group_end_independently(client: Client) -> None:
    result = client.group(
        client.chain(client.s("add", 1, 1), client.s("add", 1)),
        client.chain(client.s("add", 2, 2), client.s("add", 2)),
    )()
    assert result.get(**OFTEN) == [3, 6]


def test_a_group_at_the_end_of_a_chain_is_fed_by_it(chords: Client) -> None:
    made = chords.chain(chords.s("add", 1, 1), chords.group(chords.s("add", 1), chords.s("add", 2)))
    assert made().get(**OFTEN) == [3, 4]


def test_an_empty_group_has_no_values(client: Client) -> None:
    assert client.group()().get(**OFTEN) == []


def test_a_group_is_saved_and_found_again(client: Client, line: Line) -> None:
    if line.redis is None:
        pytest.skip("nothing is stored")
    result = client.group(client.s("add", 1, 1), client.s("add", 2, 2))()
    result.save()

    found = type(result).restore(result.id, app=client.app)

    assert found.get(**OFTEN) == [2, 4]


def test_a_map_runs_all_items_in_one_call(client: Client) -> None:
    assert client.map("add", [1, 2, 3]).apply_async().get(timeout=WAIT_S) == [11, 12, 13]


def test_a_starmap_spreads_its_items(client: Client) -> None:
    assert client.starmap("add", [(1, 1), (2, 2)]).apply_async().get(timeout=WAIT_S) == [2, 4]


def test_chunks_cut_items_into_portions(client: Client) -> None:
    result = client.chunks("add", [(i, i) for i in range(5)], 2).apply_async()
    assert result.get(**OFTEN) == [[0, 2], [4, 6], [8]]


def test_chunks_as_a_task_are_cut_by_the_worker(client: Client) -> None:
    result = client.app.send_task(
        "celery.chunks", kwargs={"task": client.s("add"), "it": [(1, 1), (2, 2)], "n": 1}
    )
    assert len(result.get(timeout=WAIT_S)) == 2


def test_stamps_go_to_every_part_of_a_canvas(client: Client) -> None:
    made = client.chain(client.s("request"), client.s("request"))
    made.stamp(shift="night")

    result = made()

    seen = [result.get(timeout=WAIT_S)]
    if client.app.conf.result_backend != "rpc://":
        seen.append(result.parent.get(timeout=WAIT_S))
    for one in seen:
        assert one["stamped_headers"] == ["shift"]


def test_a_task_replaced_by_a_chain_answers_with_its_end(client: Client, line: Line) -> None:
    if line.kind.backend == "rpc" and line.kind.worker == "celery":
        pytest.skip("a Celery worker sends the replacement's result to itself")
    assert client.run("replaced_by_chain", 5) == 1105


def test_a_replaced_step_keeps_its_place_in_a_chain(client: Client) -> None:
    made = client.chain(client.s("add", 1, 1), client.s("replaced"), client.s("add", 10_000))
    assert made().get(timeout=WAIT_S) == 10_102


def flat(values: Any) -> list[Any]:
    """The leaves: peers nest the values of nested groups or do not."""
    if not isinstance(values, list):
        return [values]
    return [leaf for value in values for leaf in flat(value)]
