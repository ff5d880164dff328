"""Acks that are gathered: checked against what a broker makes of the frames."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from umbel.broker.amqp.settling import SLACK, Ledger


class Server:
    """The deliveries of a channel as RabbitMQ keeps them."""

    def __init__(self) -> None:
        self.last = 0
        self.waiting: list[int] = []
        self.frames = 0

    def deliver(self) -> int:
        self.last += 1
        self.waiting.append(self.last)
        return self.last

    def settle(self, tag: int, multiple: bool = False) -> None:
        assert tag in self.waiting, f"406: unknown delivery tag {tag}"
        if multiple:
            del self.waiting[: self.waiting.index(tag) + 1]
        else:
            self.waiting.remove(tag)

    def read(self, frames: bytes) -> None:
        for at in range(0, len(frames), 21):
            kind, channel_id, size, *method, tag, multiple, end = struct.unpack_from(
                ">BHIHHQBB", frames, at
            )
            assert (kind, channel_id, size, method, end) == (1, 3, 13, [60, 80], 0xCE)
            self.settle(tag, bool(multiple))
            self.frames += 1


@given(st.data())
def test_exactly_what_was_acknowledged_is(data: st.DataObject) -> None:
    server, ledger = Server(), Ledger()
    open_tags: list[int] = []
    for _ in range(data.draw(st.integers(0, 60))):
        step = data.draw(
            st.sampled_from(["deliver", "deliver", "ack", "ack", "reject", "flush", "all"])
        )
        if step == "deliver":
            if data.draw(st.integers(0, 5)) == 0:
                server.last += 1  # to a consumer that never acknowledges
            open_tags.append(server.deliver())
            ledger.delivered(open_tags[-1])
        elif step == "flush":
            server.read(ledger.frames(3))
            assert server.waiting == open_tags
            assert not len(ledger)
        elif open_tags:
            tag = data.draw(st.sampled_from(open_tags))
            if step == "ack":
                open_tags.remove(tag)
                assert ledger.gather(tag)
                continue
            server.read(ledger.frames(3))  # before anything else is said
            server.settle(tag, step == "all")
            ledger.answered(tag, step == "all")
            open_tags = (
                [t for t in open_tags if t > tag]
                if step == "all"
                else [t for t in open_tags if t != tag]
            )
    server.read(ledger.frames(3))
    assert server.waiting == open_tags


def test_what_is_settled_in_order_is_one_frame() -> None:
    server, ledger = Server(), Ledger()
    for _ in range(3):
        tags = [server.deliver() for _ in range(50)]
        for tag in tags:
            ledger.delivered(tag)
        for tag in reversed(tags):
            ledger.gather(tag)
        server.read(ledger.frames(3))
    assert server.waiting == []
    assert server.frames == 3


def test_behind_one_that_is_held_each_gets_its_own() -> None:
    server, ledger = Server(), Ledger()
    for tag in [server.deliver() for _ in range(5)]:
        ledger.delivered(tag)
    for tag in (1, 2, 4, 5):
        ledger.gather(tag)
    server.read(ledger.frames(3))
    assert (server.waiting, server.frames) == ([3], 3)
    ledger.gather(3)
    server.read(ledger.frames(3))
    assert (server.waiting, server.frames) == ([], 4)


def test_one_that_is_held_for_ever_costs_no_memory() -> None:
    server, ledger = Server(), Ledger()
    ledger.delivered(server.deliver())
    for _ in range(5 * SLACK):
        tag = server.deliver()
        ledger.delivered(tag)
        ledger.gather(tag)
        server.read(ledger.frames(3))
    assert server.waiting == [1]
    assert len(ledger._order) <= SLACK + 4


def test_a_tag_that_is_not_open_is_not_gathered() -> None:
    ledger = Ledger()
    assert not ledger.gather(1)
    ledger.delivered(1)
    assert ledger.gather(1)
    assert not ledger.gather(1)
    ledger.clear()
    assert ledger.frames(3) == b""
