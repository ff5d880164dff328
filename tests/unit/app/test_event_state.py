"""The live state of a cluster: workers come and go, tasks are found, nothing grows for ever."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from umbel.app.events.state import State, Task, Worker
from umbel.cluster.task_states import fold

Event = dict[str, Any]
WALL = 1_800_000_000.0


class Time:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def state(time: Time) -> State:
    return State(clock=time)


def worker_event(kind: str, clock: int = 1, hostname: str = "w1", **fields: Any) -> Event:
    common = {"hostname": hostname, "pid": 7, "timestamp": WALL + clock, "local_received": WALL}
    return {"type": f"worker-{kind}", "clock": clock, **common, **fields}


def task_event(kind: str, uuid: str, clock: int = 1, hostname: str = "w1", **fields: Any) -> Event:
    common = {"hostname": hostname, "pid": 7, "timestamp": WALL + clock, "local_received": WALL}
    return {"type": f"task-{kind}", "uuid": uuid, "clock": clock, **common, **fields}


def heartbeat(clock: int = 1, hostname: str = "w1", **fields: Any) -> Event:
    figures = {"freq": 2.0, "active": 1, "processed": 5, "loadavg": [0.5, 0.4, 0.3]}
    software = {"sw_ident": "py-celery", "sw_ver": "5.7.0", "sw_sys": "Linux"}
    return worker_event("heartbeat", clock, hostname, **{**figures, **software, **fields})


def alive(state: State) -> list[str]:
    return [worker.hostname for worker in state.alive_workers()]


def uuids(found: list[tuple[str, Task]]) -> list[str]:
    assert all(uuid == task.uuid for uuid, task in found)
    return [uuid for uuid, _ in found]


# -- liveness ----------------------------------------------------------------------------------


def test_a_worker_is_alive_for_two_heartbeat_intervals(state: State, time: Time) -> None:
    state.event(heartbeat())
    time.now += 3.9
    assert alive(state) == ["w1"]
    assert state.workers["w1"].status_string == "ONLINE"
    time.now += 0.1
    assert alive(state) == []
    assert state.workers["w1"].status_string == "OFFLINE"


def test_a_clock_that_runs_an_hour_ahead_does_not_look_alive_after_its_death(
    state: State, time: Time
) -> None:
    state.event(heartbeat(timestamp=WALL + 3600, local_received=WALL))
    assert state.workers["w1"].skew_s == 3600
    time.now += 10
    assert alive(state) == []


@pytest.mark.parametrize("step_s", [-86_400, 86_400])
def test_a_step_of_the_wall_clock_does_not_matter(state: State, time: Time, step_s: int) -> None:
    state.event(heartbeat(1))
    time.now += 2
    moved = {"timestamp": WALL + step_s, "local_received": WALL + step_s}
    state.event(heartbeat(2, **moved))
    assert alive(state) == ["w1"]
    time.now += 4
    assert alive(state) == []


def test_offline_ends_it_at_once_and_what_comes_late_does_not_raise_it(
    state: State, time: Time
) -> None:
    for inc in ({}, {"inc": 11}):
        state.clear(ready=False)
        state.event(worker_event("online", 1, **inc))
        state.event(worker_event("offline", 9, **inc))
        assert alive(state) == []
        state.event(heartbeat(8, **inc))
        state.event(task_event("succeeded", "t", 7, **inc))
        assert alive(state) == []
        time.now += 301
        state.event(heartbeat(10, **inc))  # nothing is late for so long
        assert alive(state) == ["w1"]


@pytest.mark.parametrize("clock", [{}, {"clock": 0}])
def test_figures_and_good_byes_without_a_clock_count_by_their_time(
    state: State, clock: dict[str, int]
) -> None:
    def blind(made: Event) -> Event:
        return {**{name: value for name, value in made.items() if name != "clock"}, **clock}

    state.event(heartbeat(5, active=1))
    state.event(blind(heartbeat(6, active=2)))
    worker = state.workers["w1"]
    assert (worker.active, worker.clock) == (2, 5)
    state.event(heartbeat(4, active=9))  # late
    state.event(blind(heartbeat(3, active=9)))
    assert (worker.active, worker.clock) == (2, 5)
    state.event(heartbeat(7, active=3))
    assert (worker.active, worker.clock) == (3, 7)
    state.event(blind(worker_event("offline", 8)))
    assert alive(state) == []


def test_who_asks_hears_of_every_life_once(time: Time) -> None:
    heard: list[Any] = []
    state = State(
        clock=time,
        on_node_join=lambda worker: heard.append(("join", worker.hostname, worker.inc)),
        on_node_leave=lambda worker: heard.append(("leave", worker.hostname, worker.inc)),
    )
    state.event(task_event("succeeded", "t", 1, inc=11))  # says nothing of the worker itself
    state.event(heartbeat(2, inc=11))
    state.event(worker_event("online", 3, inc=11))
    state.event(worker_event("online", 4, pid=8, inc=12))
    state.event(worker_event("offline", 5, inc=11))  # of the old one
    state.event(worker_event("offline", 6, pid=8, inc=12))
    state.event(worker_event("offline", 6, pid=8, inc=12))
    assert heard == [("join", "w1", 11), ("join", "w1", 12), ("leave", "w1", 12)]


def test_the_next_life_is_alive_whatever_its_clock(state: State) -> None:
    state.event(heartbeat(900, inc=11, active=3))
    state.event(worker_event("offline", 901, inc=11))
    state.event(worker_event("online", 1, pid=8, inc=12))
    state.event(worker_event("offline", 902, inc=11))  # once more, of the old one
    state.event(heartbeat(899, inc=11, active=9))
    worker = state.workers["w1"]
    assert (worker.alive, worker.pid, worker.inc, worker.clock) == (True, 8, 12, 1)
    assert worker.active is None


def test_a_worker_of_celery_begins_again_with_online_even_as_the_same_process(
    state: State,
) -> None:
    state.event(worker_event("offline", 900))
    state.event(worker_event("online", 1))
    assert alive(state) == ["w1"]
    assert state.workers["w1"].clock == 1


def test_an_offline_that_was_overtaken_ends_nothing(state: State) -> None:
    state.event(worker_event("online", 6))
    state.event(worker_event("offline", 5))
    assert alive(state) == ["w1"]


def test_a_worker_known_from_tasks_only_is_believed_for_two_minutes(
    state: State, time: Time
) -> None:
    state.event(task_event("started", "t"))
    worker = state.workers["w1"]
    assert (worker.freq, worker.pid, worker.clock) == (60.0, 7, 1)
    time.now += 119
    assert alive(state) == ["w1"]
    time.now += 1
    assert alive(state) == []


def test_tasks_are_signs_of_life_of_workers_but_not_of_clients(state: State, time: Time) -> None:
    state.event(heartbeat())
    time.now += 3
    state.event(task_event("started", "t", 2))
    state.event(task_event("sent", "t", 1, "gen5@client"))
    time.now += 3
    assert alive(state) == ["w1"]
    assert list(state.workers) == ["w1"]
    assert (state.tasks["t"].worker, state.tasks["t"].client) == ("w1", "gen5@client")


CHILDREN = {
    "of an older version": {"pid": 9, "inc": 6},
    "of Celery": {"pid": 9},
    "of ours": {"pid": 7, "inc": 5, "umbel_series": 77},
}


@pytest.mark.parametrize("child", CHILDREN)
def test_what_a_pool_process_sends_changes_no_life_and_no_figure(
    state: State, time: Time, child: str
) -> None:
    life = {"pid": 7} if child == "of Celery" else {"pid": 7, "inc": 5}
    state.event(task_event("progress", "t", 1, **CHILDREN[child]))
    state.event(worker_event("online", 2, freq=2.0, **life))
    for clock in range(3, 30, 3):
        state.event(task_event("progress", "t", clock + 100, **CHILDREN[child]))
        state.event(task_event("started", "t", clock, **life))
        state.event(heartbeat(clock + 1, active=clock, **life))
        worker = state.workers["w1"]
        assert (worker.alive, worker.active, worker.pid) == (True, clock, 7)
        assert worker.inc == life.get("inc")
        time.now += 1
    state.event(worker_event("offline", 60, **life))
    state.event(task_event("progress", "t", 200, **CHILDREN[child]))
    assert alive(state) == []


@pytest.mark.parametrize("child", CHILDREN)
def test_a_worker_that_is_gone_is_not_alive_because_its_pool_processes_still_send(
    state: State, time: Time, child: str
) -> None:
    state.event(heartbeat(pid=7, **({} if child == "of Celery" else {"inc": 5})))
    for _ in range(10):
        time.now += 1
        state.event(task_event("progress", "t", **CHILDREN[child]))
    state.event(worker_event("note", **CHILDREN["of ours"]))
    assert alive(state) == []


def test_a_worker_known_from_tasks_goes_by_what_it_says_of_itself(state: State) -> None:
    state.event(task_event("started", "t", pid=9, inc=6))
    assert (state.workers["w1"].pid, state.workers["w1"].inc) == (9, 6)
    state.event(heartbeat(2, pid=7, inc=5))
    assert (state.workers["w1"].pid, state.workers["w1"].inc) == (7, 5)
    assert state.workers["w1"].processed == 5


def test_events_of_a_clients_own_make_it_no_worker(state: State) -> None:
    state.event(task_event("approved", "t", hostname="gen1@web"))
    assert state.tasks["t"].state == "APPROVED"
    assert dict(state.workers) == {}


def test_events_that_are_sent_for_a_worker_tell_nothing_of_its_figures(
    state: State, time: Time
) -> None:
    state.event(heartbeat(2, inc=5))
    time.now += 3
    state.event(worker_event("note", 500, inc=5, umbel_series=77, active=9))
    state.event(heartbeat(3, inc=5, active=4))
    worker = state.workers["w1"]
    assert (worker.alive, worker.active, worker.clock) == (True, 4, 3)


@pytest.mark.parametrize(
    ("told", "believed"),
    [
        *[(5, 5.0), (0.001, 0.5), (10**9, 3600.0), (None, 2.0), ("x", 2.0), (0, 2.0), (-1, 2.0)],
        *[(float("nan"), 2.0), (float("inf"), 2.0), ([], 2.0), (True, 2.0)],
    ],
)
def test_an_interval_is_believed_within_bounds(state: State, told: Any, believed: float) -> None:
    state.event(heartbeat(freq=told))
    assert state.workers["w1"].freq == believed


# -- figures of workers ------------------------------------------------------------------------


def test_a_heartbeat_tells_the_figures_of_a_worker(state: State) -> None:
    worker = state.event(heartbeat(4, inc=12, lost=3))
    assert isinstance(worker, Worker)
    who = {"hostname": "w1", "pid": 7, "inc": 12, "clock": 4, "skew_s": 4.0}
    figures = {"freq": 2.0, "active": 1, "processed": 5, "lost": 3, "loadavg": [0.5, 0.4, 0.3]}
    software = {"sw_ident": "py-celery", "sw_ver": "5.7.0", "sw_sys": "Linux"}
    status = {"alive": True, "status_string": "ONLINE", "heard_ago_s": 0.0}
    assert worker.as_dict() == who | figures | software | status


def test_an_event_that_was_long_on_its_way_is_no_wrong_wall_clock(state: State) -> None:
    for clock, delay_s in enumerate((0.1, 4.0, 3.0, 0.2, 5.0), 1):
        state.event(heartbeat(clock, timestamp=WALL + clock, local_received=WALL + clock + delay_s))
        skew_s = state.workers["w1"].skew_s
        assert skew_s is not None
        assert round(skew_s, 3) == -0.1
    for clock in range(6, 11):  # its clock was set back
        state.event(heartbeat(clock, timestamp=WALL, local_received=WALL + 60))
    assert state.workers["w1"].skew_s == -60


def test_what_makes_no_sense_leaves_the_figure_before_it(state: State) -> None:
    state.event(heartbeat(1, lost=2))
    wrong = {"active": "many", "processed": -1, "lost": 2**80, "loadavg": "0.5", "sw_ver": 5}
    state.event(heartbeat(2, **wrong, sw_sys="x" * 9999, local_received="now"))
    state.event(heartbeat(3, loadavg=[float("nan"), 1, 1], active=None, processed=True))
    worker = state.workers["w1"]
    assert (worker.active, worker.processed, worker.lost) == (1, 5, 2)
    assert (worker.loadavg, worker.sw_ver) == ([0.5, 0.4, 0.3], "5.7.0")
    assert worker.clock == 3


def test_a_late_heartbeat_changes_no_figure_but_a_forged_clock_does_no_lasting_harm(
    state: State, time: Time
) -> None:
    state.event(heartbeat(5, active=5))
    state.event(heartbeat(4, active=4))
    assert state.workers["w1"].active == 5
    state.event(heartbeat(2**53 - 1, active=99))
    time.now += 10
    state.event(heartbeat(6, active=6))
    assert (state.workers["w1"].active, state.workers["w1"].clock) == (6, 6)


def test_a_field_named_id_hurts_nothing(state: State) -> None:
    state.event(worker_event("elect", 3, id="el-1", topic="task", action={}, cver=1))
    state.event(heartbeat(4, id="x", alive=False, status_string="?", hear=5))
    state.event(task_event("started", "t", 5, id="y", state="z", add=1))
    assert alive(state) == ["w1"]
    assert state.tasks["t"].state == "STARTED"
    assert state.tasks["t"].extra == {"id": "y", "state": "z", "add": 1}


# -- tasks -------------------------------------------------------------------------------------


def test_a_task_has_the_fields_of_its_events(state: State) -> None:
    call = {"name": "shop.add", "args": "(1,)", "kwargs": "{}", "root_id": "t", "retries": 0}
    events = [
        task_event("sent", "t", 1, "gen1@c", **call, queue="q", exchange="", routing_key="q"),
        task_event("received", "t", 2, **call, parent_id=None, eta=None, expires=None),
        task_event("started", "t", 3),
        task_event("succeeded", "t", 4, result="3", runtime=0.5),
    ]
    for one in reversed(events):
        state.event(one)
    task = state.tasks["t"]
    assert task.as_dict() == fold(events)
    assert (task.name, task.state, task.ready, task.worker) == ("shop.add", "SUCCESS", True, "w1")
    assert (task.sent, task.succeeded, task.runtime) == (WALL + 1, WALL + 4, 0.5)
    outcome = {"result": "3", "runtime": 0.5, "exchange": "", "routing_key": "q"}
    assert task.info() == {key: call[key] for key in call if key != "name"} | outcome
    assert task.info(["name"], extra=["queue", "eta"]) == {"name": "shop.add", "queue": "q"}
    assert repr(task) == "<Task shop.add(t) SUCCESS clock:4>"


def test_tasks_are_found_by_time_type_and_worker(state: State) -> None:
    for clock, (uuid, name, worker) in enumerate(
        [("a", "add", "w1"), ("b", "mul", "w1"), ("c", "add", "w2")], 1
    ):
        state.event(task_event("received", uuid, clock, worker, name=name))
    state.event(task_event("started", "a", 9))
    assert uuids(state.tasks_by_time()) == ["a", "c", "b"]
    assert uuids(state.tasks_by_time(limit=2)) == ["a", "c"]
    assert uuids(state.tasks_by_time(reverse=False)) == ["b", "c", "a"]
    assert uuids(state.tasks_by_time(limit=1, reverse=False)) == ["b"]
    assert uuids(state.tasks_by_type("add")) == ["a", "c"]
    assert uuids(state.tasks_by_type("add", limit=1)) == ["a"]
    assert uuids(state.tasks_by_worker("w1")) == ["a", "b"]
    assert uuids(state.tasks_by_worker("w3")) == []
    assert state.task_types() == ["add", "mul"]


def test_the_causal_order_goes_by_the_first_event_also_of_a_task_that_was_retried(
    state: State,
) -> None:
    kinds = ["sent", "received", "started", "retried", "sent", "received", "started"]
    clocks = [1, 2, 3, 6, 7, 8, 9]
    for kind, clock in zip(kinds, clocks, strict=True):
        state.event(task_event(kind, "parent", clock, retries=0))
    state.event(task_event("sent", "child", 5, parent_id="parent"))
    assert uuids(state.tasks_in_order()) == ["parent", "child"]
    assert uuids(state.tasks_in_order(limit=1)) == ["parent"]


def test_children_are_known_whoever_came_first(state: State) -> None:
    state.event(task_event("received", "b", 6, parent_id="p"))
    state.event(task_event("received", "a", 5, parent_id="p"))
    assert [task.uuid for task in state.children("p")] == ["a", "b"]
    state.event(task_event("started", "p", 1))
    state.event(task_event("received", "p", 7, parent_id="p"))  # retried: it calls itself parent
    state.event(task_event("sent", "b", 7, parent_id="other"))
    assert [task.uuid for task in state.children("p")] == ["a"]
    assert [task.uuid for task in state.children("other")] == ["b"]
    assert state.children("nobody") == []


# -- bounds ------------------------------------------------------------------------------------


def test_the_task_that_was_silent_the_longest_is_forgotten(time: Time) -> None:
    state = State(max_tasks=3, clock=time)
    for clock, uuid in enumerate("abc", 1):
        state.event(task_event("received", uuid, clock, parent_id="p"))
    state.event(task_event("started", "a", 4))
    state.event(task_event("received", "d", 5, parent_id="p"))
    assert list(state.tasks) == ["c", "a", "d"]
    assert [task.uuid for task in state.children("p")] == ["a", "c", "d"]
    assert (state.event_count, state.task_count, state.evicted_tasks) == (5, 4, 1)


def test_children_do_not_outlive_the_tasks(time: Time) -> None:
    state = State(max_tasks=10, clock=time)
    for clock in range(1, 1000):
        state.event(task_event("received", f"t{clock}", clock, parent_id=f"p{clock % 7}"))
    assert sum(len(state.children(f"p{number}")) for number in range(7)) == 10


def test_the_worker_that_was_silent_the_longest_is_forgotten(time: Time) -> None:
    state = State(max_workers=2, clock=time)
    for hostname in ("w1", "w2", "w1", "w3"):
        state.event(heartbeat(hostname=hostname))
    assert list(state.workers) == ["w1", "w3"]
    assert state.evicted_workers == 1


def test_clearing_keeps_the_tasks_that_go_on_unless_told_otherwise(state: State) -> None:
    state.event(task_event("succeeded", "done", 1))
    state.event(task_event("received", "child", 2, parent_id="p"))
    state.clear()
    assert (list(state.tasks), list(state.workers), state.event_count) == (["child"], [], 0)
    assert [task.uuid for task in state.children("p")] == ["child"]
    state.clear(ready=False)
    assert (list(state.tasks), state.children("p")) == ([], [])


# -- the rest ----------------------------------------------------------------------------------


def test_the_callback_sees_the_state_with_the_event_in_it() -> None:
    seen: list[tuple[str, str]] = []

    def callback(state: State, event: Event) -> None:
        tasks = state.tasks_by_time()  # the lock lets its own thread in again
        seen.append((event["type"], tasks[0][1].state))

    state = State(callback=callback)
    state.event(task_event("started", "t", 1))
    state.event(task_event("succeeded", "t", 2))
    assert seen == [("task-started", "STARTED"), ("task-succeeded", "SUCCESS")]


def test_an_event_counts_although_the_callback_failed() -> None:
    def callback(state: State, event: Event) -> None:
        raise RuntimeError("mine")

    state = State(callback=callback)
    with pytest.raises(RuntimeError, match="mine"):
        state.event(task_event("started", "t"))
    assert state.tasks["t"].state == "STARTED"


def test_events_of_other_groups_are_counted_and_nothing_else(state: State) -> None:
    other = {"type": "custom-thing", "hostname": "x", "timestamp": 1.0}
    assert state.event(other) is None
    assert (state.event_count, len(state.tasks), len(state.workers)) == (1, 0, 0)


def test_a_snapshot_is_plain_data_of_one_moment(state: State, time: Time) -> None:
    state.event(heartbeat())
    state.event(task_event("progress", "t", 2, when={"a": (1, 2)}, name="x"))
    time.now += 1.5
    snapshot = state.snapshot()
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    assert snapshot["tasks"]["t"]["state"] == "PROGRESS"
    assert snapshot["tasks"]["t"]["extra"] == {"name": "x", "when": {"a": [1, 2]}}
    assert snapshot["workers"]["w1"]["heard_ago_s"] == 1.5
    assert (snapshot["event_count"], snapshot["task_count"]) == (2, 1)


def test_freezing_gives_the_answer_and_clears_even_after_a_failure(state: State) -> None:
    state.event(task_event("succeeded", "t"))
    assert state.freeze_while(lambda limit: len(state.tasks) + limit, 5) == 6

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        state.freeze_while(fail, clear_after=True)
    assert len(state.tasks) == 0


def test_nothing_is_taken_while_the_state_is_frozen(state: State) -> None:
    feeding = threading.Event()

    def feed() -> None:
        feeding.set()
        state.event(task_event("started", "t"))

    thread = threading.Thread(target=feed)

    def look() -> int:
        thread.start()
        assert feeding.wait(10)
        return len(state.tasks)

    assert state.freeze_while(look) == 0
    thread.join(10)
    assert len(state.tasks) == 1


def test_many_threads_may_feed_and_ask_at_once() -> None:
    state = State(max_tasks=50)
    errors: list[BaseException] = []
    kinds = ["sent", "received", "started", "succeeded"]

    def feed(thread: int) -> None:
        for clock in range(400):
            uuid = f"{thread}-{clock // 8}"
            state.event(task_event(kinds[clock % 4], uuid, clock, f"w{thread}", parent_id="p"))
            state.event(heartbeat(clock, f"w{thread}"))

    def ask() -> None:
        while any(thread.is_alive() for thread in feeders):
            assert len(state.snapshot()["tasks"]) <= 50
            assert all(task.worker for task in state.tasks.values() if task.ready)
            assert all(task.state for task in state.tasks.values())
            state.tasks_by_time(10)
            state.tasks_in_order()
            state.children("p")
            state.alive_workers()

    def guarded(function: Any, *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    feeders = [threading.Thread(target=guarded, args=(feed, number)) for number in range(3)]
    asker = threading.Thread(target=guarded, args=(ask,))
    for thread in [*feeders, asker]:
        thread.start()
    for thread in [*feeders, asker]:
        thread.join(60)
    assert errors == []
    assert state.event_count == 2400
    assert len(state.tasks) == 50
