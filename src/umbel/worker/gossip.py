"""Gossip: a worker follows the others, and takes part in elections.

One thread with a connection of its own hears what nodes tell of themselves (`worker.#`) and feeds
the machines of `umbel.cluster`; so a busy loop neither misses who is there nor keeps an election
waiting. What the machines decide is carried out here: callbacks, messages, claims.

| from                               | to                                            |
| ---------------------------------- | --------------------------------------------- |
| heartbeats, online, offline        | `Membership`: `on.node_join`, `_leave`, `_lost` |
| `worker-elect` of anybody          | `Elections`                                   |
| the control command `election`     | `Elections`, on the thread of the command     |
| own events                         | the clock, one forward                        |

Every clock that is heard is witnessed. What can not be read is counted. A callback that fails is
logged; nobody else is told less because of it. A node that came back after it was lost is told as
one that joins: whoever joined is there until it leaves or is lost.

Nobody is taken for lost by who could not hear: while the connection is away, while its own
heartbeats do not come back, and after the thread was held up (a stopped process, a broker that did
not answer a claim). Then the next look at who is silent is put off, long enough for all to be heard
again, and no silence counts beyond the last echo of its own.

A node stands for election only where it could carry the action out, whoever asks (`Carrier.check`).
Claims are made by this thread, one after another, for a moment at a time; then it listens again.

Heartbeats cost every node what all others send. Above `NODES_FULL` nodes each beats more slowly, in
proportion, so that what a node hears per second stays the same; heartbeats tell their interval, and
patience follows it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from umbel.app.events.inlet import Inlet
from umbel.cluster import election as elect
from umbel.cluster import membership as members
from umbel.cluster.election_words import CELERY_CVER, OWN_CVER
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.content import JSON
from umbel.wire.events import Event, read
from umbel.worker.electing import Carrier, NotForElection

if TYPE_CHECKING:
    from umbel.app.events.dispatcher import Dispatcher
    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.gossip")

# The first place at which heartbeats are not worth their price any more.
NODES_FULL = 50
TURN_S = 0.25
START_S, JOIN_S = 3.0, 1.0
# So long between two turns, and this thread was held up; so late an own heartbeat, and it is deaf.
HELD_UP_S = 1.0
ECHO_S = 0.5
# Others need as long to find their broker again.
GRACE_S = members.STALL_S
# So long for claims, then the thread listens again.
WORK_S = 0.5
# How long others take to answer the call for heartbeats with which this node begins to listen.
SETTLE_S = 1.0
# How often other nodes' revocations are looked at.
MINGLE_S = 0.5

NOT_FOR_ELECTION = "not-for-election"
# So many elections are remembered in which this node takes no part, and so far behind it ranks.
DECLINED_MAX = 1_000
DECLINED_CLOCK = 1_000
# What heartbeats call the software of our kind, and so many others are told apart.
OWN_IDENT = "py-umbel"
CELERY_MAX = 1_000

Callback = Callable[[Any], object]


class Callbacks:
    """What users want to be told: functions that get the node."""

    def __init__(self) -> None:
        self.node_join: set[Callback] = set()
        self.node_leave: set[Callback] = set()
        self.node_lost: set[Callback] = set()


class Gossip:
    """One worker's view of the others."""

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        conf = worker.app.conf
        self._worker = worker
        self._clock = clock
        self._check_s = conf.worker_gossip_interval
        self.on = Callbacks()
        self.counts: Counter[str] = Counter()  # what was refused, by reason
        # Its ticks are as far apart as the setting says.
        stall_s = max(members.STALL_S, 2 * self._check_s)
        self.membership = members.Membership(worker.plan.hostname, stall_s=stall_s)
        self.carrier = Carrier(worker)
        self.mingling = worker.mingling
        self.elections: elect.Elections | None = None
        self._lock = threading.RLock()
        self._todo: deque[elect.Claim] = deque()
        self._claiming: set[str] = set()  # ids of the claims in there
        self._accept = worker.app.accept | {JSON}
        self._turned_at = self._check_at = self._mingle_at = clock()
        self._settled_at: float | None = None
        self._echo_at: float | None = None  # when something of our own was heard
        self._declined: deque[str] = deque(maxlen=DECLINED_MAX)
        self._celery: set[str] = set()  # who is there and not of our kind
        self._inlet = Inlet(
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
        """Begin to listen; returns when everything that is told from now on is heard."""
        if self._thread is not None:
            return
        self.take_part()
        self._inlet.stopping.clear()
        self._thread = threading.Thread(
            target=self._run, name=f"umbel-gossip-{self._worker.plan.hostname}", daemon=True
        )
        self._thread.start()
        self._inlet.ready.wait(START_S)
        self._settled_at = self._clock() + SETTLE_S

    def take_part(self) -> None:
        """Be a candidate from now on, as this life of the node."""
        self._turned_at = self._clock()  # what went before was no stall
        events = self._worker.events
        assert events is not None, "gossip needs events"
        stamper = events.stamper
        own = elect.Candidate(stamper.hostname, stamper.pid, stamper.inc)
        self.elections = elect.Elections(own)

    def stop(self) -> None:
        """Listen no more."""
        thread, self._thread = self._thread, None
        self._inlet.stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)
        self.carrier.close()

    def _run(self) -> None:
        while not self._inlet.stopping.is_set():
            try:
                self._inlet.listen(self._turn_s())
                self.turn()
            except ImproperlyConfigured as exc:
                logger.error("no gossip and no elections: %s", exc)
                self.elections = None
                return
            except Exception:
                logger.exception("gossip goes on after an error")
                self._inlet.stopping.wait(1.0)
        self._inlet.close()

    def _turn_s(self) -> float:
        if self._todo:
            return 0.0
        with self._lock:
            due_at = self.elections.due_at if self.elections is not None else None
        left_s = TURN_S if due_at is None else due_at - self._clock()
        return max(0.0, min(TURN_S, left_s))

    def turn(self) -> None:
        """What there is to do besides listening."""
        self._look_for_losses()
        self._step(elect.Tick())
        self._work_off()

    # -- questions ---------------------------------------------------------------------

    def names(self) -> list[str]:
        """The nodes that are alive, itself included; empty before this node can know them."""
        if self._settled_at is None or self._clock() < self._settled_at:
            return []
        with self._lock:
            known = [member.node.hostname for member in self.membership.alive()]
        return [self._worker.plan.hostname, *known]

    def view(self) -> dict[str, Any]:
        """Elections that are open, those that were decided lately, and what was refused."""
        with self._lock:
            view = self._machine().view()
        for one in view["decided"].values():
            one["winner"] = None if one["winner"] is None else elect.node_of(one["winner"])
        view["refused"] = dict(self.counts)
        return view

    def _machine(self) -> elect.Elections:
        if self.elections is None:
            raise NotForElection("this node takes no part in elections: there is no gossip here")
        return self.elections

    # -- what is heard -----------------------------------------------------------------

    def _on_message(self, message: Any) -> bool:
        headers = message.headers if isinstance(message.headers, dict) else {}
        found = read(
            message.body,
            message.content_type,
            message.content_encoding,
            accept=self._accept,
            compression=headers.get("compression"),
        )
        self.counts.update(found.refused)
        for event in found.events:
            try:
                self._hear(event)
            except Exception:
                self.counts["unforeseen"] += 1
                logger.exception("an event of %s could not be handled", event.get("hostname"))
        return not self._inlet.stopping.is_set()

    def _on_rubbish(self, exc: Exception) -> None:
        self.counts["unreadable"] += 1
        if self.counts["unreadable"] == 1:
            logger.warning("gossip that can not be read: %s", exc)

    def _hear(self, event: Event) -> None:
        kind = event["type"]
        if not kind.startswith("worker-"):
            return  # transports without patterns deliver everything
        app, own = self._worker.app, event["hostname"] == self._worker.plan.hostname
        credible = True
        if own:
            app.clock.forward()
            self._echo_at = self._clock()
        elif "clock" in event:
            # A clock that is too far ahead is not believed; that somebody is there is.
            credible = app.clock.adjust(event["clock"]) >= event["clock"]
            self.counts["clock-jump"] += not credible
        else:
            app.clock.forward()
        if kind == "worker-elect" and credible:
            self._heard_elect(event)
        if not own:
            self._sign_of_life(event, kind)
            if kind == "worker-heartbeat" and "revoked" in event:
                self.mingling.compared(event["hostname"], event["revoked"])

    def _sign_of_life(self, event: Event, kind: str) -> None:
        node = event["hostname"], event.get("pid"), event.get("inc")
        what: members.Input
        if kind == "worker-offline":
            what = members.Offline(*node)
        else:
            word: members.Kind = (
                "online" if kind == "worker-online"
                else "heartbeat" if kind == "worker-heartbeat" else "other"
            )  # fmt: skip
            what = members.Heard(*node, event.get("freq"), word)
            if event.get("sw_ident", OWN_IDENT) != OWN_IDENT and len(self._celery) < CELERY_MAX:
                self._celery.add(event["hostname"])
        with self._lock:
            effects = self.membership.step(what, self._clock())
        self._tell(effects)

    def _heard_elect(self, event: Event) -> None:
        heard = elect.read_elect(event)
        if isinstance(heard, str):
            self.counts[heard] += 1
            return
        if self.elections is not None and heard.id not in self.elections:
            try:
                self.carrier.check(heard.id, heard.topic, heard.action)
            except NotForElection as exc:
                self._decline(heard, exc)
                return
        self._step(heard)

    # -- membership --------------------------------------------------------------------

    def _look_for_losses(self) -> None:
        now = self._clock()
        held_up = now - self._turned_at > HELD_UP_S
        self._turned_at = now
        heard_until = self._heard_until(now)
        if held_up or not self._inlet.is_open or now > heard_until + ECHO_S:
            self._check_at = max(self._check_at, now + max(self._check_s, GRACE_S))
        if now >= self._check_at:
            self._check_at = now + self._check_s
            with self._lock:
                effects = self.membership.step(members.Tick(), min(now, heard_until))
            self._tell(effects)
            self._slow_down()
        if now >= self._mingle_at:
            self._mingle_at = now + MINGLE_S
            self.mingling.tick()

    def _heard_until(self, now: float) -> float:
        """Until when this node can be sure to have heard everything: its own events come back."""
        events = self._worker.events
        interval_s = None if events is None else events.beat_interval_s
        return now if interval_s is None or self._echo_at is None else self._echo_at + interval_s

    def _slow_down(self) -> None:
        """What all nodes together send per second does not grow with their number."""
        events = self._worker.events
        if events is not None:
            crowd = max(1.0, (len(self.membership) + 1) / NODES_FULL)
            events.beat_slower(crowd)

    def _tell(self, effects: list[members.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, members.SelfDoubt):
                logger.warning("this node was stalled for %.1f s: nobody else is to blame",
                               effect.stalled_s)  # fmt: skip
                continue
            name = effect.node.hostname
            if isinstance(effect, members.Lost):
                logger.warning("%s was lost: silent for %.1f s", name, effect.silent_s)
                self._gone(name)
                self._call(self.on.node_lost, effect.node)
            elif isinstance(effect, members.Left):
                logger.info("%s left", name)
                self._gone(name)
                self._call(self.on.node_leave, effect.node)
            else:
                logger.info("%s joined", name)
                self._call(self.on.node_join, effect.node)

    def _gone(self, hostname: str) -> None:
        self._celery.discard(hostname)
        self._step(elect.Gone(hostname))
        self.mingling.gone(hostname)

    def _call(self, callbacks: set[Callback], node: members.Node) -> None:
        for callback in list(callbacks):
            try:
                callback(node)
            except (Exception, SystemExit):
                logger.exception("a callback about nodes failed: %r", callback)

    # -- elections ---------------------------------------------------------------------

    def request(self, id_: str, topic: str, action: Any) -> None:
        """Somebody asks for an election: say at once that this node stands, or `NotForElection`."""
        machine, what = self._machine(), elect.Requested(id_, topic, action)
        try:
            self.carrier.check(id_, topic, action)
        except NotForElection as exc:
            if id_ not in machine:
                self._decline(what, exc)
            raise
        self._step(what)

    def _decline(self, what: elect.Requested | elect.Heard, exc: NotForElection) -> None:
        """Take no part; a Celery worker that found itself the only candidate would end."""
        self.counts[NOT_FOR_ELECTION] += 1
        logger.debug("this node does not stand for election: %s", exc)
        events, name = self._worker.events, what.id
        if isinstance(what, elect.Heard) and what.cver != CELERY_CVER:
            return  # of our kind, and unimpressed by it; nor is there an echo without end
        if events is None or not self._celery or name in self._declined:
            return
        if isinstance(elect.read_request(_fields(what)), str):
            return  # Celery's workers make nothing of it either
        self._declined.append(name)
        # Behind all who stand in earnest.
        clock = self._worker.app.clock.value + DECLINED_CLOCK
        events.put("worker-elect", {**self._told(what), "cver": OWN_CVER}, clock, urgent=True)

    def _step(self, what: elect.Input) -> None:
        if self.elections is None:
            return
        with self._lock:
            effects = self.elections.step(what, self._clock())
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: elect.Effect) -> None:
        events = self._worker.events
        if isinstance(effect, elect.PublishElect) and events is not None:
            self._stand(effect, events)
        elif isinstance(effect, elect.PublishAck) and events is not None:
            events.send("worker-elect-ack", id=effect.id)
        elif isinstance(effect, elect.Decided):
            self._decided(effect)
        elif isinstance(effect, elect.Claim):
            if effect.id not in self._claiming:  # one that waits for its turn is asked for again
                self._claiming.add(effect.id)
                self._todo.append(effect)
        elif isinstance(effect, elect.Act):
            self.carrier.act(effect)

    def _stand(self, effect: elect.PublishElect, events: Dispatcher) -> None:
        """Say that this node is a candidate; Celery's workers must hear that before all acks."""
        event = events.put("worker-elect", {**self._told(effect), "cver": OWN_CVER}, urgent=True)
        heard = elect.read_elect(event) if event is not None else "not-an-election"
        if isinstance(heard, str):
            self.counts[heard] += 1
        else:
            self._step(heard)

    def _decided(self, effect: elect.Decided) -> None:
        if effect.winner is None:
            return  # given up here; others may know
        winner, events = elect.node_of(effect.winner), self._worker.events
        logger.info("election %s: %s was chosen", effect.id, winner)
        if events is not None:
            events.send("worker-elected", id=effect.id, winner=winner)

    def _told(self, what: elect.Requested | elect.Heard | elect.PublishElect) -> dict[str, Any]:
        """The fields of our `worker-elect`; the interval, as it may be the first word of ours."""
        events, plan = self._worker.events, self._worker.plan
        interval_s = events.beat_interval_s if events is not None else None
        return {**_fields(what), "freq": interval_s or plan.heartbeat_interval_s}

    def _work_off(self) -> None:
        """Make the claims that are due, on our own thread: they wait for the broker."""
        until = self._clock() + WORK_S
        while self._todo and self._clock() < until and not self._inlet.stopping.is_set():
            effect = self._todo.popleft()
            self._claiming.discard(effect.id)
            self._step(self.carrier.claim(effect))


def _fields(what: elect.Requested | elect.Heard | elect.PublishElect) -> dict[str, Any]:
    return {"id": what.id, "topic": what.topic, "action": what.action}
