"""Bad input: each kind has its documented outcome, the worker goes on, nothing else is lost.

The outcomes are those of the table in `umbel.worker.runtime.strategy`. Damage of two kinds is told
apart: messages that the transport can read and the worker must answer, and rubbish in a Redis
list on which the transport itself fails.
"""

from __future__ import annotations

import base64
import json
import pickle
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from tests.servers import wait_until
from tests.sites import APP, QUEUE, Site

GOOD_BODY = b'[[2, 2], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'


class Explosive:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@dataclass
class Bad:
    """A message that is wrong in one way; `failure` is the exc_type of the stored result."""

    what: str
    failure: str | None
    body: bytes = GOOD_BODY
    task: Any = f"{APP}.add"
    headers: dict[str, Any] = field(default_factory=dict)
    content_type: str = "application/json"
    content_encoding: str = "utf-8"
    protocol_2: bool = True
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def all_headers(self) -> dict[str, Any]:
        if not self.protocol_2:
            return self.headers
        return {"lang": "py", "task": self.task, "id": self.id, **self.headers}


def body_of(args: str) -> bytes:
    return b"[%s, {}, {}]" % args.encode()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def bad_messages(tmp_path: Path) -> list[Bad]:
    refused = "MessageRefused"
    bomb = zlib.compressobj(9, wbits=31)
    zeros = b"".join(bomb.compress(bytes(10**6)) for _ in range(100)) + bomb.flush()
    explosive = pickle.dumps(([Explosive(tmp_path / "exploded")], {}, {}))
    return [
        Bad("unknown task", "NotRegistered", task="no.such.task"),
        Bad("too few arguments", "TypeError", body=body_of("[1]")),
        Bad("too many arguments", "TypeError", body=body_of("[1, 2, 3]")),
        Bad("not JSON", "DecodeError", body=b"\x00\xff nonsense"),
        Bad("half of a body", "DecodeError", body=GOOD_BODY[:9]),
        Bad("empty body", "DecodeError", body=b""),
        Bad("body of another shape", refused, body=b'{"no": "triple"}'),
        Bad("arguments that are no list", refused, body=body_of('"text"')),
        Bad("a chain that is no list", refused, body=b'[[2, 2], {}, {"chain": 7}]'),
        Bad("unknown content type", "ContentDisallowed", content_type="application/x-odd"),
        Bad(
            "pickle",
            "ContentDisallowed",
            body=explosive,
            content_type="application/x-python-serialize",
            content_encoding="binary",
        ),
        Bad("pickle that says it is JSON", "DecodeError", body=explosive),
        Bad("nesting 10,000 deep", refused, body=body_of(f"[{nested(10_000)}, 1]")),
        Bad("a huge integer", refused, body=body_of(f"[1{'0' * 100_000}, 1]")),
        Bad("a bomb", refused, body=zeros, headers={"compression": "application/x-gzip"}),
        Bad("damaged compression", refused, headers={"compression": "application/x-gzip"}),
        Bad("unknown compression", refused, headers={"compression": "application/x-odd"}),
        Bad("compression that is a number", refused, headers={"compression": 7}),
        Bad("eta in the year 10000", refused, headers={"eta": "10000-01-01T00:00:00+00:00"}),
        Bad("eta that is no date", refused, headers={"eta": "soon"}),
        Bad("eta that is a number", refused, headers={"eta": 3}),
        Bad("expires that is no date", refused, headers={"expires": "never"}),
        Bad("retries that are text", refused, headers={"retries": "many"}),
        Bad("retries that are negative", refused, headers={"retries": -(2**40)}),
        Bad("time limits that are text", refused, headers={"timelimit": "short"}),
        Bad("three time limits", refused, headers={"timelimit": [1, 2, 3]}),
        Bad("a task name that is a list", refused, task=["add"]),
        Bad("stamps that are text", refused, headers={"stamps": "red"}),
        Bad("no id", None, headers={"id": None}),
        Bad("an id that is a number", None, headers={"id": 7}),
        Bad("no headers and not protocol 1", None, body=b'{"x": 1}', protocol_2=False),
        Bad("no headers and no dictionary", None, body=b"[1, 2]", protocol_2=False),
        Bad("foreign headers only", None, headers={"x-own": 1}, protocol_2=False),
    ]


def publish(site: Site, bad: Bad) -> None:
    with Connection(site.broker_url) as connection, connection.Producer() as producer:
        producer.publish(
            bad.body,
            exchange="",
            routing_key=QUEUE,
            headers=bad.all_headers(),
            content_type=bad.content_type,
            content_encoding=bad.content_encoding,
        )


def outcome(site: Site, task_id: str) -> tuple[str, str | None]:
    """State and exc_type as they are stored, read without help of the code under test."""
    text = site.notes.get(f"celery-task-meta-{task_id}")
    if text is None:
        return "PENDING", None
    meta = json.loads(text)
    result = meta["result"]
    return meta["status"], result.get("exc_type") if isinstance(result, dict) else repr(result)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_bad_messages_get_their_documented_outcome_and_the_worker_goes_on(
    site: Site, pool: str, tmp_path: Path
) -> None:
    worker = site.worker(pool)
    kept = site.send("wait_late", "kept")
    site.wait_until_begun("kept")
    wrong = []
    for bad in bad_messages(tmp_path):
        publish(site, bad)
        assert site.works(), f"the worker does not work after {bad.what}:\n{worker.output[-3000:]}"
        if bad.failure is not None:
            wait_until(lambda bad=bad: outcome(site, bad.id)[0] != "PENDING", what=bad.what)
        expected = ("FAILURE", bad.failure) if bad.failure else ("PENDING", None)
        if outcome(site, bad.id) != expected:
            wrong.append((bad.what, expected, outcome(site, bad.id)))
    assert wrong == []
    assert not (tmp_path / "exploded").exists()
    site.open_gate("kept")
    assert kept.get(timeout=30) == "kept"
    assert site.runs("kept") == 1
    assert worker.stop() == 0
    assert site.waiting() == 0, "a bad message went back to the queue"
    assert unacknowledged(site) == 0


