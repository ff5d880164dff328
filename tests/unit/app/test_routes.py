"""Where a message goes: queues, routes, exchanges, and who wins when several say so."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.common import Broadcast

from umbel.app.calls import prepare
from umbel.app.routes import Destination, Queues, direct_queue
from umbel.app.umbel import Umbel
from umbel.exceptions import ImproperlyConfigured, QueueNotFound


def app_with(**settings: Any) -> Umbel:
    made = Umbel(
        "routes",
        broker="memory://",
        backend="disabled://",
        set_as_current=False,
        **settings,
    )

    @made.task(name="feed.read")
    def read(x: Any = None) -> None:
        """Does nothing."""

    return made


def goes_to(app: Umbel, name: str = "feed.read", **options: Any) -> tuple[str, str]:
    to = destination(app, name, **options)
    return to.exchange, to.routing_key


def destination(app: Umbel, name: str = "feed.read", **options: Any) -> Destination:
    return prepare(app, name, (), {}, options, app.tasks.get(name)).destination


# -- without routes ------------------------------------------------------------------------


def test_a_task_goes_to_the_default_queue_through_the_default_exchange() -> None:
    app = app_with()
    assert goes_to(app) == ("", "celery")
    queue = destination(app).queue
    assert (queue.name, queue.exchange.name, queue.routing_key) == ("celery", "celery", "celery")
    assert queue.durable
    assert queue.exchange.durable
    assert queue.exchange.type == "direct"


def test_a_queue_that_nobody_declared_is_made_durable_with_an_exchange_of_its_own() -> None:
    app = app_with()
    queue = destination(app, queue="fresh").queue
    assert goes_to(app, queue="fresh") == ("", "fresh")
    assert (queue.name, queue.exchange.name, queue.routing_key) == ("fresh", "fresh", "fresh")
    assert queue.durable


def test_a_missing_queue_is_refused_when_queues_may_not_be_made() -> None:
    app = app_with(task_create_missing_queues=False, task_queues=[Queue("celery"), Queue("feeds")])
    with pytest.raises(QueueNotFound, match=r"'feds'.*choose one of celery, feeds"):
        destination(app, queue="feds")
    assert goes_to(app, queue="feeds") == ("", "feeds")


def test_the_default_queue_takes_its_exchange_and_key_from_the_settings() -> None:
    app = app_with(
        task_default_queue="jobs",
        task_default_exchange="work",
        task_default_exchange_type="topic",
        task_default_routing_key="job.any",
    )
    assert goes_to(app) == ("work", "job.any")
    assert goes_to(app, routing_key="job.urgent") == ("work", "job.urgent")
    assert destination(app).queue.name == "jobs"


@pytest.mark.parametrize(
    "declared",
    [
        {"name": "video", "exchange": "media", "exchange_type": "topic", "routing_key": "v.#"},
        {"name": "video", "exchange": "media", "exchange_type": "topic", "binding_key": "v.#"},
        Queue("video", Exchange("media", type="topic"), routing_key="v.#"),
    ],
)
def test_queues_are_declared_as_objects_or_dictionaries(declared: Any) -> None:
    app = app_with(task_queues=[declared])
    to = destination(app, queue="video", routing_key="v.mp4")
    assert (to.exchange, to.routing_key) == ("media", "v.mp4")
    assert to.queue.routing_key == "v.#"
    assert to.queue.exchange.type == "topic"


def test_queues_are_declared_by_name_alone() -> None:
    app = app_with(task_queues=["a", "b"])
    assert sorted(app.queues) == ["a", "b"]
    assert app.queues["a"].exchange.name == "a"


def test_a_queue_without_a_key_takes_its_name_or_the_key_that_peers_take() -> None:
    fanout = Exchange("news", type="fanout")
    app = app_with(task_queues=[Queue("plain"), Queue("news", fanout), Broadcast("announce")])
    assert app.queues["plain"].routing_key == "plain"
    assert app.queues["news"].routing_key == "celery"
    assert app.queues.find("announce").routing_key == "celery"
    keyed = app_with(task_default_routing_key="k", task_queues=[Queue("q", Exchange("e"))])
    assert keyed.queues["q"].routing_key == "k"


def test_a_dictionary_of_queues_keeps_an_exchange_type_without_an_exchange_name() -> None:
    app = app_with(task_queues={"news": {"exchange_type": "fanout"}})
    assert app.queues["news"].exchange.name == "news"
    assert app.queues["news"].exchange.type == "fanout"


def test_a_queue_definition_that_is_neither_is_refused() -> None:
    class Named:
        name = "odd"

    with pytest.raises(ImproperlyConfigured, match="task_queues holds"):
        app_with(task_queues=[Named()]).queues  # noqa: B018


def test_the_highest_priority_is_set_unless_the_queue_says_its_own() -> None:
    app = app_with(
        task_queue_max_priority=10,
        task_queues=[
            Queue("plain"),
            Queue("own", max_priority=3),
            Queue("argued", queue_arguments={"x-max-priority": 5}),
        ],
    )
    assert app.queues["plain"].max_priority == 10
    assert app.queues["own"].max_priority == 3
    assert app.queues["argued"].max_priority is None
    assert app.queues.find("made").max_priority == 10


# -- what the caller says ------------------------------------------------------------------


def test_a_direct_exchange_is_used_only_when_both_exchange_and_key_are_named() -> None:
    media = Exchange("media", type="direct")
    app = app_with(task_queues=[Queue("celery"), Queue("video", media, routing_key="v")])
    assert goes_to(app, exchange="media", routing_key="v") == ("media", "v")
    assert goes_to(app, queue="video") == ("", "video")
    assert goes_to(app, queue="video", routing_key="other") == ("", "video")
    assert goes_to(app, queue="video", exchange="media") == ("", "video")
    assert goes_to(app, routing_key="v") == ("", "celery")
    assert goes_to(app, exchange="media") == ("", "celery")


def test_an_exchange_with_a_type_is_declared_and_used_without_a_key() -> None:
    to = destination(app_with(), exchange="news", exchange_type="fanout")
    assert to.exchange == "news"
    assert to.declare is not None
    assert to.declare.type == "fanout"


def test_an_exchange_object_is_declared_before_use() -> None:
    exchange = Exchange("media", type="topic")
    to = destination(app_with(), exchange=exchange, routing_key="video.mp4")
    assert (to.exchange, to.routing_key, to.declare) == ("media", "video.mp4", exchange)


def test_a_queue_object_need_not_be_declared_in_the_settings() -> None:
    queue = Queue("side", Exchange("e", type="topic"), routing_key="k")
    to = destination(app_with(task_create_missing_queues=False), queue=queue)
    assert (to.exchange, to.routing_key, to.queue) == ("e", "k", queue)


def test_a_broadcast_queue_is_found_by_its_name_and_reached_through_its_exchange() -> None:
    app = app_with(
        task_queues=[Queue("celery"), Broadcast("announce")],
        task_routes={"feed.read": {"queue": "announce", "exchange": "announce"}},
    )
    to = destination(app)
    assert to.exchange == "announce"
    # Every worker has its own queue on it; the client must not make one that nobody reads.
    assert to.queue is None
    assert to.declare is not None
    assert to.declare.type == "fanout"
    assert goes_to(app, queue="announce") == (to.exchange, to.routing_key)
    assert "announce" not in {queue.name for queue in app.queues.values()}


def test_a_worker_is_reached_through_its_own_queue() -> None:
    queue = direct_queue("w1@host")
    assert (queue.name, queue.exchange.name, queue.routing_key) == (
        "w1@host.dq2", "C.dq2", "w1@host",
    )  # fmt: skip
    app = app_with(task_routes={"feed.read": {"exchange": "C.dq2", "routing_key": "w1@host"}})
    assert goes_to(app) == ("C.dq2", "w1@host")
    assert goes_to(app, queue=queue) == ("", "w1@host.dq2")


@pytest.mark.parametrize(
    ("given", "mode"), [(None, 2), (1, 1), ("transient", 1), ("persistent", 2)]
)
def test_the_delivery_mode_is_a_number_or_its_name(given: Any, mode: int) -> None:
    assert destination(app_with(), delivery_mode=given).delivery_mode == mode


def test_a_wrong_delivery_mode_is_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="delivery_mode 3: choose 1"):
        destination(app_with(), delivery_mode=3)


# -- routes --------------------------------------------------------------------------------


def by_function(name: str, args: Any, kwargs: Any, options: Any, task: Any = None) -> Any:
    return {"queue": "functional"} if name.startswith("feed.") else None


class ByClass:
    def route_for_task(self, task: str, args: Any = None, kwargs: Any = None) -> Any:
        return {"queue": "classy"} if task == "feed.read" else None


TABLE = {"feed.*": "from_table"}


@pytest.mark.parametrize(
    ("routes", "queue"),
    [
        ({"feed.read": {"queue": "exact"}}, "exact"),
        ({"feed.read": "short"}, "short"),
        ({"feed.*": {"queue": "globbed"}}, "globbed"),
        ({re.compile(r"(feed|video)\.r"): {"queue": "matched"}}, "matched"),
        ({"other": "x"}, "celery"),
        ([{"other": "x"}, {"feed.*": "second"}], "second"),
        ([[("feed.*", {"queue": "paired"}), ("feed.read*", {"queue": "late"})]], "paired"),
        ({"feed.*": "glob", "feed.read": "exact_first"}, "exact_first"),
        (by_function, "functional"),
        ([by_function, {"feed.read": "unasked"}], "functional"),
        (ByClass(), "classy"),
        (ByClass, "classy"),
        (f"{__name__}.by_function", "functional"),
        (f"{__name__}:by_function", "functional"),
        (f"{__name__}.ByClass", "classy"),
        (f"{__name__}.TABLE", "from_table"),
        ((f"{__name__}.ByClass", {"video.*": "y"}), "classy"),
    ],
)
def test_the_first_route_with_an_answer_decides(routes: Any, queue: str) -> None:
    assert goes_to(app_with(task_routes=routes)) == ("", queue)


def test_a_route_that_answers_with_nothing_ends_the_search() -> None:
    app = app_with(task_routes=[lambda *_, **__: {}, {"feed.*": "never"}])
    assert goes_to(app) == ("", "celery")


def test_a_route_function_learns_the_call_and_the_task() -> None:
    seen: list[Any] = []

    def route(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **_: Any) -> None:
        seen.append((name, args, kwargs, options["priority"], task))

    app = app_with(task_routes=[route])
    task = app.tasks["feed.read"]
    prepare(app, "feed.read", (1,), {"k": 2}, {"priority": 3}, task)
    prepare(app, "unknown", (), {}, {"priority": 4}, None)
    assert seen == [("feed.read", (1,), {"k": 2}, 3, task), ("unknown", (), {}, 4, None)]


def test_a_route_may_give_any_calling_option_and_the_callers_win() -> None:
    app = app_with(task_routes={"feed.*": {"queue": "q", "priority": 7, "serializer": "yaml"}})
    task = app.tasks["feed.read"]
    routed = prepare(app, "feed.read", (), {}, {}, task)
    assert routed.message.properties["priority"] == 7
    assert routed.message.content_type == "application/x-yaml"
    chosen = prepare(app, "feed.read", (), {}, {"priority": 1, "queue": "mine"}, task)
    assert chosen.message.properties["priority"] == 1
    assert chosen.message.content_type == "application/x-yaml"
    assert chosen.destination.routing_key == "mine"


def test_a_caller_who_names_a_queue_is_not_sent_to_the_routes_exchange() -> None:
    app = app_with(task_routes={"feed.*": {"exchange": "media", "routing_key": "v"}})
    assert goes_to(app) == ("media", "v")
    assert goes_to(app, queue="mine") == ("", "mine")


def test_the_tasks_own_queue_wins_over_the_routes_and_the_caller_over_both() -> None:
    app = app_with(task_routes={"own": "routed"})

    @app.task(name="own", queue="attribute")
    def own() -> None:
        """Does nothing."""

    assert goes_to(app, "own") == ("", "attribute")
    assert goes_to(app, "own", queue="caller") == ("", "caller")
    assert goes_to(app, "own", exchange="e", routing_key="k") == ("e", "k")


def test_a_caller_who_names_a_queue_is_not_sent_to_the_tasks_exchange() -> None:
    app = app_with()

    @app.task(name="own", exchange="media", routing_key="v")
    def own() -> None:
        """Does nothing."""

    assert goes_to(app, "own") == ("media", "v")
    assert goes_to(app, "own", routing_key="w") == ("media", "w")
    assert goes_to(app, "own", queue="mine") == ("", "mine")


def test_routes_set_later_count() -> None:
    app = app_with()
    assert goes_to(app) == ("", "celery")
    app.conf.task_routes = {"feed.*": "later"}
    assert goes_to(app) == ("", "later")
    app.conf.update(task_routes=None)
    assert goes_to(app) == ("", "celery")


def test_a_route_that_can_not_be_loaded_is_refused_by_name() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"task_routes names 'no\.such\.thing'"):
        goes_to(app_with(task_routes="no.such.thing"))


@pytest.fixture
def quick_switching() -> Iterator[None]:
    """Threads change at nearly every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# -- what a worker consumes ----------------------------------------------------------------


