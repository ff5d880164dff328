"""A threads worker on the memory transport that runs no-op tasks and tells its resident memory.

    python memory_growth.py 10000 100000

One line for each number of tasks: `<tasks> <KiB>`. Nothing but the worker and its transport is
in the process, so that what grows is theirs. Messages are put into the queue in portions, as the
queue of this transport is in the same memory.
"""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

from umbel import Umbel
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.worker import Worker

PORTION = 500

app = Umbel("growth", broker="memory://", backend="disabled://")


@app.task(ignore_result=True)
def noop() -> None:
    """Nothing."""


def resident_kib() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def feed(worker: Worker, ready: threading.Event, marks: list[int]) -> None:
    try:
        ready.wait(30)
        sent = 0
        for mark in marks:
            while sent < mark:
                app.send_many([noop.s() for _ in range(PORTION)])
                sent += PORTION
                while worker.counters.finished < sent - PORTION // 2:
                    threading.Event().wait(0.001)
            while worker.counters.finished < mark:
                threading.Event().wait(0.001)
            print(mark, resident_kib(), flush=True)
    finally:
        worker.stop()


def main() -> int:
    worker = Worker(app, WorkerOptions(pool="threads", concurrency=2, prefetch_multiplier=100))
    ready = threading.Event()
    worker.on_ready.append(lambda _: ready.set())
    marks = [int(text) for text in sys.argv[1:]]
    threading.Thread(target=feed, args=(worker, ready, marks), daemon=True).start()
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
