"""From facts to findings: what is fine, what is odd, what is broken."""

from __future__ import annotations

from typing import Any

import pytest

from umbel.cli.cluster_findings import (
    Census,
    QueueFacts,
    judge_clocks,
    judge_events,
    judge_nodes,
    judge_queues,
    judge_refused,
    judge_revocations,
    judge_versions,
)
from umbel.cli.findings import Finding, judge_exchange, judge_rabbitmq, judge_redis
from umbel.cli.rollcall import ALIVE, NO_ANSWER, NO_EVENTS, SILENT, NodeStatus

PONG = {"ok": "pong"}
INFO = {
    "redis_version": "7.0.15",
    "role": "master",
    "loading": 0,
    "used_memory": 2**20,
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
}
FACTS: dict[str, Any] = {
    "info": INFO,
    "script": "",
    "tracking": "",
    "time": "",
    "pubsub": "",
    "channels": ["/0.x"],
}


def told(found: Any) -> list[tuple[str, str]]:
    return [(one.verdict, one.check) for one in found]


def worst(found: Any) -> Finding:
    order = {"ok": 0, "warn": 1, "fail": 2}
    return max(found, key=lambda one: order[one.verdict])


# -- brokers -------------------------------------------------------------------------------------


def test_a_redis_as_it_should_be() -> None:
    found = list(judge_redis(FACTS))
    assert [one.line for one in found] == [
        "Redis 7.0.15",
        "1 MiB used, no bound set, maxmemory-policy noeviction",
        "channels can be heard: /0.x",
    ]
    assert {one.verdict for one in found} == {"ok"}


REDIS: dict[str, tuple[dict[str, Any], str, str]] = {
    "keys of queues may be deleted": (
        {"maxmemory_policy": "allkeys-lru", "maxmemory": 2**30},
        "fail",
        "set maxmemory-policy noeviction",
    ),
    "would be deleted with a bound": (
        {"maxmemory_policy": "allkeys-lru"},
        "warn",
        "set maxmemory-policy noeviction",
    ),
    "only what expires is deleted": (
        {"maxmemory_policy": "volatile-lru", "maxmemory": 2**30},
        "warn",
        "set maxmemory-policy noeviction",
    ),
    "nearly full": ({"maxmemory": 2**20 + 1}, "warn", "raise maxmemory"),
    "old": ({"redis_version": "5.0.3"}, "warn", "6.0 or newer"),
    "a replica": ({"role": "slave"}, "fail", "the address of its master"),
    "loading": ({"loading": 1}, "warn", "wait"),
}


@pytest.mark.parametrize("case", REDIS)
def test_a_redis_that_is_not(case: str) -> None:
    change, verdict, advice = REDIS[case]
    found = worst(judge_redis({**FACTS, "info": {**INFO, **change}}))
    assert found.verdict == verdict
    assert advice in found.line


@pytest.mark.parametrize(
    ("fact", "verdict"),
    [("script", "fail"), ("pubsub", "fail"), ("tracking", "warn"), ("time", "warn")],
)
def test_what_the_server_does_not_allow(fact: str, verdict: str) -> None:
    found = worst(judge_redis({**FACTS, fact: "NOPERM"}))
    assert found.verdict == verdict
    assert "(NOPERM)" in found.text


def test_a_server_that_does_not_answer_info_is_odd_only() -> None:
    assert told(judge_redis({**FACTS, "info": None})) == [("warn", "broker"), ("ok", "exchanges")]


def test_valkey_is_told_by_its_name() -> None:
    info = {**INFO, "valkey_version": "8.0.1", "redis_version": "7.2.4"}
    assert next(iter(judge_redis({**FACTS, "info": info}))).text == "Valkey 8.0.1"


@pytest.mark.parametrize("value", [None, "x", -1, 2.5, [], {}, "\x1b[2J"])
def test_no_answer_to_info_breaks_the_judgement(value: object) -> None:
    found = list(judge_redis({**FACTS, "info": dict.fromkeys(INFO, value)}))
    assert all(one.line.isprintable() for one in found)


