"""Values through real brokers, workers and result backends: they come back equal, or not at all."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.servers import wait_until
from tests.sites import APP, Site
from tests.values import EXAMPLES, REFUSED, SERIALIZERS, expected, same
from umbel import Umbel
from umbel.app.canvas import chain, chord, chunks, group, xmap, xstarmap
from umbel.wire.content import EncodeError

every_serializer = pytest.mark.parametrize("serializer", SERIALIZERS)


@pytest.fixture(params=["redis-redis", "amqp-redis", "amqp-rpc", "redis-rpc"])
def place(request: pytest.FixtureRequest) -> tuple[Site, str]:
    """A broker, and the address of the result backend."""
    broker, backend = request.param.split("-")
    site: Site = request.getfixturevalue(f"{broker}_site")
    return site, site.backend_url if backend == "redis" else "rpc://"


@pytest.fixture
def make_client(place: tuple[Site, str]) -> Iterator[Callable[[str], Umbel]]:
    """A client whose worker runs, both with one serializer for everything."""
    site, backend = place
    made: list[Umbel] = []

    def make(serializer: str) -> Umbel:
        settings: dict[str, Any] = {
            "task_serializer": serializer,
            "result_serializer": serializer,
            "accept_content": list(SERIALIZERS),
            "result_extended": True,
        }
        site.worker("prefork", settings={**settings, "result_backend": backend})
        made.append(
            Umbel(
                "values",
                broker=site.broker_url,
                backend=backend,
                set_as_current=False,
                **settings,
            )
        )
        return made[-1]

    yield make
    for app in made:
        app.close()


@every_serializer
def test_values_come_back_equal_by_every_way(
    make_client: Callable[[str], Umbel], serializer: str
) -> None:
    app, values = make_client(serializer), EXAMPLES[serializer]
    wanted = [expected(value, serializer) for value in values]

    def call(task: str, *args: Any, **options: Any) -> Any:
        return app.signature(f"{APP}.{task}", args, **options)

    plain = [call("echo", value).apply_async() for value in values]
    replaced = [call("replaced_by_echo", value).apply_async() for value in values]
    chained = [chain(call("echo", value), call("echo")).apply_async() for value in values]
    failed = [call("fail_with", value).apply_async() for value in values]
    noted = [call("note", value).apply_async() for value in values]
    # The worker sends these: where their results go has to be in the call.
    linked = [call("echo", task_id=str(uuid.uuid4()), reply_to=app.reply_to) for _ in values]
    followers = [app.AsyncResult(one.options["task_id"]) for one in linked]
    for value, link in zip(values, linked, strict=True):
        call("echo", value).apply_async(link=link)
    grouped = group([call("echo", value) for value in values], app=app).apply_async()
    rows = [(value,) for value in values]
    mapped = xmap(call("echo"), values, app=app).apply_async()
    starred = xstarmap(call("echo"), rows, app=app).apply_async()
    chunked = chunks(call("echo"), rows, 5, app=app).apply_async()
    results = (plain, replaced, chained, followers)
    for number, value in enumerate(wanted):
        for way in results:
            assert same(way[number].get(timeout=20), value)
        failed[number].get(timeout=20, propagate=False)
        assert same(list(failed[number].result.args), [value])
        wait_until(lambda n=number: noted[n].state == "NOTED", 20, "the state to be set")
        assert same(noted[number].info, value)
    for many in (grouped, mapped, starred):
        assert same(many.get(timeout=20), wanted)
    assert same([one for part in chunked.get(timeout=20) for one in part], wanted)
    if app.backend.supports_chords:
        header = [call("echo", value) for value in values]
        assert same(chord(header, call("echo"), app=app).apply_async().get(timeout=20), wanted)


@every_serializer
def test_what_a_serializer_cannot_carry_is_an_error_for_the_sender(
    make_sender: Callable[..., Umbel], broker_url: str, serializer: str
) -> None:
    app = make_sender(broker_url, task_serializer=serializer, accept_content=list(SERIALIZERS))
    for value in REFUSED[serializer]:
        with pytest.raises(EncodeError, match=serializer):
            app.send_task("nobody", ([value],))
        with pytest.raises(EncodeError, match=serializer):
            app.send_many([app.signature("nobody", (1,)), app.signature("nobody", (value,))])


def test_an_action_of_an_election_comes_as_it_was_asked_for(site: Site) -> None:
    site.worker("threads")
    for value in EXAMPLES["json"]:
        result = site.app.signature(f"{APP}.echo", (value,)).election()
        assert same(result.get(timeout=30), expected(value, "json"))


def test_arguments_that_the_result_serializer_lacks_do_not_keep_a_result_from_its_reader(
    redis_site: Site,
) -> None:
    redis_site.worker(
        "threads",
        settings={
            "result_serializer": "msgpack",
            "accept_content": ["json", "msgpack"],
            "result_extended": True,
        },
    )
    settings = {"result_serializer": "msgpack", "accept_content": ["json", "msgpack"]}
    app = Umbel(
        "values",
        broker=redis_site.broker_url,
        backend=redis_site.backend_url,
        set_as_current=False,
        **settings,
    )
    value = EXAMPLES["json"][0]
    done = app.send_task(f"{APP}.echo", ("as it is", value))
    assert done.get(timeout=30) == "as it is"
    assert done.args == repr(["as it is", value])
    failed = app.send_task(f"{APP}.fail_with", (value,))
    failed.get(timeout=30, propagate=False)
    assert failed.result.args == (repr(value),)
    returned = app.send_task(f"{APP}.echo", (value,))
    returned.get(timeout=30, propagate=False)
    assert isinstance(returned.result, EncodeError), "its reader does not wait for ever"
    app.close()
