-- Gives up a lease that the caller still holds.
-- KEYS: the lease
-- ARGV: token of the caller
-- Replies 1 | 0 (it lapsed, and may be another's now)
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
