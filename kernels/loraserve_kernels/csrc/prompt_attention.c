/* Attention of a prompt's many query vectors on AMX.
 *
 * Query vectors lie in panels, one per lane. Keys are multiplied as they lie in the cache, 16 of one block at a time, so
 * only the queries are transposed, once for all keys, and maxima and totals of a panel are whole vectors. Scores that the
 * causal mask or the window hides from a whole panel are not exponentiated; values that it hides from four query vectors
 * are not added. Every sum is the one that paged_attention.c computes for the same row.
 *
 * A prompt of 128 tokens, 12 heads of 64, 4 kv heads, two Xeon cores with AMX: 94 us, 148 with paged_attention.c alone;
 * one of 1,024 tokens: 5.0 ms and 7.1. The multiply-adds of the values are 40 % of that, close to the 6 vectors per
 * nanosecond that a core can do. AMX goes to sleep after half a microsecond without use and takes 0.3 us to wake up.
 * Keeping it awake slows the multiply-adds down by as much, and scores of more keys at a time would not fit in L1.
 */
#include "prompt_attention.h"

#include "amx.h"

#define GROUP AMX_ROWS    /* keys multiplied together: they lie side by side in a block */
#define WIDTH (2 * LANES) /* query vectors multiplied with them at a time */
#define ROWS 4            /* query vectors whose outputs are added to together; also keys softened together */

#if defined(__AVX512BF16__)

bool is_prompt(const struct attention *p, int64_t rows, enum dtype dtype)
{
    return dtype == BFLOAT16 && amx_is_on() && rows * group_size(p) <= TILE_QUERIES && p->head_dim % (2 * LANES) == 0 &&
           p->block_size % GROUP == 0;
}

static int64_t padded_queries(const struct attention *p, const struct attention_item *item)
{
    return (item->rows * group_size(p) + LANES - 1) / LANES * LANES;
}

/* Advances to the item's next query vector, see load_queries; stays at the last one. */
INLINE void advance_query(const struct attention_item *item, int64_t group, int64_t *row, int64_t *head)
{
    if (*head + 1 < group) {
        ++*head;
    } else if (*row + 1 < item->rows) {
        ++*row;
        *head = 0;
    }
}

void load_prompt_queries(const struct attention *p, const struct attention_item *item, float *queries)
{
    const int64_t group = group_size(p), words = p->head_dim / 2;
    const int64_t first_row = p->row_start[item->sequence] + item->first_row, first_head = item->kv_head * group;
    int64_t row = 0, head = 0;
    for (int64_t panel = 0; panel < padded_queries(p, item); panel += LANES) {
        int64_t offsets[LANES];
        for (int i = 0; i < LANES; i++) {
            offsets[i] = (first_row + row) * p->q_row_stride + (first_head + head) * p->q_head_stride;
            advance_query(item, group, &row, &head);
        }
        for (int64_t word = 0; word < words; word += LANES) {
            vf square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                square[i] = load(at(p->q, offsets[i], BFLOAT16), word, FLOAT32);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                store(queries, panel * words + (word + i) * LANES, square[i], FLOAT32);
        }
    }
}

/* The keys of a span to read, relative to its base. */
struct keys {
    int64_t base, first, end;
    int64_t rows[SPAN / GROUP]; /* element offset into the caches of a group's first row; set for groups to read */
};

static struct keys find_keys(const struct attention *p, const struct attention_item *item)
{
    struct keys keys = {.base = item->first_key / SPAN * SPAN};
    keys.first = item->first_key - keys.base;
    keys.end = MIN(item->end_key - keys.base, SPAN);
    const int32_t *blocks = p->block_table + item->sequence * p->block_table_stride;
    for (int64_t group = keys.first / GROUP; group * GROUP < keys.end; group++) {
        const int64_t key = keys.base + group * GROUP;
        const int64_t row = (blocks[key / p->block_size] * p->num_kv_heads + item->kv_head) * p->block_size;
        keys.rows[group] = (row + key % p->block_size) * p->head_dim;
    }
    return keys;
}

