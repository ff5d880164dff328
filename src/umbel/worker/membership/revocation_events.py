"""What a worker tells of revocations: that it knows of them from now on.

A `worker-revocation` event has the revoked `ids`, the `stamp` of the revoke (the wall clock of
whoever revoked) and the `method` by which this worker learned of it: `revoke`, `terminate`,
`revoke_by_stamped_headers` or `mingle`. Its own clock and time say since when the worker knows, so
that a history can tell who ran a task in spite of it. Where the stamps differ, `stamps` has one for
each id and `stamp` is the latest. Revoked headers are told as `headers`: `["name", value]` each.

Who learns of very many at once tells the first `TOLD_MAX` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from umbel.cluster.revocations import TASK, Revocation

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

KIND: Final = "worker-revocation"
EVENT_MAX: Final = 500
TOLD_MAX: Final = 5_000


def tell_revoked(worker: Worker, changed: Sequence[Revocation], method: str) -> None:
    """Send the events, if events of workers are sent."""
    events = worker.events
    if events is None or not events.sends("worker"):
        return
    told = changed[:TOLD_MAX]
    for start in range(0, len(told), EVENT_MAX):
        events.send(KIND, method=method, **_fields(told[start : start + EVENT_MAX]))


def _fields(part: Sequence[Revocation]) -> dict[str, Any]:
    tasks = [one for one in part if one.kind == TASK]
    headers = [one for one in part if one.kind != TASK]
    fields: dict[str, Any] = {"ids": [one.key for one in tasks]}
    fields["stamp"] = max(one.stamp for one in part)
    if any(one.stamp != fields["stamp"] for one in tasks):
        fields["stamps"] = [one.stamp for one in tasks]
    if headers:
        fields["headers"] = [msgspec.json.decode(one.key) for one in headers]
    return fields
