-- Stores a document if it is newer than the stored one, and adds it to the changes and the audit stream.
-- KEYS: document, ids of its kind, changes, audit
-- ARGV: kind, id, revision, body, audit entry, changes to keep, audit entries to keep
-- Replies {id, revision stored now}
local stored = tonumber(redis.call('HGET', KEYS[1], 'rev') or '0')
if tonumber(ARGV[3]) <= stored then
  return {ARGV[2], stored}
end
redis.call('HSET', KEYS[1], 'rev', ARGV[3], 'body', ARGV[4])
redis.call('ZADD', KEYS[2], 0, ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], '*', 'kind', ARGV[1], 'id', ARGV[2], 'rev', ARGV[3])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[7], '*', 'v', ARGV[5])
return {ARGV[2], tonumber(ARGV[3])}
