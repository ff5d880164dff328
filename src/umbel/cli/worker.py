"""`umbel worker`: take tasks from the broker and run them until told to stop."""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from umbel.cli import apps
from umbel.cli.errors import FAILED, REFUSED, WRONG, CommandFailed
from umbel.cli.group import Invocation, split_names
from umbel.worker.execution.pools.base import POOL_NAMES
from umbel.worker.runtime.options import WorkerOptions, expanded, node_name

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.logs import Logging
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.worker")

LEVELS = ("debug", "info", "warning", "error", "critical")
_POOL_ALIASES = {"processes": "prefork"}
_LEVEL_ALIASES = {"fatal": "critical", "warn": "warning"}


def _pool_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    name = _POOL_ALIASES.get(value, value) if value is not None else None
    if name is not None and name not in POOL_NAMES:
        raise CommandFailed(f"unknown pool {value!r}: choose one of {', '.join(POOL_NAMES)}")
    return name


def _log_level(ctx: click.Context, param: click.Parameter, value: str) -> int:
    name = value.lower()
    name = _LEVEL_ALIASES.get(name, name)
    if name in LEVELS:
        return logging.getLevelNamesMapping()[name.upper()]
    if name.isdecimal():
        return int(name)
    close = difflib.get_close_matches(name, LEVELS, 1)
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(LEVELS)}"
    raise CommandFailed(f"unknown log level {value!r}: {hint}")


def _bounds(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, int] | None:
    """`8,2` as (at most, at least); `8` alone begins with one."""
    if value is None:
        return None
    most, _, least = value.partition(",")
    try:
        bounds = int(most), int(least or 1)
    except ValueError:
        bounds = (0, 0)
    if bounds[1] == 0 < bounds[0]:
        bounds = bounds[0], 1  # one is always there, to take the next task
    if not 1 <= bounds[1] <= bounds[0]:
        raise CommandFailed(f"--autoscale {value!r}: give MAX,MIN such as 8,2")
    return bounds


@dataclass(slots=True)
class Surroundings:
    """What is around a worker: its log, its health, its first words."""

    level: int
    logfile: str | None
    json_logs: bool
    color: bool | None
    quiet: bool
    purge: bool


def _option(*names: str, **settings: Any) -> Any:
    return click.option(*names, **settings)


_POSITIVE = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command("worker", context_settings={"help_option_names": ["-h", "--help"]})
@_option("-n", "--hostname", metavar="NAME", help="Node name, such as w1@%h (%h is the host).")
@_option(
    "-P", "--pool", callback=_pool_name, metavar="POOL", help=f"One of {', '.join(POOL_NAMES)}."
)
@_option("-c", "--concurrency", type=_POSITIVE, help="Tasks at a time [number of CPUs].")
@_option("-Q", "--queues", multiple=True, callback=split_names, help="Queues to consume: a,b.")
@_option("-X", "--exclude-queues", multiple=True, callback=split_names, help="Queues to leave out.")
@_option(
    "-l",
    "--loglevel",
    default="warning",
    envvar="UMBEL_LOG_LEVEL",
    callback=_log_level,
    metavar="LEVEL",
    help=f"One of {', '.join(LEVELS)} [warning].",
)
@_option("-f", "--logfile", metavar="PATH", help="Log to this file (%n, %h, %d, %p expand).")
@_option("--json-logs", is_flag=True, help="One JSON object per line instead of text.")
@_option("-E", "--task-events", is_flag=True, help="Send events that monitors can follow.")
@_option("--prefetch-multiplier", type=click.IntRange(min=0), help="Messages held per slot.")
@_option(
    "-O",
    "optimization",
    type=click.Choice(["default", "fair"]),
    help="Taken for compatibility: scheduling is always fair.",
)
@_option("--time-limit", type=_SECONDS, help="Seconds after which a task is ended.")
@_option("--soft-time-limit", type=_SECONDS, help="Seconds after which a task is told to end.")
@_option("--cpu-affinity", is_flag=True, help="Bind each pool process to a CPU of its own.")
@_option("--max-tasks-per-child", type=_POSITIVE, help="Replace a pool process after so many.")
@_option(
    "--max-memory-per-child",
    "max_memory_per_child_kib",
    type=_POSITIVE,
    help="Replace a pool process above so many KiB.",
)
@_option("--without-gossip", is_flag=True, help="Do not follow other workers.")
@_option("--without-mingle", is_flag=True, help="Do not ask other workers at the start.")
@_option("--without-heartbeat", is_flag=True, help="Send no heartbeats.")
@_option("--heartbeat-interval", type=_SECONDS, help="Seconds between heartbeats [2].")
@_option(
    "--autoscale",
    callback=_bounds,
    metavar="MAX,MIN",
    help="Let the pool follow the work between these sizes.",
)
@_option(
    "-S",
    "--statedb",
    metavar="FILE",
    help="Remember revoked tasks and the clock in this file (%n, %h, %d, %p expand).",
)
@_option("--purge", is_flag=True, help="Remove all waiting messages first, without asking.")
@_option("-I", "--include", multiple=True, callback=split_names, help="More modules with tasks.")
@_option("--health-file", metavar="PATH", help="A file that is fresh while the worker is well.")
@_option(
    "--health-port",
    type=click.IntRange(0, 65535),
    help="Answer /live and /ready on this port of 127.0.0.1.",
)
@_option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Answer Prometheus on this port of metrics_address [127.0.0.1].",
)
@_option(
    "--show-blueprint",
    is_flag=False,
    flag_value="text",
    type=click.Choice(["text", "dot", "svg"]),
    help="Print the steps of the worker and leave; as text, or =dot, or =svg.",
)
@_option("-q", "--quiet", is_flag=True, help="No banner.")
@_option("--no-color", is_flag=True, help="No colours.")
@click.pass_obj
def worker(
    invocation: Invocation,
    /,
    loglevel: int,
    logfile: str | None,
    json_logs: bool,
    purge: bool,
    include: list[str],
    optimization: str | None,
    task_events: bool,
    cpu_affinity: bool,
    quiet: bool,
    no_color: bool,
    show_blueprint: str | None,
    **given: Any,
) -> int:
    """Take tasks from the broker and run them.

    TERM or Ctrl-C lets running tasks end; a second Ctrl-C, or QUIT, stops them and gives their
    messages back. A broker that is down is tried again until it answers.
    """
    app = invocation.app()
    if include:
        app.conf.update(include=[*(app.conf.include or ()), *include])
    apps.load_modules(app)
    options = WorkerOptions(
        task_events=task_events or None, cpu_affinity=cpu_affinity or None, **given
    )
    if show_blueprint is not None:
        from umbel.worker.runtime.drawing import FORMATS, drawings_of

        click.echo(FORMATS[show_blueprint](drawings_of(app, options)))
        return 0
    around = Surroundings(
        level=loglevel,
        logfile=expanded(logfile, node_name(options.hostname)),
        json_logs=json_logs,
        color=False if no_color else invocation.color,
        quiet=quiet or invocation.quiet or json_logs,
        purge=purge,
    )
    return run(app, options, around)


