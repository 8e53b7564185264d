-- Declares that Redis has all documents, unless it was emptied since the caller began to put them.
-- KEYS: meta
-- ARGV: token from `LiveView.begin`, schema version, epoch to set if there is none yet
-- Replies the epoch | '' (emptied)
if redis.call('HDEL', KEYS[1], 'building:' .. ARGV[1]) == 0 then
  return ''
end
redis.call('HSETNX', KEYS[1], 'schema', ARGV[2])
redis.call('HSETNX', KEYS[1], 'epoch', ARGV[3])
return redis.call('HGET', KEYS[1], 'epoch')
