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

Every clock that is heard is witnessed. What cannot be read is refused: counted by reason, and the
first of each reason is logged with a sample. Callbacks are called by `node_callbacks`. A node that
came back after it was lost is reported to them as one that joins: whoever joined is there until it
leaves or is lost.

Nobody is taken for lost by who could not hear: while the connection is away, while its own
heartbeats do not come back, and after the thread was held up (a stopped process, a broker that did
not answer a claim). Then the next look at who is silent is put off, long enough for all to be heard
again, and no silence counts beyond the last echo of its own.

A node stands for election only where it could carry the action out, whoever asks (`Carrier.check`).
Where all refuse, one of them reports that as the result of the election (`cluster.refusals`).
Claims are made by this thread, one after another, for a moment at a time; then it listens again.

Heartbeats cost every node what all others send. Above `NODES_FULL` nodes each beats more slowly, in
proportion, so that what a node hears per second stays the same; heartbeats tell their interval, and
patience follows it. Only nodes count that were heard again and again, and an interval is believed
up to a few times our own at this number of nodes: strangers neither slow the heartbeats down nor
live for ever.

Whom this node believes is up to `control_signing` (`app.trust`). Where signing is required, an
unsigned event is for display only: its sender is listed in `unsigned`, and that is all. It does not
move the clock, is no member, calls no callback, takes part in no election and causes no exchange of
revocations. What is signed wrongly is dropped. An election that a `worker-elect` asks for is
subject to `control_allow`, like the command.

