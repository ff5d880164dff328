"""The keeper: a small process that runs one embedded server and ends it in time.

`embedded.join` starts it by path, detached, with as few imports as possible (about 10 MB).

    keeper <home> <socket> <server program> <fd of keeper.lock, locked>

Three locks (flock) in the home directory say who is there. Locks vanish with the processes
that hold them, however these end, so nothing stale is ever left:

- users.lock   shared: held by every process that uses the server. The keeper waits for it
               exclusively: when it gets it, nobody is left, and the server is stopped. Who
               comes meanwhile waits until that is done and then starts afresh.
- keeper.lock  exclusive: held by the one keeper, taken for it by the process that starts it.
- server.lock  exclusive: inherited by the server, so that a server whose keeper was killed
               is found out and ended before another one opens the same files.

A server that dies is started again at once; one that dies FAILURES_MAX times in a row within
HEALTHY_S of its start is given up, and the next `join` reports why. SIGTERM to the keeper
stops the server and then the keeper.

Standard output is a pipe to the starter: one line, `ready` or the reason of the failure.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import os
import select
import signal
import socket
import sys
import time

PING_TIMEOUT_S = 1.0
POLL_S = 0.002
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0  # then SIGKILL: the append-only file is complete up to the last second
HEALTHY_S = 2.0
FAILURES_MAX = 5
LOG_BYTES_MAX = 2**20
LEFT = b"L"  # on the wake-up pipe, next to the numbers of signals


def ask(socket_path: str, command: bytes) -> bytes:
    """The server's answer to a command without arguments; empty if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PING_TIMEOUT_S)
        try:
            sock.connect(socket_path)
            sock.sendall(command + b"\r\n")
            return sock.recv(64)
        except OSError:
            return b""


def ping(socket_path: str) -> bool:
    """Whether a server answers on the socket and has loaded its data."""
    return ask(socket_path, b"PING").startswith(b"+PONG")


def server_options(home: str, socket_path: str) -> list[str]:
    """The server's configuration: one socket, one append-only file, no network."""
    return [
        *("--port", "0"),
        *("--unixsocket", socket_path),
        *("--unixsocketperm", "600"),
        *("--dir", home),
        *("--pidfile", os.path.join(home, "redis.pid")),  # noqa: PTH118 - few imports
        *("--logfile", os.path.join(home, "redis.log")),  # noqa: PTH118
        *("--daemonize", "no"),
        *("--databases", "16"),
        *("--appendonly", "yes"),
        # Commands, not snapshots: servers read no snapshot of a newer kind, or of another make, and
        # advise to mend the file, which would empty it.
        *("--aof-use-rdb-preamble", "no"),
        *("--appendfsync", "everysec"),
        *("--save", ""),
        *("--maxmemory-policy", "noeviction"),
    ]


class Failed(Exception):
    """The server cannot be run; the text says why."""


