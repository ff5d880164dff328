"""Seeds: none may break a rule, and each must be the same play wherever it is played.

A seed that fails prints itself and the command that repeats it. It is kept below when its cause is
found, with whatever had to be taken out to see it fail again.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from umbel.sim import checks, faults
from umbel.sim.mutations import MUTATIONS
from umbel.sim.plays import Play, Setting, play
from umbel.sim.runs import how_to_repeat, run

CHUNKS, SEEDS_PER_CHUNK = 20, 250


def failures(first: int, count: int, setting: Setting) -> list[str]:
    """What failed, ready to be read by whoever has to find out why."""
    summary = run(range(first, first + count), setting)
    return [
        f"{how_to_repeat(one.seed, setting)}: {'; '.join(map(str, one.violations))}"
        for one in summary.failures
    ]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_five_thousand_seeds_break_no_rule(chunk: int) -> None:
    assert failures(chunk * SEEDS_PER_CHUNK, SEEDS_PER_CHUNK, Setting()) == []


@pytest.mark.parametrize("kind", faults.FAULTS)
def test_each_fault_alone_breaks_no_rule(kind: str) -> None:
    assert failures(0, 40, Setting(nodes=4, faults=(kind,))) == []


@pytest.mark.parametrize(
    "setting",
    [
        Setting(nodes=1),
        Setting(nodes=2),
        Setting(nodes=9),
        Setting(nodes=25, seconds=2.0),
        Setting(nodes=4, seconds=60.0),
        Setting(nodes=3, faults=()),
    ],
    ids=["one node", "two nodes", "nine nodes", "many nodes", "a minute", "no faults"],
)
def test_clusters_of_other_sizes_and_longer_plays_break_no_rule(setting: Setting) -> None:
    assert failures(0, 12, setting) == []


@pytest.mark.parametrize("nodes", [1, 2, 5, 9])
def test_without_faults_one_node_acts_as_soon_as_candidates_are_collected(nodes: int) -> None:
    for seed in range(20):
        found = play(seed, Setting(nodes=nodes, faults=()))
        assert found.figures["actions"] == found.figures["elections"], seed
        assert 0.5 <= found.figures["slowest_s"] < 0.6, seed


# A stranger in a play sends no heartbeats, so that nobody notices that it is not there.
REFUSING = (*(kind for kind in faults.FAULTS if kind != "forge"), faults.REFUSE)


@pytest.mark.parametrize("chunk", range(4))
def test_elections_that_some_or_all_refuse_are_carried_out_or_refused_once(chunk: int) -> None:
    assert failures(chunk * SEEDS_PER_CHUNK, SEEDS_PER_CHUNK, Setting(faults=REFUSING)) == []


def test_without_faults_an_election_is_refused_only_where_everybody_refuses() -> None:
    refused_count = 0
    for seed in range(100):
        played = Play(seed, Setting(nodes=4, faults=(faults.REFUSE,)))
        played.run()
        for election_id in played.checks.requested_at:
            nodes = [node for node in played.nodes if not played.refuses(node, election_id)]
            stood = [node for node in nodes if election_id in node.informed]
            refused = election_id in played.checks.failures
            assert refused is not bool(stood), (seed, election_id)
            assert refused is not (election_id in played.checks.actions), (seed, election_id)
            refused_count += refused
    assert refused_count > 20


# -- the same seed is the same play --------------------------------------------------------

SAMPLE = range(40)


def hashes() -> list[int]:
    return [play(seed).hash for seed in SAMPLE]


def test_a_seed_is_the_same_play_every_time_and_another_seed_is_another() -> None:
    assert hashes() == hashes()
    assert len(set(hashes())) == len(SAMPLE)


def test_the_story_changes_nothing() -> None:
    for seed in SAMPLE:
        told, untold = play(seed, tells=True), play(seed)
        assert told.hash == untold.hash
        assert told.figures == untold.figures
        assert told.story
        assert untold.story == []


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_a_seed_is_the_same_play_in_every_process(hash_seed: str) -> None:
    code = (
        "from umbel.sim.plays import play;"
        f"print(*(play(seed).hash for seed in range({len(SAMPLE)})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [int(word) for word in done.stdout.split()] == hashes()


# -- the checks bite -----------------------------------------------------------------------


def rules_broken(seed: int, setting: Setting) -> set[str]:
    return {violation.rule for violation in play(seed, setting).violations}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_taken_out_is_found_missing(name: str) -> None:
    mutation = MUTATIONS[name]
    setting = Setting(faults=mutation.faults, parts=mutation.parts)
    assert any(mutation.rule in rules_broken(seed, setting) for seed in range(500))


def test_without_a_register_two_nodes_act_within_a_few_seeds() -> None:
    setting = Setting(nodes=3, parts=MUTATIONS["no-register"].parts)
    broken = [checks.ONE_ACTION in rules_broken(seed, setting) for seed in range(20)]
    assert sum(broken) > 10


def test_a_register_that_forgets_is_found_to_be_unsafe() -> None:
    setting = Setting(nodes=3, faults=(*faults.UNSAFE, "pause"))
    assert any(checks.ONE_ACTION in rules_broken(seed, setting) for seed in range(50))


def test_a_failing_seed_says_how_to_repeat_it() -> None:
    setting = Setting(3, ("loss", "dup"), 2.5, MUTATIONS["no-register"].parts)
    assert how_to_repeat(7, setting) == (
        "umbel sim --seed 7 --nodes 3 --faults loss,dup --seconds 2.5 --mutation no-register"
    )
    assert how_to_repeat(7, Setting()) == "umbel sim --seed 7"
    assert how_to_repeat(7, Setting(faults=())) == "umbel sim --seed 7 --faults none"


# -- kept ----------------------------------------------------------------------------------

# The mutation with which each failed, and the seeds. What they showed:
# - no-interval: a `worker-elect` that told no heartbeat interval kept the dead alive for minutes.
# - no-hearing: a joiner took over a forged clock. Others refused it, as it jumped too far; because
#   they dropped its events as well it was never seen again.
# - no-comparing: a revocation was lost on the way to one node, which had no reason to mingle.
# - no-echo, no-hold-up, no-grace: who could not hear marked nodes as lost that were there.
KEPT = {
    "no-interval": (14, 21),
    "no-hearing": (65, 109),
    "no-comparing": (0, 4),
    "no-echo": (84, 179),
    "no-hold-up": (5, 84),
    "no-grace": (3, 25),
}


@pytest.mark.parametrize("name", KEPT)
def test_seeds_that_once_failed_break_no_rule(name: str) -> None:
    mutation = MUTATIONS[name]
    mutated = Setting(faults=mutation.faults, parts=mutation.parts)
    for seed in KEPT[name]:
        assert rules_broken(seed, Setting(faults=mutation.faults)) == set()
        assert rules_broken(seed, mutated) == {mutation.rule}


# -- single scenes -------------------------------------------------------------------------


def scene(seed: int, nodes: int) -> Play:
    """A cluster without faults, but for those that the test adds."""
    return Play(seed, Setting(nodes=nodes, faults=(), seconds=4.0), tells=True)


@pytest.mark.parametrize("kind", ["pause", "crash"])
def test_a_winner_that_fails_as_it_claims_is_overtaken_or_has_acted(kind: str) -> None:
    overtaken = 0
    for seed in range(40):
        cluster = scene(seed, 3)
        cluster._traps.append(kind)
        outcome = cluster.run()
        assert outcome.violations == [], seed
        first = next(line for line in outcome.story if "claims" in line.text)
        acts = [line.who for line in outcome.story if line.text.startswith("ACTS")]
        overtaken += first.who not in acts
    assert overtaken or kind == "pause"


def test_a_cluster_that_is_cut_off_as_a_whole_elects_when_it_is_back() -> None:
    cluster = scene(5, 3)
    for node in cluster.nodes:
        cluster.world.at(0.0, lambda node, _: cluster.broker.cut(node.link), node)
        cluster.world.at(3.0, lambda node, _: faults._mend(cluster, node), node)
    outcome = cluster.run()
    assert outcome.violations == []
