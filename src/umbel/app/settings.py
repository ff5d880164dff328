"""Every setting that takes effect: its type, its default, and its trade-off.

The names are Celery's, lower case, and so are the defaults unless `differs` says why not. The
trade-off says what raising the value (or switching it on) buys and what it costs. A name that
Celery knows and that does nothing here is in `app.inert_settings`, with the reason. The page
docs/settings.md is written from these tables (`python -m umbel.app.settings_page`), and
`app.conf` checks and keeps the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from umbel.app.setting_kinds import (
    BACKEND,
    BOOL,
    COMPRESSION,
    DICT,
    EXCHANGE_TYPE,
    LOG_FORMAT,
    LOG_LEVEL,
    PATH,
    RATE,
    SERIALIZER,
    TEXT,
    TIMEZONE,
    URLS,
    WHOLE_SECONDS,
    Kind,
    choice,
    either,
    integer,
    number,
    optional,
    seconds,
    strings,
)
from umbel.app.setting_objects import (
    ANNOTATIONS,
    FUNCTION,
    QUEUES,
    RETRY_POLICY,
    ROUTES,
    SSL,
)
from umbel.wire.redaction import DEFAULT_NAMES

POOLS = ("prefork", "threads", "gevent", "asyncio", "solo")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; `differs` is why its default is not Celery's, or that it is Umbel's own."""

    name: str
    kind: Kind
    default: Any
    trade_off: str
    differs: str = ""


_PRIORITY = integer(0, 255)
_POSITIVE = integer(1)
_NAME_OR_NOTHING = Kind(
    "a string, which may be empty",
    lambda value: "" if value is None or value == "" else TEXT.check(value),
    str,
)

BROKER = (
    Setting(
        "broker_url",
        URLS,
        "embedded://",
        "The broker; the next of several is tried when one fails, so more addresses buy "
        "availability but only if those brokers share their queues. The embedded one needs no "
        "set-up and serves one directory of one machine.",
        differs="no broker configured means the embedded one, not a RabbitMQ on this host",
    ),
    Setting(
        "broker_read_url",
        optional(URLS),
        None,
        "Workers consume from here instead of `broker_url`: spreads load over two brokers, at the "
        "price of a bridge between them that is yours to run.",
    ),
    Setting(
        "broker_write_url",
        optional(URLS),
        None,
        "Tasks are published here instead of `broker_url`; see `broker_read_url`.",
    ),
    Setting(
        "broker_transport_options",
        DICT,
        {},
        "Passed to the transport. On Redis `visibility_timeout` is the one that matters: raising "
        "it lets long late-acknowledged tasks run once, and delays the tasks of a dead worker by "
        "as much.",
    ),
    Setting(
        "broker_redis_transport",
        choice("umbel", "kombu"),
        "umbel",
        "How messages are taken from Redis. `umbel` moves them in batches, which is many times as "
        "fast; `kombu` is the library's own way, one by one, for servers or proxies that get in "
        "the way of the first. Both put the same things in the same places.",
        differs="Umbel's own",
    ),
    Setting(
        "broker_amqp_transport",
        choice("umbel", "pyamqp"),
        "umbel",
        "What reads and writes on RabbitMQ: `umbel` reads in chunks, acknowledges together and "
        "publishes in batches with confirms; `pyamqp` is kombu's own way, several times slower, "
        "for when something looks wrong with the other.",
        differs="Umbel's own",
    ),
    Setting(
        "broker_connection_timeout",
        optional(seconds()),
        4.0,
        "Seconds to wait for a connection: more forgives a slow network, less fails over sooner.",
    ),
    Setting(
        "broker_connection_retry",
        BOOL,
        True,
        "Reconnect after a loss. Off, the worker ends when its running tasks have, and its "
        "supervisor decides; late-acknowledged ones run again then.",
    ),
    Setting(
        "broker_connection_retry_on_startup",
        optional(BOOL),
        None,
        "Keep trying when the broker is away at start; None follows `broker_connection_retry`. On "
        "survives any start order; off shows a wrong address at once.",
    ),
    Setting(
        "broker_connection_max_retries",
        optional(integer(0)),
        None,
        "Attempts, at most 3 s apart, before giving up; None or 0 never does. More outlasts longer "
        "outages, fewer bring the supervisor in sooner.",
        differs="100 attempts last for minutes here, and a restart finds no broker sooner than "
        "the next attempt",
    ),
    Setting(
        "broker_failover_strategy",
        optional(either(choice("round-robin", "shuffle"), FUNCTION)),
        None,
        "Order in which several brokers are tried (None is round-robin): `shuffle` spreads "
        "clients after a failure, a fixed order keeps them together.",
    ),
    Setting(
        "broker_heartbeat",
        optional(seconds()),
        120.0,
        "Seconds between AMQP heartbeats; None or 0 switches them off. Less finds a dead "
        "connection sooner, and takes a busy process for dead sooner too. It also bounds how "
        "long an answer is waited for: as long with AMQP, half as long with Redis, at least 1 s "
        "and at most 10 s; without heartbeats 30 s.",
    ),
    Setting(
        "broker_heartbeat_checkrate",
        number(1),
        3.0,
        "How often per heartbeat interval the connection is looked at: more finds a dead one "
        "sooner, and wakes an idle worker more often.",
    ),
    Setting(
        "broker_login_method",
        optional(TEXT),
        None,
        "SASL mechanism of AMQP (PLAIN, AMQPLAIN, EXTERNAL); it only has to match the broker's.",
    ),
    Setting(
        "broker_pool_limit",
        optional(integer(0)),
        10,
        "Connections that the threads of a publisher share; None or 0 opens one per message. More "
        "lets more threads publish at a time, each costs a connection on the broker.",
    ),
    Setting(
        "broker_use_ssl",
        SSL,
        False,
        "TLS to the broker, True or a dictionary of options: nobody reads along, for some CPU "
        "time and certificates to renew.",
    ),
    Setting(
        "embedded_directory",
        optional(PATH),
        None,
        "Directory whose `.umbel/` holds the embedded server's data and socket; None is the "
        "working directory. Processes that name the same one share a broker; a long path does "
        "not fit a socket name.",
        differs="Umbel's own",
    ),
)

