"""Spark that can not be started is one line, before anything is written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from umbel.pipeline.errors import HistoryError
from umbel.pipeline.session import session


def test_a_master_that_nobody_knows_is_named_with_the_choices() -> None:
    with pytest.raises(HistoryError, match=r"unknown master 'sparkle://x': choose local\[\*\]"):
        session("sparkle://x")


def test_a_master_that_does_not_answer_is_not_waited_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        port = taken.getsockname()[1]
        with pytest.raises(HistoryError, match=f"cannot reach the Spark master .*:{port}"):
            session(f"spark://127.0.0.1:{port}")


@pytest.mark.parametrize("master", ["spark://:x", "spark://host:99999999"])
def test_a_master_with_a_broken_address_is_one_line(master: str) -> None:
    with pytest.raises(HistoryError, match="cannot reach the Spark master"):
        session(master)


def test_java_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HistoryError, match="Spark needs Java 17 or newer"):
        session()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(HistoryError, match=r"JAVA_HOME is .*, but there is no bin/java"):
        session()


def test_a_missing_package_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without("pyspark"), *sys.meta_path])
    with pytest.raises(HistoryError, match=r"pip install 'umbel\[history\]'"):
        session()


REAL = """
import json, sys
from umbel.pipeline.session import session
spark = session("local[1]", settings={"spark.executor.cores": "3"})
print(json.dumps({name: spark.conf.get(name) for name in sys.argv[1:]}))
spark.stop()
"""


def test_a_real_session_goes_by_spark_defaults_but_for_what_the_tables_need(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.sql.shuffle.partitions 7\n"
        "spark.executor.cores 2\n"
        "spark.sql.session.timeZone Europe/Berlin\n"
        "spark.driver.extraJavaOptions -Dof.the.company=yes\n"
    )
    names = ("shuffle.partitions", "session.timeZone")
    wanted = [*(f"spark.sql.{name}" for name in names), "spark.executor.cores"]
    done = subprocess.run(
        [sys.executable, "-c", REAL, *wanted],
        env={**os.environ, "SPARK_CONF_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout).values()) == ["7", "UTC", "3"]
    assert "spark.sql.session.timeZone=Europe/Berlin is ignored" in done.stderr


class _Without:
    """An importer that does not find a package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
