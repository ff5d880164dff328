"""Result handles, on the in-process backend."""

from __future__ import annotations

import asyncio
import pickle
import threading
import traceback
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.servers import wait_until
from umbel.app.context import Context, Frame, current_frame
from umbel.app.results import (
    AsyncResult,
    EagerResult,
    GroupResult,
    allow_join_result,
    result_from_tuple,
)
from umbel.app.results.backend import backend_for
from umbel.app.results.memory import MemoryBackend
from umbel.app.results.watching import Watchers
from umbel.app.umbel import Umbel
from umbel.exceptions import BackendError, ImproperlyConfigured, TimeoutError  # noqa: A004


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel("results", broker="memory://", backend=f"cache+memory://{uuid.uuid4()}")
    yield made
    made.close()


def later(app: Umbel, work: Any) -> None:
    """Do `work` on another thread as soon as somebody waits."""
    backend = app.backend
    assert isinstance(backend, MemoryBackend)

    def begin() -> None:
        wait_until(backend._store.watchers.wanted, what="somebody who waits")
        work()

    threading.Thread(target=begin).start()


# -- one task ------------------------------------------------------------------------------


def test_an_unknown_task_is_pending(app: Umbel) -> None:
    result = app.AsyncResult("nobody")
    assert (result.state, result.result, result.ready()) == ("PENDING", None, False)
    assert result.children is None


def test_get_returns_what_is_there_and_what_comes_later(app: Umbel) -> None:
    app.backend.store("a", {"x": 1}, "SUCCESS")
    assert app.AsyncResult("a").get(timeout=0) == {"x": 1}
    later(app, lambda: app.backend.store("b", [2], "SUCCESS"))
    assert app.AsyncResult("b").get(timeout=5) == [2]


def test_a_result_that_does_not_come_raises_the_documented_error(app: Umbel) -> None:
    with pytest.raises(TimeoutError, match="never"):
        app.AsyncResult("never").get(timeout=0.01)


def test_a_failure_is_raised_with_the_workers_traceback_as_its_cause(app: Umbel) -> None:
    app.backend.store("f", ValueError("bad", 3), "FAILURE", traceback="Traceback: over there\n")
    result = app.AsyncResult("f")
    for _ in range(2):
        with pytest.raises(ValueError, match="bad") as caught:
            result.get(timeout=1)
        assert "over there" in "".join(traceback.format_exception(caught.value))
    assert result.failed()
    assert result.get(timeout=1, propagate=False).args == ("bad", 3)
    assert result.traceback == "Traceback: over there\n"


def test_a_success_is_never_overwritten(app: Umbel) -> None:
    app.backend.store("a", 1, "SUCCESS")
    app.backend.store("a", ValueError("late"), "FAILURE")
    assert app.AsyncResult("a").get(timeout=0) == 1


def test_states_on_the_way_are_told_to_on_message(app: Umbel) -> None:
    seen: list[str] = []

    def work() -> None:
        app.backend.store("p", {"done": 1}, "PROGRESS")
        app.backend.store("p", "end", "SUCCESS")

    later(app, work)
    value = app.AsyncResult("p").get(timeout=5, on_message=lambda m: seen.append(m["status"]))
    assert value == "end"
    assert seen == ["PROGRESS", "SUCCESS"]


def test_a_custom_state_shows_what_the_task_reported(app: Umbel) -> None:
    app.backend.store("p", {"done": 1}, "PROGRESS")
    result = app.AsyncResult("p")
    assert (result.state, result.info, result.ready()) == ("PROGRESS", {"done": 1}, False)


def test_a_chain_whose_earlier_step_was_revoked_does_not_wait_for_ever(app: Umbel) -> None:
    last = AsyncResult("last", app=app, parent=AsyncResult("first", app=app))
    later(app, lambda: app.backend.store("first", ValueError("stopped"), "REVOKED"))
    with pytest.raises(ValueError, match="stopped"):
        last.get(timeout=5)


