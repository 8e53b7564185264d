-- Records how a request ended: the first call decides. Leases are always removed, unused tokens are returned once.
-- KEYS: how the request ended, recent requests of the tenant, all leases, then for tenant and key (if any): leases, bucket
-- ARGV: request, lease as stored in all leases, how it ended, seconds to keep that, recent requests to keep,
--       seconds to keep those after the last one, unused tokens (below zero: used more than reserved), '1' = settle only if the lease exists, number of scopes, then the tokens limit of each (-1 = no limit)
-- Replies {request, 'FIRST' or 'ENDED', how it ended}
local request, unused = ARGV[1], tonumber(ARGV[7])
local num_scopes = tonumber(ARGV[9])

local had_lease = redis.call('ZREM', KEYS[3], ARGV[2]) == 1
for i = 1, num_scopes do
  redis.call('ZREM', KEYS[2 * i + 2], request)
end
if not redis.call('SET', KEYS[1], ARGV[3], 'NX', 'EX', ARGV[4]) then
  return {request, 'ENDED', redis.call('GET', KEYS[1])}
end
if ARGV[8] == '1' and not had_lease then
  return {request, 'FIRST', ARGV[3]}
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'v', ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[6])
local now = now_ms()
for i = 1, num_scopes do
  local bucket, limit = KEYS[2 * i + 3], tonumber(ARGV[9 + i])
  if limit > 0 and unused ~= 0 then
    local level = bucket_level(bucket, 'tokens', limit, now)
    set_bucket_level(bucket, 'tokens', math.min(limit, level + unused), limit, now)
  end
end
return {request, 'FIRST', ARGV[3]}
