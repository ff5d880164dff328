"""The worker, remote control, logs, events."""

from __future__ import annotations

from umbel.app.setting_kinds import (
    BOOL,
    LOG_FORMAT,
    LOG_LEVEL,
    TEXT,
    UMASK,
    Kind,
    choice,
    either,
    integer,
    optional,
    seconds,
    strings,
)
from umbel.app.settings.setting import Setting

POOLS = ("prefork", "threads", "gevent", "asyncio", "solo")
_POSITIVE = integer(1)
_NAME_OR_NOTHING = Kind(
    "a string, which may be empty",
    lambda value: "" if value is None or value == "" else TEXT.check(value),
    str,
)

WORKER = (
    Setting(
        "worker_pool",
        choice(*POOLS, aliases={"processes": "prefork"}),
        "prefork",
        "What runs the tasks: prefork isolates and uses all cores for memory per process; threads "
        "and gevent are light and share one core; asyncio is for `async def`; solo runs one at a "
        "time.",
    ),
    Setting(
        "worker_concurrency",
        optional(_POSITIVE),
        None,
        "Tasks that run at a time; None is the number of CPUs. More helps tasks that wait, and "
        "costs memory (prefork) or switching.",
    ),
    Setting(
        "worker_prefetch_multiplier",
        integer(0),
        4,
        "Messages held per slot before they can run: more hides the broker's latency for short "
        "tasks, less leaves long ones to idle workers. 1 for long tasks; 0 is no bound at all.",
    ),
    Setting(
        "worker_cpu_affinity",
        BOOL,
        False,
        "Bind each pool process to a CPU of its own, shared in turn if there are more processes. "
        "Short tasks run faster on a machine that does nothing else; whatever else runs on a CPU "
        "holds up the process that is bound to it, and threads of a task share that one CPU.",
        differs="Umbel's own",
    ),
    Setting(
        "worker_code_version",
        optional(TEXT),
        None,
        "Which version of your code a worker runs, such as a tag or a commit: it is in heartbeats "
        "and in `task-started`, so that the history can tell versions apart. None leaves it out.",
        differs="Umbel's own",
    ),
    Setting(
        "worker_max_tasks_per_child",
        optional(_POSITIVE),
        None,
        "Tasks until a pool process is replaced: a bound on what leaks, for a fork each time.",
    ),
    Setting(
        "worker_max_memory_per_child",
        optional(_POSITIVE),
        None,
        "Resident KiB after which a pool process is replaced when its task ends: a bound on "
        "growth; set too low, every task costs a fork.",
    ),
    Setting(
        "worker_proc_alive_timeout",
        seconds(),
        4.0,
        "Seconds that a new pool process has to report: more tolerates slow imports and machines, "
        "less replaces a stuck one sooner.",
    ),
    Setting(
        "metrics_address",
        TEXT,
        "127.0.0.1",
        "Address on which `--metrics-port` answers. Another one, or 0.0.0.0 for all, lets a "
        "Prometheus elsewhere ask; then everybody who reaches the port can read the names of "
        "tasks and how much they do.",
        differs="Umbel's own",
    ),
)

