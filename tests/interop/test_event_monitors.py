"""Events of our workers in Celery's monitors, and of Celery's workers in ours.

On each broker two workers of ours and two of Celery's do the same work, and two monitors listen:
Celery's receiver and state, and ours. Whatever a worker tells must have the fields of the table
below, both libraries must tell the same story of the same task, and both monitors must make the
same of it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import celery
import pytest

from tests.ears import Ears
from tests.interop.celery_shell import APP, app_environment
from tests.interop.nodes import WAIT_S, Node, marks_url, start
from tests.interop.peers import CELERY, UMBEL, Client, Marks
from tests.interop.reply_shapes import NUMBER, More, misfits
from tests.servers import RedisServer, wait_until
from tests.workers import READY, Program
from umbel.app.events.state import State
from umbel.wire.events import OWN_TYPES

Event = dict[str, Any]
TEXT, MAYBE = str, (str, None)

COMMON = {
    "type": TEXT,
    "hostname": TEXT,
    "pid": int,
    "clock": int,
    "timestamp": float,
    "utcoffset": NUMBER,
}
CALL = {
    "uuid": TEXT,
    "name": TEXT,
    "args": TEXT,
    "kwargs": TEXT,
    "root_id": TEXT,
    "parent_id": MAYBE,
    "retries": int,
    "eta": MAYBE,
    "expires": MAYBE,
}
UNREGISTERED = {"uuid": TEXT, "exception": TEXT}
FAILURE = {**UNREGISTERED, "traceback": TEXT}
SIGNS = {
    "freq": NUMBER,
    "active": int,
    "processed": int,
    "loadavg": [NUMBER],
    "sw_ident": TEXT,
    "sw_ver": TEXT,
    "sw_sys": TEXT,
}
FIELDS: dict[str, dict[str, Any]] = {
    "task-sent": {**CALL, "queue": TEXT, "exchange": TEXT, "routing_key": TEXT},
    "task-received": CALL,
    "task-started": {"uuid": TEXT},
    "task-succeeded": {"uuid": TEXT, "result": TEXT, "runtime": float},
    "task-failed": FAILURE,
    "task-retried": FAILURE,
    "task-revoked": {"uuid": TEXT, "terminated": bool, "signum": (int, TEXT, None),
                     "expired": bool},
    "task-rejected": {"uuid": TEXT, "requeue": bool},
    "task-progress": {"uuid": TEXT, "done": int},
    "worker-online": SIGNS,
    "worker-heartbeat": SIGNS,
    "worker-offline": SIGNS,
}  # fmt: skip
# What Celery's pages and ours read of a task.
COMPARED = (
    *("uuid", "name", "state", "args", "kwargs", "retries", "eta", "expires", "result"),
    *("exception", "traceback", "runtime", "root_id", "parent_id", "timestamp"),
    *("received", "started", "succeeded", "failed", "retried", "revoked", "rejected"),
)


ENDS = {"task-succeeded", "task-failed", "task-revoked"}


class CeleryEars:
    """Celery's receiver and state, on a thread."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.app = celery.Celery("monitor", set_as_current=False)
        self.app.conf.update(settings)
        self.state = self.app.events.State()
        self.events: list[Event] = []
        self._connection = self.app.connection_for_read()
        self._receiver = self.app.events.Receiver(self._connection, handlers={"*": self._hear})
        self._thread = threading.Thread(target=self._receiver.capture, daemon=True)
        self._thread.start()

    def _hear(self, event: Event) -> None:
        heard = dict(event)
        self.state.event(event)
        self.events.append(heard)  # whoever finds it here finds it in the state too

    def close(self) -> None:
        self._receiver.should_stop = True
        self._thread.join(WAIT_S)
        self._connection.close()
        self.app.close()


class OurEars(Ears):
    """Our receiver and state, on a thread."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.state = State()
        self.receiver.state = self.state


@dataclass(frozen=True)
class Story:
    """What was done on one worker: ids of tasks, by what becomes of them."""

    node: Node
    ids: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One broker with all its workers, and the two monitors."""

    settings: dict[str, Any]
    nodes: dict[tuple[str, str], Node]  # by library and pool
    theirs: CeleryEars
    ours: OurEars
    stories: dict[str, Story]  # by node name

    def events_of(self, task_id: str) -> list[Event]:
        """What our monitor heard of a task."""
        return [event for event in list(self.ours.events) if event.get("uuid") == task_id]


