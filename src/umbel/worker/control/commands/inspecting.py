"""Commands that look: at tasks, at settings, at the worker itself."""

from __future__ import annotations

import json
import os
import resource
import time
from typing import Any

from umbel.app.reporting import report_text
from umbel.wire.masking import is_secret, masked
from umbel.worker.control.commands import views
from umbel.worker.control.commands.registry import command
from umbel.worker.control.panel import CommandState
from umbel.worker.observe.refused_input import refused

SHOWN_ATTRIBUTES = ("exchange", "routing_key", "rate_limit")
RUSAGE = (
    "utime", "stime", "maxrss", "ixrss", "idrss", "isrss", "minflt", "majflt", "nswap", "inblock",
    "oublock", "msgsnd", "msgrcv", "nsignals", "nvcsw", "nivcsw",
)  # fmt: skip


@command(reads=True, anywhere=True)
def ping(state: CommandState, **_: Any) -> dict[str, str]:
    """Answer."""
    return {"ok": "pong"}


@command(reads=True, anywhere=True)
def clock(state: CommandState, **_: Any) -> dict[str, int]:
    """The logical clock."""
    return {"clock": state.app.clock.value}


@command(reads=True, anywhere=True, aliases=("dump_active",))
def active(state: CommandState, safe: bool = False, **_: Any) -> list[dict[str, Any]]:
    """Tasks that run."""
    return [views.info(request, safe=safe) for request in views.active(state.worker)]


@command(reads=True, anywhere=True, aliases=("dump_reserved",))
def reserved(state: CommandState, **_: Any) -> list[dict[str, Any]]:
    """Tasks that were received and wait for their turn."""
    return [views.info(request) for request in views.reserved(state.worker)]


@command(reads=True, anywhere=True, aliases=("dump_schedule",))
def scheduled(state: CommandState, **_: Any) -> list[dict[str, Any]]:
    """Tasks that wait for their eta."""
    found = sorted(views.scheduled(state.worker), key=lambda request: str(request.eta))
    return [views.schedule_entry(request) for request in found]


@command(reads=True, anywhere=True)
def query_task(state: CommandState, ids: Any = (), **_: Any) -> dict[str, Any]:
    """Where these tasks are, if they are here."""
    wanted = [ids] if isinstance(ids, str) else list(ids or ())
    return views.state_of(state.worker, [one for one in wanted if isinstance(one, str)])


@command(reads=True, anywhere=True, aliases=("dump_revoked",))
def revoked(state: CommandState, **_: Any) -> list[str]:
    """Ids of revoked tasks."""
    return state.worker.revocations.ids()


@command(reads=True, anywhere=True, aliases=("dump_tasks",))
def registered(
    state: CommandState, taskinfoitems: Any = None, builtins: bool = False, **_: Any
) -> list[str]:
    """Tasks that this worker knows."""
    wanted = SHOWN_ATTRIBUTES if not taskinfoitems else tuple(map(str, taskinfoitems))
    shown = [item for item in wanted if not item.startswith("_") and not is_secret(item)]
    names = sorted(name for name in state.app.tasks if builtins or not name.startswith("celery."))

    def line(name: str) -> str:
        task = state.app.tasks[name]
        values = ((item, getattr(task, item, None)) for item in shown)
        told = [f"{item}={value}" for item, value in values if value is not None]
        return f"{name} [{' '.join(told)}]" if told else name

    return [line(name) for name in names]


@command(reads=True, anywhere=True, aliases=("dump_conf",))
def conf(state: CommandState, with_defaults: bool = False, **_: Any) -> dict[str, Any]:
    """Settings; secrets are masked."""
    return state.app.conf.masked(with_defaults=bool(with_defaults))


@command(reads=True, anywhere=True)
def report(state: CommandState, **_: Any) -> dict[str, str]:
    """Versions and settings, for a bug report."""
    return {"ok": report_text(state.app)}


@command(reads=True, anywhere=True)
def stats(state: CommandState, **_: Any) -> dict[str, Any]:
    """Numbers of the worker."""
    worker = state.worker
    found: dict[str, Any] = {
        "total": dict(worker.counters.by_task),
        "pid": worker.pid,
        "clock": str(state.app.clock.value),
        "uptime": round(time.time() - worker.started_at),
        "pool": worker.pool.info(),
        "broker": broker_info(state),
        "prefetch_count": worker.deliveries.prefetch.window,
        "rusage": _rusage(),
        "umbel": _own(worker),
    }
    if worker.autoscaler is not None:
        found["autoscaler"] = worker.autoscaler.info()
    return found