INLINE struct amx_rows group_of_keys(const struct attention *p, const struct keys *keys, int64_t group)
{
    const int64_t row_bytes = p->head_dim * (int64_t)size_of(BFLOAT16);
    return (struct amx_rows){at(p->k_cache, keys->rows[group], BFLOAT16), row_bytes, 4 * AMX_WORDS};
}

/* scores [queries / WIDTH, KEYS, WIDTH] = keys first .. end times queries. Computes whole groups, including keys that are
 * masked later. */
static void score_keys(const struct attention *p, const struct keys *keys, int64_t first, int64_t end, int64_t queries,
                       const struct workspace *w)
{
    const int64_t words = p->head_dim / 2, end_group = (end + GROUP - 1) / GROUP;
    for (int64_t group = first / GROUP; group < end_group; group += 2) {
        struct amx_rows rows[2] = {group_of_keys(p, keys, group)};
        if (group + 1 < end_group)
            rows[1] = group_of_keys(p, keys, group + 1);
        for (int64_t query = 0; query < queries; query += WIDTH)
            amx_multiply_panels(w->scores + query * KEYS + group * GROUP % KEYS * WIDTH, rows,
                                group + 1 < end_group ? 2 : 1, (const char *)(w->queries + query * words),
                                words * 4 * LANES, words);
    }
}

/* Keys softened together, relative to `base`. */
struct chunk {
    int64_t base, first, end;
};

/* Positions of keys that a panel's query vectors see. */
struct visible {
    vi from, to;
    int64_t first, all_from, all_to, end; /* first .. end: seen by any; all_from .. all_to: by all */
};

static void find_visible(const struct attention *p, const struct attention_item *item, struct visible *panels)
{
    const int64_t group = group_size(p), first = position_of(p, item->sequence, item->first_row);
    int64_t row = 0, head = 0;
    for (int64_t i = 0; i < padded_queries(p, item); i += LANES) {
        struct visible *visible = panels + i / LANES;
        int32_t from[LANES], to[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            from[lane] = (int32_t)first_visible(p, first + row);
            to[lane] = (int32_t)(first + row + 1);
            advance_query(item, group, &row, &head);
        }
        memcpy(&visible->from, from, sizeof from);
        memcpy(&visible->to, to, sizeof to);
        visible->first = from[0];
        visible->all_from = from[LANES - 1];
        visible->all_to = to[0];
        visible->end = to[LANES - 1];
    }
}

/* Scales the scores of one panel and sets hidden ones to -inf. Returns the queries' maxima. */
INLINE vf scale_scores(const struct attention *p, float *scores, int64_t base, int64_t first, int64_t end,
                       const struct visible *visible, const bool is_masked, const bool is_capped)
{
    const vf hidden = splat(-INFINITY);
    vf maxima[ROWS] = {hidden, hidden, hidden, hidden};
    for (int64_t key = first; key < end; key += ROWS) {
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
            vf score = load(scores, (key + i) * WIDTH, FLOAT32) * p->scaling;
            if (is_capped)
                score = p->softcap * vtanh(score / p->softcap);
            if (is_masked) {
                const vi position = (vi){0} + (int32_t)(base + key + i);
                score = choose((position >= visible->from) & (position < visible->to), score, hidden);
            }
            maxima[i] = vmax(score, maxima[i]);
            store(scores, (key + i) * WIDTH, score, FLOAT32);
        }
    }
    return vmax(vmax(maxima[0], maxima[1]), vmax(maxima[2], maxima[3]));
}

/* Raises the state's maxima and scales its sums down to match; returns the values to subtract from the scores. is_first:
 * there are no sums yet. */
