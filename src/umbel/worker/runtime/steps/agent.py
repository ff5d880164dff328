"""Agent: an object of the user's that lives as long as the consumer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from umbel.exceptions import ImproperlyConfigured
from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.options import WorkerOptions


class AgentStep(Step):
    """Makes the class named in `worker_agent` with the connection, starts it and stops it."""

    name = "Agent"
    requires = ("Connection",)

    def __init__(self, parent: Consumer, **options: Any) -> None:
        self._kind = _load(parent.app.conf.worker_agent)
        self.agent: Any = None

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """Off unless the setting names a class."""
        return "" if app.conf.worker_agent is not None else "worker_agent is not set"

    def start(self, parent: Consumer) -> None:
        """A new agent for every connection."""
        self.agent = parent.agent = self._kind(parent.connection)
        self.agent.start()

    def stop(self, parent: Consumer) -> None:
        """Stop it, if it got that far."""
        agent, self.agent, parent.agent = self.agent, None, None
        if agent is not None:
            agent.stop()


def _load(setting: Any) -> Any:
    if setting is None or not isinstance(setting, str):
        return setting
    module, _, name = setting.replace(":", ".").rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ImproperlyConfigured(
            f"worker_agent names {setting!r}, which can not be loaded: {exc}"
        ) from exc