RESULTS = (
    Setting(
        "result_backend",
        optional(BACKEND),
        None,
        "Where results are kept. None is the embedded server when the broker is the embedded one, "
        "and no results at all otherwise; `disabled://` keeps none in either case, which saves "
        "one write per task.",
    ),
    Setting(
        "result_backend_transport_options",
        DICT,
        {},
        "Passed to the backend's client (`global_keyprefix`, sentinel's `master_name`, retry "
        "policy): a prefix lets several projects share a database and hides their results from "
        "each other.",
    ),
    Setting(
        "result_backend_always_retry",
        BOOL,
        False,
        "Try again when the backend fails instead of giving the error to the caller: rides out an "
        "outage, while calls to it block.",
    ),
    Setting(
        "result_backend_max_retries",
        number(0, infinite=True),
        math.inf,
        "Attempts under `result_backend_always_retry`: more outlasts longer outages, fewer frees "
        "the caller sooner.",
    ),
    Setting(
        "result_backend_base_sleep_between_retries_ms",
        integer(0),
        10,
        "First pause between those attempts, doubled each time: more spares a backend that is "
        "coming up, less finishes sooner.",
    ),
    Setting(
        "result_backend_max_sleep_between_retries_ms",
        integer(0),
        10_000,
        "Longest pause between those attempts: more spares the backend, less notices its return "
        "sooner.",
    ),
    Setting(
        "result_expires",
        optional(WHOLE_SECONDS),
        86_400,
        "Seconds (or a timedelta) that a result is kept; None or 0 is for ever. More lets callers "
        "fetch late, and the backend fills with what nobody fetches.",
    ),
    Setting(
        "result_failure_expires",
        optional(WHOLE_SECONDS),
        None,
        "Seconds that a FAILURE is kept instead of result_expires: more time to look into it, for "
        "more memory after a bad day.",
    ),
    Setting(
        "redis_max_connections",
        optional(integer(1)),
        None,
        "Most connections of one process to the Redis result backend; too few make threads fail "
        "under load, no limit lets a burst open many.",
    ),
    Setting(
        "redis_socket_timeout",
        optional(seconds()),
        120.0,
        "Seconds to wait for an answer of the Redis result backend; less finds a dead server "
        "sooner, and takes a slow one for dead.",
    ),
    Setting(
        "redis_socket_connect_timeout",
        optional(seconds()),
        None,
        "Seconds to wait for a connection to the Redis result backend (None: 5).",
    ),
    Setting(
        "redis_backend_health_check_interval",
        optional(seconds()),
        None,
        "A connection to the result backend that was idle so long is checked before use: no stale "
        "one, for a round trip each time.",
    ),
    Setting(
        "redis_backend_use_ssl",
        optional(SSL),
        None,
        "TLS to the Redis result backend, with a dictionary of options; rediss:// does the same "
        "with the usual ones.",
    ),
    Setting(
        "result_extended",
        BOOL,
        False,
        "Store name, arguments, worker, retries and queue with the result: monitors can show "
        "them, every result grows by the arguments, and these may be private.",
    ),
    Setting(
        "result_serializer",
        SERIALIZER,
        "json",
        "Format of stored results: msgpack is smaller and takes bytes, json is read by everyone.",
    ),
    Setting(
        "result_accept_content",
        optional(strings(SERIALIZER, "serializers")),
        None,
        "Formats that a client takes from the backend; None is `accept_content`. Each more is "
        "another decoder that foreign data reaches.",
    ),
    Setting(
        "result_compression",
        optional(COMPRESSION),
        None,
        "Compress stored results: less memory and traffic for large ones, CPU time for all.",
    ),
    Setting(
        "result_persistent",
        optional(BOOL),
        None,
        "RPC results survive a restart of the broker, if the client does too; costs a disk write "
        "per result. None is off.",
    ),
    Setting(
        "result_chord_join_timeout",
        seconds(),
        3.0,
        "Seconds that the last part of a chord waits for the others' results to become readable: "
        "more tolerates a slow backend, and holds that worker slot as long.",
    ),
)