static vf raise_maxima(struct state *state, float *lane_totals, int64_t query, vf maxima, int64_t dim, bool is_first)
{
    const vf old = load(state->maximum, query, FLOAT32), maximum = vmax(old, maxima);
    /* Nothing visible so far: subtract 0, so that exp(-inf) = 0 and not exp(-inf + inf). */
    const vf shift = choose(maximum == -INFINITY, (vf){0}, maximum);
    store(state->maximum, query, maximum, FLOAT32);
    if (is_first)
        return shift;
    float before[LANES], shifts[LANES], decay[LANES];
    store(before, 0, old, FLOAT32);
    store(shifts, 0, shift, FLOAT32);
    bool is_raised = false;
    for (int lane = 0; lane < LANES; lane++) {
        decay[lane] = 1.0f;
        if (before[lane] == state->maximum[query + lane])
            continue;
        is_raised = true;
        decay[lane] = expf(before[lane] - shifts[lane]);
        float *output = state->output + (query + lane) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            store(output, d, load(output, d, FLOAT32) * decay[lane], FLOAT32);
    }
    if (is_raised)
        for (int i = 0; i < GROUP; i++)
            store(lane_totals, i * LANES, load(lane_totals, i * LANES, FLOAT32) * load(decay, 0, FLOAT32), FLOAT32);
    return shift;
}

/* Turns the scores of one panel into exp(score - maximum), hidden ones into 0. lane_totals [GROUP, LANES]: sums over the
 * keys at the same place in a group. */
static void exp_scores(const struct attention *p, struct state *state, float *lane_totals, float *scores, int64_t query,
                       const struct chunk *chunk, const struct visible *visible, bool is_first)
{
    const int64_t base = chunk->base;
    const int64_t first = MAX(visible->first - base, chunk->first) / ROWS * ROWS;
    const int64_t end = MIN(visible->end - base, chunk->end);
    if (first >= end)
        return;
    const bool is_masked = visible->all_from > base + first || visible->all_to < base + end || end % ROWS;
    vf maxima;
    if (p->softcap > 0.0f)
        maxima = scale_scores(p, scores, base, first, end, visible, true, true);
    else if (is_masked)
        maxima = scale_scores(p, scores, base, first, end, visible, true, false);
    else
        maxima = scale_scores(p, scores, base, first, end, visible, false, false);
    const vf shift = raise_maxima(state, lane_totals, query, maxima, p->head_dim, is_first);
    for (int64_t key = first; key < end; key += ROWS) {
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
            const vf probability = vexp(load(scores, (key + i) * WIDTH, FLOAT32) - shift);
            float *total = lane_totals + (key % GROUP + i) * LANES;
            store(total, 0, load(total, 0, FLOAT32) + probability, FLOAT32);
            store(scores, (key + i) * WIDTH, probability, FLOAT32);
        }
    }
}

/* values [KEYS, head_dim] in float32, for the keys first .. end. */
static void load_values(const struct attention *p, const struct keys *keys, int64_t first, int64_t end, float *values)
{
    const int64_t dim = p->head_dim;
    for (int64_t key = first; key < end; key++) {
        const void *row = at(p->v_cache, keys->rows[key / GROUP] + key % GROUP * dim, BFLOAT16);
        for (int64_t d = 0; d < dim; d += LANES)
            store(values, key % KEYS * dim + d, load(row, d, BFLOAT16), FLOAT32);
    }
}

/* For ROWS query vectors, output = (if is_first) or += probabilities [keys, WIDTH] times values [keys, dim], in order of
 * the keys. */
INLINE void add_values(float *output, const float *probabilities, const float *values, int64_t dim, int64_t first,
                       int64_t end, bool is_first, const int vectors)
{
    vf sum[ROWS * 4];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * vectors; i++)
        sum[i] = is_first ? (vf){0} : load(output, i / vectors * dim + i % vectors * LANES, FLOAT32);
    for (int64_t key = first; key < end; key++) {
        vf value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            value[v] = load(values, key * dim + v * LANES, FLOAT32);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * vectors; i++)
            sum[i] += spread(probabilities + key * WIDTH + i / vectors) * value[i % vectors];
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * vectors; i++)
        store(output, i / vectors * dim + i % vectors * LANES, sum[i], FLOAT32);
}

/* NOTE: not inlined, see ADD_ROWS in paged_attention.c. */
#define ADD_VALUES(vectors)                                                                                           \
    static __attribute__((noinline)) void add_values_by_##vectors(float *output, const float *probabilities,          \
                                                                  const float *values, int64_t dim, int64_t first,    \
                                                                  int64_t end, bool is_first)                         \
    {                                                                                                                 \
        add_values(output, probabilities, values, dim, first, end, is_first, vectors);                                \
    }
