"""What a worker writes to its log."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from umbel.app.conf import Conf
from umbel.app.context import Context, Frame, current_frame
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.secret_texts import mask_addresses
from umbel.worker import logs
from umbel.worker.logs import Logging, LogStream

Setup = Callable[..., Logging]


class NamedTask:
    name = "shop.charge"


def inside_task(work: Callable[[], Any], task_id: str = "id-1") -> None:
    token = current_frame.set(Frame(NamedTask(), Context(id=task_id), None))  # type: ignore[arg-type]
    try:
        work()
    finally:
        current_frame.reset(token)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


@pytest.fixture
def setup(log_file: Path) -> Iterator[Setup]:
    """`setup(json=..., level=..., **settings)` sends the log to `log_file`."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    made: list[Logging] = []

    def start(*, json: bool = False, level: int = logging.INFO, **settings: Any) -> Logging:
        conf = Conf()
        conf.update(settings)
        made.append(logs.setup(level, str(log_file), json, None, conf))
        return made[-1]

    yield start
    for log in reversed(made):
        log.close()
    # The handlers of pytest change between the phases of a test.
    root.handlers[:] = [h for h in before[0] if h in root.handlers]
    root.setLevel(before[1])


def test_lines_inside_a_task_carry_its_name_and_id(setup: Setup, log_file: Path) -> None:
    setup()
    theirs = logging.getLogger("shop.payments")
    theirs.info("outside")
    inside_task(lambda: theirs.info("inside"))
    outside, inside = log_file.read_text().splitlines()
    assert outside.endswith("INFO/MainProcess] outside")
    assert inside.endswith("INFO/MainProcess] shop.charge[id-1]: inside")


def test_both_formats_can_be_changed(setup: Setup, log_file: Path) -> None:
    setup(worker_log_format="plain %(message)s", worker_task_log_format="%(task_id)s %(message)s")
    logging.getLogger("x").warning("one")
    inside_task(lambda: logging.getLogger("x").warning("two"))
    assert log_file.read_text().splitlines() == ["plain one", "id-1 two"]


def test_json_lines_are_json_exceptions_included(setup: Setup, log_file: Path) -> None:
    setup(json=True)

    def fail() -> None:
        try:
            raise ValueError("bad\nnews")
        except ValueError:
            logging.getLogger("x").exception("it %s", "failed", extra={"odd": object()})

    inside_task(fail)
    (line,) = log_file.read_text().splitlines()
    found = json.loads(line)
    assert found["message"] == "it failed"
    assert (found["task_id"], found["task_name"]) == ("id-1", "shop.charge")
    assert (found["level"], found["logger"], found["process"]) == ("ERROR", "x", os.getpid())
    assert found["timestamp"].endswith("+00:00")
    assert found["exception"]["type"] == "ValueError"
    assert "raise ValueError" in found["exception"]["traceback"]


def test_json_lines_of_the_worker_about_a_task_name_it(setup: Setup, log_file: Path) -> None:
    setup(json=True)
    logging.getLogger("umbel.request").info("Task %s[%s] received", "shop.charge", "id-2")
    found = json.loads(log_file.read_text())
    assert (found["task_id"], found["task_name"]) == ("id-2", "shop.charge")


def test_what_a_task_prints_becomes_whole_lines_of_its_own(setup: Setup, log_file: Path) -> None:
    log = setup()
    with log.redirected():
        inside_task(lambda: print("a", "b", sep="-"))
        inside_task(lambda: print("part", end=""), "id-2")
        inside_task(lambda: print("other", file=sys.stderr), "id-3")
        inside_task(lambda: print("next"), "id-3")
    lines = [line.partition("] ")[2] for line in log_file.read_text().splitlines()]
    assert lines == [
        "shop.charge[id-1]: a-b",
        "shop.charge[id-3]: other",
        "shop.charge[id-2]: part",
        "shop.charge[id-3]: next",
    ]


