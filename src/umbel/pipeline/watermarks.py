"""Where the log ends: the moment up to which every recorder has written what it received.

A recorder writes what it has received every few seconds, so the log of several recorders is
complete only up to the one that is furthest behind. The *watermark* of a recorder is the greatest
time of receipt that it has written. Who is lost, and which elections are open, is judged at the
least watermark. Judged at the greatest, a worker would be lost if its last heartbeats are with the
slower recorder and not yet written.

Every start of a recorder gives it another name, so recorders that have ended must not count: only
those count that have written within `SILENT_S` of the newest one.

An import, or a recorder that works off a backlog, receives events long after they were sent. Such a
receipt does not show that somebody was listening to the cluster at that moment. Events that were
received more than `LATE_S` after they were sent therefore move no watermark, unless there are no
others in the whole log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

# Longer: after a recorder has ended or was restarted, lost workers are noticed later. Shorter: a
# recorder that writes less often (`--roll-age`) makes healthy workers lost.
SILENT_S: Final = 300.0
# Longer: more imports count as listening. Shorter: workers whose clocks are behind do not count.
LATE_S: Final = 300.0
# What has to be known of each recorder, as aggregates over rows of the log; both merge by `max`.
RECEIPTS: Final = (
    f"max(received) FILTER (WHERE received - timestamp <= {LATE_S}D) AS prompt",
    "max(received) AS newest",
)


def watermarks(receipts: Iterable[tuple[str, float | None, float]]) -> dict[str, float]:
    """The watermarks, of rows (recorder, prompt, newest); see `RECEIPTS`."""
    told = list(receipts)
    prompt = {recorder: at for recorder, at, _ in told if at is not None}
    return prompt or {recorder: at for recorder, _, at in told}


def log_ends(watermarks: Mapping[str, float]) -> float:
    """Where the log ends that has these watermarks, Unix seconds; 0 if there are none."""
    newest = max(watermarks.values(), default=0.0)
    return min((one for one in watermarks.values() if newest - one <= SILENT_S), default=0.0)
