"""What crosses into a pool and what comes back: plain values, so that a process can carry them.

An `Job` is one message to execute, still encoded: the side that runs the task decodes the body,
so that a process pool moves bytes and never objects. An `JobResult` is what the consumer has to
know to settle the message and to send events; results themselves go to the result backend from
where the task ran.

Both travel between processes as msgpack, never pickle. msgpack has no integers above 64 bits, no
lone surrogates, and no dates, decimals and the like (msgspec would write them as text). Headers and
stamps may hold all of these, so such values are wrapped in extension types. A job that still
cannot be encoded (an object of no plain type) is refused with `JobError` before it is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from umbel.wire.jsontext import dumps_json, loads_json
from umbel.wire.tasks import TaskHeader

_EXT_INTEGER = 1
_EXT_TEXT = 2
_EXT_JSON = 3
_RICH = (datetime, date, time, Decimal, UUID)
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
_RESULT_TEXTS = ("state", "text", "traceback", "detail")


class Job(msgspec.Struct, array_like=True, gc=False):
    """One message to execute.

    `headers` are the caller's own where `header` holds the protocol's, else all of them.
    `clock` is that of the job itself: what the task sends comes after it. `told` says whether
    anybody wants the text of its result, `measured` whether anybody wants to know what it took.
    `decoded` is set when the body had to be decoded on receipt (protocol 1), and not carried to
    another process: dates, decimals and ids would arrive there as text.
    """

    id: str
    task: str
    headers: dict[str, Any]
    body: bytes
    content_type: str
    content_encoding: str
    exchange: Any = None
    routing_key: Any = None
    priority: Any = None
    redelivered: bool = False
    reply_to: Any = None
    correlation_id: Any = None
    decoded: Any = None
    header: TaskHeader | None = None
    clock: int = 0
    told: bool = True
    measured: bool = False

    @property
    def delivery_info(self) -> dict[str, Any]:
        """How its message came here."""
        return {
            "exchange": self.exchange,
            "routing_key": self.routing_key,
            "priority": self.priority,
            "redelivered": self.redelivered,
        }

    @property
    def properties(self) -> dict[str, Any]:
        """What its message said about itself."""
        return {"reply_to": self.reply_to, "correlation_id": self.correlation_id}


class JobResult(msgspec.Struct, array_like=True, gc=False):
    """How a job ended: `text` is the repr of the result or of the exception.

    `clock` is that of the side that ran it, at the end; of a retry, before it was sent. The last
    three are for events: what it took, where that was measured, and the task that ends its chord.
    """

    state: str
    runtime_s: float
    text: str
    traceback: str
    requeue: bool = False
    detail: str = ""
    clock: int = 0
    cpu_s: float | None = None
    memory_peak_bytes: int | None = None
    chord_id: str | None = None


class JobError(ValueError):
    """A job holds something that cannot be handed to another process."""


def encode_job(job: Job) -> bytes:
    """The job as msgpack; raises `JobError`, naming the job, when that is impossible."""
    header = job.header
    if _all_plain(job.headers) and (header is None or _all_plain(header.stamps)):
        try:
            return _encoder.encode(job)
        except (OverflowError, UnicodeEncodeError):
            pass
        except (TypeError, ValueError, RecursionError) as exc:
            raise _refused(job, exc) from exc
    try:
        return _encoder.encode(_wrapped(msgspec.to_builtins(job, builtin_types=(bytes, *_RICH))))
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise _refused(job, exc) from exc


def portable(job: Job) -> Job:
    """The job as another process gets it: what was decoded here is decoded there again."""
    return job if job.decoded is None else msgspec.structs.replace(job, decoded=None)


def decode_job(data: bytes | memoryview) -> Job:
    """The inverse of `encode_job`."""
    return _job_decoder.decode(data)


def encode_result(result: JobResult) -> bytes:
    """The result as msgpack; lone surrogates in its texts become question marks."""
    try:
        return _encoder.encode(result)
    except UnicodeEncodeError:
        texts = {name: _printable(getattr(result, name)) for name in _RESULT_TEXTS}
        return _encoder.encode(msgspec.structs.replace(result, **texts))


def decode_result(data: bytes | memoryview) -> JobResult:
    """The inverse of `encode_result`."""
    return _result_decoder.decode(data)


def _refused(job: Job, exc: BaseException) -> JobError:
    return JobError(
        f"job {job.id} of task {job.task!r} cannot be handed to another process: {exc}; "
        "headers and properties may hold plain values only"
    )


def _all_plain(values: Mapping[str, Any] | None) -> bool:
    return not values or set(map(type, values.values())) <= _PLAIN


def _wrapped(value: Any) -> Any:
    """The value with what msgpack lacks put into extension types; depth was capped on receipt."""
    if isinstance(value, dict):
        return {key: _wrapped(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_wrapped(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_EXT_INTEGER, b"%x" % value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(_EXT_TEXT, value.encode("utf-8", "surrogatepass"))
    if isinstance(value, _RICH):
        return msgspec.msgpack.Ext(_EXT_JSON, dumps_json(value))
    return value


def _unwrapped(code: int, data: memoryview) -> Any:
    if code == _EXT_INTEGER:
        return int(bytes(data), 16)
    if code == _EXT_TEXT:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == _EXT_JSON:
        return loads_json(bytes(data))
    return msgspec.msgpack.Ext(code, bytes(data))


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Job, ext_hook=_unwrapped)
_result_decoder = msgspec.msgpack.Decoder(JobResult)
