"""Commands, pauses and revocations mean the same although the clock of a host is hours off."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.servers import wait_until
from tests.sites import QUEUE, Site
from tests.workers import ROOT, Program, WorkerProcess
from umbel.wire.packs import unpacked_lives
from umbel.worker.control.panel import EXPIRED_GRACE_S

HOURS_2 = 7_200.0
LIFE_S = 10_800.0
QUICK = {"worker_heartbeat_interval": 0.5, "worker_gossip_interval": 0.25}
SHIFTED_APP = "tests.shifted_app"

# A client on a host whose clock is off: prints the replies to one command.
CLIENT = """
    import json, sys, time
    shift_s, url, command, arguments, timeout = sys.argv[1:]
    real = time.time
    time.time = lambda: real() + float(shift_s)
    from umbel import Umbel
    app = Umbel("client", broker=url, backend="disabled://")
    arguments = json.loads(arguments)
    if command in ("pause", "resume"):
        replies = getattr(app.control, command)(**arguments, reply=True, timeout=float(timeout))
    else:
        replies = app.control.broadcast(
            command, arguments, reply=True, timeout=float(timeout), limit=1
        )
    print("replies", json.dumps({k: v for reply in replies for k, v in reply.items()}))
    app.close()
"""


@pytest.fixture
def tell(site: Site, start: Callable[..., Program]) -> Callable[..., dict[str, Any]]:
    """`tell(shift_s, command, ...)` gives the replies that a client with that clock gets."""

    def run(
        shift_s: float, command: str, *, timeout_s: float = 3.0, **arguments: Any
    ) -> dict[str, Any]:
        words = [str(shift_s), site.broker_url, command, json.dumps(arguments), str(timeout_s)]
        client = start([sys.executable, "-c", textwrap.dedent(CLIENT), *words], cwd=ROOT)
        found = json.loads(client.wait_for(r"replies (.*)")[1])
        assert client.wait() == 0
        return dict(found)

    return run


def ask(site: Site, command: str, node: str, **arguments: Any) -> Any:
    replies = site.app.control.broadcast(
        command, arguments, destination=[node], reply=True, timeout=10
    )
    assert replies, f"{node} does not answer {command}"
    return replies[0][node]


def shifted_worker(site: Site, name: str, shift_s: float) -> WorkerProcess:
    """A worker on a host whose clock is off."""
    environment = {**site.environment(QUICK), "SHIFT_S": str(shift_s)}
    command = ["-P", "threads", "-c", "1", "-l", "info", "-n", name]
    return site._start(SHIFTED_APP, command, env=environment)


# -- clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shift_s", [-HOURS_2, -20.0, HOURS_2])
def test_a_client_whose_clock_is_off_is_obeyed(
    site: Site, tell: Callable[..., dict[str, Any]], shift_s: float
) -> None:
    site.worker("threads", "-n", "one@test", concurrency=1, settings=QUICK)
    assert tell(shift_s, "ping") == {"one@test": {"ok": "pong"}}
    told = tell(shift_s, "revoke", task_id="revoked")["one@test"]
    assert told == {"ok": "tasks {'revoked'} flagged as revoked"}
    assert ask(site, "revoked", "one@test") == ["revoked"]


@pytest.mark.parametrize(
    ("shift_s", "pool"), [(HOURS_2, "threads"), (0.0, "threads"), (-HOURS_2, "solo")]
)
def test_a_command_that_nobody_waits_for_any_more_expires_whatever_the_clocks_show(
    redis_site: Site, start: Callable[..., Program], shift_s: float, pool: str
) -> None:
    site, timeout_s = redis_site, 0.2
    worker = site.worker(pool, "-n", "one@test", concurrency=1, settings=QUICK)
    words = [str(shift_s), site.broker_url, "revoke", json.dumps({"task_id": "late"}), "0.2"]
    worker.signal(signal.SIGSTOP)
    try:
        client = start([sys.executable, "-c", textwrap.dedent(CLIENT), *words], cwd=ROOT)
        client.wait_for("replies {}")
        asked_at = time.monotonic()
        assert client.wait() == 0
        # Nothing tells when a message has expired but the time.
        time.sleep(max(0.0, asked_at + timeout_s + EXPIRED_GRACE_S + 0.5 - time.monotonic()))
    finally:
        worker.signal(signal.SIGCONT)
    assert ask(site, "stats", "one@test")["umbel"]["control_refused"]["expired"]
    assert ask(site, "revoked", "one@test") == []


@pytest.mark.parametrize(("first", "second"), [(0.0, -HOURS_2), (HOURS_2, 0.0)], ids=str)
def test_of_two_commands_the_one_that_was_given_later_holds(
    site: Site, tell: Callable[..., dict[str, Any]], first: float, second: float
) -> None:
    names = ["one@test", "two@test"]
    for name in names:
        site.worker("threads", "-n", name, concurrency=1, settings=QUICK)
    paused = tell(first, "pause", queue=QUEUE, timeout_s=2)
    assert paused == {name: {"ok": f"{QUEUE} paused"} for name in names}
    resumed = tell(second, "resume", queue=QUEUE, timeout_s=2)
    assert resumed == {name: {"ok": f"{QUEUE} resumed"} for name in names}
    assert site.works()
    later = site.worker("threads", "-n", "later@test", concurrency=1, settings=QUICK)
    assert ask(site, "stats", "later@test")["umbel"]["paused"] == []
    assert later.stop() == 0


# -- nodes -----------------------------------------------------------------------------------


def hello(site: Site, node: str) -> dict[str, Any]:
    """What a node knows, as it would tell a node that knows nothing."""
    digest = {"tasks": {}, "headers": {}}
    return dict(
        ask(site, "hello", node, from_node="nobody@test", revoked=[], digest=digest, told={})
    )


def left_s(site: Site, node: str, task_id: str) -> float | None:
    """How long a revocation still holds by the time that the node goes by."""
    reply = hello(site, node)
    lives = unpacked_lives(reply["told"])["tasks"]
    return float(lives[task_id][1] - reply["at"]) if task_id in lives else None


@pytest.mark.parametrize("shift_s", [-HOURS_2, HOURS_2])
def test_a_revocation_lives_as_long_on_a_host_whose_clock_is_off(
    site: Site, shift_s: float
) -> None:
    site.worker("threads", "-n", "right@test", concurrency=1, settings=QUICK)
    off = shifted_worker(site, "off@test", shift_s)
    off.wait_for(r"The clock of this host differs by -?7[12]\d\d\.\d s")
    ask(site, "revoke", "right@test", task_id=["from-right"], stamp=time.time())
    ask(site, "revoke", "off@test", task_id=["from-off"], stamp=time.time())
    for node in ("right@test", "off@test"):
        for task_id in ("from-right", "from-off"):
            wait_until(lambda n=node, t=task_id: left_s(site, n, t), 20, f"{task_id} at {node}")
            left = left_s(site, node, task_id)
            assert left == pytest.approx(LIFE_S, abs=60), (node, task_id)
    assert hello(site, "right@test")["digest"] == hello(site, "off@test")["digest"]


@pytest.mark.parametrize("shift_s", [-HOURS_2, HOURS_2])
def test_a_pause_that_is_told_to_an_off_node_ends_for_all_when_somebody_resumes(
    site: Site, tell: Callable[..., dict[str, Any]], shift_s: float
) -> None:
    site.worker("threads", "-n", "right@test", concurrency=1, settings=QUICK)
    shifted_worker(site, "off@test", shift_s)
    names = ["off@test", "right@test"]
    # To the one node only: the other one learns it from there.
    ask(site, "pause", "off@test", queue=QUEUE, stamp=time.time())

    def paused(name: str) -> list[str]:
        return list(ask(site, "stats", name)["umbel"]["paused"])

    for name in names:
        wait_until(lambda one=name: paused(one) == [QUEUE], 20, f"the pause at {name}")
    resumed = tell(shift_s, "resume", queue=QUEUE, timeout_s=2)
    assert resumed == {name: {"ok": f"{QUEUE} resumed"} for name in names}
    again = tell(0.0, "pause", queue=QUEUE, timeout_s=2)
    assert again == {name: {"ok": f"{QUEUE} paused"} for name in names}

    def words() -> list[Any]:
        return [hello(site, name).get("paused") for name in names]

    wait_until(lambda: len({json.dumps(word) for word in words()}) == 1, 20, "both to agree")
    assert words()[0][QUEUE][1] is True
