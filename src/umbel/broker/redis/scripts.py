"""What the server does in one step. Notes are written by joining text: nothing is decoded there.

A note is kombu's, `[envelope, exchange, routing_key]`, with the default exchange and the name of
the queue that the message lay in, so that whoever restores it puts it there and nowhere else.
"""

from __future__ import annotations

# KEYS: notes, times of notes, then the lists: all queues of the first priority, of the next, ...
# ARGV: number of queues, end of the notes of each queue; then now, beginning of the tags, number
#   of the first tag, count, queue to begin with, whether queues share; then acknowledged tags.
#   Now is the time by the client's clock, for servers whose rules refuse TIME to the client.
# Returns the queue to begin with next time, then pairs: number of the list, messages.
# What can not be an envelope is returned but not noted: other programs would stumble over it.
# With room left, all lists are read at the end: from then on the server tells of their changes.
POP = """
local queues = tonumber(ARGV[1])
local at = queues + 1
local now, prefix, number = redis.pcall('TIME'), ARGV[at + 2], tonumber(ARGV[at + 3])
now = now.err and ARGV[at + 1] or now[1] .. string.format('.%06d', now[2])
local left, begin, shared = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), ARGV[at + 6] == '1'
for i = at + 7, #ARGV, 1000 do
  local last = math.min(i + 999, #ARGV)
  redis.call('HDEL', KEYS[1], unpack(ARGV, i, last))
  redis.call('ZREM', KEYS[2], unpack(ARGV, i, last))
end
local reply = {begin}
local function note(fields, scores)
  redis.call('HSET', KEYS[1], unpack(fields))
  redis.call('ZADD', KEYS[2], unpack(scores))
end
local function take(list, queue, count)
  local items = redis.pcall('RPOP', KEYS[list], count)
  if not items then return 0 end
  if items.err then
    if string.find(items.err, 'WRONGTYPE', 1, true) then return 0 end
    redis.call('RPOP', KEYS[list], count)
  end
  local rest, fields, scores, size = ARGV[queue + 2], {}, {}, 0
  for i = 1, #items do
    local item, tag = items[i], prefix .. string.format('%012.0f', number)
    number = number + 1
    if string.byte(item, 1) == 123 and string.byte(item, -1) == 125 then
      fields[size + 1], fields[size + 2] = tag, '[' .. item .. rest
      scores[size + 1], scores[size + 2] = now, tag
      size = size + 2
      if size == 1000 then
        note(fields, scores)
        fields, scores, size = {}, {}, 0
      end
    end
  end
  if size > 0 then note(fields, scores) end
  left = left - #items
  reply[#reply + 1] = list - 3
  reply[#reply + 1] = items
  return #items
end
local function any(first)
  local found = 0
  for i = first, #KEYS, 1000 do
    found = found + redis.call('EXISTS', unpack(KEYS, i, math.min(i + 999, #KEYS)))
  end
  return found > 0
end
for first = 3, #KEYS, queues do
  if left == 0 or (first > 3 and not any(first)) then break end
  local share = left
  if shared then share = math.ceil(left / queues) end
  local more = {}
  for i = 0, queues - 1 do
    if left == 0 then break end
    local queue = (begin + i) % queues
    local count = math.min(share, left)
    if take(first + queue, queue, count) == count then more[#more + 1] = queue end
    if shared and left == 0 then reply[1] = (queue + 1) % queues end
  end
  for i = 1, #more do
    if left == 0 then break end
    take(first + more[i], more[i], left)
  end
end
if left > 0 then any(3) end
return reply
"""

# KEYS: notes, times of notes, lists.
# ARGV: latest time of a note that may go (empty: any), then for each message: tag, number of its
#   list, LPUSH (behind the others) or RPUSH (before them), envelope.
# Returns 1 for each that was given back here, 0 where its note was not there, or not old enough.
GIVE = """
local ceiling, given = tonumber(ARGV[1]), {}
for i = 2, #ARGV, 4 do
  local tag, gone = ARGV[i], 0
  local score = ceiling and tonumber(redis.call('ZSCORE', KEYS[2], tag))
  if not ceiling or (score and score <= ceiling) then
    gone = redis.call('HDEL', KEYS[1], tag)
    redis.call('ZREM', KEYS[2], tag)
    if gone == 1 then redis.call(ARGV[i + 2], KEYS[3 + tonumber(ARGV[i + 1])], ARGV[i + 3]) end
  end
  given[#given + 1] = gone
end
return given
"""
