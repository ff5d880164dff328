"""What Spark lacks for an object store is named with the coordinates of the right version."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbel.pipeline import connectors
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place
from umbel.pipeline.session import explain

S3_PACKAGE = "org.apache.hadoop:hadoop-aws:3.9.1"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A Spark with Hadoop 3.9.1 and without connectors."""
    (tmp_path / "jars").mkdir()
    for name in ("hadoop-client-api-3.9.1.jar", "hadoop-client-runtime-3.9.1.jar", "ivy-2.jar"):
        (tmp_path / "jars" / name).touch()
    return tmp_path


def check(home: Path, *urls: str, settings: dict[str, str] | None = None, **variables: str) -> None:
    connectors.check(urls, settings or {}, {"SPARK_HOME": str(home), **variables})


def test_the_version_is_that_of_the_hadoop_that_this_pyspark_has() -> None:
    version = connectors.hadoop_version(connectors.spark_home({}))
    assert version.count(".") == 2
    assert connectors.coordinates("s3a", version) == f"org.apache.hadoop:hadoop-aws:{version}"


def test_a_missing_connector_is_one_line_with_its_coordinates(home: Path) -> None:
    with pytest.raises(HistoryError) as caught:
        check(home, "s3://b/log", "s3a://b/tables")
    assert str(caught.value) == (
        "s3://b/log and s3a://b/tables: needs Hadoop's connector in Spark "
        f"(--packages {S3_PACKAGE})"
    )


def test_all_that_is_missing_is_in_the_same_line(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HistoryError) as caught:
        check(home, "gs://b/log", "abfss://c@a.dfs.core.windows.net/t")
    for part in (
        "pip install gcsfs",
        "--packages org.apache.hadoop:hadoop-gcp:3.9.1",
        "pip install adlfs",
        "--packages org.apache.hadoop:hadoop-azure:3.9.1",
    ):
        assert part in str(caught.value)


def test_older_hadoops_get_the_connector_that_google_publishes() -> None:
    assert connectors.coordinates("gs", "3.4.2").startswith("com.google.cloud.bigdataoss:gcs-")


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({"spark.jars.packages": f"a:b:1, {S3_PACKAGE}"}, {}),
        ({"spark.jars.packages": "org.apache.spark:spark-hadoop-cloud_2.13:4.1.0"}, {}),
        ({"spark.jars": "/opt/all-in-one.jar"}, {}),
        ({"spark.driver.extraClassPath": "/opt/hadoop/*"}, {}),
        ({}, {"SPARK_DIST_CLASSPATH": "/opt/hadoop/share/*"}),
        ({}, {"PYSPARK_SUBMIT_ARGS": f"--packages {S3_PACKAGE} pyspark-shell"}),
    ],
)
def test_a_connector_that_is_there_or_may_be_is_not_missed(
    home: Path, settings: dict[str, str], variables: dict[str, str]
) -> None:
    check(home, "s3://b/log", settings=settings, **variables)


def test_a_jar_in_sparks_own_folder_is_found(home: Path) -> None:
    (home / "jars" / "hadoop-aws-3.9.1.jar").touch()
    check(home, "s3://b/log")
    with pytest.raises(HistoryError, match="hadoop-azure"):
        check(home, "abfs://c@a.dfs.core.windows.net/t")


def test_another_package_is_not_taken_for_the_connector(home: Path) -> None:
    with pytest.raises(HistoryError, match=S3_PACKAGE):
        check(home, "s3://b/log", settings={"spark.jars.packages": "io.delta:delta-spark:4.0.0"})


def test_paths_and_unknown_schemes_need_nothing(home: Path) -> None:
    check(home, "/var/lib/events", "file:///var/lib/tables", "memory://x")


@pytest.mark.parametrize(
    ("said", "artifact"),
    [
        (
            'org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "gs"',
            "gcp",
        ),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found", "aws"),
        ("java.lang.NoClassDefFoundError: software/amazon/awssdk/core/Sdk", "aws"),
        ("Class org.apache.hadoop.fs.azurebfs.AzureBlobFileSystem not found", "azure"),
    ],
)
def test_what_spark_says_of_a_missing_connector_becomes_the_same_advice(
    said: str, artifact: str
) -> None:
    version = connectors.hadoop_version(connectors.spark_home())
    told = explain(RuntimeError(f"An error occurred while calling o1.load\n: {said}\n\tat x.y"))
    assert told.endswith(f"give --packages org.apache.hadoop:hadoop-{artifact}:{version}")


def test_other_words_of_spark_are_left_as_they_are() -> None:
    assert connectors.hint("Path does not exist: s3a://b/x") == ""
    assert connectors.hint('No FileSystem for scheme "sftp"') == ""


def test_a_place_gives_spark_the_scheme_of_the_connector() -> None:
    place = Place("s3://bucket/shop/")
    assert (place.at("tasks"), place.shown) == ("s3a://bucket/shop/tasks", "s3://bucket/shop/")
