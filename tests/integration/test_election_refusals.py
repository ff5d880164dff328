"""Elections that nobody will hold: whoever asked is told, at once or by the result."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.servers import wait_until
from tests.sites import APP, Site
from tests.workers import run_umbel
from umbel import chain, chord, group
from umbel.app.canvas.maps import chunks, xmap
from umbel.exceptions import NotForElection

# A refusal is settled after 5.5 s; the rest is for a busy machine.
REFUSED_S = 40.0


def signature(site: Site, task: str, *args: Any, **options: Any) -> Any:
    return site.app.signature(f"{APP}.{task}", args=args, options=options)


def refused(site: Site, id_: str) -> str:
    """Wait for the result of an election that nobody holds; the text of the error."""
    with pytest.raises(NotForElection) as caught:
        site.app.AsyncResult(id_).get(timeout=REFUSED_S)
    assert site.app.AsyncResult(id_).state == "FAILURE"
    return str(caught.value)


def test_an_election_that_every_worker_refuses_comes_back_as_a_failure_with_the_reason(
    site: Site,
) -> None:
    for name in ("one@test", "two@test"):
        site.worker("threads", "-n", name, concurrency=1, settings={"election_allow": ["shop.*"]})
    result = signature(site, "add", 1, 1).election()
    site.app.control.election("rotate", "nobody-knows", {"realm": "eu"})
    # Only workers know that the task takes two arguments.
    bad = site.app.signature(f"{APP}.add", args=(1, 2, 3), options={"task_id": "arguments"})
    bad.election()
    with pytest.raises(NotForElection, match=r"'tests.probe_app.add' is not in election_allow"):
        result.get(timeout=REFUSED_S)
    assert "nobody-knows" in refused(site, "rotate")
    assert "election_allow" in refused(site, "arguments")
    assert site.runs("add") == 0
    for name in ("one@test", "two@test"):
        view = site.app.control.inspect([name], timeout=20).elections()
        assert view is not None
        assert view[name]["open"] == {}


def test_a_worker_that_refuses_beside_one_that_stands_changes_nothing(site: Site) -> None:
    site.worker("solo", "-n", "picky@test", concurrency=1, settings={"election_allow": []})
    site.worker("solo", "-n", "denies@test", concurrency=1, settings={"control_allow": "read-only"})
    site.worker("solo", "-n", "stands@test", concurrency=1)
    results = [signature(site, "record", f"r{n}", task_id=f"r{n}").election() for n in range(4)]
    assert [result.get(timeout=30) for result in results] == [1] * 4
    # And so it stays, also when those who refuse have made up their minds.
    refusers = ("picky@test", "denies@test")

    def forgotten() -> bool:
        views = site.app.control.inspect(refusers, timeout=20).elections() or {}
        return len(views) == 2 and not any(view["declined"] for view in views.values())

    assert not forgotten()
    site.app.control.election("nobody", "nobody-knows", None)
    refused(site, "nobody")
    assert [result.state for result in results] == ["SUCCESS"] * 4
    assert [site.runs(f"r{n}") for n in range(4)] == [1] * 4


def test_a_cluster_that_may_not_be_commanded_says_so_in_the_result(site: Site) -> None:
    site.worker("solo", "-n", "denies@test", concurrency=1, settings={"control_allow": "read-only"})
    result = signature(site, "add", 1, 1).election()
    with pytest.raises(NotForElection, match="control_allow"):
        result.get(timeout=REFUSED_S)


def test_when_the_only_worker_that_stands_dies_the_others_report_it(site: Site) -> None:
    site.worker("solo", "-n", "picky@test", concurrency=1, settings={"election_allow": []})
    stands = site.worker("solo", "-n", "stands@test", concurrency=1)
    # It stands, and cannot claim yet: nothing is bound there.
    lost = signature(site, "add", 1, 1, exchange="nowhere", routing_key="x").election()

    def candidates() -> list[str]:
        view = site.app.control.inspect(["picky@test"], timeout=5).elections() or {}
        declined = view["picky@test"]["declined"] if view else {}
        return list(declined[lost.id]["candidates"]) if lost.id in declined else []

    wait_until(lambda: candidates() == ["stands@test"], 20, "the candidate to be heard")
    stands.kill()
    with pytest.raises(NotForElection, match=r"picky@test: .* is not in election_allow"):
        lost.get(timeout=REFUSED_S)


def test_a_refusal_does_not_touch_the_result_of_a_task_that_has_one(site: Site) -> None:
    site.worker("threads", "-n", "one@test", concurrency=1)
    site.send("wait", "busy", task_id="busy")
    site.wait_until_begun("busy")
    done = site.send("add", 1, 1)
    site.open_gate("busy")
    assert done.get(timeout=20) == 2
    for id_ in (done.id, "fresh"):
        site.app.control.election(id_, "nobody-knows", None)
    refused(site, "fresh")
    assert done.get(timeout=5) == 2


def test_a_task_that_no_worker_knows_comes_back_as_a_failure(site: Site) -> None:
    site.worker("solo", "-n", "one@test", concurrency=1)
    result = site.app.signature("shop.unknown").election()
    with pytest.raises(Exception, match=r"shop\.unknown"):
        result.get(timeout=REFUSED_S)


def test_what_the_broker_refuses_for_good_comes_back_as_a_failure(site: Site) -> None:
    site.worker("solo", "-n", "one@test", concurrency=1)
    # On RabbitMQ this exchange is there, and a claim is won before the message comes back.
    result = signature(site, "add", 1, 1, exchange="amq.direct", routing_key="nobody").election()
    with pytest.raises(NotForElection, match=r"amq\.direct|NO_ROUTE"):
        result.get(timeout=120)


def test_results_by_rpc_bring_the_refusal_too(site: Site) -> None:
    rpc = {"result_backend": "rpc://"}
    site.app.conf.update(rpc)
    site.worker("solo", "-n", "one@test", concurrency=1, settings={**rpc, "election_allow": []})
    result = signature(site, "add", 1, 1).election()
    with pytest.raises(NotForElection, match="election_allow"):
        result.get(timeout=REFUSED_S)


# -- what the client sees ---------------------------------------------------------------------


def test_a_composition_is_refused_by_the_client_and_nothing_is_sent(site: Site) -> None:
    site.worker("solo", "-n", "one@test", concurrency=1)
    add = signature(site, "add", 1, 1)
    for shape in (chain(add, add), group(add, add), chord([add, add], add), chunks(add, [(1, 1)])):
        with pytest.raises(NotForElection, match="cannot be elected"):
            shape.election()
    view = site.app.control.inspect(["one@test"], timeout=20).elections()
    assert view == {"one@test": {"open": {}, "decided": {}, "declined": {}, "counts": {},
                                 "refused": {}}}  # fmt: skip


def test_a_map_and_a_task_with_callbacks_are_one_message_and_can_be_elected(site: Site) -> None:
    site.worker("solo", "-n", "one@test", concurrency=1)
    mapped = xmap(signature(site, "record"), ["a", "b"], app=site.app)
    assert mapped.election().get(timeout=30) == [1, 1]
    linked = signature(site, "record", "first")
    linked.link(site.app.signature(f"{APP}.record", args=("second",), immutable=True))
    assert linked.election().get(timeout=30) == 1
    wait_until(lambda: site.runs("second") == 1, 20, "the callback")


# -- nodes without gossip ---------------------------------------------------------------------


def test_a_node_without_gossip_stays_quiet_unless_it_is_asked_by_name(site: Site) -> None:
    deaf = site.worker("solo", "-n", "deaf@test", "--without-gossip", concurrency=1)
    site.worker("solo", "-n", "other@test", concurrency=1)
    replies = site.app.control.election("one", "note", "one", reply=True, timeout=2)
    assert [list(reply) for reply in replies or ()] == [["other@test"]]
    site.wait_until_begun("one", 30)
    assert signature(site, "add", 1, 1).election().get(timeout=30) == 2
    asked = site.app.control.election(
        "two", "note", "two", destination=["deaf@test"], reply=True, timeout=20
    )
    assert "--without-gossip" in str(asked)
    assert "election" not in deaf.output


def test_a_malformed_request_is_answered_with_an_error_that_names_it(
    site: Site, tmp_path: Any
) -> None:
    site.worker("solo", "-n", "one@test", concurrency=1)

    def ask(**arguments: Any) -> str:
        replies = site.app.control.broadcast(
            "election", arguments, destination=["one@test"], reply=True, timeout=20
        )
        assert replies
        return str(replies[0]["one@test"]["error"])

    action = {"task": f"{APP}.add", "args": [1, 1]}
    assert "id 7" in ask(id=7, topic="task", action=action)
    assert "topic None" in ask(id="x", action=action)
    assert "bytes" in ask(id="x" * 300, topic="task", action=action)
    assert "bytes" in ask(id="big", topic="task", action={**action, "args": ["x" * 2**18]})
    shown = run_umbel(
        ["-A", APP, "control", "election", "x" * 300, "task", "{}"],
        cwd=tmp_path, env=site.environment({}),
    )  # fmt: skip
    assert shown.process.returncode == 2, shown.output
    assert "200 bytes" in shown.output


def test_python_shows_the_same_elections_as_the_command_line(site: Site, tmp_path: Any) -> None:
    site.worker("solo", "-n", "one@test", concurrency=1)
    assert signature(site, "add", 1, 1, task_id="held").election().get(timeout=30) == 2
    site.app.control.election("refused", "nobody-knows", None)
    refused(site, "refused")
    shown = run_umbel(
        ["-A", APP, "inspect", "elections", "--json", "--timeout", "20", "-d", "one@test"],
        cwd=tmp_path, env=site.environment({}),
    )  # fmt: skip
    assert shown.process.returncode == 0, shown.output
    by_command = json.loads(shown.output[shown.output.index("{") :])
    by_python = site.app.control.inspect(["one@test"], timeout=20).elections()
    assert by_python is not None
    for view in (by_command["one@test"], by_python["one@test"]):
        assert view["decided"]["held"].pop("age") >= 0
    assert by_python == by_command
    assert by_python["one@test"]["decided"]["held"] == {"winner": "one@test"}


def test_a_refusal_takes_seconds_and_costs_the_asker_nothing(site: Site) -> None:
    site.worker("solo", "-n", "one@test", concurrency=1)
    began = time.monotonic()
    site.app.control.election("fast", "nobody-knows", None)
    assert time.monotonic() - began < 2
    refused(site, "fast")
