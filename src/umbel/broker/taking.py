"""Taking messages from Redis lists without a moment in which nobody has them.

kombu waits with BRPOP and notes a message as unacknowledged when it has read it. A worker that is
killed in between, or whose connection breaks, loses the message: it is in no list any more and in
no note yet. A `Taker` pops and notes in one script; the notes are kombu's, so that every peer
restores them. It never waits with a pop:

- The script that finds all lists empty reads their lengths, which makes the server tell this
  connection when one of them changes (client-side caching, Redis 6 and newer). Finding nothing and
  asking to be told are one step, so no wake-up is lost; the loop looks once a second all the same.
- The script notes what it took under the name of the taker, with the number of the request. If
  its answer is lost with the connection, `recover` gives exactly that back to the queues; if the
  request itself was lost, the note is of an earlier one, whose messages have arrived.

Where the server has no client-side caching (or no scripts), kombu's BRPOP stays in charge of
waiting, and `watches` is false. A message that is too large to be looked at by the script, or that
is none, is handed over without a note.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
import uuid
from typing import Any

import redis
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import NoScriptError, RedisError, ResponseError

logger = logging.getLogger("umbel.broker")

# So many at most before the caller's loop turns; the window is usually much smaller.
BATCH_MAX = 64
# Decoding stops the server for a moment: about 2 ms for a message of this size.
NOTED_BYTES_MAX = 2**20
# How long the server keeps what a taker took last; only needed while the taker reconnects.
RECORD_S = 86_400
# Silence for so long on the taker's own connection means that it is gone.
ANSWER_TIMEOUT_S = 10.0
LOOK_AGAIN_S = 1.0

# KEYS: notes, times of notes, record, lists.
# ARGV: now, bytes_max, count, seconds of the record, number of the request.
# Returns, for each message taken: number of the list, message, tag (empty: there is no note).
TAKE = """
local function look(item)
  if #item > tonumber(ARGV[2]) then return end
  local ok, message = pcall(cjson.decode, item)
  if not ok or type(message) ~= 'table' or type(message.properties) ~= 'table' then return end
  local tag, info = message.properties.delivery_tag, message.properties.delivery_info
  if type(tag) ~= 'string' or type(info) ~= 'table' then return end
  if type(info.exchange) ~= 'string' or type(info.routing_key) ~= 'string' then return end
  return tag, cjson.encode(info.exchange), cjson.encode(info.routing_key)
