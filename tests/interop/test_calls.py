"""Single tasks, from a client of one library to a worker of the other."""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from typing import Any

import kombu.compression
import pytest

from tests.interop.conftest import Line
from tests.interop.peers import WAIT_S, Client
from tests.servers import wait_until

COMPRESSIONS = [
    name for name in ("gzip", "bzip2", "lzma", "brotli", "zstd")
    if name in kombu.compression._aliases
]  # fmt: skip
DOCUMENT = {"status", "result", "traceback", "children", "date_done", "task_id"}
EXTENDED = {"name", "args", "kwargs", "worker", "retries", "queue"}


def document(line: Line, task_id: str) -> dict[str, Any]:
    """The result as it is stored, key by key."""
    stored: dict[str, Any] = json.loads(line.redis.get(f"celery-task-meta-{task_id}"))
    return stored


# -- success ---------------------------------------------------------------------------------


def test_a_plain_task_returns_its_value(client: Client) -> None:
    result = client.send("add", 2, kwargs={"y": 3})

    assert result.get(timeout=WAIT_S) == 5
    assert result.state == "SUCCESS"
    assert result.successful()
    assert result.traceback is None
    assert result.children == []


def test_a_default_of_the_task_applies_when_the_caller_gives_no_value(client: Client) -> None:
    assert client.run("add", 2) == 12


def test_text_of_all_planes_survives_the_way_there_and_back(client: Client) -> None:
    text = 'gruß ✓ 🌂 \u2028 \x00 "quoted" \\'
    assert client.run("echo", text, kwargs={"ключ": [text]}) == [[text], {"ключ": [text]}]


def test_numbers_and_nothings_keep_their_type(client: Client) -> None:
    values = [0, -1, 2**53, 10**30, 1.5, 1e300, True, False, None, "", [], {}]
    assert client.run("echo", *values) == [values, {}]
    kinds = [type(value) for value in client.run("echo", *values)[0]]
    assert kinds == [type(value) for value in values]


def test_dates_decimals_ids_and_bytes_arrive_as_such_and_come_back(client: Client) -> None:
    values = {
        "moment": datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC),
        "naive": datetime(2026, 2, 3, 4, 5, 6),  # noqa: DTZ001
        "day": date(2026, 2, 3),
        "hour": clock_time(4, 5, 6),
        "price": Decimal("19.990"),
        "number": uuid.UUID("6f2c1a52-8c51-4f0c-8d0d-5a27c2a1f001"),
        "text": b"plain",
        "raw": b"\xff\x00\xfe",
    }

    answer = client.run("types", kwargs=values)

    assert answer["back"] == values
    assert answer["seen"] == {name: type(value).__name__ for name, value in values.items()}


def test_a_big_argument_and_a_big_result_pass(client: Client) -> None:
    text = "0123456789" * 200_000
    assert client.run("size", text) == [len(text), text]


def test_the_task_id_that_the_caller_chose_is_used(client: Client) -> None:
    result = client.send("request", task_id="order 4711/ü")
    seen = result.get(timeout=WAIT_S)

    assert result.id == "order 4711/ü"
    assert (seen["id"], seen["root_id"], seen["parent_id"]) == (result.id, result.id, None)
    assert seen["correlation_id"] == result.id


def test_headers_of_the_caller_reach_the_task(client: Client) -> None:
    headers = {"shop-trace": "abc", "shop-more": {"deep": [1, 2]}}

    seen = client.run("request", headers=headers, kwargs={"header": "shop-trace"})

    assert seen["headers"] == headers
    assert seen["own_header"] == "abc"


def test_a_shadow_name_reaches_the_task_and_the_log_of_the_worker(
    client: Client, line: Line
) -> None:
    result = client.send("request", shadow="billing.nightly")

    assert result.get(timeout=WAIT_S)["shadow"] == "billing.nightly"
    line.worker.wait_for(rf"billing\.nightly.*{result.id}")


def test_time_limits_of_the_caller_reach_the_task(client: Client) -> None:
    seen = client.run("request", time_limit=30, soft_time_limit=20)
    assert seen["timelimit"] == [30, 20]


def test_stamps_reach_the_task(client: Client) -> None:
    sig = client.s("request")
    sig.stamp(shift="night", floor=3)

    seen = sig.apply_async().get(timeout=WAIT_S)

    assert sorted(seen["stamped_headers"]) == ["floor", "shift"]
    # Peers differ in whether one value is wrapped into a list.
    stamps = {name: v[0] if isinstance(v, list) else v for name, v in seen["stamps"].items()}
    assert stamps == {"shift": "night", "floor": 3}