def test_rabbitmq_tells_its_version_and_that_it_is_full() -> None:
    assert [
        one.line for one in judge_rabbitmq({"product": "RabbitMQ", "version": "3.10.8"}, None)
    ] == ["RabbitMQ 3.10.8"]
    old, full = judge_rabbitmq({"product": "RabbitMQ", "version": "3.7.1"}, "low on memory")
    assert (old.verdict, full.verdict) == ("warn", "fail")
    assert full.text == "the broker takes no messages (low on memory)"
    assert told(judge_rabbitmq({"product": "LavinMQ", "version": "1.2"}, None)) == [
        ("ok", "broker")
    ]
    assert told(judge_rabbitmq({}, None)) == [("ok", "broker")]


@pytest.mark.parametrize(
    ("trouble", "code", "verdict", "words"),
    [
        ("", None, "ok", "as it should be"),
        ("no exchange", 404, "warn", "the first worker or client makes it"),
        ("inequivalent arg 'type'", 406, "fail", "inequivalent arg 'type'"),
        ("inequivalent arg 'type'", 406, "fail", "delete it"),
        ("access refused", 403, "fail", "permission"),
        ("strange\x1b[2J", 500, "fail", "strange\\x1b[2J"),
        ("strange", None, "fail", "strange"),
    ],
)
def test_exchanges(trouble: str, code: int | None, verdict: str, words: str) -> None:
    found = judge_exchange("celeryev", trouble, code)
    assert (found.check, found.verdict) == ("exchanges", verdict)
    assert words in found.line
    assert "celeryev" in found.line


# -- nodes -----------------------------------------------------------------------------------------


def row(name: str, state: str = ALIVE, **fields: Any) -> NodeStatus:
    known = {"alive": True, "answered": True, "sw_ident": "py-umbel", "sw_ver": "1.2", **fields}
    return NodeStatus(name, state, **known)


def census(*rows: NodeStatus, **fields: Any) -> Census:
    answered = [one.hostname for one in rows if one.answered]
    return Census(
        rows=list(rows),
        took_s=dict.fromkeys(answered, 0.004),
        answers=dict.fromkeys(answered, PONG),
        **fields,
    )


def test_nodes_that_answer_are_named_with_their_time() -> None:
    (found,) = judge_nodes(census(row("b@h"), row("a@h")), "redis://h")
    assert (found.verdict, found.line) == ("ok", "2 answered: a@h (4 ms), b@h (4 ms)")


def test_many_nodes_are_counted() -> None:
    (found,) = judge_nodes(census(*(row(f"w{i}@h") for i in range(8))), "redis://h")
    assert found.line.startswith("8 answered: w0@h (4 ms), ")
    assert found.line.endswith(" and 3 more")


def test_nobody() -> None:
    (found,) = judge_nodes(census(), "redis://h")
    assert (found.verdict, found.text) == ("fail", "nobody answered on redis://h")


def test_who_is_heard_and_does_not_answer() -> None:
    found = list(judge_nodes(census(row("a@h"), row("b@h", NO_ANSWER, answered=False)), "r"))
    assert told(found) == [("ok", "nodes"), ("fail", "nodes")]
    assert found[1].text == "b@h sent heartbeats and did not answer"


def test_who_answers_with_an_error_is_there_all_the_same() -> None:
    seen = census(row("a@h"))
    seen.answers["a@h"] = {"error": "ping is not allowed here"}
    (found,) = judge_nodes(seen, "r")
    assert (found.verdict, "not allowed here" in found.line) == ("warn", True)


def test_who_goes_while_one_looks() -> None:
    gone = row("b@h", SILENT, alive=False, answered=False)
    assert told(judge_nodes(census(row("a@h"), gone), "r")) == [("ok", "nodes"), ("warn", "nodes")]


@pytest.mark.parametrize("fields", [{"twice": {"a@h"}}, {"lives": {"a@h": 2}}])
def test_one_name_for_two(fields: dict[str, Any]) -> None:
    found = worst(judge_nodes(census(row("a@h"), **fields), "r"))
    assert (found.verdict, found.text) == ("fail", "several nodes are called a@h")


@pytest.mark.parametrize(
    ("source", "reason", "check", "advice"),
    [
        ("events", "bad-clock", "events", "another event_exchange"),
        ("events", "bad-signature", "events", "the same control_signing_key"),
        ("control", "undecodable", "nodes", "another control_exchange"),
        ("tasks", "unregistered", "queues", "import the missing modules"),
        ("replies", "undecodable", "nodes", "another format"),
        ("greetings", "bad-life", "revocations", "one version"),
    ],
)
def test_what_a_node_refused_is_a_warning_with_the_way_out(
    source: str, reason: str, check: str, advice: str
) -> None:
    (found,) = judge_refused([row("a@h", refused={source: {reason: 3}}), row("b@h")])
    assert (found.verdict, found.check) == ("warn", check)
    assert "a@h refused 3 " in found.line
    assert f"({reason} 3)" in found.line
    assert advice in found.line
    assert found.details == {"node": "a@h", "source": source, "refused": {reason: 3}}


