-- Buckets that fill up within a minute. A bucket untouched for that long is full, so it need not exist.
local MINUTE_MS = 60000

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- A level below zero is a debt. If the clock went backward (another server took over), nothing is refilled.
local function bucket_level(bucket, measure, limit, now)
  local stored = redis.call('HMGET', bucket, measure, measure .. ':at')
  if not stored[1] then
    return limit
  end
  local elapsed = math.max(0, now - tonumber(stored[2]))
  return math.min(limit, tonumber(stored[1]) + elapsed * limit / MINUTE_MS)
end

local function ms_until(level, wanted, limit)
  return math.max(0, math.ceil((wanted - level) * MINUTE_MS / limit))
end

local function set_bucket_level(bucket, measure, level, limit, now)
  redis.call('HSET', bucket, measure, string.format('%.3f', level), measure .. ':at', string.format('%.0f', now))
  local full_in = ms_until(level, limit, limit) + 1000
  if redis.call('PTTL', bucket) < full_in then
    redis.call('PEXPIRE', bucket, full_in)
  end
end
