"""Signatures: the shapes peers write pass, all others are refused by field."""

from __future__ import annotations

import pytest
from celery import Celery, chain, chord, group

from umbel.wire.content import dumps_json, loads_json
from umbel.wire.limits import Refusal
from umbel.wire.signatures import check_signature, signature_dict

peer = Celery("peer", broker="memory://", backend="cache+memory://", set_as_current=False)


@peer.task(name="w.add")
def add(x, y):
    return x + y


def refusal_of(value) -> Refusal:
    with pytest.raises(Refusal) as caught:
        check_signature(value)
    return caught.value


@pytest.mark.parametrize(
    "made",
    [
        add.s(4),
        add.si(4, 5),
        add.s(1).set(link=add.s(2), link_error=[add.s(3)], task_id="x"),
        group(add.s(1, 1), add.s(2, 2)),
        chain(add.s(1, 1), add.s(2), group(add.s(3), add.s(4))),
        chord([add.s(1, 1), add.s(2, 2)], add.s(3)),
        chord(group(add.s(1, 1), chain(add.s(2, 2), add.s(5))), add.s(3)) | add.s(9),
        add.map([1, 2]),
        add.starmap([(1, 2)]),
        add.chunks([(1, 2), (3, 4)], 1),
    ],
    ids=str,
)
def test_every_shape_that_a_peer_writes_is_a_signature(made):
    wire = loads_json(dumps_json(made))
    assert check_signature(wire) is wire


def test_ours_has_the_fields_of_a_peers():
    ours = signature_dict("w.add", (4,), {"y": 1}, {"task_id": "t"}, immutable=True)
    theirs = add.subtask((4,), {"y": 1}, immutable=True, task_id="t")
    assert ours == loads_json(dumps_json(theirs))


def test_missing_and_null_fields_get_their_defaults():
    assert check_signature({"task": "w.add"}) == signature_dict("w.add")
    found = check_signature({"task": "w.add", "args": None, "kwargs": None, "extra": 1})
    assert found == {**signature_dict("w.add"), "extra": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", 5),
        ("task", None),
        ("args", {"a": 1}),
        ("args", "abc"),
        ("kwargs", [1]),
        ("kwargs", {1: 2}),
        ("options", 7),
        ("immutable", "yes"),
        ("subtask_type", "swarm"),
        ("subtask_type", 1),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(field, value):
    refusal = refusal_of({**signature_dict("w.add"), field: value})
    assert refusal.reason == "invalid-task"
    assert repr(field) in refusal.text


@pytest.mark.parametrize("value", [None, 5, "w.add", [], [{"task": "w.add"}], {}, {"args": []}])
def test_what_is_not_a_signature_is_refused(value):
    assert refusal_of(value).reason == "invalid-task"


@pytest.mark.parametrize(
    "broken",
    [
        {"subtask_type": "group", "kwargs": {"tasks": 5}},
        {"subtask_type": "group"},
        {"subtask_type": "chain", "kwargs": {"tasks": [5]}},
        {"subtask_type": "chord", "kwargs": {"header": None, "body": {"task": "a"}}},
        {"subtask_type": "chord", "kwargs": {"header": [], "body": 5}},
        {"options": {"link": "w.add"}},
        {"options": {"link_error": [None]}},
        {"options": {"chord": []}},
        {"options": {"chain": 1}},
    ],
    ids=repr,
)
def test_what_is_wrong_inside_is_found(broken):
    assert refusal_of({"task": "w.add", **broken}).reason == "invalid-task"


def test_a_signature_inside_itself_is_too_deep():
    endless = signature_dict("w.add")
    endless["options"]["link"] = [endless]
    assert refusal_of(endless).reason == "too-deep"
