"""Settings that Celery knows and that have no effect here, each with the reason.

They are accepted unchecked, so that a configuration moves over unchanged; giving one another
value than its default warns once per process. Reading one gives what was set, else Celery's
default. A setting leaves this table for `app.settings` in the change that makes it work.

Names from before Celery 4 (upper case, `CELERYD_...`) are not accepted: `modern_name` finds
what they are called now, for the error message.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from umbel.app.settings import SETTINGS

_NO_BEAT = "periodic tasks have no scheduler here: run Celery beat against the same broker"
_NO_BACKEND = "this result backend is not supported: results are kept on Redis or sent by RPC"
_NO_SIGNING = "signed task messages are not supported"
_IN_BROKER_URL = "say it in the address, broker_url"
_IN_BACKEND_URL = "say it in the address, result_backend"
_NO_REDIS_OPTION = "pass it as a query parameter of result_backend"
_NO_COUNTERPART = "it has no counterpart here"
_NOT_YET = "not supported yet"
_OWN_PARTS = "the parts of Umbel's worker are chosen by its steps, not by class name"

# reason -> {name: Celery's default}
_BY_REASON: dict[str, dict[str, Any]] = {
    _NO_BEAT: {
        "beat_enable_remote_control": False,
        "beat_remote_control_max_tick_age": None,
        "beat_max_loop_interval": 0,
        "beat_schedule": {},
        "beat_scheduler": "celery.beat:PersistentScheduler",
        "beat_schedule_filename": "celerybeat-schedule",
        "beat_sync_every": 0,
        "beat_cron_starting_deadline": None,
    },
    _IN_BROKER_URL: {
        "broker_transport": None,
        "broker_host": None,
        "broker_port": None,
        "broker_user": None,
        "broker_password": None,
        "broker_vhost": None,
    },
    _IN_BACKEND_URL: {
        "redis_host": None,
        "redis_port": None,
        "redis_db": None,
        "redis_username": None,
        "redis_password": None,
    },
    _NO_REDIS_OPTION: {
        "redis_backend_credential_provider": None,
        "redis_client_name": None,
        "redis_retry_on_timeout": False,
        "redis_socket_keepalive": False,
    },
    _NO_BACKEND: {
        "cache_backend": None,
        "cache_backend_options": {},
        "override_backends": None,
        "cassandra_entry_ttl": None,
        "cassandra_keyspace": None,
        "cassandra_port": None,
        "cassandra_read_consistency": None,
        "cassandra_servers": None,
        "cassandra_bundle_path": None,
        "cassandra_table": None,
        "cassandra_write_consistency": None,
        "cassandra_auth_provider": None,
        "cassandra_auth_kwargs": None,
        "cassandra_options": {},
        "s3_access_key_id": None,
        "s3_secret_access_key": None,
        "s3_bucket": None,
        "s3_base_path": None,
        "s3_endpoint_url": None,
        "s3_region": None,
        "azureblockblob_container_name": "celery",
        "azureblockblob_retry_initial_backoff_sec": 2,
        "azureblockblob_retry_increment_base": 2,
        "azureblockblob_retry_max_attempts": 3,
        "azureblockblob_base_path": "",
        "azureblockblob_connection_timeout": 20,
        "azureblockblob_read_timeout": 120,
        "gcs_bucket": None,
        "gcs_project": None,
        "gcs_base_path": "",
        "gcs_ttl": 0,
        "gcs_threadpool_maxsize": 10,
        "couchbase_backend_settings": None,
        "arangodb_backend_settings": None,
        "mongodb_backend_settings": None,
        "cosmosdbsql_database_name": "celerydb",
        "cosmosdbsql_collection_name": "celerycol",
        "cosmosdbsql_consistency_level": "Session",
        "cosmosdbsql_max_retry_attempts": 9,
        "cosmosdbsql_max_retry_wait_time": 30,
        "elasticsearch_retry_on_timeout": None,
        "elasticsearch_max_retries": None,
        "elasticsearch_timeout": None,
        "elasticsearch_save_meta_as_text": True,
        "database_url": None,
        "database_engine_options": {"pool_pre_ping": True, "pool_recycle": 3600},
        "database_engine_callback": None,
        "database_short_lived_sessions": False,
        "database_table_schemas": None,
        "database_table_names": None,
        "database_create_tables_at_setup": True,
    },
    "events are always JSON": {
        "event_serializer": "json",
    },
    "RPC results go straight to the client's queue, through no exchange": {
        "result_exchange": "celeryresults",
        "result_exchange_type": "direct",
    },
    "a chord's body is sent by its last part: nothing is polled": {
        "result_chord_retry_interval": 1.0,
    },
    _NO_SIGNING: {
        "security_certificate": None,
        "security_cert_store": None,
        "security_key": None,
        "security_key_password": None,
        "security_digest": "sha256",
    },
    "use task_acks_on_failure_or_timeout": {
        "task_acks_on_failure": None,
        "task_acks_on_timeout": None,
    },
    "missing queues get the type task_default_queue_type and a direct exchange": {
        "task_create_missing_queue_type": "classic",
        "task_create_missing_queue_exchange_type": None,
    },
    "use task_reject_on_worker_lost": {"task_retry_on_worker_lost": False},
    _OWN_PARTS: {
        "worker_autoscaler": "celery.worker.autoscale:Autoscaler",
        "worker_consumer": "celery.worker.consumer:Consumer",
        "worker_timer": None,
    },
    _NOT_YET: {
        "worker_disable_prefetch": False,
        "worker_deduplicate_successful_tasks": False,
        "worker_enable_soft_shutdown_on_idle": False,
        "worker_log_datefmt": None,
        "worker_task_log_datefmt": None,
        "task_repr_maxlevels": 3,
        "result_chord_expires": None,
        "broker_pool_acquire_timeout": None,
    },
    "an error fetched with a result always carries the worker's traceback": {
        "task_remote_tracebacks": False,
    },
    "a lost pool process is noticed at once": {"worker_lost_wait": 10.0},
    "timers fire when they are due": {"worker_timer_precision": 1.0},
    "pool processes are forked": {"worker_pool_start_method": "fork"},
    _NO_COUNTERPART: {
        "result_cache_max": -1,
        "result_backend_thread_safe": False,
        "worker_pool_putlocks": True,
    },
}

#: name -> (Celery's default, why it has no effect)
INERT: dict[str, tuple[Any, str]] = {
    name: (default, reason)
    for reason, names in _BY_REASON.items()
    for name, default in names.items()
}

NAMES: frozenset[str] = frozenset(SETTINGS) | frozenset(INERT)

# Old names that no rule leads to their new ones.
_IRREGULAR = {
    "celery_max_cached_results": "result_cache_max",
    "celery_task_result_expires": "result_expires",
    "celery_result_dburi": "database_url",
    "celery_result_engine_options": "database_engine_options",
    "celery_result_db_short_lived_sessions": "database_short_lived_sessions",
    "celery_result_db_tablenames": "database_table_names",
    "celery_message_compression": "task_compression",
    "celery_eager_propagates_exceptions": "task_eager_propagates",
    "celery_send_task_sent_event": "task_send_sent_event",
    "celery_send_events": "worker_send_task_events",
    "celeryd_worker_lost_wait": "worker_lost_wait",
    "celeryd_log_file": "the --logfile option",
    "celeryd_log_level": "the --loglevel option",
}
# In this order: celeryd_task_time_limit is task_time_limit, celeryd_task_log_format is not.
_OLD_PREFIXES = (
    ("", ""),
    ("celeryd_", "worker_"),
    ("celeryd_", ""),
    ("celerybeat_", "beat_"),
    ("celery_", ""),
    ("celery_", "task_"),
    ("celery_", "worker_"),
)


def modern_name(old: str, known: Container[str] = NAMES) -> str | None:
    """What the setting `old` (upper case, or from before Celery 4) is called now, if known."""
    lowered = old.lower()
    if lowered in _IRREGULAR:
        return _IRREGULAR[lowered]
    for before, after in _OLD_PREFIXES:
        if lowered.startswith(before) and after + lowered[len(before) :] in known:
            return after + lowered[len(before) :]
    return None
