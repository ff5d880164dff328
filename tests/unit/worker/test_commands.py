"""The commands, each on a worker that does not run."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.worker.parts import Message, finish_asides, idle_worker, task_message
from umbel import Umbel
from umbel.cluster.clock import Clock
from umbel.cluster.revocations import Revocations
from umbel.worker.control.commands import BUILTIN
from umbel.worker.control.commands.revoking import signal_number
from umbel.worker.control.panel import CommandState
from umbel.worker.runtime.statedb import StateDB
from umbel.worker.runtime.worker import Worker

DAY_S = 86_400.0
# wire-format §5: what Celery's and Flower's pages ask for.
INSPECT = {
    "ping", "clock", "hello", "active", "reserved", "scheduled", "query_task", "revoked",
    "registered", "stats", "conf", "active_queues", "report", "memsample", "memdump", "objgraph",
    "queue_lengths",
}  # fmt: skip
CONTROL = {
    "revoke", "revoke_by_stamped_headers", "terminate", "rate_limit", "time_limit", "pool_grow",
    "pool_shrink", "pool_restart", "autoscale", "add_consumer", "cancel_consumer",
    "enable_events", "disable_events", "election", "shutdown", "pause", "resume",
}  # fmt: skip


@pytest.fixture
def app() -> Umbel:
    app = Umbel(
        "unit",
        broker="memory://",
        backend="cache+memory://",
        set_as_current=False,
        control_signing_key="a secret of sixteen bytes",
    )

    @app.task(name="add", rate_limit="10/m")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(name="plain")
    def plain(*args: Any, **kwargs: Any) -> None:
        """Nothing."""

    return app


@pytest.fixture
def worker(app: Umbel) -> Iterator[Worker]:
    worker = idle_worker(app)
    worker.stop_wanted.set()  # nothing is dispatched: requests stay where a test can see them
    yield worker
    worker._aside.shutdown()
    worker.inbox.close()
    app.close()


def run(worker: Worker, name: str, **arguments: Any) -> Any:
    """The answer of a command; every answer has a JSON form."""
    command = BUILTIN.get(name)
    assert command is not None
    value = command.run(CommandState(worker), **arguments)
    finish_asides(worker)
    return json.loads(json.dumps(value))


def receive(worker: Worker, name: str, *args: Any, **fields: Any) -> Message:
    message = task_message(name, *args, **fields)
    worker.receiver(message)
    return message


def tomorrow() -> str:
    return (datetime.now(UTC) + timedelta(days=1)).isoformat()


def test_every_command_of_the_protocol_is_there_and_inspections_change_nothing() -> None:
    known = {command.name: command for command in BUILTIN}
    assert set(known) >= INSPECT | CONTROL | {"heartbeat"}
    assert {name for name in INSPECT if not known[name].reads} == set()
    assert {name for name in CONTROL if known[name].reads} == set()
    aliases = {alias for command in BUILTIN for alias in command.aliases}
    assert aliases == {
        "dump_active", "dump_reserved", "dump_schedule", "dump_revoked", "dump_tasks", "dump_conf",
    }  # fmt: skip
    assert all(command.help for command in BUILTIN)


@pytest.mark.parametrize("name", sorted(INSPECT - {"hello"}))
def test_arguments_of_a_later_version_do_not_matter(worker: Worker, name: str) -> None:
    if name == "objgraph":
        pytest.importorskip("objgraph")
    run(worker, name, unheard_of=1)


# -- looking -------------------------------------------------------------------------------


def test_tasks_are_told_where_they_are(worker: Worker) -> None:
    waiting = receive(worker, "plain", 1, {"a": 2})
    held = receive(worker, "plain", eta=tomorrow())
    (shown,) = run(worker, "reserved")
    assert shown == {
        "id": waiting.headers["id"],
        "name": "plain",
        "type": "plain",
        "args": [1, {"a": 2}],
        "kwargs": {},
        "hostname": "unit@test",
        "time_start": None,
        "acknowledged": False,
        "delivery_info": {
            "exchange": "", "routing_key": "celery", "priority": None, "redelivered": False,
        },
        "worker_pid": None,
    }  # fmt: skip
    (entry,) = run(worker, "scheduled")
    assert entry["request"]["id"] == held.headers["id"]
    assert entry["priority"] == 6
    assert datetime.fromisoformat(entry["eta"]) == datetime.fromisoformat(held.headers["eta"])
    assert run(worker, "active") == []
    ids = [waiting.headers["id"], held.headers["id"], "elsewhere"]
    found = run(worker, "query_task", ids=ids)
    assert {key: value[0] for key, value in found.items()} == {
        ids[0]: "reserved",
        ids[1]: "scheduled",
    }
    assert run(worker, "query_task", ids=ids[0])[ids[0]][0] == "reserved"
    assert run(worker, "query_task", ids=[None, 7]) == {}


def test_tasks_are_listed_with_what_is_set_of_them(worker: Worker) -> None:
    assert run(worker, "registered") == ["add [rate_limit=10/m]", "plain"]
    assert run(worker, "registered", taskinfoitems=["acks_late"]) == [
        f"{name} [acks_late={worker.app.tasks[name].acks_late}]" if
        worker.app.tasks[name].acks_late is not None else name
        for name in ("add", "plain")
    ]  # fmt: skip
    assert "celery.chord" in " ".join(run(worker, "registered", builtins=True))


def test_settings_are_told_without_secrets(worker: Worker) -> None:
    changed = run(worker, "conf")
    assert changed["broker_url"] == "memory://"
    assert "task_default_queue" not in changed
    every = run(worker, "conf", with_defaults=True)
    assert every["task_default_queue"] == "celery"
    for shown in (changed, every, run(worker, "report")):
        assert "a secret of sixteen bytes" not in json.dumps(shown)


def test_stats_have_the_shape_that_pages_read(worker: Worker) -> None:
    receive(worker, "plain")
    stats = run(worker, "stats")
    assert stats["total"] == {}
    assert isinstance(stats["broker"], dict)
    assert stats["clock"] == str(worker.app.clock.value)
    assert stats["pool"]["max-concurrency"] == 1
    assert isinstance(stats["uptime"], int)
    assert stats["prefetch_count"] == worker.deliveries.prefetch.window
    assert {"utime", "stime", "maxrss", "nivcsw"} <= set(stats["rusage"])
    assert stats["umbel"]["received"] == 1
    assert "autoscaler" not in stats


def test_the_memory_is_sampled(worker: Worker) -> None:
    sample = run(worker, "memsample")
    assert re.fullmatch(r"\d+\.\d{3}MB", sample)
    assert float(sample[:-2]) > 10
    for _ in range(30):
        run(worker, "memsample")
    dump = run(worker, "memdump", samples=5).splitlines()
    assert 5 <= len(dump) <= 8
    assert re.fullmatch(r"= \d+\.\d{3}MB", dump[-1])


def test_a_drawing_of_objects_needs_its_package(worker: Worker) -> None:
    try:
        import objgraph  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install objgraph"):
            run(worker, "objgraph")


def test_a_greeting_is_answered_with_what_is_revoked_and_the_clock(worker: Worker) -> None:
    worker.revocations.revoke("ours", time.time())
    before = worker.app.clock.value
    told = run(worker, "hello", from_node="w2@test", revoked=["theirs", 7, None])
    assert told == {"revoked": ["ours", "theirs"], "clock": worker.app.clock.value}
    assert worker.app.clock.value > before
    assert run(worker, "hello", from_node="unit@test", revoked=["x"]) is None
    assert run(worker, "revoked") == ["ours", "theirs"]


# -- limits --------------------------------------------------------------------------------


def test_rate_limits_are_set_and_lifted(worker: Worker) -> None:
    set_to = {"ok": "new rate limit set successfully"}
    assert run(worker, "rate_limit", task_name="plain", rate_limit="5/m") == set_to
    assert worker.deliveries.limits.lanes["plain"].bucket.rate == pytest.approx(5 / 60)
    assert run(worker, "registered")[1] == "plain [rate_limit=5/m]"
    lifted = {"ok": "rate limit disabled successfully"}
    for nothing in (0, "0", None, ""):
        run(worker, "rate_limit", task_name="plain", rate_limit=3)
        answer = run(worker, "rate_limit", task_name="plain", rate_limit=nothing)
        assert "plain" not in worker.deliveries.limits.lanes
        assert nothing == "0" or answer == lifted
    assert run(worker, "rate_limit", task_name="nosuch", rate_limit="5/m") == {
        "error": "unknown task"
    }
    for wrong in ("5/x", "many", [1], {"a": 1}, "-1/s"):
        answer = run(worker, "rate_limit", task_name="plain", rate_limit=wrong)
        assert answer["error"].startswith("Invalid rate limit string: "), wrong


def test_time_limits_apply_to_the_next_task(worker: Worker) -> None:
    receive(worker, "plain")
    strategy = worker.receiver.strategies["plain"]
    request = next(iter(worker.deliveries.reserved.values()))
    done = {"ok": "time limits set successfully"}
    assert run(worker, "time_limit", task_name="plain", soft=3, hard="9") == done
    assert strategy.limits(request.header) == (3.0, 9.0)
    assert run(worker, "time_limit", task_name="plain", soft=None, hard=None) == done
    assert strategy.limits(request.header) == (None, None)
    run(worker, "time_limit", task_name="add", hard=4)  # of which no message has come yet
    receive(worker, "add", 1, 1)
    assert worker.receiver.strategies["add"].hard_s == 4.0
    assert run(worker, "time_limit", task_name="nosuch", hard=1) == {"error": "unknown task"}
    for wrong in (-1, "soon", float("inf"), float("nan"), [1]):
        with pytest.raises(ValueError, match="give seconds"):
            run(worker, "time_limit", task_name="plain", hard=wrong)


# -- pools ---------------------------------------------------------------------------------


def test_a_pool_that_can_not_grow_says_so(worker: Worker) -> None:
    with pytest.raises(ValueError, match="cannot grow the solo pool"):
        run(worker, "pool_grow", n=1)
    with pytest.raises(ValueError, match="at least one must stay"):
        run(worker, "pool_shrink", n=1)
    with pytest.raises(ValueError, match="Autoscale not enabled"):
        run(worker, "autoscale", max=3, min=1)
    with pytest.raises(ValueError, match="Pool restarts not enabled"):
        run(worker, "pool_restart")


def test_modules_are_loaded_before_a_restart(app: Umbel, tmp_path: Path, monkeypatch: Any) -> None:
    app.conf.update(worker_pool_restarts=True)
    worker = idle_worker(app)
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "reloaded_here.py"
    module.write_text("value = 1")
    started = {"ok": "reload started"}
    assert run(worker, "pool_restart", modules=["reloaded_here"]) == started
    module.write_text("value = 2  # longer, so that its bytecode is not taken for it")
    assert run(worker, "pool_restart", modules="reloaded_here", reload=True) == started
    import reloaded_here

    assert reloaded_here.value == 2
    with pytest.raises(ModuleNotFoundError):
        run(worker, "pool_restart", modules=["no_such_module_here"])
    worker._aside.shutdown()
    worker.inbox.close()


# -- revoking ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "number"),
    [
        (None, signal.SIGTERM),
        ("", signal.SIGTERM),
        ("SIGKILL", signal.SIGKILL),
        ("kill", signal.SIGKILL),
        (9, signal.SIGKILL),
        ("15", signal.SIGTERM),
    ],
)
def test_signals_have_names_and_numbers(given: Any, number: int) -> None:
    assert signal_number(given) == number


@pytest.mark.parametrize("given", ["SIGNONE", 0, 999, True, [9], "9.5", {}])
def test_what_is_no_signal_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="give a name such as SIGKILL"):
        signal_number(given)


def test_revoking_says_what_was_flagged(worker: Worker) -> None:
    flagged = {"ok": "tasks {'a'} flagged as revoked"}
    assert run(worker, "revoke", task_id="a") == flagged
    assert run(worker, "revoke", task_id=["c", "b"], terminate=False) == {
        "ok": "tasks {'b', 'c'} flagged as revoked"
    }
    assert run(worker, "revoked") == ["a", "b", "c"]
    unknown = {"ok": "terminate: tasks unknown"}
    assert run(worker, "revoke", task_id="d", terminate=1) == unknown
    assert run(worker, "terminate", task_id=["e"], signal="KILL") == unknown
    for wrong in (None, [], 7, [7], [["a"]], 1.5, True):
        with pytest.raises(ValueError, match="give the id of a task"):
            run(worker, "revoke", task_id=wrong)


def test_a_waiting_result_is_told_at_once_and_one_that_is_there_is_left(worker: Worker) -> None:
    backend = worker.app.backend
    backend.store("done", 4, "SUCCESS")
    run(worker, "revoke", task_id=["done", "waiting"])
    assert backend.get_meta("done")["status"] == "SUCCESS"
    assert backend.get_meta("waiting")["status"] == "REVOKED"


def test_a_revoked_task_is_discarded_on_receipt(worker: Worker) -> None:
    message = task_message("plain")
    run(worker, "revoke", task_id=message.headers["id"])
    worker.receiver(message)
    finish_asides(worker)
    assert message.fate == ["ack"]
    assert not worker.deliveries.reserved
    assert worker.app.backend.get_meta(message.headers["id"])["status"] == "REVOKED"


def test_a_task_that_was_received_is_discarded_just_before_it_would_run(worker: Worker) -> None:
    message = receive(worker, "plain")
    run(worker, "revoke", task_id=message.headers["id"])
    assert message.fate == []
    worker.stop_wanted.clear()
    worker.deliveries.dispatch()
    finish_asides(worker)
    assert message.fate == ["ack"]
    assert worker.counters.started == 0


@pytest.mark.parametrize(
    "headers", [{"team": "a"}, {"team": ["x", "a"]}, ["team=a"], {"n": 1, "team": "a"}]
)
def test_stamps_revoke_what_carries_them(worker: Worker, headers: Any) -> None:
    stamped = task_message("plain", stamped_headers=["team"], stamps={"team": ["a"]})
    other = task_message("plain", stamped_headers=["team"], stamps={"team": ["b"]})
    shown = {"team": "a"} if isinstance(headers, list) else headers
    answer = run(worker, "revoke_by_stamped_headers", headers=headers)
    assert answer == {"ok": f"headers {shown} flagged as revoked, but not terminated"}
    for message in (stamped, other):
        worker.receiver(message)
    finish_asides(worker)
    assert (stamped.fate, other.fate) == (["ack"], [])
    answer = run(worker, "revoke_by_stamped_headers", headers=headers, terminate=True)
    assert answer == {"ok": f"headers {shown} were not terminated"}


@pytest.mark.parametrize("wrong", [None, {}, [], 7, "team=a", {"team": float("nan")}, ["team"]])
def test_stamps_that_can_not_be_are_refused_also_next_to_good_ones(
    worker: Worker, wrong: Any
) -> None:
    run(worker, "revoke_by_stamped_headers", headers={"team": "a"})
    with pytest.raises(ValueError, match=r"give \{name: value\}"):
        run(worker, "revoke_by_stamped_headers", headers=wrong)


class Day:
    """A wall clock that the test sets."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.mark.parametrize("first", ["the task", "the revocation"])
