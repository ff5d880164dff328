"""The steps of the two blueprints, one file each."""

from __future__ import annotations

from umbel.worker.blueprint import Step
from umbel.worker.steps.agent import AgentStep
from umbel.worker.steps.autoscaler import AutoscalerStep
from umbel.worker.steps.connection import ConnectionStep
from umbel.worker.steps.consumer import ConsumerStep
from umbel.worker.steps.control import ControlStep
from umbel.worker.steps.delayed_delivery import DelayedDeliveryStep
from umbel.worker.steps.events import EventsStep
from umbel.worker.steps.evloop import EvloopStep
from umbel.worker.steps.gossip import GossipStep
from umbel.worker.steps.heart import HeartStep
from umbel.worker.steps.hub import HubStep
from umbel.worker.steps.mingle import MingleStep
from umbel.worker.steps.pool import PoolStep
from umbel.worker.steps.statedb import StateDBStep
from umbel.worker.steps.tasks import TasksStep
from umbel.worker.steps.timer import TimerStep

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
