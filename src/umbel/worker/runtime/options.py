"""What a worker was asked to be: the command line's options over the settings."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umbel.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel


@dataclass(slots=True, kw_only=True)
class WorkerOptions:
    """None means: as the settings say."""

    hostname: str | None = None
    pool: str | None = None
    concurrency: int | None = None
    queues: list[str] = field(default_factory=list)
    exclude_queues: list[str] = field(default_factory=list)
    prefetch_multiplier: int | None = None
    cpu_affinity: bool | None = None
    time_limit: float | None = None
    soft_time_limit: float | None = None
    max_tasks_per_child: int | None = None
    max_memory_per_child_kib: int | None = None
    task_events: bool | None = None
    heartbeat_interval: float | None = None
    without_mingle: bool = False
    without_gossip: bool = False
    without_heartbeat: bool = False
    autoscale: tuple[int, int] | None = None  # at most, at least
    statedb: str | None = None
    health_file: str | None = None
    health_port: int | None = None
    metrics_port: int | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class Plan:
    """The options with the settings filled in: what the worker will do."""

    hostname: str
    pool: str
    concurrency: int
    prefetch_multiplier: int
    cpus: tuple[int, ...]  # that pool processes are bound to, one each; none: to no one
    time_limit_s: float | None
    soft_time_limit_s: float | None
    max_tasks_per_child: int | None
    max_memory_per_child_kib: int | None
    task_events: bool
    heartbeat_interval_s: float
    statedb: str | None


def node_name(name: str | None) -> str:
    """A full node name: `%h` host, `%n` name, `%d` domain, `%%` a percent sign."""
    host = socket.gethostname()
    short, _, domain = host.partition(".")
    chosen = name or f"celery@{host}"
    if "@" not in chosen:
        chosen = f"{chosen}@{host}"
    own = chosen.partition("@")[0]
    table = {"%h": host, "%n": own if "%" not in own else short, "%d": domain, "%%": "%"}
    out, i = "", 0
    while i < len(chosen):
        pair = chosen[i : i + 2]
        if pair in table:
            out, i = out + table[pair], i + 2
        else:
            out, i = out + chosen[i], i + 1
    return out


def expanded(path: str | None, node: str) -> str | None:
    """`%n` name, `%h` host, `%d` domain, `%p` the whole node name, `%%` a percent sign."""
    if path is None:
        return None
    name, _, host = node.partition("@")
    table = {"%n": name, "%h": host, "%d": host.partition(".")[2], "%p": node, "%%": "%"}
    out, position = "", 0
    while position < len(path):
        pair = path[position : position + 2]
        out += table.get(pair, path[position])
        position += 2 if pair in table else 1
    return out


def _cpus() -> tuple[int, ...]:
    """The CPUs that this process may use."""
    if not hasattr(os, "sched_setaffinity"):
        raise ImproperlyConfigured(
            "processes can not be bound to CPUs on this system: leave out worker_cpu_affinity"
        )
    return tuple(sorted(os.sched_getaffinity(0)))


def plan_for(app: Umbel, options: WorkerOptions) -> Plan:
    """Fill in the settings; refuses what can not work."""
    conf = app.conf

    def pick(given: float | None, setting: str) -> float | None:
        value: float | None = getattr(conf, setting) if given is None else given
        return value

    concurrency = pick(options.concurrency, "worker_concurrency") or os.cpu_count() or 1
    soft = pick(options.soft_time_limit, "task_soft_time_limit")
    hard = pick(options.time_limit, "task_time_limit")
    if soft and hard and soft >= hard:
        raise ImproperlyConfigured(
            f"soft time limit {soft}s is not below the hard time limit {hard}s: lower it"
        )
    multiplier = pick(options.prefetch_multiplier, "worker_prefetch_multiplier")
    tasks = pick(options.max_tasks_per_child, "worker_max_tasks_per_child")
    memory = pick(options.max_memory_per_child_kib, "worker_max_memory_per_child")
    pool = options.pool or conf.worker_pool
    if options.autoscale is not None:
        if pool == "solo":
            raise ImproperlyConfigured("the solo pool runs one task at a time: no --autoscale")
        concurrency = options.autoscale[1]
    hostname = node_name(options.hostname)
    return Plan(
        hostname=hostname,
        pool=pool,
        concurrency=1 if pool == "solo" else int(concurrency),
        prefetch_multiplier=int(multiplier or 0),
        cpus=_cpus() if pick(options.cpu_affinity, "worker_cpu_affinity") else (),
        time_limit_s=hard,
        soft_time_limit_s=soft,
        max_tasks_per_child=int(tasks) if tasks else None,
        max_memory_per_child_kib=int(memory) if memory else None,
        task_events=bool(pick(options.task_events, "worker_send_task_events")),
        heartbeat_interval_s=pick(options.heartbeat_interval, "worker_heartbeat_interval") or 2.0,
        statedb=expanded(options.statedb or conf.worker_state_db, hostname),
    )
