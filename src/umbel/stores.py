"""Object stores by the scheme of a URL: the package that opens one here, and Hadoop's name for it.

One store has several names. fsspec, through which the log and the tables are listed and read,
knows `s3`, `gs` and `abfs`; Hadoop, through which Spark reads and writes, knows `s3a`, `gs`,
`abfs` and `abfss`. A user writes any of them, and each side gets the one that it knows.

What has no entry here is fsspec's own business (`memory://`, `hdfs://`): it goes to both sides as
it is written.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Store(NamedTuple):
    """One scheme: the package that fsspec needs, and the schemes of fsspec and Hadoop."""

    package: str
    fsspec: str
    hadoop: str


STORES: Final = {
    "s3": Store("s3fs", "s3", "s3a"),
    "s3a": Store("s3fs", "s3", "s3a"),
    "gs": Store("gcsfs", "gs", "gs"),
    "gcs": Store("gcsfs", "gs", "gs"),
    "abfs": Store("adlfs", "abfs", "abfs"),
    "abfss": Store("adlfs", "abfs", "abfss"),
    "az": Store("adlfs", "abfs", "abfss"),
}
AZURE_HOST: Final = "dfs.core.windows.net"
AZURE_ACCOUNT: Final = "AZURE_STORAGE_ACCOUNT_NAME"


def store_of(url: str) -> Store | None:
    """The store that a URL names; None for a path, and for schemes that are not listed."""
    scheme, colon, _ = url.partition("://")
    return STORES.get(scheme.lower()) if colon else None


def open_store(url: str) -> tuple[Any, str]:
    """The file system of fsspec and the path in it; ValueError says what is missing."""
    if package := missing_package(url):
        raise ValueError(f"it needs the package {package}: pip install {package}")
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(fsspec_url(url))
    except ImportError as exc:
        raise ValueError(str(exc)) from exc
    return filesystem, root.rstrip("/")


def missing_package(url: str) -> str:
    """The package that fsspec needs for a URL and that is not installed; empty if none is."""
    store = store_of(url)
    if store is None or importlib.util.find_spec(store.package) is not None:
        return ""
    return store.package


def fsspec_url(url: str) -> str:
    """The URL as fsspec takes it."""
    store = store_of(url)
    return url if store is None else f"{store.fsspec}://{url.partition('://')[2]}"


def hadoop_url(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """The URL as Hadoop's connectors take it.

    Those of Azure want the account in it; where it is missing it is the one of
    `AZURE_STORAGE_ACCOUNT_NAME`, which adlfs goes by too. Without, ValueError says what to write.
    """
    store = store_of(url)
    if store is None:
        return url
    rest = url.partition("://")[2]
    if store.package == "adlfs" and "@" not in rest.partition("/")[0]:
        container, slash, path = rest.partition("/")
        account = environment.get(AZURE_ACCOUNT)
        if not account:
            raise ValueError(
                f"it names no storage account: write {container}@ACCOUNT.{AZURE_HOST} "
                f"for {container}, or set {AZURE_ACCOUNT}"
            )
        rest = f"{container}@{account}.{AZURE_HOST}{slash}{path}"
    return f"{store.hadoop}://{rest}"
