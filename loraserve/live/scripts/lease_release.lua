-- Releases a lease if the caller still holds it.
-- KEYS: the lease
-- ARGV: the caller's token
-- Replies 1 | 0 (it lapsed, and another caller may hold it now)
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
