-- Removes documents that are not newer than the given revisions, and raises the kind's highest retired revision.
-- KEYS: highest revisions by kind, ids of the kind, then the documents
-- ARGV: kind, highest revision, then for each document: id, revision
-- Replies the highest retired revision stored now
local highest = math.max(tonumber(ARGV[2]), tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0'))
if highest > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', highest))
end
for i = 3, #KEYS do
  local a = 2 * i - 3
  if tonumber(redis.call('HGET', KEYS[i], 'rev') or '0') <= tonumber(ARGV[a + 1]) then
    redis.call('DEL', KEYS[i])
    redis.call('ZREM', KEYS[2], ARGV[a])
  end
end
return highest
