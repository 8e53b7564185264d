-- Starts a session; if its key has too many, ends the oldest.
-- KEYS: the session, sessions of its key
-- ARGV: hash of its token (the last part of the session's name), its body, its lifetime in seconds, maximum sessions per key
-- Replies the number of ended sessions
local now, lasts_ms = now_ms(), tonumber(ARGV[3]) * 1000
local before_hash = string.sub(KEYS[1], 1, -1 - #ARGV[1])

redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local num_ended = math.max(0, redis.call('ZCARD', KEYS[2]) + 1 - tonumber(ARGV[4]))
if num_ended > 0 then
  -- Their names have the same hash tag, so they are on the same node of a cluster.
  for _, hash in ipairs(redis.call('ZRANGE', KEYS[2], 0, num_ended - 1)) do
    redis.call('DEL', before_hash .. hash)
  end
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, num_ended - 1)
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', lasts_ms)
redis.call('ZADD', KEYS[2], string.format('%.0f', now + lasts_ms), ARGV[1])
redis.call('PEXPIRE', KEYS[2], lasts_ms)
return num_ended
