"""Nodes that answer `hello` and do nothing else: `python neighbours.py URL COUNT REVOKED`.

All of them share one knowledge of so many revocations, which `revoked_by` makes up: the same ones
for everybody who asks.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
from typing import Any

from tests.responders import Responder
from tests.unit.worker.parts import idle_worker
from umbel import Umbel


def names(count: int) -> list[str]:
    return [f"n{number}@test" for number in range(count)]


def revoked_by(count: int, until: float) -> dict[str, float]:
    """Ids and when they were revoked, in the hour before."""
    dice = random.Random(7)
    return {
        str(uuid.UUID(int=dice.getrandbits(128))): until - dice.uniform(0, 3_600)
        for _ in range(count)
    }


def main(url: str, count: int, revoked: int, until: float) -> None:
    app = Umbel("neighbours", broker=url, backend="disabled://", set_as_current=False)
    known = idle_worker(app, hostname="n0@test")
    for id_, at in revoked_by(revoked, until).items():
        known.revocations.revoke(id_, at)

    def hello(arguments: dict[str, Any]) -> Any:
        reply = known.mingling.answer(arguments)
        return {**reply, "nodes": names(count)} if reply else reply

    for name in names(count):
        Responder(app, name, {"hello": hello})
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) or time.time())