def test_forget_deletes_the_result_and_those_before_it(app: Umbel) -> None:
    for task_id in ("x", "y"):
        app.backend.store(task_id, 1, "SUCCESS")
    AsyncResult("y", app=app, parent=AsyncResult("x", app=app)).forget()
    assert app.AsyncResult("x").state == app.AsyncResult("y").state == "PENDING"


def test_then_is_called_when_the_task_ends(app: Umbel) -> None:
    called = threading.Event()
    result = app.AsyncResult("t").then(lambda r: called.set() if r.result == 7 else None)
    app.backend.store("t", 7, "SUCCESS")
    assert called.wait(5)
    failed: list[Any] = []
    app.AsyncResult("u").then(print, on_error=failed.append)
    app.backend.store("u", ValueError(), "FAILURE")
    assert failed == [app.AsyncResult("u")]
    assert result.ready()


def test_the_document_names_children_group_parent_and_time(app: Umbel) -> None:
    request = Context(id="a", group="g", parent_id="p")
    request.children.append(AsyncResult("kid", app=app))
    request.children.append(GroupResult("kids", [AsyncResult("one", app=app)], app=app))
    app.backend.store("a", 1, "SUCCESS", request=request)
    meta = app.backend.get_meta("a")
    assert meta["children"] == [[["kid", None], None], [["kids", None], [[["one", None], None]]]]
    assert (meta["group_id"], meta["parent_id"]) == ("g", "p")
    assert datetime.fromisoformat(meta["date_done"]).tzinfo == UTC
    kid, kids = app.AsyncResult("a").children or []
    assert kid == AsyncResult("kid")
    assert isinstance(kids, GroupResult)


def test_extended_results_tell_how_the_task_was_called(app: Umbel) -> None:
    app.conf.result_extended = True
    request = Context(
        id="a", task="shop.charge", args=[7], kwargs={"k": 1}, hostname="w@h", retries=2,
        delivery_info={"routing_key": "money"}, stamped_headers=["order"], stamps={"order": "o"},
    )  # fmt: skip
    app.backend.store("a", 1, "SUCCESS", request=request)
    result = app.AsyncResult("a")
    assert (result.name, result.args, result.kwargs) == ("shop.charge", [7], {"k": 1})
    assert (result.worker, result.retries, result.queue) == ("w@h", 2, "money")
    assert app.backend.get_meta("a")["order"] == "o"


def test_waiting_inside_a_task_is_refused_unless_allowed(app: Umbel) -> None:
    @app.task(name="outer")
    def outer() -> None: ...

    app.backend.store("a", 1, "SUCCESS")
    result = app.AsyncResult("a")
    request = Context(id="me", task="outer", called_directly=False)
    token = current_frame.set(Frame(outer, request, None))
    try:
        with pytest.raises(RuntimeError, match="disable_sync_subtasks=False"):
            result.get()
        with pytest.raises(RuntimeError, match="inside task outer"):
            app.GroupResult("g", [result]).get()
        assert result.get(disable_sync_subtasks=False) == 1
        with allow_join_result():
            assert result.get() == 1
    finally:
        current_frame.reset(token)


def test_handles_are_values(app: Umbel) -> None:
    result = AsyncResult("a", app=app, parent=AsyncResult("b", app=app))
    assert result == AsyncResult("a")
    assert result != AsyncResult("b")
    assert {result, AsyncResult("a")} == {result}
    assert str(result) == "a"
    assert pickle.loads(pickle.dumps(result)).parent.id == "b"
    assert result_from_tuple(result.as_tuple(), app).as_tuple() == result.as_tuple()
    assert result.as_list() == ["a", "b"]
    with pytest.raises(ValueError, match="not a stored result"):
        result_from_tuple("nonsense", app)


