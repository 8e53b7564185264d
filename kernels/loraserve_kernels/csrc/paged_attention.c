/* Causal attention over a paged KV cache, prefill chunks and decode rows mixed in one call.
 *
 * A work item is (sequence, tile of query rows, kv head). All query heads of the kv head and all rows of the tile form up
 * to TILE_QUERIES query vectors, so K and V are read and widened once for all of them. Keys are processed KEYS at a time,
 * aligned to absolute positions: transpose K, S = Q Kᵀ, online softmax in float32, O += P V. Scores and values of keys
 * that no row of the tile may see are never used, so whatever lies in unused cache slots cannot leak. If the CPU
 * multiplies bfloat16, decode_attention.c computes tiles of few query vectors; if it has AMX, prompt_attention.c computes
 * tiles of many.
 *
 * The context is cut into spans of SPAN keys whose partial results are merged in order. With few items and long contexts,
 * the spans of decode tiles run in parallel, otherwise one after the other: the same arithmetic, so a row's result
 * depends neither on the batch nor on the number of threads.
 */
#include "amx.h"
#include "attention_tile.h"
#include "decode_attention.h"
#include "gemm.h"
#include "prompt_attention.h"

#define FEW_QUERIES 4
#define SPLIT_QUERIES 16 /* tiles of one row, or of at most this many query vectors, may run their spans in parallel ... */
#define ENOUGH_TILES 4   /* ... when there are fewer tiles than this per thread */
#define PARALLEL_WORK 65536 /* query vectors * keys * head_dim; below this one thread is faster */

/* Sizes are rounded up to whole cache lines so that threads do not share one. */
static size_t state_floats(const struct attention *p, int64_t queries)
{
    return (size_t)(queries * (2 + padded_dim(p)) + 15) / 16 * 16;
}

static struct state state_at(float *memory, int64_t queries)
{
    return (struct state){memory, memory + queries, memory + 2 * queries};
}

/* The most query vectors of a tile whose spans may run in parallel; prompt_attention.c pads to whole vectors of them. */
static int64_t split_queries(const struct attention *p)
{
    return MAX(SPLIT_QUERIES, (group_size(p) + LANES - 1) / LANES * LANES);
}

/* Query vectors that fit in a workspace; prompt_attention.c pads to whole vectors of them. */
static int64_t room_for_queries(const struct attention *p) { return MAX(TILE_QUERIES, tile_queries(p)); }

static size_t workspace_floats(const struct attention *p)
{
    const int64_t queries = room_for_queries(p);
    return (size_t)((padded_dim(p) + KEYS + LANES) * queries + 2 * padded_dim(p) * KEYS + 15) / 16 * 16 +
           2 * state_floats(p, queries);
}

static struct workspace workspace_at(const struct attention *p, float *memory)
{
    const int64_t queries = room_for_queries(p), dim = padded_dim(p);
    struct workspace w;
    w.keys = memory;
    w.values = w.keys + KEYS * dim;
    w.queries = w.values + KEYS * dim;
    w.scores = w.queries + queries * dim;
    w.lane_totals = w.scores + queries * KEYS;
    w.span = state_at(w.lane_totals + queries * LANES, queries);
    w.sum = state_at(w.span.maximum + state_floats(p, queries), queries);
    return w;
}

/* Element offsets into the caches of the rows of keys base .. base + KEYS. Outside first .. end, where scores are masked,
 * they repeat a row from inside, so that other slots are never read; if that range is empty, they are 0. */
INLINE void find_rows(const struct attention *p, const struct attention_item *item, int64_t base, int64_t first,
                      int64_t end, int64_t *rows)
{
    int64_t found = 0;
    for (int64_t key = first; key < end;) {
        const int64_t block = key / p->block_size, block_end = MIN(end, (block + 1) * p->block_size);
        const int64_t id = p->block_table[item->sequence * p->block_table_stride + block];
        int64_t row = (id * p->num_kv_heads + item->kv_head) * p->block_size + key % p->block_size;
        for (; key < block_end; key++)
            rows[key - base] = found = row++ * p->head_dim;
    }
    const int64_t before = MAX(first - base, 0), after = end > first ? end - base : 0;
    for (int64_t i = 0; i < before; i++)
        rows[i] = found;
    for (int64_t i = after; i < KEYS; i++)
        rows[i] = found;
}

