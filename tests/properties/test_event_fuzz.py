"""A hundred thousand mutated events end nothing, fill nothing and drive no clock away."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator

import pytest

from tests.event_mutations import SANE_CLOCK_MAX, Mutations
from umbel import Umbel
from umbel.app.events.receiver import FAILURE_KINDS_MAX, Receiver, StopCapture
from umbel.cluster.clock import CLOCK_MAX, JUMP_MAX, Clock, order
from umbel.cluster.sequences import INCARNATIONS_MAX, RANGES_MAX
from umbel.wire import limits
from umbel.wire.content import accept_set
from umbel.wire.events import check, encode, read

COUNT = 100_000
SEED = 4
GROWTH_MIB_MAX = 100
ACCEPT = accept_set(["json", "msgpack", "yaml"])
REASONS = limits.REASONS | {
    *("not-an-event", "bad-type", "bad-hostname", "bad-timestamp", "bad-clock", "bad-number"),
    *("bad-uuid", "too-many"),
}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    app = Umbel(
        "fuzzed",
        broker="memory://",
        set_as_current=False,
        accept_content=["json", "msgpack", "yaml"],
    )
    yield Receiver(app, clock=Clock(1))
    app.close()


class Arrived:
    """What a transport hands over."""

    def __init__(self, *parts: object) -> None:
        self.body, self.content_type, self.content_encoding, self.headers = parts


def test_no_mutated_event_passes_the_barriers_or_drives_a_clock(receiver: Receiver) -> None:
    mutations = Mutations(random.Random(SEED))
    clock, before, handed_on = receiver.clock, peak_mib(), 0
    for _ in range(COUNT):
        receiver._on_message(Arrived(*mutations.wild_message()))
        for event in receiver._waiting:
            handed_on += 1
            assert check(event) == ""
            assert event.get("clock", 0) <= clock.value
            order(event)
            encode(event)
        receiver._waiting.clear()
    # The clock moved by no more than what can be true.
    jumps = receiver.counts.pop("clock-jump")
    assert jumps == clock.refused > 100
    assert clock.value <= SANE_CLOCK_MAX + JUMP_MAX < CLOCK_MAX
    # Both kinds were met in plenty, and nearly every reason; a task message is something else.
    assert min(handed_on, receiver.counts.total()) > COUNT / 10
    assert receiver.counts.keys() <= REASONS
    assert len(receiver.counts) >= len(REASONS) - 4
    # Nothing is kept that anybody could make grow.
    assert len(receiver.sequences) <= INCARNATIONS_MAX
    assert all(len(gaps) <= RANGES_MAX for gaps in receiver.gaps.values())
    assert peak_mib() - before < GROWTH_MIB_MAX


def test_whatever_can_be_published_is_read_or_refused_in_every_format() -> None:
    mutations, reasons = Mutations(random.Random(SEED + 1)), set[str]()
    for accept in (ACCEPT, accept_set(["json"]), frozenset[str]()):
        for _ in range(COUNT // 20):
            body, content_type, encoding, headers = mutations.wild_message()
            compression = headers.get("compression") if isinstance(headers, dict) else headers
            found = read(body, content_type, encoding, accept=accept, compression=compression)
            reasons.update(found.refused)
            assert accept or not found.events
    assert reasons <= REASONS


def test_handlers_that_fail_on_every_mutated_event_end_nothing(receiver: Receiver) -> None:
    """Types of events are the sender's words: what is kept by them is bounded."""

    def fail(event: object) -> None:
        raise ValueError(event)

    receiver.handlers["*"] = fail
    for number in range(2_000):
        event = {"type": f"kind-{number}", "hostname": "h", "timestamp": 1.0}
        assert receiver._hand_on(event)
    assert receiver.failed_count == 2_000
    assert len(receiver._failure_kinds) == FAILURE_KINDS_MAX

    def stop(_: object) -> None:
        raise StopCapture

    receiver.handlers["*"] = stop
    assert not receiver._hand_on({"type": "x"})
