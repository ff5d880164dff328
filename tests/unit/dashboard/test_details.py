"""Arguments, results and texts of errors are for those who have logged in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from tests.unit.dashboard.client import Client, Feed
from tests.unit.dashboard.conftest import PASSWORD
from tests.unit.pipeline.published import World
from umbel.dashboard import api, stream
from umbel.dashboard.application import make_for
from umbel.dashboard.guard import Visit
from umbel.dashboard.identity import Identity
from umbel.dashboard.site import PAGES, Site

ARGUMENT, RESULT, ERROR, TRACE = "argument-Zq", "result-Zq", "error-Zq", "trace-Zq"
EXTRA, RETRIED, SENT = "extra-Zq", "retried-Zq", "sent-Zq"
DETAILS = (ARGUMENT, RESULT, ERROR, TRACE, EXTRA, RETRIED, SENT)


def fill(site: Site) -> None:
    feed = Feed(site)
    feed.worker()
    feed.task("good", args=f"('{ARGUMENT}',)", result=repr(RESULT), parent_id="bad")
    feed.task(
        "bad", state="FAILURE", kwargs=f"{{'x': '{SENT}'}}", exception=f"OSError('{ERROR}')",
        traceback=f"Traceback\n{TRACE}",
    )  # fmt: skip
    feed.task("again", state="STARTED", args=f"('{ARGUMENT}',)")
    feed.event("task-retried", uuid="again", exception=f"{RETRIED} failed", traceback=TRACE)
    feed.event("task-progress", uuid="again", done=EXTRA)


def paths() -> list[str]:
    pages = [page.path for page in PAGES.values()] + [api.ROOT + path for path in api.PATHS]
    plain = [path for path in pages if "{" not in path]
    of_tasks = [
        path.replace("{uuid:path}", uuid)
        for path in pages
        for uuid in ("good", "bad", "again")
        if "{" in path
    ]
    assert len(plain) > 10
    assert len(of_tasks) == 6
    return [*plain, *of_tasks, "/api/v1/openapi.json", "/metrics", "/history/at?time=1m"]


def stream_of(site: Site, visit: Visit, name: str, params: dict[str, str]) -> str:
    """The first update of a live page."""

    async def first() -> str:
        updates = stream.updates(site, PAGES[name], params, visit)
        read = [(await anext(updates)).decode() for _ in range(2)]
        await updates.aclose()
        return "".join(read)

    return asyncio.run(first())


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return World(tasks=400).publish(tmp_path_factory.mktemp("history") / "tables")


def found_in(text: str) -> set[str]:
    return {one for one in DETAILS if one in text}


def test_without_login_no_page_and_no_answer_shows_a_detail(
    make_site: Callable[..., Site], tables: Any
) -> None:
    site = make_site(password=PASSWORD, tables=str(tables))
    fill(site)
    client = Client(make_for(site, starts=False))
    for path in paths():
        answer = client.get(path)
        assert answer.code == 200, path
        assert found_in(answer.text) == set(), path
    for path in ("/history", "/api/v1/history"):
        assert "ConnectionError" in client.get(path).text
        assert "bank is busy" not in client.get(path).text
    for name, params in (("task", {"uuid": "bad"}), ("task", {"uuid": "good"}), ("tasks", {})):
        assert found_in(stream_of(site, Visit(Identity(), ""), name, params)) == set()


def test_after_login_and_with_the_flag_all_details_are_shown(
    make_site: Callable[..., Site], tables: Any
) -> None:
    for settings in ({"password": PASSWORD}, {"public_details": True}):
        site = make_site(tables=str(tables), **settings)
        fill(site)
        client = Client(make_for(site, starts=False))
        if "password" in settings:
            client.log_in(PASSWORD)
        shown = "".join(client.get(path).text for path in paths())
        assert found_in(shown) == set(DETAILS)
        for path in ("/history", "/api/v1/history"):
            assert "bank is busy" in client.get(path).text


def test_who_does_not_see_details_is_told_why_and_sees_the_class_of_an_error(
    client: Client, site: Site
) -> None:
    fill(site)
    task = client.get("/api/v1/tasks/bad").json()
    assert (task["details"], task["task"]["error"]) == (False, "OSError")
    assert (task["task"]["args"], task["task"]["traceback"]) == (None, None)
    assert client.get("/api/v1/tasks/again").json()["attempts"][0]["error"] is None
    assert "log in to see" in client.get("/tasks/bad").text
    client.log_in(PASSWORD)
    assert client.get("/api/v1/tasks/bad").json()["details"] is True
    assert "log in to see" not in client.get("/tasks/bad").text


def test_no_search_tells_who_has_not_logged_in_what_is_in_a_detail(
    client: Client, site: Site
) -> None:
    fill(site)

    def count(query: str) -> Any:
        return client.get(f"/api/v1/tasks?q={quote(query)}").json()["count"]

    queries = [*DETAILS, *(f"error:*{one}*" for one in DETAILS), f'"{ERROR}"', f"-error:*{ERROR}*"]
    answers = {query: count(query) for query in queries}
    assert [query for query, found in answers.items() if found] == [f"-error:*{ERROR}*"]
    assert answers[f"-error:*{ERROR}*"] == 3
    assert count("error:OSError") == 1  # its class is shown
    client.log_in(PASSWORD)
    assert [count(query) for query in (ARGUMENT, ERROR, f"error:*{ERROR}*", SENT)] == [2, 1, 1, 1]


def test_a_stream_ends_when_its_session_does(site: Site) -> None:
    fill(site)
    token = site.sessions.begin("admin")
    visit = Visit(Identity("admin"), token, is_session=True)

    async def read() -> list[str]:
        updates = stream.updates(site, PAGES["task"], {"uuid": "bad"}, visit)
        shown = [(await anext(updates)).decode() for _ in range(2)]
        site.sessions.end(token)
        return [*shown, *[one.decode() async for one in updates]]

    received = asyncio.run(read())
    assert ERROR in received[1]
    assert len(received) == 3
    assert received[2].startswith("event: gone")
