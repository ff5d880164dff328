"""For all histories: the table is what a slow and obvious reading of the rules gives."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.cluster.membership import (
    ECHO_S,
    GRACE_S,
    Deaf,
    Effect,
    Heard,
    Input,
    Joined,
    Left,
    Lost,
    Membership,
    Node,
    Offline,
    Returned,
    Tick,
    credible_freq_s,
    is_alive,
)

NEVER = 10.0**9

hostnames = st.sampled_from(["me", "a", "b"])
pids = st.sampled_from([None, 1, 2])
incs = st.sampled_from([None, None, 10, 20])
kinds = st.sampled_from(["online", "heartbeat", "heartbeat", "other"])
freqs = st.sampled_from([None, 1.0, 2, 3.5, float("nan"), "x", -1, 1e-9])
inputs = st.one_of(
    st.builds(Heard, hostnames, pids, incs, freqs, kinds),
    st.builds(Offline, hostnames, pids, incs),
    st.just(Tick()),
    st.just(Deaf()),
)
echoes = st.sampled_from([None, None, 0.0, 1.0, 3.0])  # how long ago an own event was heard
pauses = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0, 2.0, 4.0, 5.0, 5.1, 30.0])
histories = st.lists(st.tuples(pauses, inputs, echoes), max_size=60)


class Model:
    """Remembers every incarnation for ever, and looks at all of them each time."""

    def __init__(self) -> None:
        self.status: dict[Node, str] = {}  # alive, lost, left, replaced
        self.heard: dict[Node, float] = {}
        self.freq: dict[Node, float] = {}
        self.deaf: list[float] = []

    def who(self, hostname: str, *wanted: str) -> Node | None:
        found = [n for n, s in self.status.items() if n.hostname == hostname and s in wanted]
        assert len(found) <= 1, found
        return found[0] if found else None

    def step(self, what: Input, now: float) -> list[Effect]:
        if isinstance(what, Tick):
            return self.tick(what.echo_at, now)
        if isinstance(what, Deaf):
            self.deaf.append(now)
            return []
        if what.hostname == "me":
            return []
        node = Node(what.hostname, what.pid, what.inc)
        if what.pid is None and what.inc is None:
            node = self.who(what.hostname, "alive", "lost") or node
        return self.hear(node, what, now) if isinstance(what, Heard) else self.bye(node)

    def bye(self, node: Node) -> list[Effect]:
        before = self.status.get(node)
        self.status[node] = "left"
        return [Left(node)] if before == "alive" else []

    def hear(self, node: Node, what: Heard, now: float) -> list[Effect]:
        status = self.status.get(node)
        alive = self.who(node.hostname, "alive")
        if status == "left":
            if node.inc is not None or what.kind != "online":
                return []
            status = None
        if alive not in (None, node) and (status == "replaced" or not newer(node, alive, what)):
            return []
        effects: list[Effect] = []
        for other, state in list(self.status.items()):
            if other.hostname == node.hostname and other != node and state in ("alive", "lost"):
                self.status[other] = "replaced"
                if state == "alive":
                    effects.append(Lost(other, now - self.heard[other]))
        if status is None:
            effects.append(Joined(node))
        elif status in ("lost", "replaced"):
            effects.append(Returned(node))
        if what.freq_s is not None or status not in ("alive", "lost"):
            self.freq[node] = credible_freq_s(what.freq_s)
        self.status[node], self.heard[node] = "alive", now
        return effects

    def tick(self, echo_at: float | None, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for node, status in self.status.items():
            if status == "alive":
                since, freq_s = max([self.heard[node], *self.deaf]), self.freq[node]
                if any(now < at + GRACE_S for at in self.deaf) or is_alive(since, freq_s, now):
                    continue
                if echo_at is None or echo_at >= since + freq_s + ECHO_S:
                    self.status[node] = "lost"
                    effects.append(Lost(node, now - self.heard[node]))
        return effects


History = list[tuple[float, Input, float | None]]


def moments(history: History) -> Iterator[tuple[float, Input]]:
    """When what happens, with an echo in every tick that has one."""
    now = 0.0
    for pause_s, what, echo_s in history:
        now += pause_s
        if isinstance(what, Tick) and echo_s is not None:
            what = Tick(now - echo_s)  # noqa: PLW2901 - the same tick, completed
        yield now, what


def newer(node: Node, than: Any, what: Heard) -> bool:
    if node.inc is None or than.inc is None:
        return what.kind != "other"
    return node.inc > than.inc


def as_set(effects: list[Effect]) -> Any:
    """Nodes that are lost by the same tick are so in any order."""
    lost = all(isinstance(effect, Lost) for effect in effects)
    return set(effects) if lost else effects


@settings(max_examples=400)
@given(histories)
def test_the_machine_does_what_the_slow_model_does(history: History) -> None:
    members, model = Membership("me", memory_s=NEVER), Model()
    for now, what in moments(history):
        assert as_set(members.step(what, now)) == as_set(model.step(what, now))
        alive = {node for node, status in model.status.items() if status == "alive"}
        assert {member.node for member in members.alive()} == alive
        for member in members.alive():
            assert member.heard_at_s == model.heard[member.node]
            assert member.freq_s == model.freq[member.node]


LETTERS = {Joined: "J", Returned: "R", Left: "L", Lost: "X"}


@settings(max_examples=300)
@given(histories)
def test_whoever_comes_goes_once_and_only_the_lost_return(
    history: History,
) -> None:
    members = Membership("me", memory_s=NEVER)
    lives: dict[Node, str] = defaultdict(str)
    for now, what in moments(history):
        for effect in members.step(what, now):
            lives[effect.node] += LETTERS[type(effect)]
    for node, life in lives.items():
        assert node.hostname != "me"
        one_life = r"J(XR)*[LX]?"
        # A pid that has left, or was lost and then left, may begin again; an incarnation may not.
        pattern = one_life if node.inc is not None else rf"({one_life})+"
        assert re.fullmatch(pattern, life), (node, life)
        assert (life[-1] in "JR") == (node in {member.node for member in members.alive()})


@given(histories)
def test_nobody_is_lost_by_silence_before_his_time_nor_kept_after_it(
    history: History,
) -> None:
    members, deaf_until = Membership("me"), -NEVER
    for now, what in moments(history):
        deaf_until = now if isinstance(what, Deaf) else deaf_until
        before = {member.node: member for member in members.alive()}
        effects = members.step(what, now)
        if not isinstance(what, Tick):
            continue
        assert not effects or now >= deaf_until + GRACE_S
        for effect in effects:
            if isinstance(effect, Lost):
                member = before[effect.node]
                assert not is_alive(max(member.heard_at_s, deaf_until), member.freq_s, now)


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.builds(Heard, st.text("abcdef", min_size=1, max_size=2), pids, incs, freqs, kinds),
            st.builds(Offline, st.text("abcdef", min_size=1, max_size=2), pids, incs),
            st.just(Tick()),
        ),
        max_size=200,
    ),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_no_history_makes_a_table_grow_beyond_its_bound(
    history: list[Input], nodes_max: int, memory_max: int
) -> None:
    members = Membership("me", nodes_max=nodes_max, memory_max=memory_max)
    for number, what in enumerate(history):
        members.step(what, float(number))
        assert len(members._alive) + len(members._lost) <= nodes_max
        assert len(members._memories) <= memory_max
        assert not members._alive.keys() & members._lost.keys()
        unestablished = [name for names in members._by_signs for name in names]
        assert sorted(unestablished) == sorted(members._signs)
        assert members._signs.keys() <= members._alive.keys()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ghosts=st.integers(1, 300),
    bursts=st.integers(1, 5),
    freq=st.sampled_from([None, 2.0, 3_600, 86_400, float("inf")]),
)
def test_bursts_of_invented_nodes_hide_no_real_one(
    seed: int, ghosts: int, bursts: int, freq: Any
) -> None:
    """Real nodes beat every two seconds; invented ones come in bursts, under any names."""
    dice, nodes_max, beat_s = Random(seed), 100, 2.0
    members = Membership("me", nodes_max=nodes_max, freq_max_s=60.0)
    real = [f"real{number}" for number in range(10)]
    at = {dice.uniform(0, 90.0) for _ in range(bursts)}
    killed_at, lost_at = 100.0, None
    for step in range(480):
        now = step / 4
        for number, name in enumerate(real):
            if (now + number / 5) % beat_s < 0.25 and not (name == "real0" and now >= killed_at):
                members.step(Heard(name, 1, 1, beat_s), now)
        if any(now - 0.25 < moment <= now for moment in at):
            for number in range(ghosts):
                members.step(Heard(f"ghost{step}.{number}", 1, 1, freq), now)
        for effect in members.step(Tick(), now):
            if isinstance(effect, Lost) and effect.node.hostname == "real0":
                lost_at = now
        assert len(members) <= nodes_max
        assert members.established_count <= len(real), "strangers are never counted"
        if now >= 99 and now < killed_at:
            assert {name for name in real if name in members} == set(real)
            assert members.established() == set(real)
    assert lost_at is not None
    assert killed_at < lost_at <= killed_at + 2 * beat_s + 1.0