/* find_rows for the first keys of an item; for NULL, all offsets are 0. */
INLINE void find_first_rows(const struct attention *p, const struct attention_item *item, int64_t *rows)
{
    const int64_t first = item ? item->first_key : 0, base = first / KEYS * KEYS;
    find_rows(p, item, base, first, item ? MIN(item->end_key, base + KEYS) : 0, rows);
}

/* Blocks lie anywhere, so the hardware cannot predict the next rows. They are prefetched piece by piece while a chunk is
 * loaded. 16 sequences of 1,024 keys, 4 kv heads of 64, bfloat16, from memory, one EPYC Zen 5 core: 3.2 ms without
 * prefetches, 2.5 with one burst per chunk, 1.25 this way; with 8 heads of 128: 13.5, 13.5 and 5.9 ms. */
INLINE void prefetch(const void *cache, int64_t row, int64_t d, const enum dtype dtype)
{
    __builtin_prefetch(at(cache, row + d, dtype), 0, 3);
}

/* Keys and queries are multiplied word by word: float32, or pairs of bfloat16 if the CPU multiplies those. */
#if defined(__AVX512BF16__)
#define PRODUCT(dtype) (dtype)
#else
#define PRODUCT(dtype) FLOAT32
#endif
INLINE int64_t words_of(int64_t elements, const enum dtype dtype)
{
    (void)dtype; /* not used by every PRODUCT */
    return PRODUCT(dtype) == BFLOAT16 ? (elements + 1) / 2 : elements;
}

/* keys: words [words_of(padded_dim), KEYS]; column j is the cache row at rows[j]. Loads whole vectors of columns up to
 * `count`. */
INLINE void load_keys(const struct attention *p, const int64_t *rows, const int64_t *next_rows, int64_t count,
                      float *keys, const enum dtype dtype)
{
    const int per_word = dtype == BFLOAT16 ? 2 : 1; /* words are transposed: half the shuffles */
    for (int64_t column = 0; column < count; column += LANES) {
        for (int64_t d = 0; d < p->head_dim; d += LANES * per_word) {
            vf square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                prefetch(p->k_cache, next_rows[column + i], d, dtype);
                square[i] = load_words(p->k_cache, rows[column + i] + d, p->head_dim - d, dtype);
            }
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                float *words = keys + words_of(d + i * per_word, dtype) * KEYS + column;
                if (PRODUCT(dtype) == dtype) {
                    store(words, 0, square[i], FLOAT32);
                } else {
                    store(words, 0, (vf)((vu)square[i] << 16), FLOAT32);
                    store(words, KEYS, (vf)((vu)square[i] & 0xffff0000u), FLOAT32);
                }
            }
        }
    }
}

/* values: [count, padded_dim]; row j is the cache row at rows[j]. */
INLINE void load_values(const struct attention *p, const int64_t *rows, const int64_t *next_rows, int64_t count,
                        float *values, const enum dtype dtype)
{
    for (int64_t i = 0; i < count; i++) {
        for (int64_t d = 0; d < p->head_dim; d += LANES) {
            prefetch(p->v_cache, next_rows[i], d, dtype);
            const vf value = load_upto(p->v_cache, rows[i] + d, p->head_dim - d, dtype);
            store(values, i * padded_dim(p) + d, value, FLOAT32);
        }
    }
}

/* output += scores * values for a decode row's queries, straight from the cache: the same sums as load_values and gemm. */
INLINE void add_rows(const struct attention *p, float *output, const float *scores, const int queries,
                     const int64_t *rows, const int64_t *next_rows, int64_t count, const enum dtype dtype)
{
    const int64_t dim = padded_dim(p);
    for (int64_t d = 0; d < p->head_dim; d += 2 * LANES) {
        vf sum[2 * FEW_QUERIES];
#pragma GCC unroll 8
        for (int i = 0; i < 2 * queries; i++)
            sum[i] = load(output, i / 2 * dim + d + i % 2 * LANES, FLOAT32);
        for (int64_t key = 0; key < count; key++) {
            prefetch(p->v_cache, next_rows[key], d, dtype);
            vf value[2] = {{0}, {0}};
            if (d + 2 * LANES <= p->head_dim) {
                value[0] = load(p->v_cache, rows[key] + d, dtype);
                value[1] = load(p->v_cache, rows[key] + d + LANES, dtype);
            } else {
                value[0] = load_upto(p->v_cache, rows[key] + d, p->head_dim - d, dtype);
                if (d + LANES < p->head_dim)
                    value[1] = load_upto(p->v_cache, rows[key] + d + LANES, p->head_dim - d - LANES, dtype);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 2 * queries; i++)
                sum[i] += scores[i / 2 * KEYS + key] * value[i % 2];
        }
#pragma GCC unroll 8
        for (int i = 0; i < 2 * queries; i++)
            store(output, i / 2 * dim + d + i % 2 * LANES, sum[i], FLOAT32);
    }
}

