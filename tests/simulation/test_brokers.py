"""The models of brokers and of the register promise what the real ones do, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from umbel.cluster.election_words import Claim, Claimed, ClaimFailed
from umbel.cluster.node import ClaimAnswered
from umbel.sim.brokers import TTL_S, AmqpModel, Broker, Link, Noise, RedisModel
from umbel.sim.checks import Checks
from umbel.sim.messages import BEAT, ELECT, REQUEST, Message
from umbel.sim.registers import TIMEOUT_S, Register
from umbel.sim.world import World


class Ear:
    """A node that only listens."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.link = Link(self)  # type: ignore[arg-type]
        self.heard: list[Any] = []

    def receive(self, message: Message) -> None:
        self.heard.append(message.body)


class Room:
    """A broker, some ears, and the time."""

    def __init__(self, model: type[Broker], ears: int = 3, seed: int = 1) -> None:
        self.world = World(seed)
        self.broker = model(self.world)
        self.ears = [Ear(n) for n in range(ears)]
        self.broker.links = [ear.link for ear in self.ears]

    def say(self, ear: Ear | None, body: Any, kind: int = ELECT, to: int | None = None) -> None:
        message = Message(kind, ear, body=body)  # type: ignore[arg-type]
        self.broker.publish(None if ear is None else ear.link, message, to)

    def wait(self, seconds: float = 0.1) -> None:
        self.world.run(self.world.now + seconds)


MODELS = [RedisModel, AmqpModel]


@pytest.mark.parametrize("model", MODELS)
def test_all_hear_what_is_published_and_one_hears_what_is_meant_for_it(
    model: type[Broker],
) -> None:
    room = Room(model)
    room.say(None, "all", REQUEST)
    room.say(None, "one", REQUEST, to=1)
    room.wait()
    assert [sorted(ear.heard) for ear in room.ears] == [["all"], ["all", "one"], ["all"]]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("noisy", [False, True])
def test_the_order_of_each_publisher_is_kept(model: type[Broker], noisy: bool) -> None:
    for seed in range(20):
        room = Room(model, seed=seed)
        if noisy:
            room.broker.noise = Noise(100.0)
            room.broker.noise.delay_s = 2.0
        for n in range(20):
            for ear in room.ears:
                room.say(ear, (ear.index, n))
            room.wait(0.001)
        room.wait(50)
        for ear in room.ears:
            for sender in range(3):
                heard = [n for index, n in ear.heard if index == sender]
                assert heard == list(range(20))


def orders(model: type[Broker]) -> set[tuple[Any, ...]]:
    room = Room(model, seed=3)
    room.broker.noise = Noise(100.0)
    room.broker.noise.delay_s = 2.0
    for n in range(10):
        for ear in room.ears:
            room.say(ear, (ear.index, n))
        room.wait(0.05)
    room.wait(50)
    return {tuple(ear.heard) for ear in room.ears}


def test_redis_has_one_order_for_all_and_amqp_has_not() -> None:
    assert len(orders(RedisModel)) == 1
    assert len(orders(AmqpModel)) == 3


def test_redis_loses_what_is_sent_to_one_that_is_not_connected_and_what_is_on_its_way() -> None:
    room = Room(RedisModel)
    ear = room.ears[0]
    room.broker.noise = Noise(100.0)
    room.broker.noise.delay_s = 50.0
    for n in range(20):
        room.say(None, f"on its way {n}", REQUEST)
    room.wait(0.01)
    room.broker.cut(ear.link)
    room.broker.noise = None
    room.say(None, "meanwhile", REQUEST)
    room.wait(1)
    assert room.broker.mend(ear.link)
    room.say(None, "afterwards", REQUEST)
    heard = len(ear.heard)
    room.wait(100)
    assert ear.heard[heard:] == ["afterwards"]
    assert "meanwhile" in room.ears[1].heard
    assert not room.broker.mend(ear.link)


def test_amqp_keeps_messages_for_a_while_and_delivers_the_last_ones_again() -> None:
    room = Room(AmqpModel)
    ear = room.ears[0]
    for n in range(5):
        room.say(None, n, REQUEST)
        room.wait()
    room.broker.cut(ear.link)
    room.say(None, "too old", REQUEST)
    room.wait(TTL_S)
    room.say(None, "kept", REQUEST)
    room.wait()
    room.broker.mend(ear.link)
    room.wait()
    assert ear.heard == [0, 1, 2, 3, 4, 2, 3, 4, "kept"]