EVENTS: dict[str, tuple[list[NodeStatus], str, str]] = {
    "all on": ([row("a", task_events=True)], "ok", "events of tasks are on"),
    "all off": ([row("a", task_events=False)], "ok", "enable_events"),
    "unknown": ([row("a")], "ok", "do not tell"),
    "mixed": (
        [row("a", task_events=True), row("b", task_events=False)],
        "warn",
        "events of tasks come from a, not from b",
    ),
    "no heartbeat": ([row("a", NO_EVENTS)], "warn", "a sent no heartbeat"),
    "losses": ([row("a", lost=3)], "warn", "events were lost on a"),
}


@pytest.mark.parametrize("case", EVENTS)
def test_events(case: str) -> None:
    rows, verdict, words = EVENTS[case]
    found = worst(judge_events(census(*rows)))
    assert found.verdict == verdict
    assert words in found.line


def test_clocks_that_agree_are_one_line() -> None:
    (found,) = judge_clocks({"a": 0.2, "b": -0.4})
    assert (found.verdict, found.text) == ("ok", "wall clocks agree to within 0.40 s")
    assert list(judge_clocks({})) == []


def test_clocks_that_do_not() -> None:
    found = list(judge_clocks({"a": 60.0, "b": -3.0, "c": -60.0, "d": 0.0}))
    assert [(one.verdict, one.text) for one in found] == [
        ("fail", "the clock of a is 60.0 s ahead of the one here (it takes commands for expired)"),
        ("warn", "the clock of b is 3.0 s behind the one here"),
        ("fail", "the clock of c is 60.0 s behind the one here"),
    ]


def test_versions() -> None:
    (same,) = judge_versions([row("a"), row("b")])
    assert (same.verdict, same.text) == ("ok", "all run umbel 1.2")
    (mixed,) = judge_versions([row("a"), row("b", sw_ident="py-celery", sw_ver="5.7.0")])
    assert (mixed.verdict, mixed.text) == (
        "warn",
        "several versions: celery 5.7.0 on b; umbel 1.2 on a",
    )
    assert list(judge_versions([row("a", sw_ident=None)])) == []


# -- queues and revocations ------------------------------------------------------------------------


def test_queues_that_are_consumed_are_one_line() -> None:
    (found,) = judge_queues(
        {"a": QueueFacts(waiting=0), "b": QueueFacts(True, 3, 1), "c": QueueFacts()},
        {"a": ["w@h"], "c": ["w@h"]},
    )
    assert (found.verdict, found.line) == ("ok", "consumed, with what waits: a 0, b 3, c ?")


def test_a_queue_without_consumers_is_told_with_its_length() -> None:
    (found,) = judge_queues({"money": QueueFacts(True, 12, 0)}, {})
    assert (found.verdict, found.text) == (
        "warn",
        "money: 12 messages wait, and nobody consumes it",
    )
    assert "-Q money" in found.advice
    (found,) = judge_queues({"money": QueueFacts(exists=False)}, {})
    assert found.text == "money is not there yet"
    (found,) = judge_queues({"money": QueueFacts()}, {})
    assert found.text == "money: nobody knows how many messages wait, and nobody consumes it"


def test_revocations() -> None:
    (none,) = judge_revocations({"a": [], "b": []}, state_file=False)
    assert (none.verdict, none.line) == ("ok", "no task is revoked")
    (same,) = judge_revocations({"a": ["x"], "b": ["x"]}, state_file=False)
    assert (same.verdict, "--statedb" in same.line) == ("ok", True)
    (kept,) = judge_revocations({"a": ["x", "y"]}, state_file=True)
    assert kept.line == "2 revoked tasks, known to all"
    (apart,) = judge_revocations({"a": ["x", "y"], "b": ["x"], "c": {"error": "no"}}, False)
    assert (apart.verdict, apart.text) == ("warn", "2 revoked tasks, of which b knows not all")
    assert list(judge_revocations({"c": {"error": "no"}}, False)) == []