def run(app: Umbel, options: WorkerOptions, around: Surroundings) -> int:
    """Run a worker with its log, signals and health checks; returns the exit code."""
    from umbel.worker import logs

    log = logs.setup(around.level, around.logfile, around.json_logs, around.color, app.conf)
    with contextlib.ExitStack() as stack:
        stack.callback(log.close)
        process = _make(app, options)
        _start_health(process, options, stack)
        if around.purge:
            _purge(app, log)
        if not around.quiet:
            from umbel.worker.runtime import banner

            banner.show(process, sys.stdout, color=around.color)
        if not logger.isEnabledFor(logging.INFO):
            process.on_ready.append(lambda worker: log.say(f"{worker.plan.hostname} ready."))
        return _work(process, log, around)


def _make(app: Umbel, options: WorkerOptions) -> Worker:
    from umbel.worker.runtime.worker import Worker

    process = Worker(app, options)
    if process.pool.green:
        from gevent.monkey import is_module_patched

        if not is_module_patched("socket"):
            raise CommandFailed(
                f"pool {process.pool.name!r} comes from the configuration, too late to prepare "
                f"the process for it: give -P {process.pool.name} on the command line as well"
            )
    return process


def _start_health(process: Worker, options: WorkerOptions, stack: contextlib.ExitStack) -> None:
    from umbel.worker.observe import health

    port = options.metrics_port
    shared = port is not None and _start_metrics(process, port, stack) == options.health_port
    if options.health_port is not None and not shared:
        server = health.HealthServer(process, options.health_port)
        server.start()
        stack.callback(server.stop)
        logger.info("health checks at http://%s:%d", server.address, server.port)
    if options.health_file is not None:
        file = health.HealthFile(process, options.health_file)
        file.start()
        stack.callback(file.stop)
        process.on_ready.append(file.renew)


def _start_metrics(process: Worker, port: int, stack: contextlib.ExitStack) -> int | None:
    """Answer on the metrics port; gives the port of 127.0.0.1 that tells health as well, if any."""
    from umbel.worker.observe import endpoint, health

    try:
        from umbel.worker.observe.metrics import Metrics
    except ModuleNotFoundError:
        raise CommandFailed(
            "--metrics-port needs prometheus_client: install it with pip install 'umbel[metrics]'"
        ) from None
    process.metrics = Metrics(process)
    routes = {**process.metrics.routes(), **health.routes(process)}
    server = endpoint.Endpoint("metrics", port, routes, process.app.conf.metrics_address)
    server.start()
    stack.callback(server.stop)
    logger.info("metrics at http://%s:%d/metrics", server.address, server.port)
    everywhere = "0.0.0.0"  # noqa: S104 - where the user says so
    return server.port if server.address in (endpoint.LOOPBACK, everywhere) else None


def _purge(app: Umbel, log: Logging) -> None:
    from umbel.cli.purge import count_waiting, empty

    waiting = count_waiting(app, list(app.queues.consumed))
    removed = empty(app, waiting)
    log.say(f"purged {removed} messages from {', '.join(waiting) or 'no queue'}")


def _work(process: Worker, log: Logging, around: Surroundings) -> int:
    from umbel.broker.sessions.names import NodeNameTaken
    from umbel.worker.runtime.errors import BrokerRefuses, BrokerUnreachable
    from umbel.worker.runtime.signals import Signals, say_on_stderr

    # JSON lines stay JSON lines: the loop logs the shutdown as well.
    say = (lambda text: None) if around.json_logs else say_on_stderr
    try:
        with Signals(process, say).installed(), log.redirected():
            return process.run()
    except NodeNameTaken as exc:
        logger.critical("%s", exc)
        return WRONG
    except BrokerRefuses as exc:
        logger.critical("%s", exc)
        return REFUSED
    except BrokerUnreachable as exc:
        logger.critical("%s", exc)
    except Exception:
        logger.exception("the worker failed")
    return FAILED
