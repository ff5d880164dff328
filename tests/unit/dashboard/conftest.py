"""A site that is fed by hand: no broker, no threads; and a client that sends what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.dashboard.client import Client, Feed
from umbel import Umbel
from umbel.dashboard.application import make_for
from umbel.dashboard.settings import Settings
from umbel.dashboard.site import Site

PASSWORD = "correct horse battery"


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(**settings: Any) -> Site:
        app = Umbel("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        site = Site(app, Settings(**{"audit": tmp_path / "audit.jsonl", **settings}))
        made.append(site)
        return site

    yield make
    for site in made:
        site.history.close()
        site.app.close()


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site(password=PASSWORD)


@pytest.fixture
def client(site: Site) -> Client:
    return Client(make_for(site, starts=False))


@pytest.fixture
def feed(site: Site) -> Feed:
    return Feed(site)


@pytest.fixture
def logged_in(client: Client) -> Client:
    client.log_in(PASSWORD)
    return client
