"""What a worker raises about its broker."""

from __future__ import annotations


class BrokerUnreachable(Exception):
    """The broker did not answer as often as the settings allow to ask; the text says it all."""


class BrokerRefuses(BrokerUnreachable):
    """The broker refuses what the worker cannot do without, and would refuse it again."""


class ConnectionFailed(Exception):
    """Something other than the loop found the connection broken."""
