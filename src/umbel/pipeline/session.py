"""Spark, started: the one place where its settings are.

`local[*]` unless told otherwise; the same code runs on any master that Spark knows. The settings
that matter, each measured:

- Debugging information of DataFrames off: plans of our size are built in half the time.
- The parallel collector: a fold is 10 to 15 % faster, for pauses that nobody notices here. For a
  small log the serial one, which takes a tenth less CPU time and memory.
- Java compiles methods of any length: the generated ones of the fold are long, and would stay
  interpreted, which takes twice the time.
- Generated code of a build is kept for the next one (`CODES_MAX`): a build has more than Spark
  keeps by itself.
- Files on a local disk are looked at by the driver: a job with a task for each takes longer.
- What a query defines by WITH is put in its place at once, not each time that a plan is checked.
- Adaptive plans on; on one machine at least four shuffle partitions a core, more for a big log:
  they fit into memory, and adaptive plans join small ones.
- Files are read in parts of some hundred thousand events: what is sorted there fits into caches.
- A task that could run near its data waits a tenth of a second for that, not three: most stages
  are shorter, and a small build on two executors took twice the time.
- Hadoop starts a process (`chmod`) for every file and folder that it makes on a local disk: no
  empty files that mark success, and no second set of temporary folders. Rows are counted after
  each write (`storage`), so a write that failed half-way is noticed without these.
- zstd, and pages of version 2, which store differences of whole numbers: files are a sixth smaller.
- No web page, no progress bar of Spark's own.
- What Hadoop writes has the modes of `umbel.files`: it sets those of files itself, from a setting
  (`settings`), and leaves those of some folders to the umask of the Java process.
- For a small log none of that pays off: no code is generated and plans are simple (`SMALL`), and
  Java gets less memory, which it would fill before it looks for what can go.
- A build that reads little is over before Java's second compiler has earned its cost: it is left
  out (`SHORT_LIVED`), which saves a third of the CPU time.
- Java maps the classes of Spark from an archive, where `umbel history prepare` has made one: a
  small build takes a quarter less (`class_archive`). Without one, a small build trusts the classes
  that came with Spark: verifying them takes a second (`_UNVERIFIED`).
- Python loads pandas, which Spark asks for, while Java starts.
- The server for accumulators, which only Python functions in Spark need, is stopped at once: it
  takes half a second to notice that it shall.
- Groups with `percentile_disc` or `collect_set` are aggregated in memory: from 128 groups on Spark
  would sort the rows instead, with generated code even where that is switched off.

A user's own settings go before these; `umbel.pipeline.settings` has the rules, and the few
settings that nobody may change.

The Java process writes its messages to a file that is removed with the session; what goes wrong
comes up as one line (`explaining`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from umbel import files
from umbel.pipeline import class_archive, connectors
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.settings import combined, endpoints, java_path, read_defaults

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
PARTITIONS_PER_CORE: Final = 4
# Pieces of generated code that are kept. Fewer: the next build, if it follows, compiles them again.
CODES_MAX: Final = 1_000
# Groups of one task of a stage that are aggregated in memory. More: they are sorted first.
GROUPS_IN_MEMORY: Final = 20_000
# A shuffle is cut into parts that fit into memory and caches: one for so much of the log.
PARTITION_BYTES: Final = 2**23
PARTITIONS_MAX: Final = 2_000
# A log of less, some ten thousand events, is small: there the two ways take about as long.
SMALL_BYTES: Final = 2**20
MEMORY_MIN_MIB, MEMORY_MAX_MIB = 1_024, 8_192
MEMORY_SMALL_MIB: Final = 640
# New segments of less, some 700,000 events, are carried through within a minute or two.
SHORT_BYTES: Final = 2**25
# With one compiler Java reserves 48 MB for compiled code, which generated code fills.
SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
REACH_TIMEOUT_S: Final = 5.0
_JAVA_OPTIONS: Final = "-XX:-DontCompileHugeMethods -Duser.language=en -Duser.country=US"
_COLLECTOR: Final = "-XX:+UseParallelGC"
# Of a small heap little is left to collect: more threads for it only get in the way of others.
_COLLECTOR_SMALL: Final = "-XX:+UseSerialGC"
# To plan, write and compile code for some thousand events takes longer than to do without.
SMALL: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
# All of it fits into one partition: nothing is sent around, and a table is one job of one task.
SMALL_LOCAL: Final = SMALL | {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}
_UNVERIFIED: Final = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
_LOGGERS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_QUIET: Final = """\
rootLogger.level = error
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.target = SYSTEM_ERR
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def session(
    master: str = LOCAL,
    *,
    name: str = "umbel history",
    settings: Mapping[str, str] | None = None,
    java_options: str = "",
    is_small: bool = False,
) -> SparkSession:
    """A session on a master, or a `HistoryError` that says in one line why there is none.

    `settings` are Spark's and go before ours and those of `spark-defaults.conf`; `java_options`
    come on top of ours. `is_small` says that all of the log is small.
    """
    _check_java()
    check_master(master)
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in {"pyspark", "py4j"}:
            raise
        raise HistoryError(
            "'umbel history build' needs the package pyspark: pip install 'umbel[history]'"
        ) from None
    for logger in _LOGGERS:  # they write whole stacks of Java to stderr; `explaining` tells enough
        logging.getLogger(logger).disabled = True
    defaults, directory = read_defaults(), _directory()
    memory_mib = MEMORY_SMALL_MIB if is_small else _memory_mib()
    java_options = f"{_COLLECTOR_SMALL if is_small else _COLLECTOR} {java_options}"
    archive = class_archive.java_option() or (_UNVERIFIED if is_small else "")
    ours = _settings(master, directory, java_options, archive, memory_mib)
    conf = SparkConf(loadDefaults=False).setAppName(name)
    conf.setAll(list(combined(ours, defaults, settings or {}).items())).setMaster(master)
    try:
        context = _context(conf, directory)
        _end_accumulators(context)
        return SparkSession(context)
    except Exception as exc:  # Spark fails to start in as many ways as it has parts
        raise HistoryError(
            f"cannot start Spark on master {master!r}: {_said(exc, directory)}"
        ) from exc