def test_a_task_that_is_due_tomorrow_and_was_revoked_today_does_not_run_tomorrow(
    worker: Worker, first: str
) -> None:
    day = Day()
    worker.revocations = worker.deliveries.revocations = Revocations(day)
    message = task_message("plain", eta=tomorrow())
    task_id = message.headers["id"]
    if first == "the task":
        worker.receiver(message)
        (request,) = worker.deliveries.reserved.values()
        run(worker, "revoke", task_id=task_id)
    else:
        run(worker, "revoke", task_id=task_id)
        worker.receiver(message)  # is discarded at once; another node may hold a copy
        finish_asides(worker)
        assert message.fate == ["ack"]
    day.ahead_s = DAY_S + 60
    worker.revocations.revoke("another", day())
    worker.revocations.purge(day())
    assert task_id in worker.revocations.ids()
    if first == "the task":
        worker.deliveries.proceed(request)  # its time has come
        finish_asides(worker)
        assert message.fate == ["ack"]
        assert worker.app.backend.get_meta(task_id)["status"] == "REVOKED"
    again = task_message("plain")
    again.headers["id"] = task_id
    worker.receiver(again)
    finish_asides(worker)
    assert again.fate == ["ack"]
    assert worker.counters.started == 0
    day.ahead_s = 2 * DAY_S
    worker.revocations.purge(day())
    assert task_id not in worker.revocations.ids(), "nothing lasts for ever"