def test_a_body_of_100_mib_is_refused_and_the_worker_goes_on(site: Site) -> None:
    worker = site.worker("threads")
    big = Bad("100 MiB", "MessageRefused", body=body_of('["' + "x" * (100 << 20) + '", 1]'))
    publish(site, big)
    wait_until(lambda: outcome(site, big.id) == ("FAILURE", big.failure), 60, big.what)
    assert "task_message_max_bytes" in site.app.AsyncResult(big.id).result.args[0]
    assert site.works()
    assert worker.stop() == 0
    assert site.waiting() == 0
    assert unacknowledged(site) == 0


def unacknowledged(site: Site) -> int:
    return int(site.notes.hlen("unacked"))


# -- rubbish on which the transport itself fails -------------------------------------------


def envelope(**changes: Any) -> dict[str, Any]:
    """A message as kombu keeps it in a Redis list."""
    tag = str(uuid.uuid4())
    properties = {
        "correlation_id": tag,
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": QUEUE},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": tag,
    }
    message = {
        "body": base64.b64encode(GOOD_BODY).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": f"{APP}.add", "id": tag},
        "properties": properties,
    }
    properties |= changes.pop("properties", {})
    message |= changes
    missing = object
    return {
        key: {k: v for k, v in value.items() if v is not missing} if key == "properties" else value
        for key, value in message.items()
        if value is not missing
    }


def rubbish() -> dict[str, str]:
    gone = object
    plain: dict[str, Any] = {
        "a number": 7,
        "null": None,
        "a list": [1, 2],
        "no envelope": {"hello": "world"},
        "bad base64": envelope(body="!!! no base64 !!!"),
        "base64 of half a length": envelope(body="abc"),
        "a body that is a number": envelope(body=7),
        "a bare body that is a number": envelope(body=7, properties={"body_encoding": gone}),
        "a bare body that is a list": envelope(body=[7], properties={"body_encoding": gone}),
        "no body": envelope(body=gone),
        "no properties": envelope(properties={}) | {"properties": None},
        "properties that are text": envelope() | {"properties": "odd"},
        "no delivery tag": envelope(properties={"delivery_tag": gone}),
        "a delivery tag that is null": envelope(properties={"delivery_tag": None}),
        "a delivery tag that is true": envelope(properties={"delivery_tag": True}),
        "a delivery tag that is a list": envelope(properties={"delivery_tag": [1]}),
        "a delivery tag that is a number": envelope(properties={"delivery_tag": 7}),
        "no delivery info": envelope(properties={"delivery_info": gone}),
        "delivery info that is text": envelope(properties={"delivery_info": "here"}),
        "no headers": envelope(headers=gone),
        "headers that are null": envelope(headers=None),
        "headers that are text": envelope(headers="task"),
        "headers that are a list": envelope(headers=["task", "id"]),
        "headers that are a number": envelope(headers=7),
        "a content type that is a list": envelope(**{"content-type": ["application/json"]}),
        "a content type that is null": envelope(**{"content-type": None}),
        "an encoding that is a number": envelope(**{"content-encoding": 8}),
        "an unknown body encoding": envelope(properties={"body_encoding": "rot13"}),
        "lone surrogates": envelope(
            headers={"lang": "py", "task": "\ud800", "id": "\udfff", "x": "\ud800"}
        ),
    }
    texts = {what: json.dumps(value) for what, value in plain.items()}
    deep = json.dumps(envelope(headers={"deep": "HERE"}))
    return texts | {
        "not JSON": "rubbish",
        "empty": "",
        "half an envelope": texts["no headers"][:40],
        "NaN": "NaN",
        "headers nested 10,000 deep": deep.replace('"HERE"', nested(10_000)),
        "all of it nested 10,000 deep": nested(10_000),
        "a huge integer": f"1{'0' * 100_000}",
    }


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_rubbish_in_a_redis_list_is_dropped_and_the_worker_goes_on_at_once(
    redis_site: Site, pool: str, measure: Callable[[], float]
) -> None:
    site = redis_site
    worker = site.worker(pool)
    slow = {}
    for what, text in rubbish().items():
        site.notes.lpush(QUEUE, text)
        measure()
        assert site.works(), f"the worker does not work after {what}:\n{worker.output[-3000:]}"
        slow[what] = measure()
    site.notes.lpush(QUEUE, b"\xff\xfe\x00 no text at all")
    assert site.works()
    assert {what: s for what, s in slow.items() if s > 0.9} == {}, "it paused after rubbish"
    assert "onnection to" not in worker.output, "rubbish was taken for a lost connection"
    wait_until(lambda: unacknowledged(site) == 0, what="every message to be settled")
    assert worker.stop() == 0
    assert site.waiting() == 0