CONTENT = (
    Setting(
        "accept_content",
        strings(SERIALIZER, "serializers"),
        ("json",),
        "Formats that a worker decodes; anything else is refused unread. Each more is another "
        "decoder that foreign data reaches; pickle is never allowed.",
    ),
    Setting(
        "task_serializer",
        SERIALIZER,
        "json",
        "Format of task messages: msgpack is smaller and takes bytes, json is read by everyone.",
    ),
    Setting(
        "task_compression",
        optional(COMPRESSION),
        None,
        "Compress task messages: less memory and traffic for large arguments, CPU time for all.",
    ),
    Setting(
        "task_protocol",
        choice(1, 2),
        2,
        "Version of the message format. 1 is understood by very old workers, and loses what its "
        "format has no room for: root, parent, origin and stamps.",
    ),
    Setting(
        "task_message_max_bytes",
        integer(1024, 2**31 - 1),
        64 * 2**20,
        "Largest body that is decoded, also after decompression. More takes larger arguments, and "
        "a hostile message can cost several times this much memory.",
        differs="Umbel's own",
    ),
    Setting(
        "task_message_max_depth",
        integer(1, 800),
        200,
        "Deepest nesting that is decoded. More takes longer embedded chains, and deep rubbish "
        "costs more stack.",
        differs="Umbel's own",
    ),
    Setting(
        "task_message_max_integer_digits",
        integer(16, 4300),
        308,
        "Longest integer that is decoded, in digits. More takes larger numbers, and the time to "
        "read one grows with the square.",
        differs="Umbel's own",
    ),
)

