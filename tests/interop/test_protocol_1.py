"""Messages in the old format, as clients with `task_protocol = 1` send them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from tests.interop.conftest import Line
from tests.interop.peers import OFTEN, WAIT_S, Client


@pytest.fixture(scope="session")
def old(line: Line) -> Iterator[Client]:
    client = Client(line.kind.client, **line.settings, task_protocol=1)
    yield client
    client.close()


@pytest.fixture
def old_chords(line: Line, old: Client) -> Client:
    if line.kind.backend == "rpc":
        pytest.skip("results as messages know no chords")
    return old


def test_a_plain_task_returns_its_value(old: Client) -> None:
    assert old.run("add", 2, kwargs={"y": 3}, task_id="old-1") == 5


def test_special_types_arrive(old: Client) -> None:
    values = {"at": datetime(2026, 2, 3, tzinfo=UTC), "price": Decimal("1.10")}
    assert old.run("types", kwargs=values)["back"] == values


def test_a_compressed_message_is_read(old: Client) -> None:
    text = "compressible " * 500
    assert old.run("size", text, compression="gzip") == [len(text), text]


def test_a_failure_arrives(old: Client) -> None:
    with pytest.raises(ValueError, match="bad") as caught:
        old.run("fail")
    assert caught.value.args == ("bad", 3)


def test_a_task_that_no_worker_knows_is_not_registered(old: Client, line: Line) -> None:
    if line.kind.worker == "celery" and line.kind.backend == "redis":
        pytest.skip("a Celery worker stores no result for it")
    with pytest.raises(old.errors.NotRegistered):
        old.run("no_such_task")


def test_a_retried_task_succeeds_in_the_end(old: Client) -> None:
    assert old.run("flaky", 2)[0] == 2


def test_a_countdown_delays_the_task(old: Client) -> None:
    begin = time.time()
    assert old.run("now", countdown=0.2) - begin >= 0.2


def test_an_expired_task_is_revoked(old: Client) -> None:
    with pytest.raises(old.errors.TaskRevokedError, match="expired"):
        old.run("add", 1, 1, countdown=0.45, expires=0.4)


def test_callbacks_and_errbacks_run(old: Client, line: Line) -> None:
    good, bad = line.marks.name(), line.marks.name()
    old.send("add", 2, 2, link=old.s("mark", mark=good))
    failed = old.send("fail", link_error=old.s("old_errback", mark=bad))

    assert line.marks.wait(good)["args"] == [4]
    assert line.marks.wait(bad)["id"] == failed.id


def test_a_group_gives_its_values_in_order(old: Client) -> None:
    assert old.group(*(old.s("add", i, i) for i in range(5)))().get(**OFTEN) == [0, 2, 4, 6, 8]


def test_a_chain_passes_values_on(old: Client) -> None:
    made = old.chain(old.s("add", 1, 2), old.s("add", 10), old.s("add", 100))
    assert made().get(timeout=WAIT_S) == 113


def test_a_chain_with_a_chord_in_it_ends(old_chords: Client) -> None:
    old = old_chords
    made = old.chain(
        old.s("add", 1, 1), old.group(old.s("add", 1), old.s("add", 2)), old.s("sum"),
        old.s("add", 100),
    )  # fmt: skip
    assert made().get(timeout=WAIT_S) == 107


def test_a_chord_gives_its_values_to_the_body(old_chords: Client, line: Line) -> None:
    old = old_chords
    header = [old.s("add", i, i) for i in range(5)]
    (values,), _ = old.chord(header, old.s("echo"))().get(timeout=WAIT_S)
    # A Celery worker does not look at the places of parts in this format.
    assert (sorted(values) if line.kind.worker == "celery" else values) == [0, 2, 4, 6, 8]