/* NOTE: not inlined. If they are, GCC 12 keeps the sums on the stack, and a decode row takes twice as long. */
#define ADD_ROWS(queries)                                                                                             \
    static __attribute__((noinline)) void add_rows_of_##queries(                                                      \
        const struct attention *p, float *output, const float *scores, const int64_t *rows, const int64_t *next_rows, \
        int64_t count, enum dtype dtype)                                                                              \
    {                                                                                                                 \
        if (dtype == BFLOAT16)                                                                                        \
            add_rows(p, output, scores, queries, rows, next_rows, count, BFLOAT16);                                   \
        else                                                                                                          \
            add_rows(p, output, scores, queries, rows, next_rows, count, FLOAT32);                                    \
    }
ADD_ROWS(1)
ADD_ROWS(2)
ADD_ROWS(3)
ADD_ROWS(4)

static void add_few(const struct attention *p, float *output, const float *scores, int64_t queries, const int64_t *rows,
                    const int64_t *next_rows, int64_t count, enum dtype dtype)
{
    if (queries == 1)
        add_rows_of_1(p, output, scores, rows, next_rows, count, dtype);
    else if (queries == 2)
        add_rows_of_2(p, output, scores, rows, next_rows, count, dtype);
    else if (queries == 3)
        add_rows_of_3(p, output, scores, rows, next_rows, count, dtype);
    else
        add_rows_of_4(p, output, scores, rows, next_rows, count, dtype);
}

/* Query vector i of a tile is row i / group, head i % group of its kv head. */
INLINE void load_queries(const struct attention *p, const struct attention_item *item, float *queries,
                         const enum dtype dtype)
{
    const int64_t group = group_size(p), sequence_row = p->row_start[item->sequence] + item->first_row;
    for (int64_t i = 0; i < item->rows * group; i++) {
        const int64_t head = item->kv_head * group + i % group;
        const int64_t offset = (sequence_row + i / group) * p->q_row_stride + head * p->q_head_stride;
        float *words = queries + i * padded_dim(p);
        if (PRODUCT(dtype) == BFLOAT16)
            for (int64_t d = 0; d < p->head_dim; d += 2 * LANES)
                store(words, d / 2, load_words(p->q, offset + d, p->head_dim - d, dtype), FLOAT32);
        else
            for (int64_t d = 0; d < p->head_dim; d += LANES)
                store(words, d, load_upto(p->q, offset + d, p->head_dim - d, dtype), FLOAT32);
    }
}

/* scores = queries times keys. NOTE: AMX multiplies whole tiles: queries and keys are zero from head_dim to padded_dim. */
INLINE void compute_scores(const struct attention *p, struct workspace *w, int64_t queries, int64_t columns,
                           const enum dtype dtype)
{
    const int64_t dim = padded_dim(p);
    if (PRODUCT(dtype) == BFLOAT16 && amx_is_on())
        amx_gemm(w->scores, KEYS, w->queries, dim, w->keys, KEYS, queries, columns, dim / 2);
    else
        gemm(w->scores, KEYS, w->queries, dim, w->keys, KEYS, queries, columns, words_of(p->head_dim, dtype), false,
             PRODUCT(dtype));
}

/* One row of scores for the keys base..end becomes exp(score - maximum); masked keys become 0, whole vectors of them
 * without any arithmetic. */
