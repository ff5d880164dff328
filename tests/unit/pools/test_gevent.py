"""gevent runs the shared suite in a process that was patched first thing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gevent")

_PATCHED = """
from umbel.worker.execution.pools.gevent import patch
patch()
import sys, pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif("UMBEL_TEST_POOL" in os.environ, reason="this is the inner run")
def test_the_gevent_pool_passes_the_shared_suite() -> None:
    here = Path(__file__).parent
    suite = here / "test_conformance.py"
    # gevent warns when ssl was imported before patching; it is not: keep warnings as errors.
    command = [sys.executable, "-c", _PATCHED, "-q", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(
        command,
        cwd=here.parents[2],
        env={**os.environ, "UMBEL_TEST_POOL": "gevent"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
