"""Blueprints: a process as a graph of steps.

A `Step` names what it requires. A `Blueprint` sorts the graph, asks each step whether it takes
part (`include`), starts them in order, stops them in reverse, and can do both again: that is
what a consumer does when it loses its connection. A step that was not started is not stopped;
a step that fails to stop does not keep the others from stopping. A requirement that nobody
fulfils and a cycle are refused by name before anything starts.

While a step starts or stops, `current_turn` tells which one it is: what it registers elsewhere can
be recognised when it is started again.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from umbel.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.options import WorkerOptions

logger = logging.getLogger("umbel.worker")


class Step:
    """One part of a blueprint. `parent` is the worker or the consumer it belongs to."""

    name: ClassVar[str] = ""
    requires: ClassVar[tuple[Any, ...]] = ()
    last: ClassVar[bool] = False

    def __init__(self, parent: Any, **options: Any) -> None:
        """Made once; must not touch the broker."""

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """Why this step does not take part; empty when it does. Must not touch the broker."""
        return ""

    def include(self, parent: Any) -> bool:
        """Whether this step takes part."""
        worker = getattr(parent, "worker", parent)
        options = getattr(worker, "options", None)
        return options is None or not self.why_off(worker.app, options)

    def create(self, parent: Any) -> None:
        """Phase one: make what the step owns. Runs once, in order, before any start."""

    def start(self, parent: Any) -> None:
        """Phase two: begin work."""

    def stop(self, parent: Any) -> None:
        """End work in an orderly way; `start` may follow."""

    def terminate(self, parent: Any) -> None:
        """End work at once."""
        self.stop(parent)

    @classmethod
    def label(cls) -> str:
        """The name by which other steps refer to this one."""
        return cls.name or cls.__name__

    def __repr__(self) -> str:
        return f"<step: {self.label()}>"


class Turn:
    """One start or stop of a step; every one has a turn of its own."""

    __slots__ = ("step",)

    def __init__(self, step: Step) -> None:
        self.step = step


_here = threading.local()


def current_turn() -> Turn | None:
    """The turn of the step that this thread starts or stops now.

    None within a step that runs until the end: what happens there is not its own doing.
    """
    turn: Turn | None = getattr(_here, "turn", None)
    return turn


@contextlib.contextmanager
def _turn_of(step: Step) -> Iterator[None]:
    before = current_turn()
    _here.turn = None if step.last else Turn(step)
    try:
        yield
    finally:
        _here.turn = before


class State(enum.Enum):
    """Where a blueprint is in its life."""

    NEW = "new"
    RUNNING = "running"
    STOPPED = "stopped"


class Blueprint:
    """The steps of one parent, sorted."""

    def __init__(self, name: str, kinds: Iterable[type[Step]]) -> None:
        self.name = name
        self.order = sort_steps(name, list(kinds))
        self.steps: list[Step] = []
        self.state = State.NEW
        self._started: list[Step] = []

    def create(self, parent: Any, **options: Any) -> None:
        """Make every step that takes part."""
        for kind in self.order:
            step = kind(parent, **options)
            if step.include(parent):
                step.create(parent)
                self.steps.append(step)

    def start(self, parent: Any) -> None:
        """Start what is not started yet, in order; the last step may run until the end."""
        self.state = State.RUNNING
        for step in self.steps:
            if self.state is not State.RUNNING:
                return
            if step not in self._started:
                logger.debug("%s: starting %s", self.name, step.label())
                # Registered first: a step that fails half-way is stopped like the others.
                self._started.append(step)
                with _turn_of(step):
                    step.start(parent)

    def stop(self, parent: Any, *, terminate: bool = False) -> None:
        """Stop what was started, in reverse, whatever fails on the way."""
        self.state = State.STOPPED
        while self._started:
            step = self._started.pop()
            logger.debug("%s: stopping %s", self.name, step.label())
            try:
                with _turn_of(step):
                    if terminate:
                        step.terminate(parent)
                    else:
                        step.stop(parent)
            except Exception:
                logger.exception("%s: step %s did not stop cleanly", self.name, step.label())

    def restart(self, parent: Any) -> None:
        """Stop everything and start it again."""
        self.stop(parent)
        self.start(parent)

    def step(self, name: str) -> Step:
        """The step that is called `name`."""
        for step in self.steps:
            if step.label() == name:
                return step
        raise KeyError(name)


def sort_steps(name: str, kinds: list[type[Step]]) -> list[type[Step]]:
    """The steps, each after what it requires; ties keep the given order; `last` goes last."""
    by_label: dict[str, type[Step]] = {}
    for kind in kinds:
        known = by_label.setdefault(kind.label(), kind)
        if known is not kind:
            raise ImproperlyConfigured(
                f"blueprint {name}: two steps are called {kind.label()!r}; "
                "set `name` in one of them"
            )
    plain = [kind for kind in by_label.values() if not kind.last]
    final = [kind for kind in by_label.values() if kind.last]
    if len(final) > 1:
        names = " and ".join(kind.label() for kind in final)
        raise ImproperlyConfigured(f"blueprint {name}: only one step can be the last, not {names}")
    done: dict[str, type[Step]] = {}
    path: list[str] = []

    def visit(kind: type[Step]) -> None:
        label = kind.label()
        if label in done:
            return
        if label in path:
            cycle = " -> ".join([*path[path.index(label) :], label])
            raise ImproperlyConfigured(f"blueprint {name}: steps require each other: {cycle}")
        path.append(label)
        for wanted in kind.requires:
            found = _find(name, label, wanted, by_label)
            if found.last:
                # It runs until the end: what comes after it would never start.
                raise ImproperlyConfigured(
                    f"blueprint {name}: step {label!r} requires {found.label()!r}, "
                    "which is always the last one: require a step before it"
                )
            visit(found)
        path.pop()
        done[label] = kind

    for kind in (*plain, *final):
        visit(kind)
    return list(done.values())


def required(name: str, kind: type[Step], kinds: Iterable[type[Step]]) -> list[type[Step]]:
    """The steps that `kind` requires."""
    known = {other.label(): other for other in kinds}
    return [_find(name, kind.label(), wanted, known) for wanted in kind.requires]


def _find(name: str, label: str, wanted: Any, known: dict[str, type[Step]]) -> type[Step]:
    # A requirement is a step class, its label, or a dotted path that ends in its label.
    target = wanted if isinstance(wanted, str) else wanted.label()
    short = target.replace(":", ".").rpartition(".")[2]
    found = known.get(target) or known.get(short)
    if found is None:
        raise ImproperlyConfigured(
            f"blueprint {name}: step {label!r} requires {target!r}, which is not part of it; "
            f"known steps: {', '.join(known)}"
        )
    return found
