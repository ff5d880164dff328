"""The measurements of single parts, in small sizes, as `make bench` runs them at its end.

Each is a program of its own in this directory that prints its figures and exits with 1 when one
of its promises is missed; alone it takes larger sizes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300
PARTS: dict[str, list[str]] = {
    "overhead": ["--tasks", "10000", "--rounds", "3"],
    "state": ["--tasks", "5000", "--rounds", "3"],
    "sending": ["--count", "2000", "--rounds", "3"],
    "transport": ["--quick"],
    "transport_amqp": ["--quick"],
}


def run() -> list[str]:
    """Run them one after the other; which of them missed something."""
    missed = []
    for name, arguments in PARTS.items():
        if not (HERE / f"{name}.py").exists():
            continue
        print(f"\n== benchmarks/{name}.py {' '.join(arguments)}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        try:
            done = subprocess.run(command, cwd=HERE.parent, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            print(f"ended after {TIMEOUT_S} s")
            missed.append(name)
        else:
            missed += [name] * (done.returncode != 0)
    return missed