CONTROL = (
    Setting(
        "worker_state_db",
        optional(TEXT),
        None,
        "File in which a worker remembers revoked tasks and its clock over restarts; each worker "
        "needs its own. A revoke then costs one write to the disk.",
    ),
    Setting(
        "worker_pool_restarts",
        BOOL,
        False,
        "Obey the command `pool_restart`, which loads modules by name: on is handy while "
        "developing, off leaves one thing less to whoever reaches the broker.",
    ),
    Setting(
        "control_allow",
        either(choice("all", "read-only"), strings(what="names of commands")),
        "all",
        "Commands that a worker obeys: all, those that only look (`read-only`), or the ones in a "
        "list. It also holds for revocations, pauses and elections that other nodes tell of. Less "
        "leaves less to whoever reaches the broker, and to you as well.",
        differs="Celery obeys every command, or none",
    ),
    Setting(
        "control_exchange",
        TEXT,
        "celery",
        "Control commands go through the exchange `<this>.pidbox`: another name keeps clusters "
        "that share a broker apart, and monitors must be told it too.",
    ),
    Setting(
        "control_queue_ttl",
        optional(seconds()),
        300.0,
        "Seconds that a command waits for a node on RabbitMQ, and after which one that nobody "
        "waits for is obeyed no more: more reaches nodes that were away longer, and surprises "
        "them with older commands.",
    ),
    Setting(
        "control_queue_expires",
        optional(seconds()),
        10.0,
        "Seconds after which the queue of a node or client that is gone is deleted, and a reply "
        "that nobody fetches: more survives longer breaks, and leaves more behind.",
    ),
    Setting(
        "control_queue_exclusive",
        BOOL,
        True,
        "Control queues belong to one connection and end with it: nothing is left behind and "
        "nobody reads along; off, a queue outlives a break of its connection until it expires.",
    ),
    Setting(
        "control_queue_durable",
        BOOL,
        False,
        "Control queues survive a restart of RabbitMQ, for a disk write per command; not together "
        "with `control_queue_exclusive`.",
    ),
    Setting(
        "control_signing",
        choice("off", "optional", "required"),
        "off",
        "Commands, replies and what workers tell about themselves are signed with "
        "`control_signing_key`: `optional` signs what is sent and refuses what is signed wrongly, "
        "`required` also refuses what is not signed, so that reaching the broker is not enough to "
        "command workers or to be one of them. Then Celery's tools cannot command, Celery's "
        "workers are no members of the cluster, and the clocks of all hosts must agree to within "
        "30 s. Task messages are not signed.",
        differs="Umbel's own",
    ),
    Setting(
        "control_signing_key",
        optional(TEXT),
        None,
        "The shared secret, 16 bytes or more, the same for all nodes and clients: whoever has it "
        "can command every worker; changing it means restarting all of them.",
        differs="Umbel's own",
    ),
)

LOGGING = (
    Setting(
        "worker_hijack_root_logger",
        BOOL,
        True,
        "The worker sets up the root logger and removes its handlers; off leaves logging to you.",
    ),
    Setting(
        "worker_log_color",
        optional(BOOL),
        None,
        "Colours in the log; None only on a terminal. They make files hard to search.",
    ),
    Setting(
        "worker_log_format",
        LOG_FORMAT,
        "[%(asctime)s: %(levelname)s/%(processName)s] %(message)s",
        "Format of log lines outside of tasks; more fields tell more and fill the disk sooner.",
    ),
    Setting(
        "worker_task_log_format",
        LOG_FORMAT,
        "[%(asctime)s: %(levelname)s/%(processName)s] %(task_name)s[%(task_id)s]: %(message)s",
        "Format of log lines inside of tasks; `task_name` and `task_id` are known here.",
    ),
    Setting(
        "worker_redirect_stdouts",
        BOOL,
        True,
        "What tasks print goes to the log: nothing is lost and lines stay whole; off, it goes "
        "where the process writes.",
    ),
    Setting(
        "worker_redirect_stdouts_level",
        LOG_LEVEL,
        "WARNING",
        "Level of those lines: higher shows them in quiet logs, lower keeps them out.",
    ),
)

