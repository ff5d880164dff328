"""Executors that do not share the disk of the driver: a build says so and publishes nothing.

The executors run in a mount namespace of their own, in which one of the directories is another one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.conftest import JAVA_OPTIONS
from tests.pipeline.worlds import LogWriter, cluster
from tests.sizes import FULL
from tests.workers import Program

HIDDEN = ("tables", "log") if FULL else ("tables",)
WAIT_S = 200


def has_namespaces() -> bool:
    """Whether this machine lets us make mount namespaces."""
    program = shutil.which("unshare")
    if program is None:
        return False
    tried = subprocess.run([program, "--mount", "true"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="mount namespaces need root")
@pytest.mark.parametrize("hidden", HIDDEN)
def test_executors_with_a_disk_of_their_own_are_refused_before_anything_is_read(
    tmp_path: Path, start: Callable[..., Program], hidden: str
) -> None:
    import pyspark

    log, tables = tmp_path / "log", tmp_path / "tables"
    LogWriter(log).add(cluster(40))
    tables.mkdir()
    run_class = str(Path(pyspark.__file__).parent / "bin/spark-class")
    deploy, env = "org.apache.spark.deploy", {"SPARK_LOG_DIR": str(tmp_path)}
    here = ["--host", "127.0.0.1"]
    node = start([run_class, f"{deploy}.master.Master", *here, "--port", "0"], env=env)
    master = node.wait_for(r"Starting Spark master at (spark://\S+)", 100).group(1)
    script = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
    worker = [run_class, f"{deploy}.worker.Worker", *here, "--cores", "1", "--memory", "1g"]
    work = ["--work-dir", str(tmp_path / "work"), master]
    apart = ["unshare", "--mount", "sh", "-c", script, str(tmp_path / hidden), *worker, *work]
    start(apart, env=env).wait_for("Successfully registered with master", 100)
    build = [sys.executable, "-m", "umbel", "history", "build", "--log", str(log)]
    program = start(
        [*build, "--tables", str(tables), "--master", master],
        env={"JAVA_TOOL_OPTIONS": JAVA_OPTIONS},
    )
    assert program.process.wait(WAIT_S) == 2, program.output
    assert "not all of Spark's executors see" in program.output
    assert f"{tmp_path / hidden}:" in program.output
    assert "Traceback" not in program.output
    left = {path.name for path in tables.rglob("*") if path.is_file()}
    assert left <= {".lock", ".java.lock"}