ROUTING = (
    Setting(
        "task_default_queue",
        TEXT,
        "celery",
        "Queue of tasks that name none; clients and workers must agree on it.",
    ),
    Setting(
        "task_default_exchange",
        optional(TEXT),
        None,
        "Exchange of the default queue; None takes the queue's name.",
    ),
    Setting(
        "task_default_exchange_type",
        EXCHANGE_TYPE,
        "direct",
        "Type of that exchange: topic and fanout reach several queues with one message, direct "
        "goes to the queue without a lookup.",
    ),
    Setting(
        "task_default_routing_key",
        optional(TEXT),
        None,
        "Routing key of tasks that name none; None takes the queue's name.",
    ),
    Setting(
        "task_default_queue_type",
        choice("classic", "quorum"),
        "classic",
        "RabbitMQ type of queues made here: quorum survives the loss of a node, for more disk and "
        "latency. An existing queue can not change its type.",
    ),
    Setting(
        "task_default_delivery_mode",
        choice(1, 2, aliases={"transient": 1, "persistent": 2}),
        2,
        "2 (persistent) survives a restart of RabbitMQ for a disk write per message; 1 "
        "(transient) is faster and does not.",
    ),
    Setting(
        "task_default_priority",
        optional(_PRIORITY),
        None,
        "Priority of tasks that name none: on RabbitMQ higher goes first, on Redis lower does. It "
        "only orders what is still in the queue.",
    ),
    Setting(
        "task_inherit_parent_priority",
        BOOL,
        False,
        "Tasks sent by a task take its priority: a whole workflow stays urgent, and may starve "
        "others.",
    ),
    Setting(
        "task_queue_max_priority",
        optional(integer(1, 255)),
        None,
        "Highest priority of queues made on RabbitMQ: more levels cost memory and CPU time there. "
        "An existing queue can not change it.",
    ),
    Setting(
        "task_queues",
        optional(QUEUES),
        None,
        "The queues that a worker consumes from; None is the default queue only. More queues "
        "separate kinds of work, each costs a consumer on the broker.",
    ),
    Setting(
        "task_create_missing_queues",
        BOOL,
        True,
        "Make a queue that somebody names and nobody declared: nothing to set up, but a typing "
        "error becomes a queue without a worker.",
    ),
    Setting(
        "task_routes",
        optional(ROUTES),
        None,
        "Which queue a task goes to, by name, pattern or function: callers need not know, and a "
        "function runs at every send.",
    ),
    Setting(
        "worker_direct",
        BOOL,
        False,
        "Every worker gets a queue of its own name as well: tasks can be sent to one worker, and "
        "wait there if it is gone.",
    ),
    Setting(
        "worker_enable_remote_control",
        BOOL,
        True,
        "Answer inspect and control commands: off closes that door to whoever reaches the broker, "
        "and monitors see nothing.",
    ),
    Setting(
        "worker_cancel_long_running_tasks_on_connection_loss",
        BOOL,
        False,
        "Cancel late-acknowledged tasks when the connection to RabbitMQ is lost, which delivers "
        "them again: none runs twice at a time, and the work done is thrown away.",
    ),
    Setting(
        "worker_soft_shutdown_timeout",
        seconds(),
        0.0,
        "Seconds that running tasks get in a cold shutdown: more lets them finish, less restarts "
        "sooner. 0 is none.",
    ),
    Setting(
        "worker_enable_prefetch_count_reduction",
        BOOL,
        True,
        "After a lost connection ask for fewer messages while tasks from before still run: none "
        "waits behind them, and the worker takes a little less for a while.",
    ),
    Setting(
        "worker_eta_task_limit",
        optional(integer(0)),
        None,
        "Most tasks with an eta for which the prefetch window grows; None is no limit. More keeps "
        "tasks without an eta flowing past them, for memory.",
    ),
    Setting(
        "worker_agent",
        optional(either(TEXT, FUNCTION)),
        None,
        "A class, or its dotted name, that is made with the consumer's connection, started and "
        "stopped with it: your own part of the worker, on the worker's connection.",
    ),
    Setting(
        "worker_watchdog_timeout",
        optional(seconds(1)),
        30.0,
        "Seconds without a sign of life from the broker after which the consumer is rebuilt; less "
        "finds a dead connection sooner, and takes a slow broker for dead. None is never.",
        differs="Umbel's own",
    ),
    Setting(
        "broker_native_delayed_delivery_queue_type",
        choice("quorum", "classic"),
        "quorum",
        "Kind of the queues that keep delayed messages on RabbitMQ: quorum survives the loss of a "
        "node, classic is cheaper.",
    ),
    Setting(
        "worker_disable_rate_limits",
        BOOL,
        False,
        "Ignore every rate limit: a little faster, nothing is protected.",
    ),
    Setting(
        "worker_parked_task_limit",
        integer(0),
        1_000,
        "Most tasks that wait in a worker for a rate limit without taking the place of others; "
        "more keeps other types flowing past a longer queue, for memory. As many again wait for a "
        "short while; those beyond go back behind the others of their queue.",
        differs="Umbel's own",
    ),
    Setting(
        "worker_detect_quorum_queues",
        BOOL,
        True,
        "Ask whether a queue is a quorum queue and set the prefetch count per consumer then; off "
        "saves the question, and quorum queues refuse to be consumed.",
    ),
)

