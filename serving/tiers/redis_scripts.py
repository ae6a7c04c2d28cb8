"""The Lua scripts of the Redis tier: each operation is one atomic script, so that several replicas share one budget.

An arm has three Redis keys, which live and expire together:

* ``entries``, a HASH: entry key -> stored form; its length is what the entry is charged.
* ``order``, a ZSET: entry key -> sequence number of its last use. A counter, not a clock: exact LRU whatever the clocks do.
* ``state``, a HASH: ``budget``, ``bytes`` (charged now), ``seq`` (the counter), ``removals``: the number of the last removal, and
  the record of flushes: ``floor``, ``flushed``, ``flushes``.

Every script first makes the keys touched since this client's last call the most recently used, in their order, and then acts: the
eviction that follows sees them. ``bytes <= budget`` holds after every script: a shrink in several steps lowers the budget with
the bytes. Redis must drop none of the three keys by itself (``maxmemory-policy noeviction``); should it, the others follow.

What other clients may have to know is published on ``channel`` within the script: sender (8 bytes), a letter, a number (8 bytes),
a payload. ``P``: key, when it was written (8 bytes), context length (1 byte), context, vector. ``E``: keys, one after another.
``F``: nothing. ``O``: neither number nor payload.

All that takes an entry away, or replaces it, is a removal. Those of an arm are numbered one after another, so that whoever kept
copies knows by one number whether any was missed. The first number is a time, microseconds: one that Redis gave before it lost
its data does not come again. The number of a message that removes nothing is 0. Numbers are float64, little-endian.

A flush refuses what was asked for before it and comes after it: a put says which removal its client knew of before it asked
(``since``). ``flushes`` has, for each of the last :data:`MOST_FLUSHES` flushes by what entries are, its number (8 bytes), the
number of its labels (1 byte) and the labels (:mod:`serving.tiers.labels`); ``flushed`` is the last one's number. What is older
than ``floor`` is refused whatever it is: the last flush of everything, the last one that has left the record, or the first number
of all, before which there was a Redis of whose flushes nothing is known. Versions before this one leave the three as they are.
"""

from __future__ import annotations

MOST_FLUSHES = 64
"""Flushes by what entries are that an arm's record has; some 60 bytes each at most."""

# Common arguments: idle seconds, sender, channel, number of touches n, n keys; then the operation's own, from ARGV[a + 1].
_PRELUDE = """
local entries, order, state = KEYS[1], KEYS[2], KEYS[3]
local idle, sender, channel, touches = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local a = 4 + touches
local seq, bytes, removals = unpack(redis.call('HMGET', state, 'seq', 'bytes', 'removals'))
if not seq then redis.call('UNLINK', entries, order) end
seq, bytes, removals = tonumber(seq or '0'), tonumber(bytes or '0'), tonumber(removals or '0')
for i = 5, a do
  seq = seq + 1
  redis.call('ZADD', order, 'XX', seq, ARGV[i])
end
local function forget_before(number)
  redis.call('HSET', state, 'floor', string.format('%.0f', number))
end
local function begin()
  if removals == 0 then
    local time = redis.call('TIME')
    removals = tonumber(time[1]) * 1000000 + tonumber(time[2])
    forget_before(removals)
  end
end
local function save()
  begin()
  redis.call('HSET', state, 'seq', seq, 'bytes', bytes, 'removals', string.format('%.0f', removals))
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
local function tell(letter, payload)
  begin()
  removals = removals + 1
  redis.call('PUBLISH', channel, sender .. letter .. struct.pack('<d', removals) .. payload)
end
local function tell_gone(gone)
  if #gone > 0 then tell('E', table.concat(gone)) end
end
"""

TOUCH = (
    _PRELUDE
    + """
save()
"""
)

# key -> stored form or nil, number of the last removal (0: there was none)
GET = (
    _PRELUDE
    + """
local stored = redis.call('HGET', entries, ARGV[a + 1])
if stored then use(ARGV[a + 1]) end
if stored or touches > 0 then save() end
return {stored, removals}
"""
)