def _settings(
    master: str, directory: Path, java_options: str, archive: str, memory_mib: int
) -> dict[str, str]:
    log_to = f"-Dlog4j2.configurationFile=file:{directory / 'log4j2.properties'}"
    made = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.hadoop.parquet.writer.version": "v2",
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.legacy.parquet.nanosAsLong": "false",
        "spark.sql.legacy.ctePrecedencePolicy": "LEGACY",
        "spark.sql.files.openCostInBytes": str(2**20),
        "spark.sql.files.maxPartitionBytes": str(2**24),
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.codegen.cache.maxEntries": str(CODES_MAX),
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": str(GROUPS_IN_MEMORY),
        "spark.locality.wait": "100ms",
        "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        **endpoints(),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": (f"{_JAVA_OPTIONS} {log_to} {archive} {java_options}"),
        "spark.executor.extraJavaOptions": f"{_JAVA_OPTIONS} {java_options}",
    }
    if master.startswith("local"):
        made["spark.sql.shuffle.partitions"] = str(PARTITIONS_PER_CORE * (os.cpu_count() or 1))
        made["spark.driver.memory"] = f"{memory_mib}m"
        made["spark.driver.host"] = "127.0.0.1"
        made["spark.driver.bindAddress"] = "127.0.0.1"
    return made