@pytest.mark.parametrize("method", COMPRESSIONS)
def test_a_compressed_message_is_read(client: Client, method: str) -> None:
    text = "compressible " * 500
    assert client.run("size", text, compression=method) == [len(text), text]


@pytest.mark.parametrize("serializer", ["msgpack", "yaml"])
def test_another_serialization_is_read_where_it_is_allowed(client: Client, serializer: str) -> None:
    value = {"a": [1, "zwei", None, 2.5]}
    assert client.run("echo", value, serializer=serializer) == [[value], {}]


# -- time ------------------------------------------------------------------------------------


def test_a_countdown_and_an_eta_delay_the_task(client: Client) -> None:
    begin = time.time()
    eta = datetime.fromtimestamp(begin + 0.3, UTC)
    delayed = client.send("now", countdown=0.3)
    dated = client.send("now", eta=eta)
    prompt = client.send("now")

    ran = [result.get(timeout=WAIT_S) - begin for result in (prompt, delayed, dated)]
    assert ran[0] == min(ran)
    assert 0.3 <= ran[1] < 3
    assert 0.3 <= ran[2] < 3


def test_a_naive_eta_is_read_in_the_time_zone_of_the_settings(client: Client) -> None:
    begin = time.time()
    eta = datetime.fromtimestamp(begin + 0.2, UTC).replace(tzinfo=None)

    assert 0.2 <= client.run("now", eta=eta) - begin < 3


def test_a_task_that_expires_while_it_waits_is_revoked(client: Client, line: Line) -> None:
    mark = line.marks.name()
    result = client.send("mark", kwargs={"mark": mark}, countdown=0.45, expires=0.4)

    with pytest.raises(client.errors.TaskRevokedError, match="expired"):
        result.get(timeout=WAIT_S)

    assert result.state == "REVOKED"
    assert line.marks.count(mark) == 0


def test_a_task_that_is_expired_on_arrival_is_revoked(client: Client, line: Line) -> None:
    if line.kind.broker == "amqp":
        pytest.skip("RabbitMQ itself drops expired messages")
    result = client.send("add", 1, 1, expires=datetime.now(UTC) - timedelta(seconds=5))

    with pytest.raises(client.errors.TaskRevokedError, match="expired"):
        result.get(timeout=WAIT_S)


def test_a_task_that_expires_later_runs(client: Client) -> None:
    assert client.run("add", 1, 1, expires=30) == 2


# -- failure ---------------------------------------------------------------------------------


def test_a_failure_arrives_with_class_arguments_and_traceback(client: Client) -> None:
    result = client.send("fail")

    with pytest.raises(ValueError, match="bad") as caught:
        result.get(timeout=WAIT_S)

    assert caught.value.args == ("bad", 3)
    assert type(caught.value) is ValueError
    assert result.state == "FAILURE"
    assert result.failed()
    assert "Traceback (most recent call last)" in result.traceback
    assert 'raise ValueError("bad", 3)' in result.traceback


def test_an_exception_unknown_to_the_client_gets_a_stand_in_of_its_name(client: Client) -> None:
    result = client.send("lack", "screws")

    with pytest.raises(Exception, match="screws") as caught:
        result.get(timeout=WAIT_S)

    assert type(caught.value).__name__ == "Shortage"
    assert caught.value.args == ("screws", 7)


def test_wrong_arguments_are_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="add"):
        client.run("add", 1, 2, 3)


def test_a_task_that_no_worker_knows_is_not_registered(client: Client) -> None:
    result = client.send("no_such_task")

    with pytest.raises(client.errors.NotRegistered, match=r"t\.no_such_task"):
        result.get(timeout=WAIT_S)

    assert result.state == "FAILURE"


def test_propagate_off_returns_the_exception(client: Client) -> None:
    answer = client.send("fail").get(timeout=WAIT_S, propagate=False)
    assert isinstance(answer, ValueError)


def test_a_retried_task_succeeds_in_the_end_under_the_same_id(client: Client) -> None:
    result = client.send("flaky", 2, headers={"shop-kept": 1})

    retries, task_id, headers = result.get(timeout=WAIT_S)

    assert (retries, task_id) == (2, result.id)
    assert headers["shop-kept"] == 1


