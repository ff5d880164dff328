"""Names of registers and how tokens are kept."""

from __future__ import annotations

import itertools

import pytest

from umbel.broker.registers import claims
from umbel.broker.registers.amqp import MORE, NOBODY, split
from umbel.broker.registers.claims import (
    ID_CHARS_MAX,
    TOKEN_CHARS_MAX,
    read,
    register_name,
    written,
)

IDS = [
    "0b0d5d5e-8a0c-4e60-9f2a-0d6b7b1b2c3d",
    "nightly:2027-01-01",
    "a" * 64,
    "a" * 65,
    "a" * ID_CHARS_MAX,
    "wählt",
    "with space",
    "quo'te",
    "~",
    "line\nbreak",
    "nul\0",
    "\udcff",
    "*",
    "#",
]
TOKENS = ["w1@h/1/2/3", "ä@ö", "it's", "100%", "a&b?c", " ", "\udcff", "\0", "%41", "x" * 255]


def test_a_plain_id_is_part_of_the_name() -> None:
    assert register_name("nightly") == "umbel.election.nightly"


def test_every_id_has_a_name_of_its_own_that_any_broker_takes() -> None:
    names = [register_name(one) for one in IDS]
    assert len(set(names)) == len(IDS)
    for name in names:
        assert name.startswith("umbel.election.")
        assert len(name.encode("ascii")) <= 128
        assert name.isprintable()
        assert "'" not in name


def test_no_id_can_be_made_to_look_like_another_ones_hash() -> None:
    hashed = register_name("with space").removeprefix(claims.PREFIX)
    assert register_name(hashed) != register_name("with space")


@pytest.mark.parametrize("bad", ["", "a" * (ID_CHARS_MAX + 1)])
def test_an_id_without_end_or_without_anything_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="1 to 1000 characters"):
        register_name(bad)


@pytest.mark.parametrize("bad", ["", "a" * (TOKEN_CHARS_MAX + 1)])
def test_a_token_without_end_or_without_anything_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="1 to 255 characters"):
        written(bad)


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_read_as_it_was_given(token: str) -> None:
    kept = written(token)
    assert kept.isascii()
    assert not set(kept) & {"'", MORE, NOBODY}
    assert read(kept) == token


def test_a_plain_token_can_be_read_on_the_broker() -> None:
    assert written("worker-1@host.local/77/1794771703123456/3").startswith("worker-1@host.local/77")


def test_what_others_have_written_is_told_as_it_is() -> None:
    assert read("%FF") == "%FF"


@pytest.mark.parametrize("ttl_s", [0, -1, 31 * 86_400, float("nan"), float("inf")])
def test_a_time_to_live_that_brokers_do_not_take_is_refused(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="lives"):
        claims.milliseconds(ttl_s)


# -- in the arguments of a queue -----------------------------------------------------------


def test_a_token_that_there_is_room_for_is_in_one_argument() -> None:
    assert split("a" * 80, 80) == ("", "a" * 80)


def test_a_longer_one_goes_on_in_the_other() -> None:
    kept = "".join(itertools.islice(itertools.cycle("0123456789"), 159))
    exchange, key = split(kept, 80)
    assert (len(exchange), len(key)) == (80, 80)
    assert key.removesuffix(MORE) + exchange == kept


def test_the_longest_ones_end_in_a_hash_that_keeps_them_apart() -> None:
    one, other = split("a" * 254 + "b", 80), split("a" * 254 + "c", 80)
    assert one != other
    assert one[1] == other[1] == "a" * 79 + MORE
    assert len(one[0]) == len(other[0]) == 80


def test_names_that_leave_no_room_still_give_each_token_arguments_of_its_own() -> None:
    assert split("a" * 100, -7) != split("a" * 101, -7)
