"""What Redis does for us in one step: Lua sources.

`STORE`: write a document and tell its channel, unless a SUCCESS is stored already.
Documents begin with their status, so the usual case is a comparison of a few bytes; a stored
value in another form (compressed, another serializer) is given back for the caller to judge.

`PART`: record one part of a chord and, if all are there, try to claim the right to send the
body. A part counts once however often it runs. The claim expires, so that a claimant that
dies can be replaced; the same token claims again, so that a lost reply does no harm.

`RENEW`: extend a claim before sending; `FINISH`: remove the chord and leave the mark `done`,
which stops late duplicates. Both act only while nobody else holds the claim.
"""

from __future__ import annotations

# KEYS: document. ARGV: payload, seconds to live (0: for ever), force (1 or 0).
# Returns 1 written, 0 kept what is there, or the stored value when its form is unknown.
STORE = """
local stored = ARGV[3] == '0' and redis.call('GET', KEYS[1])
if stored then
    local status = string.match(stored, '^{"status":%s*"([^"\\\\]*)"')
    if not status and string.sub(stored, 1, 1) == '{' then
        local ok, meta = pcall(cjson.decode, stored)
        status = ok and type(meta) == 'table' and meta['status']
    end
    if status == 'SUCCESS' then return 0 end
    if not status then return stored end
end
local ttl = tonumber(ARGV[2])
if ttl > 0 then
    redis.call('SETEX', KEYS[1], ttl, ARGV[1])
else
    redis.call('SET', KEYS[1], ARGV[1])
end
redis.call('PUBLISH', KEYS[1], ARGV[1])
return 1
"""

# KEYS: .j .t .s .d .c and the group's own key.
# ARGV: "<id>:<index>", part, index, ordered (1 or 0), seconds to live, claim seconds, token.
# Returns {verdict, parts, structure, ms left of another's claim}; verdict: done, waiting,
# held (complete, but somebody else has the claim) or claimed.
PART = """
local j, t, s, d, c, group = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local ordered, ttl = ARGV[4] == '1', tonumber(ARGV[5])
if redis.call('GET', c) == 'done' then return {'done'} end
if redis.call('SISMEMBER', d, ARGV[1]) == 0 then
    if ordered then
        redis.call('ZADD', j, ARGV[3], ARGV[2])
    else
        redis.call('RPUSH', j, ARGV[2])
    end
    redis.call('SADD', d, ARGV[1])
end
if ttl > 0 then
    for _, key in ipairs({j, t, s, d}) do redis.call('EXPIRE', key, ttl) end
end
local count = ordered and redis.call('ZCARD', j) or redis.call('LLEN', j)
local size = redis.call('GET', s)
if not size or count < tonumber(size) + tonumber(redis.call('GET', t) or 0) then
    return {'waiting'}
end
if not redis.call('SET', c, ARGV[7], 'NX', 'EX', ARGV[6]) and redis.call('GET', c) ~= ARGV[7] then
    return {'held', {}, false, redis.call('PTTL', c)}
end
local parts = ordered and redis.call('ZRANGE', j, 0, -1) or redis.call('LRANGE', j, 0, -1)
return {'claimed', parts, redis.call('GET', group), 0}
"""

# KEYS: .c .s. ARGV: token, seconds.
RENEW = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] or (not holder and redis.call('EXISTS', KEYS[2]) == 1) then
    redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
    return 1
end
return 0
"""

# KEYS: .c .j .t .s .d. ARGV: token, seconds that the mark stays.
FINISH = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
redis.call('SET', KEYS[1], 'done', 'EX', ARGV[2])
return 1
"""
