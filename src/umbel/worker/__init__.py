"""The consumer side: takes messages from the broker, runs tasks in a pool, reports and settles.

- `delivery`    what is decided about every message, pure
- `runtime`     the worker, its consumer, the loop, the steps; carries deliveries out
- `execution`   pools, and what runs in them
- `control`     remote control
- `membership`  the other nodes: gossip, mingle, elections
- `observe`     task events, metrics, health
- `blueprint`, `logs`  also for applications: steps of their own, and fields in log lines
"""
