"""`umbel doctor`: what is wrong with a cluster.

Looks at the settings, the broker, the result backend, the exchanges, the nodes, their events and
clocks, the queues and the revocations, in this order, one line for each thing found. Every look has
a bound, and none ends the others; where a broker can not be reached, what needs it is left out.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from umbel.broker.sessions.connections import addresses, masked
from umbel.cli import apps, cluster_findings, findings, probing
from umbel.cli.cluster_findings import Census
from umbel.cli.errors import CommandFailed
from umbel.cli.feed import place
from umbel.cli.findings import FAIL, OK, WARN, Finding, fail, ok, warn
from umbel.cli.group import Invocation
from umbel.cli.plain import plain
from umbel.cli.reply_tables import as_json as to_json
from umbel.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

LISTEN_S = 3.0
CLOSE_S = 3.0
# What the census may take on top: connections, and answers that are late.
CENSUS_S = 20.0
CHECK_CHARS = 11
QUEUES_MAX = 200
COLORS = {OK: "green", WARN: "yellow", FAIL: "red"}


@click.command(
    "doctor",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "-t",
    "--timeout",
    "listen_s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=LISTEN_S,
    show_default=True,
    metavar="S",
    help="Listen to heartbeats so long at most.",
)
@click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def doctor(invocation: Invocation, listen_s: float, as_json: bool) -> int:
    """Look for what is wrong: settings, broker, exchanges, nodes, events, clocks, queues.

    Each line is ok, warn or fail, and says what to do. Nothing is changed.

    Exit codes: 0 nothing failed (there may be warnings), 1 something failed, 2 no application was
    named, 69 nobody answered and nothing else failed.
    """
    if invocation.app_name is None:
        invocation.app()  # says what is missing
    found: list[Finding] = []
    visit = Visit(invocation, listen_s)
    for finding in visit.findings():
        found.append(finding)
        if not as_json and (finding.verdict != OK or not invocation.quiet):
            click.echo(line(finding))
    code = findings.exit_code(found, visit.answered or not visit.asked)
    if as_json:
        click.echo(to_json(document(found, code)))
    elif not invocation.quiet:
        click.echo(summary(found))
    return code


def line(finding: Finding) -> str:
    """`ok    broker      Redis 7.0.15`."""
    verdict = click.style(finding.verdict.ljust(4), fg=COLORS[finding.verdict], bold=True)
    return f"{verdict}  {finding.check.ljust(CHECK_CHARS)} {finding.line}"


def summary(found: list[Finding]) -> str:
    """The last line."""
    counted = Counter(finding.verdict for finding in found)
    if not counted[WARN] and not counted[FAIL]:
        return "all is well"
    return f"{counted[FAIL]} failed, {_counted(counted[WARN], 'warning')}, {counted[OK]} fine"


def document(found: list[Finding], code: int) -> dict[str, Any]:
    """The answer for `--json`."""
    return {
        "exit_code": code,
        "findings": [
            {
                "check": finding.check,
                "verdict": finding.verdict,
                "text": finding.text,
                "advice": finding.advice,
                **({"details": dict(finding.details)} if finding.details else {}),
            }
            for finding in found
        ],
    }


class Visit:
    """One examination."""

    def __init__(self, invocation: Invocation, listen_s: float) -> None:
        self._invocation = invocation
        self._listen_s = listen_s
        self._url = ""  # of the broker that was reached
        self._kind = ""
        self._deaf = False  # events can not be heard
        self.asked = False  # nodes were asked
        self.answered = False  # and somebody answered

    def findings(self) -> Iterator[Finding]:
        """One after the other, as they are found."""
        app: Umbel | None = None
        try:
            app, found = self._load()
            yield from found
            if app is None:
                return
            for check, look in self._looks():
                for finding in _guarded(check, lambda look=look: look(app)):  # type: ignore[misc]
                    self._deaf |= finding.check == "exchanges" and finding.verdict == FAIL
                    yield finding
        finally:
            if app is not None:
                with contextlib.suppress(Exception):
                    probing.within(CLOSE_S, app.close)

    def _looks(self) -> Iterator[tuple[str, Callable[[Umbel], Iterator[Finding]]]]:
        """The later ones need what the earlier ones found."""
        yield "broker", self._broker
        if self._url:
            yield "broker", self._broker_kind
        if self._kind == "amqp":
            yield "exchanges", self._exchanges
        yield "results", self._backend
        if self._url:
            yield "nodes", self._nodes

    # -- settings ------------------------------------------------------------------------

    def _load(self) -> tuple[Umbel | None, list[Finding]]:
        found: list[Finding] = []
        app: Umbel | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                app = self._invocation.app()
                apps.load_modules(app)
                found += _settings(app)
            except (CommandFailed, ImproperlyConfigured) as exc:
                app = None
                found.append(fail("settings", plain(str(exc), 500)))
        found += [
            warn("settings", plain(str(warning.message), 300))
            for warning in caught
            if issubclass(warning.category, UserWarning)
        ]
        return app, found

    # -- the broker ----------------------------------------------------------------------

    def _broker(self, app: Umbel) -> Iterator[Finding]:
        urls = addresses(app.read_url)
        urls += [url for url in addresses(app.write_url) if url not in urls]
        troubles: list[tuple[str, str]] = []
        for url in urls:
            shown = masked(url)
            try:
                kind, took_s = probing.within(
                    probing.patience_s(app, url),
                    lambda url=url: probing.reach(app, url),  # type: ignore[misc]
                )
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                troubles.append((shown, probing.reason(exc)))
                continue
            if not self._url:
                self._url, self._kind = url, kind
            yield ok(
                "broker",
                f"{shown} answered in {took_s * 1000:.0f} ms",
                details={"address": shown, "took_s": took_s},
            )
        verdict = WARN if self._url else FAIL
        advice = "start it, or correct broker_url (name, port, user, password, virtual host)"
        if self._url:
            advice = "another of the list answered"
        for shown, why in troubles:
            yield Finding(
                "broker", verdict, f"{shown} can not be reached ({why})", advice, {"address": shown}
            )

    def _broker_kind(self, app: Umbel) -> Iterator[Finding]:
        bound_s = probing.patience_s(app, self._url)
        if self._kind == "redis":
            facts = probing.within(bound_s, lambda: probing.redis_facts(app, self._url))
            yield from findings.judge_redis(facts)
        elif self._kind == "amqp":
            properties, blocked = probing.within(
                bound_s, lambda: probing.amqp_facts(app, self._url)
            )
            yield from findings.judge_rabbitmq(properties, blocked)
        else:
            yield ok("broker", f"transport {plain(self._kind, 40)}, inside this machine")

    def _exchanges(self, app: Umbel) -> Iterator[Finding]:
        bound_s = probing.patience_s(app, self._url)
        for name, trouble, code in probing.within(
            bound_s, lambda: probing.exchange_facts(app, self._url)
        ):
            yield findings.judge_exchange(name, trouble, code)

    def _backend(self, app: Umbel) -> Iterator[Finding]:
        shown = app.backend.shown_url
        if shown.startswith("disabled://"):
            yield ok("results", "no result backend: results are not kept")
            return
        try:
            took_s = probing.within(
                probing.patience_s(app, app.result_url), lambda: probing.backend_took_s(app)
            )
        except Exception as exc:  # noqa: BLE001 - every store has its own errors
            yield fail(
                "results",
                f"{shown} can not be reached ({probing.reason(exc)})",
                "start it, or correct result_backend",
            )
            return
        answered = "" if took_s is None else f" answered in {took_s * 1000:.0f} ms"
        yield ok("results", f"{shown}{answered}", details={"took_s": took_s})

    # -- the cluster ---------------------------------------------------------------------

    def _nodes(self, app: Umbel) -> Iterator[Finding]:
        hear = not self._deaf
        census = probing.within(
            self._listen_s + CENSUS_S, lambda: probing.census(app, self._listen_s, hear=hear)
        )
        self.asked, self.answered = True, bool(census.answers)
        yield from cluster_findings.judge_nodes(census, place(app))
        yield from cluster_findings.judge_events(census)
        yield from cluster_findings.judge_refused(census.rows)
        yield from cluster_findings.judge_clocks(census.skews_s)
        yield from cluster_findings.judge_versions(census.rows)
        yield from self._queues(app, census)
        if census.answers:
            known = _asked(app, "revoked", census)
            state_file = app.conf.worker_state_db is not None
            yield from cluster_findings.judge_revocations(known, state_file)

    def _queues(self, app: Umbel, census: Census) -> Iterator[Finding]:
        consumed_by: dict[str, list[str]] = {}
        for node, queues in _asked(app, "active_queues", census).items():
            for queue in queues if isinstance(queues, list) else ():
                name = queue.get("name") if isinstance(queue, dict) else None
                if isinstance(name, str):
                    consumed_by.setdefault(name, []).append(node)
        known = list(dict.fromkeys([*app.queues.consumed, *consumed_by]))[:QUEUES_MAX]
        facts = probing.within(
            probing.patience_s(app, self._url),
            lambda: probing.queue_facts(app, self._url, known),
        )
        yield from cluster_findings.judge_queues(facts, consumed_by)


def _settings(app: Umbel) -> Iterator[Finding]:
    from umbel.app.control.mailbox import mailboxes_for
    from umbel.app.trust import signing_key

    conf = app.conf
    own = sum(not name.startswith("celery.") for name in app.tasks)
    yield ok(
        "settings",
        f"application {plain(app.main, 60)}: {_counted(len(conf.changed()), 'setting')} changed, "
        f"{_counted(own, 'task')}",
    )
    mailboxes_for(app)
    signing_key(app)
    if not conf.worker_enable_remote_control:
        yield warn(
            "settings",
            "worker_enable_remote_control is off",
            "workers with these settings answer nothing",
        )
    allowed = conf.control_allow
    if allowed not in ("all", "read-only") and "ping" not in allowed:
        yield warn(
            "settings",
            "control_allow leaves out ping",
            "nobody can tell whether such workers are there: add it",
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _asked(app: Umbel, method: str, census: Census) -> dict[str, Any]:
    """What those who answered the ping answer; nothing where that fails."""
    if not census.answers:
        return {}
    with contextlib.suppress(Exception):
        nodes = sorted(census.answers)
        bound_s = 2 * probing.ANSWER_S + probing.LOOK_S
        return probing.within(bound_s, lambda: probing.answers(app, method, nodes))
    return {}


def _guarded(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a look finds; one that fails is a finding itself."""
    try:
        yield from look()
    except Exception as exc:  # noqa: BLE001 - the other looks follow
        text = f"could not be looked at ({probing.reason(exc)})"
        yield fail(check, text, "try again, and look into the log of the broker")
