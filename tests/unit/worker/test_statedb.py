"""The state file of a worker: what comes back, what is refused, and the step that keeps it."""

from __future__ import annotations

import os
import shelve
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.servers import wait_until
from tests.unit.worker.parts import finish_asides, idle_worker, task_message
from umbel import Umbel
from umbel.cluster.clock import CLOCK_MAX, Clock
from umbel.cluster.revocations import Revocations
from umbel.exceptions import ImproperlyConfigured
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.statedb import CLOCK_STEP, StateDB, StateFileRefused, StateNotSaved
from umbel.worker.runtime.steps import statedb as step_module
from umbel.worker.runtime.steps.statedb import Saver, StateDBStep
from umbel.worker.runtime.worker import Worker

NOW = 1_800_000_000.0
DAY_S = 86_400.0


def wall() -> float:
    return NOW


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.db"


@pytest.fixture
def revocations() -> Revocations:
    return Revocations(wall)


def kept(path: Path, clock: Clock | None = None) -> Revocations:
    """What a worker would find that starts with this file now."""
    found = Revocations(wall)
    with StateDB.open(path, wall=wall) as statedb:
        statedb.load(found, clock or Clock())
    return found


def crashed(path: Path) -> Path:
    """The file as it would be found if this process were killed now."""
    image = path.with_name("crashed.db")
    for suffix in ("", "-wal"):
        if Path(f"{path}{suffix}").exists():
            shutil.copyfile(f"{path}{suffix}", f"{image}{suffix}")
    return image


# -- what comes back -----------------------------------------------------------------------


def test_revocations_come_back_with_their_times(path: Path, revocations: Revocations) -> None:
    with StateDB.open(path, wall=wall) as statedb:
        statedb.save_revoked(revocations.revoke(["a", "b"], NOW - 60))
        statedb.save_revoked(revocations.note_task("a", NOW + DAY_S, None, NOW))
        statedb.save_revoked(revocations.revoke_headers({"customer": ["x", 17]}, NOW - 30))
    assert kept(path).all() == revocations.all()


def test_what_was_saved_is_there_when_the_worker_is_killed_the_next_moment(
    path: Path, revocations: Revocations
) -> None:
    with StateDB.open(path, wall=wall) as statedb:
        assert kept(crashed(path)).all() == []
        for number in range(20):
            statedb.save_revoked(revocations.revoke(str(number), NOW))
            statedb.save_clock(number + 1)
            clock = Clock()
            assert kept(crashed(path), clock).all() == revocations.all()
            assert clock.value > number


def test_the_oldest_time_and_the_longest_life_are_kept_in_whatever_order(path: Path) -> None:
    rows = [("task", "a", NOW - n, NOW + 1000 - 10 * n) for n in (3, 1, 2)]
    with StateDB.open(path, wall=wall) as statedb:
        for row in rows:
            statedb.save_revoked([row])
    assert kept(path).all() == [("task", "a", NOW - 3, NOW + 990)]


def test_the_clock_never_goes_back(path: Path) -> None:
    with StateDB.open(path, wall=wall) as statedb:
        statedb.save_clock(500)
        statedb.save_clock(400)
    clock = Clock()
    kept(path, clock)
    assert clock.value > 500 + CLOCK_STEP
    before = clock.value
    clock = Clock()
    kept(path, clock)  # killed before it could save anything
    assert clock.value > before


def test_a_clock_that_is_ahead_of_the_saved_one_stays_ahead(path: Path) -> None:
    with StateDB.open(path, wall=wall) as statedb:
        statedb.save_clock(500)
    clock = Clock(2**40)
    kept(path, clock)
    assert clock.value == 2**40 + 1


def test_a_new_file_leaves_the_clock_alone(path: Path) -> None:
    clock = Clock()
    kept(path, clock)
    assert (clock.value, clock.witnessed) == (0, False)


def test_a_clock_that_is_too_far_is_not_taken_over_and_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StateDB.open(path, wall=wall) as statedb:
        statedb.save_clock(CLOCK_MAX)
    clock = Clock()
    kept(path, clock)
    assert clock.value == 0
    assert "it is not taken over" in caplog.text