INLINE void exp_scores(const struct attention *p, struct state *state, float *lane_totals, float *scores, int64_t query,
                       int64_t position, int64_t base, int64_t end)
{
    vi lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    const vf hidden = splat(-INFINITY);
    const int64_t width = (end - base + LANES - 1) / LANES * LANES;
    const int64_t visible_from = first_visible(p, position) - base, visible_to = MIN(position + 1, end) - base;
    const bool whole = visible_from <= 0 && visible_to >= width;
    const int64_t first = MAX(visible_from, 0) / LANES * LANES, last = (visible_to + LANES - 1) / LANES * LANES;
    for (int64_t column = 0; column < width; column += LANES)
        if (column < first || column >= last)
            store(scores, column, (vf){0}, FLOAT32);
    if (first >= last)
        return;
    vf maxima = hidden;
    for (int64_t column = first; column < last; column += LANES) {
        vf score = load(scores, column, FLOAT32) * p->scaling;
        if (p->softcap > 0.0f)
            score = p->softcap * vtanh(score / p->softcap);
        if (!whole) {
            vi key = lane + (int32_t)column;
            score = choose((key >= (int32_t)visible_from) & (key < (int32_t)visible_to), score, hidden);
        }
        maxima = vmax(score, maxima);
        store(scores, column, score, FLOAT32);
    }
    const float maximum = MAX(state->maximum[query], horizontal_max(maxima));
    /* Nothing visible so far: subtract 0, so that exp(-inf) = 0 and not exp(-inf + inf). */
    const float shift = maximum == -INFINITY ? 0.0f : maximum;
    vf totals = load(lane_totals, query * LANES, FLOAT32);
    if (maximum != state->maximum[query]) {
        const float decay = expf(state->maximum[query] - shift);
        float *output = state->output + query * padded_dim(p);
        totals *= decay;
        for (int64_t d = 0; d < p->head_dim; d += LANES)
            store(output, d, load(output, d, FLOAT32) * decay, FLOAT32);
        state->maximum[query] = maximum;
    }
    for (int64_t column = first; column < last; column += LANES) {
        vf probability = vexp(load(scores, column, FLOAT32) - shift);
        totals += probability;
        store(scores, column, probability, FLOAT32);
    }
    store(lane_totals, query * LANES, totals, FLOAT32);
}

/* output += scores * values for the keys base..end, four queries at a time, without keys that are masked for all four. */
INLINE void add_values(const struct attention *p, const struct attention_item *item, struct workspace *w, int64_t base,
                       int64_t end)
{
    const int64_t group = group_size(p), queries = item->rows * group, dim = padded_dim(p);
    for (int64_t i = 0; i < queries; i += 4) {
        const int64_t rows = MIN(4, queries - i);
        const int64_t first_row = item->first_row + i / group, last_row = item->first_row + (i + rows - 1) / group;
        const int64_t first = MAX(base, first_visible(p, position_of(p, item->sequence, first_row)));
        const int64_t depth = MIN(end, position_of(p, item->sequence, last_row) + 1) - first;
        gemm(w->span.output + i * dim, dim, w->scores + i * KEYS + first - base, KEYS, w->values + (first - base) * dim,
             dim, rows, dim, MAX(depth, 0), true, FLOAT32);
    }
}

/* Computes the state of the tile's queries over the item's keys, which lie within one span. Meanwhile prefetches the next
 * keys; after the item's last chunk these are the first of the following item. */
INLINE void attend_span(const struct attention *p, const struct attention_item *item,
                        const struct attention_item *following, struct workspace *w, const enum dtype dtype)
{
    const int64_t first_key = item->first_key, end_key = item->end_key;
    const int64_t group = group_size(p), queries = item->rows * group, dim = padded_dim(p);
    memset(w->lane_totals, 0, (size_t)queries * LANES * sizeof(float));
    memset(w->span.output, 0, (size_t)(queries * dim) * sizeof(float));
    for (int64_t i = 0; i < queries; i++)
        w->span.maximum[i] = -INFINITY;
    int64_t row_buffers[2][KEYS], *rows = row_buffers[0], *next_rows = row_buffers[1];
    int64_t key = first_key, base = key / KEYS * KEYS, end = MIN(end_key, base + KEYS);
    find_rows(p, item, base, key, end, rows);
    while (key < end_key) {
        const int64_t count = end - base, next_end = MIN(end_key, end + KEYS);
        if (end < end_key)
            find_rows(p, item, end, end, next_end, next_rows);
        else
            find_first_rows(p, following, next_rows);
        load_keys(p, rows, next_rows, count, w->keys, dtype);
        compute_scores(p, w, queries, (count + LANES - 1) / LANES * LANES, dtype);
        for (int64_t i = 0; i < queries; i++)
            exp_scores(p, &w->span, w->lane_totals, w->scores + i * KEYS, i,
                       position_of(p, item->sequence, item->first_row + i / group), base, end);
        if (queries <= FEW_QUERIES) {
            add_few(p, w->span.output, w->scores, queries, rows, next_rows, count, dtype);
        } else {
            load_values(p, rows, next_rows, count, w->values, dtype);
            add_values(p, item, w, base, end);
        }
        key = base = end;
        end = next_end;
        int64_t *swap = rows;
        rows = next_rows;
        next_rows = swap;
    }
    for (int64_t i = 0; i < queries; i++)
        w->span.total[i] = horizontal_sum(load(w->lane_totals, i * LANES, FLOAT32));
}

