-- Reads counters of hashes in order, until it has found as many as wanted, or visited ten times as many.
-- KEYS: hashes
-- ARGV: where to continue in the first ('0' = at its beginning), glob of the counters' names, number of counters wanted
-- Replies {number of hashes read to their end, where to continue in the next, {for each hash: 'name amount ...'}}
local cursor, glob, wanted = ARGV[1], ARGV[2], tonumber(ARGV[3])
local num_found, num_visited, texts = 0, 0, {}
for i, name in ipairs(KEYS) do
  local size, parts = redis.call('HLEN', name), {}
  repeat
    local page = redis.call('HSCAN', name, cursor, 'MATCH', glob, 'COUNT', wanted)
    cursor = page[1]
    parts[#parts + 1] = table.concat(page[2], ' ')
    num_found = num_found + #page[2] / 2
    num_visited = num_visited + math.min(size, wanted)
  until cursor == '0' or num_found >= wanted or num_visited >= 10 * wanted
  texts[i] = table.concat(parts, ' ')
  if cursor ~= '0' then
    return {i - 1, cursor, texts}
  end
  if num_found >= wanted or num_visited >= 10 * wanted then
    return {i, '0', texts}
  end
end
return {#KEYS, '0', texts}
