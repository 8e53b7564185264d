-- A write that a full server takes, as it takes those of `admit`.
-- KEYS: a key that holds nothing of worth
-- Replies how many were removed
return redis.call('DEL', KEYS[1])
