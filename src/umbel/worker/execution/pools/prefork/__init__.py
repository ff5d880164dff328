"""Prefork: each job runs in a child process, the only pool that can end code that will not end.

    consumer thread ── submit ──► FIFO ──► packets ──► child 1 (main thread: run, run, run …)
      calls of watchers            ▲  └──► packets ──► child 2
           ▲                       │                      │
           └ supervisor ◄── frames: accepted, finished ───┘
      deadlines, signals, waitpid, fork

- `pool`        the `Pool` interface
- `supervisor`  a thread: hands out jobs, reads reports, notices limits and deaths
- `forker`      forks children, with back-off when they die at start
- `child`       one child as the parent sees it: what it holds, its pipes, its signals
- `frames`      what goes over the pipes
- `child_loop`  what runs in the child process

**No lock is shared between processes**, so a child may be killed at any moment without harm to
the others. Jobs go to a child in packets (SOCK_SEQPACKET), many at once if they are short, as far
as is known, so that neither side has to wake the other for each of them. For each job there is a
token, a count in the kernel that either side can lower by one: the child does before it begins a
job, the parent to *take back* the newest one (see `frames`). So an idle child does not wait while
another one has jobs to spare, and ending a child for one job hits no other.

**A job is the child's only once the child has said so.** It writes `accepted` before it runs a
job. When it dies, the one job accepted and unfinished is lost (or over its limit, or
cancelled); those unaccepted never ran and go to another child.

**One thread forks, waits and reports** (the supervisor's). The kernel ties a child's life to the
thread that forked it (PR_SET_PDEATHSIG), and a process number is ours only until waitpid, so
signals and waitpid are under one lock.

Needs Linux: SOCK_SEQPACKET, and pidfd where there is one (else children are looked after by EOF
and a slow sweep).
"""

from __future__ import annotations

from umbel.worker.execution.pools.prefork.pool import PreforkPool

__all__ = ["PreforkPool"]
