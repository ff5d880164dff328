"""`umbel sim`: a whole cluster in one process, under faults, checked at every step.

One seed is printed line by line; `--seeds` plays many and prints only those that fail, each with
the command that plays it once more. The same seed is the same play everywhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click
import msgspec

from umbel.cli.errors import FAILED, FINE
from umbel.sim import faults
from umbel.sim.games import AGREEMENT, DELIVERIES, GAMES, Game
from umbel.sim.outcomes import Outcome
from umbel.sim.runs import Summary, how_to_repeat, run

NODES_MAX = 100
SECONDS_MAX = 3_600.0
VIOLATIONS_SHOWN_MAX = 3


def _read_faults(value: str | None, game: Game) -> tuple[str, ...]:
    if value is None:
        return game.faults
    names = [name.strip() for name in value.split(",")]
    if names == ["none"]:
        return ()
    for name in names:
        if name not in game.all_faults:
            known = ", ".join(game.all_faults)
            text = f"unknown fault {name!r}: choose some of {known}, or none"
            raise click.BadParameter(text, param_hint="'--faults'")
    return tuple(name for name in game.all_faults if name in names)


def _read_mutation(value: str | None, game: Game) -> Any:
    if value is None:
        return game.honest
    if value not in game.mutations:
        known = ", ".join(sorted(game.mutations))
        text = f"unknown mutation {value!r}: choose one of {known}"
        raise click.BadParameter(text, param_hint="'--mutation'")
    return game.mutations[value].parts


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number of seconds")
    return value


@click.command("sim", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--what",
    type=click.Choice(sorted(GAMES)),
    default="agreement",
    help="What to simulate: agreement between nodes (default), or what workers do with messages.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, metavar="N", help="The first seed.")
@click.option(
    "--seeds",
    "count",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Play this many seeds, and print only those that fail.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, NODES_MAX),
    metavar="N",
    help="Number of nodes at the start. The seed chooses it by default.",
)
@click.option(
    "--faults",
    "kinds",
    metavar="A,B",
    help="Faults that may happen, separated by commas, or none. Agreement: "
    f"{', '.join(faults.FAULTS)} (all of these are the default), {faults.REFUSE} (nodes refuse "
    f"elections), {', '.join(faults.UNSAFE)} (not survived "
    f"by design). Deliveries: {', '.join(DELIVERIES.faults)} (the default).",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, SECONDS_MAX),
    metavar="S",
    callback=_finite,
    help="Seconds of virtual time in which faults happen. The seed chooses them by default.",
)
@click.option(
    "--mutation",
    metavar="NAME",
    help="Break one part on purpose; the checks must find it. Agreement: "
    f"{', '.join(sorted(AGREEMENT.mutations))}. Deliveries: "
    f"{', '.join(sorted(DELIVERIES.mutations))}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sim(
    what: str,
    seed: int,
    count: int | None,
    nodes: int | None,
    kinds: str | None,
    seconds: float | None,
    mutation: str | None,
    as_json: bool,
) -> int:
    """Play a cluster in virtual time, with faults, and check that it keeps its promises.

    Exit codes: 0 all checks held, 1 one did not.
    """
    game = GAMES[what]
    parts = _read_mutation(mutation, game)
    setting = game.setting(nodes, _read_faults(kinds, game), seconds, parts)
    if count is None:
        outcome = game.play(seed, setting, tells=True)
        (_print_json if as_json else _print_play)(_facts(outcome, setting, game), outcome)
        return FAILED if outcome.violations else FINE
    summary = _play_many(seed, count, setting, game, shows=not as_json)
    if as_json:
        click.echo(_json(_summary_facts(seed, summary, setting)))
    else:
        _print_summary(seed, summary)
    return FAILED if summary.failed else FINE


# -- one play ----------------------------------------------------------------------------------


def _facts(outcome: Outcome, setting: Any, game: Game) -> dict[str, Any]:
    return {
        "seed": outcome.seed,
        **outcome.figures,
        "hash": f"{outcome.hash:016x}",
        "violations": [violation._asdict() for violation in outcome.violations],
        "repeat": how_to_repeat(outcome.seed, setting, game),
    }


def _print_json(facts: dict[str, Any], outcome: Outcome) -> None:
    story = [{**line._asdict(), "at_s": round(line.at_s, 6)} for line in outcome.story]
    click.echo(_json({**facts, "story": story}))


def _print_play(facts: dict[str, Any], outcome: Outcome) -> None:
    told = ", ".join(facts["faults"]) or "none"
    click.echo(f"seed {outcome.seed}: {facts['broker']}, faults: {told}")
    for line in outcome.story:
        bad = line.who == "VIOLATION"
        text = f"{line.at_s:9.3f}  {line.who:<10}{line.text}"
        click.echo(click.style(text, fg="red", bold=True) if bad else text)
    settled = facts["settled_s"]
    click.echo(
        f"{_counts(facts)}; "
        + ("never settled" if settled is None else f"settled within {settled:g} s of calm")
    )
    click.echo(f"trace {facts['hash']}")
    for violation in outcome.violations:
        click.echo(f"VIOLATED {violation}")
    click.echo(f"{len(outcome.violations)} violations" if outcome.violations else "all checks held")


# -- many plays --------------------------------------------------------------------------------


def _play_many(seed: int, count: int, setting: Any, game: Game, *, shows: bool) -> Summary:
    def show(outcome: Outcome) -> None:
        if outcome.violations:
            _print_failure(outcome, setting, game)

    def play_all(advance: Callable[[], Any]) -> Summary:
        def on_play(outcome: Outcome) -> None:
            advance()
            if shows:
                show(outcome)

        return run(range(seed, seed + count), setting, game=game, on_play=on_play)

    if not shows or not sys.stderr.isatty():
        return play_all(lambda: None)
    return _with_progress(count, play_all)


def _with_progress(count: int, work: Callable[[Callable[[], Any]], Summary]) -> Summary:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("seeds", total=count)
        return work(lambda: progress.advance(task))


def _print_failure(outcome: Outcome, setting: Any, game: Game) -> None:
    click.echo(f"seed {outcome.seed} fails:")
    for violation in outcome.violations[:VIOLATIONS_SHOWN_MAX]:
        click.echo(f"  {violation}")
    click.echo(f"  repeat it: {how_to_repeat(outcome.seed, setting, game)}")


def _summary_facts(seed: int, summary: Summary, setting: Any) -> dict[str, Any]:
    return {
        "first_seed": seed,
        "seeds": summary.seeds,
        "failed": summary.failed,
        "failures": [_facts(outcome, setting, summary.game) for outcome in summary.failures],
        **summary.totals,
        "nodes_max": summary.nodes_max,
        "settled_s_max": summary.settled_s_max,
        "seeds_per_s": round(summary.seeds_per_s, 1),
    }


def _print_summary(seed: int, summary: Summary) -> None:
    click.echo(
        f"seeds {seed} to {seed + summary.seeds - 1}: {summary.failed} failed; "
        f"{_counts(summary.totals)}; up to {summary.nodes_max} nodes, settled within "
        f"{summary.settled_s_max:g} s of calm; "
        f"{summary.seeds_per_s:.0f} seeds per second of processor time"
    )


def _counts(figures: Mapping[str, Any]) -> str:
    """What was played, in words; figures of a play, or of many."""
    nodes = f"{figures['nodes']} nodes, " if "nodes" in figures else ""
    if "tasks" in figures:
        words = "{tasks} tasks, {runs} runs; {again} ran again, {lost} lost"
    else:
        words = (
            "{elections} elections, {actions} actions, {claims} claims; {delivered} messages "
            "delivered, {lost} lost"
        )
    return nodes + words.format_map(figures)


def _json(facts: dict[str, Any]) -> str:
    return msgspec.json.encode(facts).decode()
