"""Registers on RabbitMQ: a durable queue whose arguments say whose it is.

    queue umbel.election.<id>: x-dead-letter-routing-key=<token>, x-dead-letter-exchange="",
        x-expires=<a day>, x-queue-type=classic

Declaring a queue is the one thing RabbitMQ does for the first only: a declaration with the same
arguments is answered as if it had made the queue, one with others is refused, and the text of the
refusal (`refusals`) tells what is there. Nothing is dead-lettered; the arguments are just kept. (An
exclusive queue would be a lock, not a record: it frees itself with its connection.) An unused queue
expires; only its winner's claims count as use.

A text of an error is short. A token that is too long for it goes on in the name of the dead-letter
exchange, and one that is too long for both ends in a hash, which is what the losers get to read.
Who asks for the winner declares the queue with arguments that RabbitMQ would never make one with
(`x-max-length` below zero): where there is none yet, none is made.

The winner sends its parcel in a transaction together with a mark, an empty message in the register
itself: both arrive, or none, and the commit is answered when both are on disk. So a claim that is
repeated with the same token sees by the mark whether there is anything left to send. It must not
look while a connection that was given up may still be read by the broker, which does that late when
it is short of memory. Hence whoever sends has an exclusive queue (`umbel.sending.<id>`): while a
connection of before still has it, nothing is sent, and the claim says so (`Claim.sent`).

One gap is left: a winner that dies after its claim and before the commit has claimed for ever, and
not sent. Nobody else sends for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from amqp import exceptions as amqp_errors
from amqp.basic_message import Message as Content
from kombu import Connection
from kombu.exceptions import OperationalError

from umbel.broker.registers.claims import (
    PREFIX,
    TTL_S,
    Claim,
    hashed_name,
    milliseconds,
    own_connection,
    read,
    register_name,
    unanswered,
    written,
)
from umbel.broker.sessions.connections import hang_up
from umbel.broker.sessions.session import opened
from umbel.broker.tasks.batches import Parcel
from umbel.broker.tasks.refusals import Refusal, read_refusal, room_for_value

KEY: Final = "x-dead-letter-routing-key"
EXCHANGE: Final = "x-dead-letter-exchange"
EXPIRES: Final = "x-expires"
# Compared after the others, and never true of a queue.
NEVER: Final = {"x-max-length": -1}
# No token is written with these: what nobody has, and "it goes on".
NOBODY: Final = "?"
MORE: Final = "&"
SENDING: Final = "umbel.sending."
# Arguments that differ are told one at a time.
LOOKS_MAX: Final = 6
# For a token, in characters. For the first the id is left out of the name of the queue; less than
# the second is not tried: there the winner is not told.
ROOM_WANTED, ROOM_MIN = 48, 24
HASH_CHARS: Final = 16
# A connection that was cut is let go by the broker within milliseconds, if it reads at all.
PATIENCE_S: Final = 2.0
LOOK_S: Final = 0.05
# The other side of a connection that was not used for so long may be gone without a word.
IDLE_S: Final = 60.0
TRIES: Final = 2
# What py-amqp stumbles over when a connection is lost in the middle of something.
_LOST: Final = (AttributeError,)


class Unsent(Exception):
    """The register is ours, and the parcel is not known to be where it belongs."""


class NotARegister(Exception):
    """What is there can not be used as one."""


class AmqpRegister:
    """See `claims.Register`. One thread at a time asks; the others wait."""

    def __init__(self, connection: Connection) -> None:
        self._model = own_connection(connection)  # stays unopened
        self._vhost = connection.virtual_host or "/"
        self._busy = threading.Lock()
        self._closed = False
        self._connection: Connection | None = None
        self._channel: Any = None
        self._used_at = 0.0

    def claim(
        self, election_id: str, token: str, *, ttl_s: float = TTL_S, parcel: Parcel | None = None
    ) -> Claim:
        """See `claims.Register`."""
        name, ttl_ms = self._name(election_id), milliseconds(ttl_s)
        exchange, key = split(written(token), room_for_value(KEY, name, self._vhost))
        won = False

        def work(channel: Any) -> Claim:
            nonlocal won
            found = _claim(channel, name, _arguments(exchange, key, ttl_ms))
            if isinstance(found, Refusal):
                return Claim(False, _told(found) or _look(channel, name) or "", sent=False)
            won = True
            if parcel is not None and not found.message_count:
                self._send(channel, name, parcel)
            return Claim(True, token, sent=True)

        try:
            claim: Claim = self._ask(name, work)
        except (Unsent, OperationalError) as exc:
            if not won:
                raise
            return Claim(True, token, sent=False, reason=str(exc))
        return claim

    def winner(self, election_id: str) -> str | None:
        """See `claims.Register`; empty where names are too long for RabbitMQ to tell of it."""
        name = self._name(election_id)
        found: str | None = self._ask(name, lambda channel: _look(channel, name))
        return found

    def close(self) -> None:
        """See `claims.Register`; a claim that is under way lets the connection go when it ends."""
        self._closed = True
        if self._busy.acquire(blocking=False):
            try:
                self._hang_up()
            finally:
                self._busy.release()

    # -- asking ------------------------------------------------------------------------

    def _name(self, election_id: str) -> str:
        """Where the virtual host has a long name, that of the queue is kept short."""
        name = register_name(election_id)
        wide = room_for_value(KEY, name, self._vhost) >= ROOM_WANTED
        return name if wide else hashed_name(election_id)

    def _ask(self, name: str, work: Callable[[Any], Any]) -> Any:
        with self._busy:
            try:
                return self._try(name, work)
            finally:
                self._used_at = time.monotonic()
                if self._closed:
                    self._hang_up()

    def _try(self, name: str, work: Callable[[Any], Any]) -> Any:
        """Run what may be run again: once more when the connection was lost."""
        for left in reversed(range(TRIES)):
            try:
                return work(self._open())
            except (*self._model.channel_errors, NotARegister) as exc:
                self._hang_up()
                raise unanswered(self._model, name, exc) from exc
            except (*self._model.connection_errors, OSError, OperationalError, *_LOST) as exc:
                self._hang_up(lost=True)
                if not left:
                    raise unanswered(self._model, name, exc) from exc
        raise AssertionError("the last try returns or raises")

    def _open(self) -> Any:
        if self._channel is not None and time.monotonic() - self._used_at > IDLE_S:
            self._hang_up()
        if self._channel is None:
            self._connection = connection = opened(own_connection(self._model))
            product = str(connection.connection.server_properties.get("product", ""))
            if product != "RabbitMQ":
                raise NotARegister(f"elections need RabbitMQ, this broker is {product!r}")
            self._channel = connection.channel()
        return self._channel

    def _hang_up(self, *, lost: bool = False) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            hang_up(connection, lost=lost)

    # -- sending -----------------------------------------------------------------------

    def _send(self, channel: Any, name: str, parcel: Parcel) -> None:
        """Send the parcel, if no connection of before has sent it or still may."""
        sending = SENDING + name.removeprefix(PREFIX)
        _lock(channel, sending)
        reason = ""
        if not channel.queue_declare(name, passive=True).message_count:
            assert self._connection is not None
            reason = _commit(self._connection, name, parcel)
            if reason:
                channel.queue_purge(name)  # of the mark, if that is there
        channel.queue_delete(sending)
        if reason:
            raise Unsent(reason)


# -- the queue of a register -----------------------------------------------------------------


def split(kept: str, room: int) -> tuple[str, str]:
    """A token as the names of an exchange and a key, each of which `room` is enough for."""
    room = max(room, ROOM_MIN)
    if len(kept) <= room:
        return "", kept
    longest = 2 * room - len(MORE)
    if len(kept) > longest:
        digest = hashlib.sha256(kept.encode()).hexdigest()[:HASH_CHARS]
        kept = f"{kept[: longest - HASH_CHARS - 1]}~{digest}"
    return kept[room - len(MORE) :], kept[: room - len(MORE)] + MORE


def _arguments(exchange: str, key: str, ttl_ms: int) -> dict[str, Any]:
    return {EXCHANGE: exchange, KEY: key, EXPIRES: ttl_ms, "x-queue-type": "classic"}


def _claim(channel: Any, name: str, arguments: dict[str, Any]) -> Any:
    """What RabbitMQ says of the queue, or that it is another's."""
    for _ in range(LOOKS_MAX):
        found = _declare(channel, name, arguments)
        if not isinstance(found, Refusal):
            return found
        if found.argument in (KEY, EXCHANGE) and not found.is_absent:
            return found
        if found.argument != EXPIRES or found.current is None:
            break
        arguments[EXPIRES] = int(found.current)  # the first one has said how long it lives
    raise NotARegister(f"there is a queue {name} that is no register: see its {found.argument}")