def test_a_task_that_waits_for_its_retry_shows_the_cause(client: Client, line: Line) -> None:
    if line.kind.backend == "rpc" and client.is_celery:
        pytest.skip("a Celery client that takes results as messages reads them in get() only")
    result = client.send("flaky", 1, kwargs={"delay": 0.3})

    wait_until(lambda: result.state == "RETRY", WAIT_S, "the retry")
    assert isinstance(result.info, ConnectionError)
    assert "not yet" in result.traceback
    assert not result.ready()

    assert result.get(timeout=WAIT_S)[0] == 1


def test_automatic_retries_come_to_an_end(client: Client) -> None:
    assert client.run("auto") == 2


def test_a_task_out_of_retries_fails_with_its_cause(client: Client) -> None:
    with pytest.raises(ValueError, match="at last"):
        client.run("gives_up", True)


def test_a_task_out_of_retries_without_a_cause_says_so(client: Client) -> None:
    with pytest.raises(client.errors.MaxRetriesExceededError, match=r"t\.gives_up"):
        client.run("gives_up", False)


def test_a_hard_time_limit_ends_the_task(client: Client, line: Line) -> None:
    if line.kind.pool != "prefork":
        pytest.skip("only a process can be ended")
    result = client.send("sleep", 30, time_limit=0.3)

    with pytest.raises(Exception, match=r"0\.3") as caught:
        result.get(timeout=WAIT_S)

    assert type(caught.value).__name__ == "TimeLimitExceeded"


def test_a_soft_time_limit_is_raised_in_the_task(client: Client, line: Line) -> None:
    if line.kind.pool != "prefork":
        pytest.skip("threads of peers have no soft time limit")
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the class depends on the client
        client.run("sleep", 30, soft_time_limit=0.3)

    assert type(caught.value).__name__ == "SoftTimeLimitExceeded"


# -- results ---------------------------------------------------------------------------------


def test_a_started_task_shows_its_process_and_worker(client: Client, line: Line) -> None:
    mark = line.marks.name()
    seen: list[Any] = []
    result = client.send("gate", kwargs={"mark": mark})
    hostname = line.marks.wait(f"{mark}:reached")
    if line.kind.backend == "redis":
        assert result.state == "STARTED"
        seen.append(result.info)
    line.marks.open(mark)

    assert result.get(timeout=WAIT_S) == "through"

    for info in seen:
        assert info["hostname"] == hostname
        assert info["pid"] != os.getpid()


def test_a_state_of_the_tasks_own_is_seen(client: Client, line: Line) -> None:
    if line.kind.backend == "rpc" and client.is_celery:
        pytest.skip("a Celery client that takes results as messages reads them in get() only")
    mark = line.marks.name()
    result = client.send("progress", kwargs={"mark": mark})
    line.marks.wait(f"{mark}:reached")

    wait_until(lambda: result.state == "PROGRESS", WAIT_S, "the state of its own")
    assert result.info == {"done": 3, "of": 4}

    line.marks.open(mark)
    assert result.get(timeout=WAIT_S) == "done"


@pytest.mark.parametrize("who", ["caller", "task"])
def test_a_result_that_nobody_wants_is_not_stored(client: Client, line: Line, who: str) -> None:
    mark = line.marks.name()
    if who == "caller":
        result = client.send("mark", kwargs={"mark": mark}, ignore_result=True)
    else:
        result = client.send("ignored", mark)
    line.marks.wait(mark)
    # Results of one worker are stored one after the other where it matters: by now it would be.
    client.run("add", 1, 1)

    if line.kind.backend == "redis":
        assert line.redis.get(f"celery-task-meta-{result.id}") is None


def test_what_a_task_sends_is_found_through_its_children(client: Client) -> None:
    result = client.send("spawn", 5)
    assert result.get(timeout=WAIT_S) == "spawned"
    if client.app.conf.result_backend == "rpc://":
        assert len(result.children) == 2  # their results go to whoever sent them
        return

    values = [child.get(timeout=WAIT_S) for child in result.children]

    assert sorted(values) == [6, 7]


