"""The description of the API is true, and no question to it is a failure: asked by schemathesis.

The site is fed by hand and served over HTTP, so that servers' and clients' ideas of what may be in
an address are tried as well.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.servers import wait_until
from tests.unit.dashboard.client import Client, Feed
from tests.unit.pipeline.published import World
from umbel import Umbel
from umbel.dashboard import api, openapi
from umbel.dashboard.application import make_for
from umbel.dashboard.settings import Settings
from umbel.dashboard.site import Site


def told(site: Site) -> None:
    """A little of everything, so that every shape has something to be held against."""
    feed = Feed(site)
    feed.worker("w1@host")
    feed.worker("w2@host")
    for state in ("SUCCESS", "FAILURE", "STARTED", "RECEIVED", "REVOKED", "PENDING"):
        feed.task(f"id-{state}", "shop.charge", state)
    feed.task("odd", "<b>\ud800</b>", "FAILURE", args="\udfff", exception="\x00")
    feed.task("child", "shop.part", "SUCCESS", parent_id="id-SUCCESS")
    for number, node in enumerate(("w1@host", "w2@host")):
        feed.event(
            "worker-elect", node, id="e1", topic="cron", action="x", cver=2, inc=1, clock=number + 5
        )
    feed.event("worker-elected", "w1@host", id="e1", winner="w1@host")
    feed.event("worker-elected", "w2@host", id="e1", winner="w2@host")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    app = Umbel("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    tables = World(tasks=40).publish(tmp_path_factory.mktemp("tables"))
    made = Site(app, Settings(tables=str(tables)))
    told(made)
    yield made
    made.history.close()
    app.close()


@pytest.fixture(scope="module")
def url(site: Site) -> Iterator[str]:
    config = uvicorn.Config(make_for(site, starts=False), port=0, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, 20, "the server")
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def test_the_description_names_what_there_is(site: Site) -> None:
    described = Client(make_for(site, starts=False)).get(f"{api.ROOT}/openapi.json").json()
    assert described == json.loads(json.dumps(openapi.document()))
    assert described["openapi"] == "3.1.0"
    served = {path.replace("{uuid:path}", "{uuid}") for path in api.PATHS}
    assert set(described["paths"]) == served
    assert openapi.document("/umbel")["servers"] == [{"url": "/umbel/api/v1"}]
    used = {name for _, names, _ in openapi.PATHS.values() for name in names}
    assert used == set(openapi._PARAMETERS)


def test_every_answer_has_the_shape_that_is_described(url: str, site: Site) -> None:
    schema = schemathesis.openapi.from_url(f"{url}{api.ROOT}/openapi.json")
    asked = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        known = {"uuid": "id-FAILURE"} if "{uuid}" in operation.path else {}
        case = operation.Case(path_parameters=known)
        response = case.call_and_validate()
        assert response.status_code == 200
        asked.add(operation.path)
    assert len(asked) == len(api.PATHS)
    with urllib.request.urlopen(f"{url}{api.ROOT}/elections", timeout=10) as answer:
        (election,) = json.loads(answer.read())["elections"]
    assert election["verdict"] == "disagreement"


def test_a_shape_that_is_not_true_would_be_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    summary, names, shape = openapi.PATHS["/queues"]
    monkeypatch.setitem(openapi.PATHS, "/queues", (summary, names, {**shape, "more": "string"}))
    schema = schemathesis.openapi.from_url(f"{url}{api.ROOT}/openapi.json")
    case = schema["/queues"]["GET"].Case()
    with pytest.raises(BaseExceptionGroup) as raised:
        case.call_and_validate()
    assert any('"more" is a required property' in str(one) for one in raised.value.exceptions)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
def test_no_question_to_the_api_is_a_failure(url: str, mode: GenerationMode) -> None:
    """What fits the description, and what does not: never more than a refusal in its own words."""
    schema = schemathesis.openapi.from_url(f"{url}{api.ROOT}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:  # without parameters there is nothing to do wrong
        operations = [one for one in operations if openapi.PATHS[one.path][1]]

    @settings(
        max_examples=150, deadline=None, phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(operations).flatmap(lambda one: one.as_strategy(mode)))
    def ask(case: Any) -> None:
        response = case.call()
        assert response.status_code < 500, response.text
        content = json.loads(response.content)
        assert isinstance(content, dict)
        if response.status_code != 200:
            assert set(content) == {"error"}
            assert response.status_code in (400, 404, 405)

    ask()
