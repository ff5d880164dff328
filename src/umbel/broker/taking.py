"""Taking messages from Redis lists without a moment in which nobody has them.

kombu waits with BRPOP and notes the message as unacknowledged when it has read it. A worker that
is killed in between loses the message: it is in no list any more and in no note yet. While there
are messages in the lists, a `Taker` takes them instead, with a script that pops and notes in one
step; the notes are kombu's, so that every peer restores them. kombu's BRPOP is left to wait when
all lists are empty: a message that comes to a waiting worker is without a note for the time of
one round trip.

A message that is too large to be looked at by the script, or that is none, is handed over
without a note, as BRPOP does.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import ResponseError

logger = logging.getLogger("umbel.broker")

_CHANNELS = frozenset({"Channel", "SentinelChannel"})
# So many at most before the caller's loop turns; the window is usually much smaller.
BATCH_MAX = 64
# Decoding stops the server for a moment: about 2 ms for a message of this size.
NOTED_BYTES_MAX = 2**20

# KEYS: notes, times of notes, lists. ARGV: now, bytes_max. Returns number of the list, message,
# tag; the tag is empty when there is no note.
SCRIPT = """
local function look(item)
  if #item > tonumber(ARGV[2]) then return end
  local ok, message = pcall(cjson.decode, item)
  if not ok or type(message) ~= 'table' or type(message.properties) ~= 'table' then return end
  local tag, info = message.properties.delivery_tag, message.properties.delivery_info
  if type(tag) ~= 'string' or type(info) ~= 'table' then return end
  if type(info.exchange) ~= 'string' or type(info.routing_key) ~= 'string' then return end
  return tag, cjson.encode(info.exchange), cjson.encode(info.routing_key)
end
for i = 3, #KEYS do
  local item = redis.call('RPOP', KEYS[i])
  if item then
    local tag, exchange, key = look(item)
    if not tag then return {i - 3, item, ''} end
    redis.call('ZADD', KEYS[2], ARGV[1], tag)
    redis.call('HSET', KEYS[1], tag, '[' .. item .. ',' .. exchange .. ',' .. key .. ']')
    return {i - 3, item, tag}
  end
end
return false
"""


def taker_for(channel: Any) -> Taker | None:
    """A taker where it can work: on a single Redis server, with acknowledgements."""
    kind = type(channel)
    known = kind.__module__ == "kombu.transport.redis" and kind.__name__ in _CHANNELS
    return Taker(channel) if known and channel.ack_emulation else None


class Taker:
    """Fills the prefetch window of one channel."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._noted: set[str] = set()
        self._refused = False
        self._append = channel.qos.append
        channel.qos.append = self._on_append

    def fill(self) -> int:
        """Deliver what is there until the window is full; how many that were.

        Raises what a damaged message raises, which is gone then, and connection errors.
        """
        channel, count = self._channel, 0
        # While a BRPOP is under way there was nothing to take.
        if self._refused or channel._in_poll:
            return 0
        while count < BATCH_MAX and channel.active_queues and channel.qos.can_consume():
            if not self._take_one():
                break
            count += 1
        return count

    def _take_one(self) -> bool:
        channel = self._channel
        queues = channel._queue_cycle.consume(len(channel.active_queues))
        lists = [(q, channel._q_for_pri(q, p)) for p in channel.priority_steps for q in queues]
        found = self._run([key for _, key in lists])
        if not found:
            return False
        number, item, tag = found
        queue, tag = lists[number][0], bytes_to_str(tag)
        channel._queue_cycle.rotate(queue)
        try:
            if tag:
                self._noted.add(tag)
            channel.connection._deliver(loads(bytes_to_str(item)), queue)
        except Exception:
            if tag in self._noted:  # it did not become a message: nobody would settle it
                channel.qos._remove_from_indices(tag).execute()
            raise
        finally:
            self._noted.discard(tag)
        return True

    def _run(self, lists: list[str]) -> Any:
        channel = self._channel
        names = [channel.unacked_key, channel.unacked_index_key, *lists]
        keys = [f"{channel.global_keyprefix}{name}" for name in names]
        try:
            with channel.conn_or_acquire() as client:
                return client.eval(SCRIPT, len(keys), *keys, time.time(), NOTED_BYTES_MAX)
        except ResponseError as exc:
            # A server without scripts, or without the right to run them.
            logger.warning("messages are taken without a script: %s", exc)
            self._refused = True
            return None

    def _on_append(self, message: Any, tag: Any) -> None:
        if tag in self._noted:
            self._noted.discard(tag)
            virtual.QoS.append(self._channel.qos, message, tag)
        else:
            self._append(message, tag)
