-- A write that even a full server takes, like those of `admit`.
-- KEYS: a key without useful content
-- Replies the number of removed keys
return redis.call('DEL', KEYS[1])