EVENTS = (
    Setting(
        "worker_send_task_events",
        BOOL,
        False,
        "Workers tell what becomes of every task (`-E`): monitors and the history see tasks, at "
        "the price of a few microseconds and some 1.5 KB on the broker per task. Heartbeats go "
        "out in any case.",
    ),
    Setting(
        "task_send_sent_event",
        BOOL,
        False,
        "Clients tell of every task that they send: monitors see what waits in queues, for one "
        "more message per task.",
    ),
    Setting(
        "worker_heartbeat_interval",
        seconds(),
        2.0,
        "Seconds between heartbeats of a worker, which counts as gone after two of them: less "
        "finds dead nodes sooner and takes slow ones for dead sooner, more costs less.",
        differs="a setting as well as an option of the command line",
    ),
    Setting(
        "worker_gossip_interval",
        seconds(),
        5.0,
        "Seconds between two looks for nodes that were lost: less tells of a loss sooner, and "
        "costs a little more.",
        differs="a setting; Celery's is fixed",
    ),
    Setting(
        "worker_gossip_queue_ttl",
        seconds(),
        2.0,
        "Seconds that what nodes tell waits for a busy worker on RabbitMQ: more bridges longer "
        "stalls, and lets old news pass for new.",
        differs="a setting; Celery's is fixed",
    ),
    Setting(
        "election_allow",
        optional(strings(what="names of tasks")),
        None,
        "Tasks that may be run by election, names or patterns such as `shop.*`; None is all. "
        "Fewer leave less to whoever reaches the broker.",
        differs="Celery lets any task be elected",
    ),
    Setting(
        "event_exchange",
        TEXT,
        "celeryev",
        "Where events are published: everybody who is to hear of each other must agree on it; "
        "another name keeps clusters on one broker apart.",
    ),
    Setting(
        "event_buffer_max",
        _POSITIVE,
        20_000,
        "Events that a process keeps while the broker is away, some 1 KB each; the oldest are "
        "dropped and counted when it is full. More bridges longer outages for more memory.",
        differs="Celery keeps any number, and forgets them when it reconnects",
    ),
    Setting(
        "event_flush_interval",
        seconds(),
        0.1,
        "Seconds that task events wait for company before they are sent together: more costs "
        "less per event, less shows them sooner.",
        differs="Celery sends them at each turn of its loop",
    ),
    Setting(
        "event_stream",
        _NAME_OR_NOTHING,
        "umbel.events",
        "On Redis: the stream to which events go besides pub/sub, so that recorders miss none. The "
        "first recorder makes it; before that nothing is kept. Empty switches it off, and then "
        "recorders miss what is sent while they are away.",
        differs="Celery keeps no events",
    ),
    Setting(
        "event_stream_max",
        _POSITIVE,
        20_000,
        "Entries that the stream keeps, each of the events that one process sent together, some "
        "500 bytes each; the oldest are dropped. More bridges longer absences of recorders, for "
        "memory of the Redis server.",
        differs="Celery keeps no events",
    ),
    Setting(
        "event_queue_prefix",
        TEXT,
        "celeryev",
        "First part of the names of receivers' queues; the broker's permissions may demand one.",
    ),
    Setting(
        "event_queue_ttl",
        optional(seconds()),
        5.0,
        "Seconds that an event waits for a slow receiver on RabbitMQ: more lets receivers pause "
        "longer, for memory of the broker.",
    ),
    Setting(
        "event_queue_expires",
        optional(seconds()),
        60.0,
        "Seconds after which RabbitMQ deletes the queue of a receiver that is gone: more survives "
        "longer breaks, and leaves more behind.",
    ),
    Setting(
        "event_queue_exclusive",
        BOOL,
        True,
        "The queue of a receiver belongs to its connection and goes with it. Off, it outlives "
        "short breaks, which newer RabbitMQ servers refuse for queues that are not durable.",
    ),
    Setting(
        "event_queue_durable",
        BOOL,
        False,
        "The queue of a receiver survives a restart of RabbitMQ; events in it do not. It costs "
        "the broker a write per receiver.",
    ),
)

FILES = (
    Setting(
        "file_umask",
        UMASK,
        "077",
        "What is taken away from the permissions of files that Umbel writes: event logs, tables, "
        "reports, state files, audit logs, log files. '077' keeps them to their owner; '027' lets "
        "the group read, as for a recorder and a dashboard that run as two users of one group (and "
        "everybody else in it); '007' lets it write too. Tasks keep the umask of their worker. "
        "Commands that need no application take `umbel --file-umask`, or UMBEL_FILE_UMASK.",
        differs="Umbel's own",
    ),
)