def test_prints_stay_prints_when_the_settings_say_so(
    setup: Setup, log_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with setup(worker_redirect_stdouts=False).redirected():
        print("plain")
    assert capsys.readouterr().out == "plain\n"
    assert log_file.read_text() == ""


def test_the_level_of_prints_follows_the_settings(setup: Setup, log_file: Path) -> None:
    with setup(worker_redirect_stdouts_level="DEBUG").redirected():
        print("too low")
    assert log_file.read_text() == ""


class FailingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print("the handler prints")
        sys.stderr.write("and complains\n")


def test_a_handler_that_prints_does_not_go_round_for_ever(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    log = setup()
    handler = FailingHandler()
    logging.getLogger().addHandler(handler)
    try:
        with log.redirected():
            print("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().out == "the handler prints\n"


def test_a_line_without_an_end_is_bounded(setup: Setup, log_file: Path) -> None:
    setup()
    stream = LogStream(sys.stdout, logging.WARNING)
    for _ in range(3):
        stream.write("x" * logs.PARTIAL_LINE_CHARS_MAX)
    assert len(log_file.read_text()) > logs.PARTIAL_LINE_CHARS_MAX


def test_everything_is_put_back_at_the_end(log_file: Path) -> None:
    root = logging.getLogger()
    before = sorted(map(id, root.handlers)), root.level
    log = logs.setup(logging.DEBUG, str(log_file), False, None, Conf())
    assert root.handlers == [log.handler]
    log.close()
    assert (sorted(map(id, root.handlers)), root.level) == before


def test_a_rotated_file_is_found_again(setup: Setup, log_file: Path) -> None:
    setup()
    logging.getLogger("x").info("one")
    log_file.rename(log_file.with_suffix(".1"))
    logging.getLogger("x").info("two")
    assert "two" in log_file.read_text()


def test_a_forked_child_logs_under_a_name_of_its_own(setup: Setup, log_file: Path) -> None:
    setup()
    pid = os.fork()
    if pid == 0:
        inside_task(lambda: logging.getLogger("x").info("from the child"))
        os._exit(0)
    os.waitpid(pid, 0)
    assert f"INFO/pool-{pid}] shop.charge[id-1]: from the child" in log_file.read_text()


def test_warnings_go_to_the_log(setup: Setup, log_file: Path) -> None:
    setup()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old ways", DeprecationWarning, stacklevel=1)
    assert "old ways" in log_file.read_text()


def test_the_root_logger_stays_the_users_when_the_settings_say_so(
    setup: Setup, log_file: Path
) -> None:
    before = list(logging.getLogger().handlers)
    setup(worker_hijack_root_logger=False)
    assert logging.getLogger().handlers == before
    logging.getLogger("umbel.x").info("ours")
    logging.getLogger("y").warning("theirs")
    assert "ours" in log_file.read_text()
    assert "theirs" not in log_file.read_text()


def test_what_an_operator_must_know_is_said_at_any_level(setup: Setup, log_file: Path) -> None:
    setup(level=logging.ERROR).say("w1@host ready.")
    assert log_file.read_text().endswith("INFO/MainProcess] w1@host ready.\n")


def test_times_are_in_the_zone_of_the_settings(setup: Setup, log_file: Path) -> None:
    setup(timezone="Asia/Tokyo", json=True)
    logging.getLogger("x").info("now")
    assert json.loads(log_file.read_text())["timestamp"].endswith("+09:00")


def test_a_file_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"log file .* can not be written"):
        logs.setup(logging.INFO, str(tmp_path / "no" / "file"), False, None, Conf())


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://:hidden@h:6379/0", "redis://:**@h:6379/0"),
        ("to amqp://user:hid/d@en@h// lost", "to amqp://user:**@h// lost"),
        ("sqs://hidden@", "sqs://**@"),
        ("'redis://u:hidden@a;redis://u:hidden@b'", "'redis://u:**@b'"),
        ("redis://h/0?password=hidden&db=1", "redis://h/0?password=**&db=1"),
        ("see http://h:8080/a?mail=x@y and me@home", "see http://h:8080/a?mail=x@y and me@home"),
        ("https://h/path?a=1", "https://h/path?a=1"),
        ("no address: a:b@c", "no address: a:b@c"),
    ],
)
def test_passwords_of_addresses_are_masked(text: str, masked: str) -> None:
    assert mask_addresses(text) == masked


def test_secrets_in_tracebacks_are_hidden_by_their_names(setup: Setup, log_file: Path) -> None:
    for as_json in (False, True):
        setup(json=as_json, task_redact_names=["iban"])
        try:
            raise OSError("refused: " + "iban=DE500105, user=bob")
        except OSError:
            logging.getLogger("x").exception("failed")
    assert "DE500105" not in log_file.read_text()
    assert log_file.read_text().count("OSError: refused: iban=**, user=bob") == 2


@pytest.mark.parametrize("json", [False, True])
def test_secrets_are_hidden_in_tracebacks_that_a_handler_of_the_user_has_formatted(
    setup: Setup, log_file: Path, tmp_path: Path, json: bool
) -> None:
    setup(json=json)
    theirs, logger = logging.FileHandler(tmp_path / "own.log"), logging.getLogger("shop.own")
    logger.addHandler(theirs)  # called before ours, and the record keeps what it made
    try:
        raise ValueError("no login with password=hunter2")
    except ValueError:
        logger.exception("failed")
    finally:
        logger.removeHandler(theirs)
        theirs.close()
    record = logger.makeRecord(logger.name, logging.ERROR, "", 0, "in another process", (), None)
    record.exc_text = "OSError: token=hunter2"
    logger.handle(record)
    text = log_file.read_text()
    assert "password=**" in text
    assert "token=**" in text
    assert "hunter2" not in text


def test_passwords_in_tracebacks_are_masked(setup: Setup, log_file: Path) -> None:
    for as_json in (False, True):
        setup(json=as_json)
        try:
            raise OSError("cannot reach redis://u:hidden@h/0")
        except OSError:
            logging.getLogger("x").exception("redis://u:hidden@h/0 failed")
    # The source line of the raise is part of the traceback as well.
    assert "hidden" not in log_file.read_text()
    assert "redis://u:**@h/0" in log_file.read_text()