def test_a_worker_consumes_all_declared_queues_or_its_selection() -> None:
    app = app_with(task_queues=["a", "b", "c"])
    assert sorted(app.queues.consumed) == ["a", "b", "c"]
    app.queues.deselect(["b"])
    assert sorted(app.queues.consumed) == ["a", "c"]
    app.queues.select(["b", "new"])
    assert sorted(app.queues.consumed) == ["b", "new"]
    app.queues.add(Queue("added"))
    assert sorted(app.queues.consumed) == ["added", "b", "new"]


def test_sending_to_an_undeclared_queue_does_not_make_a_worker_consume_it() -> None:
    app = app_with(task_queues=["a"])
    destination(app, queue="elsewhere")
    assert sorted(app.queues.consumed) == ["a"]
    app.queues.select(["a"])
    destination(app, queue="elsewhere_too")
    assert sorted(app.queues.consumed) == ["a"]


def test_a_selected_queue_stays_selected_while_threads_send_elsewhere(
    quick_switching: None,
) -> None:
    queues = Queues(app_with().conf)
    queues.select(["mine"])
    seen: set[str] = set()
    done = threading.Event()

    def send(number: int) -> None:
        for turn in range(200):
            queues.find(f"other-{number}-{turn}")

    def watch() -> None:
        while not done.is_set():
            seen.update(queues.consumed)

    watcher = threading.Thread(target=watch)
    watcher.start()
    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    done.set()
    watcher.join()
    assert seen == {"mine"}
    assert sorted(queues.consumed) == ["mine"]