@pytest.mark.parametrize("model", MODELS)
def test_events_of_a_node_without_a_connection_wait_in_it_except_heartbeats(
    model: type[Broker],
) -> None:
    room = Room(model)
    ear = room.ears[0]
    room.broker.cut(ear.link)
    room.say(ear, "elect", ELECT)
    room.say(ear, "beat", BEAT)
    assert [message.body for message in ear.link.outbox] == ["elect"]


@pytest.mark.parametrize("model", MODELS)
def test_half_open_connections_are_silent_one_way_and_break_when_they_are_found(
    model: type[Broker],
) -> None:
    room = Room(model)
    deaf, mute, other = room.ears
    deaf.link.deaf = mute.link.mute = True
    room.say(mute, "from mute")
    room.say(deaf, "from deaf")
    room.wait()
    assert (deaf.heard, mute.heard, other.heard) == ([], ["from deaf"], ["from deaf"])
    assert room.broker.mend(deaf.link)
    assert room.broker.mend(mute.link)
    assert not deaf.link.deaf
    assert not mute.link.mute


@pytest.mark.parametrize("model", MODELS)
def test_noise_loses_and_doubles_messages(model: type[Broker]) -> None:
    room = Room(model, ears=1)
    room.broker.noise = Noise(100.0)
    room.broker.noise.loss = room.broker.noise.dup = 0.3
    for n in range(300):
        room.say(room.ears[0], n)
        room.wait(0.01)
    room.wait(50)
    heard = room.ears[0].heard
    assert 150 < len(set(heard)) < 270
    assert 30 < len(heard) - len(set(heard)) < 200


# -- the register --------------------------------------------------------------------------


class Desk:
    """A register and two who claim."""

    def __init__(self, *, atomic: bool) -> None:
        self.world = World(1)
        self.checks = Checks(self.world)
        self.register = Register(self.world, self.checks, atomic=atomic)
        self.ears = [Ear(0), Ear(1)]

    def claim(self, ear: Ear, topic: str = "task") -> list[Any]:
        claim = Claim("e1", topic, None, f"w{ear.index}/1/1/1")
        self.register.claim(ear, claim)  # type: ignore[arg-type]
        before = len(ear.heard)
        self.world.run(self.world.now + TIMEOUT_S + 0.1)
        assert all(isinstance(one, ClaimAnswered) and one.claim == claim for one in ear.heard)
        return [one.answer for one in ear.heard[before:]]


def test_the_first_token_stays_and_everybody_is_told_it() -> None:
    desk = Desk(atomic=False)
    first, second = desk.ears
    assert desk.claim(first) == [Claimed("e1", True, "w0/1/1/1")]
    assert desk.claim(second) == [Claimed("e1", False, "w0/1/1/1")]
    assert desk.claim(first) == [Claimed("e1", True, "w0/1/1/1")]
    assert desk.checks.actions == {}


def test_an_atomic_register_carries_a_task_out_with_the_first_claim_only() -> None:
    desk = Desk(atomic=True)
    desk.claim(desk.ears[0])
    desk.claim(desk.ears[0])
    desk.claim(desk.ears[1])
    assert desk.checks.actions == {"e1": "w0/1/1/1"}
    assert desk.checks.violations == []


def test_an_atomic_register_leaves_other_topics_to_the_winner() -> None:
    desk = Desk(atomic=True)
    desk.claim(desk.ears[0], topic="other")
    assert desk.checks.actions == {}


def test_a_claim_without_a_connection_fails_and_one_whose_answer_is_lost_counts() -> None:
    desk = Desk(atomic=True)
    first, second = desk.ears
    first.link.up = False
    assert desk.claim(first) == [ClaimFailed("e1", "no answer")]
    assert desk.register.records == {}
    second.link.deaf = True
    assert desk.claim(second) == [ClaimFailed("e1", "no answer")]
    assert desk.register.records == {"e1": "w1/1/1/1"}
    second.link.deaf, second.link.mute = False, True
    assert desk.claim(second) == [ClaimFailed("e1", "no answer")]


def test_two_actions_are_a_violation_even_by_the_same_winner() -> None:
    checks = Checks(World(1))
    checks.acted("e1", "w1/1/1/1")
    checks.acted("e1", "w1/1/1/1")
    assert [violation.rule for violation in checks.violations] == [
        "at most one action per election"
    ]
