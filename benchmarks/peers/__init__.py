"""The contestants: Umbel and its peers, each in a small module as one of its users would write it.

A module is imported in the environment of its library only, never by the run itself, which asks
`benchmarks.contestant` for what is below. Each has:

- `PACKAGE`, the distribution whose version is told, and `LABEL`, its name in tables
- `BROKERS`, those of `redis` and `amqp` that it is measured on
- `ACKS`, when a task is acknowledged, in a few words
- `ROUGH_PER_S`, about what it reaches: only decides how many tasks are queued
- `VARIANTS`, settings that are tried; the best is taken for each broker. The first is what
  usually wins, which a quick run takes untried
- `EVENTS`, the arguments that switch on events for monitors, or None
- `send(kind, count)`, one call of the library per task
- `send_batch`, the same in one call for all of them, or None where the library has no such call
- `workers(variant, processes)`, the commands that start so many processes in all

Nobody keeps results. The address of the broker is in `BENCH_BROKER`.
"""

from __future__ import annotations

NAMES = (
    "umbel",
    "celery",
    "dramatiq",
    "taskiq_lists",
    "taskiq_streams",
    "huey",
    "rq",
    "arq",
)
CONSTANTS = ("PACKAGE", "LABEL", "BROKERS", "ACKS", "ROUGH_PER_S", "VARIANTS", "EVENTS")
FUNCTIONS = {"send": ["kind", "count"], "workers": ["variant", "processes"]}
OPTIONAL_FUNCTIONS = {"send_batch": ["kind", "count"]}