# key, stored form, the budget if Redis has none (it lost its data), announcement, labels, number of a removal that was known
# before the answer was asked for, or nothing -> evicted keys, number of the last removal, whether it is refused
PUT = (
    _PRELUDE
    + """
local key, stored, announcement, labels, since = ARGV[a + 1], ARGV[a + 2], ARGV[a + 4], ARGV[a + 5], tonumber(ARGV[a + 6])
local function outdated()
  local floor, flushed = unpack(redis.call('HMGET', state, 'floor', 'flushed'))
  if since < tonumber(floor or '0') or since > removals then return true end
  if since >= tonumber(flushed or '0') then return false end
  local has = {}
  for i = 1, #labels, 8 do has[string.sub(labels, i, i + 7)] = true end
  local flushes = redis.call('HGET', state, 'flushes') or ''
  local at = 1
  while at <= #flushes do
    local last = at + 8 + 8 * string.byte(flushes, at + 8)
    local covered = struct.unpack('<d', flushes, at) > since
    for i = at + 9, last, 8 do covered = covered and has[string.sub(flushes, i, i + 7)] end
    if covered then return true end
    at = last + 1
  end
  return false
end
begin()
local budget = redis.call('HGET', state, 'budget')
if not budget then
  budget = ARGV[a + 3]
  redis.call('HSET', state, 'budget', budget)
end
budget = tonumber(budget)
if since and outdated() then
  save()
  return {{}, removals, 1}
end
local old = drop(key)
local gone = {}
if #stored <= budget then
  gone = evict(budget - #stored, math.huge)
  redis.call('HSET', entries, key, stored)
  use(key)
  bytes = bytes + #stored
  local put = key .. string.sub(stored, 13, 20) .. announcement
  if old > 0 then
    tell('P', put)
  elseif #announcement > 1 then
    redis.call('PUBLISH', channel, sender .. 'P' .. struct.pack('<d', 0) .. put)
  end
elseif old > 0 then
  tell_gone({key})
end
tell_gone(gone)
save()
return {gone, removals, 0}
"""
)

# keys... -> how many of them were there. All are told of: others may have copies of what Redis has evicted just now.
DELETE = (
    _PRELUDE
    + """
local gone, count = {}, 0
for i = a + 1, #ARGV do
  if drop(ARGV[i]) > 0 then count = count + 1 end
  gone[#gone + 1] = ARGV[i]
end
tell_gone(gone)
save()
return count
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
tell('F', '')
forget_before(removals)
redis.call('HDEL', state, 'flushed', 'flushes')
save()
return count
"""
)

# labels of a flush, whether others are told that what is under way is outdated -> number of the removal that it counts as. To
# those who count, also of earlier versions, it is an eviction of nothing.
OUTDATE = (
    _PRELUDE
    + f"""
local labels, told, most = ARGV[a + 1], ARGV[a + 2], {MOST_FLUSHES}
if told == '1' then redis.call('PUBLISH', channel, sender .. 'OUTDATED') end
tell('E', '')
local flushes = redis.call('HGET', state, 'flushes') or ''
flushes = flushes .. struct.pack('<d', removals) .. string.char(#labels / 8) .. labels
local count, at = 0, 1
while at <= #flushes do
  count = count + 1
  at = at + 9 + 8 * string.byte(flushes, at + 8)
end
if count > most then
  forget_before(struct.unpack('<d', flushes, 1))
  flushes = string.sub(flushes, 10 + 8 * string.byte(flushes, 9))
end
redis.call('HSET', state, 'flushed', string.format('%.0f', removals), 'flushes', flushes)
save()
return removals
"""
)

# -> number of the last removal, from now on a time again, as the first one
RENUMBER = (
    _PRELUDE
    + """
local last = removals
removals = 0
begin()
removals = math.max(last, removals)
forget_before(removals)
save()
return removals
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
