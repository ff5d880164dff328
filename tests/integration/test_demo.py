"""The demo as a newcomer starts it; without Spark, to be short."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import wait_until
from tests.workers import Program

# Neither Java nor anything else but Python is found.
ALONE = {"PATH": str(Path(sys.executable).parent), "JAVA_HOME": ""}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory in which the name of a socket is not too long for one."""
    with tempfile.TemporaryDirectory(prefix="u", ignore_cleanup_errors=True) as path:
        yield Path(path)


def test_the_demo_holds_what_it_promises_and_stays_until_it_is_told_to_end(
    start: Callable[..., Program], short_path: Path
) -> None:
    env = {**ALONE, "TMPDIR": str(short_path)}
    program = start([sys.executable, "-m", "umbel", "demo", "--scale", "0.02", "--keep"], env=env)
    url = program.wait_for(r"dashboard: (http://127\.0\.0\.1:\d+/)", 60)[1]
    program.wait_for("no history is kept: Spark needs Java", 60)
    program.wait_for(r"three workers ready", 60)
    program.wait_for(r"0 wrong, 0 missing", 60)
    program.wait_for(r"revocation: 20 of 40 .*3 workers took note: 20 did not run, 20 did", 60)
    cut = program.wait_for(r"broken connection: (\d+) connections .*; none lost", 60)
    assert int(cut[1]) > 3
    program.wait_for(r"election: carried out 1 time, on \w+@demo", 60)
    killed = program.wait_for(r"election: (\w+@demo) was first .* killed; .* 1 time", 60)
    program.wait_for("everything was right", 60)
    program.wait_for(r"its dashboard: +umbel -A umbel\.cli\.demo\.tasks dashboard", 10)
    program.wait_for(rf"the cluster goes on at {re.escape(url)}", 60)

    def page() -> str:
        with urllib.request.urlopen(f"{url}api/v1/cluster", timeout=10) as answer:
            return str(answer.read())

    wait_until(lambda: page().count('"state":"online"') == 3, 30, "all three, the killed one too")
    assert killed[1] in page()
    program.signal(signal.SIGINT)
    assert program.wait(30) == 0
    assert "Traceback" not in program.output
    wait_until(lambda: not list(short_path.glob("umbel-demo-*")), 60, "nothing to be left")