Heartbeats also tell the clocks of the other hosts, from which the nodes derive the time that they
agree on (`cluster.agreed_time`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from umbel.app.events.receiver import CLOCK_JUMP, UNFORESEEN, UNREADABLE
from umbel.app.events.subscription import Subscription
from umbel.app.trust import Trust
from umbel.cluster import election as elect
from umbel.cluster import membership as members
from umbel.cluster import refusals
from umbel.cluster.election_words import CELERY_CVER, OWN_CVER
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.content import JSON
from umbel.wire.events import Event, read, refused_sample
from umbel.wire.redaction import by_name
from umbel.wire.reprs import shown_name
from umbel.wire.signing import EVENT, UNSIGNED, Distrust, Nonces
from umbel.worker.electing import Carrier, NotForElection
from umbel.worker.node_callbacks import Callbacks

if TYPE_CHECKING:
    from umbel.app.events.dispatcher import Dispatcher
    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.gossip")

# The first place at which heartbeats are not worth their price any more.
NODES_FULL = 50
# An interval is believed up to this many times our own, and up to the one of who tells none.
FREQ_TIMES_MAX = 4
# Nodes that are only displayed.
UNSIGNED_MAX, UNSIGNED_SHOWN_MAX = 1_000, 100
TURN_S = 0.25
START_S, JOIN_S, LOST_JOIN_S = 3.0, 1.0, 0.2
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
REASON_CHARS_MAX = 1_000
# So many elections are remembered in which this node takes no part, and so far behind it ranks.
DECLINED_MAX = 1_000
DECLINED_CLOCK = 1_000
# What heartbeats call the software of our kind, and so many others are told apart.
OWN_IDENT = "py-umbel"
CELERY_MAX = 1_000
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
        self._check_s = conf.worker_gossip_interval
        self._lock = threading.RLock()
        self.on = Callbacks(self._lock, clock)
        self.counts: Counter[str] = Counter()  # what was refused, by reason
        # Its ticks are as far apart as the setting says.
        stall_s = max(members.STALL_S, 2 * self._check_s)
        self.membership = members.Membership(worker.plan.hostname, stall_s=stall_s)
        # Those that have not shown that they have the key, where they need it; for display only.
        self.unsigned = members.Membership(
            worker.plan.hostname, nodes_max=UNSIGNED_MAX, stall_s=stall_s
        )
        self._trust = Trust(worker.app)
        self._nonces = Nonces(self._trust.now())
        self._event_exchange = conf.event_exchange
        self.carrier = Carrier(worker)
        self.mingling = worker.mingling
        self.elections: elect.Elections | None = None
        self.refusals: refusals.Refusals | None = None
        self._todo: deque[elect.Claim | refusals.ClaimRefusal] = deque()
        self._claiming: set[str] = set()  # ids of the claims in there
        self._accept = worker.app.accept | {JSON}
        self._turned_at = self._check_at = self._mingle_at = clock()
        self._settled_at: float | None = None
        self._bound_intervals()
        self._echo_at: float | None = None  # when something of our own was heard
        self._declined: deque[str] = deque(maxlen=DECLINED_MAX)
        self._celery: set[str] = set()  # who is there and not of our kind
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
        self.refusals = refusals.Refusals(own)

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
                self.elections = self.refusals = None
                return
            except Exception:
                logger.exception("gossip goes on after an error")
                self._inlet.stopping.wait(1.0)
        self._inlet.close()

    def _turn_s(self) -> float:
        if self._todo:
            return 0.0
        with self._lock:
            machines = [one for one in (self.elections, self.refusals) if one is not None]
            due = [one.due_at for one in machines if one.due_at is not None]
        left_s = min(due) - self._clock() if due else TURN_S
        return max(0.0, min(TURN_S, left_s))

    def turn(self) -> None:
        """What there is to do besides listening."""
        self._look_for_losses()
        self._step(elect.Tick())
        self._follow(elect.Tick())
        self._work_off()
        self.on.deliver()  # what a thread that added a callback has left

    # -- questions ---------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether this node follows the others and takes part in elections."""
        return self.elections is not None

    def names(self) -> list[str]:
        """The nodes that are alive, itself included; empty before this node can know them."""
        if self._settled_at is None or self._clock() < self._settled_at:
            return []
        with self._lock:
            known = [member.node.hostname for member in self.membership.alive()]
        return [self._worker.plan.hostname, *known]

    def unsigned_names(self) -> list[str]:
        """Some of the nodes that are heard without a signature, where one is required."""
        with self._lock:
            known = [member.node.hostname for member in self.unsigned.alive()]
        return sorted(known)[:UNSIGNED_SHOWN_MAX]

    def view(self) -> dict[str, Any]:
        """Elections that are open, decided lately, or refused here; and refusals by reason."""
        with self._lock:
            view = self._machine().view()
            assert self.refusals is not None, "both are there, or none"
            view["declined"] = self.refusals.view(self._clock())
        for one in view["decided"].values():
            held = one["winner"] is not None and not elect.is_refusal(one["winner"])
            one["winner"] = elect.node_of(one["winner"]) if held else None
        view["refused"] = dict(self.counts)
        return view

    def _machine(self) -> elect.Elections:
        if self.elections is None:
            raise NotForElection(
                "this node takes no part in elections: gossip is off here (--without-gossip), or "
                "the transport has no broadcasts"
            )
        return self.elections

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
        kind = event["type"]
        if not kind.startswith("worker-"):
            return  # transports without patterns deliver everything
        app, own = self._worker.app, event["hostname"] == self._worker.plan.hostname
        credible = True
        if own:
            app.clock.forward()
            if "umbel_series" not in event:
                self._echo_at = self._clock()
        elif "clock" in event:
            # A clock that is too far ahead is not believed; that somebody is there is.
            credible = app.clock.adjust(event["clock"]) >= event["clock"]
            if not credible:
                self._refuse(CLOCK_JUMP, event, event["hostname"])
        else:
            app.clock.forward()
        if kind == "worker-elect" and credible:
            self._heard_elect(event)
        if not own and "umbel_series" not in event:  # else a pool process, which may outlive it
            self._sign_of_life(event)
            if kind == "worker-heartbeat" and "revoked" in event:
                self._compare(event)

    def _display(self, event: Event) -> None:
        """Note that somebody is there who has not shown that it has the key."""
        if event["type"].startswith("worker-"):
            self._refuse(UNSIGNED, event, event["hostname"])
            with self._lock:
                self.unsigned.step(_sign_in(event), self._clock())

    def _sign_of_life(self, event: Event) -> None:
        if event.get("sw_ident", OWN_IDENT) != OWN_IDENT and len(self._celery) < CELERY_MAX:
            self._celery.add(event["hostname"])
        sign = _sign_in(event)
        with self._lock:
            effects = self.membership.step(sign, self._clock())
            if effects:
                self.on.note(effects, event)
            else:
                member = self.membership.member(event["hostname"])
                if member is not None and members.is_of(sign, member.node):
                    self.on.tell(event)
        self._tell(effects)

    def _compare(self, event: Event) -> None:
        """The heartbeat of a node of our kind tells its clock, and what it knows."""
        hostname, shift_s = event["hostname"], event.get("clock_shift")
        if self.membership.heard_again(hostname):
            self._worker.wall.heard(hostname, event["timestamp"], shift_s, self._clock())
        self.mingling.compared(hostname, event["revoked"])

    def _heard_elect(self, event: Event) -> None:
        heard = elect.read_elect(event)
        if isinstance(heard, str):
            self._refuse(heard, event, event["hostname"])
            return
        if self.elections is not None and heard.id not in self.elections:
            try:
                if not self._worker.may("election"):
                    raise NotForElection("control_allow does not permit elections here")
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
                self._bound_intervals()
                effects = self.membership.step(members.Tick(), min(now, heard_until))
                self.on.note(effects)
                self.unsigned.step(members.Tick(), now)
            self._tell(effects)
            self._slow_down()
            self._agree_on_time()
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
            events.beat_slower(_crowd(self.membership.established_count))

    def _bound_intervals(self) -> None:
        """What others may call their interval: that of a node with settings not far from ours.

        All nodes count that are heard, as those of a big cluster beat slowly when we start.
        """
        own_s = self._worker.plan.heartbeat_interval_s * FREQ_TIMES_MAX
        self.membership.freq_max_s = max(
            members.FREQ_UNKNOWN_S, own_s * _crowd(len(self.membership))
        )

    def _agree_on_time(self) -> None:
        wall = self._worker.wall
        with self._lock:
            counted = self.membership.established()
        if wall.settle(counted):
            logger.warning(
                "revocations and pauses are judged by the time of most nodes, which differs by "
                "%.1f s from the clock of this host", wall.shift_s,
            )  # fmt: skip

    def _tell(self, effects: list[members.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, members.SelfDoubt):
                logger.warning("this node was stalled for %.1f s: nobody else is to blame",
                               effect.stalled_s)  # fmt: skip
                continue
            name = effect.node.hostname
            if isinstance(effect, members.Lost):
                logger.warning("%s was lost: silent for %.1f s", shown_name(name), effect.silent_s)
                self._gone(name)
            elif isinstance(effect, members.Left):
                logger.info("%s left", shown_name(name))
                self._gone(name)
            else:
                logger.info("%s joined", shown_name(name))
        if effects:
            self.on.deliver()

    def _gone(self, hostname: str) -> None:
        self._celery.discard(hostname)
        self._worker.wall.forget(hostname)
        self._step(elect.Gone(hostname))
        self._follow(elect.Gone(hostname))
        self.mingling.gone(hostname)

    # -- elections ---------------------------------------------------------------------

    def request(self, id_: Any, topic: Any, action: Any) -> None:
        """Somebody asks for an election: say at once that this node stands, or `NotForElection`."""
        machine, what = self._machine(), elect.Requested(id_, topic, action)
        try:
            self.carrier.check(id_, topic, action)
            refused = [one for one in self._step(what) if isinstance(one, elect.Refused)]
            if refused and refused[0].reason != elect.REPEATED:
                raise NotForElection(
                    f"this node cannot take on election {id_}: {refused[0].reason}"
                )
        except NotForElection as exc:
            if not elect.is_word(id_) or id_ not in machine:
                self._decline(what, exc)
            raise

    def deny(self, arguments: Any, reason: str) -> None:
        """Somebody asks for an election, which `control_allow` does not permit here."""
        what = elect.read_request(arguments)
        if self.elections is not None and not isinstance(what, str):
            self._decline(what, NotForElection(reason))

    def _decline(self, what: elect.Requested | elect.Heard, exc: NotForElection) -> None:
        """Take no part; a Celery worker that found itself the only candidate would end."""
        self.counts[NOT_FOR_ELECTION] += 1
        logger.debug("this node does not stand for election: %s", exc)
        if not elect.is_word(what.id):
            return  # nobody can wait for it
        if isinstance(what, elect.Heard):
            self._follow(what)
        else:
            self._give_reason(what.id, str(exc), what.action)
        self._spare_celery(what)

    def _spare_celery(self, what: elect.Requested | elect.Heard) -> None:
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
        fields = {**self._told(what), "cver": OWN_CVER, "stands": False}
        events.put("worker-elect", fields, clock, urgent=True)

    def _give_reason(self, id_: str, reason: str, action: Any, token: str = "") -> None:
        """Note why this node does not hold an election, for the case that nobody does."""
        rules = by_name(self._worker.app.conf.task_redact_names)
        shown = f"{self._worker.plan.hostname}: {rules.text(reason)[:REASON_CHARS_MAX]}"
        self._follow(refusals.Declined(id_, shown, _reply_to(action), token))

    def _follow(self, what: refusals.Input) -> None:
        """See what others do about an election that this node refuses."""
        if self.refusals is None:
            return
        with self._lock:
            effects = self.refusals.step(what, self._clock())
        for effect in effects:
            if isinstance(effect, refusals.Fail):
                self.carrier.fail(effect)
            else:
                self._enqueue(effect)

    def _step(self, what: elect.Input) -> list[elect.Effect]:
        if self.elections is None:
            return []
        with self._lock:
            effects = self.elections.step(what, self._clock())
        for effect in effects:
            self._carry_out(effect)
        return effects

    def _carry_out(self, effect: elect.Effect) -> None:
        events = self._worker.events
        if isinstance(effect, elect.PublishElect) and events is not None:
            self._stand(effect, events)
        elif isinstance(effect, elect.PublishAck) and events is not None:
            events.send("worker-elect-ack", id=effect.id)
        elif isinstance(effect, elect.Decided):
            self._decided(effect)
        elif isinstance(effect, elect.Claim):
            self._enqueue(effect)
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
        if elect.is_refusal(effect.winner):
            logger.warning("election %s: refused by %s before this node stood", effect.id, winner)
            return
        logger.info("election %s: %s was chosen", effect.id, winner)
        if events is not None:
            events.send("worker-elected", id=effect.id, winner=winner)

    def _told(self, what: elect.Requested | elect.Heard | elect.PublishElect) -> dict[str, Any]:
        """The fields of our `worker-elect`; the interval, as it may be the first word of ours."""
        events, plan = self._worker.events, self._worker.plan
        interval_s = events.beat_interval_s if events is not None else None
        return {**_fields(what), "freq": interval_s or plan.heartbeat_interval_s}

    def _enqueue(self, effect: elect.Claim | refusals.ClaimRefusal) -> None:
        if effect.id not in self._claiming:  # one that waits for its turn is asked for again
            self._claiming.add(effect.id)
            self._todo.append(effect)

    def _work_off(self) -> None:
        """Make the claims that are due, on our own thread: they wait for the broker."""
        until = self._clock() + WORK_S
        while self._todo and self._clock() < until and not self._inlet.stopping.is_set():
            effect = self._todo.popleft()
            self._claiming.discard(effect.id)
            if isinstance(effect, refusals.ClaimRefusal):
                self._follow(self.carrier.claim_refusal(effect))
                continue
            answer = self.carrier.claim(effect)
            self._step(answer)
            if isinstance(answer, elect.Claimed) and answer.winner is None and not answer.won:
                token = effect.token if answer.owns else ""
                self._give_reason(effect.id, answer.reason, effect.action, token)


def _crowd(nodes_count: int) -> float:
    """How many times as long as for a few nodes the interval is with this many others."""
    return max(1.0, (nodes_count + 1) / NODES_FULL)


def _sign_in(event: Event) -> members.Heard | members.Offline:
    """What an event of a worker tells about its being there."""
    kind, node = event["type"], (event["hostname"], event.get("pid"), event.get("inc"))
    if kind == "worker-offline":
        return members.Offline(*node)
    words: dict[str, members.Kind] = {"worker-online": "online", "worker-heartbeat": "heartbeat"}
    return members.Heard(*node, event.get("freq"), words.get(kind, "other"))


def _sender(sample: Any, message: Any) -> Any:
    """Who has sent something, as far as it or its headers tell."""
    for told in (sample, message.headers):
        if isinstance(told, dict) and isinstance(told.get("hostname"), str):
            return told["hostname"]
    return None


def _fields(what: elect.Requested | elect.Heard | elect.PublishElect) -> dict[str, Any]:
    return {"id": what.id, "topic": what.topic, "action": what.action}


def _reply_to(action: Any) -> str | None:
    """Where the result of an elected task goes, if it is a message."""
    options = action.get("options") if isinstance(action, dict) else None
    reply_to = options.get("reply_to") if isinstance(options, dict) else None
    return reply_to if isinstance(reply_to, str) else None
