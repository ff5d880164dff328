"""The inbox: order, wake-up, containment."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from umbel.worker.runtime.inbox import Inbox


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


def test_work_runs_in_the_order_in_which_it_was_posted(inbox: Inbox) -> None:
    seen: list[int] = []
    for number in range(100):
        inbox.post(lambda n=number: seen.append(n))  # type: ignore[misc]
    inbox.run()
    assert seen == list(range(100))


def test_posting_makes_the_inbox_readable_and_running_makes_it_silent(inbox: Inbox) -> None:
    assert select.select([inbox], [], [], 0)[0] == []
    inbox.post(lambda: None)
    assert select.select([inbox], [], [], 0)[0] == [inbox]
    inbox.run()
    assert select.select([inbox], [], [], 0)[0] == []


def test_one_failure_does_not_stop_the_rest(inbox: Inbox) -> None:
    seen: list[str] = []

    def fails() -> None:
        raise ValueError("no")

    inbox.post(fails)
    inbox.post(lambda: seen.append("after"))
    inbox.run()
    assert seen == ["after"]


def test_no_wake_up_is_lost_while_others_post(inbox: Inbox) -> None:
    done: list[int] = []

    def poster() -> None:
        for number in range(2_000):
            inbox.post(lambda n=number: done.append(n))  # type: ignore[misc]

    threads = [threading.Thread(target=poster) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(done) < 8_000:
        assert select.select([inbox], [], [], 10)[0], "posted work without a wake-up"
        inbox.run()
    for thread in threads:
        thread.join()
    assert len(done) == 8_000


def test_posting_to_a_closed_inbox_is_harmless() -> None:
    inbox = Inbox()
    inbox.close()
    inbox.post(lambda: None)
    assert len(inbox) == 1


def test_what_is_watched_is_called_when_it_is_readable(inbox: Inbox) -> None:
    seen: list[str] = []
    read, write = os.pipe()

    def fails() -> None:
        seen.append(os.read(read, 10).decode())
        raise ValueError("on purpose")

    try:
        inbox.watch(read, fails)
        assert select.select([inbox], [], [], 0)[0] == []
        assert len(inbox) == 0
        os.write(write, b"watched")
        assert select.select([inbox], [], [], 0)[0] == [inbox]
        assert len(inbox) == 1
        inbox.post(lambda: seen.append("posted"))
        inbox.run()
        assert seen == ["watched", "posted"]
        assert select.select([inbox], [], [], 0)[0] == []
        inbox.unwatch(read)
        os.write(write, b"again")
        inbox.wait(0)
        inbox.run()
        assert seen == ["watched", "posted"]
    finally:
        os.close(read)
        os.close(write)


def test_it_knows_its_thread(inbox: Inbox) -> None:
    assert not inbox.is_here
    inbox.run()
    assert inbox.is_here
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(inbox.is_here))
    thread.start()
    thread.join(10)
    assert elsewhere == [False]
