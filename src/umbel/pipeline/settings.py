"""Settings of Spark: ours, those of `spark-defaults.conf`, and those of the command line.

Later ones win: ours < `spark-defaults.conf` < `--conf`. The file is the one that Spark itself
reads, in SPARK_CONF_DIR or in `conf` of SPARK_HOME. It has to be read here too: whatever a program
sets goes before the file, and ours are meant to stand behind it.

`FIXED` are not a matter of taste: with another time zone, or files that are skipped where they
cannot be read, the same log gives other tables, and nothing would tell. A `--conf` that changes one
is refused; what the file says of one, which was written for other programs too, is left aside with
a warning. Options of Java are added to ours, which are needed for the log; a garbage collector of
the user's takes the place of ours.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from umbel import files
from umbel.pipeline.connectors import spark_home
from umbel.pipeline.errors import HistoryError

logger = logging.getLogger("umbel.history")

DEFAULTS: Final = "spark-defaults.conf"
FIXED: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "true",
}
# Who may read what is written (`umbel.files`).
UMASK: Final = "spark.hadoop.fs.permissions.umask-mode"
MASTER: Final = "spark.master"
JAVA_OPTIONS: Final = ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions")
_GARBAGE_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC\b")
_SECRET: Final = re.compile(r"(?i)secret|password|token|credential|access[._-]?key|account\.key")
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def fixed() -> dict[str, str]:
    """The settings that nobody may change."""
    return {**FIXED, UMASK: f"{files.umask():03o}"}


def read_conf(
    pairs: Iterable[str] = (), packages: Iterable[str] = (), jars: Iterable[str] = ()
) -> dict[str, str]:
    """What the command line says, checked: `--conf K=V`, `--packages` and `--jars`."""
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals or not key.startswith("spark.") or any(map(str.isspace, key)):
            raise HistoryError(
                f"--conf {shown(pair)}: write KEY=VALUE with a setting of Spark, such as "
                "spark.executor.memory=4g"
            )
        given[key] = value.strip()
    if wanted := _listed(packages):
        for package in wanted:
            if not re.fullmatch(r"[^\s:,]+:[^\s:,]+:[^\s:,]+", package):
                raise HistoryError(
                    f"--packages {package!r}: write GROUP:ARTIFACT:VERSION, such as "
                    "org.apache.hadoop:hadoop-aws:3.5.0"
                )
        given["spark.jars.packages"] = ",".join(wanted)
    if wanted := _listed(jars):
        for jar in wanted:
            if "://" not in jar and not Path(jar).expanduser().is_file():
                raise HistoryError(f"--jars {jar!r}: there is no such file")
        given["spark.jars"] = ",".join(
            jar if "://" in jar else str(Path(jar).expanduser().absolute()) for jar in wanted
        )
    refuse_fixed(given)
    return given


def refuse_fixed(given: Mapping[str, str]) -> None:
    """Refuse settings that would change what the tables say, or who may read them."""
    for key, value in fixed().items():
        if key in given and given[key].lower() != value.lower():
            raise HistoryError(
                f"--conf {key}={given[key]}: the tables need {key}={value}; leave it out"
            )


def java_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The `java` that Spark starts, if there is one."""
    home = environment.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    return None if found is None else Path(found)


def read_defaults(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What `spark-defaults.conf` says; nothing where there is none."""
    path = defaults_path(environment)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise HistoryError(f"cannot read {path}: {reason}") from exc
    return {key: value for key, value in parse(text).items() if key.startswith("spark.")}


def defaults_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where Spark looks for its defaults."""
    folder = environment.get("SPARK_CONF_DIR")
    return (Path(folder) if folder else spark_home(environment) / "conf") / DEFAULTS


def parse(text: str) -> dict[str, str]:
    """The properties of a file as Java reads them: `key value`, `key=value`, `key: value`."""
    found: dict[str, str] = {}
    lines = iter(text.splitlines())
    for first in lines:
        whole = first.lstrip()
        if not whole or whole[0] in "#!":
            continue
        while _goes_on(whole):
            whole = whole[:-1] + next(lines, "").lstrip()
        match = re.match(r"((?:\\.|[^\\\s=:])*)\s*[=:]?\s*(.*)", whole)
        assert match is not None
        found[_unescaped(match[1])] = _unescaped(match[2]).strip()
    return found


def combined(
    ours: Mapping[str, str], defaults: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """All settings, in their precedence; `FIXED` ones are as they have to be."""
    refuse_fixed(given)
    never = fixed()
    for key in sorted(never.keys() & defaults.keys()):
        if defaults[key].lower() != never[key].lower():
            logger.warning(
                "%s: %s=%s is ignored, as the tables need %s",
                defaults_path(), key, defaults[key], never[key],
            )  # fmt: skip
    made = {**ours, **defaults, **given, **never}
    for key in JAVA_OPTIONS:
        theirs = given.get(key, defaults.get(key, ""))
        own = ours.get(key, "")
        if _GARBAGE_COLLECTOR.search(theirs):
            own = _GARBAGE_COLLECTOR.sub("", own)
        if both := " ".join(f"{own} {theirs}".split()):
            made[key] = both
    made.pop(MASTER, None)  # has an option of its own
    return made


def master_of(given: str | None, conf: Mapping[str, str], default: str) -> str:
    """The master: `--master`, then `--conf`, then `spark-defaults.conf`, then ours."""
    return given or conf.get(MASTER) or read_defaults().get(MASTER) or default


def shown(pair: str) -> str:
    """A setting for a message; of one that may be a secret only the name."""
    key, equals, _ = pair.partition("=")
    return repr(f"{key}=**" if equals and _SECRET.search(key) else pair[:200])


def endpoints(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An S3 that is not Amazon's, as the environment names it, for Hadoop, which does not look."""
    url = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if not url:
        return {}
    return {"spark.hadoop.fs.s3a.endpoint": url, "spark.hadoop.fs.s3a.path.style.access": "true"}


def _listed(texts: Iterable[str]) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _goes_on(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _unescaped(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        return _ESCAPES.get(match[2], match[2])

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", plain, text)
