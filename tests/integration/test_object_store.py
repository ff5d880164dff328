"""The log and the tables in an object store: a stand-in for S3, reached as users reach theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.log_reading import event
from tests.recording import TAKES
from tests.servers import StoreServer, wait_until
from tests.unit.pipeline.published import BEGAN, World
from tests.workers import Program
from umbel import Umbel

TIMEOUT_S = 360
pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)  # Spark starts slowly among many tests


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def umbel(store_server: StoreServer, tmp_path: Path) -> Callable[..., Ran]:
    """`umbel("history", "show", ...)` runs a command with the store in its environment."""

    def run(*argv: str, **variables: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "umbel", *argv],
            cwd=tmp_path,
            env={**os.environ, **store_server.variables, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="module")
def tables(store_server: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    made = World(tasks=60).publish(tmp_path_factory.mktemp("tables"))
    return store_server.upload(Path(made), "shop/tables")


def lines_of(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


# -- the recorder


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_log_in_a_store_is_written_checked_and_compacted(
    umbel: Callable[..., Ran], store_server: StoreServer, tmp_path: Path, scheme: str
) -> None:
    url = f"{scheme}://{store_server.BUCKET}/import-{scheme}/events"
    for part in (0, 1):
        lines = [json.dumps(event(number)) for number in range(50 * part, 50 * part + 50)]
        (tmp_path / "old.jsonl").write_text("\n".join(lines))
        ran = umbel("record", "--log", url, "--import", "old.jsonl")
        assert ran.code == 0, ran.err
    checked = umbel("record", "--log", url, "--check", "--json")
    assert checked.code == 0, checked.err
    found = json.loads(checked.out)
    assert (found["rows"], found["segments"]) == (100, 2), found
    ran = umbel("record", "--log", url, "--compact")
    assert ran.code == 0, ran.err
    assert store_server.keys(f"import-{scheme}/events/_umbel-log.json")


def test_a_recorder_writes_live_events_into_a_store(
    start: Callable[..., Program], store_server: StoreServer, redis_url: str
) -> None:
    url = f"{store_server.url}/live"
    recorder = start(
        [sys.executable, "-m", "umbel", "-b", redis_url, "record", "--log", url, "--roll-age", "1"],
        env={**os.environ, **store_server.variables},
    )
    recorder.wait_for(TAKES)
    with Umbel(broker=redis_url).events.Dispatcher("shop@here") as dispatcher:
        for number in range(20):
            dispatcher.send("task-received", uuid=f"t{number}", name="shop.charge")
        assert dispatcher.flush()
    wait_until(lambda: store_server.keys("live/events/day="), 60, "a segment in the store")
    recorder.process.send_signal(signal.SIGTERM)
    assert recorder.process.wait(60) == 0


# -- the tables


def test_tables_in_a_store_are_shown_filtered_and_pictured(
    umbel: Callable[..., Ran], tables: str
) -> None:
    listed = lines_of(umbel("history", "show", "--tables", tables, "--json"))
    assert {"tasks", "attempts", "runs"} <= {row["table"] for row in listed}
    where = ("--where", "state = 'SUCCESS'", "--columns", "uuid,state", "--json", "--limit", "5")
    rows = lines_of(umbel("history", "show", "tasks", "--tables", tables, *where))
    assert [row["state"] for row in rows] == ["SUCCESS"] * 5
    query = "SELECT count(*) AS n FROM tasks JOIN attempts USING (uuid)"
    assert lines_of(umbel("history", "sql", "--tables", tables, query, "--json"))[0]["n"] > 10
    picture = umbel("history", "at", "--tables", tables, "--time", str(BEGAN + 20), "--json")
    assert json.loads(picture.out)["nodes"], picture.err


def test_a_report_is_made_from_tables_in_a_store(
    umbel: Callable[..., Ran], tables: str, tmp_path: Path
) -> None:
    ran = umbel("history", "report", "--tables", tables.replace("s3://", "s3a://"), "-o", "r.html")
    assert ran.code == 0, ran.err
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


# -- what is wrong


def test_a_store_without_tables_or_rights_is_one_line(
    umbel: Callable[..., Ran], store_server: StoreServer
) -> None:
    ran = umbel("history", "show", "--tables", f"{store_server.url}/nothing")
    assert ran.code == 2
    assert "there are no tables in s3://bucket/nothing" in ran.err
    nobody = {
        "AWS_ACCESS_KEY_ID": "",
        "AWS_SECRET_ACCESS_KEY": "",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    ran = umbel("history", "show", "--tables", f"{store_server.url}/nothing", **nobody)
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert "credentials" in ran.err


def test_a_build_without_the_connector_names_it_and_writes_nothing(
    umbel: Callable[..., Ran], store_server: StoreServer, tmp_path: Path
) -> None:
    (tmp_path / "old.jsonl").write_text(json.dumps(event(1)))
    log, made = f"{store_server.url}/log", f"{store_server.url}/made"
    assert umbel("record", "--log", log, "--import", "old.jsonl").code == 0
    ran = umbel("history", "build", "--log", log, "--tables", made)
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert "--packages org.apache.hadoop:hadoop-aws:" in ran.err
    assert store_server.keys("made") == []


def test_a_connector_that_is_not_in_the_jars_given_is_named_by_what_spark_says(
    umbel: Callable[..., Ran], store_server: StoreServer, tmp_path: Path
) -> None:
    (tmp_path / "old.jsonl").write_text(json.dumps(event(1)))
    log, made = f"{store_server.url}/log-2", f"{store_server.url}/made-2"
    assert umbel("record", "--log", log, "--import", "old.jsonl").code == 0
    with zipfile.ZipFile(tmp_path / "other.jar", "w") as jar:
        jar.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\n")
    ran = umbel("history", "build", "--log", log, "--tables", made, "--jars", "other.jar")
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert (
        "Spark has no connector for s3a: give --packages org.apache.hadoop:hadoop-aws:" in ran.err
    )
    assert not [key for key in store_server.keys("made-2") if key.endswith("_tables.json")]


# -- Delta commits

PUBLISHING = """
import sys
from datetime import UTC, datetime

