"""From events to the numbers of `umbel top`."""

from __future__ import annotations

import pytest

from tests.unit.cli.cluster_script import Event, Script
from umbel.app.events.measures import RATE_WINDOW_S, SAMPLES_MAX, Rate, Sample
from umbel.cli.top.figures import OTHERS, UNKNOWN, Figures, TypeRow


@pytest.fixture
def script() -> Script:
    return Script()


def fed(*events: Event, now_s: float = 100.0) -> Figures:
    figures = Figures()
    for event in events:
        figures.event(event, now_s)
    return figures


def only_type(figures: Figures, now_s: float = 100.0) -> TypeRow:
    (row,) = figures.types(now_s)
    return row


def test_a_rate_is_the_mean_of_the_last_seconds_and_fades() -> None:
    rate = Rate()
    assert rate.per_s(5.0) == 0.0
    for tenth in range(200):
        rate.add(100.0 + tenth / 10)  # ten per second for twenty seconds
    assert rate.per_s(120.0) == pytest.approx(10.0, rel=0.15)
    assert 0 < rate.per_s(125.0) < 6
    assert rate.per_s(120.0 + RATE_WINDOW_S + 1) == 0.0


def test_a_rate_of_the_first_moment_is_not_exaggerated() -> None:
    rate = Rate()
    for _ in range(5):
        rate.add(100.001)
    assert rate.per_s(100.01) == 5.0


def test_percentiles_are_values_that_were_measured() -> None:
    sample = Sample()
    assert sample.percentiles(0.5, 0.95) == [None, None]
    for value in range(1, 101):
        sample.add(float(value))
    assert sample.percentiles(0.0, 0.5, 0.95, 1.0) == [1.0, 50.0, 95.0, 100.0]
    sample.add(-5.0)
    assert sample.percentiles(0.0) == [1.0]


def test_percentiles_are_those_of_the_recent_past() -> None:
    sample = Sample()
    for value in [1_000.0] * SAMPLES_MAX + [1.0] * SAMPLES_MAX:
        sample.add(value)
    assert sample.percentiles(0.5, 1.0) == [1.0, 1.0]


def test_a_task_waits_runs_and_ends(script: Script) -> None:
    received, started, succeeded = script.life("a")
    figures = fed(received)
    assert (only_type(figures).waiting, only_type(figures).running) == (1, 0)
    figures.event(started, 101.0)
    row = only_type(figures)
    assert (row.waiting, row.running, row.wait_p50_s) == (0, 1, 0.5)
    (running,) = figures.running(103.5)
    assert (running.uuid, running.name, running.node) == ("a", "shop.charge", "w1@host")
    assert (running.running_s, running.call) == (2.5, "(7)")
    figures.event(succeeded, 104.0)
    row = only_type(figures, 104.0)
    assert (row.waiting, row.running, row.succeeded, row.failed) == (0, 0, 1, 0)
    assert (row.runtime_p50_s, row.runtime_p95_s) == (2.0, 2.0)
    assert figures.running(104.0) == []


def test_a_failed_task_has_the_time_between_its_events(script: Script) -> None:
    row = only_type(fed(*script.life("a", end="failed")))
    assert (row.failed, row.runtime_p50_s) == (1, 2.0)


def test_a_retried_task_comes_again_under_its_id(script: Script) -> None:
    figures = fed(*script.life("a", end="retried"), *script.life("a"))
    row = only_type(figures)
    assert (row.retried, row.succeeded, row.running, row.waiting) == (1, 1, 0, 0)


def test_the_rejection_after_a_failure_is_no_second_end(script: Script) -> None:
    figures = fed(*script.life("a", end="failed"), script.task("rejected", "a", requeue=False))
    assert only_type(figures).failed == 1
    assert figures.totals(100.5).ended_per_s == 1.0


def test_events_that_come_late_or_twice_change_nothing(script: Script) -> None:
    life = script.life("a")
    figures = fed(*life, *life, life[1], life[0])
    row = only_type(figures)
    assert (row.succeeded, row.running, row.waiting) == (1, 0, 0)


