"""Object stores by their schemes: what fsspec and Hadoop call them, and what is missing."""

from __future__ import annotations

import sys

import pytest

from umbel.recorder.disks import disk_of
from umbel.recorder.errors import LogError
from umbel.stores import fsspec_url, hadoop_url, open_store


@pytest.mark.parametrize(
    ("url", "fsspec", "hadoop"),
    [
        ("s3://b/x", "s3://b/x", "s3a://b/x"),
        ("s3a://b/x", "s3://b/x", "s3a://b/x"),
        ("gs://b/x", "gs://b/x", "gs://b/x"),
        ("gcs://b/x", "gs://b/x", "gs://b/x"),
        (
            "abfs://c@a.dfs.core.windows.net/x",
            "abfs://c@a.dfs.core.windows.net/x",
            "abfs://c@a.dfs.core.windows.net/x",
        ),
        (
            "abfss://c@a.dfs.core.windows.net/x",
            "abfs://c@a.dfs.core.windows.net/x",
            "abfss://c@a.dfs.core.windows.net/x",
        ),
        ("memory://x", "memory://x", "memory://x"),
        ("hdfs://host/x", "hdfs://host/x", "hdfs://host/x"),
        ("/var/lib/x", "/var/lib/x", "/var/lib/x"),
    ],
)
def test_each_side_gets_the_scheme_that_it_knows(url: str, fsspec: str, hadoop: str) -> None:
    assert (fsspec_url(url), hadoop_url(url, {})) == (fsspec, hadoop)


@pytest.mark.parametrize(("scheme", "hadoop"), [("abfs", "abfs"), ("az", "abfss")])
def test_the_account_of_azure_comes_from_the_environment_where_the_url_has_none(
    scheme: str, hadoop: str
) -> None:
    account = {"AZURE_STORAGE_ACCOUNT_NAME": "shop"}
    assert hadoop_url(f"{scheme}://c/x", account) == f"{hadoop}://c@shop.dfs.core.windows.net/x"
    with pytest.raises(ValueError, match=r"write c@ACCOUNT\.dfs\.core\.windows\.net for c, or set"):
        hadoop_url(f"{scheme}://c/x", {})


@pytest.mark.parametrize(
    ("url", "package"), [("s3a://b/x", "s3fs"), ("gs://b/x", "gcsfs"), ("abfss://b/x", "adlfs")]
)
def test_a_missing_package_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"it needs the package {package}: pip install {package}"):
        open_store(url)
    with pytest.raises(LogError, match=f"cannot use {url}: it needs the package {package}"):
        disk_of(url)


def test_fsspec_itself_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match="fsspec"):
        open_store("memory://x")


def test_a_scheme_that_nobody_knows_is_refused() -> None:
    with pytest.raises(LogError, match="cannot use nowhere://x: "):
        disk_of("nowhere://x")