def test_what_was_revoked_today_is_still_so_for_a_worker_that_starts_tomorrow(
    worker: Worker, tmp_path: Path
) -> None:
    day = Day()
    worker.revocations = worker.deliveries.revocations = Revocations(day)
    message = receive(worker, "plain", eta=tomorrow())
    with StateDB.open(tmp_path / "w.db") as worker.statedb:
        run(worker, "revoke", task_id=message.headers["id"])
        run(worker, "revoke", task_id="without eta")
    worker.statedb = None
    day.ahead_s = DAY_S + 60
    later = Revocations(day)
    with StateDB.open(tmp_path / "w.db") as statedb:
        statedb.load(later, Clock())
    assert message.headers["id"] in later
    assert "without eta" not in later


# -- life ----------------------------------------------------------------------------------


def test_a_worker_without_a_voice_says_so(worker: Worker) -> None:
    assert worker.events is None
    for command in ("enable_events", "disable_events", "heartbeat"):
        assert run(worker, command) == {"error": "event dispatcher unavailable"}


def test_a_queue_of_an_exchange_that_can_not_be_is_refused(worker: Worker) -> None:
    with pytest.raises(ValueError, match="exchange type 'none': give one of direct"):
        run(worker, "add_consumer", queue="q", exchange_type="none")
    with pytest.raises(ValueError, match="give the name of a queue"):
        run(worker, "add_consumer", queue="q" * 256)
    assert run(worker, "active_queues") == []
    assert run(worker, "queue_lengths") == {"celery": 0}
