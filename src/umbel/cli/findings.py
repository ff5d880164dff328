"""What the facts that `umbel doctor` gathers mean: fine, odd, or broken, and what to do.

Pure: facts in, findings out. A *finding* is one line. It warns of what may be meant so, and fails
only where something can not work. Here is what it is, and what is found out about brokers; what is
found out about nodes and queues is in `cluster_findings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umbel.cli.plain import count, plain

OK, WARN, FAIL = "ok", "warn", "fail"

Details = Mapping[str, Any] | None

MEMORY_FULL = 0.9
REDIS_MIN = (6, 0)
RABBITMQ_MIN = (3, 8)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line; `details` are for `--json`."""

    check: str
    verdict: str
    text: str
    advice: str = ""
    details: Details = None

    @property
    def line(self) -> str:
        """What was found, and what to do about it."""
        return f"{self.text}: {self.advice}" if self.advice else self.text


def ok(check: str, text: str, advice: str = "", details: Details = None) -> Finding:
    """Nothing to worry about; advice is for whoever wants more."""
    return Finding(check, OK, text, advice, details)


def warn(check: str, text: str, advice: str = "", details: Details = None) -> Finding:
    """It works, and may be meant so."""
    return Finding(check, WARN, text, advice, details)


def fail(check: str, text: str, advice: str = "", details: Details = None) -> Finding:
    """It can not work."""
    return Finding(check, FAIL, text, advice, details)


def exit_code(findings: Sequence[Finding], answered: bool) -> int:
    """1 when something failed, 69 when nobody answered and nothing else explains it, else 0."""
    failed = [finding for finding in findings if finding.verdict == FAIL]
    if any(finding.check != "nodes" for finding in failed):
        return 1
    if not answered:
        return 69
    return 1 if failed else 0


# -- the broker --------------------------------------------------------------------------------


def judge_redis(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """What a server says about itself (`info`; None when it may not be asked), and its objections
    to scripts, tracking, its time and subscriptions (empty texts when there are none)."""
    info = facts.get("info")
    if info is None:
        yield warn(
            "broker",
            "the server does not let itself be asked (INFO)",
            "allow INFO, or look after its memory yourself",
        )
    else:
        yield from _redis_server(info)
        yield from _redis_memory(info)
    if facts.get("script"):
        yield fail(
            "broker",
            f"scripts can not be run ({facts['script']})",
            "allow EVAL, EVALSHA and SCRIPT LOAD",
        )
    if facts.get("tracking"):
        yield warn(
            "broker",
            f"the server does not tell of changes ({facts['tracking']})",
            "allow HELLO and CLIENT TRACKING, else tasks and replies come a little later",
        )
    if facts.get("time"):
        yield warn(
            "broker",
            f"the server does not give its time ({facts['time']})",
            "allow TIME, else leases of messages are judged by the clock of each worker",
        )
    if facts.get("pubsub"):
        yield fail(
            "exchanges",
            f"nothing can be heard ({facts['pubsub']})",
            "allow PSUBSCRIBE and PUBLISH on the channels of remote control and events",
        )
    else:
        heard = ", ".join(plain(one) for one in facts.get("channels") or ())
        yield ok("exchanges", f"channels can be heard: {heard}")


def _redis_server(info: Mapping[str, Any]) -> Iterator[Finding]:
    version = plain(info.get("redis_version"), 20)
    kind = "Valkey" if "valkey_version" in info else "Redis"
    if kind == "Valkey":
        version = plain(info.get("valkey_version"), 20)
    text = f"{kind} {version}"
    details = {"kind": kind, "version": version}
    if _numbers(version) < REDIS_MIN:
        yield warn("broker", text, "6.0 or newer tells of changes by itself", details)
    else:
        yield ok("broker", text, details=details)
    if info.get("role") in ("slave", "replica"):
        yield fail(
            "broker",
            "the server is a replica, which takes no messages",
            "give the address of its master, or sentinel://",
        )
    if info.get("loading") in (1, "1"):
        yield warn("broker", "the server still loads its data", "wait until it has")


def _redis_memory(info: Mapping[str, Any]) -> Iterator[Finding]:
    policy = plain(info.get("maxmemory_policy") or "", 30)
    most, used = count(info.get("maxmemory")) or 0, count(info.get("used_memory")) or 0
    advice = "set maxmemory-policy noeviction"
    if policy and policy != "noeviction":
        if most and policy.startswith("allkeys"):
            yield fail(
                "memory",
                f"maxmemory-policy {policy} deletes queues when the memory is full",
                advice,
            )
        else:
            yield warn(
                "memory",
                f"maxmemory-policy is {policy}: what it deletes when the memory is full is lost",
                advice,
            )
        return
    share = used / most if most else 0.0
    text = f"{_mebibytes(used)} used" + (f" of {_mebibytes(most)}" if most else ", no bound set")
    if share > MEMORY_FULL:
        yield warn("memory", text, "nothing can be sent when it is full: raise maxmemory")
    else:
        yield ok("memory", f"{text}, maxmemory-policy {policy or 'unknown'}")


def judge_rabbitmq(properties: Mapping[str, Any], blocked: str | None) -> Iterator[Finding]:
    """`blocked` is why the broker takes no messages from anybody, if so."""
    product = plain(properties.get("product") or "an AMQP broker", 40)
    version = plain(properties.get("version"), 20)
    details = {"kind": product, "version": version}
    text = f"{product} {version}".strip()
    if product == "RabbitMQ" and _numbers(version) < RABBITMQ_MIN:
        yield warn("broker", text, "3.8 or newer is what Umbel is tested with", details)
    else:
        yield ok("broker", text, details=details)
    if blocked is not None:
        yield fail(
            "memory",
            f"the broker takes no messages ({plain(blocked)})",
            "give it memory or disk, or purge queues",
        )


def judge_exchange(name: str, trouble: str, code: int | None) -> Finding:
    """`code` is AMQP's, when the broker refused the question with one."""
    shown = plain(name, 80)
    if code is None and not trouble:
        return ok("exchanges", f"{shown} is there as it should be")
    if code == 404:
        return warn("exchanges", f"{shown} is not there yet", "the first worker or client makes it")
    if code == 406:
        return fail(
            "exchanges",
            f"{shown} was declared otherwise ({plain(trouble)})",
            "stop what uses it, delete it, start again; or choose another name with "
            "control_exchange or event_exchange",
        )
    if code == 403:
        return fail(
            "exchanges",
            f"{shown} may not be used ({plain(trouble)})",
            "give the user of the broker the permission",
        )
    return fail(
        "exchanges",
        f"{shown} can not be asked for ({plain(trouble)})",
        "look into the log of the broker",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """`3.10.8-rc.1` as (3, 10, 8); unknown ones count as new."""
    found: list[int] = []
    for part in version.partition("-")[0].split("."):
        if not part.isdecimal():
            break
        found.append(int(part[:9]))
    return tuple(found) or (10**9,)


def _mebibytes(bytes_count: int) -> str:
    return f"{bytes_count / 2**20:.0f} MiB"