def _look(channel: Any, name: str) -> str | None:
    """Whose the register is; None if there is none, an empty text if its token is not told."""
    arguments = {**_arguments("", NOBODY, milliseconds(TTL_S)), **NEVER}
    told: dict[str, str] = {}
    for _ in range(LOOKS_MAX):
        try:
            found = _declare(channel, name, arguments)
        except amqp_errors.PreconditionFailed as exc:
            if "invalid arg" not in exc.reply_text:
                raise
            return None
        if not isinstance(found, Refusal) or found.argument not in arguments:
            break
        if found.current is None or found.argument in NEVER:
            return ""
        told[found.argument] = found.current
        arguments[found.argument] = (
            int(found.current) if found.argument == EXPIRES else found.current
        )
        key = told.get(KEY)
        if key is not None and (not key.endswith(MORE) or EXCHANGE in told):
            return read(key.removesuffix(MORE) + told.get(EXCHANGE, ""))
    raise NotARegister(f"the queue {name} does not tell whose it is")


def _told(refusal: Refusal) -> str | None:
    """The winner, if the refusal of a claim says it all."""
    if refusal.argument != KEY or refusal.current is None or refusal.current.endswith(MORE):
        return None
    return read(refusal.current)


def _declare(channel: Any, name: str, arguments: dict[str, Any]) -> Any:
    try:
        return channel.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)
    except amqp_errors.PreconditionFailed as exc:
        # The broker has closed the channel; py-amqp has opened it again.
        refusal = read_refusal(exc.reply_text)
        if refusal is None:
            raise
        return refusal