end
local taken, left = {}, tonumber(ARGV[3])
redis.call('DEL', KEYS[3])
for i = 4, #KEYS do
  while left > 0 do
    local item = redis.call('RPOP', KEYS[i])
    if not item then break end
    left = left - 1
    local tag, exchange, key = look(item)
    if tag then
      if redis.call('EXISTS', KEYS[3]) == 0 then redis.call('RPUSH', KEYS[3], ARGV[5]) end
      redis.call('ZADD', KEYS[2], ARGV[1], tag)
      redis.call('HSET', KEYS[1], tag, '[' .. item .. ',' .. exchange .. ',' .. key .. ']')
      redis.call('RPUSH', KEYS[3], tag, KEYS[i], #item)
    end
    taken[#taken + 1] = {i - 4, item, tag or ''}
  end
end
if #taken > 0 then
  redis.call('EXPIRE', KEYS[3], ARGV[4])
elseif left > 0 then
  for i = 4, #KEYS do redis.call('LLEN', KEYS[i]) end
end
return taken
"""

# KEYS: notes, times of notes, record. ARGV: number of the request whose answer is missing.
# Gives back what was taken and never arrived, newest first.
RECOVER = """
local record, count = redis.call('LRANGE', KEYS[3], 0, -1), 0
redis.call('DEL', KEYS[3])
if record[1] ~= ARGV[1] then return 0 end
for i = #record - 2, 2, -3 do
  local tag, list, size = record[i], record[i + 1], tonumber(record[i + 2])
  local note = redis.call('HGET', KEYS[1], tag)
  if note and redis.call('HDEL', KEYS[1], tag) == 1 then
    redis.call('ZREM', KEYS[2], tag)
    redis.call('RPUSH', list, string.sub(note, 2, size + 1))
    count = count + 1
  end
end
return count
"""


class Identity:
    """Who takes: outlives connections, so that a lost answer can be asked for."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.request_number = 0
        self.waiting_for_answer = False


def taker_for(channel: Any, identity: Identity) -> Taker | None:
    """A taker where it can work: on a single Redis server, with acknowledgements."""
    kind = type(channel)
    known = kind.__module__ == "kombu.transport.redis" and kind.__name__ == "Channel"
    return Taker(channel, identity) if known and channel.ack_emulation else None


class Taker:
    """Fills the prefetch window of one channel; raises connection errors of redis-py."""

    def __init__(self, channel: Any, identity: Identity) -> None:
        self._channel = channel
        self._identity = identity
        self._noted: set[str] = set()
        self._scripts: dict[str, str] = {}
        self._quiet_until = 0.0
        self._refused = False
        self.last_answer = time.monotonic()
        self._append = channel.qos.append
        channel.qos.append = self._on_append
        self._pool, self._connection, self.watches = self._connect()
        if self.watches:
            channel._brpop_start = _no_brpop
        if identity.waiting_for_answer:
            self._recover()

    def _connect(self) -> tuple[Any, Any, bool]:
        """A connection of our own that is told of changes, or a plain one."""
        parameters = self._channel._connparams()
        if parameters.get("socket_timeout") is None:
            parameters["socket_timeout"] = ANSWER_TIMEOUT_S
        for protocol in (3, 2):
            pool = redis.ConnectionPool(**{**parameters, "protocol": protocol})
            try:
                connection: Any = pool.get_connection()
                if protocol == 3:
                    # Not of our own pops.
                    connection.send_command("CLIENT", "TRACKING", "ON", "NOLOOP")
                    connection.read_response()
                return pool, connection, protocol == 3
            except ResponseError as exc:
                pool.disconnect()
                logger.warning("the server does not tell of changes: %s", exc)
        raise AssertionError("a plain connection either works or raises a connection error")

    def fileno(self) -> int:
        """Readable when something has changed."""
        return int(self._connection._sock.fileno())

    def on_readable(self) -> None:
        """Something has changed, or the connection has ended."""
        connection = self._connection
        while True:
            connection.read_response(push_request=True)
            if not connection.can_read(timeout=0):
                break
        self._quiet_until = 0.0

    def wait(self, timeout_s: float) -> None:
        """Wait for a change, for loops that can only block."""
        if select.select([self._connection._sock], [], [], timeout_s)[0]:
            self.on_readable()

    def fill(self) -> int:
        """Deliver what is there until the window is full; how many that were.

        A damaged message is gone, and what it raises is raised when the rest is delivered.
        """
        channel = self._channel
        if not channel.active_queues or not channel.qos.can_consume():
            return 0
        if self._refused:
            return 0
        if not self.watches and channel._in_poll:
            return 0  # while a BRPOP is under way there was nothing to take
        now = time.monotonic()
        if self.watches and now < self._quiet_until:
            return 0
        free = channel.qos.can_consume_max_estimate()
        count = BATCH_MAX if free is None else min(free, BATCH_MAX)
        try:
            taken, lists = self._take(count)
            # The word of a change may have been read together with the answer, and then makes
            # nothing readable any more.
            while self.watches and not taken and self._connection.can_read(timeout=0):
                self.on_readable()
                taken, lists = self._take(count)
        except ResponseError as exc:
            self._leave_to_kombu(exc)
            return 0
        self._quiet_until = 0.0 if taken else now + LOOK_AGAIN_S
        self._deliver(taken, lists)
        return len(taken)

    def _leave_to_kombu(self, exc: ResponseError) -> None:
        """A server without scripts, or without the right to run them: wait with BRPOP."""
        logger.warning("messages are taken without a script: %s", exc)
        self._refused, self.watches = True, False
        self._identity.waiting_for_answer = False
        vars(self._channel).pop("_brpop_start", None)

    def run(self, source: str, lists: list[str], arguments: list[Any]) -> Any:
        """Run another script, with the same keys and these lists; the server may refuse it."""
        if self._refused:
            raise ResponseError("the server runs no scripts for us")
        return self._run(source, self._keys(lists), arguments)

    def look_again(self) -> None:
        """Something was put into a list on this connection, which is not told of it."""
        self._quiet_until = 0.0

    def close(self) -> None:
        """Let the connection go."""
        with contextlib.suppress(Exception):
            self._pool.disconnect()

    def _take(self, count: int) -> tuple[list[Any], list[tuple[str, str]]]:
        channel = self._channel
        queues = channel._queue_cycle.consume(len(channel.active_queues))
        lists = [(q, channel._q_for_pri(q, p)) for p in channel.priority_steps for q in queues]
        keys = self._keys([key for _, key in lists])
        number = self._identity.request_number = self._identity.request_number + 1
        self._identity.waiting_for_answer = True
        taken = self._run(TAKE, keys, [time.time(), NOTED_BYTES_MAX, count, RECORD_S, number])
        self._identity.waiting_for_answer = False
        if taken:
            channel._queue_cycle.rotate(lists[taken[0][0]][0])
        return taken, lists

    def _deliver(self, taken: list[Any], lists: list[tuple[str, str]]) -> None:
        channel, failure = self._channel, None
        for number, item, raw_tag in taken:
            tag = bytes_to_str(raw_tag)
            if tag:
                self._noted.add(tag)
            try:
                channel.connection._deliver(loads(bytes_to_str(item)), lists[number][0])
            except RedisError:
                raise
            except Exception as exc:  # noqa: BLE001 - raised below, after the others
                failure = exc
                if tag in self._noted:  # it did not become a message: nobody would settle it
                    channel.qos._remove_from_indices(tag).execute()
            finally:
                self._noted.discard(tag)
        if failure is not None:
            raise failure

    def _recover(self) -> None:
        count = self._run(RECOVER, self._keys([]), [self._identity.request_number])
        self._identity.waiting_for_answer = False
        if count:
            logger.warning("%d messages whose delivery was cut went back to their queues", count)

    def _keys(self, lists: list[str]) -> list[str]:
        channel = self._channel
        record = f"umbel.taking.{self._identity.name}"
        names = [channel.unacked_key, channel.unacked_index_key, record, *lists]
        return [f"{channel.global_keyprefix}{name}" for name in names]

    def _run(self, source: str, keys: list[str], arguments: list[Any]) -> Any:
        connection = self._connection
        digest = self._scripts.get(source)
        for _ in range(2):
            if digest is None:
                connection.send_command("SCRIPT", "LOAD", source)
                digest = self._scripts[source] = bytes_to_str(connection.read_response())
            connection.send_command("EVALSHA", digest, len(keys), *keys, *arguments)
            try:
                answer = connection.read_response()
            except NoScriptError:
                digest = None
                continue
            self.last_answer = time.monotonic()
            return answer
        raise ResponseError("the server forgets scripts as soon as they are loaded")

    def _on_append(self, message: Any, tag: Any) -> None:
        if tag in self._noted:
            self._noted.discard(tag)
            virtual.QoS.append(self._channel.qos, message, tag)
        else:
            self._append(message, tag)


def _no_brpop(timeout: float | None = None) -> None:
    """In the place of kombu's wait."""
