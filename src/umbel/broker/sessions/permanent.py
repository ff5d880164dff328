"""Errors of a broker that waiting does not heal, and what to do about them.

A broker that is away, starts, fails over or is short of memory is asked again. One that knows who
asks, and for what, and refuses it, gives the same answer the next time. `permanent` tells the two
apart by the type and text of an error, or of what caused it; an error that it does not know may
heal.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from amqp import spec
from amqp.exceptions import AMQPError, ChannelError
from redis.exceptions import (
    AuthenticationError,
    ClusterCrossSlotError,
    MovedError,
    NoPermissionError,
    ResponseError,
)

# A refused part is asked for again this often: somebody may have changed the broker meanwhile.
ASK_AGAIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Refused:
    """What the broker answers, and what helps."""

    text: str
    remedy: str
    # It does not accept this user, password, virtual host, database or certificate at all.
    login: bool = False
    # It may change by itself, so it ends nothing.
    may_pass: bool = False

    def __str__(self) -> str:
        return f"{self.text.rstrip('.')}. {self.remedy}"


_PERMISSIONS: Final = "Give the user the permissions that docs/deploying.md lists"
_NO_CLUSTER: Final = "Redis Cluster is not supported: use a single server or Sentinel."

# The code of the answer, what its text holds, the remedy, and whether it refuses the login.
_AMQP: Final[tuple[tuple[int, str, str, bool], ...]] = (
    (403, "Login was refused", "Check user and password in broker_url.", True),
    (403, "access to (queue|exchange|topic)", f"{_PERMISSIONS} (rabbitmqctl).", False),
    (406, "inequivalent arg", "Declare it as it is there, or delete it there.", False),
    (406, "invalid (arg|property)", "Change the arguments of the queue in task_queues.", False),
    (530, "vhost .*not found", "Check the virtual host at the end of broker_url.", True),
    (530, "access to vhost .*refused", f"{_PERMISSIONS} (rabbitmqctl).", True),
    (540, "", "This broker does not support it.", False),
)  # fmt: skip
_REDIS: Final[tuple[tuple[str, str, bool], ...]] = (
    ("unknown command", "Use a server that has this command.", False),
    ("WRONGTYPE|wrong kind of value", "Delete the key, or use another queue name.", False),
    ("DB index|invalid DB", "Check the database at the end of broker_url.", True),
    ("cluster mode", _NO_CLUSTER, True),
    ("protected mode", "Set a password on the server, or protected-mode no.", True),
)  # fmt: skip


def permanent(exc: BaseException | None) -> Refused | None:
    """What the broker refuses for good; None if asking again may help."""
    for one in _chain(exc):
        found = _judge(one)
        if found is not None:
            return found
    return None


def refused_consumer(exc: BaseException | None) -> Refused | None:
    """What the broker refuses for good, or a consumer of a queue that it refuses for now."""
    found = permanent(exc)
    for one in _chain(exc) if found is None else ():
        if isinstance(one, ChannelError) and tuple(one.method_sig or ()) == spec.Basic.Consume:
            text = " ".join(str(one).split())
            return Refused(text, "It is tried again once a minute.", may_pass=True)
    return found


def described(exc: BaseException) -> str:
    """What went wrong, and what helps where that is known."""
    cause = permanent(exc)
    return str(cause) if cause is not None else f"{type(exc).__name__}: {exc}"


def _judge(exc: BaseException) -> Refused | None:
    text = " ".join(str(exc).split())
    if isinstance(exc, AMQPError):
        for code, pattern, remedy, login in _AMQP:
            if exc.code == code and re.search(pattern, text):
                return Refused(text, remedy, login)
    elif isinstance(exc, NoPermissionError):
        return Refused(text, f"{_PERMISSIONS} (ACL SETUSER).")
    elif isinstance(exc, AuthenticationError):
        return Refused(text, "Check user and password in broker_url.", login=True)
    elif isinstance(exc, (MovedError, ClusterCrossSlotError)):
        return Refused(f"{type(exc).__name__}: {text}", _NO_CLUSTER, login=True)
    elif isinstance(exc, ResponseError):
        for pattern, remedy, login in _REDIS:
            if re.search(pattern, text):
                return Refused(text, remedy, login)
    elif isinstance(exc, ssl.SSLCertVerificationError):
        return Refused(text, "Check the certificates in broker_use_ssl.", login=True)
    return None


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, each of them once."""
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        yield exc
        exc = exc.__cause__ or exc.__context__