def test_an_eager_result_needs_no_backend() -> None:
    assert EagerResult("e", 3, "SUCCESS").get() == 3
    failed = EagerResult("e", ValueError("no"), "FAILURE", traceback="tb")
    with pytest.raises(ValueError, match="no"):
        failed.get()
    assert (failed.state, failed.ready(), failed.traceback) == ("FAILURE", True, "tb")


# -- groups --------------------------------------------------------------------------------


def group_of(app: Umbel, *ids: str) -> GroupResult:
    return app.GroupResult("g", [app.AsyncResult(task_id) for task_id in ids])


def test_a_group_gives_its_values_in_the_members_order(app: Umbel) -> None:
    group = group_of(app, "a", "b", "c")
    for task_id in ("c", "a"):
        app.backend.store(task_id, task_id.upper(), "SUCCESS")
    assert (group.ready(), group.completed_count(), group.waiting()) == (False, 2, True)
    later(app, lambda: app.backend.store("b", "B", "SUCCESS"))
    assert group.get(timeout=5) == ["A", "B", "C"]
    assert group.successful()


def test_groups_nest_in_their_values(app: Umbel) -> None:
    for task_id in "abc":
        app.backend.store(task_id, task_id, "SUCCESS")
    nested = app.GroupResult("o", [app.AsyncResult("a"), group_of(app, "b", "c")])
    assert nested.join(timeout=0) == ["a", ["b", "c"]]
    assert result_from_tuple(nested.as_tuple(), app) == nested


def test_the_first_failure_of_a_group_is_raised_without_waiting_for_the_rest(app: Umbel) -> None:
    group = group_of(app, "never", "f")
    later(app, lambda: app.backend.store("f", KeyError("gone"), "FAILURE"))
    with pytest.raises(KeyError, match="gone"):
        group.get(timeout=5)
    assert group.failed()


def test_a_group_that_is_late_names_who_is_missing(app: Umbel) -> None:
    app.backend.store("a", 1, "SUCCESS")
    with pytest.raises(TimeoutError, match="b"):
        group_of(app, "a", "b").get(timeout=0.01)


def test_a_group_can_be_saved_and_restored(app: Umbel) -> None:
    group = group_of(app, "a", "b")
    group.save()
    assert GroupResult.restore("g", app=app) == group
    group.delete()
    assert GroupResult.restore("g", app=app) is None


def test_a_group_is_a_sequence_of_handles(app: Umbel) -> None:
    group = group_of(app, "a", "b")
    assert len(group) == 2
    assert group[1].id == "b"
    assert [member.id for member in group] == ["a", "b"]
    group.add(app.AsyncResult("b"))
    group.add(app.AsyncResult("c"))
    assert group.as_list() == ["a", "b", "c"]


def test_values_can_be_taken_as_they_arrive(app: Umbel) -> None:
    group = group_of(app, "a", "b")
    app.backend.store("b", 2, "SUCCESS")
    values = group.iterate(timeout=5)
    assert next(values) == 2
    app.backend.store("a", 1, "SUCCESS")
    assert list(values) == [1]
    told: list[Any] = []
    assert group.get(callback=lambda task_id, value: told.append((task_id, value))) == [1, 2]
    assert sorted(told) == [("a", 1), ("b", 2)]


def test_then_of_a_group_waits_for_every_member(app: Umbel) -> None:
    done: list[Any] = []
    group_of(app, "a", "b").then(done.append)
    app.backend.store("a", 1, "SUCCESS")
    assert done == []
    app.backend.store("b", 1, "SUCCESS")
    assert len(done) == 1


# -- asyncio -------------------------------------------------------------------------------


def test_results_can_be_awaited(app: Umbel) -> None:
    async def main() -> tuple[Any, Any]:
        later(app, lambda: app.backend.store("a", 1, "SUCCESS"))
        later(app, lambda: app.backend.store("b", 2, "SUCCESS"))
        async with asyncio.timeout(5):
            return await app.AsyncResult("a"), await group_of(app, "a", "b")

    assert asyncio.run(main()) == (1, [1, 2])