def test_the_clock_is_saved_on_closing(path: Path) -> None:
    statedb = StateDB.open(path, wall=wall)
    statedb.close(clock=700)
    statedb.close(clock=900)  # it is closed: nothing happens
    clock = Clock()
    kept(path, clock)
    assert clock.value == 700 + CLOCK_STEP + 1


def test_what_has_ended_is_deleted(path: Path, revocations: Revocations) -> None:
    with StateDB.open(path, wall=wall) as statedb:
        statedb.save_revoked([("task", "old", NOW - 9, NOW), ("task", "new", NOW, NOW + 9)])
        statedb.save_revoked([("header", '["k","old"]', NOW - 9, NOW - 1)])
        assert statedb.purge() == 2
        assert statedb.purge(NOW + 9) == 1
        statedb.load(revocations, Clock())
    assert revocations.all() == []


def test_the_file_keeps_a_bounded_number(path: Path) -> None:
    with StateDB.open(path, wall=wall, count_max=100, header_count_max=10) as statedb:
        for number in range(50):
            statedb.save_revoked(
                [("task", f"{number}-{n}", NOW, NOW + 1000 * number + n) for n in range(1, 11)]
            )
            statedb.save_revoked([("header", f'["k",{number}]', NOW, NOW + 1 + number)])
            assert count(statedb) <= 100 + 10 + 25 + 11
        statedb.purge()
        assert count(statedb) == 110
    found = kept(path)
    assert set(found.ids()) == {f"{number}-{n}" for number in range(40, 50) for n in range(1, 11)}
    assert found.headers() == {"k": list(range(40, 50))}


def count(statedb: StateDB) -> int:
    assert statedb._connection is not None
    return int(statedb._connection.execute("SELECT count(*) FROM revoked").fetchone()[0])


