"""What a worker has refused of what others sent it: how much, from where, and why.

Each barrier counts for itself and logs the first of each kind; here the counts come together, for
`inspect stats`, the metrics and the heartbeats. Heartbeats carry what should not come at all, so
that `umbel status` and `umbel doctor` can report it. Left out there are `USUAL` reasons: commands
that came late or are not allowed here, replies that nobody waits for any more, elections in which
this worker takes no part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.cluster.mingle import BAD_REPLY
from umbel.worker.control.panel import DENIED, EXPIRED, UNKNOWN
from umbel.worker.membership.gossip import NOT_FOR_ELECTION

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

Refused = dict[str, dict[str, int]]

USUAL: Final = frozenset({EXPIRED, DENIED, UNKNOWN, BAD_REPLY, NOT_FOR_ELECTION, "stale"})


def refused(worker: Worker) -> Refused:
    """The counts by source and reason."""
    panel = worker.panel
    return {
        "tasks": dict(worker.counters.refused),
        "control": dict(panel.refused) if panel is not None else {},
        "events": dict(worker.gossip.counts),
        "replies": dict(worker.app.control.mailbox.counts),
        "greetings": worker.mingling.refused(),
    }


def malformed(worker: Worker) -> Refused:
    """The counts without usual reasons, where there are any."""
    found = {
        source: {reason: count for reason, count in counts.items() if reason not in USUAL}
        for source, counts in refused(worker).items()
    }
    return {source: counts for source, counts in found.items() if counts}
