"""Between values and what is stored: documents, chord parts, saved groups.

Everything that is read here was written by somebody else. What cannot be read becomes a failed
result whose exception says why, so that a caller who waits is told instead of waiting on.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from umbel.app.results.async_result import AsyncResult
from umbel.app.results.group_result import GroupResult
from umbel.exceptions import BackendError, SecurityError
from umbel.wire.compression import compress, decompress
from umbel.wire.content import (
    Encoded,
    EncodeError,
    accept_set,
    decode,
    encode,
    serializer_type,
)
from umbel.wire.failures import decode_failure, encode_failure
from umbel.wire.limits import Refusal
from umbel.wire.reprs import safe_repr
from umbel.wire.results import (
    COMPRESSED_PREFIX,
    EXCEPTION_STATES,
    extended_fields,
    meta_document,
)
from umbel.wire.times import format_time

if TYPE_CHECKING:
    from umbel.app.context import Context
    from umbel.app.umbel import Umbel


def pending(task_id: str) -> dict[str, Any]:
    """What is known of a task that nobody has reported about."""
    return {
        "status": "PENDING",
        "result": None,
        "traceback": None,
        "children": None,
        "task_id": task_id,
    }


class Codec:
    """Encodes and decodes as the settings of one application say."""

    def __init__(self, app: Umbel) -> None:
        conf = app.conf
        self._app = app
        self.serializer: str = conf.result_serializer
        self.compression: str | None = conf.result_compression
        self.extended: bool = conf.result_extended
        self._limits = app.limits

    @cached_property
    def _content_type(self) -> str:
        return serializer_type(self.serializer)

    @cached_property
    def _accept(self) -> frozenset[str]:
        conf = self._app.conf
        return accept_set((*(conf.result_accept_content or conf.accept_content), self.serializer))

    def dumps(self, value: Any) -> bytes:
        """The stored form of a value; raises when the serializer cannot write it."""
        return self._packed(encode(value, self.serializer, self._limits).body)

    def _packed(self, body: bytes) -> bytes:
        if not self.compression:
            return body
        packed, content_type = compress(body, self.compression)
        return COMPRESSED_PREFIX + content_type.encode("ascii") + b"\0" + packed

    def loads(self, raw: bytes, content_type: str | None = None, encoding: str = "utf-8") -> Any:
        """The value behind a stored form; raises `Refusal` only."""
        limits = self._app.limits
        if raw.startswith(COMPRESSED_PREFIX):
            method, _, packed = raw[len(COMPRESSED_PREFIX) :].partition(b"\0")
            raw = decompress(packed, method.decode("ascii", "replace"), limits.body_bytes)
        chosen = content_type or self._content_type
        return decode(raw, chosen, encoding, accept=self._accept, limits=limits)

    # -- documents ---------------------------------------------------------------------

    def stored(
        self, task_id: str, result: Any, state: str, traceback: str | None, request: Context | None
    ) -> bytes:
        """The document of a task as it is stored; `EncodeError` if its result has no such form."""
        return self._packed(self.document(task_id, result, state, traceback, request).body)

    def document(
        self, task_id: str, result: Any, state: str, traceback: str | None, request: Context | None
    ) -> Encoded:
        """The document of a task in the result serializer, not compressed."""
        children = None
        if request is not None:
            children = [child.as_tuple() for child in request.children]
        extended = self._extended(request) if self.extended and request is not None else None
        document = meta_document(
            task_id,
            state,
            self.storable(result, state),
            traceback=traceback,
            children=children,
            date_done=format_time(self._app.now()),
            group_id=getattr(request, "group", None),
            parent_id=getattr(request, "parent_id", None),
            extended=extended,
        )
        try:
            return encode(document, self.serializer, self._limits)
        except EncodeError:
            if not extended:
                raise
        # The arguments came by the serializer of the message, which may carry more than this one.
        document.update((name, self._writable(value)) for name, value in extended.items())
        return encode(document, self.serializer, self._limits)

    def _writable(self, value: Any) -> Any:
        try:
            encode(value, self.serializer, self._limits)
        except EncodeError:
            return safe_repr(value)
        return value

    def storable(self, result: Any, state: str) -> Any:
        """Failures and result handles in the form that is stored."""
        if state in EXCEPTION_STATES and isinstance(result, BaseException):
            return encode_failure(result, self.serializer)
        if isinstance(result, (AsyncResult, GroupResult)):
            return result.as_tuple()
        return result

    def _extended(self, request: Context) -> dict[str, Any]:
        delivery = request.delivery_info or {}
        return extended_fields(
            name=request.task,
            args=request.args,
            kwargs=request.kwargs,
            worker=request.hostname,
            retries=request.retries,
            queue=delivery.get("routing_key"),
            stamped_headers=request.stamped_headers,
            stamps=request.stamps,
        )

    def read(self, raw: bytes | None, task_id: str) -> dict[str, Any]:
        """The document with its failure as an exception; PENDING when there is none."""
        if raw is None:
            return pending(task_id)
        try:
            return self.opened(self.loads(raw), task_id)
        except Refusal as refusal:
            return _unreadable(task_id, refusal.text)

    def opened(self, meta: Any, task_id: str) -> dict[str, Any]:
        """A decoded document, checked, with its failure as an exception."""
        if not isinstance(meta, dict) or not isinstance(meta.get("status"), str):
            return _unreadable(task_id, "it is not a mapping with a status")
        meta["task_id"] = task_id
        meta.setdefault("result", None)
        if meta["status"] in EXCEPTION_STATES:
            meta["result"] = self.failure(meta["result"])
        return meta

    def failure(self, data: Any) -> BaseException:
        """The exception behind a stored failure; a forged one is named for what it is."""
        try:
            return decode_failure(data)
        except SecurityError as exc:
            return exc

    # -- chord parts -------------------------------------------------------------------

    def part(self, task_id: str, state: str, result: Any) -> bytes:
        """One finished part of a chord."""
        return self.dumps([1, task_id, state, self.storable(result, state)])

    def read_part(self, raw: bytes) -> tuple[str, str, Any]:
        """Id, state and result of a finished part; the result of a failed one is an exception."""
        try:
            part = self.loads(raw)
            _, task_id, state, result = part
        except (Refusal, TypeError, ValueError) as exc:
            error = BackendError(f"a part of the chord cannot be read: {exc}")
            return "?", "FAILURE", error
        if state in EXCEPTION_STATES:
            result = self.failure(result)
        return str(task_id), str(state), result


def _unreadable(task_id: str, why: str) -> dict[str, Any]:
    error = BackendError(f"the stored result of task {task_id} cannot be read: {why}")
    return {**pending(task_id), "status": "FAILURE", "result": error}
