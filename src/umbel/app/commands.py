"""Commands that nodes obey: a name, a function, and what may be done with it.

Umbel's own live in `umbel.worker.control.commands`; applications add theirs with
`@app.control_command`. A command gets the `state` of the worker that it runs in and its arguments
by name, and returns what is answered. What it raises is answered as an error. `NoReply` answers
nothing, `NotHere` only who has asked this node by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from umbel.exceptions import ImproperlyConfigured


class NoReply(Exception):
    """Raised by a command that does not answer."""


class NotHere(Exception):
    """Raised by a command that is for other nodes; an error only for who asked this one by name."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str
    run: Callable[..., Any]
    reads: bool  # it changes nothing: an inspection
    aliases: tuple[str, ...] = ()
    anywhere: bool = False  # it may run beside the loop: it only reads what may be read there
    stamped: bool = False  # its argument `stamp` is a time of the sender's clock
    judges: bool = False  # it gets `is_new`, whether the request is known to be no copy, to judge

    def is_allowed(self, allow: str | Collection[str]) -> bool:
        """Whether `control_allow` lets a worker obey it."""
        if allow == "all":
            return True
        if allow == "read-only":
            return self.reads
        return self.name in allow or any(alias in allow for alias in self.aliases)

    @property
    def help(self) -> str:
        """The first line of what the function says about itself."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


class Commands:
    """Commands by name and alias."""

    def __init__(self, below: Commands | None = None) -> None:
        self._below = below
        self._by_name: dict[str, Command] = {}

    def get(self, name: str) -> Command | None:
        """The command of that name, here or below."""
        found = self._by_name.get(name)
        if found is None and self._below is not None:
            return self._below.get(name)
        return found

    def add(self, command: Command) -> None:
        """Add one; a name is given once."""
        for name in (command.name, *command.aliases):
            if name in self._by_name:
                raise ImproperlyConfigured(
                    f"two control commands are called {name!r}: rename one of them"
                )
            self._by_name[name] = command

    def command(
        self,
        fun: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        reads: bool = False,
        aliases: tuple[str, ...] = (),
        anywhere: bool = False,
        stamped: bool = False,
        judges: bool = False,
    ) -> Any:
        """Make a function a command: `@command` or `@command(reads=True)`."""

        def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
            known_as = name or run.__name__
            self.add(Command(known_as, run, reads, tuple(aliases), anywhere, stamped, judges))
            return run

        return decorate if fun is None else decorate(fun)

    def __iter__(self) -> Iterator[Command]:
        seen = {command.name: command for command in (self._below or ())}
        seen.update({command.name: command for command in self._by_name.values()})
        return iter(seen.values())
