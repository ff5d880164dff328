"""What is wrong with a log, with tables or with Spark, in one line for the user.

Needs no package of the extra `history`: the command line catches it before Spark is there.
"""

from __future__ import annotations

from umbel.exceptions import ImproperlyConfigured


class HistoryError(ImproperlyConfigured):
    """The text names what is wrong and the way out; a command ends with exit code 2."""


class TooLong(HistoryError):
    """A query took longer than it may; a command ends with exit code 3."""