class Keeper:
    """One server, from its start to the leaving of its last user."""

    def __init__(self, home: str, socket_path: str, program: str) -> None:
        self.home = home
        self.socket_path = socket_path
        self.program = program
        self.pid = 0  # of the server, while it is our unreaped child
        self.started_s = 0.0
        self.failures_count = 0
        self.users_fd = os.open(f"{home}/users.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self.server_fd = os.open(f"{home}/server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(self.server_fd, True)
        self.wake_r, self.wake_w = os.pipe()
        os.set_blocking(self.wake_w, False)

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the server until it answers; raise `Failed` if it does not."""
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.end_orphan()
        self.limit_log()
        self.spawn()
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ping(self.socket_path):
            if self.reap():
                raise Failed(f"the server ended at once: {self.last_words()}")
            if time.monotonic() > deadline:
                self.stop()
                raise Failed(f"the server gave no answer for {READY_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def mind(self) -> None:
        """Restart the server when it dies; return when it is stopped for good."""
        _thread.start_new_thread(self.wait_for_users_to_leave, ())
        while True:
            woken_by = os.read(self.wake_r, 64)
            if LEFT in woken_by or bytes([signal.SIGTERM]) in woken_by:
                self.stop()
                return
            if self.reap():
                healthy = time.monotonic() - self.started_s > HEALTHY_S
                self.failures_count = 1 if healthy else self.failures_count + 1
                if self.failures_count > FAILURES_MAX:
                    return
                self.spawn()

    def wait_for_users_to_leave(self) -> None:
        fcntl.flock(self.users_fd, fcntl.LOCK_EX)
        os.write(self.wake_w, LEFT)

    # -- the server ------------------------------------------------------------------------

    def spawn(self) -> None:
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
        self.pid = os.posix_spawn(
            self.program,
            [self.program, *server_options(self.home, self.socket_path)],
            os.environ,
            file_actions=[null, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)],
            setsigdef=[signal.SIGINT, signal.SIGHUP, signal.SIGPIPE],
        )
        self.started_s = time.monotonic()

    def reap(self) -> bool:
        """Whether the server has ended; only then its process id is free for others."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid

    def stop(self) -> None:
        """End the server; it writes and syncs its append-only file before it goes."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if not self.reap():
            ask(self.socket_path, b"SHUTDOWN")  # at once; the signal is seen 10 times a second
        if not self.reap():
            os.kill(self.pid, signal.SIGTERM)
        while not self.reap():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            select.select([self.wake_r], [], [], 0.05)
            self.drain()

    def drain(self) -> None:
        while select.select([self.wake_r], [], [], 0)[0]:
            os.read(self.wake_r, 64)

    def end_orphan(self) -> None:
        """End a server that outlived its keeper, and hold the lock that says there is none."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        sent = False
        while not try_lock(self.server_fd):
            # The lock is held, so the process that wrote the pid file is still there: the
            # number cannot have passed to another process.
            late = time.monotonic() > deadline
            if not sent or late:
                self.signal_orphan(signal.SIGKILL if late else signal.SIGTERM)
                sent = True
            if time.monotonic() > deadline + PING_TIMEOUT_S:
                raise Failed("a server that was left behind does not end")
            time.sleep(POLL_S)

    def signal_orphan(self, number: int) -> None:
        try:
            with open(f"{self.home}/redis.pid", "rb") as file:  # noqa: PTH123 - few imports
                os.kill(int(file.read()), number)
        except (OSError, ValueError) as exc:
            raise Failed(f"a server was left behind and cannot be ended: {exc}") from exc

    # -- the log ---------------------------------------------------------------------------

    def limit_log(self) -> None:
        log = f"{self.home}/redis.log"
        try:
            if os.stat(log).st_size > LOG_BYTES_MAX:  # noqa: PTH116 - few imports
                os.replace(log, f"{log}.1")  # noqa: PTH105
        except FileNotFoundError:
            pass

    def last_words(self) -> str:
        try:
            with open(f"{self.home}/redis.log", "rb") as file:  # noqa: PTH123
                lines = file.read()[-2000:].decode(errors="replace").split("\n")
        except OSError:
            lines = []
        said = [line for line in lines if line.strip()]
        return said[-1].split(" # ")[-1] if said else f"see {self.home}/redis.log"


def try_lock(fd: int) -> bool:
    """Take the lock exclusively if nobody has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def tell_starter(text: str) -> None:
    """Write the one line of the contract, and let go of the pipe."""
    try:  # noqa: SIM105 - few imports
        os.write(1, text.encode() + b"\n")
    except OSError:
        pass  # the starter is gone; the locks tell whether anybody else is there
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


def remove_private_directory(home: str, socket_path: str) -> None:
    parent = os.path.dirname(socket_path)  # noqa: PTH120 - few imports
    if parent != home:
        try:  # noqa: SIM105
            os.rmdir(parent)  # noqa: PTH106
        except OSError:
            pass


def main(argv: list[str]) -> int:
    home, socket_path, program, fd_text = argv
    keeper_fd = int(fd_text)
    os.set_inheritable(keeper_fd, False)
    if os.fork():
        os._exit(0)  # nobody's child: the starter need not wait for the keeper
    os.umask(0o077)
    os.chdir(home)
    try:
        keeper = Keeper(home, socket_path, program)
        keeper.start()
    except (Failed, OSError) as exc:
        tell_starter(str(exc))
        return 1
    tell_starter("ready")
    keeper.mind()
    remove_private_directory(home, socket_path)
    # In this order: who gets in at users.lock must find nobody at the other two.
    os.close(keeper.server_fd)
    os.close(keeper_fd)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
