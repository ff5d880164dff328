"""Tables of a small history, written once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.pipeline.published import World
from umbel.pipeline.reading import Tables


@pytest.fixture(scope="session")
def world() -> World:
    return World()


@pytest.fixture(scope="session")
def directory(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.publish(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="session")
def tables(directory: Path) -> Iterator[Tables]:
    with Tables(directory) as opened:
        yield opened
