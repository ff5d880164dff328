"""The steps of the two blueprints, one file each."""

from __future__ import annotations

from umbel.worker.blueprint import Step
from umbel.worker.runtime.steps.agent import AgentStep
from umbel.worker.runtime.steps.autoscaler import AutoscalerStep
from umbel.worker.runtime.steps.connection import ConnectionStep
from umbel.worker.runtime.steps.consumer import ConsumerStep
from umbel.worker.runtime.steps.control import ControlStep
from umbel.worker.runtime.steps.delayed_delivery import DelayedDeliveryStep
from umbel.worker.runtime.steps.events import EventsStep
from umbel.worker.runtime.steps.evloop import EvloopStep
from umbel.worker.runtime.steps.gossip import GossipStep
from umbel.worker.runtime.steps.heart import HeartStep
from umbel.worker.runtime.steps.hub import HubStep
from umbel.worker.runtime.steps.mingle import MingleStep
from umbel.worker.runtime.steps.pool import PoolStep
from umbel.worker.runtime.steps.statedb import StateDBStep
from umbel.worker.runtime.steps.tasks import TasksStep
from umbel.worker.runtime.steps.timer import TimerStep

WORKER_STEPS: tuple[type[Step], ...] = (
    TimerStep,
    HubStep,
    PoolStep,
    AutoscalerStep,
    StateDBStep,
    ConsumerStep,
)
CONSUMER_STEPS: tuple[type[Step], ...] = (
    ConnectionStep,
    MingleStep,
    EventsStep,
    GossipStep,
    HeartStep,
    ControlStep,
    TasksStep,
    DelayedDeliveryStep,
    EvloopStep,
    AgentStep,
)
