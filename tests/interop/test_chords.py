"""Chords across the two libraries: every shape that a header and a body can take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interop.conftest import Line
from tests.interop.peers import OFTEN, WAIT_S, Client
from tests.interop.test_canvas import flat
from tests.servers import wait_until


def adds(client: Client, n: int) -> list[Any]:
    return [client.s("add", i, i) for i in range(n)]


def outcome(result: Any) -> Any:
    """What the body itself came to: a client may else raise the part's error instead."""
    return result.get(timeout=WAIT_S, follow_parents=False)


def test_the_body_gets_all_values_in_order(chords: Client) -> None:
    result = chords.chord(adds(chords, 12), chords.s("echo"))()
    (values,), _ = result.get(timeout=WAIT_S)
    assert values == [2 * i for i in range(12)]


def test_a_group_piped_into_a_task_is_a_chord(chords: Client) -> None:
    made = chords.group(*adds(chords, 3)) | chords.s("sum")
    assert made().get(timeout=WAIT_S) == 6


def test_a_chord_of_one_part_ends(chords: Client) -> None:
    assert chords.chord(adds(chords, 1), chords.s("sum"))().get(timeout=WAIT_S) == 0


def test_an_immutable_body_gets_nothing(chords: Client) -> None:
    result = chords.chord(adds(chords, 2), chords.si("add", 5, 5))()
    assert result.get(timeout=WAIT_S) == 10


def test_an_empty_header_runs_the_body_with_nothing(chords: Client) -> None:
    assert chords.chord([], chords.s("sum", 7))().get(timeout=WAIT_S) == 7


def test_a_chord_inside_a_chain(chords: Client) -> None:
    result = chords.chain(
        chords.s("add", 1, 1),
        chords.group(chords.s("add", 10), chords.s("add", 20)),
        chords.s("sum"),
        chords.s("add", 1000),
    )()
    assert result.get(timeout=WAIT_S) == 1034


def test_two_chords_in_a_row_inside_a_chain(chords: Client) -> None:
    result = chords.chain(
        chords.s("add", 1, 1),
        chords.group(chords.s("add", 10), chords.s("add", 20)),
        chords.s("sum"),
        chords.group(chords.s("add", 1), chords.s("add", 2)),
        chords.s("sum"),
    )()
    assert result.get(timeout=WAIT_S) == 71


def test_a_group_fed_by_a_group_inside_a_chain(chords: Client) -> None:
    result = chords.chain(
        chords.group(chords.s("add", 1, 1), chords.s("add", 2, 2)),
        chords.group(chords.s("sum"), chords.s("sum", 100)),
        chords.s("sum"),
    )()
    assert result.get(timeout=WAIT_S) == 112


def test_chains_in_the_header(chords: Client) -> None:
    header = [
        chords.chain(chords.s("add", 1, 1), chords.s("add", 10), chords.s("add", 100)),
        chords.s("add", 5, 5),
        chords.chain(chords.s("add", 2, 2), chords.s("add", 20)),
    ]
    (values,), _ = chords.chord(header, chords.s("echo"))().get(timeout=WAIT_S)
    assert values == [112, 10, 24]


def test_a_chain_as_the_body(chords: Client) -> None:
    body = chords.chain(chords.s("sum"), chords.s("add", 100), chords.s("add", 1000))
    assert chords.chord(adds(chords, 3), body)().get(timeout=WAIT_S) == 1106


def test_a_group_as_the_body(chords: Client) -> None:
    body = chords.group(chords.s("sum"), chords.s("sum", 100))
    assert chords.chord(adds(chords, 3), body)().get(**OFTEN) == [6, 106]


def test_a_chord_in_the_header_of_a_chord(chords: Client) -> None:
    header = [
        chords.chord(adds(chords, 3), chords.s("sum")),
        chords.s("add", 100, 100),
    ]
    assert chords.chord(header, chords.s("sum"))().get(timeout=WAIT_S) == 206


def test_a_chord_as_the_body_of_a_chord(chords: Client) -> None:
    inner = chords.chord([chords.s("sum"), chords.s("sum", 100)], chords.s("sum"))
    assert chords.chord(adds(chords, 3), inner)().get(timeout=WAIT_S) == 112


def test_groups_in_the_header(chords: Client) -> None:
    header = [
        chords.group(chords.s("add", 1, 1), chords.s("add", 2, 2)),
        chords.s("add", 3, 3),
    ]
    (values,), _ = chords.chord(header, chords.s("echo"))().get(timeout=WAIT_S)
    # A Celery client gives the members of a group in the header the same place.
    assert (sorted(flat(values)) if chords.is_celery else values) == [2, 4, 6]