ADD_VALUES(2)
ADD_VALUES(4)

/* The outputs of the query vectors query .. end_query, ROWS at a time. */
static void add_chunk(const struct attention *p, const struct attention_item *item, struct workspace *w,
                      const struct chunk *chunk, const float *probabilities, int64_t query, int64_t end_query,
                      bool is_first)
{
    const int64_t group = group_size(p), dim = p->head_dim;
    for (; query < end_query; query += ROWS, probabilities += ROWS) {
        const int64_t first_row = item->first_row + query / group;
        const int64_t last_row = item->first_row + (MIN(query + ROWS, end_query) - 1) / group;
        const int64_t first_seen = first_visible(p, position_of(p, item->sequence, first_row)) - chunk->base;
        const int64_t end_seen = position_of(p, item->sequence, last_row) + 1 - chunk->base;
        const int64_t first = MAX(first_seen, chunk->first), end = MIN(end_seen, chunk->end);
        if (first >= end && !is_first)
            continue;
        int64_t d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES)
            add_values_by_4(w->span.output + query * dim + d, probabilities, w->values + d, dim, first, end, is_first);
        for (; d < dim; d += 2 * LANES)
            add_values_by_2(w->span.output + query * dim + d, probabilities, w->values + d, dim, first, end, is_first);
    }
}

/* Adds totals in the order of horizontal_sum. */
static vf sum_totals(const float *lane_totals)
{
    vf level[GROUP];
    for (int i = 0; i < GROUP; i++)
        level[i] = load(lane_totals, i * LANES, FLOAT32);
    for (int size = GROUP / 2; size > 0; size /= 2)
        for (int i = 0; i < size; i++)
            level[i] = level[2 * i] + level[2 * i + 1];
    return level[0];
}

void attend_prompt_span(const struct attention *p, const struct attention_item *item, struct workspace *w)
{
    const int64_t queries = padded_queries(p, item);
    struct visible visible[TILE_QUERIES / LANES];
    find_visible(p, item, visible);
    for (int64_t query = 0; query < queries; query += LANES)
        store(w->span.maximum, query, splat(-INFINITY), FLOAT32);
    memset(w->lane_totals, 0, (size_t)queries * GROUP * sizeof(float));
    amx_begin(AMX_ROWS);
    const struct keys keys = find_keys(p, item);
    int64_t first = keys.first;
    for (bool is_first = true; first < keys.end; is_first = false) {
        const int64_t end = MIN(keys.end, (first / KEYS + 1) * KEYS);
        score_keys(p, &keys, first, end, queries, w);
        load_values(p, &keys, first, end, w->values);
        const int64_t base = first / KEYS * KEYS;
        const struct chunk chunk = {keys.base + base, first - base, end - base};
        for (int64_t query = 0; query < queries; query += WIDTH) {
            float *scores = w->scores + query * KEYS;
            const int64_t end_query = MIN(query + WIDTH, queries);
            for (int64_t panel = query; panel < end_query; panel += LANES)
                exp_scores(p, &w->span, w->lane_totals + panel * GROUP, scores + panel - query, panel, &chunk,
                           visible + panel / LANES, is_first);
            add_chunk(p, item, w, &chunk, scores, query, MIN(end_query, item->rows * group_size(p)), is_first);
        }
        first = end;
    }
    for (int64_t query = 0; query < queries; query += LANES)
        store(w->span.total, query, sum_totals(w->lane_totals + query * GROUP), FLOAT32);
}

#else

bool is_prompt(const struct attention *p, int64_t rows, enum dtype dtype)
{
    (void)p, (void)rows, (void)dtype;
    return false;
}

void load_prompt_queries(const struct attention *p, const struct attention_item *item, float *queries)
{
    (void)p, (void)item, (void)queries;
}

void attend_prompt_span(const struct attention *p, const struct attention_item *item, struct workspace *w)
{
    (void)p, (void)item, (void)w;
}

#endif
