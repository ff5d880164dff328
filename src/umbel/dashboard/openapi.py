"""The description of the JSON API for programs: `/api/v1/openapi.json`, OpenAPI 3.1.

The shapes below are closed: a key that an answer has and its shape lacks, or the other way round,
fails a test that asks a site for everything. A question mark behind a kind means that the value may
be null; a list has one shape for all of its items; `ANY` is for what comes from tables or events.
"""

from __future__ import annotations

from typing import Any, Final

from umbel.version import __version__

ANY: Final = "any"
Shape = Any  # a word, {name: shape}, or [shape]

_TASK: Final = {
    "uuid": "string", "name": "string?", "state": "string", "worker": "string?",
    "queue": "string?", "retries": "integer", "runtime_s": "number?", "wait_s": "number?",
    "timestamp": "number?", "clock": "integer?", "call": "string?", "error": "string?",
}  # fmt: skip
_NODE: Final = {
    "name": "string", "state": "string", "fading": "boolean", "leads": ["string"],
    "clock": "integer?", "skew_s": "number?", "skewed": "boolean", "heard_ago_s": "number?",
    "freq_s": "number?", "active": "integer?", "pool_size": "integer?", "saturation": "number?",
    "prefetch": ANY, "uptime_s": "number?", "queues": ["string"], "per_s": "number",
    "failed_per_s": "number", "processed": "integer?", "load": "number?",
    "lost_events": "integer?", "software": "string", "pid": "integer?", "task_events": "boolean",
}  # fmt: skip
_TYPE: Final = {
    "name": "string", "per_s": "number", "ended": "integer", "succeeded": "integer",
    "failed": "integer", "retried": "integer", "revoked": "integer", "runtime_p50_s": "number?",
    "runtime_p95_s": "number?", "wait_p50_s": "number?", "wait_p95_s": "number?",
}  # fmt: skip
_TOTALS: Final = {
    "nodes_alive": "integer", "nodes": "integer", "running": "integer", "slots": "integer?",
    "ended_per_s": "number", "failed_per_s": "number", "failed": "integer", "sent_per_s": "number",
    "events_per_s": "number", "events": "integer", "tasks_known": "integer",
    "tasks_forgotten": "integer", "missing": "integer", "refused": "integer",
    "reconnects": "integer", "disagreements": "integer", "clock": "integer",
}  # fmt: skip
_DETAIL: Final = {
    **_TASK, "args": "string?", "kwargs": "string?", "result": "string?", "exception": "string?",
    "traceback": "string?", "client": "string?", "exchange": "string?", "routing_key": "string?",
    "eta": "string?", "expires": ANY, "root_id": "string?", "parent_id": "string?",
    "sent": "number?", "received": "number?", "started": "number?", "ended": "number?",
    "terminated": ANY, "signum": ANY, "expired": ANY, "extra": ANY, "is_ended": "boolean",
    "is_running": "boolean",
}  # fmt: skip
_ELECTION: Final = {
    "id": "string", "topic": "string?", "at": "number", "verdict": "string", "winner": "string?",
    "winners": ["string"], "winner_rank": "integer?", "decided_after_s": "number?",
    "candidates": [{
        "rank": "integer", "node": "string", "clock": "integer", "claims_after_s": "number",
        "claim": "string", "names": "string?", "won": "boolean",
    }],
    "candidates_count": "integer", "informed": "integer", "task_state": "string?",
}  # fmt: skip
_QUEUE: Final = {
    "name": "string", "length": "integer?", "growth_per_s": "number?", "sent_per_s": "number?",
    "taken_per_s": "number?", "lengths": ["integer?"], "oldest": ANY, "consumers": ["string"],
    "consumers_count": "integer", "paused": "boolean", "paused_on": ["string"],
    "paused_everywhere": "boolean", "stuck": "boolean",
}  # fmt: skip
_BAR: Final = {
    "n": "integer", "id": "string", "name": "string", "worker": "string", "parent": "string?",
    "sent": "number?", "sent_clock": "integer?", "received": "number?", "started": "number?",
    "ended": "number?", "clocks": ["integer?"], "outcome": "string?",
}  # fmt: skip