TASKS = (
    Setting(
        "task_acks_late",
        BOOL,
        False,
        "Acknowledge after the task instead of before: a task whose worker dies runs again, so it "
        "must bear running twice.",
    ),
    Setting(
        "task_acks_on_failure_or_timeout",
        BOOL,
        True,
        "Acknowledge late tasks that failed or ran out of time; off, they go back or to the dead "
        "letters, and may fail for ever.",
    ),
    Setting(
        "task_reject_on_worker_lost",
        optional(BOOL),
        None,
        "A late-acknowledged task whose process died goes back to the queue: nothing is lost, but "
        "a task that kills its process does so again and again.",
    ),
    Setting(
        "task_ignore_result",
        BOOL,
        False,
        "Store no results unless a task asks for it: one write less per task, and nothing to wait "
        "for.",
    ),
    Setting(
        "task_store_errors_even_if_ignored",
        BOOL,
        False,
        "Store failures of tasks that ignore their result: they can be looked up, for one write "
        "each.",
    ),
    Setting(
        "task_track_started",
        BOOL,
        False,
        "Store the state STARTED: long tasks can be seen running, for one more write per task.",
    ),
    Setting(
        "task_time_limit",
        optional(seconds()),
        None,
        "Seconds until the process of a task is killed: more tolerates slow tasks, less frees the "
        "slot of a stuck one sooner. Threads can not be killed.",
    ),
    Setting(
        "task_soft_time_limit",
        optional(seconds()),
        None,
        "Seconds until SoftTimeLimitExceeded is raised in a task. Set it below the hard limit by "
        "what cleaning up takes; at or above it, it never fires.",
    ),
    Setting(
        "task_publish_retry",
        BOOL,
        True,
        "Try again when a task can not be published: survives a broker's restart, and the caller "
        "waits meanwhile.",
    ),
    Setting(
        "task_publish_retry_policy",
        RETRY_POLICY,
        {"max_retries": 3, "interval_start": 0, "interval_max": 1, "interval_step": 0.2},
        "How often and how fast: more attempts survive longer outages, and block the caller as "
        "long.",
    ),
    Setting(
        "task_always_eager",
        BOOL,
        False,
        "Run tasks at once in the caller: tests need no worker, and see neither serialisation nor "
        "concurrency.",
    ),
    Setting(
        "task_eager_propagates",
        BOOL,
        False,
        "Eager tasks raise in the caller what they raise: shorter tests, unlike what a worker "
        "does.",
    ),
    Setting(
        "task_store_eager_result",
        BOOL,
        False,
        "Eager tasks store their results: they can be fetched by id, and the backend is needed.",
    ),
    Setting(
        "task_default_rate_limit",
        optional(RATE),
        None,
        "Starts of each task type per worker ('10/s', '5/m', '1/h'): less protects what the tasks "
        "call, and tasks wait.",
    ),
    Setting(
        "task_annotations",
        optional(ANNOTATIONS),
        None,
        "Overrides attributes of tasks by name (or '*'): operations can set limits without "
        "touching code, where readers of the code do not see it.",
    ),
    Setting(
        "task_redact_names",
        strings(what="names and patterns"),
        DEFAULT_NAMES,
        "Arguments and keys of mappings with such a word in their name (`token` is in "
        "`accessToken`), or that fit a pattern with `*`, show as '**' in headers, events and logs: "
        "more names leak less and tell less. Results, errors and the message itself stay as they "
        "are. A task has its own say with `redact=True`, False, or more names.",
        differs="Umbel's own",
    ),
    Setting(
        "task_allow_error_cb_on_chord_header",
        BOOL,
        False,
        "An errback given to a chord goes to each of its parts as well as to its body: it learns "
        "which part failed, and may be called once per part.",
    ),
    Setting(
        "imports",
        strings(what="module names"),
        (),
        "Modules that a worker imports at start, so that their tasks are known; each costs start "
        "time and memory.",
    ),
    Setting(
        "include",
        strings(what="module names"),
        (),
        "More of the same; `imports` is for the configuration, this for the code that makes the "
        "application.",
    ),
    Setting(
        "timezone",
        optional(TIMEZONE),
        None,
        "Zone in which times without one are read and logs are written; None is UTC, or the local "
        "zone when `enable_utc` is off. Clients and workers must agree.",
    ),
    Setting(
        "enable_utc",
        BOOL,
        True,
        "Times in messages are in UTC. Off, they are local: readable, ambiguous when clocks "
        "change, and wrong between zones.",
    ),
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
        "list. Less leaves less to whoever reaches the broker, and to you as well.",
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
        "Commands are signed with `control_signing_key`: `optional` signs what is sent and refuses "
        "what is signed wrongly, `required` refuses unsigned commands too, so that reaching the "
        "broker is not enough to stop workers. Then Celery's own tools can not command, and the "
        "clocks of all hosts must agree to within 30 s. Replies are not signed.",
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
        10_000,
        "Events that a process keeps while the broker is away, some 1 KB each; the oldest are "
        "dropped and counted when it is full. More bridges longer outages for more memory.",
        differs="Celery keeps any number, and forgets them when it reconnects",
    ),
    Setting(
        "event_flush_interval",
        seconds(),
        0.05,
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
        "Entries that the stream keeps, each of 1 to 500 events of some 500 bytes; the oldest are "
        "dropped. More bridges longer absences of recorders, for memory of the Redis server.",
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

SECTIONS: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    ("Broker", BROKER),
    ("Results", RESULTS),
    ("Messages", CONTENT),
    ("Queues and routes", ROUTING),
    ("Tasks", TASKS),
    ("Worker", WORKER),
    ("Remote control", CONTROL),
    ("Events", EVENTS),
    ("Logging", LOGGING),
)

SETTINGS: dict[str, Setting] = {
    setting.name: setting for _, settings in SECTIONS for setting in settings
}
