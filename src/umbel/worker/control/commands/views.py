"""How requests look to whoever asks: the shapes that Celery's and Flower's pages read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from umbel.wire.limits import Refusal
from umbel.wire.reprs import safe_repr
from umbel.wire.times import format_time
from umbel.worker.delivery.states import State

if TYPE_CHECKING:
    from umbel.worker.runtime.delivery_driver import TaskDelivery
    from umbel.worker.runtime.worker import Worker

SCHEDULE_PRIORITY = 6


def info(request: TaskDelivery, *, safe: bool = False) -> dict[str, Any]:
    """One request; with `safe` its arguments are texts."""
    header, job = request.header, request.job
    args, kwargs = _arguments(request, safe)
    return {
        "id": header.id,
        "name": request.name,
        "args": args,
        "kwargs": kwargs,
        "type": header.task,
        "hostname": request.driver.hostname,
        "time_start": _started_at(request),
        "acknowledged": request.settled,
        "delivery_info": job.delivery_info,
        "worker_pid": request.pid,
    }


def _arguments(request: TaskDelivery, safe: bool) -> tuple[Any, Any]:
    header = request.header
    rules = request.policy.redaction
    try:
        body = request.driver.open_body(request)
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


def _started_at(request: TaskDelivery) -> float | None:
    """Unix time of the start."""
    if request.accepted_at is None:
        return None
    ago_s = time.monotonic() - request.accepted_at  # first, as in `TaskEvents.started`
    return time.time() - ago_s


def active(worker: Worker) -> list[TaskDelivery]:
    """What runs."""
    return list(worker.deliveries.active.values())


def scheduled(worker: Worker) -> list[TaskDelivery]:
    """What waits for its eta."""
    return [one for one in list(worker.deliveries.reserved.values()) if _is_scheduled(one)]


def reserved(worker: Worker) -> list[TaskDelivery]:
    """What waits for a place in the pool or for its rate limit."""
    return [
        one
        for one in list(worker.deliveries.reserved.values())
        if one.state is not State.RUNNING and not _is_scheduled(one)
    ]


def _is_scheduled(delivery: TaskDelivery) -> bool:
    return delivery.state is State.HELD and delivery.eta_s is not None


def schedule_entry(request: TaskDelivery, *, safe: bool = False) -> dict[str, Any]:
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
