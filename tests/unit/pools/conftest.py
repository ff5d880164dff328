"""The pools under test. gevent needs a patched process: `test_gevent` starts one for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pools.bench import Bench

ALL = ["prefork", "prefork-loop", "threads", "threads-loop", "asyncio", "asyncio-plain"]
ALL += ["asyncio-loop", "solo"]
KINDS = [os.environ["UMBEL_TEST_POOL"]] if "UMBEL_TEST_POOL" in os.environ else ALL
StartBench = Callable[..., Bench]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def start_bench(tmp_path: Path) -> Iterator[StartBench]:
    benches: list[Bench] = []

    def start(kind: str, concurrency: int = 2, **options: Any) -> Bench:
        benches.append(Bench(kind, tmp_path, 1 if kind == "solo" else concurrency, **options))
        return benches[-1]

    yield start
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(kind: str, start_bench: StartBench) -> Bench:
    """Two at a time, or one for solo."""
    return start_bench(kind)


@pytest.fixture
def prefork(start_bench: StartBench) -> Bench:
    return start_bench("prefork")
