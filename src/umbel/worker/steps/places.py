"""The places of steps that have no work yet: Mingle and Gossip.

Their names, order, requirements and switches are fixed here, so that steps of users can require
them and `--show-blueprint` shows the whole consumer. Each moves to a file of its own when it gets
its work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.options import WorkerOptions


class Place(Step):
    """A step that is off, because it was switched off or because it has no work yet."""

    switch: ClassVar[str] = ""  # the worker option that switches it off

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """The switch, or that there is nothing to do."""
        if cls.switch and getattr(options, cls.switch):
            return "--" + cls.switch.replace("_", "-")
        return "not in this version"


class MingleStep(Place):
    """Where a starting worker will synchronise with the others."""

    name = "Mingle"
    requires = ("Events",)
    switch = "without_mingle"


class GossipStep(Place):
    """Where a worker will follow the others."""

    name = "Gossip"
    requires = ("Mingle",)
    switch = "without_gossip"
