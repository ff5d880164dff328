"""`gossip.on`, as steps of users register with it: each change once, whatever happens meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.inside import Inside
from tests.pages import blocks
from tests.servers import wait_until
from tests.sites import Site
from umbel import Umbel
from umbel.worker.blueprint import Step

QUICK = {"worker_heartbeat_interval": 1.0, "worker_gossip_interval": 0.25}
WAIT_S = 30.0

Make = Callable[..., Inside]


@pytest.fixture
def inside() -> Iterator[Make]:
    made: list[Inside] = []

    def make(site: Site, steps: Callable[[Umbel], None], **options: Any) -> Inside:
        settings = {"broker_url": site.broker_url, "result_backend": site.backend_url, **QUICK}
        made.append(Inside(settings, steps, **options).start())
        return made[-1]

    yield make
    for one in made:
        one.close()


class Example:
    """The example of the documentation, with functions that take notes."""

    def __init__(self) -> None:
        self.joined: list[str] = []
        self.alerts: list[str] = []

    def __call__(self, app: Umbel) -> None:
        names: dict[str, Any] = {
            "app": app,
            "alert": self.alerts.append,
            "print": lambda *words: self.joined.append(" ".join(map(str, words))),
        }
        exec(blocks("docs/agreement.md", "python")[0], names)

    def joins(self) -> Counter[str]:
        return Counter(line.partition(" ")[0] for line in self.joined)


def test_the_example_of_the_documentation_hears_of_every_node_once_over_two_reconnects(
    site: Site, inside: Make
) -> None:
    site.worker("solo", "-n", "early@test", concurrency=1, settings=QUICK)
    example = Example()
    worker = inside(site, example)
    wait_until(lambda: example.joins()["early@test"], WAIT_S, "the node that was there before")
    for _ in range(2):
        worker.break_connection()
    late = site.worker("solo", "-n", "late@test", concurrency=1, settings=QUICK)
    wait_until(lambda: example.joins()["late@test"], WAIT_S, "the node that came later")
    late.kill()
    wait_until(lambda: example.alerts, WAIT_S, "the loss")
    again = site.worker("solo", "-n", "again@test", concurrency=1, settings=QUICK)
    wait_until(lambda: example.joins()["again@test"], WAIT_S, "all that was to be reported before")
    assert again.stop() == 0
    assert example.joins() == {"early@test": 1, "late@test": 1, "again@test": 1}
    assert example.alerts == ["late@test was lost"]
    assert all("load [" in line for line in example.joined if "early" in line)


def test_the_example_of_the_documentation_does_no_harm_without_gossip(
    redis_site: Site, inside: Make
) -> None:
    example = Example()
    redis_site.worker("solo", "-n", "early@test", concurrency=1, settings=QUICK)
    worker = inside(redis_site, example, without_gossip=True)
    worker.break_connection()
    gossip = worker.worker.gossip
    assert not gossip.enabled
    assert (len(gossip.on.node_join), len(gossip.on.node_lost)) == (1, 1)
    assert (gossip.names(), gossip.membership.alive()) == ([], [])
    worker.app.clock.forward()
    stats = redis_site.app.control.inspect(["inside@test"]).stats()["inside@test"]
    assert (stats["umbel"]["nodes"], stats["umbel"]["gossip_refused"]) == (0, {})
    assert worker.stop() == 0
    assert example.joined == example.alerts == []


def test_a_step_that_registers_something_new_each_time_is_told_once(
    redis_site: Site, inside: Make
) -> None:
    site, seen = redis_site, Counter[str]()

    class Fresh:
        def joined(self, node: Any) -> None:
            seen[f"fresh {node.hostname}"] += 1

    class Follow(Step):
        requires = ("Gossip",)

        def __init__(self, parent: Any, **options: Any) -> None:
            parent.gossip.on.node_join.add(self.early)

        def early(self, node: Any) -> None:
            seen[f"early {node.hostname}"] += 1

        def joined(self, node: Any) -> None:
            seen[f"method {node.hostname}"] += 1

        def start(self, parent: Any) -> None:
            words = ["lambda"]
            parent.gossip.on.node_join |= {
                self.joined,
                Fresh().joined,
                lambda node: seen.update(f"{word} {node.hostname}" for word in words),
            }

    class Careful(Step):
        requires = ("Gossip",)

        def joined(self, node: Any) -> None:
            seen[f"careful {node.hostname}"] += 1

        def start(self, parent: Any) -> None:
            parent.gossip.on.node_join.add(self.joined)

        def stop(self, parent: Any) -> None:
            parent.gossip.on.node_join.remove(self.joined)

    def add(app: Umbel) -> None:
        app.steps["consumer"].update([Follow, Careful])

    words = ("early", "fresh", "method", "lambda", "careful")
    site.worker("solo", "-n", "one@test", concurrency=1, settings=QUICK)
    worker = inside(site, add)
    wait_until(lambda: all(seen[f"{word} one@test"] for word in words), WAIT_S, "the first node")
    for _ in range(2):
        worker.break_connection()
    site.worker("solo", "-n", "two@test", concurrency=1, settings=QUICK)
    wait_until(lambda: all(seen[f"{word} two@test"] for word in words), WAIT_S, "the second node")
    assert seen == {f"{word} {name}@test": 1 for word in words for name in ("one", "two")}


def test_a_callback_gets_the_figures_of_the_node(redis_site: Site, inside: Make) -> None:
    site, seen = redis_site, dict[str, Any]()

    class Follow(Step):
        requires = ("Gossip",)

        def start(self, parent: Any) -> None:
            on = parent.worker.gossip.on
            on.node_join.add(lambda node: seen.setdefault("join", node))
            on.node_leave.add(lambda node: seen.setdefault("leave", node))

    peer = site.worker("solo", "-n", "peer@test", concurrency=1, settings=QUICK)
    inside(site, lambda app: app.steps["consumer"].add(Follow))
    wait_until(lambda: "join" in seen, WAIT_S, "the node")
    assert peer.stop() == 0
    wait_until(lambda: "leave" in seen, WAIT_S, "its end")
    joined, left = seen["join"], seen["leave"]
    assert (joined.hostname, joined.pid, joined.id) == (
        "peer@test",
        peer.pid,
        f"peer@test.{peer.pid}",
    )
    assert (joined.alive, left.alive) == (True, False)
    assert (joined.status_string, left.status_string) == ("ONLINE", "OFFLINE")
    assert joined.freq == 1.0
    assert len(joined.loadavg) == 3
    assert 0 < joined.clock < left.clock
    assert (joined.sw_ident, joined.active, joined.processed) == ("py-umbel", 0, 0)
    assert joined == left
