"""How requests look to whoever asks: the shapes that Celery's and Flower's pages read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from umbel.wire.limits import Refusal
from umbel.wire.reprs import safe_repr
from umbel.wire.times import format_time

if TYPE_CHECKING:
    from umbel.worker.request import Request
    from umbel.worker.worker import Worker

SCHEDULE_PRIORITY = 6


def info(request: Request, *, safe: bool = False) -> dict[str, Any]:
    """One request; with `safe` its arguments are texts."""
    header, job = request.header, request.job
    args, kwargs = _arguments(request, safe)
    return {
        "id": header.id,
        "name": request.name,
        "args": args,
        "kwargs": kwargs,
        "type": header.task,
        "hostname": request.worker.plan.hostname,
        "time_start": _started_at(request),
        "acknowledged": request.settled,
        "delivery_info": job.delivery_info,
        "worker_pid": request.pid,
    }


def _arguments(request: Request, safe: bool) -> tuple[Any, Any]:
    header = request.header
    rules = request.strategy.redaction
    try:
        body = request.worker.runner.open(request.job)[1]
    except Refusal:

        def refuse() -> tuple[Any, Any]:
            raise ValueError("the body can not be read")

        return rules.event_reprs(header, refuse)
    if safe or not rules.shows_all:
        # Values can not be shown in part: texts can.
        texts = rules.args_repr(tuple(body.args)), rules.kwargs_repr(body.kwargs)
        plain = safe_repr(tuple(body.args)), safe_repr(body.kwargs)
        if safe or texts != plain:
            return texts
    return body.args, body.kwargs


def _started_at(request: Request) -> float | None:
    """Unix time of the start."""
    if request.accepted_at is None:
        return None
    ago_s = time.monotonic() - request.accepted_at  # first, as in `TaskEvents.started`
    return time.time() - ago_s


def active(worker: Worker) -> list[Request]:
    """What runs."""
    return list(worker.tally.active.values())


def scheduled(worker: Worker) -> list[Request]:
    """What waits for its eta."""
    running = worker.tally.active
    found = list(worker.tally.reserved.items())
    return [r for key, r in found if r.timer is not None and r.eta is not None
            and key not in running]  # fmt: skip


def reserved(worker: Worker) -> list[Request]:
    """What waits for a place in the pool or for its rate limit."""
    running = worker.tally.active
    found = list(worker.tally.reserved.items())
    return [r for key, r in found if key not in running and (r.timer is None or r.eta is None)]


def schedule_entry(request: Request, *, safe: bool = False) -> dict[str, Any]:
    """A request that waits for its time."""
    eta = format_time(request.eta) if request.eta is not None else None
    return {"eta": eta, "priority": SCHEDULE_PRIORITY, "request": info(request, safe=safe)}


def state_of(worker: Worker, ids: Iterable[str]) -> dict[str, list[Any]]:
    """Where each of these tasks is, if it is here."""
    wanted = set(ids)
    found: dict[str, list[Any]] = {}
    for state, requests in (
        ("reserved", reserved(worker)),
        ("scheduled", scheduled(worker)),
        ("active", active(worker)),
    ):
        for request in requests:
            if request.id in wanted:
                found[request.id] = [state, info(request)]
    return found