# Path, what it is, its parameters, and the shape of its answer.
PATHS: Final[dict[str, tuple[str, tuple[str, ...], Shape]]] = {
    "/cluster": ("Nodes, totals, task types, and the last minutes.", (), {
        "condition": "string", "totals": _TOTALS,
        "series": {"step_s": "integer", "kinds": ["string"], "per_s": ANY},
        "nodes": [_NODE], "nodes_more": "integer", "types": [_TYPE],
        "remarks": [{"kind": "string", "text": "string", "action": "string"}],
    }),
    "/tasks": ("The tasks that a search finds.", ("q", "sort", "page", "rows"), {
        "query": "string", "sort": "string", "error": "string", "count": "integer",
        "known": "integer", "forgotten": "integer", "page": "integer", "pages": "integer",
        "rows": "integer", "tasks": [_TASK], "details": "boolean", "condition": "string",
        "task_events": "integer",
    }),
    "/tasks/{uuid}": ("One task with its attempts, events and family.", ("uuid",), {
        "task": _DETAIL, "attempts": ANY, "events": ANY, "tree": ANY, "details": "boolean",
        "condition": "string",
    }),
    "/timeline": ("Executions that have changed.", ("after", "bars"), {
        "version": "integer", "after": "integer", "now": "number", "bars": [_BAR],
        "alive": ["string"], "condition": "string",
    }),
    "/elections": ("Candidates, claims, winners, time to decision.", (), {
        "condition": "string", "known": "integer", "disagreements": "integer", "leaders": ANY,
        "elections": [_ELECTION],
    }),
    "/queues": ("Lengths, rates, consumers, pauses.", (), {
        "condition": "string", "trouble": "string", "queues": [_QUEUE], "waiting": "integer",
        "nodes": "integer",
    }),
    "/history": ("Totals, types and failures of the tables.", (), ANY),
    "/history/at": ("The cluster as it was at a clock or at a time.", ("clock", "time"), ANY),
}  # fmt: skip

_PARAMETERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "q": ("A search: `state:failed name:img.*`.", {"type": "string"}),
    "sort": ("The order.", {"type": "string", "enum": ["last", "first", "runtime"]}),
    "page": ("Which page, from 1 on.", {"type": "integer", "minimum": 1, "maximum": 10_000}),
    "rows": ("Tasks on a page.", {"type": "integer", "minimum": 1, "maximum": 500}),
    "after": ("A `version` of before.", {"type": "integer", "minimum": 0}),
    "bars": ("At most so many.", {"type": "integer", "minimum": 1, "maximum": 20_000}),
    "clock": ("A value of the logical clock.", {"type": "integer", "minimum": 0}),
    "time": ("ISO 8601, or how long ago: `2h`.", {"type": "string"}),
    "uuid": ("The id of a task.", {"type": "string", "minLength": 1}),
}
_ERROR: Final = {"error": "string"}


def document(prefix: str = "") -> dict[str, Any]:
    """The whole description."""
    paths = {path: {"get": _operation(path, *told)} for path, told in PATHS.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Umbel dashboard",
            "version": __version__,
            "description": "What the pages show, as JSON. Only looking: changes go through pages. "
            "Without login, arguments, results and texts of errors are null; `details` is false.",
        },
        "servers": [{"url": f"{prefix}/api/v1"}],
        "paths": paths,
    }


def _operation(path: str, summary: str, names: tuple[str, ...], shape: Shape) -> dict[str, Any]:
    wrong = {"400": "The question makes no sense.", "404": "There is no such thing."}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/{uuid}", "-one").replace("/", "-"),
        "parameters": [_parameter(name, in_path=f"{{{name}}}" in path) for name in names],
        "responses": {
            "200": _answer("What was asked for.", shape),
            **{code: _answer(text, _ERROR) for code, text in wrong.items()},
        },
    }


def _parameter(name: str, *, in_path: bool) -> dict[str, Any]:
    text, schema = _PARAMETERS[name]
    place = "path" if in_path else "query"
    return {"name": name, "in": place, "required": in_path, "description": text, "schema": schema}


def _answer(text: str, shape: Shape) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"} if shape == ANY else _of(shape)}}
    return {"description": text, "content": content}


def _of(shape: Shape) -> dict[str, Any]:
    if isinstance(shape, dict):
        return {
            "type": "object",
            "properties": {name: _of(one) for name, one in shape.items()},
            "required": list(shape),
            "additionalProperties": False,
        }
    if isinstance(shape, list):
        return {"type": "array", "items": _of(shape[0])}
    if shape == ANY:
        return {}
    kind = shape.removesuffix("?")
    return {"type": [kind, "null"] if shape.endswith("?") else kind}
