"""What nodes answer to control commands: one table of shapes, for Celery's nodes and for ours.

A shape is a type, a text that the answer equals, a pattern that it matches, a `[shape]` for a list
of such, a `{key: shape}` for a mapping with exactly these keys, `Each(shape)` for one with any
keys, a tuple of alternatives, or None. `More({...})` is a mapping that may have further keys: only
where Celery's own clients show what they do not know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

NUMBER = (int, float)
ANY = object


@dataclass(frozen=True)
class Each:
    """A mapping of texts to values of one shape."""

    shape: Any


@dataclass(frozen=True)
class More:
    """A mapping with at least these keys."""

    shape: dict[str, Any]


def misfits(value: Any, shape: Any, at: str = "") -> list[str]:
    """Where the value does not have the shape; empty when it has."""
    if isinstance(shape, tuple):
        found = [misfits(value, one, at) for one in shape]
        return [] if not all(found) else found[0]
    if isinstance(shape, Each):
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            return [f"{at}: {value!r:.100} is not a mapping of texts"]
        return [m for key, one in value.items() for m in misfits(one, shape.shape, f"{at}.{key}")]
    if isinstance(shape, (dict, More)):
        return _mapping_misfits(value, shape, at)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{at}: {value!r:.100} is not a list"]
        return [m for i, one in enumerate(value) for m in misfits(one, shape[0], f"{at}[{i}]")]
    return [] if _fits(value, shape) else [f"{at}: {value!r:.100} is not {shape!r:.100}"]


def _mapping_misfits(value: Any, shape: dict[str, Any] | More, at: str) -> list[str]:
    known = shape.shape if isinstance(shape, More) else shape
    if not isinstance(value, dict):
        return [f"{at}: {value!r:.100} is not a mapping"]
    missing = [f"{at}: no key {key!r}" for key in known if key not in value]
    extra = [f"{at}: a key {key!r}" for key in value if key not in known]
    inside = [
        m for key, one in known.items() if key in value
        for m in misfits(value[key], one, f"{at}.{key}")
    ]  # fmt: skip
    return missing + ([] if isinstance(shape, More) else extra) + inside


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, re.Pattern):
        return isinstance(value, str) and shape.fullmatch(value) is not None
    if isinstance(shape, type):
        return isinstance(value, shape) and (shape in (bool, ANY) or not isinstance(value, bool))
    return bool(value == shape)


def ok(text: str) -> dict[str, Any]:
    """`{"ok": text}`; the text is a regular expression."""
    return {"ok": re.compile(text, re.DOTALL)}


def error(text: str) -> dict[str, Any]:
    """`{"error": text}`; the text is a regular expression."""
    return {"error": re.compile(text, re.DOTALL)}


INFO = {
    "id": str,
    "name": str,
    "args": list,
    "kwargs": dict,
    "type": str,
    "hostname": str,
    "time_start": (float, None),
    "acknowledged": bool,
    "delivery_info": {
        "exchange": str,
        "routing_key": str,
        "priority": (int, None),
        "redelivered": (bool, None),
    },
    "worker_pid": (int, None),
}

QUEUE = {
    "name": str,
    "exchange": {
        "name": str,
        "type": str,
        "arguments": (dict, None),
        "durable": bool,
        "passive": bool,
        "auto_delete": bool,
        "delivery_mode": (int, None),
        "no_declare": bool,
    },
    "routing_key": str,
    "queue_arguments": (dict, None),
    "binding_arguments": (dict, None),
    "consumer_arguments": (dict, None),
    "durable": bool,
    "exclusive": bool,
    "auto_delete": bool,
    "no_ack": bool,
    "alias": (str, None),
    "bindings": [ANY],
    "no_declare": (bool, None),
    "expires": (*NUMBER, None),
    "message_ttl": (*NUMBER, None),
    "max_length": (int, None),
    "max_length_bytes": (int, None),
    "max_priority": (int, None),
}

BROKER = {
    "hostname": (str, None),
    "userid": (str, None),
    "virtual_host": (str, None),
    "port": (int, None),
    "insist": bool,
    "ssl": (bool, dict),
    "transport": str,
    "connect_timeout": (*NUMBER, None),
    "transport_options": dict,
    "login_method": (str, None),
    "uri_prefix": (str, None),
    "heartbeat": (*NUMBER, None),
    "failover_strategy": str,
    "alternates": [str],
    "credential_provider": (str, None),
}

RUSAGE = {
    **dict.fromkeys(("utime", "stime"), NUMBER),
    **dict.fromkeys(
        ("maxrss", "ixrss", "idrss", "isrss", "minflt", "majflt", "nswap", "inblock", "oublock",
         "msgsnd", "msgrcv", "nsignals", "nvcsw", "nivcsw"), int
    ),
}  # fmt: skip

POOL = {
    "implementation": str,
    "max-concurrency": int,
    "max-tasks-per-child": (int, str),
    "put-guarded-by-semaphore": bool,
    "timeouts": list,
}
PROCESSES = {"processes": [int]}
WRITES = More({"total": int, "avg": str, "all": str, "raw": str, "inqueues": More({"total": int,
          "active": int})})  # fmt: skip
POOLS = {
    "prefork": {**POOL, **PROCESSES, "writes": WRITES},
    "threads": {**POOL, "threads": int},
    "gevent": POOL,
    "solo": {**POOL, **PROCESSES},
}


def stats(pool: str) -> More:
    """The numbers of a worker with this pool; monitors show what they do not know as it is."""
    return More(
        {
            "total": Each(int),
            "pid": int,
            "clock": re.compile(r"\d+"),
            "uptime": int,
            "pool": More(POOLS[pool]),
            "broker": BROKER,
            "prefetch_count": int,
            "rusage": RUSAGE,
        }
    )


MEGABYTES = r"\d+(\.\d+)?MB"
AUTOSCALER = {"max": int, "min": int, "current": int, "qty": int}

# By the name of the command; `stats` depends on the pool.
INSPECT: dict[str, Any] = {
    "ping": {"ok": "pong"},
    "clock": {"clock": int},
    "active": [INFO],
    "reserved": [INFO],
    "scheduled": [{"eta": str, "priority": 6, "request": INFO}],
    "query_task": Each([("active", "reserved", "scheduled", "ready", INFO)]),
    "revoked": [str],
    "registered": [re.compile(r"[\w.]+( \[\w+=.*\])?")],
    "conf": Each(ANY),
    "active_queues": [QUEUE],
    "report": ok(r".*kombu.*"),
    "memsample": re.compile(MEGABYTES),
    "memdump": str,
    "objgraph": ({"filename": str}, error(r"ImportError\(.*objgraph.*\)")),
}
