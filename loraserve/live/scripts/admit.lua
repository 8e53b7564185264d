-- Admits a request, or replies the reason for the refusal and takes nothing.
-- KEYS: meta, how the request ended, all leases, then for tenant and key (if any): document, leases, bucket; then the adapter's document (if any)
-- ARGV: request, lease as stored in all leases, epoch, lease ms, tokens to reserve,
--       number of scopes (1 or 2), then for each: revision, requests, tokens and concurrent limits; then the adapter's revision (if any).
-- A limit of -1 means no limit.
-- Replies {request, 'OK', then for requests and tokens: limit, remaining, ms until full (limit -1 = no limit)}
--       | {request, 'LIMIT', scope, measure, limit, retry ms (-1 = never)} | {request, 'STALE', scope, ...} | {request, 'EPOCH'} | {request, 'ENDED', how}
local request, member, lease_ms, reserve = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[3] then
  return {request, 'EPOCH'}
end
local ended = redis.call('GET', KEYS[2])
if ended then
  return {request, 'ENDED', ended}
end

local scopes, stale = {}, {request, 'STALE'}
for i = 1, tonumber(ARGV[6]) do
  local k, a = 3 * i, 4 * (i - 1) + 6
  local scope = {
    name = i == 1 and 'tenant' or 'key', leases = KEYS[k + 2], bucket = KEYS[k + 3],
    requests = tonumber(ARGV[a + 2]), tokens = tonumber(ARGV[a + 3]), concurrent = tonumber(ARGV[a + 4]),
  }
  if redis.call('HGET', KEYS[k + 1], 'rev') ~= ARGV[a + 1] then
    stale[#stale + 1] = scope.name
  end
  scopes[i] = scope
end
local adapter = KEYS[3 * #scopes + 4]
if adapter and redis.call('HGET', adapter, 'rev') ~= ARGV[4 * #scopes + 7] then
  stale[#stale + 1] = 'adapter'
end
if #stale > 2 then
  return stale
end

-- Lapsed entries stay in the set of all leases until a process has finished their requests as lost.
local is_in = redis.call('ZSCORE', KEYS[3], member)

local refusal = nil
local function refuse(scope, measure, limit, retry_ms)
  if not refusal or retry_ms == -1 or (refusal[6] ~= -1 and retry_ms > refusal[6]) then
    refusal = {request, 'LIMIT', scope, measure, limit, retry_ms}
  end
end
local function check_concurrent(scope)
  local limit = scope.concurrent
  if limit >= 0 and redis.call('ZCOUNT', scope.leases, now + 1, '+inf') >= limit then
    refuse(scope.name, 'concurrent', limit, limit == 0 and -1 or 1000)
  end
end
local function check_bucket(scope, measure, limit, amount)
  if limit < 0 then
    return nil
  end
  local level = bucket_level(scope.bucket, measure, limit, now)
  local needed = math.min(amount, limit)
  if limit == 0 then
    refuse(scope.name, measure, limit, -1)
  elseif not is_in and level < needed then
    refuse(scope.name, measure, limit, ms_until(level, needed, limit))
  end
  return level
end

for _, scope in ipairs(scopes) do
  if not is_in then
    redis.call('ZREMRANGEBYSCORE', scope.leases, '-inf', now)
    check_concurrent(scope)
  end
  scope.requests_level = check_bucket(scope, 'requests', scope.requests, 1)
  scope.tokens_level = check_bucket(scope, 'tokens', scope.tokens, reserve)
end
if refusal then
  return refusal
end

local lease_end = string.format('%.0f', now + lease_ms)
redis.call('ZADD', KEYS[3], lease_end, member)
local tighter = {requests = {-1, 0, 0}, tokens = {-1, 0, 0}}
local function take(scope, measure, limit, level, amount)
  if not level then
    return
  end
  if not is_in then
    level = level - amount
    set_bucket_level(scope.bucket, measure, level, limit, now)
  end
  local remaining = math.max(0, math.floor(level))
  if tighter[measure][1] < 0 or remaining < tighter[measure][2] then
    tighter[measure] = {limit, remaining, ms_until(level, limit, limit)}
  end
end
for _, scope in ipairs(scopes) do
  redis.call('ZADD', scope.leases, lease_end, request)
  redis.call('PEXPIRE', scope.leases, 2 * lease_ms)
  take(scope, 'requests', scope.requests, scope.requests_level, 1)
  take(scope, 'tokens', scope.tokens, scope.tokens_level, reserve)
end
local r, t = tighter.requests, tighter.tokens
return {request, 'OK', r[1], r[2], r[3], t[1], t[2], t[3]}