def _own(worker: Any) -> dict[str, Any]:
    counters, events, gossip = worker.counters, worker.events, worker.gossip
    counts = refused(worker)
    return {
        "received": counters.received,
        "finished": counters.finished,
        "refused": counts["tasks"],
        "connections_lost": counters.connections_lost,
        "rebuilt_by_watchdog": counters.rebuilt_by_watchdog,
        "parked": worker.deliveries.limits.parked_count,
        "paused": sorted(worker.consumption.paused),
        "refused_queues": dict(worker.refused_queues),
        "events_sent": events.sent if events is not None else 0,
        "events_lost": events.lost if events is not None else 0,
        "control_refused": counts["control"],
        "nodes": len(gossip.membership),
        "nodes_unsigned": gossip.unsigned_names(),
        "gossip_refused": counts["events"],
        "replies_refused": counts["replies"],
        "greetings_refused": counts["greetings"],
        "clock_shift": worker.wall.shift_s,
    }


def broker_info(state: CommandState) -> dict[str, Any]:
    """How this worker is connected, without secrets; every value has a JSON form."""
    connection = state.consumer.connection
    if connection is None:
        return {"transport": "", "hostname": None}
    found = dict(connection.info())
    for name in ("password", "uri_prefix"):
        found.pop(name, None)
    found.setdefault("uri_prefix", connection.uri_prefix)
    if found.get("userid") is None:
        found["userid"] = None
    return {str(name): _plain(masked(str(name), value)) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)[:200]
    return value


def _rusage() -> dict[str, Any]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {name: getattr(usage, f"ru_{name}") for name in RUSAGE}


@command(reads=True, anywhere=True)
def active_queues(state: CommandState, **_: Any) -> list[dict[str, Any]]:
    """The queues that this worker consumes."""
    tasks = state.consumer.tasks
    queues = list(tasks.queues) if tasks is not None else []
    return [dict(_plain(queue.as_dict(recurse=True))) for queue in queues]


@command(reads=True, anywhere=True)
def queue_lengths(state: CommandState, **_: Any) -> dict[str, int | None]:
    """How many messages wait in each queue of this worker; None where the broker tells nothing."""
    from umbel.broker.tasks.lengths import lengths_of

    # Not on the consumer's connection, which belongs to a loop that may stand still.
    with state.app.connection() as connection:
        return lengths_of(connection, list(state.app.queues.consumed.values()))


@command(reads=True, anywhere=True, judges=True)
def hello(state: CommandState, is_new: bool = True, **arguments: Any) -> dict[str, Any] | None:
    """Greet a node that has just started: take over its revocations, tell ours and the clock."""
    return state.worker.mingling.answer(arguments, is_new=is_new)


@command(reads=True, anywhere=True)
def elections(state: CommandState, **_: Any) -> dict[str, Any]:
    """Elections that are open here, and the winners of those that were decided lately."""
    return state.worker.gossip.view()


@command(reads=True, anywhere=True)
def memsample(state: CommandState, **_: Any) -> str:
    """How much memory the worker has now."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no path of ours
        pages = int(file.read().split()[1])
    sample = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    state.worker.memory_samples.append(sample)
    return f"{sample:.3f}MB"


@command(reads=True, anywhere=True)
def memdump(state: CommandState, samples: int = 10, **_: Any) -> str:
    """The samples so far, some of them, and the memory now."""
    now = memsample(state)
    taken = list(state.worker.memory_samples)
    step = max(1, len(taken) // max(1, int(samples)))
    lines = [f"- {sample:.3f}MB" for sample in taken[::step]]
    return "\n".join([*lines, f"= {now}"])


@command(reads=True, anywhere=True)
def objgraph(
    state: CommandState,
    num: int = 200,
    max_depth: int = 10,
    type: str = "Request",  # noqa: A002 - the name on the wire
    **_: Any,
) -> dict[str, str]:
    """Draw what holds objects of a type alive; needs the package objgraph."""
    try:
        import objgraph as drawing
    except ImportError:
        raise ImportError("objgraph is not installed here: pip install objgraph") from None
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="umbel-objgraph-", suffix=".png", delete=False) as out:
        found = drawing.by_type(type)[: int(num)]
        drawing.show_backrefs(found, max_depth=int(max_depth), filename=out.name)
    return {"filename": out.name}