@pytest.fixture(scope="module", params=["redis", "amqp"])
def stage(
    request: pytest.FixtureRequest,
    own_redis: RedisServer,
    marks: Marks,
    new_settings: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    settings = new_settings(request.param)
    # Celery's greenlets send events one by one, all its other pools in lists.
    pools = ("prefork", {"redis": "threads", "amqp": "gevent"}[request.param])
    client = Client(CELERY, **settings)
    programs: dict[str, Program] = {}
    nodes: dict[tuple[str, str], Node] = {}
    ours, theirs = OurEars(settings["broker_url"]), None
    try:
        for library in (CELERY, UMBEL):
            for pool in pools:
                name = f"{library}-{pool}"
                arguments = ["-P", pool, "-c", "2", "-n", f"{name}@test", "-Q", name, "-E"]
                arguments += ["--without-gossip", "--without-mingle"] if library == CELERY else []
                programs[name] = start(
                    library,
                    {**settings, "task_default_queue": name},
                    marks_url(own_redis),
                    tmp_path_factory.mktemp("w"),
                    *arguments,
                )
                nodes[library, pool] = Node(
                    f"{name}@test", pool, name, programs[name], client, marks
                )
        with ours:
            theirs = CeleryEars(settings)
            for program in programs.values():
                program.wait_for(READY)
            made = Stage(settings, nodes, theirs, ours, {})
            _wait_for_heartbeats(made)
            for node in nodes.values():
                node.wait_until_it_answers()
                made.stories[node.name] = _perform(node)
            _wait_for_the_end(made)
            yield made
    finally:
        if theirs is not None:
            theirs.close()
        client.close()
        for program in programs.values():
            program.kill()


def _wait_for_heartbeats(stage: Stage) -> None:
    names = {node.name for node in stage.nodes.values()}
    for ears in (stage.theirs, stage.ours):
        wait_until(
            lambda heard=ears.events: names <= {event["hostname"] for event in list(heard)},
            WAIT_S,
            "a sign of life of every worker",
        )


def _perform(node: Node) -> Story:
    """Send one task of every kind; they run side by side."""
    story = Story(node)
    sent = {
        "good": node.send("add", 1, kwargs={"y": 2}),
        "bad": node.send("fail", 5),
        "again": node.send("flaky", 1),
        "expired": node.send("add", 1, countdown=1.2, expires=1.0),
        "revoked": node.send("add", 1, countdown=1.5),
        "parent": node.send("spawn", 7),
        "unknown": node.send("unknown"),
        "shadowed": node.send("add", 3, shadow="t.shadow"),
    }
    node.wait_until_known(sent["revoked"].id, "scheduled")
    node.client.app.control.revoke(sent["revoked"].id)
    story.ids.update({label: result.id for label, result in sent.items()})
    return story


def _wait_for_the_end(stage: Stage) -> None:
    """Until both monitors have heard how every task has ended."""
    wanted = {task_id for story in stage.stories.values() for task_id in story.ids.values()}
    for ears in (stage.theirs, stage.ours):
        _wait_for_events(ears.events, wanted, ENDS)


def _wait_for_events(heard: list[Event], tasks: set[str], kinds: set[str]) -> None:
    wait_until(
        lambda: tasks <= {event["uuid"] for event in list(heard) if event["type"] in kinds},
        WAIT_S,
        f"{kinds} of {len(tasks)} tasks",
    )


@pytest.fixture(params=[UMBEL, CELERY])
def library(request: pytest.FixtureRequest) -> str:
    """Whose workers are looked at."""
    found: str = request.param
    return found


def of(stage: Stage, library: str) -> list[Node]:
    return [node for (owner, _), node in stage.nodes.items() if owner == library]


def test_events_have_the_fields_of_the_table(stage: Stage, library: str) -> None:
    """Said by our workers, and, to check the table, by Celery's."""
    names = {node.name for node in of(stage, library)}
    wrong: list[str] = []
    kinds: set[str] = set()
    for heard in (stage.ours.events, stage.theirs.events):
        for event in list(heard):
            if event["hostname"] not in names or _is_asked_for(event):
                continue
            if event["type"] in OWN_TYPES:
                assert heard is stage.ours.events, "on an exchange that Celery does not know"
                continue
            is_unregistered = event.get("exception", "").startswith("NotRegistered")
            fields = UNREGISTERED if is_unregistered else FIELDS[event["type"]]
            wrong += misfits(event, More({**COMMON, **fields}), event["type"])
            kinds.add(event["type"])
    assert not wrong
    not_yet = {"task-sent", "task-rejected", "task-progress", "worker-online", "worker-offline"}
    assert kinds >= set(FIELDS) - not_yet


def _is_asked_for(event: Event) -> bool:
    """Celery's answer to `heartbeat` is short."""
    return (
        event["type"] == "worker-heartbeat"
        and event["sw_ident"] == "py-celery"
        and (event["freq"] == 5)
    )


@pytest.mark.parametrize("sender", [CELERY, UMBEL])
def test_clients_tell_of_what_they_send(stage: Stage, library: str, sender: str) -> None:
    node, *_ = of(stage, library)
    client = Client(sender, **stage.settings, task_send_sent_event=True)
    try:
        sent = client.send("add", 2, queue=node.queue)
        assert sent.get(timeout=WAIT_S) == 12
        for ears in (stage.ours, stage.theirs):
            _wait_for_events(ears.events, {sent.id}, {"task-sent"})
            _wait_for_events(ears.events, {sent.id}, ENDS)
            (event,) = [
                one for one in list(ears.events)
                if one["type"] == "task-sent" and one["uuid"] == sent.id
            ]  # fmt: skip
            assert not misfits(event, More({**COMMON, **FIELDS["task-sent"]}))
            assert event["hostname"].startswith("gen")
            assert event["queue"] == event["routing_key"] == node.queue
            assert (event["name"], event["args"], event["retries"]) == ("t.add", "(2,)", 0)
            task = ears.state.tasks[sent.id]
            assert (task.state, task.name, task.routing_key) == ("SUCCESS", "t.add", node.queue)
            assert task.sent == event["timestamp"]
    finally:
        client.close()


def test_events_that_tasks_send_change_no_worker(stage: Stage, library: str) -> None:
    names = {node.name for node in stage.nodes.values()}
    for node in of(stage, library):
        sent = [node.send("report", 5) for _ in range(6)]
        assert [one.get(timeout=WAIT_S) for one in sent] == [5] * 6
        ids = {one.id for one in sent}
        for ears in (stage.ours, stage.theirs):
            _wait_for_events(ears.events, ids, ENDS)
            wait_until(
                lambda heard=ears.events, ids=ids: sum(
                    event["type"] == "task-progress" and event["uuid"] in ids
                    for event in list(heard)
                ) == 30,
                WAIT_S,
                "all progress",
            )  # fmt: skip
            before = len(ears.events)
            wait_until(
                lambda heard=ears.events, before=before, name=node.name: any(
                    event["type"] == "worker-heartbeat" and event["hostname"] == name
                    for event in heard[before:]
                ),
                WAIT_S,
                "a heartbeat",
            )
            seen = ears.state.workers[node.name]
            assert (seen.alive, seen.pid) == (True, node.worker.pid)
            assert (seen.active, seen.processed >= 6) == (0, True)
            assert {ears.state.tasks[one].state for one in ids} == {"SUCCESS"}
    assert set(stage.ours.state.workers) == names
    progress = [event for event in stage.ours.events if event["type"] == "task-progress"]
    pids = {(event["hostname"], event["pid"]) for event in progress}
    workers = {(node.name, node.worker.pid) for node in of(stage, UMBEL)}
    assert {one for one in pids if one[0].startswith("umbel")} <= workers
    assert stage.ours.receiver.sequences.missing_count == 0


def test_both_libraries_tell_the_same_story(stage: Stage) -> None:
    told: dict[str, dict[str, list[Any]]] = {}
    for story in stage.stories.values():
        for label, task_id in story.ids.items():
            # A retry may be received before its worker has said that it retries.
            said = sorted((event["type"], *_words(event)) for event in stage.events_of(task_id))
            told.setdefault(label, {})[story.node.name] = said
    different = {k: said for k, said in told.items() if len(set(map(str, said.values()))) > 1}
    assert not different
    assert {label: [kind for kind, *_ in said[min(said)]] for label, said in told.items()} == {
        "good": ["task-received", "task-started", "task-succeeded"],
        "bad": ["task-failed", "task-received", "task-started"],
        "again": [*("task-received", "task-received", "task-retried"),
                  *("task-started", "task-started", "task-succeeded")],
        "expired": ["task-received", "task-revoked"],
        "revoked": ["task-received", "task-revoked"],
        "parent": ["task-received", "task-started", "task-succeeded"],
        "unknown": ["task-failed"],
        "shadowed": ["task-received", "task-started", "task-succeeded"],
    }  # fmt: skip


def _words(event: Event) -> list[str]:
    """What an event says that does not depend on where and when."""
    if event["type"] == "task-retried":
        return []  # Celery's threads and greenlets name another exception than its processes
    names = ("name", "args", "kwargs", "retries", "exception", "terminated", "expired", "signum")
    return [str(event.get(name)) for name in names]


def test_both_monitors_make_the_same_of_it(stage: Stage, library: str) -> None:
    different: list[tuple[str, str, Any, Any]] = []
    for node in of(stage, library):
        for label, task_id in stage.stories[node.name].ids.items():
            theirs, ours = stage.theirs.state.tasks[task_id], stage.ours.state.tasks[task_id]
            for name in COMPARED:
                there, here = getattr(theirs, name), getattr(ours, name)
                if there != here:
                    different.append((label, name, there, here))
            if theirs.worker is not None:
                assert theirs.worker.hostname == ours.worker == node.name
    assert not different


def test_both_monitors_know_the_workers(stage: Stage, library: str) -> None:
    for node in of(stage, library):
        theirs, ours = stage.theirs.state.workers[node.name], stage.ours.state.workers[node.name]
        wait_until(lambda t=theirs, o=ours: t.alive and o.alive, WAIT_S, "both to call it alive")
        wait_until(
            lambda t=theirs, o=ours: t.processed and t.processed == o.processed,
            WAIT_S,
            "the same count of tasks",
        )
        assert theirs.pid == ours.pid == node.worker.pid
        assert theirs.sw_ident == ours.sw_ident == f"py-{library}"
        assert (theirs.sw_ver, theirs.sw_sys) == (ours.sw_ver, ours.sw_sys)
        assert len(theirs.loadavg) == len(ours.loadavg) == 3
        assert theirs.status_string == ours.status_string == "ONLINE"


def test_children_know_their_parents(stage: Stage, library: str) -> None:
    for node in of(stage, library):
        parent = stage.stories[node.name].ids["parent"]
        wait_until(
            lambda parent=parent: len(stage.ours.state.children(parent)) == 2, WAIT_S, "children"
        )
        for child in stage.ours.state.children(parent):
            assert (child.name, child.parent_id, child.root_id) == ("t.add", parent, parent)
            assert stage.theirs.state.tasks[child.uuid].parent_id == parent


def test_what_a_client_sent_does_not_hide_what_became_of_it(stage: Stage, library: str) -> None:
    """As Celery's state does, the worker's word on a task counts more than the client's.

    Celery's state goes by the order in which it hears of them, so the task is sent to a queue that
    the worker gets when both monitors have heard of the sending.
    """
    node, *_ = of(stage, library)
    queue = f"late-{node.queue}"
    clock = stage.ours.app.clock
    clock.adjust(clock.value + 1_000)  # of all the nodes that the monitor hears
    client = Client(CELERY, **stage.settings, task_send_sent_event=True)
    try:
        sent = client.send("flaky", 1, queue=queue, shadow="t.shadow")
        for ears in (stage.theirs, stage.ours):
            _wait_for_events(ears.events, {sent.id}, {"task-sent"})
        node.control("add_consumer", queue=queue)
        sent.get(timeout=WAIT_S)
    finally:
        client.close()
    for ears in (stage.theirs, stage.ours):
        _wait_for_events(ears.events, {sent.id}, ENDS)
        task = ears.state.tasks[sent.id]
        assert (task.name, task.retries, task.state) == ("t.shadow", 1, "SUCCESS")
        assert task.timestamp == task.succeeded


def test_nothing_was_refused_or_lost(stage: Stage) -> None:
    assert not stage.ours.receiver.counts
    assert not any(stage.ours.receiver.gaps.values())


def test_celerys_dump_prints_our_events(stage: Stage, tmp_path: Path) -> None:
    (node, *_) = of(stage, UMBEL)
    command = [sys.executable, "-m", "celery", "-A", APP, "events", "--dump"]
    with Program(command, cwd=tmp_path, env=app_environment(stage.settings)) as dump:
        dump.wait_for(rf"{node.name} \[.+\] heartbeat: active=\d+, .*sw_ident=py-umbel")
        sent = node.send("add", 40, kwargs={"y": 2})
        called = rf"t\.add\({sent.id}\) args=\(40,\) kwargs=\{{'y': 2\}}"
        dump.wait_for(rf"{node.name} \[.+\] task received: {called} .*retries=0")
        dump.wait_for(rf"{node.name} \[.+\] task started: {called}")
        dump.wait_for(rf"{node.name} \[.+\] task succeeded: {called} .*result=42, runtime=\d")


def test_both_monitors_hear_a_worker_say_good_bye(stage: Stage, library: str) -> None:
    for node in of(stage, library):
        node.worker.signal(signal.SIGTERM)
    for node in of(stage, library):
        assert node.worker.wait() == 0
        for ears in (stage.theirs, stage.ours):
            wait_until(
                lambda worker=ears.state.workers[node.name]: not worker.alive, 3, "its good-bye"
            )
            (event,) = [
                one for one in list(ears.events)
                if one["type"] == "worker-offline" and one["hostname"] == node.name
            ]  # fmt: skip
            assert not misfits(event, More({**COMMON, **SIGNS}))