def test_awaiting_a_failed_task_raises_its_exception(app: Umbel) -> None:
    async def main() -> None:
        await app.AsyncResult("f")

    app.backend.store("f", ValueError("bad"), "FAILURE")
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(main())


def test_members_of_a_group_are_iterated_as_they_end(app: Umbel) -> None:
    async def main() -> list[str]:
        app.backend.store("b", 2, "SUCCESS")
        seen = []
        async for member in group_of(app, "a", "b"):
            seen.append(member.id)
            app.backend.store("a", 1, "SUCCESS")
        return seen

    assert asyncio.run(main()) == ["b", "a"]


def test_a_cancelled_wait_leaves_no_watch_behind(app: Umbel) -> None:
    async def main() -> None:
        async with asyncio.timeout(0.01):
            await app.AsyncResult("never")

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(main())
    assert isinstance(app.backend, MemoryBackend)
    assert not app.backend._store.watchers.wanted()


# -- backends ------------------------------------------------------------------------------


def test_an_unknown_backend_is_refused_with_the_choices(app: Umbel) -> None:
    with pytest.raises(ImproperlyConfigured, match="redis://"):
        backend_for(app, "mongo://u:secret@h/db")


def test_without_a_backend_storing_is_silent_and_asking_says_what_to_set() -> None:
    other = Umbel("none", broker="memory://", backend="disabled://", set_as_current=False)
    other.backend.store("a", 1, "SUCCESS")
    with pytest.raises(BackendError, match="result_backend"):
        other.AsyncResult("a").get(timeout=0)


def test_a_callback_that_raises_harms_nobody_else() -> None:
    watchers = Watchers()
    told: list[Any] = []

    def broken(meta: dict[str, Any]) -> None:
        raise RuntimeError("callback")

    watchers.add(["a"], broken)
    watchers.add(["a"], told.append)
    watchers.deliver({"task_id": "a", "status": "SUCCESS"})
    watchers.deliver({"task_id": "a", "status": "SUCCESS"})
    assert len(told) == 1
    assert not watchers.wanted()


def test_a_forged_failure_is_not_resolved_to_anything_but_an_exception(app: Umbel) -> None:
    backend = app.backend
    assert isinstance(backend, MemoryBackend)
    forged = b'{"status":"FAILURE","result":{"exc_type":"system","exc_message":["x"],'
    backend._store.documents["x"] = (None, forged + b'"exc_module":"os"}}')
    assert type(app.AsyncResult("x").result).__name__ == "SecurityError"


def test_a_document_that_cannot_be_read_is_a_failure_that_says_so(app: Umbel) -> None:
    backend = app.backend
    assert isinstance(backend, MemoryBackend)
    for raw in (b"{", b"[]", b'{"result": 1}', b"\0celery-compressed\0nonsense"):
        backend._store.documents["x"] = (None, raw)
        with pytest.raises(BackendError, match="cannot be read"):
            app.AsyncResult("x").get(timeout=0)


def test_compressed_results_are_read_back(app: Umbel) -> None:
    app.conf.result_compression = "gzip"
    app.backend.store("z", "x" * 1000, "SUCCESS")
    backend = app.backend
    assert isinstance(backend, MemoryBackend)
    assert backend._store.documents["z"][1].startswith(b"\0celery-compressed\0application/x-gzip\0")
    assert app.AsyncResult("z").get(timeout=0) == "x" * 1000


def test_a_handle_with_a_long_line_of_ancestors_is_stored_within_the_readers_depth(
    app: Umbel,
) -> None:
    node: AsyncResult | None = None
    for number in range(2000):
        node = AsyncResult(str(number), app=app, parent=node)
    assert node is not None
    assert len(node.as_list()) == 2000
    request = Context(id="a")
    request.children.append(app.GroupResult("g", [node]))
    app.backend.store("a", node, "SUCCESS", request=request)
    (child,) = app.AsyncResult("a").children or []
    assert child[0].parent.parent.id == "1997"
