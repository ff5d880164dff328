"""Routes, and how tasks behave."""

from __future__ import annotations

from umbel.app.setting_kinds import (
    BOOL,
    EXCHANGE_TYPE,
    RATE,
    TEXT,
    TIMEZONE,
    choice,
    either,
    integer,
    optional,
    seconds,
    strings,
)
from umbel.app.setting_objects import ANNOTATIONS, FUNCTION, QUEUES, RETRY_POLICY, ROUTES
from umbel.app.settings.setting import Setting
from umbel.wire.redaction import DEFAULT_NAMES

_PRIORITY = integer(0, 255)

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
        "worker_goodbye_timeout",
        seconds(1.0),
        10.0,
        "Seconds that a stopping worker waits for its broker in all, once its tasks have ended: "
        "more gives messages back to a slow broker, less ends sooner when the broker is gone, and "
        "messages that were not given back are delivered again.",
        differs="Celery has no bound for it",
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
        "Values under names with one of these words (`token` is in `accessToken`), or under names "
        "that fit a pattern with `*`, show as '**' in headers, events, logs, replies to inspect, "
        "spans and the recorded history: more names leak less and explain less. This covers "
        "arguments, results, errors with their tracebacks (`password=...` in their text), and "
        "passwords in URLs. The message and the stored result keep the values, as the task and its "
        "caller need them. An empty list hides nothing. A task can override this with "
        "`redact=True`, False, or more names.",
        differs="Umbel's own",
    ),
    Setting(
        "task_trace_spans",
        BOOL,
        False,
        "Make OpenTelemetry spans of every send and every run, linked across processes: where the "
        "time goes can be seen in one picture, for some tens of microseconds a task. Needs "
        "`umbel[otel]`, and an SDK that is set up by the application.",
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