/* exp(old - new); mostly exp(0) or exp(-inf). */
INLINE float decay(float old, float new)
{
    if (old == new)
        return 1.0f;
    return old == -INFINITY ? 0.0f : expf(old - new);
}

/* sum <- the state over the keys of sum and span. */
static void merge(const struct attention *p, struct state *sum, const struct state *span, int64_t queries)
{
    const int64_t dim = padded_dim(p);
    for (int64_t i = 0; i < queries; i++) {
        const float maximum = MAX(sum->maximum[i], span->maximum[i]);
        if (maximum == -INFINITY)
            continue;
        const float old = decay(sum->maximum[i], maximum), new = decay(span->maximum[i], maximum);
        sum->maximum[i] = maximum;
        sum->total[i] = sum->total[i] * old + span->total[i] * new;
        for (int64_t d = 0; d < dim; d += LANES)
            store(sum->output, i * dim + d,
                  load(sum->output, i * dim + d, FLOAT32) * old + load(span->output, i * dim + d, FLOAT32) * new,
                  FLOAT32);
    }
}

static void clear(const struct attention *p, struct state *state, int64_t queries)
{
    memset(state->output, 0, (size_t)(queries * padded_dim(p)) * sizeof(float));
    memset(state->total, 0, (size_t)queries * sizeof(float));
    for (int64_t i = 0; i < queries; i++)
        state->maximum[i] = -INFINITY;
}

/* Adds the sink logit, divides by the total and stores one head's row of the output. */
INLINE void finish_query(const struct attention *p, const struct state *state, int64_t i, int64_t row, int64_t head,
                         enum dtype dtype)
{
    float total = state->total[i], factor = 1.0f;
    if (p->sinks) {
        const float maximum = MAX(state->maximum[i], p->sinks[head]);
        factor = expf(state->maximum[i] - maximum);
        total = total * factor + expf(p->sinks[head] - maximum);
    }
    factor /= total;
    const float *output = state->output + i * padded_dim(p);
    const int64_t offset = (row * p->num_heads + head) * p->head_dim;
    int64_t d = 0;
    for (; d + LANES <= p->head_dim; d += LANES)
        store(p->out, offset + d, (load(output, d, FLOAT32) + 0.0f) * factor, dtype);
    if (d < p->head_dim)
        store_partial(p->out, offset + d, p->head_dim - d, (load(output, d, FLOAT32) + 0.0f) * factor, dtype);
}

/* Stores the tile's rows of the output. NOTE: finish_query adds 0 to turn -0 into 0, as merge does, so that the state of
 * a single span gives the same bits as a merged one. */
static void finish(const struct attention *p, const struct attention_item *item, const struct state *state,
                   enum dtype dtype)
{
    const int64_t group = group_size(p), sequence_row = p->row_start[item->sequence] + item->first_row;
    for (int64_t row = 0; row < item->rows; row++)
        for (int64_t head = 0; head < group; head++)
            finish_query(p, state, row * group + head, sequence_row + row, item->kv_head * group + head, dtype);
}

static void attend_span_item(const struct attention *p, const struct attention_item *item,
                             const struct attention_item *following, struct workspace *w, enum dtype dtype)
{
    if (is_decode(p, item->rows, dtype))
        attend_decode_span(p, item, following, w);
    else if (is_prompt(p, item->rows, dtype))
        attend_prompt_span(p, item, w);
    else if (dtype == BFLOAT16)
        attend_span(p, item, following, w, BFLOAT16);
    else
        attend_span(p, item, following, w, FLOAT32);
}