def test_a_chain_that_ends_in_a_chord_inside_a_header(chords: Client) -> None:
    inner = chords.chain(
        chords.s("add", 1, 1), chords.group(chords.s("add", 1), chords.s("add", 2)), chords.s("sum")
    )
    result = chords.chord([inner, chords.s("add", 50, 50)], chords.s("sum"))()
    assert result.get(timeout=WAIT_S) == 107


def test_a_failing_part_fails_the_body(chords: Client, line: Line) -> None:
    never, mark = line.marks.name(), line.marks.name()
    body = chords.s("mark", mark=never)
    body.link_error(chords.s("old_errback", mark=mark))
    result = chords.chord([*adds(chords, 2), chords.s("fail")], body)()

    with pytest.raises(chords.errors.ChordError, match=r"Dependency .* raised ValueError"):
        outcome(result)

    assert line.marks.wait(mark)["id"] == result.id
    assert line.marks.count(never) == 0
    assert result.state == "FAILURE"


def test_a_failing_part_fails_all_of_a_body_that_is_a_chain(chords: Client, line: Line) -> None:
    never = line.marks.name()
    body = chords.chain(chords.s("mark", mark=never), chords.s("add", 1))
    result = chords.chord([chords.s("fail"), chords.s("add", 1, 1)], body)()

    with pytest.raises(chords.errors.ChordError, match="Dependency"):
        outcome(result)

    assert line.marks.count(never) == 0


def test_a_chain_that_breaks_in_the_header_fails_the_body(chords: Client) -> None:
    header = [
        chords.chain(chords.s("add", 1, 1), chords.s("fail"), chords.s("add", 1)),
        chords.s("add", 1, 1),
    ]
    result = chords.chord(header, chords.s("sum"))()

    with pytest.raises(chords.errors.ChordError, match=r"raised ValueError"):
        outcome(result)


def test_a_part_that_no_worker_knows_fails_the_body(chords: Client, line: Line) -> None:
    if not chords.is_celery:
        pytest.skip("a Celery worker does not report such a part to its chord")
    result = chords.chord([chords.s("add", 1, 1), chords.s("no_such_task")], chords.s("sum"))()

    with pytest.raises(chords.errors.ChordError, match=r"t\.no_such_task"):
        outcome(result)


def test_a_part_that_is_retried_counts_once(chords: Client) -> None:
    result = chords.chord([chords.s("flaky", 2), chords.s("flaky", 0)], chords.s("echo"))()
    (values,), _ = result.get(timeout=WAIT_S)
    assert [retries for retries, *_ in values] == [2, 0]


def test_a_part_that_is_replaced_counts_with_its_replacement(chords: Client) -> None:
    header = [chords.s("replaced", 1), chords.s("replaced_by_chain", 2), chords.s("add", 3, 3)]
    (values,), _ = chords.chord(header, chords.s("echo"))().get(timeout=WAIT_S)
    assert values == [101, 1102, 6]


def test_a_task_replaced_by_a_group_answers_with_its_values(chords: Client) -> None:
    assert chords.run("replaced_by_group", 3) == [100, 101, 102]


def test_parts_whose_results_are_ignored_still_count(chords: Client) -> None:
    header = [part.set(ignore_result=True) for part in adds(chords, 3)]
    assert chords.chord(header, chords.s("sum"))().get(timeout=WAIT_S) == 6


def test_the_callback_of_a_chord_gets_the_value_of_its_body(chords: Client, line: Line) -> None:
    mark = line.marks.name()
    chords.chord(adds(chords, 3), chords.s("sum")).apply_async(link=chords.s("mark", mark=mark))
    assert line.marks.wait(mark)["args"] == [6]


def test_nothing_of_a_finished_chord_is_left(chords: Client, line: Line) -> None:
    result = chords.chord(adds(chords, 3), chords.s("sum"))()
    assert result.get(timeout=WAIT_S) == 6

    def left() -> set[str]:
        return {
            key.decode().rpartition(".")[2] for key in line.redis.keys(f"*{result.parent.id}.*")
        }

    # The body goes out first, then the keys are removed. A Celery client may set .s late.
    wait_until(lambda: left() <= {"c", "s"}, WAIT_S, "the end of the chord's keys")
