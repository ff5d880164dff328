"""How the tests are dealt out when several processes run them (`pytest -n 4 --dist loadgroup`).

What stays together: a file, which may share what is slow to start, but not its two brokers, which
share nothing; a line of the interoperability tests; and the tests of the pipeline, which share two
Sparks: one for those that build tables again and again, one for the others. The groups that take
longest go first, so that no process is left with one of them at the end.

xdist has groups of its own, by mark; it writes them into the ids of tests where pytest 9.2 does not
look for them any more, and then deals out single tests.
"""

from __future__ import annotations

import re
from typing import Any

from xdist.scheduler import LoadScopeScheduling

PIPELINE, BUILDS = "tests/pipeline", "tests/pipeline builds"
BUILDING = ("test_build.py", "test_checking.py", "test_delta.py", "test_removals.py")
LINE = re.compile(r"\w+-to-\w+-\w+-on-(?:redis|amqp)(?:-rpc)?")
# The files that take longest; of the others the one with most tests comes first.
LONG = (
    "test_docs_frameworks.py",
    "test_packaging.py",
    "test_cli.py",
    "test_cli_worker.py",
    "test_dashboard.py",
    "test_dashboard_load.py",
    "test_monitoring.py",
    "test_mingle.py",
    "test_elections.py",
    "test_election_refusals.py",
    "test_worker_outcomes.py",
    "test_embedded.py",
    "test_demo.py",
    "test_control_load.py",
    "test_celery_commands.py",
    "test_cli_control.py",
    "test_mixed_cluster.py",
    "test_registers.py",
    "test_half_open.py",
    "test_worker_shutdown.py",
    "test_event_runs.py",
    "test_breaks.py",
    "test_consumer_timeout.py",
    "test_values.py",
    "test_confirms.py",
    "test_worker_resources.py",
    "test_recorder.py",
    "test_record_log.py",
    "test_cli_history.py",
    "test_cli_events.py",
    "test_worker_bad_input.py",
    "test_node_names.py",
    "test_rate_limits.py",
    "test_gossip.py",
    "test_redelivery.py",
    "test_worker_losses.py",
    "test_receiver.py",
    "test_statedb.py",
    "test_pausing.py",
)
# What needs nothing but this process comes first, before others leave threads and sockets in it.
SHORT = ("tests/unit/", "tests/properties/")


def group_of(nodeid: str) -> str:
    """The group of a test, by its id."""
    path, _, test = nodeid.partition("::")
    if path.startswith(f"{PIPELINE}/"):
        return BUILDS if path.endswith(BUILDING) else PIPELINE
    choices = test.partition("[")[2].rstrip("]")
    if line := LINE.search(choices):
        return line.group()
    broker = next((kind for kind in choices.split("-") if kind in ("redis", "amqp")), "")
    return f"{path} {broker}".rstrip()


def rank(group: str) -> int:
    """When it is a group's turn: the smallest goes first."""
    if group in {PIPELINE, BUILDS}:
        return -2
    if group.startswith(SHORT):
        return -1
    name = group.partition(" ")[0].rpartition("/")[2]
    return LONG.index(name) if name in LONG else len(LONG)


class Groups(LoadScopeScheduling):
    """Deals out whole groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=rank), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if node in self.registered_collections:  # else it is new, and has not looked for tests yet
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Take a process out; give the test during which it died, and deal out the others again.

        xdist would also deal out again the test that killed it, and groups that are done, which
        then have a process wait for ever.
        """
        left = [
            (group, test)
            for group, tests in self.assigned_work.pop(node).items()
            for test, done in tests.items()
            if not done
        ]
        for group, test in left[1:]:
            self.workqueue.setdefault(group, {})[test] = False
        for other in self.assigned_work:
            self._reschedule(other)
        return left[0][1] if left else None
