"""What is promised of Umbel's speed, and whether a run has shown it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import TIMES, Results


@dataclass(frozen=True, slots=True)
class Bar:
    """One promise: `figure` of the results has to be at least, or at most, `wanted`."""

    name: str
    wanted: float
    figure: Callable[[Results], float | None]
    unit: str = TIMES
    at_most: bool = False

    def check(self, results: Results) -> dict[str, Any] | None:
        """How it went; None where it was not measured."""
        got = self.figure(results)
        if got is None:
            return None
        met = got <= self.wanted if self.at_most else got >= self.wanted
        words = {"name": self.name, "unit": self.unit, "at_most": self.at_most}
        return words | {"wanted": self.wanted, "got": got, "met": met}


def _over(
    figure: str, broker: str, peer: str, peer_figure: str = ""
) -> Callable[[Results], float | None]:
    return lambda results: results.ratio(figure, broker, peer, peer_figure)


def _over_fastest(figure: str, broker: str) -> Callable[[Results], float | None]:
    def found(results: Results) -> float | None:
        fastest = results.fastest_peer(figure, broker)
        return None if fastest is None else results.ratio(figure, broker, fastest)

    return found


def _own(figure: str, broker: str) -> Callable[[Results], float | None]:
    return lambda results: results.median(figure, broker, "umbel")


def _growth(results: Results) -> float | None:
    rates = (results.data.get("growth") or {}).get("umbel", {}).get("waiting", {})
    if "1000" not in rates or "1000000" not in rates:
        return None
    return float(rates["1000000"]) / float(rates["1000"])


BARS = (
    Bar("Redis, INCR, 2 processes: over Celery", 10, _over("incr-2", "redis", "celery")),
    Bar("Redis, INCR, 2 processes: over the fastest peer", 2, _over_fastest("incr-2", "redis")),
    Bar("RabbitMQ, INCR, 2 processes: over Celery", 3.5, _over("incr-2", "amqp", "celery")),
    Bar("RabbitMQ, INCR, 2 processes: over the fastest peer", 1.5, _over_fastest("incr-2", "amqp")),
    Bar(
        "`send_many` over Celery's `apply_async`, Redis",
        20,
        _over("send-batch", "redis", "celery", "send-one"),
    ),
    Bar("`apply_async` over Celery's, Redis", 2, _over("send-one", "redis", "celery")),
    *(
        Bar(f"{words}, {label}", wanted, _own(figure, broker), unit, at_most=True)
        for broker, label in (("redis", "Redis"), ("amqp", "RabbitMQ"))
        for words, wanted, figure, unit in (
            ("send to start at 100 tasks/s, p50", 2, "latency-p50-ms", "ms"),
            ("send to start at 100 tasks/s, p99", 10, "latency-p99-ms", "ms"),
            ("idle worker of 2 processes, CPU", 1, "idle-cpu-percent", "%"),
        )
    ),
    Bar("10⁶ waiting tasks over 10³ waiting tasks, tasks/s", 0.9, _growth),
)


def check(results: Results) -> list[dict[str, Any]]:
    """Every promise that was measured."""
    return [checked for bar in BARS if (checked := bar.check(results)) is not None]
