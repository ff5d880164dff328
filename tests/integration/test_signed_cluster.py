"""With `control_signing="required"`, only who has the key makes a worker do anything."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.inside import Inside
from tests.integration.commanded import NAME, Start, Tasks, tell
from tests.responders import Responder
from tests.servers import wait_until
from tests.sites import APP, QUEUE, Site
from tests.strangers import Stranger
from tests.unit.worker.parts import idle_worker
from umbel import Umbel
from umbel.wire.control import Request, write_request
from umbel.wire.signing import sign
from umbel.worker.runtime.worker import Worker

KEY = "sixteen bytes, or more of them"
REQUIRED = {"control_signing": "required", "control_signing_key": KEY}
BEAT_S = 1.0
QUICK = {"worker_heartbeat_interval": BEAT_S, "worker_gossip_interval": 0.25}


@pytest.fixture
def stranger(site: Site) -> Iterator[Stranger]:
    with Stranger(site.broker_url) as made:
        yield made


@pytest.fixture
def client(site: Site) -> Iterator[Umbel]:
    """A client that has the key."""
    made = Umbel(
        "client", broker=site.broker_url, backend=site.backend_url, set_as_current=False, **REQUIRED
    )
    yield made
    made.close()


@pytest.fixture
def inside(site: Site) -> Iterator[Callable[..., Inside]]:
    made: list[Inside] = []

    def start(**settings: Any) -> Inside:
        chosen = {
            "broker_url": site.broker_url,
            "result_backend": site.backend_url,
            **QUICK,
            **settings,
        }
        made.append(Inside(chosen, lambda app: None).start())
        return made[-1]

    yield start
    for one in made:
        one.close()


def elections_of(client: Umbel, node: str) -> dict[str, Any]:
    replies = client.control.broadcast("elections", destination=[node], reply=True, timeout=10)
    assert replies, f"{node} does not answer"
    return dict(replies[0][node])


# -- elections -------------------------------------------------------------------------------


def test_a_forged_candidate_opens_no_election_and_a_signed_request_does(
    site: Site, stranger: Stranger, client: Umbel
) -> None:
    for name in ("one@test", "two@test"):
        site.worker("threads", "-n", name, concurrency=1, settings={**REQUIRED, **QUICK})
    action = {"task": f"{APP}.record", "args": ["forged"], "kwargs": {}, "options": {}}
    stranger.elect("forged-task", "task", action)
    stranger.elect("forged-topic", "note", "forged")
    stranger.command("election", id="forged-request", topic="note", action="forged")
    client.control.election("signed", "note", "signed")
    site.wait_until_begun("signed")
    client.control.election("signed-later", "note", "signed-later")
    site.wait_until_begun("signed-later")
    assert site.runs("forged") == 0
    for name in ("one@test", "two@test"):
        seen = elections_of(client, name)
        assert set(seen["decided"]) | set(seen["open"]) == {"signed", "signed-later"}


@pytest.mark.parametrize("allow", ["read-only", ["ping", "elections"]], ids=str)
def test_a_worker_that_may_hold_no_election_holds_none_that_it_hears_of(
    site: Site, stranger: Stranger, allow: Any
) -> None:
    site.worker(
        "threads", "-n", "closed@test", concurrency=1, settings={"control_allow": allow, **QUICK}
    )
    stranger.elect("heard", "note", "heard")
    site.worker("threads", "-n", "open@test", concurrency=1, settings=QUICK)
    stranger.elect("heard-by-both", "note", "heard-by-both")
    site.wait_until_begun("heard-by-both")
    assert site.runs("heard") == 0
    seen = elections_of(site.app, "closed@test")
    assert not seen["decided"]
    assert not seen["open"]


# -- membership ------------------------------------------------------------------------------


def test_an_unsigned_heartbeat_makes_no_member_and_is_only_shown(
    site: Site, stranger: Stranger, inside: Callable[..., Inside]
) -> None:
    watcher = inside(**REQUIRED)
    gossip = watcher.worker.gossip
    joined: list[str] = []
    gossip.on.node_join.add(lambda node: joined.append(node.hostname))
    site.worker("solo", "-n", "signed@test", concurrency=1, settings={**REQUIRED, **QUICK})
    stranger.heartbeat("ghost@test", revoked="0123456789abcdef")
    # A newer life of a worker that exists, and its goodbye, would make others act as well.
    stranger.heartbeat("signed@test", inc=2**52, pid=1)
    stranger.event("worker-offline", "signed@test", inc=2**52, pid=1)
    wait_until(lambda: "ghost@test" in gossip.node.unsigned, 20, "the ghost to be heard")
    wait_until(lambda: "signed@test" in joined, 20, "the worker with the key to join")
    assert joined == ["signed@test"]
    wait_until(gossip.names, 20, "the worker to know the others")
    assert sorted(gossip.names()) == [NAME, "signed@test"]
    assert "ghost@test" not in gossip.node.mingle.differing
    shown = watcher.client.control.inspect([NAME], timeout=10).stats()[NAME]["umbel"]
    assert "ghost@test" in shown["nodes_unsigned"]
    assert shown["nodes"] == 1


def test_where_signing_is_optional_unsigned_nodes_are_members_and_wrong_signatures_are_refused(
    site: Site, stranger: Stranger, inside: Callable[..., Inside]
) -> None:
    watcher = inside(control_signing="optional", control_signing_key=KEY)
    gossip = watcher.worker.gossip
    event = {
        "type": "worker-heartbeat", "hostname": "wrong@test", "timestamp": time.time(), "pid": 1,
        "clock": 1, "utcoffset": 0, "freq": 60,
    }  # fmt: skip
    body = json.dumps(event).encode()
    wrong = sign(body, {}, b"another key of sixteen bytes", time.time(), "n", exchange="celeryev")
    stranger.send_event(body, "worker-heartbeat", wrong)
    stranger.heartbeat("plain@test")
    wait_until(lambda: "plain@test" in gossip.membership, 20, "the unsigned node to join")
    assert "wrong@test" not in gossip.membership
    assert gossip.counts["bad-signature"] == 1


# -- mingle ----------------------------------------------------------------------------------


def forged_answer(_: Any) -> dict[str, Any]:
    """What a node would tell that knows of revocations and pauses."""
    now = time.time()
    return {
        "clock": 5,
        "revoked": [],
        "digest": {"tasks": {"1": "1"}, "headers": {"1": "1"}},
        "told": {
            "tasks": {"forged-id": [now, now + 3_600]},
            "headers": {'["team","red"]': [now, now + 3_600]},
        },
        "paused": {QUEUE: [now, True]},
    }


def mingled(site: Site, **settings: Any) -> Worker:
    """A worker that has greeted the others, and does nothing else."""
    app = Umbel(
        "joiner", broker=site.broker_url, backend="disabled://", set_as_current=False, **settings
    )
    try:
        worker = idle_worker(app, hostname="joiner@test")
        with app.connection() as connection:
            connection.connect()
            worker.mingling.run(connection)
    finally:
        app.close()
    return worker


def test_who_has_no_key_revokes_and_pauses_nothing_by_answering_a_greeting(site: Site) -> None:
    with Responder(site.app, "forger@test", {"hello": forged_answer}):
        open_worker = mingled(site)
        closed = mingled(site, **REQUIRED)
    assert open_worker.revocations.ids() == ["forged-id"], "the forgery works where all may"
    assert closed.revocations.all() == []
    assert closed.gossip.node.pauses.told() == {}


def test_a_plain_list_of_ids_is_not_taken_from_who_has_no_key(site: Site) -> None:
    with Responder(site.app, "forger@test", {"hello": lambda _: {"clock": 5, "revoked": ["id"]}}):
        assert mingled(site).revocations.ids() == ["id"]
        assert mingled(site, **REQUIRED).revocations.ids() == []


@pytest.mark.parametrize(
    ("allow", "tasks", "headers", "paused"),
    [
        ("all", True, True, True),
        ("read-only", False, False, False),
        (["hello", "revoke"], True, False, False),
        (["hello", "revoke_by_stamped_headers", "pause"], False, True, True),
    ],
    ids=str,
)
def test_an_answer_to_a_greeting_does_only_what_control_allow_permits(
    site: Site, allow: Any, tasks: bool, headers: bool, paused: bool
) -> None:
    with Responder(site.app, "other@test", {"hello": forged_answer}):
        worker = mingled(site, control_allow=allow)
    assert bool(worker.revocations.ids()) is tasks
    assert bool(worker.revocations.headers()) is headers
    assert (QUEUE in worker.consumption.paused) is paused


def test_workers_with_the_key_exchange_revocations_and_pauses(
    site: Site, inside: Callable[..., Inside]
) -> None:
    first = inside(**REQUIRED)
    control = first.client.control
    control.revoke("signed-id", reply=True, timeout=10, limit=1)
    control.pause("elsewhere", reply=True, timeout=10, limit=1)
    joiner = mingled(site, **REQUIRED)
    assert joiner.revocations.ids() == ["signed-id"]
    assert joiner.gossip.node.pauses.told()["elsewhere"][1] is True


def test_fresh_workers_with_the_key_learn_from_each_others_heartbeats(
    site: Site, client: Umbel
) -> None:
    names = ["one@test", "two@test"]
    for name in names:
        site.worker("threads", "-n", name, concurrency=1, settings={**REQUIRED, **QUICK})

    def tell_one(command: str, name: str, **arguments: Any) -> Any:
        replies = client.control.broadcast(
            command, arguments, destination=[name], reply=True, timeout=10
        )
        assert replies, f"{name} does not answer"
        return replies[0][name]

    for name in names:  # each knows something that the other one does not
        tell_one("revoke", name, task_id=[f"from-{name}"])
    tell_one("pause", "one@test", queue="elsewhere", stamp=time.time())
    for name in names:
        wait_until(
            lambda one=name: (
                len(tell_one("revoked", one)) == 2
                and "elsewhere" in tell_one("stats", one)["umbel"]["paused"]
            ),
            20,
            f"{name} to know all of it",
        )


# -- replay ----------------------------------------------------------------------------------


def test_a_copy_of_a_greeting_tells_a_fresh_worker_nothing(
    broker_url: str, commanded: Start
) -> None:
    inside = commanded(broker_url, settings=REQUIRED, without_gossip=True)
    now = time.time()
    told = {"tasks": {"copied": [now, now + 3_600]}, "headers": {}}
    arguments = {
        "from_node": "old@test", "revoked": ["copied-id"], "digest": {}, "told": told,
        "paused": {QUEUE: [now, True]},
    }  # fmt: skip
    written = write_request(Request(method="hello", arguments=arguments, expires=now + 300))
    headers = sign(
        written.body, written.headers, KEY.encode(), now + 20, "n", exchange="celery.pidbox"
    )
    with Stranger(broker_url) as recorder:
        recorder.send(written.body, headers=headers)
    assert tell(inside, "ping") == {"ok": "pong"}
    panel = inside.worker.panel
    assert panel is not None
    wait_until(lambda: panel.handled >= 2, 20, "the greeting to be handled")
    assert inside.worker.revocations.all() == []
    assert inside.worker.gossip.node.pauses.told() == {}


def signed_command(now: float, nonce: str, **arguments: Any) -> tuple[bytes, dict[str, Any]]:
    written = write_request(Request(method="count", arguments=arguments, expires=now + 300))
    headers = sign(
        written.body, written.headers, KEY.encode(), now, nonce, exchange="celery.pidbox"
    )
    return written.body, headers


def test_a_message_signed_ahead_of_time_is_not_obeyed_again_after_a_restart(
    broker_url: str, commanded: Start, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 29.0
    body, headers = signed_command(time.time() + ahead_s, "ahead", n=1)
    first = commanded(broker_url, settings=REQUIRED, without_gossip=True)
    panel = first.worker.panel
    assert panel is not None
    panel._nonces.since -= 1_000  # it has been listening for long
    with Stranger(broker_url) as recorder:
        recorder.send(body, headers=headers)
        wait_until(lambda: tasks.commands == [{"n": 1}], 20, "the first delivery to be obeyed")
        assert first.stop() == 0
        second = commanded(broker_url, settings=REQUIRED, without_gossip=True)
        recorder.send(body, headers=headers)
        assert tell(second, "count", n=2) == {"ok": 2}, "who has the key commands at once"
        # Whoever waits until the message looks new is no better off.
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
        recorder.send(body, headers=headers)
        assert tell(second, "count", n=3) == {"ok": 3}
    assert tasks.commands == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_fresh_worker_obeys_at_once_also_commands_without_reply_and_clocks_that_differ(
    broker_url: str, commanded: Start, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = commanded(broker_url, settings=REQUIRED, without_gossip=True)
    inside.client.control.broadcast("count", {"n": 1})
    wait_until(lambda: tasks.commands == [{"n": 1}], 20, "the command without a reply")
    mailbox = inside.client.control.mailbox
    for number, skew_s in enumerate((-20.0, 20.0), 2):
        monkeypatch.setattr(mailbox.trust, "now", lambda s=skew_s: time.time() + s)
        assert tell(inside, "count", n=number) == {"ok": number}


def test_the_answer_of_a_stranger_to_a_claimed_name_stops_no_worker(site: Site) -> None:
    with Responder(site.app, "taken@test"):
        worker = site.worker("threads", "-n", "taken@test", concurrency=1, settings=REQUIRED)
        assert worker.stop() == 0
