"""The far side of a pool: from a job to a result.

Runs wherever the pool runs it: a child process, a thread, a greenlet, an event loop. It decodes
the body, builds the request, hands it to the tracer of the task, and turns whatever happens
into an `JobResult`. It raises nothing of its own.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import structs

from umbel.app.context import Context
from umbel.app.spans import tracer_class
from umbel.app.trace import Traced, Tracer, fail
from umbel.wire.compression import decompress
from umbel.wire.content import as_bytes, decode
from umbel.wire.limits import Limits, Refusal
from umbel.wire.tasks import (
    TaskBody,
    TaskHeader,
    hybrid_header,
    read_body,
    read_header,
    read_v1,
    user_headers,
)
from umbel.worker.execution.coroutines import drive
from umbel.worker.execution.jobs import Job, JobResult
from umbel.worker.execution.pools.base import JobEnded, disarm_soft_limit, failure_of

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

try:
    from greenlet import GreenletExit
except ModuleNotFoundError:
    _GREENLET_EXIT: tuple[type[BaseException], ...] = ()
else:
    _GREENLET_EXIT = (GreenletExit,)

logger = logging.getLogger("umbel.task")

UNDECODABLE = "UNDECODABLE"

# What a pool knows of the cost of one execution: its CPU time by which clock, and whether the
# process's memory is that of one task at a time. Green pools and asyncio mix theirs in one thread.
_USAGE: dict[str, tuple[Callable[[], float], bool]] = {
    "prefork": (time.process_time, True),
    "solo": (time.thread_time, True),
    "threads": (time.thread_time, False),
}
# Short executions are not measured: that would cost them more than it tells. Nor is one that comes
# after a short one of the same task in the same process.
MEASURED_MIN_S = 0.005
SHORT_MAX = 10_000
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


class Runner:
    """Executes the jobs of one application."""

    def __init__(self, app: Umbel, hostname: str, pool: str = "") -> None:
        self.app = app
        self.hostname = hostname
        self._tracers: dict[str, Tracer] = {}
        self._accept = app.accept
        self._limits = app.limits
        unknown: tuple[Callable[[], float] | None, bool] = (None, False)
        self._cpu_clock, self._knows_memory = _USAGE.get(pool, unknown)
        self._short: set[str] = set()  # tasks whose last execution took little time

    def __call__(self, job: Job) -> JobResult:
        """Run a job to its end in this thread."""
        if job.measured:
            return self._measured(job)
        return self._run(job)[0]

    def _measured(self, job: Job) -> JobResult:
        """The same, for somebody who wants to know what it took."""
        clock = None if job.task in self._short else self._cpu_clock
        before, header = 0.0 if clock is None else clock(), job.header
        result, request = self._run(job)
        if result.runtime_s < MEASURED_MIN_S:
            if clock is not None and len(self._short) < SHORT_MAX:
                self._short.add(job.task)
        elif clock is None:
            self._short.discard(job.task)
        else:
            result.cpu_s = round(clock() - before, 6)
            if self._knows_memory:
                usage = resource.getrusage(resource.RUSAGE_SELF)
                result.memory_peak_bytes = usage.ru_maxrss * _MAXRSS_BYTES
        # A part of a chord is a part of a group.
        if request is not None and (header is None or header.group is not None) and request.chord:
            result.chord_id = _chord_id(request.chord)
        return result

    def _run(self, job: Job) -> tuple[JobResult, Context | None]:
        started = time.monotonic()
        self._witness(job)
        try:
            tracer = self._tracers.get(job.task) or self._tracer(job.task)
            request, body = self.open(job)
        except Refusal as refusal:
            return _refused(refusal), None
        except Exception as exc:  # noqa: BLE001 - becomes the result
            return self._unopened(job, exc, started), None
        try:
            if tracer.task.is_async:
                traced = drive(lambda: tracer.run_async(request, body.args, body.kwargs))
            else:
                traced = tracer(request, body.args, body.kwargs)
        except Exception as exc:  # noqa: BLE001 - a limit that struck next to the body
            traced = tracer.failed(request, body.args, body.kwargs, exc)
        return self._result(traced, time.monotonic() - started), request

    async def run_async(self, job: Job) -> JobResult:
        """Run a job whose body is an `async def` on the loop of the caller."""
        started = time.monotonic()
        self._witness(job)
        try:
            tracer = self._tracers.get(job.task) or self._tracer(job.task)
            request, body = self.open(job)
        except Refusal as refusal:
            return _refused(refusal)
        except Exception as exc:  # noqa: BLE001 - becomes the result
            return await asyncio.to_thread(self._unopened, job, exc, started)
        traced = await tracer.run_async(request, body.args, body.kwargs)
        result = self._result(traced, time.monotonic() - started)
        if job.measured and request.chord:
            result.chord_id = _chord_id(request.chord)
        return result

    def _witness(self, job: Job) -> None:
        """Where the task runs the clock may be behind the one that sent the job."""
        clock = self.app.clock
        if job.clock > clock.value:
            clock.adjust(job.clock)

    def _result(self, traced: Traced, runtime_s: float) -> JobResult:
        return JobResult(
            traced.state,
            runtime_s,
            traced.text,
            traced.traceback,
            traced.requeue,
            clock=traced.clock or self.app.clock.value,
        )

    def is_async(self, job: Job) -> bool:
        """Whether the body of the job's task is an `async def`."""
        task = self.app.tasks.get(job.task)
        return task is not None and task.is_async

    def _tracer(self, name: str) -> Tracer:
        tracer = self._tracers[name] = tracer_class(self.app)(
            self.app.tasks[name],
            self.app,
            self.hostname,
            after_body=disarm_soft_limit,
            ended_by=(JobEnded, *_GREENLET_EXIT),
        )
        return tracer

    def _unopened(self, job: Job, exc: Exception, started: float) -> JobResult:
        """Not foreseen: the caller is told all the same."""
        try:
            header = job.header or TaskHeader(task=job.task, id=job.id)
            fail(self.app, None, JobContext(job, header, TaskBody([], {}), self.hostname), exc)
        except Exception:
            logger.exception("task %s[%s]: its failure was not recorded", job.task, job.id)
        return failure_of(exc, time.monotonic() - started)

    def open_or_empty(self, job: Job, header: TaskHeader) -> Context:
        """The request of a job; without arguments where its body cannot be read."""
        try:
            return self.open(job)[0]
        except Refusal:
            return JobContext(job, header, TaskBody([], {}), self.hostname)

    def open(self, job: Job) -> tuple[Context, TaskBody]:
        """Decode a job; raises `Refusal`."""
        if job.header is None and "task" not in job.headers:
            return self._open_v1(job)
        header = job.header or read_header(job.headers)
        body = read_body(
            job.body,
            job.content_type,
            job.content_encoding,
            compression=header.compression,
            accept=self._accept,
            limits=self._limits,
        )
        if body.hybrid is not None:
            header = hybrid_header(_given(header), body.hybrid)
        return JobContext(job, header, body, self.hostname), body

    def _open_v1(self, job: Job) -> tuple[Context, TaskBody]:
        decoded = job.decoded
        if decoded is None:
            decoded = decode_v1(
                job.body,
                job.content_type,
                job.content_encoding,
                compression=job.headers.get("compression"),
                accept=self._accept,
                limits=self._limits,
            )
        header, body = read_v1(decoded)
        own = structs.replace(job, headers=user_headers(job.headers))
        return JobContext(own, header, body, self.hostname), body


