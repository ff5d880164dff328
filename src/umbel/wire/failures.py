"""Exceptions as stored results, and back.

Out: the class by module and qualified name, and the arguments, each as it is, or as its repr if the
serializer cannot carry it. Our own classes carry the names under which peers know them.

In: a stored failure is data from somebody else, so reading it imports nothing and calls
nothing but an exception class that is already loaded. Names are looked up in the dictionaries
of loaded modules and classes only, never through `getattr`, as a module may import on access.
A class that is not there is replaced by a stand-in of the same name, and so is one that would
end the reader instead of being handled (`SystemExit`, `KeyboardInterrupt`). A name that leads
to something which is not an exception is an attack, and raises `SecurityError`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from umbel import exceptions
from umbel.exceptions import SecurityError, TaskError
from umbel.wire.content import encode
from umbel.wire.reprs import safe_repr

_CELERY: Final = "celery.exceptions"
_BILLIARD: Final = "billiard.exceptions"

_PEER_NAMES: Final[dict[type[BaseException], tuple[str, str]]] = {
    exceptions.UmbelError: (_CELERY, "CeleryError"),
    exceptions.ImproperlyConfigured: (_CELERY, "ImproperlyConfigured"),
    exceptions.BackendError: (_CELERY, "BackendError"),
    exceptions.SecurityError: (_CELERY, "SecurityError"),
    exceptions.AlreadyRegistered: (_CELERY, "AlreadyRegistered"),
    exceptions.QueueNotFound: (_CELERY, "QueueNotFound"),
    exceptions.NotRegistered: (_CELERY, "NotRegistered"),
    exceptions.TimeoutError: (_CELERY, "TimeoutError"),
    exceptions.TaskError: (_CELERY, "TaskError"),
    exceptions.TaskRevokedError: (_CELERY, "TaskRevokedError"),
    exceptions.ChordError: (_CELERY, "ChordError"),
    exceptions.MaxRetriesExceededError: (_CELERY, "MaxRetriesExceededError"),
    exceptions.TaskOutcome: (_CELERY, "TaskPredicate"),
    exceptions.Ignore: (_CELERY, "Ignore"),
    exceptions.Reject: (_CELERY, "Reject"),
    exceptions.Retry: (_CELERY, "Retry"),
    exceptions.SoftTimeLimitExceeded: (_BILLIARD, "SoftTimeLimitExceeded"),
    exceptions.TimeLimitExceeded: (_BILLIARD, "TimeLimitExceeded"),
    exceptions.WorkerLostError: (_BILLIARD, "WorkerLostError"),
    exceptions.Terminated: (_BILLIARD, "Terminated"),
}
# Peers offer some of these under both modules, so the name alone decides within the two.
_OURS: Final = {name: kind for kind, (_, name) in _PEER_NAMES.items()}
_PEER_MODULES: Final = frozenset({_CELERY, _BILLIARD})
_NAME_CHARS_MAX: Final = 200


class UnknownFailure(TaskError):
    """Stands for an exception whose class is not loaded here; subclasses carry its name."""


def encode_failure(exc: BaseException, serializer: str = "json") -> dict[str, Any]:
    """The stored form of an exception; never raises because of what it holds."""
    kind = type(exc)
    module, name = _PEER_NAMES.get(kind) or (kind.__module__, kind.__qualname__)
    return {
        "exc_type": name,
        "exc_message": [_storable(value, serializer) for value in _arguments(exc)],
        "exc_module": module,
    }


def decode_failure(data: Any) -> BaseException:
    """The exception behind a stored failure, or a stand-in; see the module for what is refused."""
    if isinstance(data, BaseException):
        return data
    name = data.get("exc_type") if isinstance(data, dict) else None
    if not isinstance(name, str):
        return UnknownFailure(f"the stored failure cannot be read: {safe_repr(data, 200)}")
    module = data.get("exc_module")
    message = data.get("exc_message", ())
    arguments = tuple(message) if isinstance(message, list | tuple) else (message,)
    kind = _find(module, name)
    if kind is None or not issubclass(kind, Exception):
        return _stand_in(module, name)(*arguments)
    return _build(kind, arguments) or _stand_in(kind.__module__, kind.__qualname__)(*arguments)


def _arguments(exc: BaseException) -> Sequence[Any]:
    try:
        return tuple(exc.args)
    except Exception:  # noqa: BLE001 - a subclass may have made `args` something else
        return (safe_repr(exc),)


def _storable(value: Any, serializer: str) -> Any:
    try:
        encode(value, serializer)
    except Exception:  # noqa: BLE001 - an argument may raise anything when it is looked at
        return safe_repr(value)
    return value


def _find(module: object, name: str) -> type[BaseException] | None:
    """The loaded exception class of that name; raises when it is something else."""
    if not isinstance(module, str):
        return None
    if module in _PEER_MODULES and name in _OURS:
        return _OURS[name]
    holder = sys.modules.get(module)
    if not _is(holder, ModuleType):
        return None
    found: Any = holder
    for part in name.split("."):
        if not (_is(found, ModuleType) or _is(found, type)):
            break  # functions and instances have no classes inside
        names = _names_in(found)
        if part not in names:
            return None
        found = names[part]
        if _is(found, ModuleType):
            break  # the stored module is where the class lives, never a way to another one
    if not _is(found, type) or not issubclass(found, BaseException):
        raise SecurityError(
            f"the stored failure names {safe_repr(f'{module}.{name}', 200)}, which is not an"
            " exception: do not trust who wrote this result"
        )
    kind: type[BaseException] = found
    return kind


def _is(value: object, kind: type) -> bool:
    """`isinstance` without asking `__class__`, which runs code of proxies and lazy modules."""
    return issubclass(type(value), kind)


def _names_in(holder: Any) -> Mapping[str, Any]:
    """The dictionary itself; asking a lazy module for it the usual way would load the module."""
    if _is(holder, type):
        names: Mapping[str, Any] = type.__getattribute__(holder, "__dict__")
    else:
        names = object.__getattribute__(holder, "__dict__")
    return names


def _build(kind: type[Exception], arguments: tuple[Any, ...]) -> Exception | None:
    """An instance, by its constructor if that takes the arguments, else around it."""
    for make in (_construct, _bypass):
        try:
            exc = make(kind, arguments)
            str(exc), repr(exc)  # one that cannot be printed is of no use to its reader
        except Exception:  # noqa: BLE001, S112 - not our constructor: the next way may work
            continue
        if isinstance(exc, Exception):
            return exc
    return None


def _construct(kind: type[Exception], arguments: tuple[Any, ...]) -> Exception:
    return kind(*arguments)


def _bypass(kind: type[Exception], arguments: tuple[Any, ...]) -> Exception:
    exc = kind.__new__(kind, *arguments)
    exc.args = arguments
    return exc


def _stand_in(module: object, name: str) -> type[UnknownFailure]:
    """A class that prints as the missing one; the same names give the same class."""
    place = module[:_NAME_CHARS_MAX] if isinstance(module, str) and module else __name__
    return _stand_in_named(place, name[:_NAME_CHARS_MAX])


@lru_cache(maxsize=256)
def _stand_in_named(module: str, name: str) -> type[UnknownFailure]:
    try:
        return type(
            name.rpartition(".")[2] or "UnknownFailure",
            (UnknownFailure,),
            {"__module__": module, "__qualname__": name},
        )
    except ValueError:  # not a name that a class can have
        return UnknownFailure