def test_a_stored_document_has_the_keys_that_peers_expect(line: Line, client: Client) -> None:
    if line.redis is None:
        pytest.skip("nothing is stored")
    extended = EXTENDED if line.kind.extended else set()
    good, bad = client.send("add", 1, kwargs={"y": 2}), client.send("fail")
    good.get(timeout=WAIT_S)
    bad.get(timeout=WAIT_S, propagate=False)

    stored = document(line, good.id)
    assert set(stored) == DOCUMENT | extended
    assert stored["result"] == 3
    assert datetime.fromisoformat(stored["date_done"]).tzinfo is not None
    failed = document(line, bad.id)
    assert set(failed) == DOCUMENT | extended
    assert failed["result"] == {
        "exc_type": "ValueError", "exc_message": ["bad", 3], "exc_module": "builtins",
    }  # fmt: skip
    assert 0 < line.redis.ttl(f"celery-task-meta-{good.id}") <= 86_400


def test_extended_results_tell_about_the_call(line: Line, client: Client) -> None:
    if not line.kind.extended:
        pytest.skip("not set on this line")
    result = client.send("add", 1, kwargs={"y": 2})
    result.get(timeout=WAIT_S)

    assert result.name == "t.add"
    assert list(result.args) == [1]
    assert result.kwargs == {"y": 2}
    assert result.retries == 0
    assert result.queue == "celery"
    assert result.worker.startswith(f"{line.kind.worker}@")


def test_a_forgotten_result_is_gone(line: Line, client: Client) -> None:
    result = client.send("add", 1, 2)
    result.get(timeout=WAIT_S)
    result.forget()
    if line.redis is not None:
        assert line.redis.get(f"celery-task-meta-{result.id}") is None


# -- links -----------------------------------------------------------------------------------


def test_a_callback_gets_the_value(client: Client, line: Line) -> None:
    mark = line.marks.name()
    result = client.send("add", 2, 2, link=client.s("mark", mark=mark))

    seen = line.marks.wait(mark)

    assert seen["args"] == [4]
    assert (seen["parent"], seen["root"]) == (result.id, result.id)
    assert result.get(timeout=WAIT_S) == 4


def test_several_callbacks_and_callbacks_of_callbacks_all_run(client: Client, line: Line) -> None:
    first, second, third, fixed = (line.marks.name() for _ in range(4))
    inner = client.s("add", 100)
    inner.link(client.s("mark", mark=third))
    links = [
        client.s("mark", "own", mark=first),
        client.s("mark", mark=second),
        client.si("mark", "fixed", mark=fixed),
        inner,
    ]

    client.send("add", 2, 2, link=links)

    assert line.marks.wait(first)["args"] == [4, "own"]
    assert line.marks.wait(second)["args"] == [4]
    assert line.marks.wait(third)["args"] == [104]
    assert line.marks.wait(fixed)["args"] == ["fixed"]


def test_a_callback_does_not_run_after_a_failure(client: Client, line: Line) -> None:
    good, bad = line.marks.name(), line.marks.name()
    client.send(
        "fail", link=client.s("mark", mark=good), link_error=client.s("old_errback", mark=bad)
    )
    line.marks.wait(bad)
    assert line.marks.count(good) == 0


def test_an_errback_of_the_old_style_gets_the_id(client: Client, line: Line) -> None:
    mark = line.marks.name()
    result = client.send("fail", link_error=client.s("old_errback", mark=mark))
    assert line.marks.wait(mark) == {"id": result.id}


def test_an_errback_of_the_new_style_gets_request_error_and_traceback(
    client: Client, line: Line
) -> None:
    mark = line.marks.name()
    result = client.send("fail", link_error=client.s("new_errback", mark=mark))
    assert line.marks.wait(mark) == {
        "id": result.id, "error": "ValueError('bad', 3)", "has_traceback": True,
    }  # fmt: skip


def test_errbacks_of_both_styles_run_together(client: Client, line: Line) -> None:
    new, old = line.marks.name(), line.marks.name()
    links = [client.s("old_errback", mark=old), client.s("new_errback", mark=new)]

    result = client.send("fail", link_error=links)

    assert line.marks.wait(new)["id"] == result.id
    assert line.marks.wait(old)["id"] == result.id


def test_an_errback_runs_for_a_task_that_is_not_registered(client: Client, line: Line) -> None:
    if line.kind.worker == "celery":
        pytest.skip("a Celery worker calls no errbacks for such a task")
    mark = line.marks.name()
    result = client.send("no_such_task", link_error=client.s("old_errback", mark=mark))
    assert line.marks.wait(mark)["id"] == result.id


def test_a_replaced_task_answers_with_the_value_of_its_replacement(
    client: Client, line: Line
) -> None:
    if line.kind.backend == "rpc" and line.kind.worker == "celery":
        pytest.skip("a Celery worker sends the replacement's result to itself")
    assert client.run("replaced", 5) == 105
