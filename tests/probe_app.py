"""The application whose workers are put to the test: tasks that tell what happens to them.

Settings come from the environment of the worker. What a task did is kept in the Redis database
of `PROBE_URL`, apart from the broker and the result backend:

    runs          how often each token was run
    begun:TOKEN   gets an element whenever a run of that token begins
    gate:TOKEN    a run that waits goes on when there is an element
    order         the tokens in the order in which they ran
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
import time
from typing import Any

import redis

from umbel import Umbel
from umbel.exceptions import Ignore, Reject, SoftTimeLimitExceeded

GATE_S = 60

app = Umbel("probe")


_clients: dict[int, redis.Redis] = {}
_lock = threading.Lock()


def notes() -> redis.Redis:
    """Where tasks write down what they did; a connection pool of its own in each process."""
    with _lock:  # one that is made and dropped would close connections in use
        if os.getpid() not in _clients:
            url = os.environ["PROBE_URL"]
            _clients[os.getpid()] = redis.Redis.from_url(url, socket_timeout=None)
        return _clients[os.getpid()]


def begin(token: str) -> int:
    """Write down that a run of `token` begins; how many there were."""
    with notes().pipeline() as pipe:
        pipe.hincrby("runs", token, 1)
        pipe.rpush("order", token)
        pipe.rpush(f"begun:{token}", os.getpid())
        return int(pipe.execute()[0])


@app.task
def add(x: Any, y: Any) -> Any:
    return x + y


@app.task
def noop() -> None:
    """Nothing."""


@app.task
def fail(text: str = "on purpose") -> None:
    raise ValueError(text)


@app.task
def echo(value: Any, *_: Any) -> Any:
    return value


@app.task
def fail_with(value: Any) -> None:
    raise ValueError(value)


@app.task(bind=True)
def note(self: Any, value: Any) -> None:
    self.update_state(state="NOTED", meta=value)
    raise Ignore


@app.task(bind=True)
def replaced_by_echo(self: Any, value: Any) -> None:
    raise self.replace(echo.s(value))


@app.task
def pid() -> int:
    return os.getpid()


@app.task
def record(token: str) -> int:
    return begin(token)


@app.task(acks_late=True)
def record_late(token: str, work_s: float = 0.0) -> int:
    time.sleep(work_s)
    return begin(token)


@app.task
def wait(token: str) -> str:
    begin(token)
    notes().blpop([f"gate:{token}"], GATE_S)
    return token


@app.task(acks_late=True)
def wait_late(token: str) -> str:
    begin(token)
    notes().blpop([f"gate:{token}"], GATE_S)
    return token


@app.task(acks_late=True)
def sleep_late(token: str, seconds: float) -> str:
    begin(token)
    time.sleep(seconds)
    return token


@app.task(acks_late=True)
def grind(token: str, rounds: int) -> str:
    """Stays in C code, where no exception is seen."""
    begin(token)
    return hashlib.pbkdf2_hmac("sha256", b"", b"", rounds).hex()


@app.task
def die(token: str) -> None:
    begin(token)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(acks_late=True)
def die_late(token: str, times: int) -> int:
    count = begin(token)
    if count <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return count


@app.task(acks_late=True, reject_on_worker_lost=False)
def die_late_once(token: str) -> None:
    begin(token)
    os.kill(os.getpid(), signal.SIGKILL)


def _spin(seconds: float) -> None:
    # In small steps: an interrupt reaches a thread between two of them.
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.005)


@app.task
def spin(seconds: float) -> str:
    _spin(seconds)
    return "to the end"


@app.task(soft_time_limit=0.2)
def spin_soft(seconds: float) -> str:
    try:
        _spin(seconds)
    except SoftTimeLimitExceeded:
        return "told to end"
    return "to the end"


@app.task(time_limit=0.3)
def spin_hard(seconds: float) -> str:
    _spin(seconds)
    return "to the end"


@app.task(time_limit=0.3, acks_late=True)
def spin_hard_late(token: str, seconds: float) -> str:
    begin(token)
    _spin(seconds)
    return "to the end"


@app.task
async def async_add(x: int, y: int) -> int:
    await asyncio.sleep(0)
    return x + y


@app.task(bind=True)
async def async_spin(self: Any, seconds: float) -> str:
    try:
        await asyncio.sleep(seconds)
    except SoftTimeLimitExceeded:
        return "told to end"
    return "to the end"


@app.task
async def async_fail() -> None:
    raise ValueError("on purpose")


@app.task(bind=True)
async def async_send(self: Any, x: int, y: int) -> None:
    self.update_state(state="SENDING")
    raise self.replace(add.s(x, y))


@app.task
async def async_cancel() -> None:
    raise asyncio.CancelledError("on purpose")


@app.task(bind=True, max_retries=2, default_retry_delay=0)
def retry_always(self: Any, token: str) -> None:
    begin(token)
    raise self.retry(exc=ValueError("still wrong"))


@app.task(bind=True, max_retries=5, default_retry_delay=0)
def retry_until(self: Any, token: str, times: int) -> int:
    begin(token)
    if self.request.retries < times:
        raise self.retry()
    return int(self.request.retries)


@app.task(bind=True, max_retries=1, default_retry_delay=0)
def retry_bare(self: Any) -> None:
    raise self.retry()


@app.task(
    bind=True,
    autoretry_for=(ConnectionError,),
    dont_autoretry_for=(ConnectionResetError,),
    max_retries=3,
    retry_backoff=0.1,
    retry_jitter=False,
)
def autoretry(self: Any, token: str, times: int, kind: str = "ConnectionError") -> list[float]:
    begin(token)
    notes().rpush(f"times:{token}", time.time())
    if self.request.retries < times:
        raise {"ConnectionError": ConnectionError, "ConnectionResetError": ConnectionResetError}[
            kind
        ]("flaky")
    return [float(t) for t in notes().lrange(f"times:{token}", 0, -1)]


@app.task(bind=True, acks_late=True)
def reject(self: Any, token: str, requeue: bool, times: int = 1) -> int:
    count = begin(token)
    if count <= times:
        raise Reject("not now", requeue=requeue)
    return count


@app.task(bind=True)
def ignore(self: Any, token: str) -> None:
    begin(token)
    self.update_state(state="PUT ASIDE", meta={"token": token})
    raise Ignore


@app.task(acks_late=True, acks_on_failure_or_timeout=False)
def fail_unacked(token: str) -> None:
    begin(token)
    raise ValueError("on purpose")


@app.task(bind=True)
def progress(self: Any, token: str) -> str:
    self.update_state(state="PROGRESS", meta={"done": 40, "of": 100})
    begin(token)
    notes().blpop([f"gate:{token}"], GATE_S)
    return "done"


@app.task(bind=True)
def report_progress(self: Any, count: int) -> int:
    """Send events of its own in every way that a task has; returns how many."""
    for done in range(count):
        self.send_event("task-progress", done=done, of=count)
    for kind in ("task-checked", "worker-note"):  # twice: leaving the block must not end anything
        with self.app.events.default_dispatcher() as dispatcher:
            dispatcher.send(kind, uuid=self.request.id)
    with self.app.events.Dispatcher(self.request.hostname) as dispatcher:
        dispatcher.send("task-measured", uuid=self.request.id)
    return count + 3


@app.task(bind=True)
def report_steps(self: Any, count: int) -> int:
    for done in range(count):
        self.send_event("task-progress", done=done, of=count)
        _spin(0.02)
    return count


@app.task(bind=True)
def report_and_wait(self: Any, token: str) -> str:
    self.send_event("task-progress", done=40, of=100)
    begin(token)
    notes().blpop([f"gate:{token}"], GATE_S)
    return "done"


@app.task(bind=True)
def replaced(self: Any, x: int, y: int) -> None:
    raise self.replace(self.app.signature("tests.probe_app.add", (x, y)))


@app.task(ignore_result=True)
def ignored(token: str) -> str:
    begin(token)
    return "nobody reads this"


@app.task(track_started=True)
def tracked(token: str) -> str:
    begin(token)
    notes().blpop([f"gate:{token}"], GATE_S)
    return "done"


@app.task
def hoard(mib: int) -> int:
    """Make the process big and keep it so."""
    _hoarded.append(b"x" * (mib << 20))
    return os.getpid()


_hoarded: list[bytes] = []


@app.task
def threads_alive() -> int:
    return threading.active_count()


@app.task
def send_child(number: int) -> str:
    return str(add.delay(number, 1).id)


@app.election_handler("note")
def note_elected(token: str) -> None:
    begin(token)


@app.election_handler("fail")
def fail_elected(token: str) -> None:
    begin(token)
    raise SystemExit("on purpose")


@app.election_handler("wait")
def wait_elected(token: str) -> None:
    begin(token)
    notes().blpop([f"gate:{token}"], GATE_S)
