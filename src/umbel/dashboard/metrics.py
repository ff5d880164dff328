"""What the dashboard tells Prometheus: the cluster as it sees it, and how it is itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

if TYPE_CHECKING:
    from umbel.dashboard.site import Site

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def page(site: Site) -> bytes:
    """All figures, as text."""
    registry = CollectorRegistry()
    registry.register(_Figures(site))
    return bytes(generate_latest(registry))


class _Figures(Collector):
    def __init__(self, site: Site) -> None:
        self._site = site

    def collect(self) -> Iterator[Metric]:
        site, live = self._site, self._site.live
        with live.lock:
            outcomes: dict[str, int] = {}
            for one in live.figures.types.values():
                for outcome, number in one.counts.items():
                    outcomes[outcome] = outcomes.get(outcome, 0) + number
            counters = {
                "events": ("Events heard.", live.state.event_count),
                "events_missing": ("Events that never came.", live.missing_count),
                "events_refused": ("What came and was no event.", live.refused_count),
                "reconnects": ("Lost connections to the broker.", live.reconnect_count),
                "election_disagreements": (
                    "Elections with two winners.", live.elections.disagreements,
                ),
            }  # fmt: skip
            gauges = {
                "broker_connected": ("Whether events are heard.", int(live.is_connected)),
                "nodes_alive": ("Nodes that are alive.", len(live.state.alive_workers())),
                "tasks_known": ("Tasks that are remembered.", len(live.state.tasks)),
                "live_clients": ("Browsers with live updates.", len(site.live_clients)),
            }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"umbel_dashboard_{name}", text, value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"umbel_dashboard_{name}", text, value)
        ended = CounterMetricFamily("umbel_cluster_ended", "Ended executions.", labels=["outcome"])
        for outcome, number in sorted(outcomes.items()):
            ended.add_metric([outcome], number)
        yield ended
        waiting = GaugeMetricFamily(
            "umbel_cluster_queue_length", "Waiting messages.", labels=["queue"]
        )
        for name, facts in sorted(site.polling.queues().items()):
            if facts.length is not None:
                waiting.add_metric([name], facts.length)
        yield waiting
