"""What a run has found, as it is kept in JSON.

    figures: {figure: {broker: {contestant: [a value per round]}}}

beside the date, the machine, the versions, the variant of each contestant that was taken, the
growth of costs, and the bars. Medians are worked out on reading.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

BROKERS = {"redis": "Redis", "amqp": "RabbitMQ"}
TIMES = "\N{MULTIPLICATION SIGN}"
NONE = "\N{EN DASH}"


class Results:
    """The figures of a run."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @classmethod
    def read(cls, path: Path) -> Results:
        """From a file."""
        return cls(json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """To a file; three digits after the point are more than enough."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(self.data), indent=1, ensure_ascii=False) + "\n")

    def add(self, figure: str, broker: str, contestant: str, value: float) -> None:
        """One value of one round."""
        of_figure = self.data.setdefault("figures", {}).setdefault(figure, {})
        of_figure.setdefault(broker, {}).setdefault(contestant, []).append(value)

    def median(self, figure: str, broker: str, contestant: str) -> float | None:
        """Over the rounds; None where there is none."""
        values = self.data.get("figures", {}).get(figure, {}).get(broker, {}).get(contestant)
        return statistics.median(values) if values else None

    def contestants(self, broker: str, figure: str | None = None) -> list[str]:
        """Who has a value there, in the order of the run."""
        figures = self.data.get("figures", {})
        chosen = figures.values() if figure is None else [figures.get(figure, {})]
        found = {name for of_figure in chosen for name in of_figure.get(broker, {})}
        return [name for name in self.data.get("contestants", {}) if name in found]

    def label(self, contestant: str) -> str:
        """Its name in tables."""
        return str(self.data["contestants"][contestant]["label"])

    def fastest_peer(self, figure: str, broker: str) -> str | None:
        """Which peer has the highest median."""
        medians = {
            name: self.median(figure, broker, name) or 0.0
            for name in self.contestants(broker, figure)
            if name != "umbel"
        }
        return max(medians, key=lambda name: medians[name]) if medians else None

    def ratio(
        self, figure: str, broker: str, contestant: str, its_figure: str = ""
    ) -> float | None:
        """Umbel's median over a peer's, of the same figure unless another is given."""
        own = self.median(figure, broker, "umbel")
        its = self.median(its_figure or figure, broker, contestant)
        return own / its if own is not None and its else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3) if abs(value) < 100 else round(value, 1)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
