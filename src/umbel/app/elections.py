"""What can be elected: checked by whoever asks for an election, and again by every worker.

`request` is for clients. It raises `NotForElection` for what no worker could carry out, so that
nothing is sent. What only workers know, they refuse themselves: topics (their handlers live there),
a stricter `election_allow`, tasks whose arguments are known there. When none of them stands, the
result of the election is a FAILURE with the reason (`umbel.cluster.refusals`).

An elected task is one message, which goes out together with the claim. So a chain, a group, a chord
and chunks cannot be elected, and neither can a task that goes to a fanout exchange.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from umbel.app.calls import Call, prepare_signature
from umbel.broker.registers.register import has_registers
from umbel.broker.sessions.connections import driver
from umbel.cluster import election_words as elect
from umbel.cluster.election import ACTION_BYTES_MAX
from umbel.exceptions import NotForElection
from umbel.wire.jsontext import EncodeError, dumps_json
from umbel.wire.limits import Refusal
from umbel.wire.reprs import safe_repr
from umbel.wire.signatures import check_signature

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

TASK: Final = "task"
# These are several messages also where they are written as the call of one task.
COMPOSITIONS: Final = {
    f"celery.{kind}": kind for kind in ("chain", "group", "chord", "chunks")
}  # fmt: skip


def request(app: Umbel, id_: Any, topic: Any, action: Any) -> dict[str, Any]:
    """The arguments of the control command `election`; `NotForElection` if nobody could hold it."""
    id_ = str(id_) if isinstance(id_, uuid.UUID) else id_
    check_words(id_, topic)
    action = dict(action) if topic == TASK and isinstance(action, Mapping) else action
    check_size(id_, action)
    if topic == TASK:
        call_of(app, id_, action)
    connection = app.connection(app.write_url)
    if not has_registers(connection):
        raise NotForElection(
            f"election {id_!r}: the broker transport {driver(connection)!r} has no registers to "
            "decide it: use Redis or RabbitMQ (py-amqp)"
        )
    return {"id": id_, "topic": topic, "action": action}


def check_words(id_: Any, topic: Any) -> None:
    """Refuse an id or a topic that no election can have."""
    for name, value in (("id", id_), ("topic", topic)):
        if not elect.is_word(value):
            raise NotForElection(
                f"{name} {safe_repr(value, 100)} of an election is not valid: give text of 1 to "
                f"{elect.ID_BYTES_MAX} bytes"
            )


def check_size(id_: str, action: Any) -> None:
    """Refuse an action that is too big, or that JSON cannot carry."""
    try:
        action_bytes = len(dumps_json(action))
    except EncodeError as exc:
        raise NotForElection(f"the action of election {id_!r} cannot be sent: {exc}") from None
    if action_bytes > ACTION_BYTES_MAX:
        raise NotForElection(
            f"the action of election {id_!r} has {action_bytes} bytes, at most "
            f"{ACTION_BYTES_MAX} are allowed: give it the place where the data are"
        )


def call_of(app: Umbel, id_: str, action: Any) -> Call:
    """The message that the action of an elected task asks for."""
    try:
        checked = check_signature(action)
    except Refusal as refusal:
        raise NotForElection(f"the action is not a signature: {refusal.text}") from None
    name = checked["task"]
    kind = checked["subtask_type"] or COMPOSITIONS.get(name)
    if kind is not None:
        raise composition(kind)
    allowed = app.conf.election_allow
    if allowed is not None and not any(fnmatchcase(name, one) for one in allowed):
        raise NotForElection(f"task {name!r:.200} is not in election_allow")
    return _prepared(app, {**checked, "options": {**checked["options"], "task_id": id_}})


def composition(kind: str) -> NotForElection:
    """The error for a shape of which several messages would be made."""
    return NotForElection(
        f"a {kind} cannot be elected, as it is more than one message: elect a task that sends it"
    )


def _prepared(app: Umbel, signature: Mapping[str, Any]) -> Call:
    try:
        call = prepare_signature(app, signature)
    except Exception as exc:  # what options may hold, nobody knows
        raise NotForElection(
            f"no message can be made of the action: {safe_repr(exc, 300)}"
        ) from exc
    to = call.destination
    if not all(isinstance(one, str) for one in (to.exchange, to.routing_key)):
        raise NotForElection("the action does not name where to send it, by exchange and key")
    exchange = to.declare or (to.queue.exchange if to.queue is not None and to.exchange else None)
    if exchange is not None and exchange.type == "fanout":
        raise NotForElection(
            f"task {call.name!r:.200} goes to the fanout exchange {to.exchange!r:.200}, and a task "
            "for all consumers cannot be elected: give it a queue"
        )
    return call
