"""The embedded broker: a private Valkey or Redis server for one directory, run only while used.

No broker configured means this one. `join` gives a process a lease on the server of
`<directory>/.umbel`, starting the server if it is the first; when the last lease ends, the
server ends too. All processes started in one directory share one server; two directories
never meet, because a server listens on a socket inside its own directory and nowhere else.

Invariants
- The directory is readable by its owner only (0700), and so is the socket (0600).
- A lease is a shared lock on `users.lock`. The kernel releases it when the process ends,
  even by SIGKILL, so no server outlives its users. `keeper` explains the locks.
- A lease belongs to the process that took it. A forked child starts without any: it neither
  keeps the server alive nor can it release its parent's lease; if it may outlive its parent
  it must `join` itself.
- The data stay: an append-only file, synced every second and when the server is stopped. Any
  server that can be chosen (`program`) reads what any other one has written.
- A server of an older Umbel that still runs is used as it is. When it has ended, the next one takes
  over its data.

How it fails: `ImproperlyConfigured` names the directory and the way out when the data cannot
be kept there, when no server program is found, or when the server does not start. A server
that crashes is restarted by its keeper; a keeper that is killed is replaced by the next
`join`, whatever sockets and files were left lying around.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from umbel.broker.embedded import keeper
from umbel.broker.embedded.program import NEW_ENOUGH, VERSION_MIN, server_program
from umbel.exceptions import ImproperlyConfigured
from umbel.files import open_file

logger = logging.getLogger("umbel.broker")

EMBEDDED_URL = "embedded://"

# Longest path of a socket that the kernel takes, without the closing NUL.
SOCKET_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107
# Waiting for others: a server that is being stopped, or started by another process.
TURN_TIMEOUT_S = keeper.STOP_TIMEOUT_S + keeper.READY_TIMEOUT_S
# At the beginning of what a server answers to INFO; Valkey reports the Redis that it stands for.
_RUNNING_VERSION = re.compile(rb"redis_version:((\d+)\.(\d+)[\d.]*)")


class Lease:
    """The right to use the server of one directory, until `close` or the end of the process."""

    url: str
    socket_path: Path

    def __init__(self, hold: _Hold) -> None:
        self._hold = hold
        self._closed = False
        self.socket_path = hold.socket_path
        self.url = f"redis+socket://{quote(str(hold.socket_path))}?virtual_host=0"

    def close(self) -> None:
        """Give the lease back; the last one of all processes stops the server. Idempotent."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            hold = self._hold
            if _holds.get(hold.home) is not hold:
                return  # taken before a fork: it is the parent's
            hold.leases_count -= 1
            if not hold.leases_count:
                del _holds[hold.home]
                _close(hold.fd)


def join(directory: Path | None = None, program: str | None = None) -> Lease:
    """Use the server of `directory` (default: the working directory), starting it if needed.

    `program` is the setting `embedded_server`; it has no effect on a server that runs already.
    When this returns, the server answers. Every call gives a lease of its own; the process
    leaves when all of them are closed.
    """
    home = _make_home(directory)
    with _lock:
        hold = _holds.get(home)
        if hold is not None:
            hold.leases_count += 1
            lease = Lease(hold)
    if hold is not None:
        _ensure_running(home, program)
        return lease
    fd = _enter(home)
    try:
        socket_path = _ensure_running(home, program)
    except BaseException:
        _close(fd)
        raise
    with _lock:
        hold = _holds.setdefault(home, _Hold(home, socket_path, fd))
        hold.leases_count += 1
        if hold.fd != fd:
            _close(fd)  # another thread was faster
        return Lease(hold)


# -- what this process holds ----------------------------------------------------------------


@dataclass(slots=True)
class _Hold:
    home: Path
    socket_path: Path
    fd: int  # holds users.lock
    leases_count: int = 0


_lock = threading.Lock()
_holds: dict[Path, _Hold] = {}
_lock_fds: set[int] = set()  # every lock file that is open, so that a forked child can let go
_passing: dict[int, int] = {}  # thread -> the lock that it hands to a keeper it is starting


def _open_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _lock_fds.add(fd)
    return fd


def _close(fd: int) -> None:
    _lock_fds.discard(fd)
    os.close(fd)


def _let_go_after_fork() -> None:
    # Closing the child's copies leaves the parent's locks in place. gevent starts programs by
    # a plain fork: that child is about to become the keeper and needs the lock it is handed.
    global _lock
    _lock = threading.Lock()
    _holds.clear()
    for fd in _lock_fds - {_passing.get(threading.get_ident())}:
        _close(fd)


os.register_at_fork(after_in_child=_let_go_after_fork)


def _enter(home: Path) -> int:
    """Take a share of users.lock; waits while a server is being stopped."""
    fd = _open_lock(home / "users.lock")
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                _close(fd)
                raise _not_running(home, "the server that ran before does not end") from None
            time.sleep(keeper.POLL_S)
        except OSError as exc:
            _close(fd)
            raise _not_usable(home, exc.strerror or str(exc)) from exc
        else:
            return fd


# -- the server -----------------------------------------------------------------------------


