"""Gossip: a worker follows the others, and takes part in elections.

One thread with a connection of its own hears what nodes send about themselves (`worker.#`), so a
busy loop neither misses who is there nor keeps an election waiting. What it hears goes to the
machine of this node (`umbel.cluster.node`), which decides everything; what the machine answers is
carried out here: callbacks, messages, claims, the log.

Other threads use the machine as well, through `do` and `step`: those of commands that ask for
elections or pause queues, and of greetings (`worker.mingling`).

What cannot be read is refused: counted by reason, and the first of each reason is logged with a
sample. Callbacks are called by `node_callbacks`, on this thread only. A node that came back after
it was lost is reported to them as one that joins: whoever joined is there until it leaves or is
lost.

A node stands for election only where it could carry the action out, whoever asks (`Carrier.check`).
Where all refuse, one of them reports that as the result of the election (`cluster.refusals`).
Claims are made by this thread, one after another, for a moment at a time; then it listens again.

Whom this node believes is up to `control_signing` (`app.trust`). Where signing is required, an
unsigned event is for display only: its sender is listed in `unsigned_names`, and that is all. It
does not move the clock, is no member, calls no callback, takes part in no election and causes no
exchange of revocations. What is signed wrongly is dropped. An election that a `worker-elect` asks
for is subject to `control_allow`, like the command.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from umbel.app.events.receiver import UNFORESEEN, UNREADABLE
from umbel.app.events.subscription import Subscription
from umbel.app.trust import Trust
from umbel.cluster import election_words as elect
from umbel.cluster import membership as members
from umbel.cluster import node as nodes
from umbel.cluster import refusals
from umbel.cluster.election import Elections
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.content import JSON
from umbel.wire.events import Event, read, refused_sample
from umbel.wire.redaction import by_name
from umbel.wire.reprs import shown_name
from umbel.wire.signing import EVENT, UNSIGNED, Distrust, Nonces
from umbel.worker.membership.electing import Carrier, NotForElection
from umbel.worker.membership.node_callbacks import Callbacks

if TYPE_CHECKING:
    from umbel.app.events.dispatcher import Dispatcher
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.gossip")

UNSIGNED_SHOWN_MAX = 100
TURN_S = 0.25
START_S, JOIN_S, LOST_JOIN_S = 3.0, 1.0, 0.2
# Seconds for claims; then the thread listens again.
WORK_S = 0.5

NOT_FOR_ELECTION = "not-for-election"
# How much of an event that was refused is logged.
SAMPLE_CHARS = 300


class Gossip:
    """One worker's view of the others.

    Every worker has one. Where gossip is switched off, or the transport has no broadcasts, it is
    not started: it knows nobody, and its callbacks are never called.
    """

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        conf = worker.app.conf
        self._worker = worker
        self._clock = clock
        self._lock = threading.RLock()
        self.on = Callbacks(self._lock, clock)
        self.counts: Counter[str] = Counter()  # what was refused, by reason
        self.node = nodes.NodeMachine(
            worker.plan.hostname,
            clock=worker.app.clock,
            wall=worker.wall,
            revocations=worker.revocations,
            beat_s=worker.plan.heartbeat_interval_s,
            check_s=conf.worker_gossip_interval,
            may=worker.may,
            hide=lambda text: by_name(conf.task_redact_names).text(text),
        )
        self._trust = Trust(worker.app)
        self._nonces = Nonces(self._trust.now())
        self._event_exchange = conf.event_exchange
        self.carrier = Carrier(worker)
        self._todo: deque[elect.Claim | refusals.ClaimRefusal] = deque()
        self._claiming: set[str] = set()  # ids of the claims in there
        self._accept = worker.app.accept | {JSON}
        self._inlet = Subscription(
            worker.app,
            self._on_message,
            self._on_rubbish,
            connection=None,
            routing_key="worker.#",
            queue_ttl=conf.worker_gossip_queue_ttl,
            queue_expires=None,
        )
        self._thread: threading.Thread | None = None

    # -- life --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen; returns when everything that is sent from now on is heard."""
        if self._thread is not None:
            return
        self.take_part()
        self._inlet.stopping.clear()
        self._thread = threading.Thread(
            target=self._run, name=f"umbel-gossip-{self._worker.plan.hostname}", daemon=True
        )
        self._thread.start()
        self._inlet.ready.wait(START_S)

    def take_part(self) -> None:
        """Be a candidate from now on, as this life of the node."""
        events = self._worker.events
        assert events is not None, "gossip needs events"
        stamper = events.stamper
        own = elect.Candidate(stamper.hostname, stamper.pid, stamper.inc)
        self.node.take_part(Elections(own), refusals.Refusals(own), self._clock())

    def stop(self, *, lost: bool = False) -> None:
        """Listen no more; a broker that is not there is not waited for."""
        thread, self._thread = self._thread, None
        self._inlet.stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(LOST_JOIN_S if lost else JOIN_S)
        self.carrier.close()

    def _run(self) -> None:
        while not self._inlet.stopping.is_set():
            try:
                self._inlet.listen(self._turn_s())
                self.turn()
            except ImproperlyConfigured as exc:
                logger.error("no gossip and no elections: %s", exc)
                self.node.elections = self.node.refusals = None
                return
            except Exception:
                logger.exception("gossip goes on after an error")
                self._inlet.stopping.wait(1.0)
        self._inlet.close()

    def _turn_s(self) -> float:
        if self._todo:
            return 0.0
        with self._lock:
            due_at = self.node.due_at
        return TURN_S if due_at is None else max(0.0, min(TURN_S, due_at - self._clock()))

    def turn(self) -> None:
        """What there is to do besides listening."""
        self.do(nodes.Tick(self._inlet.is_open))
        self._worker.mingling.tick()
        self._work_off()
        self.on.deliver()  # also what a thread that added a callback has left

    def do(self, what: nodes.Input, event: Event | None = None) -> list[nodes.Effect]:
        """Give something to the machine, and carry out what it answers; on any thread.

        `event` is what the input was read from, if it is a sign of life. Greetings and their
        answers are the caller's.
        """
        effects = self.step(what, event)
        for effect in effects:
            self._report(effect)
            self._carry_out(effect)
        return effects

    def step(self, what: nodes.Input, event: Event | None = None) -> list[nodes.Effect]:
        """Give something to the machine; what it answers is left to the caller."""
        with self._lock:
            effects = self.node.step(what, self._clock())
            self.on.note(effects, event)
        return effects

    # -- questions ---------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether this node follows the others and takes part in elections."""
        return self.node.elections is not None

    @property
    def membership(self) -> members.Membership:
        """The nodes that this one knows."""
        return self.node.membership

    def names(self) -> list[str]:
        """The nodes that are alive, itself included; empty before this node can know them."""
        with self._lock:
            return self.node.names(self._clock())

    def unsigned_names(self) -> list[str]:
        """Some of the nodes that are heard without a signature, where one is required."""
        with self._lock:
            known = [member.node.hostname for member in self.node.unsigned.alive()]
        return sorted(known)[:UNSIGNED_SHOWN_MAX]

    def summary(self) -> str:
        """A digest of revocations and paused queues, for heartbeats."""
        with self._lock:
            return self.node.summary()

    def view(self) -> dict[str, Any]:
        """Elections that are open, decided lately, or refused here; and refusals by reason."""
        with self._lock:
            elections, declined = self.node.elections, self.node.refusals
            if elections is None or declined is None:
                raise self._no_part()
            view = {**elections.view(), "declined": declined.view(self._clock())}
        for one in view["decided"].values():
            held = one["winner"] is not None and not elect.is_refusal(one["winner"])
            one["winner"] = elect.node_of(one["winner"]) if held else None
        view["refused"] = dict(self.counts)
        return view

    @staticmethod
    def _no_part() -> NotForElection:
        return NotForElection(
            "this node takes no part in elections: gossip is off here (--without-gossip), or "
            "the transport has no broadcasts"
        )

    # -- what is heard -----------------------------------------------------------------

    def _on_message(self, message: Any) -> bool:
        believed = self._judge(message)
        if believed is not None:
            self._read(message, believed)
        return not self._inlet.stopping.is_set()

    def _judge(self, message: Any) -> bool | None:
        """Whether to act on a message; None for one that is not even displayed."""
        try:
            self._trust.judge(message, self._event_exchange, EVENT, self._nonces)
        except Distrust as distrust:
            if distrust.reason == UNSIGNED:
                return False
            self._refuse(distrust.reason, None, _sender(None, message), text=distrust.text)
            return None
        return True

    def _read(self, message: Any, believed: bool) -> None:
        headers = message.headers if isinstance(message.headers, dict) else {}
        content = message.body, message.content_type, message.content_encoding
        compression = headers.get("compression")
        found = read(*content, accept=self._accept, compression=compression)
        for reason in found.refused:
            sample = None
            if reason not in self.counts:
                sample = refused_sample(
                    reason, *content, accept=self._accept, compression=compression
                )
            self._refuse(reason, sample, _sender(sample, message))
        for event in found.events:
            try:
                if believed:
                    self._hear(event)
                else:
                    self._display(event)
            except Exception as exc:  # noqa: BLE001 - ours to mend, and no reason to end
                self._refuse(UNFORESEEN, event, event["hostname"], exc=exc)

    def _on_rubbish(self, exc: Exception) -> None:
        self._refuse(UNREADABLE, exc)

    def _refuse(
        self,
        reason: str,
        sample: Any,
        sender: Any = None,
        *,
        text: str = "",
        exc: Exception | None = None,
    ) -> None:
        """Count what is refused, and log the first of each kind; `text` replaces the sample."""
        self.counts[reason] += 1
        if self.counts[reason] > 1:
            return
        hiding = by_name(self._worker.app.conf.task_redact_names)
        logger.warning(
            "An event was refused (%s)%s: %s. Others of this kind are only counted.",
            reason,
            f", sent by {shown_name(sender)}" if isinstance(sender, str) else "",
            text or hiding.result_repr(sample, SAMPLE_CHARS),
            exc_info=exc,
        )

    def _hear(self, event: Event) -> None:
        if not event["type"].startswith("worker-"):
            return  # transports without patterns deliver everything
        heard = nodes.read(event)
        if isinstance(heard.elect, elect.Heard):
            heard = heard._replace(elect=self._judged(heard.elect))
        for effect in self.do(heard, None if heard.sign is None else event):
            if isinstance(effect, nodes.Malformed):
                self._refuse(effect.reason, event, event["hostname"])
        self.on.deliver()

    def _display(self, event: Event) -> None:
        """Note that somebody is there who has not shown that it has the key."""
        if event["type"].startswith("worker-"):
            self._refuse(UNSIGNED, event, event["hostname"])
            self.do(nodes.read(event)._replace(believed=False))

    # -- elections ---------------------------------------------------------------------

    def request(self, id_: Any, topic: Any, action: Any) -> None:
        """Somebody asks for an election: say at once that this node stands, or `NotForElection`."""
        if not self.enabled:
            raise self._no_part()
        objection = self._objection(id_, topic, action)
        for effect in self.do(elect.Requested(id_, topic, action, objection)):
            if isinstance(effect, refusals.Declined):
                raise NotForElection(effect.reason)

    def deny(self, arguments: Any, reason: str) -> None:
        """Somebody asks for an election, which `control_allow` does not permit here."""
        what = elect.read_request(arguments)
        if self.enabled and not isinstance(what, str):
            self.do(replace(what, objection=reason))

    def _judged(self, what: elect.Heard) -> elect.Heard:
        """A candidacy, with our objection where this node would have to stand as well."""
        elections, clock = self.node.elections, self._worker.app.clock
        if elections is None or what.id in elections or not clock.accepts(what.clock):
            return what
        return replace(what, objection=self._objection(what.id, what.topic, what.action))

    def _objection(self, id_: Any, topic: Any, action: Any) -> str | None:
        """Why this node could not carry an action out."""
        if not self._worker.may("election"):
            return "control_allow does not permit elections here"
        try:
            self.carrier.check(id_, topic, action)
        except NotForElection as exc:
            return str(exc)
        return None

    # -- what the machine answers ------------------------------------------------------

    def _report(self, effect: nodes.Effect) -> None:
        """Log what people want to know."""
        match effect:
            case members.Lost(node, silent_s):
                name = shown_name(node.hostname)
                logger.warning("%s was lost: silent for %.1f s", name, silent_s)
            case members.Left(node):
                logger.info("%s left", shown_name(node.hostname))
            case members.Joined(node) | members.Returned(node):
                logger.info("%s joined", shown_name(node.hostname))
            case nodes.SelfDoubt(deaf_s):
                logger.warning(
                    "This worker could not hear other workers for %.1f s; not marking them as lost",
                    deaf_s,
                )
            case nodes.TimeMoved():
                logger.warning(
                    "The clock of this host differs by %.1f s from the time that most workers "
                    "agree on: revocations and pauses are judged by theirs",
                    0.0 - self._worker.wall.shift_s,
                )
            case refusals.Declined(reason=reason):
                self.counts[NOT_FOR_ELECTION] += 1
                logger.debug("this node does not stand for election: %s", reason)

    def _carry_out(self, effect: nodes.Effect) -> None:
        worker, events = self._worker, self._worker.events
        match effect:
            case elect.PublishElect() if events is not None:
                self._stand(effect, events)
            case elect.PublishAck(id_) if events is not None:
                events.send("worker-elect-ack", id=id_)
            case nodes.BeatSlower(times) if events is not None:
                events.beat_slower(times)
            case elect.Claim(id_) | refusals.ClaimRefusal(id_):
                if id_ not in self._claiming:  # one that waits for its turn is asked for again
                    self._claiming.add(id_)
                    self._todo.append(effect)
            case elect.Decided(id_, str(winner)):
                self._decided(id_, winner)
            case elect.Act():
                self.carrier.act(effect)
            case refusals.Fail():
                self.carrier.fail(effect)
            case nodes.Learned(changed):
                worker.learn_revoked(changed, "mingle")
            case nodes.Paused(changed):
                worker.consumption.heed(changed)

    def _stand(self, effect: elect.PublishElect, events: Dispatcher) -> None:
        """Say that this node is a candidate; Celery's workers must hear that before all acks."""
        fields = {"id": effect.id, "topic": effect.topic, "action": effect.action}
        # The interval too: it may be the first that others hear of this node.
        freq_s = events.beat_interval_s or self._worker.plan.heartbeat_interval_s
        fields |= {"cver": elect.OWN_CVER, "freq": freq_s}
        if effect.spares_at is not None:
            events.put("worker-elect", {**fields, "stands": False}, effect.spares_at, urgent=True)
            return
        event = events.put("worker-elect", fields, urgent=True)
        heard = elect.read_elect(event) if event is not None else "not-an-election"
        if isinstance(heard, str):
            self.counts[heard] += 1
        else:
            self.do(heard)

    def _decided(self, id_: str, winner: str) -> None:
        name, events = elect.node_of(winner), self._worker.events
        if elect.is_refusal(winner):
            logger.warning("election %s: refused by %s before this node stood", id_, name)
            return
        logger.info("election %s: %s was chosen", id_, name)
        if events is not None:
            events.send("worker-elected", id=id_, winner=name)

    def _work_off(self) -> None:
        """Make the claims that are due, on our own thread: they wait for the broker."""
        until = self._clock() + WORK_S
        while self._todo and self._clock() < until and not self._inlet.stopping.is_set():
            claim = self._todo.popleft()
            self._claiming.discard(claim.id)
            if isinstance(claim, elect.Claim):
                answer = self.carrier.claim(claim)
            else:
                answer = self.carrier.claim_refusal(claim)
            self.do(nodes.ClaimAnswered(claim, answer))


def _sender(sample: Any, message: Any) -> Any:
    """Who has sent something, as far as it or its headers tell."""
    for told in (sample, message.headers):
        if isinstance(told, dict) and isinstance(told.get("hostname"), str):
            return told["hostname"]
    return None