def decode_v1(
    body: Any,
    content_type: str,
    content_encoding: str,
    *,
    compression: str | None,
    accept: frozenset[str],
    limits: Limits,
) -> Any:
    """The content of a message whose headers tell nothing; raises `Refusal`."""
    if compression:
        body = decompress(as_bytes(body, limits), compression, limits.body_bytes)
    return decode(body, content_type, content_encoding, accept=accept, limits=limits)


class JobContext(Context):
    """The request as a task sees it; most of it is only looked up when somebody asks."""

    def __init__(self, job: Job, header: TaskHeader, body: TaskBody, hostname: str) -> None:
        self.__dict__ = {
            "id": header.id,
            "task": header.task,
            "args": body.args,
            "kwargs": body.kwargs,
            "chord": body.chord,
            "chain": body.chain,
            "callbacks": body.callbacks,
            "errbacks": body.errbacks,
            "ignore_result": header.ignore_result,
            "headers": job.headers,
            "hostname": hostname,
            "called_directly": False,
            "_told": job.told,
            "_job": job,
            "_header": header,
        }

    def __repr__(self) -> str:
        for name in (*_FROM_HEADER, *_FROM_JOB):
            getattr(self, name)
        shown = {name: value for name, value in self.__dict__.items() if name[0] != "_"}
        return f"<Context: {shown!r}>"


class _Later:
    """A field of an `JobContext` that is set when it is first read."""

    def __init__(self, name: str, read: Callable[[Any], Any]) -> None:
        self._name = name
        self._read = read

    def __get__(self, context: JobContext, owner: type[JobContext]) -> Any:
        value = context.__dict__[self._name] = self._read(context.__dict__)
        return value


_FROM_HEADER = (
    "retries", "eta", "expires", "timelimit", "group", "group_index", "parent_id", "shadow",
    "origin", "lang", "argsrepr", "kwargsrepr", "replaced_task_nesting", "stamped_headers",
    "stamps",
)  # fmt: skip
_FROM_JOB = ("reply_to", "correlation_id", "delivery_info", "properties", "content_type")

for _name in _FROM_HEADER:
    setattr(JobContext, _name, _Later(_name, lambda f, n=_name: getattr(f["_header"], n)))  # type: ignore[misc]
for _name in _FROM_JOB:
    setattr(JobContext, _name, _Later(_name, lambda f, n=_name: getattr(f["_job"], n)))  # type: ignore[misc]
JobContext.root_id = _Later(  # type: ignore[assignment]
    "root_id", lambda fields: fields["_header"].root_id or fields["_header"].id
)


def _chord_id(chord: Any) -> str | None:
    """The id of the task that a chord ends with, as its signature says."""
    options = chord.get("options") if isinstance(chord, Mapping) else None
    found = options.get("task_id") if isinstance(options, Mapping) else None
    return found if isinstance(found, str) else None


def _given(header: TaskHeader) -> dict[str, Any]:
    return {name: value for name, value in structs.asdict(header).items() if value is not None}


def _refused(refusal: Refusal) -> JobResult:
    return JobResult(UNDECODABLE, 0.0, refusal.text, "", False, refusal.reason)
