"""Reading what RabbitMQ says of queues that differ."""

from __future__ import annotations

import pytest

from umbel.broker.tasks.refusals import Refusal, read_refusal, room_for_value

KEY = "x-dead-letter-routing-key"
QUEUE = "queue 'umbel.election.1' in vhost '/'"
BEGIN = f"PRECONDITION_FAILED - inequivalent arg '{KEY}' for {QUEUE}: "


@pytest.mark.parametrize(
    "text",
    [
        # servers of today
        BEGIN + "received 'w2@h/2' but current is 'w1@h/1'",
        BEGIN + "received none but current is the value 'w1@h/1' of type 'longstr'",
        # older ones
        BEGIN + "received the value 'w2@h/2' of type 'longstr' but current is the value 'w1@h/1' "
        "of type 'longstr'",
        BEGIN.replace("' for", "'for") + "received 'x' but current is 'w1@h/1'",
        # cut behind what is wanted
        BEGIN + "received none but current is the value 'w1@h/1' of ty...",
        BEGIN + "received 'w2@h/2' but current is 'w1@h/1'...",
        # names that are hard to read
        BEGIN.replace("/", "it's but current is 'me'") + "received '?' but current is 'w1@h/1'",
        BEGIN + "received '' but current is 'w1@h/1'",
    ],
)
def test_the_value_that_is_there_is_read(text: str) -> None:
    assert read_refusal(text) == Refusal(KEY, "w1@h/1")


@pytest.mark.parametrize(
    "text",
    [
        BEGIN + "received 'w2' but current is 'w1@a-name-that-is-too-lo...",
        BEGIN + "received none but current is the val...",
        BEGIN + "received 'w2@a-name-that-is-too-long-to-tell-anything-e...",
        BEGIN + "received 'w2' but curre...",
    ],
)
def test_a_value_that_is_not_told_in_full_is_not_made_up(text: str) -> None:
    assert read_refusal(text) == Refusal(KEY, None)


def test_an_argument_that_is_not_there_is_told_from_one_that_is_not_told() -> None:
    text = BEGIN + "received the value 'w1' of type 'longstr' but current is none"
    assert read_refusal(text) == Refusal(KEY, None, is_absent=True)


def test_the_argument_that_differs_is_named() -> None:
    text = (
        "PRECONDITION_FAILED - inequivalent arg 'x-expires' for queue 'q' in vhost '/': "
        "received '5000' but current is '86400000'"
    )
    assert read_refusal(text) == Refusal("x-expires", "86400000")
    durable = (
        "PRECONDITION_FAILED - inequivalent arg 'durable' for queue 'q' in vhost '/': "
        "received 'true' but current is 'false'"
    )
    assert read_refusal(durable) == Refusal("durable", "false")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "PRECONDITION_FAILED - partial tx completion",
        f"PRECONDITION_FAILED - invalid arg 'x-max-length' for {QUEUE}: {{value_negative,-1}}",
        "PRECONDITION_FAILED - inequivalent arg",
    ],
)
def test_other_errors_are_not_taken_for_a_refusal(text: str) -> None:
    assert read_refusal(text) is None


def test_a_value_as_long_as_there_is_room_for_is_told_in_full() -> None:
    queue, vhost = "umbel.election.0b0d5d5e-8a0c-4e60-9f2a-0d6b7b1b2c3d", "/"
    value = "a" * room_for_value(KEY, queue, vhost)
    text = (
        f"PRECONDITION_FAILED - inequivalent arg '{KEY}' for queue '{queue}' in vhost '{vhost}': "
        f"received '?' but current is '{value}'"
    )
    assert len(text) == 255
    assert read_refusal(text) == Refusal(KEY, value)
    assert len(value) == 80
