"""Acknowledgements that did not reach RabbitMQ: the message comes again, its task does not run.

A proxy swallows what the worker writes and then cuts its connections.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.proxy import Proxy
from tests.servers import RabbitMQServer, wait_until
from tests.sites import Site
from tests.workers import WorkerProcess


class Cable:
    """A worker behind a proxy, and its client, which is not."""

    def __init__(self, site: Site, proxy: Proxy, server: RabbitMQServer) -> None:
        self.site, self.proxy = site, proxy
        self._server = server
        self._vhost = site.broker_url.rsplit("/", 1)[1]
        self.worker: WorkerProcess | None = None

    def start(self, pool: str = "prefork", **options: object) -> WorkerProcess:
        url = self.site.broker_url.replace(f":{self._server.port}/", f":{self.proxy.port}/")
        settings = {"broker_url": url, "broker_heartbeat": 0}
        self.worker = self.site.worker(pool, settings=settings, **options)  # type: ignore[arg-type]
        return self.worker

    def cut(self) -> None:
        assert self.worker is not None
        lines = len(self.worker.lines)
        self.proxy.cut()
        self.worker.wait_for(r"onnection to .* lost", start=lines)
        self.worker.wait_for(r"\bready\b", start=lines)

    def unacknowledged(self) -> int:
        return self._server.unacknowledged("celery", self._vhost)

    def wait_until_settled(self) -> None:
        wait_until(
            lambda: not self.site.waiting() and not self.unacknowledged(), 20, "all to be settled"
        )


@pytest.fixture
def cable(amqp_site: Site, rabbitmq_server: RabbitMQServer) -> Iterator[Cable]:
    with Proxy(rabbitmq_server.port) as proxy:
        made = Cable(amqp_site, proxy, rabbitmq_server)
        yield made
        if made.worker is not None:
            made.worker.kill()


def test_an_early_task_whose_acknowledgement_was_lost_runs_on_and_only_once(cable: Cable) -> None:
    cable.start()
    cable.proxy.swallow(to_server=True)
    result = cable.site.send("wait", "early")
    cable.site.wait_until_begun("early")
    cable.cut()
    cable.wait_until_settled()
    assert cable.site.works(), "one of two processes is free"
    cable.site.open_gate("early")
    assert result.get(timeout=30) == "early"
    assert cable.site.runs("early") == 1
    assert cable.site.works()


def test_tasks_that_ended_before_their_acknowledgements_were_lost_do_not_run_again(
    cable: Cable,
) -> None:
    cable.start()
    cable.proxy.swallow(to_server=True)
    tasks = [cable.site.send("record_late", f"late-{n}") for n in range(4)]
    tasks += [cable.site.send("record", f"early-{n}") for n in range(4)]
    for one in tasks:
        assert one.get(timeout=30) == 1
    assert cable.unacknowledged() == 8
    cable.cut()
    cable.wait_until_settled()
    assert cable.site.works()
    assert {cable.site.runs(f"{kind}-{n}") for kind in ("early", "late") for n in range(4)} == {1}


def test_a_late_task_that_ends_while_there_is_no_connection_does_not_run_again(
    cable: Cable, rabbitmq_server: RabbitMQServer
) -> None:
    worker = cable.start()
    result = cable.site.send("wait_late", "late")
    cable.site.wait_until_begun("late")
    cable.proxy.refuse(True)
    lines = len(worker.lines)
    cable.proxy.cut()
    worker.wait_for(r"annot connect to", start=lines)
    cable.site.open_gate("late")
    assert result.get(timeout=30) == "late"
    cable.proxy.refuse(False)
    worker.wait_for(r"\bready\b", start=lines)
    cable.wait_until_settled()
    assert cable.site.runs("late") == 1
    assert cable.site.works()


def test_what_was_rejected_is_rejected_again_and_what_was_put_back_runs_again(
    cable: Cable,
) -> None:
    cable.start()
    cable.proxy.swallow(to_server=True)
    cable.site.send("reject", "dropped", False)
    again = cable.site.send("reject", "again", True)
    for token in ("dropped", "again"):
        cable.site.wait_until_begun(token)
    wait_until(lambda: cable.worker and cable.worker.output.count("rejected") == 2)
    cable.cut()
    assert again.get(timeout=30) == 2
    cable.wait_until_settled()
    assert (cable.site.runs("dropped"), cable.site.runs("again")) == (1, 2)


def test_two_messages_of_one_id_that_were_not_delivered_before_both_run(cable: Cable) -> None:
    cable.start()
    for _ in range(2):
        cable.site.send("wait_late", "twice", task_id="the-same")
    for _ in range(2):
        cable.site.wait_until_begun("twice")
    for _ in range(2):
        cable.site.open_gate("twice")
    cable.wait_until_settled()
    assert cable.site.runs("twice") == 2


def test_a_retry_is_another_message_than_the_one_that_asked_for_it(cable: Cable) -> None:
    """The first is acknowledged in vain, and its retry comes back as delivered before."""
    cable.start()
    cable.proxy.swallow(to_server=True)
    result = cable.site.send("retry_until", "token", 1)
    cable.site.wait_until_begun("token")
    # The retry was sent on another connection, which is swallowed too: it is sent again.
    cable.cut()
    assert result.get(timeout=60) == 1
    cable.wait_until_settled()
    assert cable.site.runs("token") >= 2