/* Runs an item: one span into its part, or a whole tile span by span. following: likely this thread's next item, or NULL. */
static void attend(const struct attention *p, struct attention_item item, const struct attention_item *following,
                   struct workspace w, float *parts, enum dtype dtype)
{
    const int64_t queries = item.rows * group_size(p), end_key = item.end_key;
    if (is_decode(p, item.rows, dtype))
        load_decode_queries(p, &item, w.queries);
    else if (is_prompt(p, item.rows, dtype))
        load_prompt_queries(p, &item, w.queries);
    else if (dtype == BFLOAT16)
        load_queries(p, &item, w.queries, BFLOAT16);
    else
        load_queries(p, &item, w.queries, FLOAT32);
    if (item.part >= 0) {
        w.span = state_at(parts + item.part * state_floats(p, split_queries(p)), split_queries(p));
        attend_span_item(p, &item, following, &w, dtype);
        return;
    }
    if ((item.first_key / SPAN + 1) * SPAN >= end_key) {
        attend_span_item(p, &item, following, &w, dtype);
        finish(p, &item, &w.span, dtype);
        return;
    }
    clear(p, &w.sum, queries);
    while (item.first_key < end_key) {
        item.end_key = (int32_t)MIN(end_key, (item.first_key / SPAN + 1) * SPAN);
        struct attention_item rest = item;
        rest.first_key = item.end_key;
        rest.end_key = (int32_t)end_key;
        attend_span_item(p, &item, item.end_key < end_key ? &rest : following, &w, dtype);
        merge(p, &w.sum, &w.span, queries);
        item.first_key = item.end_key;
    }
    finish(p, &item, &w.sum, dtype);
}

/* Finishes a tile whose spans were computed separately. */
static void merge_parts(const struct attention *p, const struct attention_item *item, struct workspace w, float *parts,
                        enum dtype dtype)
{
    const int64_t queries = item->rows * group_size(p);
    clear(p, &w.sum, queries);
    for (int64_t span = item->first_key / SPAN; span <= (item->end_key - 1) / SPAN; span++) {
        const int64_t part = item->part + span - item->first_key / SPAN;
        struct state state = state_at(parts + part * state_floats(p, split_queries(p)), split_queries(p));
        merge(p, &w.sum, &state, queries);
    }
    finish(p, item, &w.sum, dtype);
}

enum status attention_measure(const struct attention *p, int64_t total_rows, int64_t max_blocks, int num_threads,
                              struct attention_size *size)
{
    *size = (struct attention_size){0};
    for (int64_t s = 0; s < p->num_sequences; s++) {
        const int64_t rows = p->num_rows[s], context = p->context_lens[s];
        if (rows == 0)
            continue;
        if (rows < 0 || p->row_start[s] < 0 || p->row_start[s] + rows > total_rows || rows > context ||
            context > max_blocks * p->block_size)
            return BAD_SEGMENTS;
        const int64_t first = first_visible(p, context - rows) / p->block_size, last = (context - 1) / p->block_size;
        for (int64_t block = first; block <= last; block++) {
            const int64_t id = p->block_table[s * p->block_table_stride + block];
            if (id < 0 || id >= p->num_blocks)
                return BAD_BLOCK;
        }
        const int64_t tiles = (rows + tile_rows(p) - 1) / tile_rows(p) * p->num_kv_heads;
        size->num_tiles += tiles;
        size->max_parts += tiles * (context / SPAN + 1);
        size->work += rows * p->num_heads * (context - first * p->block_size) * p->head_dim;
    }
    if (num_threads == 1 || size->num_tiles >= ENOUGH_TILES * num_threads)
        size->max_parts = 0;
    return OK;
}

/* Lists the tiles of all sequences; of each sequence the last tile, which sees the most keys, comes first. */
static int64_t list_tiles(const struct attention *p, struct attention_item *tiles)
{
    struct attention_item *next = tiles;
    for (int64_t s = 0; s < p->num_sequences; s++)
        for (int64_t tile = (p->num_rows[s] + tile_rows(p) - 1) / tile_rows(p) - 1; tile >= 0; tile--)
            for (int64_t head = 0; head < p->num_kv_heads; head++) {
                struct attention_item item = {.sequence = (int32_t)s, .kv_head = (int32_t)head, .part = -1};
                item.first_row = (int32_t)(tile * tile_rows(p));
                item.rows = (int32_t)MIN(tile_rows(p), p->num_rows[s] - item.first_row);
                item.first_key = (int32_t)first_visible(p, position_of(p, s, item.first_row));
                item.end_key = (int32_t)position_of(p, s, item.first_row + item.rows);
                *next++ = item;
            }
    return next - tiles;
}