def test_threads_may_save_at_the_same_time(path: Path) -> None:
    with StateDB.open(path, wall=wall) as statedb:

        def save(name: str) -> None:
            for number in range(20):
                statedb.save_revoked([("task", f"{name}{number}", NOW, NOW + 100)])
                statedb.save_clock(number + 1)

        threads = [threading.Thread(target=save, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(kept(path)) == 80


# -- what fails ----------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_later_all_is_well(path: Path) -> None:
    with StateDB.open(path, wall=wall) as statedb:
        statedb.save_revoked([("task", "a", NOW, NOW + 9)])
        connection = statedb._connection
        assert connection is not None
        connection.execute("PRAGMA max_page_count = 1")
        rows = [("task", f"{n:0500}", NOW, NOW + 9) for n in range(1000)]
        with pytest.raises(StateNotSaved, match=r"worker\.db can not be used .*full"):
            statedb.save_revoked(rows)
        connection.execute("PRAGMA max_page_count = 100000")
        statedb.save_revoked([("task", "b", NOW, NOW + 9)])
    assert kept(path).ids() == ["a", "b"]


def test_a_row_that_can_not_be_written_takes_none_with_it(path: Path) -> None:
    with StateDB.open(path, wall=wall) as statedb:
        with pytest.raises(UnicodeEncodeError):
            statedb.save_revoked([("task", "a", NOW, NOW + 9), ("task", "\ud800", NOW, NOW + 9)])
        statedb.save_revoked([("task", "b", NOW, NOW + 9)])
    assert kept(path).ids() == ["b"]


def test_nothing_is_saved_after_the_end(path: Path) -> None:
    statedb = StateDB.open(path, wall=wall)
    statedb.close()
    with pytest.raises(StateNotSaved, match="is closed"):
        statedb.save_revoked([("task", "a", NOW, NOW + 9)])
    with pytest.raises(StateNotSaved, match="is closed"):
        statedb.save_clock(1)


# -- what is refused -----------------------------------------------------------------------


def text(path: Path) -> None:
    path.write_text("dear diary\n" * 100)


def few_bytes(path: Path) -> None:
    path.write_bytes(b"SQL")


def database_of_something_else(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")


def newer(path: Path) -> None:
    StateDB.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 2")


def damaged(path: Path) -> None:
    with StateDB.open(path) as statedb:
        statedb.save_revoked([("task", f"{n:0100}", NOW, NOW + 9) for n in range(1000)])
    content = path.read_bytes()
    path.write_bytes(content[:8192] + b"rubbish!" * 1024 + content[16384:])


def cut_off(path: Path) -> None:
    with StateDB.open(path) as statedb:
        statedb.save_revoked([("task", f"{n:0100}", NOW, NOW + 9) for n in range(1000)])
    path.write_bytes(path.read_bytes()[:20_000])


def without_a_table(path: Path) -> None:
    StateDB.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE clock")


def shelve_of_gnu(path: Path) -> None:
    path.write_bytes(b"\xce\x9aW\x13" + bytes(4096))


def shelve_of_sqlite(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE Dict (key BLOB UNIQUE NOT NULL, value BLOB NOT NULL)")


def shelve_as_it_comes(path: Path) -> None:
    """Some formats are files with suffixes of their own."""
    with shelve.open(str(path)) as file:
        file["clock"] = 7


CELERYS = r"is a state file of Celery, which is another format .* revoke again"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (text, "is no state file of a worker and is left alone: give another file"),
        (few_bytes, "is no state file"),
        (database_of_something_else, "is a database of something else and is left alone"),
        (newer, r"newer Umbel \(format 2, this one knows 1\)"),
        (damaged, r"is damaged \(.*\): move it away, with worker.db-wal"),
        (cut_off, "is damaged .*move it away"),
        (without_a_table, "is damaged .it lacks a table.: move it away"),
        (shelve_of_gnu, CELERYS),
        (shelve_of_sqlite, CELERYS),
        (shelve_as_it_comes, CELERYS),
    ],
)
def test_a_file_that_is_not_ours_is_refused_with_the_way_out_and_left_alone(
    path: Path, make: Callable[[Path], None], said: str
) -> None:
    make(path)
    files = {one: one.read_bytes() for one in path.parent.iterdir()}
    with pytest.raises(StateFileRefused, match=said) as refused:
        StateDB.open(path)
    assert str(path) in str(refused.value)
    assert {one: one.read_bytes() for one in path.parent.iterdir()} == files


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateFileRefused, match=r"can not be used .* give another file"):
        StateDB.open(tmp_path)
    with pytest.raises(StateFileRefused, match=r"there is no directory .*nowhere; make it"):
        StateDB.open(tmp_path / "nowhere" / "worker.db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_is_refused(path: Path) -> None:
    StateDB.open(path).close()
    path.chmod(0o400)
    with pytest.raises(StateFileRefused, match="let this user read and write it"):
        StateDB.open(path)


def test_a_clock_that_is_none_is_damage(path: Path) -> None:
    StateDB.open(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO clock VALUES (1, -7)")
    with pytest.raises(StateFileRefused, match="its clock is -7"):
        kept(path)


def test_rows_that_are_none_are_skipped(path: Path) -> None:
    StateDB.open(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO revoked VALUES ('task', 'a', 'no', 'time')")
        connection.execute("INSERT INTO revoked VALUES ('other', 'b', 1, 9e9)")
        connection.execute("INSERT INTO revoked VALUES ('task', 'c', ?, ?)", (NOW, NOW + 9))
    assert kept(path).ids() == ["c"]


def test_one_worker_one_file(path: Path, tmp_path: Path) -> None:
    other_name = tmp_path / "link.db"
    other_name.symlink_to(path)
    with StateDB.open(path, wall=wall) as statedb:
        for name in (path, other_name):
            with pytest.raises(StateFileRefused, match="in use by another worker: give each"):
                StateDB.open(name)
        statedb.save_revoked([("task", "a", NOW, NOW + 9)])
    assert kept(other_name).ids() == ["a"]


def test_a_file_whose_making_was_cut_short_is_made_anew(path: Path) -> None:
    path.touch()
    assert kept(path).all() == []
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:  # a header, and no table yet
        connection.execute("PRAGMA journal_mode = WAL")
    assert path.stat().st_size > 0
    assert kept(path).all() == []


# -- the step ------------------------------------------------------------------------------


@pytest.fixture
def app() -> Iterator[Umbel]:
    app = Umbel("unit", broker="memory://", backend="cache+memory://", set_as_current=False)

    @app.task(name="add")
    def add(x: int, y: int) -> int:
        return x + y

    yield app
    app.close()


@pytest.fixture
def make(app: Umbel, path: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def worker(**options: Any) -> Worker:
        worker = idle_worker(app, **{"statedb": str(path), **options})
        worker.stop_wanted.set()  # nothing is dispatched
        made.append(worker)
        return worker

    yield worker
    for one in made:
        stop(one)
        one._aside.shutdown()
        one.inbox.close()


def step_of(worker: Worker) -> StateDBStep:
    step = worker.blueprint.step("StateDB")
    assert isinstance(step, StateDBStep)
    return step


def stop(worker: Worker) -> None:
    if any(step.label() == "StateDB" for step in worker.blueprint.steps):
        step_of(worker).stop(worker)


def test_the_step_is_off_unless_a_file_is_named(app: Umbel, make: Callable[..., Worker]) -> None:
    assert StateDBStep.why_off(app, WorkerOptions()) == "no --statedb"
    assert StateDBStep.why_off(app, WorkerOptions(statedb="x.db")) == ""
    worker = make(statedb=None)
    assert worker.statedb is None
    worker.keep_revoked(worker.revocations.revoke("a", time.time()))  # kept in memory only
    assert worker.revocations.any


def test_the_setting_names_the_file_as_well(tmp_path: Path) -> None:
    conf = {"broker_url": "memory://", "worker_state_db": f"{tmp_path}/%n.db"}
    app = Umbel("unit", set_as_current=False, **conf)
    worker = idle_worker(app)
    assert worker.statedb is not None
    assert worker.statedb.path == tmp_path / "unit.db"
    stop(worker)
    app.close()


def test_the_step_comes_between_pool_and_consumer(make: Callable[..., Worker]) -> None:
    names = [step.label() for step in make().blueprint.steps]
    assert names.index("Pool") < names.index("StateDB") < names.index("Consumer")


def test_a_worker_with_a_bad_file_is_not_made(path: Path, make: Callable[..., Worker]) -> None:
    text(path)
    with pytest.raises(ImproperlyConfigured, match="is no state file"):
        make()


def test_a_file_that_can_not_be_read_is_let_go(path: Path, make: Callable[..., Worker]) -> None:
    StateDB.open(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO clock VALUES (1, -7)")
    for _ in range(2):
        with pytest.raises(StateFileRefused, match="its clock is -7"):
            make()


def test_what_was_revoked_in_a_former_life_is_discarded(make: Callable[..., Worker]) -> None:
    first = make()
    message = task_message("add", 2, 2)
    stamped = task_message("add", 2, 2, stamped_headers=["customer"], stamps={"customer": "x"})
    now = time.time()
    first.keep_revoked(first.revocations.revoke(message.headers["id"], now))
    first.keep_revoked(first.revocations.revoke_headers({"customer": ["x"]}, now))
    first.app.clock.adjust(1234)
    stop(first)
    assert first.statedb is None

    worker = make()
    assert worker.app.clock.value > 1234 + CLOCK_STEP
    other = task_message("add", 2, 2)
    for one in (message, stamped, other):
        worker.receiver(one)
    finish_asides(worker)
    assert [one.fate for one in (message, stamped, other)] == [["ack"], ["ack"], []]
    assert worker.app.backend.get_meta(message.headers["id"])["status"] == "REVOKED"
    assert [request.id for request in worker.deliveries.ready] == [other.headers["id"]]


def test_a_task_that_is_due_tomorrow_stays_revoked_until_then(
    path: Path, make: Callable[..., Worker]
) -> None:
    worker = make()
    eta = datetime.now(UTC) + timedelta(days=1)
    message = task_message("add", 2, 2, eta=eta.isoformat())
    worker.keep_revoked(worker.revocations.revoke(message.headers["id"], time.time()))
    worker.receiver(message)
    finish_asides(worker)
    assert message.fate == ["ack"]
    stop(worker)

    tomorrow = eta.timestamp() + 60
    later = Revocations(lambda: tomorrow)
    with StateDB.open(path, wall=lambda: tomorrow) as statedb:
        statedb.load(later, Clock())
    assert message.headers["id"] in later


def test_a_held_task_is_discarded_when_its_time_has_come(make: Callable[..., Worker]) -> None:
    worker = make()
    now = time.time()
    worker.revocations = worker.deliveries.revocations = Revocations(lambda: now)
    eta = datetime.now(UTC) + timedelta(days=1)
    message = task_message("add", 2, 2, eta=eta.isoformat())
    worker.receiver(message)
    (request,) = worker.deliveries.reserved.values()
    worker.revocations.revoke(request.id, now)
    worker.revocations.note_task(request.id, eta.timestamp(), None, now)
    now = eta.timestamp()
    worker.deliveries.proceed(request)
    finish_asides(worker)
    assert message.fate == ["ack"]
    assert worker.deliveries.prefetch.held == 0


def test_a_task_that_was_ready_is_not_run_when_it_was_revoked_meanwhile(
    make: Callable[..., Worker],
) -> None:
    worker = make(statedb=None)
    messages = [task_message("add", 2, 2) for _ in range(2)]
    for message in messages:
        worker.receiver(message)
    worker.revocations.revoke(messages[0].headers["id"], time.time())
    submitted: list[Any] = []
    worker.pool.submit = lambda job, *rest: submitted.append(job.id)  # type: ignore[method-assign]
    worker.stop_wanted.clear()
    worker.deliveries.dispatch()
    finish_asides(worker)
    assert messages[0].fate == ["ack"]
    assert submitted == [messages[1].headers["id"]]


def test_a_disk_that_fails_does_not_keep_a_revoked_task_from_being_discarded(
    make: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make()
    eta = datetime.now(UTC) + timedelta(days=1)
    message = task_message("add", 2, 2, eta=eta.isoformat())
    worker.revocations.revoke(message.headers["id"], time.time())
    assert worker.statedb is not None
    worker.statedb.close()
    with pytest.raises(StateNotSaved):
        worker.keep_revoked(worker.revocations.revoke("other", time.time()))
    worker.receiver(message)
    finish_asides(worker)
    assert message.fate == ["ack"]
    assert "is closed: nothing is saved any more" in caplog.text


def test_the_step_can_start_again_after_it_was_stopped(make: Callable[..., Worker]) -> None:
    worker = make()
    step = step_of(worker)
    for number in range(3):
        step.start(worker)
        worker.keep_revoked(worker.revocations.revoke(str(number), time.time()))
        step.stop(worker)
        step.stop(worker)
        assert worker.statedb is None
    worker.revocations = Revocations(time.time)
    step.start(worker)
    assert worker.revocations.ids() == ["0", "1", "2"]
    assert not any(thread.name == "umbel-statedb" for thread in others(step))


def others(step: StateDBStep) -> list[threading.Thread]:
    assert step._saver is not None
    return [one for one in threading.enumerate() if one is not step._saver._thread]


def test_the_clock_is_saved_while_the_worker_works(
    path: Path, make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "SAVE_S", 0.0)
    monkeypatch.setattr(step_module, "PURGE_S", 0.0)
    worker = make()
    worker.app.clock.adjust(4321)
    worker.revocations.revoke("old", 0.0)
    assert worker.statedb is not None
    saver = Saver(worker, worker.statedb, look_s=0.001)
    saver.start()
    worker.app.clock.adjust(5432)

    def saved() -> bool:
        clock = Clock()
        kept(crashed(path), clock)
        return clock.value > 5432 + CLOCK_STEP

    wait_until(saved, what="the clock in the file")
    wait_until(lambda: not worker.revocations.any, what="the purge")
    saver.stop()


def test_a_leap_of_the_clock_is_saved_at_once(make: Callable[..., Worker], path: Path) -> None:
    worker = make()
    assert worker.statedb is not None
    saver = Saver(worker, worker.statedb, look_s=0.001)
    saver.start()
    worker.app.clock.adjust(CLOCK_STEP // 2)
    wait_until(lambda: saver._saved > CLOCK_STEP // 2, what="the clock in the file")
    saver.stop()


def test_a_failing_disk_is_said_once(
    make: Callable[..., Worker], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "SAVE_S", 0.0)
    worker = make()
    assert worker.statedb is not None
    worker.statedb.close()
    looks = threading.Semaphore(0)

    class Looked(Saver):
        def save(self) -> None:
            looks.release()
            super().save()

    saver = Looked(worker, worker.statedb, look_s=0.001)
    worker.app.clock.forward()
    saver.start()
    for _ in range(5):
        assert looks.acquire(timeout=10)
    saver.stop()
    assert caplog.text.count("nothing is saved any more") == 1