def test_a_name_that_comes_after_the_start_is_taken(script: Script) -> None:
    received, started, _ = script.life("a")
    figures = fed(started, received)
    rows = {row.name: row for row in figures.types(100.0)}
    assert (rows[UNKNOWN].running, rows["shop.charge"].running) == (0, 1)
    assert (rows[UNKNOWN].waiting, rows["shop.charge"].waiting) == (0, 0)


def test_an_end_without_a_beginning_is_counted(script: Script) -> None:
    row = only_type(fed(script.task("succeeded", "a", runtime=1.5)))
    assert (row.name, row.succeeded, row.runtime_p50_s, row.running) == (UNKNOWN, 1, 1.5, 0)


def test_a_task_that_moves_to_another_node_runs_there_only(script: Script) -> None:
    figures = fed(
        script.task("received", "a", name="n"),
        script.task("started", "a"),
        script.task("received", "a", "w2@host", name="n"),
        script.task("started", "a", "w2@host"),
    )
    assert [row.node for row in figures.running(100.0)] == ["w2@host"]
    assert only_type(figures).running == 1


def test_nodes_are_alive_for_two_heartbeats(script: Script) -> None:
    figures = fed(script.heartbeat(active=2, processed=9, lost=4))
    (row,) = figures.nodes(103.9)
    assert (row.node, row.alive, row.active, row.processed) == ("w1@host", True, 2, 9)
    assert (row.load, row.lost, row.software) == (0.5, 4, "umbel 1.2.3")
    assert row.heard_s == pytest.approx(3.9)
    assert not figures.nodes(104.1)[0].alive
    totals = figures.totals(104.1)
    assert (totals.nodes, totals.nodes_alive) == (1, 0)


def test_a_running_task_of_a_silent_node_is_marked(script: Script) -> None:
    figures = fed(script.heartbeat(), *script.life("a")[:2])
    assert figures.running(101.0)[0].node_alive
    assert not figures.running(300.0)[0].node_alive


def test_a_node_that_leaves_or_begins_anew_runs_nothing(script: Script) -> None:
    begun = [script.heartbeat(), *script.life("a")[:2]]
    offline = script.event("worker-offline", freq=2.0)
    reconnected = script.event("worker-online", freq=2.0)
    restarted = script.event("worker-online", freq=2.0, pid=101)
    assert fed(*begun, offline).running(100.0) == []
    assert fed(*begun, restarted).running(100.0) == []
    assert len(fed(*begun, reconnected).running(100.0)) == 1


def test_open_tasks_and_types_are_bounded_and_the_rest_is_counted(script: Script) -> None:
    figures = Figures(open_tasks_max=10, types_max=3)
    for number in range(50):
        figures.event(script.task("received", f"u{number}", name=f"n{number}"), 100.0)
    totals = figures.totals(100.0)
    assert (totals.waiting, totals.forgotten) == (10, 40)
    names = [row.name for row in figures.types(100.0)]
    assert names == ["n0", "n1", "n2", OTHERS]
    assert sum(row.waiting for row in figures.types(100.0)) == 10


def test_what_clients_send_is_an_event_but_no_sign_of_a_worker(script: Script) -> None:
    figures = fed(script.task("sent", "a", "gen1@host", name="n"))
    assert (figures.event_count, figures.task_event_count) == (1, 0)
    assert figures.types(100.0) == []
    assert figures.totals(100.0).nodes == 0


@pytest.mark.parametrize("value", [None, "x", {}, [], -1, True, 2**60, float("inf")])
def test_no_field_of_any_kind_breaks_the_figures(script: Script, value: object) -> None:
    tasks = ("name", "args", "kwargs", "runtime")
    nodes = ("freq", "active", "processed", "loadavg", "lost", "sw_ident", "sw_ver")
    fields = dict.fromkeys((*tasks, *nodes), value)
    figures = fed(
        *(script.task(kind, "a", **fields) for kind in ("received", "started", "succeeded")),
        *(script.event(f"worker-{kind}", **fields) for kind in ("online", "heartbeat", "offline")),
    )
    assert only_type(figures).succeeded == 1
    assert len(figures.nodes(100.0)) == 1