# -- the parcel ------------------------------------------------------------------------------


def _lock(channel: Any, sending: str) -> None:
    """Be the only connection that sends for this register."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            channel.queue_declare(sending, exclusive=True)
        except amqp_errors.ResourceLocked:
            if time.monotonic() >= deadline:
                raise Unsent(
                    "the broker still has a connection on which it may have been sent: "
                    "claim again to see"
                ) from None
            time.sleep(LOOK_S)
        else:
            return


def _commit(connection: Connection, name: str, parcel: Parcel) -> str:
    """Publish parcel and mark together; why the parcel can not be there, or nothing."""
    returned: list[Exception] = []
    with contextlib.closing(connection.channel()) as channel:
        channel.tx_select()
        channel.events["basic_return"].add(lambda exc, *_: returned.append(exc))
        # Not the method that may wait for each one, as options of the transport say.
        channel._basic_publish(
            _content(channel, parcel), parcel.exchange, parcel.routing_key, mandatory=True
        )
        channel._basic_publish(Content(b"", delivery_mode=2), "", name)
        try:
            channel.tx_commit()
        except connection.channel_errors as exc:
            return str(exc)
    return str(returned[0]) if returned else ""


def _content(channel: Any, parcel: Parcel) -> Any:
    properties = dict(parcel.properties)
    if "expiration" in properties:
        properties["expiration"] = str(int(properties["expiration"]))
    return channel.prepare_message(
        parcel.body,
        priority=properties.pop("priority", None),
        content_type=parcel.content_type,
        content_encoding=parcel.content_encoding,
        headers=parcel.headers,
        properties=properties,
    )