import pyarrow as pa
from deltalake import DeltaTable

from umbel.pipeline import delta, storage
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place

url, kinds = sys.argv[1], {"number": "whole"}
place = Place(url)


def publication(number):
    run = storage.new_run_id(datetime.now(UTC))
    made = storage.Publication(None, place, run, storage.read_index(place))
    for name in ("runs", "tasks"):
        made.replace_few(name, [{"number": number}], kinds)
    return made


def seen():
    index = storage.read_index(place)["tables"]
    found = {}
    for name in ("runs", "tasks"):
        options = delta._options(place)
        table = DeltaTable(f"{url}/{name}", storage_options=options)
        assert table.version() == index[name]["version"]
        paths = pa.table(table.get_add_actions())["path"].to_pylist()
        assert [f"{name}/{path}" for path in paths] == [index[name]["files"][0]["path"]]
        found[name] = table.to_pyarrow_table()["number"].to_pylist()
    return found


publication(1).commit({})
print(seen())
publication(2).commit({})
print(seen())
# A third one starts from what the second had published; a fourth is quicker. Then the third one
# notices; and if it had looked at the index just before, Delta's log refuses it.
stale, third = storage.read_index(place), publication(3)
publication(4).commit({})
for read in (storage.read_index, lambda _: stale):
    storage.read_index = read
    try:
        third.commit({})
    except HistoryError as exc:
        print(exc)
"""


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_tables_in_a_store_are_delta_tables_that_one_build_at_a_time_can_change(
    store_server: StoreServer, tmp_path: Path, scheme: str
) -> None:
    url = store_server.upload(tmp_path, f"shop/{scheme}-delta").replace("s3://", f"{scheme}://")
    done = subprocess.run(
        [sys.executable, "-c", PUBLISHING, url],
        env={**os.environ, **store_server.variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, *refusals = done.stdout.splitlines()
    assert (first, second) == ("{'runs': [1], 'tasks': [1]}", "{'runs': [2], 'tasks': [2]}")
    assert len(refusals) == 2
    for refusal in refusals:
        assert refusal.startswith(f"another build has published {url} meanwhile")


# -- retention

SHORTENING = """
import sys

from tests.log_writers import eighths
from tests.unit.recorder.test_retention import DAYS, day, written
from umbel.recorder.checking import check
from umbel.recorder.log import Log
from umbel.recorder.retention import Retention, pending

log = written(sys.argv[1])
print(Retention(log).preview(DAYS[2], eighths(log, DAYS[2])).segments, check(log).events.rows)
outcome = Retention(log).apply(DAYS[2], [eighths(log, DAYS[2])[0], day(log, 1)])
print(outcome.days, outcome.segments, outcome.events, outcome.quarantined, outcome.carried)
again = Log(sys.argv[1]).open(create=False)
print(pending(again), check(again).events.rows, sorted({one.day for one in again.segments()}))
"""


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_old_days_of_a_log_in_a_store_are_removed_but_for_what_is_carried_over(
    store_server: StoreServer, scheme: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORTENING, f"{scheme}://{store_server.BUCKET}/short-{scheme}"],
        env={**os.environ, **store_server.variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    preview, outcome, left = done.stdout.splitlines()
    assert (preview, outcome) == ("6 48", "2 6 30 2 2")
    assert left == "None 18 ['2026-11-16', '2026-11-18']"
