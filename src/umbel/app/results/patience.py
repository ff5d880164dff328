"""How long a backend keeps trying before it gives up.

`result_backend_transport_options['retry_policy']` bounds the tries after a broken connection.
With `result_backend_always_retry` the wider bounds of that family of settings count instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from umbel.cluster.backoff import Backoff

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

_POLICY: dict[str, Any] = {
    "max_retries": 20, "interval_start": 0, "interval_step": 0.2, "interval_max": 1,
}  # fmt: skip


def pauses_s(app: Umbel) -> Iterator[float]:
    """The pauses before each further try; ends when there is none."""
    conf = app.conf
    if conf.result_backend_always_retry:
        first_ms = max(1, conf.result_backend_base_sleep_between_retries_ms)
        longest_ms = conf.result_backend_max_sleep_between_retries_ms
        backoff, tries = Backoff(first_ms / 1000, longest_ms / 1000), 0
        while tries < conf.result_backend_max_retries:
            tries += 1
            yield backoff.pause_s(tries)
        return
    policy = {**_POLICY, **(conf.result_backend_transport_options.get("retry_policy") or {})}
    limit = policy["max_retries"]
    tries = 0
    while limit is None or tries < limit:
        yield min(
            float(policy["interval_start"]) + tries * float(policy["interval_step"]),
            float(policy["interval_max"]),
        )
        tries += 1
