"""Settings of Spark: which one wins, which cannot be changed, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from umbel.pipeline import settings
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.session import _java_reason

OURS = {"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": "-XX:+UseParallelGC -Dlog=x"}


@pytest.fixture
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    return tmp_path / "spark-defaults.conf"


def test_the_command_line_goes_before_the_file_and_the_file_before_ours(defaults: Path) -> None:
    defaults.write_text(
        "# of this company\n"
        "spark.ui.enabled   true\n"
        "spark.executor.memory=2g\n"
        "spark.executor.cores: 2\n"
        "spark.a.long  one\\\n   two\n"
        "spark.tab\\u0020bed\\ttwo\n"
        "hive.exec x\n"
    )
    made = settings.combined(
        OURS, settings.read_defaults(), settings.read_conf(["spark.executor.memory=9g"])
    )
    assert made["spark.ui.enabled"] == "true"
    assert made["spark.executor.memory"] == "9g"
    assert made["spark.executor.cores"] == "2"
    assert made["spark.a.long"] == "onetwo"
    assert "hive.exec" not in made


def test_the_file_is_that_of_spark_home_without_a_folder_of_its_own(tmp_path: Path) -> None:
    path = settings.defaults_path({"SPARK_HOME": str(tmp_path)})
    assert path == tmp_path / "conf" / "spark-defaults.conf"
    assert settings.read_defaults({"SPARK_HOME": str(tmp_path)}) == {}


def test_a_file_that_cannot_be_read_is_one_line(defaults: Path) -> None:
    defaults.mkdir()
    with pytest.raises(HistoryError, match=r"cannot read .*spark-defaults\.conf: Is a directory"):
        settings.read_defaults()


@pytest.mark.parametrize("key", [*settings.FIXED, settings.UMASK])
def test_what_the_tables_depend_on_cannot_be_changed(
    key: str, defaults: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = settings.fixed()[key]
    with pytest.raises(HistoryError, match=f"--conf {key}=x: the tables need {key}={right}"):
        settings.read_conf([f"{key}=x"])
    with pytest.raises(HistoryError, match="the tables need"):
        settings.combined(OURS, {}, {key: "x"})
    assert settings.read_conf([f"{key}={right.upper()}"]) == {key: right.upper()}
    defaults.write_text(f"{key} x\n")
    with caplog.at_level(logging.WARNING, "umbel.history"):
        made = settings.combined(OURS, settings.read_defaults(), {})
    assert made[key] == right
    assert f"{key}=x is ignored, as the tables need {right}" in caplog.text


def test_options_of_java_are_added_and_another_collector_replaces_ours() -> None:
    key = "spark.driver.extraJavaOptions"
    made = settings.combined(OURS, {key: "-Dfile=1"}, {})
    assert made[key] == "-XX:+UseParallelGC -Dlog=x -Dfile=1"
    made = settings.combined(OURS, {key: "-Dfile=1"}, {key: "-XX:+UseG1GC"})
    assert made[key] == "-Dlog=x -XX:+UseG1GC"


@pytest.mark.parametrize("pair", ["x", "=v", "executor.memory=1g", "spark.a b=1", "spark.x", ""])
def test_what_is_no_setting_is_refused_with_an_example(pair: str) -> None:
    with pytest.raises(HistoryError, match=r"write KEY=VALUE .* spark\.executor\.memory=4g"):
        settings.read_conf([pair])


def test_a_refused_setting_does_not_show_a_secret() -> None:
    with pytest.raises(HistoryError) as caught:
        settings.read_conf(["hadoop.fs.s3a.secret.key=hunter2"])
    assert "hunter2" not in str(caught.value)
    assert "secret.key" in str(caught.value)


def test_a_value_may_have_equals_signs_and_be_empty() -> None:
    given = settings.read_conf(["spark.x=-Da=b -Dc=d", "spark.y="])
    assert given == {"spark.x": "-Da=b -Dc=d", "spark.y": ""}


def test_packages_and_jars_may_be_given_together_or_one_by_one(tmp_path: Path) -> None:
    jar = tmp_path / "x.jar"
    jar.touch()
    given = settings.read_conf((), ["a:b:1, c:d:2", "e:f:3"], [str(jar), "s3a://b/y.jar"])
    assert given["spark.jars.packages"] == "a:b:1,c:d:2,e:f:3"
    assert given["spark.jars"] == f"{jar},s3a://b/y.jar"
    with pytest.raises(HistoryError, match=r"--jars '.*nothing\.jar': there is no such file"):
        settings.read_conf((), (), [str(tmp_path / "nothing.jar")])
    with pytest.raises(
        HistoryError, match=r"--packages 'hadoop-aws': write GROUP:ARTIFACT:VERSION"
    ):
        settings.read_conf((), ["hadoop-aws"])


def test_the_master_comes_from_the_option_the_settings_or_the_file(defaults: Path) -> None:
    assert settings.master_of(None, {}, "local[*]") == "local[*]"
    defaults.write_text("spark.master spark://file:7077")
    assert settings.master_of(None, {}, "local[*]") == "spark://file:7077"
    conf = {"spark.master": "spark://conf:7077"}
    assert settings.master_of(None, conf, "local[*]") == "spark://conf:7077"
    assert settings.master_of("yarn", conf, "local[*]") == "yarn"
    assert "spark.master" not in settings.combined(OURS, settings.read_defaults(), conf)


def test_an_endpoint_of_the_environment_is_told_to_hadoop() -> None:
    assert settings.endpoints({}) == {}
    told = settings.endpoints({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"})
    assert told["spark.hadoop.fs.s3a.endpoint"] == "http://127.0.0.1:9000"
    assert told["spark.hadoop.fs.s3a.path.style.access"] == "true"


def test_a_package_that_no_repository_has_is_named() -> None:
    log = (
        ":: loading settings :: url = jar:file:/x/ivysettings.xml\n"
        "\t\t:: org.apache.hadoop#hadoop-aws;9.9: not found\n"
        'Exception in thread "main" java.lang.RuntimeException: '
        "[unresolved dependency: org.apache.hadoop#hadoop-aws;9.9: not found]\n\tat x.y(z)\n"
    )
    assert _java_reason(log).startswith("org.apache.hadoop:hadoop-aws:9.9 was not found: ")
    assert _java_reason('WARNING: x\nException in thread "main" E: bad\n\tat x\n') == "E: bad"
    assert _java_reason("Error: no such option\n") == "Error: no such option"
