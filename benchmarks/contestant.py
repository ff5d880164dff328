"""One contestant at work, in the environment of its library: it tells what it is, or sends.

    python -m benchmarks.contestant NAME describe
    python -m benchmarks.contestant NAME fill KIND:COUNT ...      as fast as it can be queued
    python -m benchmarks.contestant NAME rate one|batch SECONDS   how fast it sends
    python -m benchmarks.contestant NAME pace COUNT PER_S         `stamp` tasks, evenly
    python -m benchmarks.contestant umbel spread COUNT QUEUE ...  INCR tasks over queues

The answer is one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

BATCH = 1000  # tasks per call where several are sent at once
WARM_UP = 100  # sent before the time is taken: connections, caches
PACE_WARM_UP = 5
PROCESSES = (1, 2)


def describe(peer: Any) -> dict[str, Any]:
    """All that the run has to know."""
    commands = {
        variant: {str(count): peer.workers(variant, count) for count in PROCESSES}
        for variant in peer.VARIANTS
    }
    return {
        "label": peer.LABEL,
        "version": version(peer.PACKAGE),
        "brokers": peer.BROKERS,
        "acks": peer.ACKS,
        "rough_per_s": peer.ROUGH_PER_S,
        "variants": commands,
        "events": peer.EVENTS,
        "batch": peer.send_batch is not None,
    }


def fill(peer: Any, *wanted: str) -> dict[str, Any]:
    """Queue what a measurement needs, in this order."""
    for one in wanted:
        kind, _, count = one.partition(":")
        left = int(count)
        while left > 0:
            part = min(left, 50 if kind == "100k" else BATCH)
            (peer.send_batch or peer.send)(kind, part)
            left -= part
    return {}


def rate(peer: Any, how: str, seconds: str) -> dict[str, Any]:
    """Tasks sent per second, no-ops, for about so long."""
    send, part = (peer.send, 100) if how == "one" else (peer.send_batch, BATCH)
    send("noop", WARM_UP)
    count, started = 0, time.perf_counter()
    while (took_s := time.perf_counter() - started) < float(seconds):
        send("noop", part)
        count += part
    return {"per_s": count / took_s}


def pace(peer: Any, count: str, per_s: str) -> dict[str, Any]:
    """Send evenly; a late one is sent at once and the next ones keep their times."""
    peer.send("noop", PACE_WARM_UP)
    time.sleep(0.2)
    started = time.monotonic()
    for number in range(int(count)):
        time.sleep(max(0.0, started + number / float(per_s) - time.monotonic()))
        peer.send("stamp", 1)
    return {"took_s": time.monotonic() - started}


def spread(peer: Any, count: str, *queues: str) -> dict[str, Any]:
    """Fill several queues evenly."""
    left = int(count)
    while left > 0:
        part = min(left, 5000)
        peer.spread("incr", part, list(queues))
        left -= part
    return {}


ROLES: dict[str, Callable[..., dict[str, Any]]] = {
    role.__name__: role for role in (describe, fill, rate, pace, spread)
}


def main() -> None:
    """Do what the arguments say."""
    name, role, *arguments = sys.argv[1:]
    peer = importlib.import_module(f"benchmarks.peers.{name}")
    print(json.dumps(ROLES[role](peer, *arguments)), flush=True)


if __name__ == "__main__":
    main()
