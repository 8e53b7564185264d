-- Adds the usage between two offsets of a log to the counters, if the log is applied exactly up to the first offset.
-- KEYS: meta, offsets, then the counters' hashes
-- ARGV: log, from, to, then for each hash: Unix time of its expiry, number of fields, then field, amount, ...
-- Replies {log, 'APPLIED' or 'OFFSET', offset stored now} | {log, 'EPOCH', 0}
if not redis.call('HGET', KEYS[1], 'epoch') then
  return {ARGV[1], 'EPOCH', 0}
end
local stored = redis.call('HGET', KEYS[2], ARGV[1]) or '0'
if stored ~= ARGV[2] then
  return {ARGV[1], 'OFFSET', tonumber(stored)}
end
local at = 4
for i = 3, #KEYS do
  local goes_at, num_fields = ARGV[at], tonumber(ARGV[at + 1])
  at = at + 2
  for _ = 1, num_fields do
    redis.call('HINCRBY', KEYS[i], ARGV[at], ARGV[at + 1])
    at = at + 2
  end
  redis.call('EXPIREAT', KEYS[i], goes_at)
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return {ARGV[1], 'APPLIED', tonumber(ARGV[3])}
