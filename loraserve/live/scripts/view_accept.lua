-- Declares that Redis holds all documents, if it was not emptied since the caller began to put them.
-- KEYS: meta
-- ARGV: token of the beginning, schema version, epoch if there is none yet
-- Replies the epoch | '' (emptied)
if redis.call('HDEL', KEYS[1], 'building:' .. ARGV[1]) == 0 then
  return ''
end
redis.call('HSETNX', KEYS[1], 'schema', ARGV[2])
redis.call('HSETNX', KEYS[1], 'epoch', ARGV[3])
return redis.call('HGET', KEYS[1], 'epoch')
