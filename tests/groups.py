"""How the tests are dealt out when several processes run them (`pytest -n 4 --dist loadgroup`).

What stays together: a file, which may share what is slow to start, but not its two brokers, which
share nothing; and a line of the interoperability tests. The groups that take longest go first, so
that no process is left with one of them at the end.

xdist has groups of its own, by mark; it writes them into the ids of tests where pytest 9.2 does not
look for them any more, and then deals out single tests.
"""

from __future__ import annotations

import re
from typing import Any

from xdist.scheduler import LoadScopeScheduling

LINE = re.compile(r"\w+-to-\w+-\w+-on-(?:redis|amqp)(?:-rpc)?")


def group_of(nodeid: str) -> str:
    """The group of a test, by its id."""
    path, _, test = nodeid.partition("::")
    choices = test.partition("[")[2].rstrip("]")
    if line := LINE.search(choices):
        return line.group()
    broker = next((kind for kind in choices.split("-") if kind in ("redis", "amqp")), "")
    return f"{path} {broker}".rstrip()


class Groups(LoadScopeScheduling):
    """Deals out whole groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        longest = max(self.workqueue, key=lambda group: LONG_S.get(group, 0))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)


# About how long the longest ones take alone.
LONG_S: dict[str, float] = {}
