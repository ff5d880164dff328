"""The embedded broker, with real processes and real servers."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from kombu import Connection

from tests.embedding import (
    STAY,
    USER,
    client,
    is_written,
    server_pid,
    servers_of,
    user,
    wait_until_stopped,
)
from tests.servers import wait_until
from tests.workers import Program
from umbel.broker.embedded import server as embedded
from umbel.exceptions import ImproperlyConfigured

Start = Callable[..., Program]


def test_a_message_goes_through_the_url_of_the_lease(home: Path) -> None:
    lease = embedded.join(home)
    assert lease.url.startswith("redis+socket:///")
    with Connection(lease.url) as connection:
        queue = connection.SimpleQueue("letters")
        queue.put("hello")
        assert queue.get(timeout=30).payload == "hello"
        queue.close()
    lease.close()
    wait_until_stopped(home)


def test_a_path_with_odd_characters_is_fine(home: Path) -> None:
    odd = home / 'a b%20"ü#?'
    odd.mkdir()
    lease = embedded.join(odd)
    with Connection(lease.url) as connection:
        connection.SimpleQueue("letters").put("hello")
    lease.close()
    wait_until_stopped(odd)


def test_two_processes_share_one_server(home: Path, start: Start) -> None:
    lease = embedded.join(home)
    pid = server_pid(home)
    then = (
        "import redis; client = redis.Redis(unix_socket_path=str(lease.socket_path))\n"
        "client.set('from', 'other'); client.close(); print('set', flush=True)\n"
    )
    other = user(start, home, then)
    other.wait_for("set")
    assert other.wait() == 0
    with client(home) as connection:
        assert connection.get("from") == b"other"
    assert server_pid(home) == pid
    lease.close()


def test_the_server_stays_while_anybody_is_left(home: Path, start: Start) -> None:
    lease = embedded.join(home)
    other = user(start, home)
    pid = server_pid(home)
    lease.close()
    assert server_pid(home) == pid
    other.kill()
    wait_until_stopped(home)


def test_the_data_survive_a_stop(home: Path) -> None:
    lease = embedded.join(home)
    pid = server_pid(home)
    with client(home) as connection:
        connection.set("key", "kept")
    lease.close()
    wait_until_stopped(home)
    lease = embedded.join(home)
    assert server_pid(home) != pid
    with client(home) as connection:
        assert connection.get("key") == b"kept"
    lease.close()


def test_who_comes_while_the_server_is_being_stopped_gets_one_all_the_same(home: Path) -> None:
    for number in range(1, 21):
        lease = embedded.join(home)
        with client(home) as connection:
            assert connection.incr("visits") == number
        lease.close()
        if number % 2 and number < 20:  # every other time, not before the keeper has noticed
            wait_until(lambda: is_being_stopped(home), what="the keeper to notice")


def test_the_server_ends_when_its_only_user_is_killed(home: Path, start: Start) -> None:
    other = user(start, home)
    assert len(servers_of(home)) == 2  # the server and its keeper
    other.signal(signal.SIGKILL)
    assert other.wait() == -signal.SIGKILL
    wait_until_stopped(home)
    assert not (home / ".umbel" / "redis.sock").exists()


def test_a_killed_server_comes_back_with_its_data(home: Path) -> None:
    lease = embedded.join(home)
    pid = server_pid(home)
    with client(home) as connection:
        connection.set("key", "kept")
        wait_until(lambda: is_written(connection), what="the key to be in the file")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: answers_with_another_pid(home, pid), what="another server")
    with client(home) as connection:
        assert connection.get("key") == b"kept"
    again = embedded.join(home)
    again.close()
    lease.close()
    wait_until_stopped(home)


def test_a_killed_keeper_is_replaced_by_the_next_to_join(home: Path, start: Start) -> None:
    lease = embedded.join(home)
    pid = server_pid(home)
    with client(home) as connection:
        connection.set("key", "kept")
    (keeper,) = (p for p in servers_of(home) if p.pid != pid)
    keeper.kill()
    wait_until(lambda: len(servers_of(home)) == 1, what="the keeper to end")
    other = user(start, home)
    with client(home) as connection:
        assert connection.get("key") == b"kept"
    other.kill()
    lease.close()
    wait_until_stopped(home)


def test_everything_killed_at_once_is_no_problem_for_the_next(home: Path, start: Start) -> None:
    other = user(start, home)
    with client(home) as connection:
        connection.set("key", "kept")
        wait_until(lambda: is_written(connection), what="the key to be in the file")
    for process in servers_of(home):
        process.kill()
    other.kill()
    wait_until_stopped(home)
    assert (home / ".umbel" / "redis.sock").exists()  # stale
    lease = embedded.join(home)
    with client(home) as connection:
        assert connection.get("key") == b"kept"
    lease.close()


def test_two_directories_never_meet(home: Path) -> None:
    other = home / "other"
    other.mkdir()
    leases = [embedded.join(home), embedded.join(other)]
    with client(home) as connection:
        connection.set("mine", 1)
    with client(other) as connection:
        assert connection.get("mine") is None
        assert connection.config_get("port") == {"port": "0"}
    assert server_pid(home) != server_pid(other)
    for lease in leases:
        lease.close()
    wait_until_stopped(other)


def test_ten_processes_that_race_get_one_server(home: Path, start: Start) -> None:
    command = [sys.executable, "-c", USER, str(home), STAY]
    racers = [start(command) for _ in range(10)]
    for racer in racers:
        racer.wait_for("joined")
    assert len(servers_of(home)) == 2
    for racer in racers:
        racer.kill()
    wait_until_stopped(home)


def test_threads_that_race_share_one_hold(home: Path) -> None:
    leases: list[embedded.Lease] = []
    gate = threading.Barrier(8)

    def race() -> None:
        gate.wait()
        leases.append(embedded.join(home))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leases) == 8
    assert len(servers_of(home)) == 2
    for lease in leases:
        lease.close()
    wait_until_stopped(home)
    assert not embedded._lock_fds


def test_it_can_be_joined_under_gevent(home: Path, start: Start) -> None:
    source = (
        # Even when it was imported too early.
        "from umbel.broker.embedded import server as embedded\n"
        "from gevent import monkey; monkey.patch_all()\n"
        "import gevent, sys; from pathlib import Path\n"
        "jobs = [gevent.spawn(embedded.join, Path(sys.argv[1])) for _ in range(4)]\n"
        "print('joined', len({job.get().url for job in jobs}), flush=True)\n"
    )
    program = start([sys.executable, "-W", "ignore", "-c", source, str(home)])
    program.wait_for("joined 1")
    assert program.wait() == 0
    wait_until_stopped(home)


def test_a_long_path_gets_its_socket_elsewhere(home: Path, start: Start) -> None:
    deep = home / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    lease = embedded.join(deep)
    directory = lease.socket_path.parent
    assert len(os.fsencode(lease.socket_path)) <= embedded.SOCKET_PATH_BYTES_MAX
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    # Another temporary directory in the environment does not lead elsewhere.
    command = [sys.executable, "-c", USER, str(deep), STAY]
    other = start(command, env={"TMPDIR": str(home)})
    assert other.wait_for(r"joined (\S+)")[1] == str(lease.socket_path)
    other.kill()
    with Connection(lease.url) as connection:
        connection.SimpleQueue("letters").put("hello")
    lease.close()
    wait_until_stopped(deep)
    assert not directory.exists()


def test_a_strangers_directory_is_never_used_for_the_socket(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SOCKET_PATH_BYTES_MAX", 60)
    short = str(tmp_path_factory.mktemp("t"))
    monkeypatch.setattr(embedded.tempfile, "gettempdir", lambda: short)
    monkeypatch.setattr(embedded, "_fits", lambda path: path.parent.name != ".umbel")
    lease = embedded.join(home)
    private = lease.socket_path.parent
    lease.close()
    wait_until_stopped(home)
    private.symlink_to("/tmp")
    with pytest.raises(ImproperlyConfigured, match="not a directory of this user alone"):
        embedded.join(home)
    private.unlink()


def test_only_the_owner_can_read_it(home: Path) -> None:
    data = home / ".umbel"
    data.mkdir(mode=0o755)
    lease = embedded.join(home)
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE(lease.socket_path.stat().st_mode) == 0o600
    assert stat.S_ISSOCK(lease.socket_path.stat().st_mode)
    lease.close()


def test_closing_is_counted_and_idempotent(home: Path) -> None:
    first, second = embedded.join(home), embedded.join(home)
    pid = server_pid(home)
    first.close()
    first.close()
    assert server_pid(home) == pid
    second.close()
    wait_until_stopped(home)


def test_a_forked_child_neither_keeps_nor_releases_the_lease(home: Path, start: Start) -> None:
    then = (
        "import os, time\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    lease.close()\n"
        "    print('closed in', os.getpid(), flush=True)\n"
        "    import threading; threading.Event().wait()\n"
        "import threading; threading.Event().wait()\n"
    )
    parent = user(start, home, then)
    child = int(parent.wait_for(r"closed in (\d+)")[1])
    assert server_pid(home)  # the parent's lease stands
    parent.signal(signal.SIGKILL)
    wait_until_stopped(home)  # though the child lives on
    os.kill(child, signal.SIGKILL)


def test_a_forked_child_can_join_on_its_own(home: Path, start: Start) -> None:
    then = (
        "import os, threading\n"
        "if os.fork() == 0:\n"
        "    mine = embedded.join(Path(sys.argv[1]))\n"
        "    print('child', os.getpid(), flush=True)\n"
        "threading.Event().wait()\n"
    )
    parent = user(start, home, then)
    child = int(parent.wait_for(r"child (\d+)")[1])
    pid = server_pid(home)
    parent.signal(signal.SIGKILL)
    parent.process.wait(10)
    assert server_pid(home) == pid
    os.kill(child, signal.SIGKILL)
    wait_until_stopped(home)


def test_a_place_that_cannot_hold_data_is_named(tmp_path: Path) -> None:
    (tmp_path / ".umbel").write_text("not a directory")
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ImproperlyConfigured) as caught:
            embedded.join(directory)
        assert str(directory / ".umbel") in str(caught.value)
        assert "set broker_url" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_directory_of_somebody_else_is_refused() -> None:
    source = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from umbel.broker.embedded import server as embedded\n"
        "os.seteuid(65534)\n"
        "embedded.join(Path(sys.argv[1]))\n"
    )
    # Not below pytest's own directory: nobody else could even look there.
    with tempfile.TemporaryDirectory() as name:
        readable, used = Path(name), Path(name) / "used"
        readable.chmod(0o755)
        (used / ".umbel").mkdir(parents=True)
        for directory, reason in (
            (readable, "Permission denied"),
            (used, "it belongs to user 0"),
        ):
            done = subprocess.run(
                [sys.executable, "-c", source, str(directory)],
                stderr=subprocess.PIPE,
                text=True,
                timeout=30,
                check=False,
            )
            assert f"{directory.resolve() / '.umbel'}: {reason}" in done.stderr


def test_a_server_that_cannot_start_says_why(home: Path) -> None:
    data = home / ".umbel"
    data.mkdir(mode=0o700)
    (data / "appendonly.aof").write_text("this is no append-only file")
    with pytest.raises(ImproperlyConfigured, match=r"does not run: .*append only file"):
        embedded.join(home)
    wait_until_stopped(home)


def answers_with_another_pid(directory: Path, pid: int) -> bool:
    try:
        return server_pid(directory) != pid
    except redis.RedisError:
        return False


def is_being_stopped(directory: Path) -> bool:
    """Whether the keeper lets nobody in, or is done already."""
    data = directory / ".umbel"
    with (data / "users.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return not (data / "redis.sock").exists()