def _ensure_running(home: Path, program: str | None) -> Path:
    """Return the socket of a server that answers; start a keeper if there is none."""
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while True:
        fd = _open_lock(home / "keeper.lock")
        try:
            if keeper.try_lock(fd):
                chosen = server_program(program)
                _refuse_two_sets_of_data(home)
                socket_path = _new_socket_path(home)
                _start_keeper(home, socket_path, chosen, fd)
                return socket_path
        finally:
            _close(fd)
        known = _known_socket_path(home)
        if known is not None and keeper.ping(str(known)):
            _warn_of_old_server(home, known)
            return known
        if time.monotonic() > deadline:
            raise _not_running(home, f"it gave no answer for {TURN_TIMEOUT_S:.0f} s")
        time.sleep(keeper.POLL_S)


def _start_keeper(home: Path, socket_path: Path, program: str, keeper_fd: int) -> None:
    """Start the keeper, born with keeper.lock, and wait for the word that the server answers."""
    command = [sys.executable, "-I", "-S", keeper.__file__]
    command += [str(home), str(socket_path), program, str(keeper_fd)]
    _passing[threading.get_ident()] = keeper_fd
    try:
        with open_file(home / "redis.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(keeper_fd,),
                start_new_session=True,  # no signal of our terminal reaches it
            )
    finally:
        del _passing[threading.get_ident()]
    with process:
        try:
            said, _ = process.communicate(timeout=TURN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise _not_running(home, "its keeper gave no answer") from None
    answer = said.decode(errors="replace").strip()
    if answer != "ready":
        raise _not_running(home, answer or "its keeper ended at once")


def _warn_of_old_server(home: Path, socket_path: Path) -> None:
    """Report a server that an older Umbel has started: it works, and it has security holes."""
    found = _RUNNING_VERSION.search(keeper.ask(str(socket_path), b"INFO server"))
    if found is not None and (int(found[2]), int(found[3])) < VERSION_MIN:
        logger.warning(
            "The embedded broker in %s is still served by Redis %s, which a process of an older "
            "Umbel has started. Stop every process that uses it: the next one to start takes over "
            "the data with a server of version %s.",
            home, found[1].decode(), NEW_ENOUGH,
        )  # fmt: skip


def _refuse_two_sets_of_data(home: Path) -> None:
    """Refuse to choose between the data of an older Umbel and those of this one.

    A server of version 7 or newer moves the file of an older one into its directory. If there is
    such a file beside a directory that is in use, an older Umbel was started after a newer one, and
    both have data that the other one does not see.
    """
    old, new = home / "appendonly.aof", home / "appendonlydir"
    try:
        used = b" type i" in (new / "appendonly.aof.manifest").read_bytes()
        both = used and old.stat().st_size > 0
    except OSError:
        return  # the usual case: one of the two; the server reports what it cannot read
    if both:
        raise ImproperlyConfigured(
            f"the embedded broker has two sets of data: {old}, which an older Umbel has written "
            f"after a newer one, and {new}. Move one of them to another place"
        )


# -- places ---------------------------------------------------------------------------------


def _make_home(directory: Path | None) -> Path:
    """The data directory, made if missing, checked to be ours and ours only."""
    home = Path(directory or ".") / ".umbel"
    try:
        home = home.absolute()
        home.mkdir(mode=0o700, exist_ok=True)
        home = home.resolve()
        found = home.stat()
        if found.st_uid != os.geteuid():
            raise _not_usable(home, f"it belongs to user {found.st_uid}")
        if stat.S_IMODE(found.st_mode) != 0o700:
            home.chmod(0o700)
        # Another thread or process may make it at the same moment.
        with contextlib.suppress(FileExistsError), open_file(home / ".gitignore", "x") as file:
            file.write("*\n")
        if not os.access(home, os.W_OK):
            raise _not_usable(home, "it is not writable")
    except OSError as exc:
        raise _not_usable(home, exc.strerror or str(exc)) from exc
    return home


def _new_socket_path(home: Path) -> Path:
    """Where the next server listens: in its home, or elsewhere if that path is too long."""
    path = home / "redis.sock"
    if _fits(path):
        return path
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    private = Path(tempfile.gettempdir()).resolve() / f"umbel-{os.geteuid()}-{name}"
    private.mkdir(mode=0o700, exist_ok=True)
    elsewhere = private / "redis.sock"
    if not _is_private(private):
        raise _not_usable(private, "it is not a directory of this user alone")
    if not _fits(elsewhere):
        raise _not_usable(elsewhere, "the path is too long for a socket; set TMPDIR")
    # Others look here, whatever temporary directory their environment names.
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)
    return elsewhere


def _known_socket_path(home: Path) -> Path | None:
    """Where the running server listens, as far as can be told yet."""
    path = home / "redis.sock"
    if _fits(path):
        return path
    try:
        elsewhere = path.readlink()
    except OSError:
        return None
    return elsewhere if _is_private(elsewhere.parent) else None


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def _is_private(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    ours = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
    return ours and stat.S_ISDIR(found.st_mode)


def _not_usable(path: Path, reason: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"the embedded broker cannot keep its data in {path}: {reason}; start in a directory of "
        "your own that you can write to, or set broker_url and result_backend"
    )


def _not_running(home: Path, reason: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"the embedded broker in {home} does not run: {reason}; see {home / 'redis.log'}, or set "
        "broker_url and result_backend to servers of your own"
    )
