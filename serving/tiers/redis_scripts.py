"""The Lua scripts of the Redis tier: each operation is one atomic script, so that several replicas share one budget.

An arm has three Redis keys, which live and expire together:

* ``entries``, a HASH: entry key -> stored form; its length is what the entry is charged.
* ``order``, a ZSET: entry key -> sequence number of its last use. A counter, not a clock: exact LRU whatever the clocks do.
* ``state``, a HASH: ``budget``, ``bytes`` (charged now) and ``seq`` (the counter).

Every script first makes the keys touched since this client's last call the most recently used, in their order, and then acts: the
eviction that follows sees them. ``bytes <= budget`` holds after every script: a shrink in several steps lowers the budget with
the bytes. Redis must drop none of the three keys by itself (``maxmemory-policy noeviction``); should it, the others follow.

What other clients may have to know is published on ``channel`` within the script: sender (8 bytes), a letter, a payload.
``P``: key, context length (1 byte), context, vector. ``E``: keys, one after another. ``F``: nothing.
``O``, outside of scripts: nothing.
"""

from __future__ import annotations

# Common arguments: idle seconds, sender, channel, number of touches n, n keys; then the operation's own, from ARGV[a + 1].
_PRELUDE = """
local entries, order, state = KEYS[1], KEYS[2], KEYS[3]
local idle, sender, channel, touches = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local a = 4 + touches
local seq, bytes = unpack(redis.call('HMGET', state, 'seq', 'bytes'))
if not seq then redis.call('UNLINK', entries, order) end
seq, bytes = tonumber(seq or '0'), tonumber(bytes or '0')
for i = 5, a do
  seq = seq + 1
  redis.call('ZADD', order, 'XX', seq, ARGV[i])
end
local function save()
  redis.call('HSET', state, 'seq', seq, 'bytes', bytes)
  redis.call('EXPIRE', entries, idle)
  redis.call('EXPIRE', order, idle)
  redis.call('EXPIRE', state, idle)
end
local function use(key)
  seq = seq + 1
  redis.call('ZADD', order, seq, key)
end
local function evict(room, most)
  local gone = {}
  while bytes > room and #gone < most do
    local victim = redis.call('ZPOPMIN', order)[1]
    if not victim then
      redis.call('UNLINK', entries)
      bytes = 0
      break
    end
    bytes = bytes - redis.call('HSTRLEN', entries, victim)
    redis.call('HDEL', entries, victim)
    gone[#gone + 1] = victim
  end
  return gone
end
local function drop(key)
  local size = redis.call('HSTRLEN', entries, key)
  if size > 0 then
    bytes = bytes - size
    redis.call('HDEL', entries, key)
    redis.call('ZREM', order, key)
  end
  return size
end
local function tell_gone(gone)
  if #gone > 0 then redis.call('PUBLISH', channel, sender .. 'E' .. table.concat(gone)) end
end
"""

TOUCH = (
    _PRELUDE
    + """
save()
"""
)

# key -> stored form or nil
GET = (
    _PRELUDE
    + """
local stored = redis.call('HGET', entries, ARGV[a + 1])
if stored then use(ARGV[a + 1]) end
if stored or touches > 0 then save() end
return stored
"""
)

# key, stored form, the budget if Redis has none (it lost its data), announcement -> evicted keys
PUT = (
    _PRELUDE
    + """
local key, stored, announcement = ARGV[a + 1], ARGV[a + 2], ARGV[a + 4]
local budget = redis.call('HGET', state, 'budget')
if not budget then
  budget = ARGV[a + 3]
  redis.call('HSET', state, 'budget', budget)
end
budget = tonumber(budget)
local old = drop(key)
local gone = {}
if #stored <= budget then
  gone = evict(budget - #stored, math.huge)
  redis.call('HSET', entries, key, stored)
  use(key)
  bytes = bytes + #stored
  if old > 0 or #announcement > 1 then redis.call('PUBLISH', channel, sender .. 'P' .. key .. announcement) end
elseif old > 0 then
  tell_gone({key})
end
tell_gone(gone)
save()
return gone
"""
)

# keys... -> how many of them were there
DELETE = (
    _PRELUDE
    + """
local gone = {}
for i = a + 1, #ARGV do
  if drop(ARGV[i]) > 0 then gone[#gone + 1] = ARGV[i] end
end
tell_gone(gone)
save()
return #gone
"""
)

# key, time -> whether it was there. The stored form keeps its length, so its charge stays.
RENEW = (
    _PRELUDE
    + """
local key = ARGV[a + 1]
local stored = redis.call('HGET', entries, key)
if stored and #stored >= 32 and string.byte(stored) == 2 then
  local renewed = tonumber(ARGV[a + 2]) - struct.unpack('<d', stored, 13)
  if renewed > struct.unpack('<f', stored, 29) then
    redis.call('HSET', entries, key, string.sub(stored, 1, 28) .. struct.pack('<f', renewed) .. string.sub(stored, 33))
  end
end
if stored or touches > 0 then save() end
return stored and 1 or 0
"""
)

# budget, most evictions of this step -> whether more are due, evicted keys
RESIZE = (
    _PRELUDE
    + """
local budget = tonumber(ARGV[a + 1])
local gone = evict(budget, tonumber(ARGV[a + 2]))
redis.call('HSET', state, 'budget', math.max(budget, bytes))
tell_gone(gone)
save()
return {bytes > budget and 1 or 0, gone}
"""
)

# -> number of entries
FLUSH = (
    _PRELUDE
    + """
local count = redis.call('HLEN', entries)
redis.call('UNLINK', entries, order)
bytes = 0
redis.call('PUBLISH', channel, sender .. 'F')
save()
return count
"""
)

# keys... -> header, context and metadata of each stored form, its length, ...; nil and 0 where there is none. No common
# arguments.
HEADS = """
local result = {}
for i, key in ipairs(ARGV) do
  local stored = redis.call('HGET', KEYS[1], key)
  if stored and #stored >= 32 then
    local context, low, high = string.byte(stored, 2, 4)
    local meta_low, meta_high = string.byte(stored, 21, 22)
    local meta = 32 + context + low + 256 * high
    result[2 * i - 1] = string.sub(stored, 1, 32 + context) .. string.sub(stored, meta + 1, meta + meta_low + 256 * meta_high)
    result[2 * i] = #stored
  else
    result[2 * i - 1], result[2 * i] = false, 0
  end
end
return result
"""

# first rank, last rank by recency -> key, header, context and vector of its stored form, ... KEYS: entries, order. No common
# arguments.
RECENT = """
local result = {}
for _, key in ipairs(redis.call('ZREVRANGE', KEYS[2], ARGV[1], ARGV[2])) do
  local stored = redis.call('HGET', KEYS[1], key)
  if stored then
    local context, low, high = string.byte(stored, 2, 4)
    result[#result + 1] = key
    result[#result + 1] = #stored < 32 and stored or string.sub(stored, 1, 32 + context + low + 256 * high)
  end
end
return result
"""
