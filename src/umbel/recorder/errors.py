"""What can go wrong with a log; each text names the log, the reason and the way out."""

from __future__ import annotations

from umbel.exceptions import UmbelError


class LogError(UmbelError):
    """This is no log that can be used."""


class LogFull(LogError):
    """The log can not be written now: no room, no right, no connection.

    Nothing is lost by it: what was to be written is still in memory, and may be tried again.
    """


class Damaged(LogError):
    """A file can not be read to its end, or is not what it should be."""
