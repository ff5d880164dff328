"""Java's classes of Spark in an archive: made once, used by every session, and never in the way."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
UMBEL = [sys.executable, "-m", "umbel"]
SESSION = """
import sys
from umbel.pipeline.session import session
from umbel.pipeline.settings import read_conf

spark = session(settings=read_conf(sys.argv[1:]), is_small=True)
print(spark.range(1_000).groupBy("id").count().count())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*UMBEL, *arguments], capture_output=True, text=True, check=False)


def classes_from_the_archive(tmp_path: Path) -> int:
    """How many classes of Spark a session takes from it."""
    loaded = tmp_path / "loaded.txt"
    loaded.unlink(missing_ok=True)
    setting = f"spark.driver.extraJavaOptions=-Xlog:class+load:file={loaded}"
    done = subprocess.run(
        [sys.executable, "-c", SESSION, setting], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr
    found = re.findall(r"org\.apache\.spark\S+ source: shared objects file", loaded.read_text())
    return len(found)


@pytest.mark.slow
def test_a_session_takes_its_classes_from_the_archive_unless_that_is_damaged(
    cache: Path, tmp_path: Path
) -> None:
    done = run("history", "prepare")
    assert done.returncode == 0, done.stderr
    (archive,) = (cache / "umbel").iterdir()
    assert str(archive) in done.stdout
    assert stat.S_IMODE(archive.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(archive.parent.stat().st_mode) == 0o700
    assert classes_from_the_archive(tmp_path) > 3_000
    archive.unlink()  # Java may not have ended yet, and it maps the file
    archive.write_bytes(b"no archive" * 1_000)
    assert classes_from_the_archive(tmp_path) == 0


def test_what_stands_in_the_way_of_an_archive_is_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file, and no folder")
    done = run("history", "prepare")
    assert done.returncode == 2
    assert re.fullmatch(r"umbel: cannot write \S+: Not a directory\n", done.stderr)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    done = run("history", "prepare")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Java" in done.stderr


def test_archives_that_nobody_may_need_any_more_go(cache: Path) -> None:
    from umbel.pipeline import class_archive

    folder = cache / "umbel"
    folder.mkdir(parents=True)
    old, new, other = folder / "spark-1.jsa", folder / "spark-2.jsa", folder / "else.jsa"
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    class_archive._remove_old(folder)
    assert sorted(folder.iterdir()) == [other, new]


def test_without_an_archive_or_with_one_of_somebody_else_java_gets_no_option(cache: Path) -> None:
    from umbel.pipeline import class_archive

    path = class_archive.archive_path()
    assert path is not None
    assert class_archive.java_option() == ""
    path.parent.mkdir(parents=True)
    path.touch()
    assert str(path) in class_archive.java_option()
    if os.getuid() == 0:
        os.chown(path, 12_345, -1)
        assert class_archive.java_option() == ""
