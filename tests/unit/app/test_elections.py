"""What a client may ask to be elected: whatever nobody could hold is refused before it is sent."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.common import Broadcast

from umbel import Umbel, chain, chord, group
from umbel.app.canvas.maps import chunks, xmap, xstarmap
from umbel.app.control.control import Control
from umbel.app.control.inspection import Inspect
from umbel.cli.control import ControlGroup
from umbel.cli.inspect import InspectGroup
from umbel.cluster.election import ACTION_BYTES_MAX
from umbel.exceptions import NotForElection
from umbel.worker.control.commands import BUILTIN

QUEUES = [Queue("celery"), Broadcast("all"), Queue("news", Exchange("news", type="fanout"))]


@pytest.fixture
def client() -> Iterator[Callable[..., Umbel]]:
    made: list[Umbel] = []

    def make(**settings: Any) -> Umbel:
        chosen = {"broker_url": "memory://", "result_backend": "cache+memory://", **settings}
        app = Umbel("client", set_as_current=False, **chosen)
        app.task(name="add")(lambda x, y: x + y)
        made.append(app)
        app.sent = []  # type: ignore[attr-defined]
        app.control.broadcast = (  # type: ignore[method-assign]
            lambda command, arguments, **_: app.sent.append(arguments)  # type: ignore[attr-defined]
        )
        return app

    yield make
    for app in made:
        app.close()


SHAPES: list[tuple[str, Callable[[Any], Any]]] = [
    ("chain", lambda add: chain(add, add)),
    ("chain", lambda add: add | add),
    ("chain", lambda add: chain(app=add.app)),
    ("group", lambda add: group(add, add)),
    ("group", lambda add: group([add])),
    ("group", lambda add: group([], app=add.app)),
    ("chord", lambda add: chord([add, add], add)),
    ("chunks", lambda add: chunks(add, [(1, 1), (2, 2)], 1)),
]


@pytest.mark.parametrize(("kind", "make"), SHAPES)
def test_what_is_more_than_one_message_cannot_be_elected(
    client: Callable[..., Umbel], kind: str, make: Callable[[Any], Any]
) -> None:
    app = client()
    shape = make(app.signature("add", (1, 1), app=app))
    with pytest.raises(NotForElection, match=rf"a {kind} cannot be elected.*a task that sends it"):
        shape.election()
    with pytest.raises(NotForElection, match="cannot be elected"):
        app.control.election("id", "task", dict(shape))
    assert app.sent == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [xmap, xstarmap])
def test_a_map_is_one_message(client: Callable[..., Umbel], kind: Any) -> None:
    app = client()
    result = kind(app.signature("add", app=app), [(1, 1)], app=app).election()
    (sent,) = app.sent  # type: ignore[attr-defined]
    assert sent["id"] == sent["action"]["options"]["task_id"] == result.id


@pytest.mark.parametrize("id_", [7, "", b"x", ["x"], {"a": 1}, None, True, "x" * 201, "ä" * 101,
                                 "\ud800"])  # fmt: skip
def test_an_id_that_no_election_can_have_is_refused(client: Callable[..., Umbel], id_: Any) -> None:
    app = client()
    for topic in ("task", "rotate"):
        with pytest.raises(NotForElection, match=r"id .*: give text of 1 to 200 bytes"):
            app.control.election(id_, topic, {"task": "add", "args": [1, 1]})
    if id_ is not None:
        with pytest.raises(NotForElection, match="id "):
            app.signature("add", (1, 1), options={"task_id": id_}).election()
    assert app.sent == []  # type: ignore[attr-defined]


def test_an_id_may_be_a_uuid_as_in_every_call(client: Callable[..., Umbel]) -> None:
    app, id_ = client(), uuid.uuid4()
    app.control.election(id_, "rotate")  # type: ignore[arg-type]
    result = app.signature("add", (1, 1), options={"task_id": id_}).election()
    assert [sent["id"] for sent in app.sent] == [str(id_)] * 2  # type: ignore[attr-defined]
    assert result.id == str(id_)


@pytest.mark.parametrize("topic", [None, 7, "", ["task"], "t" * 201])
def test_a_topic_that_nobody_can_handle_is_refused(
    client: Callable[..., Umbel], topic: Any
) -> None:
    with pytest.raises(NotForElection, match=r"topic .*: give text of 1 to 200 bytes"):
        client().control.election("id", topic, {"task": "add"})


def test_a_topic_that_only_workers_know_is_sent(client: Callable[..., Umbel]) -> None:
    app = client()
    app.control.election("id", "rotate", {"realm": "eu"})
    assert app.sent == [  # type: ignore[attr-defined]
        {"id": "id", "topic": "rotate", "action": {"realm": "eu"}}
    ]


ACTIONS: list[tuple[Any, str]] = [
    (None, "not a signature"),
    ("add", "not a signature"),
    ([1], "not a signature"),
    ({}, "'task' is missing"),
    ({"task": 7}, "'task'"),
    ({"task": "add", "args": 7}, "'args'"),
    ({"task": "add", "args": [1]}, "no message can be made"),
    ({"task": "add", "args": [1, 1], "options": {"countdown": "soon"}}, "countdown"),
    ({"task": "add", "args": [1, 1], "options": {"exchange": [1], "routing_key": 4}}, "exchange"),
    ({"task": "add", "args": [object(), 1]}, "cannot be sent"),
    ({"task": "add", "args": ["x" * ACTION_BYTES_MAX, 1]}, "bytes, at most"),
    ({"task": "add", "args": [1, 1], "options": {"queue": "all"}}, "fanout exchange 'all'"),
    ({"task": "add", "args": [1, 1], "options": {"queue": "news"}}, "fanout exchange 'news'"),
    ({"task": "add", "args": [1, 1], "options": {"exchange": "news", "routing_key": "x"}},
     "fanout exchange 'news'"),
    ({"task": "add", "args": [1, 1], "options": {"exchange": "f", "exchange_type": "fanout"}},
     "fanout exchange 'f'"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "reason"), ACTIONS)
def test_an_action_that_is_no_task_to_send_is_refused(
    client: Callable[..., Umbel], action: Any, reason: str
) -> None:
    app = client(task_queues=QUEUES)
    with pytest.raises(NotForElection, match=reason):
        app.control.election("id", "task", action)
    assert app.sent == []  # type: ignore[attr-defined]


def test_other_topics_take_every_action_that_json_can_carry(client: Callable[..., Umbel]) -> None:
    app = client()
    for action in (None, 7, "text", [1], {"any": {"thing": 1}}):
        app.control.election("id", "rotate", action)
    assert len(app.sent) == 5  # type: ignore[attr-defined]
    for action in (object(), {1, 2}, "x" * ACTION_BYTES_MAX):
        with pytest.raises(NotForElection, match="action of election 'id'"):
            app.control.election("id", "rotate", action)


def test_the_clients_own_election_allow_counts(client: Callable[..., Umbel]) -> None:
    app = client(election_allow=["shop.*"])
    app.signature("shop.close").election()
    with pytest.raises(NotForElection, match="'add' is not in election_allow"):
        app.signature("add", (1, 1)).election()
    assert len(app.sent) == 1  # type: ignore[attr-defined]


def test_a_broker_without_registers_holds_no_elections(
    client: Callable[..., Umbel], tmp_path: Any
) -> None:
    folders = dict.fromkeys(("data_folder_in", "data_folder_out", "control_folder"), str(tmp_path))
    app = client(broker_url="filesystem://", broker_transport_options=folders)
    with pytest.raises(NotForElection, match=r"'filesystem' has no registers.*use Redis or Rabbit"):
        app.control.election("id", "rotate", None)
    with pytest.raises(NotForElection, match="registers"):
        app.signature("add", (1, 1)).election()


# -- the command line and Python offer the same -------------------------------------------------

# `hello` is how a worker greets others, which take over what it says; not for people.
NOT_FOR_PEOPLE = {"hello"}
# Not commands to nodes, or shown by `umbel inspect` and `umbel purge`.
OTHER_METHODS = {"inspect", "broadcast", "close", "purge", "discard_all", "ping", "queue_lengths"}


def methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}


def names(group_: Any) -> set[str]:
    return set(group_.entries)


def test_every_inspection_of_the_command_line_is_a_method_and_the_other_way_round() -> None:
    aliases = {alias for entry in InspectGroup.entries.values() for alias in entry.aliases}
    assert methods(Inspect) - aliases == names(InspectGroup) | NOT_FOR_PEOPLE


def test_every_control_command_of_the_command_line_is_a_method_and_the_other_way_round() -> None:
    assert methods(Control) - OTHER_METHODS == names(ControlGroup)


def test_every_command_of_a_worker_is_offered_by_both() -> None:
    # A heartbeat changes nothing, and is a control command all the same, as in Celery.
    assert {one.name for one in BUILTIN} == names(InspectGroup) | names(ControlGroup) | (
        NOT_FOR_PEOPLE
    )
