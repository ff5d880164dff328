"""Looking at a broker, a result backend and a cluster, for `umbel doctor`.

Every look has a bound: it is taken in a thread that is left alone when it takes too long
(`within`), and each opens a connection of its own, so that one that hangs holds up no other. What
a broker answers is gathered here and judged in `findings`. Nothing is changed: exchanges are asked
for passively, and declared only where they are there, which makes the broker compare them.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from umbel.broker.sessions.connections import driver, hang_up, is_embedded
from umbel.cli.cluster_findings import Census, QueueFacts
from umbel.cli.plain import number, plain
from umbel.cli.rollcall import RollCall
from umbel.cli.status import listen
from umbel.wire.events import Event

if TYPE_CHECKING:
    from kombu import Connection, Exchange

    from umbel.app.umbel import Umbel

T = TypeVar("T")

LOOK_S = 6.0
EMBEDDED_S = 40.0  # it may have to be started
PING_S = 1.5
ANSWER_S = 2.0
BLOCKED_S = 0.3
NODES_MAX = 5_000


def within(timeout_s: float, look: Callable[[], T]) -> T:
    """What `look` returns or raises; `TimeoutError` when that takes too long."""
    outcome: list[tuple[bool, Any]] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((True, look()))
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            outcome.append((False, exc))
        done.set()

    threading.Thread(target=run, name="umbel-look", daemon=True).start()
    if not done.wait(timeout_s):
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    fine, value = outcome[0]
    if not fine:
        raise value
    found: T = value
    return found


def patience_s(app: Umbel, url: str) -> float:
    """How long one look may take."""
    if is_embedded(url):
        return EMBEDDED_S
    return max(LOOK_S, (app.conf.broker_connection_timeout or 0.0) + 2.0)


def reason(exc: BaseException) -> str:
    """What went wrong, as it may be shown."""
    text, kind = " ".join(str(exc).split()), type(exc).__name__
    if isinstance(exc, TimeoutError) and text:
        return plain(text)
    return plain(f"{kind}: {text}" if text else kind)


@contextlib.contextmanager
def opened(app: Umbel, url: str) -> Iterator[Connection]:
    """An open connection to one address."""
    connection = app.connection(url, heartbeat=0)
    try:
        connection.connect()
        assert connection.default_channel  # on Redis this is what connects
        yield connection
    finally:
        hang_up(connection)


def reach(app: Umbel, url: str) -> tuple[str, float]:
    """The kind of a broker, and how long it took to reach it."""
    began = time.monotonic()
    with opened(app, url) as connection:
        return driver(connection), time.monotonic() - began


# -- Redis -------------------------------------------------------------------------------------


def redis_facts(app: Umbel, url: str) -> dict[str, Any]:
    """See `findings.judge_redis`."""
    with opened(app, url) as connection:
        channel = connection.default_channel
        client = channel.client
        info: Any = None
        with contextlib.suppress(*_refusals()):
            info = dict(client.info())
        channels = [_topic(channel, name, key) for name, key in _heard(app)]
        return {
            "info": info,
            "script": _refused(lambda: client.eval("return 1", 0)),
            "tracking": _refused(lambda: _track(channel)),
            "time": _refused(client.time),
            "channels": channels,
            "pubsub": _refused(lambda: _subscribe(client, channels)),
        }


def _refusals() -> tuple[type[Exception], ...]:
    from redis.exceptions import ResponseError

    return (ResponseError,)


def _refused(work: Callable[[], Any]) -> str:
    """What the server says against it; connection errors are raised."""
    try:
        work()
    except _refusals() as exc:
        return reason(exc)
    return ""


def _track(channel: Any) -> None:
    pool = channel._get_pool()
    pool.connection_kwargs["protocol"] = 3
    try:
        established = pool.get_connection()
        established.send_command("CLIENT", "TRACKING", "ON", "NOLOOP")
        established.read_response()
    finally:
        pool.disconnect()


def _heard(app: Umbel) -> list[tuple[str, str]]:
    conf = app.conf
    return [(f"{conf.control_exchange}.pidbox", ""), (conf.event_exchange, "#")]


def _topic(channel: Any, exchange: str, routing_key: str) -> str:
    """The channel on which a fanout exchange is heard."""
    topic = str(channel._get_publish_topic(exchange, routing_key))
    return topic.replace("#", "*")


def _subscribe(client: Any, channels: Sequence[str]) -> None:
    with contextlib.closing(client.pubsub()) as subscription:
        subscription.psubscribe(*channels)
        for _ in channels:
            if subscription.parse_response(block=False, timeout=ANSWER_S) is None:
                raise TimeoutError(f"no subscription within {ANSWER_S:g} s")


# -- AMQP --------------------------------------------------------------------------------------


def amqp_facts(app: Umbel, url: str) -> tuple[dict[str, Any], str | None]:
    """What the broker says about itself, and why it takes no messages, if so."""
    with opened(app, url) as connection:
        established = connection.connection
        blocked: list[str] = []
        established.on_blocked = lambda why: blocked.append(str(why))
        # One learns of it with the first message; this one is for nobody.
        connection.Producer().publish(b"", exchange="", routing_key=f"umbel.{uuid.uuid4()}")
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=BLOCKED_S)
        found = {str(name): value for name, value in dict(established.server_properties).items()}
        return found, (blocked[0] or "no reason given") if blocked else None


def exchanges_of(app: Umbel, connection: Connection) -> list[Exchange]:
    """The exchanges that a cluster needs, as they are to be declared."""
    from umbel.app.control.mailbox import mailboxes_for
    from umbel.app.events.publisher import event_exchange

    mailboxes = mailboxes_for(app)
    events = event_exchange(app.conf.event_exchange, connection)
    return [mailboxes.exchange, mailboxes.reply_exchange, events]


def exchange_facts(app: Umbel, url: str) -> list[tuple[str, str, int | None]]:
    """Name, what the broker says against it, and its code for that."""
    with opened(app, url) as connection:
        return [
            (exchange.name, *_compared(connection, exchange))
            for exchange in exchanges_of(app, connection)
        ]


def _compared(connection: Connection, exchange: Exchange) -> tuple[str, int | None]:
    for passive in (True, False):
        # A refusal closes the channel: each question has its own.
        channel = connection.channel()
        try:
            exchange(channel).declare(passive=passive)
        except connection.channel_errors as exc:
            return str(getattr(exc, "message", None) or exc), _code(exc)
        finally:
            with contextlib.suppress(Exception):
                channel.close()
    return "", None


def _code(exc: BaseException) -> int | None:
    code = getattr(exc, "code", None)
    return code if isinstance(code, int) else None


# -- queues ------------------------------------------------------------------------------------


def queue_facts(app: Umbel, url: str, names: Sequence[str]) -> dict[str, QueueFacts]:
    """What the broker knows of these queues."""
    from umbel.broker.tasks.lengths import lengths_of

    with opened(app, url) as connection:
        if driver(connection) == "amqp":
            return {name: _declared(connection, name) for name in names}
        queues = [app.queues.get(name) or app.queues.make(name) for name in names]
        lengths = lengths_of(connection, queues)
    return {name: QueueFacts(waiting=lengths.get(name)) for name in names}


def _declared(connection: Connection, name: str) -> QueueFacts:
    channel = connection.channel()
    try:
        found = channel.queue_declare(name, passive=True)
        return QueueFacts(True, int(found.message_count), int(found.consumer_count))
    except connection.channel_errors as exc:
        # 405: it is there and belongs to one connection.
        return QueueFacts(exists=False if _code(exc) == 404 else None)
    finally:
        with contextlib.suppress(Exception):
            channel.close()


# -- results -----------------------------------------------------------------------------------


def backend_took_s(app: Umbel) -> float | None:
    """How long the result backend took to answer; None where there is nothing to ask."""
    from umbel.app.results.redis import RedisBackend
    from umbel.app.results.redis_client import make_client

    backend = app.backend
    if not isinstance(backend, RedisBackend):
        return None
    client = make_client(app, backend.url)
    began = time.monotonic()
    try:
        client.ping()
        return time.monotonic() - began
    finally:
        client.close()
        client.connection_pool.disconnect()


# -- the cluster -------------------------------------------------------------------------------


class Watch(RollCall):
    """A roll call that also notes clocks and lives."""

    def __init__(self, began_s: float) -> None:
        super().__init__(began_s)
        self.skews_s: dict[str, float] = {}
        self._identities: dict[str, list[Any]] = {}

    def event(self, event: Event, now_s: float) -> None:
        """Take note of one well-formed event."""
        super().event(event, now_s)
        if not event["type"].startswith("worker-") or len(self.skews_s) >= NODES_MAX:
            return
        hostname = event["hostname"]
        sent, received = number(event.get("timestamp")), number(event.get("local_received"))
        if sent is not None and received is not None:
            # What was held up on its way looks older than it is: the least counts.
            skew_s, before_s = sent - received, self.skews_s.get(hostname)
            if before_s is None or abs(skew_s) < abs(before_s):
                self.skews_s[hostname] = skew_s
        seen = self._identities.setdefault(hostname, [])
        identity = (event.get("pid"), event.get("inc"))
        if len(seen) < 100 and (not seen or seen[-1] != identity):
            seen.append(identity)

    @property
    def lives(self) -> dict[str, int]:
        """How many lives a name has at a time: one that comes back was never over."""
        return {
            name: len(set(seen)) if len(seen) > len(set(seen)) else 1
            for name, seen in self._identities.items()
        }


def census(app: Umbel, listen_s: float, *, hear: bool = True) -> Census:
    """Ask everybody, and listen meanwhile if there is anything to `hear`."""
    from umbel.cli.feed import Feed

    found = Census()
    ping_s = min(PING_S, listen_s)
    if not hear:
        _ping(app, found, ping_s)
        return found
    asking = threading.Thread(
        target=_ping, args=(app, found, ping_s), name="umbel-ping", daemon=True
    )
    with Feed(app) as feed:
        asking.start()
        began_s = time.monotonic()
        watch = Watch(began_s)
        listen(feed, watch, began_s + listen_s, time.monotonic)
        asking.join(ping_s + ANSWER_S)
        now_s = time.monotonic()
        found.rows = watch.rows(now_s, set(found.answers))
    found.waited_s = round(now_s - began_s, 1)
    found.skews_s, found.lives = watch.skews_s, watch.lives
    return found


def _ping(app: Umbel, found: Census, timeout_s: float) -> None:
    began = 0.0

    def note(reply: Mapping[str, Any]) -> None:
        for node, answer in reply.items():
            if node in found.answers:
                found.twice.add(node)
            found.answers[node] = answer
            found.took_s.setdefault(node, time.monotonic() - began)

    # That nobody can be asked was found out before, by looking at the broker.
    with contextlib.suppress(Exception):
        # For nobody: what it takes to open connections is not the nodes' time.
        app.control.broadcast("ping", destination=[str(uuid.uuid4())], reply=True, timeout=0.01)
        began = time.monotonic()
        app.control.broadcast("ping", reply=True, timeout=timeout_s, callback=note)


def answers(app: Umbel, method: str, nodes: Sequence[str]) -> dict[str, Any]:
    """What these nodes answer; ends when all have."""
    replies = app.control.broadcast(method, destination=list(nodes), reply=True, timeout=ANSWER_S)
    return {node: answer for reply in replies or () for node, answer in reply.items()}
