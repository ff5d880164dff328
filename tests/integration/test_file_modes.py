"""Files that Umbel writes are for their owner alone, unless `file_umask` lets others in.

History has its own tests for tables and pages, as they need a build: `test_cli_history`.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.modes import GROUP, OWNER, check, modes_of
from tests.servers import wait_until
from tests.workers import Program, WorkerProcess
from umbel import Umbel

SHOP = """
from umbel import Umbel

app = Umbel("shop")

@app.task
def add(x, y):
    return x + y
"""


@pytest.fixture(autouse=True)
def loose_umask() -> None:
    """What most systems have."""
    assert os.umask(0o022) == 0o022


def umbel(*words: str) -> list[str]:
    return [sys.executable, "-m", "umbel", *words]


def jsonl(path: Path) -> Path:
    event = {"type": "task-sent", "hostname": "h", "timestamp": 1.0, "uuid": "1", "clock": 1}
    path.write_text(json.dumps(event) + "\nrubbish\n")
    return path


# -- the recorder ------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--file-umask", "027")])
def test_the_log_of_a_recorder_is_private_or_for_its_group(
    redis_url: str, start: Callable[..., Program], tmp_path: Path, words: tuple[str, ...]
) -> None:
    command = umbel(*words, "-b", redis_url, "record", "--log", "made/log", "--roll-age", "0")
    program = start(command)
    program.wait_for("takes events")
    with Umbel("client", broker=redis_url, set_as_current=False) as app:
        app.conf.task_send_sent_event = True
        app.send_task("t", (1,))
    log = tmp_path / "made" / "log"
    wait_until(lambda: list(log.glob("events/day=*/[0-9]*.parquet")), 30, "a segment")
    assert program.stop() == 0
    check(tmp_path / "made", GROUP if words else OWNER)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == (0o750 if words else 0o700)


def test_a_directory_of_the_users_keeps_its_mode_and_old_files_are_tightened(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.mkdir(mode=0o755)
    events = jsonl(tmp_path / "events.jsonl")
    assert start(umbel("record", "--log", "log", "--import", str(events))).wait(60) == 0
    assert stat.S_IMODE(log.stat().st_mode) == 0o755
    check(log)
    for path in log.rglob("*"):  # as an older version has left them
        path.chmod(0o755 if path.is_dir() else 0o644)
    theirs = tmp_path / "theirs"
    theirs.write_text("")
    theirs.chmod(0o644)
    (log / "events" / "link").symlink_to(theirs)
    assert start(umbel("record", "--log", "log", "--import", str(events))).wait(60) == 0
    check(log)
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o644


def test_a_folder_for_a_group_gives_its_group_to_what_is_made_in_it(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2750)
    events = jsonl(tmp_path / "events.jsonl")
    command = umbel("--file-umask", "027", "record", "--log", "shared/log", "--import", str(events))
    assert start(command).wait(60) == 0
    folders = [path for path in shared.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o2750}


# -- workers -----------------------------------------------------------------------------------


def test_what_a_worker_writes_is_private(
    redis_url: str, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    place = tmp_path / "written"
    place.mkdir()
    urls = {"UMBEL_BROKER_URL": redis_url, "UMBEL_RESULT_BACKEND": redis_url}
    for state in ("new.db", "old.db"):
        if state == "old.db":
            (place / state).touch(0o644)  # an empty file is a new one for SQLite
        process = start_worker(
            "shop",
            ["-P", "solo", "-n", f"{state}@here", "--statedb", f"written/{state}",
             "--logfile", f"written/{state}.log", "--health-file", f"written/{state}.health"],
            env=urls, wait=False,
        )  # fmt: skip
        wait_until((place / f"{state}.health").exists, 60, "the worker to be well")
        check(place)
        assert {f"{state}-wal", f"{state}.log"} <= modes_of(place).keys()
        process.stop()


def test_a_log_file_that_is_there_keeps_its_mode(
    redis_url: str, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """Whoever rotates logs has decided who reads them."""
    (tmp_path / "shop.py").write_text(SHOP)
    log = tmp_path / "worker.log"
    log.touch()
    log.chmod(0o640)
    urls = {"UMBEL_BROKER_URL": redis_url, "UMBEL_RESULT_BACKEND": redis_url}
    process = start_worker(
        "shop", ["-P", "solo", "--logfile", "worker.log", "--health-file", "well"], env=urls,
        wait=False,
    )  # fmt: skip
    wait_until((tmp_path / "well").exists, 60, "the worker to be well")
    process.stop()
    assert "ready" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o640


def test_tasks_keep_the_umask_of_their_worker(
    redis_url: str, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    source = SHOP + "\n@app.task\ndef save(path):\n    open(path, 'w').close()\n"
    (tmp_path / "shop.py").write_text(source)
    urls = {"UMBEL_BROKER_URL": redis_url, "UMBEL_RESULT_BACKEND": redis_url}
    start_worker("shop", ["-P", "prefork", "-c", "1"], env=urls)
    with Umbel("client", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        app.send_task("shop.save", (str(tmp_path / "picture"),)).get(timeout=30)
    assert stat.S_IMODE((tmp_path / "picture").stat().st_mode) == 0o644


def test_the_embedded_broker_keeps_its_data_private(
    start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    process = start_worker("shop", ["-P", "solo"])
    home = tmp_path / ".umbel"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    check(home)
    sockets = [path for path in home.rglob("*") if path.is_socket()]
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in sockets] == [0]
    process.stop()


# -- the setting -------------------------------------------------------------------------------


def test_the_setting_of_an_application_counts_and_nonsense_is_refused(
    redis_url: str, start: Callable[..., Program], tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(f'{SHOP}\napp.conf.file_umask = "027"\n')
    program = start(umbel("-A", "shop", "-b", redis_url, "record", "--log", "log"))
    program.wait_for("takes events")
    assert program.stop() == 0
    check(tmp_path / "log", GROUP)
    wrong = start(umbel("--file-umask", "777", "-b", redis_url, "record", "--log", "log2"))
    assert wrong.wait(60) == 2
    assert "077" in wrong.output