def _memory_mib() -> int:
    """A third of what the machine has, within bounds."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return max(MEMORY_MIN_MIB, min(total // 3, MEMORY_MAX_MIB))


def is_local(master: str) -> bool:
    """Whether the driver is the executor."""
    return master.startswith("local") and "cluster" not in master


def is_small(log_bytes: int) -> bool:
    """Whether a log is so small that everything is to be done the simple way."""
    return log_bytes < SMALL_BYTES


@contextlib.contextmanager
def sized(
    spark: SparkSession, part_bytes: int, log_bytes: int, *, is_on_disk: bool = False
) -> Iterator[None]:
    """The session with the settings that suit this much of a log of that size, for a while.

    `is_on_disk` says that files are on a local disk, and not in a store.
    """
    partitions = "spark.sql.shuffle.partitions"
    wanted = max(int(spark.conf.get(partitions) or 0), part_bytes // PARTITION_BYTES)
    settings = {partitions: str(min(wanted, PARTITIONS_MAX))}
    if is_small(log_bytes):
        settings = dict(SMALL_LOCAL if is_local(spark.sparkContext.master or "") else SMALL)
    if is_on_disk:
        settings["spark.sql.sources.parallelPartitionDiscovery.threshold"] = str(10**6)
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, former in before.items():
            spark.conf.set(name, str(former))


# -- before anything is started ----------------------------------------------------------------


def _check_java() -> None:
    if java_path() is not None:
        return
    if home := os.environ.get("JAVA_HOME"):
        raise HistoryError(
            f"JAVA_HOME is {home!r}, but there is no bin/java: Spark needs Java 17 or newer"
        )
    raise HistoryError(
        "Spark needs Java 17 or newer, and there is no 'java' here: install it, "
        "or set JAVA_HOME to where it is"
    )


def check_master(master: str) -> None:
    """A master that does not answer would be waited for, for minutes."""
    known = re.fullmatch(
        r"local|local\[[\d*]+(?:,\s*\d+)?\]|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]"
        r"|spark://.+|k8s://.+|yarn",
        master,
    )
    if known is None:
        raise HistoryError(
            f"unknown master {master!r}: choose local[*], local[N], spark://HOST:PORT, "
            "k8s://HOST:PORT or yarn"
        )
    if not master.startswith("spark://"):
        return
    reason = ""
    for address in master.removeprefix("spark://").split(","):
        try:
            parts = urlsplit(f"spark://{address}")
            where = parts.hostname or "", parts.port or 7077
            with socket.create_connection(where, timeout=REACH_TIMEOUT_S):
                return
        except (OSError, ValueError) as exc:
            reason = str(exc)
    raise HistoryError(f"cannot reach the Spark master {master}: {reason}")


# -- the Java process --------------------------------------------------------------------------


def _directory() -> Path:
    """A directory for what the Java process reads and writes; it goes with this process."""
    directory = Path(tempfile.mkdtemp(prefix="umbel-spark-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "log4j2.properties").write_text(_QUIET)
    return directory


def _context(conf: SparkConf, directory: Path) -> SparkContext:
    """Start Java, unless it runs already, and Spark in it.

    Java writes to stderr before it reads any setting: it gets a file for that.
    """
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    assert SparkContext._active_spark_context is None, "one process has one session at a time"
    if SparkContext._gateway is not None:
        return SparkContext(conf=conf)
    threading.Thread(target=_load_packages, daemon=True).start()
    with (directory / "java.log").open("w") as log:
        gateway = launch_gateway(  # type: ignore[no-untyped-call]
            conf, {"stderr": log, "stdout": log, "umask": files.umask()}
        )
    return SparkContext(conf=conf, gateway=gateway)


def _load_packages() -> None:
    """Load what Spark's Python side asks for once Java runs; a missing one is its to report."""
    for name in ("pandas", "pyarrow.compute"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _end_accumulators(context: SparkContext) -> None:
    """Stop the server that no query of ours needs, without waiting for it."""
    server = getattr(context, "_accumulatorServer", None)
    if server is not None:
        threading.Thread(target=server.shutdown, daemon=True).start()


def _said(exc: Exception, directory: Path) -> str:
    """Why Spark did not start, by the exception or by what Java wrote."""
    text = first_line(exc)
    if "JAVA_GATEWAY_EXITED" not in text:
        return text
    return _java_reason((directory / "java.log").read_text(errors="replace")) or text


def _java_reason(log: str) -> str:
    """What Java or `spark-submit` wrote before it ended: the exception, else the first line."""
    if missing := re.findall(r"unresolved dependency: ([^#\s]+)#([^;\s]+);([^:\s]+)", log):
        names = ", ".join(dict.fromkeys(":".join(parts) for parts in missing))
        return (
            f"{names} was not found: is the version right, and is a Maven repository in reach? "
            "(--conf spark.jars.repositories=URL names another one, --jars takes files)"
        )
    if thrown := re.search(r'^Exception in thread "main" (.+)$', log, re.MULTILINE):
        return thrown[1].strip()
    told = (line.strip() for line in log.splitlines() if not line.startswith(("WARNING", "\tat ")))
    return next((line for line in told if line and not line.startswith("::")), "")


# -- what went wrong ---------------------------------------------------------------------------

_FILE: Final = re.compile(r"((?:file|s3a?|gs|abfss?|hdfs)[:/][^\s,;'\"]+\.parquet)")


@contextlib.contextmanager
def explaining(doing: str) -> Iterator[None]:
    """What Spark throws becomes a `HistoryError` of one line."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as exc:
        raise HistoryError(f"{doing}: {explain(exc)}") from exc


def explain(exc: BaseException) -> str:
    """The reason in a chain of Java exceptions, with the file that it is about, if any."""
    text = str(exc)
    found = _FILE.search(text)
    if found and re.search(r"FAILED_READ_FILE|CANNOT_READ_FILE|ParquetDecodingException", text):
        return f"cannot read {_plain_path(found.group(1))}: it is damaged, or no Parquet file"
    if "No space left on device" in text:
        return "no space left on device"
    if missing := connectors.hint(text):
        return missing
    return first_line(exc)


def _plain_path(url: str) -> str:
    return unquote(urlsplit(url).path) if url.startswith("file:") else url


def first_line(exc: BaseException) -> str:
    """The first line of an exception that says something."""
    java: Any = getattr(exc, "java_exception", None)
    text = str(exc)
    if java is not None:
        with contextlib.suppress(Exception):
            cause = java
            while cause.getCause() is not None:
                cause = cause.getCause()
            text = f"{cause.getClass().getSimpleName()}: {cause.getMessage()}"
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line), type(exc).__name__)
