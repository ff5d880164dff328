"""The states of a delivery, and the transitions between them.

A delivery has two states. `State` is where its task is in this worker. `MessageState` is whether
this worker may still settle its message. The machine assigns states directly; `TRANSITIONS` and
`MESSAGE_TRANSITIONS` list every assignment that it may make, and tests and the simulator check
each one against them.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple


class State(Enum):
    """Where the task of a delivery is."""

    RECEIVED = auto()
    HELD = auto()
    PARKED = auto()
    READY = auto()
    IN_POOL = auto()
    RUNNING = auto()
    STORING = auto()
    RETURNING = auto()
    GONE = auto()

    # That of Enum is a function in Python, and states are looked up for every task.
    __hash__ = object.__hash__


class MessageState(Enum):
    """Whether the message of a delivery can still be settled."""

    OURS = auto()
    SETTLED = auto()
    VOID = auto()
    IN_DOUBT = auto()

    __hash__ = object.__hash__


MEANING: Final[dict[Enum, str]] = {
    State.RECEIVED: "just arrived, and not judged yet",
    State.HELD: "waits for its eta, or for its stored state",
    State.PARKED: "waits for its rate limit",
    State.READY: "waits for room in the pool",
    State.IN_POOL: "handed to the pool, not begun",
    State.RUNNING: "its code runs",
    State.STORING: "did not end by itself: its outcome is being stored",
    State.RETURNING: "being returned to the end of its queue",
    State.GONE: "this worker is done with it",
    MessageState.OURS: "unacknowledged, on a connection that is open",
    MessageState.SETTLED: "acknowledged, rejected or given back",
    MessageState.VOID: "its connection was lost before it was settled",
    MessageState.IN_DOUBT: "settled, and the broker may not have read that",
}


class Transition(NamedTuple):
    """One line of a table."""

    before: Enum
    cause: str
    after: Enum


def _lines(cause: str, before: tuple[Enum, ...], after: Enum) -> list[Transition]:
    return [Transition(one, cause, after) for one in before]


_WAITING = (State.HELD, State.PARKED, State.READY)

TRANSITIONS: Final[tuple[Transition, ...]] = (
    *_lines("is not due, or its stored state is unknown", (State.RECEIVED, State.HELD), State.HELD),
    *_lines("its rate limit has no token", (State.RECEIVED, State.HELD), State.PARKED),
    *_lines("may run", (State.RECEIVED, State.HELD, State.PARKED), State.READY),
    *_lines("is revoked or has expired", (State.RECEIVED, *_WAITING), State.STORING),
    *_lines("the pool has room", (State.READY,), State.IN_POOL),
    *_lines("the pool gives it up", (State.IN_POOL,), State.READY),
    *_lines("its code begins", (State.IN_POOL,), State.RUNNING),
    *_lines("its code ended by itself", (State.RUNNING,), State.GONE),
    *_lines(
        "its process died, a limit passed, or it was terminated",
        (State.IN_POOL, State.RUNNING),
        State.STORING,
    ),
    *_lines(
        "its process died, and it goes back to its queue",
        (State.IN_POOL, State.RUNNING),
        State.GONE,
    ),
    *_lines("its body cannot be decoded", (State.RUNNING,), State.STORING),
    *_lines("its outcome is stored", (State.STORING,), State.GONE),
    *_lines("is returned for any worker to run", _WAITING, State.RETURNING),
    *_lines("is back in its queue, or cannot be returned", (State.RETURNING,), State.GONE),
    *_lines("the worker stops", _WAITING, State.GONE),
    *_lines("its connection is lost", (*_WAITING, State.RETURNING), State.GONE),
)

MESSAGE_TRANSITIONS: Final[tuple[Transition, ...]] = (
    *_lines("is settled", (MessageState.OURS,), MessageState.SETTLED),
    *_lines("settling it failed", (MessageState.SETTLED,), MessageState.IN_DOUBT),
    *_lines("its connection is lost", (MessageState.OURS,), MessageState.VOID),
    *_lines("its connection is lost", (MessageState.SETTLED,), MessageState.IN_DOUBT),
    *_lines("its task has ended", (MessageState.VOID,), MessageState.IN_DOUBT),
    *_lines("it came again, or is taken over", (MessageState.VOID,), MessageState.OURS),
)

ALLOWED: Final[frozenset[tuple[Enum, Enum]]] = frozenset(
    (one.before, one.after) for one in (*TRANSITIONS, *MESSAGE_TRANSITIONS)
)


def table(transitions: tuple[Transition, ...]) -> str:
    """The transitions as a table in Markdown, one line for each cause and state after it."""
    merged: dict[tuple[str, Enum], list[str]] = {}
    for before, cause, after in transitions:
        merged.setdefault((cause, after), []).append(before.name)
    lines = ["| in state | what happens | then |", "| --- | --- | --- |"]
    lines += [
        f"| {', '.join(before)} | {cause} | {after.name} |"
        for (cause, after), before in merged.items()
    ]
    return "\n".join(lines)


def meanings(kind: type[Enum]) -> str:
    """The states of one kind as a table in Markdown."""
    lines = ["| state | meaning |", "| --- | --- |"]
    lines += [f"| {one.name} | {MEANING[one]} |" for one in kind]
    return "\n".join(lines)
