"""Hadoop's connectors for object stores: which one Spark needs, and how to get it.

PySpark comes without them. Each is a jar that must be of the very version of Hadoop that this
Spark has, so that version is read from the names of its jars. What is missing is named in one line
with the coordinates that `--packages` takes, before Java is started and anything is written.

Not every jar has a name that tells what is in it: where the user has put jars on the class path
himself, Spark finds out, and `hint` turns its words into the same line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from umbel.pipeline.errors import HistoryError
from umbel.stores import STORES, hadoop_url, missing_package, store_of


class Connector(NamedTuple):
    """The connector of one scheme: its artifact, what comes with it, and how its classes begin."""

    artifact: str
    others: tuple[str, ...]  # artifacts that have it too
    classes: tuple[str, ...]


_ALL_STORES: Final = ("hadoop-cloud-storage", "spark-hadoop-cloud")
CONNECTORS: Final = {
    "s3a": Connector("hadoop-aws", _ALL_STORES, ("org.apache.hadoop.fs.s3a.", "software.amazon.")),
    "gs": Connector(
        "hadoop-gcp",
        ("gcs-connector", *_ALL_STORES),
        ("org.apache.hadoop.fs.gs.", "com.google.cloud.hadoop.fs.gcs."),
    ),
    "abfs": Connector("hadoop-azure", _ALL_STORES, ("org.apache.hadoop.fs.azurebfs.",)),
    "abfss": Connector("hadoop-azure", _ALL_STORES, ("org.apache.hadoop.fs.azurebfs.",)),
}
# Before Hadoop 3.5 the connector of Google's store was not a part of Hadoop.
_GCP_SINCE: Final = (3, 5)
_GCS_BEFORE: Final = "com.google.cloud.bigdataoss:gcs-connector:hadoop3-2.2.26"

# Where jars may come from whose names say nothing: settings of Spark, and of the environment.
_CLASS_PATHS: Final = ("spark.jars", "spark.driver.extraClassPath", "spark.jars.ivySettings")
_ENVIRONMENT: Final = ("SPARK_DIST_CLASSPATH", "HADOOP_CLASSPATH", "PYSPARK_SUBMIT_ARGS")
_PACKAGES: Final = "spark.jars.packages"


def spark_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where Spark is: SPARK_HOME, or the package pyspark."""
    if home := environment.get("SPARK_HOME"):
        return Path(home)
    import pyspark

    return Path(pyspark.__file__).parent


def hadoop_version(home: Path) -> str:
    """The version of Hadoop that a Spark has, by its jars; empty where they do not tell."""
    found = (
        re.fullmatch(r"hadoop-client-api-(\d[\w.+-]*)\.jar", path.name)
        for path in sorted((home / "jars").glob("hadoop-client-api-*.jar"))
    )
    return next((match[1] for match in found if match), "")


def coordinates(scheme: str, version: str) -> str:
    """What `--packages` takes for a scheme of Hadoop's, for this version of Hadoop."""
    if scheme == "gs" and version and _numbers(version) < _GCP_SINCE:
        return _GCS_BEFORE
    return f"org.apache.hadoop:{CONNECTORS[scheme].artifact}:{version or 'VERSION'}"


def check(
    urls: Iterable[str],
    settings: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Refuse URLs of stores for which a package or a jar is missing, all of it in one line."""
    missing: dict[str, None] = {}
    unreachable: list[str] = []
    for url in urls:
        store = store_of(url)
        if store is None:
            continue
        try:
            hadoop_url(url, environment)
        except ValueError as exc:
            raise HistoryError(f"cannot use {url}: {exc}") from None
        needs = []
        if package := missing_package(url):
            needs.append(f"the package {package} here (pip install {package})")
        home = spark_home(environment)
        if not _has(CONNECTORS[store.hadoop], home, settings, environment):
            wanted = coordinates(store.hadoop, hadoop_version(home))
            needs.append(f"Hadoop's connector in Spark (--packages {wanted})")
        if needs:
            unreachable.append(url)
            missing |= dict.fromkeys(needs)
    if missing:
        raise HistoryError(f"{' and '.join(unreachable)}: needs {' and '.join(missing)}")


def hint(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """What to add when Spark says that it lacks a connector; empty when it says something else."""
    scheme = ""
    if match := re.search(r'No FileSystem for scheme:? "?(\w+)', text):
        store = STORES.get(match[1])
        scheme = store.hadoop if store is not None else ""
    elif re.search(r"ClassNotFound|NoClassDefFound|not found", text):
        said = text.replace("/", ".")
        scheme = next(
            (name for name, one in CONNECTORS.items() if any(part in said for part in one.classes)),
            "",
        )
    if not scheme:
        return ""
    wanted = coordinates(scheme, hadoop_version(spark_home(environment)))
    return f"Spark has no connector for {scheme}: give --packages {wanted}"


def _has(
    connector: Connector, home: Path, settings: Mapping[str, str], environment: Mapping[str, str]
) -> bool:
    """Whether the connector is there, or may be."""
    names = connector.artifact, *connector.others
    if any(_is_named(name, settings.get(_PACKAGES, "")) for name in names):
        return True
    if any(settings.get(key, "").strip() for key in _CLASS_PATHS):
        return True
    if any(environment.get(key, "").strip() for key in _ENVIRONMENT):
        return True
    return any(any((home / "jars").glob(f"{name}*.jar")) for name in names)


def _is_named(artifact: str, packages: str) -> bool:
    parts = (package.strip().split(":") for package in packages.split(","))
    return any(len(part) > 1 and part[1].startswith(artifact) for part in parts)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