static bool is_split(const struct attention *p, const struct attention_item *tile)
{
    const bool is_small = tile->rows == 1 || tile->rows * group_size(p) <= SPLIT_QUERIES;
    return is_small && tile->first_key / SPAN != (tile->end_key - 1) / SPAN;
}

/* Cuts split tiles into one item per span; the tiles themselves remember their first part. */
static int64_t list_items(const struct attention *p, struct attention_item *tiles, int64_t num_tiles,
                          struct attention_item *items)
{
    struct attention_item *next = items;
    int32_t part = 0;
    for (int64_t i = 0; i < num_tiles; i++) {
        struct attention_item item = tiles[i];
        if (!is_split(p, tiles + i)) {
            *next++ = item;
            continue;
        }
        tiles[i].part = part;
        for (; item.first_key < tiles[i].end_key; item.first_key = item.end_key) {
            item.part = part++;
            item.end_key = MIN(tiles[i].end_key, (item.first_key / SPAN + 1) * SPAN);
            *next++ = item;
        }
    }
    return next - items;
}

static size_t item_bytes(const struct attention_size *size)
{
    const int64_t num_items = size->max_parts > 0 ? 2 * size->num_tiles + size->max_parts : size->num_tiles;
    return ((size_t)num_items * sizeof(struct attention_item) + 63) & ~(size_t)63;
}

size_t attention_scratch(const struct attention *p, const struct attention_size *size, int num_threads)
{
    const size_t parts = (size_t)size->max_parts * state_floats(p, split_queries(p));
    return item_bytes(size) + (parts + workspace_floats(p) * (size_t)num_threads) * sizeof(float);
}

struct attention_plan attention_prepare(const struct attention *p, const struct attention_size *size, void *scratch)
{
    struct attention_plan plan = {.tiles = scratch, .items = scratch};
    plan.parts = (float *)((char *)scratch + item_bytes(size));
    plan.workspaces = plan.parts + (size_t)size->max_parts * state_floats(p, split_queries(p));
    plan.num_items = plan.num_tiles = list_tiles(p, plan.tiles);
    plan.is_split = size->max_parts > 0;
    if (plan.is_split) {
        plan.items = plan.tiles + plan.num_tiles;
        plan.num_items = list_items(p, plan.tiles, plan.num_tiles, plan.items);
    }
    return plan;
}

void attention_stage(struct team *team, const struct attention *p, const struct attention_plan *plan, enum dtype dtype)
{
    struct work attending = start_work(team, plan->num_items);
    const struct workspace w = workspace_at(p, plan->workspaces + workspace_floats(p) * (size_t)team->thread);
    int64_t i;
    while (take(team, &attending, &i))
        attend(p, plan->items[i], i + 1 < plan->num_items ? plan->items + i + 1 : NULL, w, plan->parts, dtype);
    if (dtype == BFLOAT16 && amx_is_on())
        amx_end();
    if (!plan->is_split)
        return;
    complete(team);
    struct work merging = start_work(team, plan->num_tiles);
    while (take(team, &merging, &i))
        if (plan->tiles[i].part >= 0)
            merge_parts(p, plan->tiles + i, w, plan->parts, dtype);
}

EXPORT int paged_attention(const struct attention *p, int64_t total_rows, int64_t max_blocks, int dtype,
                           int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    struct attention_size size;
    enum status status = attention_measure(p, total_rows, max_blocks, num_threads, &size);
    if (status != OK || size.num_tiles == 0)
        return status;
    const size_t share_bytes = 2 * (size_t)num_threads * sizeof(struct share);
    char *memory = grow_scratch(&scratch, &capacity, share_bytes + attention_scratch(p, &size, num_threads));
    if (!memory)
        return OUT_OF_MEMORY;
    memset(memory, 0, share_bytes);
    const struct attention_plan plan = attention_prepare(p, &size, memory + share_bytes);

#pragma omp parallel num_threads(num_threads) if (size.work >= PARALLEL_WORK)
    {
        struct team team = team_of(omp_get_thread_num(), omp_get_num_threads(), (struct share *)memory);
        attention_stage(&team, p, &plan, (enum dtype)dtype);
    }
    return OK;
}
