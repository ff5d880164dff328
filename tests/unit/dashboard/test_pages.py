"""What the pages tell, in HTML and as JSON; and that no input breaks them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.dashboard.client import Client, Feed
from tests.unit.pipeline.published import World
from umbel.dashboard import stream
from umbel.dashboard.api import PATHS, ROOT
from umbel.dashboard.application import make_for
from umbel.dashboard.guard import Visit
from umbel.dashboard.identity import Identity
from umbel.dashboard.live.polling import NodeAnswer, QueueFacts, Sample
from umbel.dashboard.site import PAGES, Site

STRANGER = Visit(Identity(), "t" * 43)


# -- the cluster -------------------------------------------------------------------------------


def test_the_cluster_page_tells_every_node(client: Client, site: Site, feed: Feed) -> None:
    feed.worker("w1@host", active=3)
    feed.worker("w2@host", timestamp=time.time() + 30)
    feed.worker("w3@host")
    feed.event("worker-offline", "w3@host", freq=2.0)
    site.polling._nodes["w1@host"] = NodeAnswer(0.0, pool_size=4, prefetch=16, uptime_s=60)
    site.polling._nodes["w9@host"] = NodeAnswer(0.0, pool_size=2)
    facts = client.get("/api/v1/cluster").json()
    nodes = {node["name"]: node for node in facts["nodes"]}
    assert nodes["w1@host"]["state"] == "online"
    assert nodes["w1@host"]["saturation"] == 0.75
    assert nodes["w1@host"]["prefetch"] == 16
    assert nodes["w2@host"]["skewed"] is True
    assert nodes["w3@host"]["state"] == "left"
    assert nodes["w9@host"]["state"] == "silent"
    assert facts["totals"]["nodes_alive"] == 2
    text = client.get("/").text
    assert "w9@host answers, but sends no events" in text
    assert "is off by more than a second" in text
    for name in nodes:
        assert name in text


def test_a_lost_node_fades_and_then_leaves(site: Site, feed: Feed) -> None:
    from umbel.dashboard.pages import cluster

    feed.worker("w1@host")
    worker = site.live.state.workers["w1@host"]
    now = site.live.now_s()

    def row(ago_s: float) -> Any:
        worker.heard_at = now - ago_s
        return next(iter(cluster.facts(site, {})["nodes"]), None)

    assert row(0.0)["state"] == "online"
    assert (row(30.0)["state"], row(30.0)["fading"]) == ("lost", False)
    assert row(cluster.FADE_S + 1)["fading"]
    assert row(cluster.GONE_S + 1) is None


def test_the_last_winner_leads(client: Client, feed: Feed) -> None:
    feed.worker("w1@host")
    feed.event("worker-elect", "w1@host", id="e1", topic="cron", action=None, cver=2, inc=1)
    feed.event("worker-elected", "w1@host", id="e1", winner="w1@host")
    assert client.get("/api/v1/cluster").json()["nodes"][0]["leads"] == ["cron"]
    facts = client.get("/api/v1/elections").json()
    assert facts["leaders"]["cron"]["node"] == "w1@host"
    assert facts["elections"][0]["verdict"] == "decided"
    assert "★ w1@host" in client.get("/elections").text


def test_disagreement_is_an_alarm_on_every_page_about_it(client: Client, feed: Feed) -> None:
    feed.event("worker-elect", "w1@host", id="e1", topic="cron", action=None, cver=2, inc=1)
    for name in ("w1@host", "w2@host"):
        feed.event("worker-elected", name, id="e1", winner=name)
    assert "Disagreement" in client.get("/elections").text
    assert "named different winners" in client.get("/").text


def test_empty_tables_say_why(client: Client) -> None:
    assert "Nothing can be heard" in client.get("/").text
    assert "Nothing can be heard" in client.get("/tasks").text
    assert "--tables" in client.get("/history").text


# -- tasks -------------------------------------------------------------------------------------


def test_tasks_are_found_and_paged_in_causal_order(client: Client, feed: Feed) -> None:
    for number in range(7):
        feed.task(f"t{number}", state="FAILURE" if number % 2 else "SUCCESS")
    facts = client.get("/api/v1/tasks?q=state:failed").json()
    assert [task["uuid"] for task in facts["tasks"]] == ["t5", "t3", "t1"]
    first = client.get("/api/v1/tasks?rows=3&page=1&sort=first").json()
    third = client.get("/api/v1/tasks?rows=3&page=3&sort=first").json()
    assert [task["uuid"] for task in first["tasks"]] == ["t0", "t1", "t2"]
    assert [task["uuid"] for task in third["tasks"]] == ["t6"]
    assert first["pages"] == 3
    text = client.get("/tasks?q=state:failed").text
    assert "t5" in text
    assert "t4" not in text
    assert "unknown key" in client.get("/tasks?q=colour:red").text


def test_the_latest_tasks_come_first_by_the_time_that_is_shown(client: Client, feed: Feed) -> None:
    now = time.time()
    # Clients send tasks without a clock that means anything; clocks of workers may be far apart.
    for ago_s, clock in ((50, 9_000), (40, 0), (30, 20), (20, 0), (10, 3)):
        feed.event("task-sent" if not clock else "task-received", uuid=f"t{ago_s}",
                   timestamp=now - ago_s, clock=clock, name="shop.charge")  # fmt: skip
    facts = client.get("/api/v1/tasks").json()
    assert [task["uuid"] for task in facts["tasks"]] == ["t10", "t20", "t30", "t40", "t50"]
    shown = [task["timestamp"] for task in facts["tasks"]]
    assert shown == sorted(shown, reverse=True)
    second = client.get("/api/v1/tasks?rows=2&page=2").json()
    assert [task["uuid"] for task in second["tasks"]] == ["t30", "t40"]


def test_states_of_the_users_own_are_searched_for_once_they_were_seen(
    logged_in: Client, feed: Feed
) -> None:
    client = logged_in
    refused = client.get("/api/v1/tasks?q=state:progress").json()
    assert "unknown state 'progress': use one of failed" in refused["error"]
    assert (refused["count"], refused["tasks"]) == (0, [])
    feed.task("t1", state="STARTED")
    feed.event("task-progress", uuid="t1")
    for query in ("state:progress", "state:running", "state:PROGRESS,failed"):
        facts = client.get(f"/api/v1/tasks?q={query}").json()
        assert (facts["error"], [task["uuid"] for task in facts["tasks"]]) == ("", ["t1"])
    detail = client.get("/api/v1/tasks/t1").json()["task"]
    assert (detail["state"], detail["is_running"], detail["is_ended"]) == ("PROGRESS", True, False)
    assert detail["runtime_s"] is not None
    assert "goes on: to end it, terminate it" in client.get("/actions/revoke?task=t1").text
    feed.event("task-revoked", uuid="t1", terminated=True)
    detail = client.get("/api/v1/tasks/t1").json()["task"]
    assert (detail["is_running"], detail["is_ended"]) == (False, True)
    feed.event("task-succeeded", uuid="t1", runtime=1.0)
    seen = client.get("/api/v1/tasks?q=state:progress").json()
    assert (seen["error"], seen["count"]) == ("", 0)
    assert "of your own: PROGRESS" in client.get("/tasks?q=state:bogus").text


def test_every_attempt_has_the_sending_that_caused_it(client: Client, feed: Feed) -> None:
    feed.event("task-sent", "gen@client", uuid="t", retries=0, timestamp=100.0, clock=0)
    feed.event("task-received", uuid="t", name="a", retries=0, timestamp=101.0, clock=5)
    feed.event("task-started", uuid="t", timestamp=102.0, clock=6)
    feed.event("task-received", "w2@host", uuid="t", name="a", retries=1, timestamp=104.0, clock=9)
    # The event of a sending may come later than that of the receipt.
    feed.event("task-sent", "gen@pool", uuid="t", retries=1, timestamp=103.0, clock=8, sync=True)
    feed.event("task-retried", uuid="t", timestamp=103.5, clock=7)
    feed.event("task-received", "w3@host", uuid="t", name="a", retries=1, timestamp=200.0, clock=20)
    feed.event("task-received", "w3@host", uuid="t", name="a", retries=2, timestamp=300.0, clock=30)
    bars = client.get("/api/v1/timeline").json()["bars"]
    found = {(bar["worker"], bar["received"]): (bar["sent"], bar["sent_clock"]) for bar in bars}
    assert found == {
        ("w1@host", 101.0): (100.0, None),
        ("w2@host", 104.0): (103.0, 8),
        ("w3@host", 200.0): (103.0, 8),  # delivered again
        ("w3@host", 300.0): (None, None),
    }


def test_a_task_tells_attempts_events_family_and_traceback(logged_in: Client, feed: Feed) -> None:
    feed.task("parent")
    feed.task("child", "shop.mail", "FAILURE", parent_id="parent")
    facts = logged_in.get("/api/v1/tasks/child").json()
    assert [one["outcome"] for one in facts["attempts"]] == ["FAILURE"]
    assert [one["type"] for one in facts["events"]] == [
        "task-sent", "task-received", "task-started", "task-failed",
    ]  # fmt: skip
    assert [(one["uuid"], one["depth"]) for one in facts["tree"]] == [("parent", 0), ("child", 1)]
    text = logged_in.get("/tasks/child").text
    assert "Traceback" in text
    assert "Send again" in text
    feed.task("open", state="STARTED")
    assert "Terminate" in logged_in.get("/tasks/open").text
    assert logged_in.get("/tasks/nobody").code == 404
    assert logged_in.get("/api/v1/tasks/nobody").code == 404


def test_tasks_that_are_each_others_parents_make_no_endless_tree(
    client: Client, feed: Feed
) -> None:
    feed.task("a", parent_id="b")
    feed.task("b", parent_id="a")
    feed.task("c", parent_id="c")
    assert len(client.get("/api/v1/tasks/a").json()["tree"]) == 2
    assert client.get("/api/v1/tasks/c").json()["tree"] == []


def test_ids_with_slashes_and_marks_have_a_page(client: Client, feed: Feed) -> None:
    for uuid in ("a/b", "a b?c#d", "ü%20"):
        feed.task(uuid)
        assert client.get(f"/tasks/{quote(uuid, safe='')}").code == 200


# -- the timeline ------------------------------------------------------------------------------


def test_the_timeline_tells_what_changed(client: Client, feed: Feed) -> None:
    feed.task("t1")
    first = client.get("/api/v1/timeline").json()
    assert [bar["id"] for bar in first["bars"]] == ["t1"]
    assert first["bars"][0]["sent"] is not None
    feed.task("t2", state="STARTED", parent_id="t1")
    then = client.get(f"/api/v1/timeline?after={first['version']}").json()
    assert [(bar["id"], bar["parent"], bar["outcome"]) for bar in then["bars"]] == [
        ("t2", "t1", None)
    ]
    again = client.get("/api/v1/timeline?after=999999").json()  # the dashboard is a new one
    assert again["after"] == 0
    assert len(again["bars"]) == 2


# -- queues ------------------------------------------------------------------------------------


def test_queues_tell_lengths_consumers_and_pauses(
    logged_in: Client, site: Site, feed: Feed
) -> None:
    feed.task("t1", state="PENDING")
    facts = QueueFacts("celery")
    facts.samples.extend([Sample(0.0, 10, 1), Sample(5.0, 20, 16)])
    site.polling._queues["celery"] = facts
    site.polling._queues["mail"] = QueueFacts("mail")
    answer = NodeAnswer(0.0, queues=("celery",), paused=("celery",))
    site.polling._nodes["w1@host"] = answer
    rows = {row["name"]: row for row in logged_in.get("/api/v1/queues").json()["queues"]}
    assert rows["celery"]["length"] == 20
    assert rows["celery"]["growth_per_s"] == 2.0
    assert rows["celery"]["sent_per_s"] == 3.0
    assert rows["celery"]["taken_per_s"] == 1.0
    assert rows["celery"]["paused_everywhere"]
    assert rows["mail"]["length"] is None
    text = logged_in.get("/queues").text
    assert "resume?queue=celery" in text
    assert "pause?queue=mail" in text


# -- history -----------------------------------------------------------------------------------


def test_history_shows_the_tables_and_the_time_machine(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    world = World(tasks=60)
    site = make_site(tables=str(world.publish(tmp_path / "tables")))
    client = Client(make_for(site, starts=False))
    text = client.get("/history").text
    assert "Throughput" in text
    assert "<svg" in text
    facts = client.get("/api/v1/history").json()
    assert facts["totals"]["tasks"] == 60
    assert not any(key.endswith("_html") for key in facts)
    then = (facts["first"] + facts["last"]) / 2
    picture = client.get(f"/api/v1/history/at?time={then}").json()["picture"]
    assert picture["events"] > 0
    assert client.get(f"/history/at?time={then}").code == 200
    for bad in ("clock=x", "clock=1&time=2", "time=never", "clock=-3", "time=nan"):
        assert client.get(f"/history/at?{bad}").code == 400
        assert "error" in client.get(f"/api/v1/history/at?{bad}").json()
    assert "before the history" in client.get("/history/at?time=5").text


def test_tables_that_are_not_there_are_said(make_site: Callable[..., Site], tmp_path: Path) -> None:
    client = Client(make_for(make_site(tables=str(tmp_path)), starts=False))
    assert "there are no tables" in client.get("/history").text
    assert client.get("/history/at?clock=5").code == 200


# -- the rest ----------------------------------------------------------------------------------


def test_health_and_metrics(client: Client, feed: Feed) -> None:
    feed.worker()
    feed.task("t1")
    assert client.get("/healthz").text.startswith("ok\n")
    text = client.get("/metrics").text
    assert "umbel_dashboard_nodes_alive 1.0" in text
    assert 'umbel_cluster_ended_total{outcome="SUCCESS"} 1.0' in text


def test_what_is_not_there_has_a_page(client: Client) -> None:
    answer = client.get("/nowhere")
    assert answer.code == 404
    assert "<!doctype html>" in answer.text
    assert client.get("/api/v1/nowhere").json() == {"error": "Not Found"}
    assert client.get("/live/nothing").code == 404


def test_a_page_that_fails_tells_nothing_of_why(
    site: Site, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.polling, "queues", lambda: 1 / 0)
    for path in ("/queues", "/api/v1/queues"):
        answer = client.get(path)
        assert answer.code == 500
        assert "the log has more" in answer.text
        assert "division" not in answer.text.lower()
        assert "content-security-policy" in answer.headers


def test_live_updates_carry_only_what_changed(site: Site, feed: Feed) -> None:
    async def story() -> list[dict[str, str]]:
        events = stream.updates(site, PAGES["cluster"], {}, STRANGER)
        assert await anext(events) == b"retry: 1000\n\n"
        assert len(site.live_clients) == 1
        got = [_told(await anext(events))]
        feed.worker("w7@host")
        got.append(_told(await anext(events)))
        await events.aclose()
        return got

    first, second = asyncio.run(story())
    assert set(first) == {"status", "summary", "nodes", "types"}
    assert "w7@host" in second["nodes"]
    assert "types" not in second
    assert len(site.live_clients) == 0


def test_updates_are_coalesced(site: Site, feed: Feed) -> None:
    async def story() -> int:
        events = stream.updates(site, PAGES["cluster"], {}, STRANGER)
        count, until = 0, time.monotonic() + 1.1
        while time.monotonic() < until:
            feed.worker(processed=count)
            await anext(events)
            count += 1
        await events.aclose()
        return count

    assert asyncio.run(story()) <= 7  # the first two at once, then four a second


def _told(message: bytes) -> dict[str, str]:
    assert message.startswith(b"event: fragments\ndata: ")
    told: dict[str, str] = json.loads(message.partition(b"data: ")[2])
    return told


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*PATHS, "/nowhere", "/tasks/x"]),
    st.dictionaries(
        st.sampled_from(["q", "page", "rows", "sort", "after", "bars", "clock", "time", "uuid"]),
        st.text(max_size=30) | st.integers().map(str) | st.floats().map(str),
        max_size=4,
    ),
    st.text(max_size=30),
)
@example("/tasks", {"q": "\udcff", "page": "9" * 30}, "\x00")
def test_no_question_to_the_api_is_a_failure(
    client: Client, feed: Feed, path: str, params: dict[str, str], word: str
) -> None:
    if not feed.site.live.version:
        feed.task("t1", "\ud800", "FAILURE", args="\udfff", exception="\x00")
        feed.worker("\ud800@host")
    word = quote(word.encode("utf-8", "replace"), safe="")
    query = "&".join(
        f"{key}={quote(value.encode('utf-8', 'replace'))}" for key, value in params.items()
    )
    target = ROOT + path.replace("{uuid:path}", word or "x")
    answer = client.get(f"{target}?{query}")
    assert answer.code < 500
    assert isinstance(answer.json(), dict)
    page = client.get(f"{path.replace('{uuid:path}', word or 'x')}?{query}")
    assert page.code < 500
