/* Attention of few query vectors in bfloat16, such as a decode row's: the work is to read keys and values as they come.
 *
 * Keys are used as they lie in the cache, 16 of one block at a time. AMX multiplies them in that form, and only queries
 * are transposed. Without AMX, keys are transposed too, in registers, and each lane sums one key's products. Scores,
 * probabilities and totals are [key, query]. Every sum is the one that paged_attention.c computes for the same row.
 *
 * 64 keys and values of 64, three queries, on a Xeon with AMX: 510 ns from L2, 1,150 with the keys transposed. 16
 * sequences of 1,920 keys, 4 kv heads of 64, from memory, two EPYC Zen 4 cores: 1.5 ms, 2.3 with paged_attention.c alone.
 */
#include "decode_attention.h"

#define GROUP AMX_ROWS        /* keys multiplied together: they lie side by side in a block */
#define GROUPS (KEYS / GROUP) /* per chunk */
#define LINE_BYTES 64

#if defined(__AVX512BF16__)

bool is_decode(const struct attention *p, int64_t rows, enum dtype dtype)
{
    return dtype == BFLOAT16 && rows * group_size(p) <= DECODE_QUERIES && p->head_dim % (2 * LANES) == 0 &&
           p->block_size % GROUP == 0;
}

void load_decode_queries(const struct attention *p, const struct attention_item *item, float *queries)
{
    const int64_t group = group_size(p);
    memset(queries, 0, (size_t)(p->head_dim / 2 * DECODE_QUERIES) * sizeof(float));
    for (int64_t i = 0; i < item->rows * group; i++) {
        const int64_t row = p->row_start[item->sequence] + item->first_row + i / group;
        const int64_t head = item->kv_head * group + i % group;
        const char *query = at(p->q, row * p->q_row_stride + head * p->q_head_stride, BFLOAT16);
        for (int64_t word = 0; word < p->head_dim / 2; word++)
            memcpy(queries + word * DECODE_QUERIES + i, query + 4 * word, 4);
    }
}

/* A chunk of an item's keys, relative to `base`. */
struct chunk {
    int64_t base, first, end; /* first .. end are read */
    int64_t num_groups;
    int64_t rows[GROUPS]; /* element offset into the caches of a group's first row */
};

/* The chunk of the item's keys from first_key on. Groups before the first key repeat the rows of that key's group. */
static struct chunk find_chunk(const struct attention *p, const struct attention_item *item, int64_t first_key)
{
    struct chunk chunk = {.base = first_key / KEYS * KEYS};
    chunk.first = first_key - chunk.base;
    chunk.end = MIN(item->end_key - chunk.base, KEYS);
    chunk.num_groups = (chunk.end + GROUP - 1) / GROUP;
    const int64_t first_group = chunk.first / GROUP;
    for (int64_t group = first_group; group < chunk.num_groups; group++) {
        const int64_t key = chunk.base + group * GROUP;
        const int64_t id = p->block_table[item->sequence * p->block_table_stride + key / p->block_size];
        const int64_t block_row = (id * p->num_kv_heads + item->kv_head) * p->block_size;
        chunk.rows[group] = (block_row + key % p->block_size) * p->head_dim;
    }
    for (int64_t group = 0; group < first_group; group++)
        chunk.rows[group] = chunk.rows[first_group];
    return chunk;
}

/* Rows are prefetched while others are used; a group's rows in one cache form one piece. With AMX, all pieces of the next
 * chunk are prefetched together, the first line of each, then the second of each: several streams for a Xeon to run ahead
 * in. */
struct chunk_prefetch {
    const char *pieces[2 * GROUPS];
    int64_t num_pieces, line, num_lines; /* line: the next to prefetch; num_lines: per piece */
    int64_t due, pace;                   /* in 65,536ths of a line: due by now; added with each step */
};

static struct chunk_prefetch start_prefetch(const struct attention *p, const struct chunk *chunk, int64_t num_steps)
{
    struct chunk_prefetch prefetch = {.num_lines = GROUP * p->head_dim * (int64_t)size_of(BFLOAT16) / LINE_BYTES};
    for (int64_t group = 0; group < chunk->num_groups; group++) {
        prefetch.pieces[prefetch.num_pieces++] = at(p->k_cache, chunk->rows[group], BFLOAT16);
        prefetch.pieces[prefetch.num_pieces++] = at(p->v_cache, chunk->rows[group], BFLOAT16);
    }
    prefetch.pace = (prefetch.num_lines << 16) / num_steps + 1;
    return prefetch;
}

INLINE void prefetch_due_lines(struct chunk_prefetch *prefetch)
{
    prefetch->due += prefetch->pace;
    for (; prefetch->line < MIN(prefetch->due >> 16, prefetch->num_lines); prefetch->line++)
        for (int64_t i = 0; i < prefetch->num_pieces; i++)
            __builtin_prefetch(prefetch->pieces[i] + prefetch->line * LINE_BYTES, 0, 2);
}

/* A group's keys, and what is prefetched meanwhile. */
struct key_group {
    const void *keys;
    const void *next;   /* next keys, from L2: 16 sequences of 1,920 keys took 5 % longer without */
    const char *values; /* of these keys, line by line */
};

/* scores [GROUP, DECODE_QUERIES] = keys [GROUP, words] times queries. A lane sums one key's products, word after word. */
INLINE void score_group(float *scores, const struct key_group *group, const float *queries, int64_t words,
                        const int count)
{
    vf sum[DECODE_QUERIES] = {{0}};
    for (int64_t word = 0; word < words; word += LANES) {
        vf square[GROUP];
#pragma GCC unroll 16
        for (int i = 0; i < GROUP; i++) {
            __builtin_prefetch(group->values + (word + i) * LINE_BYTES, 0, 2);
            __builtin_prefetch(at(group->next, i * words + word, FLOAT32), 0, 3);
            square[i] = load(group->keys, i * words + word, FLOAT32);
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
            for (int query = 0; query < count; query++)
                sum[query] = multiply_add(sum[query], spread(queries + (word + i) * DECODE_QUERIES + query), square[i],
                                          BFLOAT16);
    }
    const vf even[] = {SHUFFLE(sum[0], sum[2], LOW), SHUFFLE(sum[0], sum[2], HIGH)};
    const vf odd[] = {SHUFFLE(sum[1], sum[3], LOW), SHUFFLE(sum[1], sum[3], HIGH)};
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        store(scores, 2 * half * LANES, SHUFFLE(even[half], odd[half], LOW), FLOAT32);
        store(scores, (2 * half + 1) * LANES, SHUFFLE(even[half], odd[half], HIGH), FLOAT32);
    }
}

/* NOTE: not inlined, see TILE_FUNCTION in tile_products.h. */
#define SCORE_GROUPS(count)                                                                                           \
    static __attribute__((noinline)) void score_groups_for_##count(                                                   \
        float *scores, const struct key_group *groups, int64_t num_groups, const float *queries, int64_t words)       \
    {                                                                                                                 \
        for (int64_t i = 0; i < num_groups; i++)                                                                      \
            score_group(scores + i * GROUP * DECODE_QUERIES, groups + i, queries, words, count);                      \
    }
SCORE_GROUPS(1)
SCORE_GROUPS(2)
SCORE_GROUPS(3)
SCORE_GROUPS(4)

/* amx_score_keys without AMX. */
static void score_groups(const struct attention *p, const struct chunk *chunk, const void *const *keys,
                         const struct workspace *w, int64_t queries)
{
    static void (*const score[])(float *, const struct key_group *, int64_t, const float *, int64_t) = {
        NULL, score_groups_for_1, score_groups_for_2, score_groups_for_3, score_groups_for_4};
    struct key_group groups[GROUPS];
    for (int64_t i = 0; i < chunk->num_groups; i++)
        groups[i] = (struct key_group){keys[i], keys[MIN(i + 1, chunk->num_groups - 1)],
                                       at(p->v_cache, chunk->rows[i], BFLOAT16)};
    score[queries](w->scores, groups, chunk->num_groups, w->queries, p->head_dim / 2);
}

/* scores [KEYS, DECODE_QUERIES] = keys times queries. A group with rows that must not be read is replaced by a copy of
 * its other rows. */
static void score_keys(const struct attention *p, const struct chunk *chunk, const struct workspace *w, int64_t queries)
{
    const int64_t row_bytes = p->head_dim * (int64_t)size_of(BFLOAT16);
    const void *groups[GROUPS];
    for (int64_t group = 0; group < chunk->num_groups; group++) {
        const char *keys = at(p->k_cache, chunk->rows[group], BFLOAT16);
        const int64_t first = MAX(chunk->first - group * GROUP, 0), end = MIN(chunk->end - group * GROUP, GROUP);
        groups[group] = keys;
        if (first == 0 && end == GROUP)
            continue;
        char *copy = (char *)w->keys + group * GROUP * row_bytes;
        groups[group] = copy;
        if (first < end)
            memcpy(copy + first * row_bytes, keys + first * row_bytes, (size_t)((end - first) * row_bytes));
    }
    if (amx_is_on())
        amx_score_keys(w->scores, groups, (int)chunk->num_groups, (const uint32_t *)w->queries, p->head_dim / 2);
    else
        score_groups(p, chunk, groups, w, queries);
}

/* Positions of keys that each lane's query sees. */
struct visible {
    vi from, to;
};

static struct visible find_visible(const struct attention *p, const struct attention_item *item, int64_t queries)
{
    struct visible visible;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t row = item->first_row + MIN(lane % DECODE_QUERIES, queries - 1) / group_size(p);
        const int64_t position = position_of(p, item->sequence, row);
        visible.from[lane] = (int32_t)first_visible(p, position);
        visible.to[lane] = (int32_t)MIN(position + 1, item->end_key);
    }
    return visible;
}

/* Scales scores and sets hidden ones to -inf. Returns partial maxima, each lane's of one query. */
static vf scale_scores(const struct attention *p, float *scores, const struct chunk *chunk,
                       const struct visible *visible)
{
    vi key;
    for (int lane = 0; lane < LANES; lane++)
        key[lane] = (int32_t)chunk->base + lane / DECODE_QUERIES;
    const vf hidden = splat(-INFINITY);
    vf maxima = hidden;
    for (int64_t i = 0; i < chunk->num_groups * GROUP * DECODE_QUERIES; i += LANES) {
        vf score = load(scores, i, FLOAT32) * p->scaling;
        if (p->softcap > 0.0f)
            score = p->softcap * vtanh(score / p->softcap);
        score = choose((key >= visible->from) & (key < visible->to), score, hidden);
        maxima = vmax(score, maxima);
        store(scores, i, score, FLOAT32);
        key += LANES / DECODE_QUERIES;
    }
    return maxima;
}

/* Raises the state's maxima and scales its sums down to match; returns the value to subtract from each lane's scores. */
static vf raise_maxima(struct state *state, vf *totals, vf maxima, int64_t queries, int64_t dim)
{
    float here[LANES], shift[LANES], decay[LANES];
    memcpy(here, &maxima, sizeof here);
    bool is_raised = false;
    for (int i = 0; i < DECODE_QUERIES; i++) {
        const float old = i < queries ? state->maximum[i] : -INFINITY;
        float maximum = old;
        for (int lane = i; lane < LANES; lane += DECODE_QUERIES)
            maximum = MAX(maximum, here[lane]);
        /* Nothing visible so far: subtract 0, so that exp(-inf) = 0 and not exp(-inf + inf). */
        const float shift_here = maximum == -INFINITY ? 0.0f : maximum;
        const float decay_here = maximum == old ? 1.0f : expf(old - shift_here);
        for (int lane = i; lane < LANES; lane += DECODE_QUERIES) {
            shift[lane] = shift_here;
            decay[lane] = decay_here;
        }
        if (i >= queries || maximum == old)
            continue;
        is_raised = true;
        state->maximum[i] = maximum;
        float *output = state->output + i * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            store(output, d, load(output, d, FLOAT32) * decay_here, FLOAT32);
    }
    if (is_raised)
        for (int i = 0; i < DECODE_QUERIES; i++)
            totals[i] *= load(decay, 0, FLOAT32);
    return load(shift, 0, FLOAT32);
}

/* Turns scores into exp(score - shift). totals [GROUP, DECODE_QUERIES]: sums over the keys at the same place in a group. */
static void exp_scores(float *scores, vf *totals, vf shift, int64_t num_groups)
{
    for (int64_t group = 0; group < num_groups; group++)
#pragma GCC unroll 4
        for (int i = 0; i < DECODE_QUERIES; i++) {
            float *some = scores + group * GROUP * DECODE_QUERIES + i * LANES;
            const vf probability = vexp(load(some, 0, FLOAT32) - shift);
            totals[i] += probability;
            store(some, 0, probability, FLOAT32);
        }
}

/* One group's values, and what is prefetched meanwhile: with AMX, any part of the next chunk, otherwise some of its keys. */
struct value_group {
    const char *values;
    int64_t row_bytes, first, end; /* rows that are read */
    const float *probabilities;    /* [GROUP, DECODE_QUERIES] */
    struct chunk_prefetch *prefetch;         /* with AMX */
    const char *const *pieces;     /* without */
    int64_t num_pieces;
};

/* Prefetches the lines of pieces that are due with a key's elements from d on: each line once, in order, as an EPYC Zen 4
 * runs ahead of them. NOTE: counting lines, as with AMX, takes that CPU longer than multiplying. */
INLINE void prefetch_keys(const struct value_group *group, int64_t d, int64_t key, const int vectors)
{
    for (int64_t i = 0; i < group->num_pieces; i++)
#pragma GCC unroll 2
        for (int line = 0; line < vectors / 2; line++)
            __builtin_prefetch(group->pieces[i] + (d / 2 + key * (vectors / 2) + line) * LINE_BYTES, 0, 2);
}

/* output += probabilities * values. A word holds an even and an odd element, which are kept apart until the end of the
 * span: output is [queries, dim / 2 / LANES, even or odd, LANES]. */
INLINE void add_values(float *output, int64_t dim, const struct value_group *group, int64_t d, const int queries,
                       const int vectors, const bool with_amx)
{
    vf sum[DECODE_QUERIES * 4];
#pragma GCC unroll 16
    for (int i = 0; i < queries * vectors; i++)
        sum[i] = load(output, i / vectors * dim + d + i % vectors * LANES, FLOAT32);
    for (int64_t key = 0; key < GROUP; key++) {
        if (with_amx)
            prefetch_due_lines(group->prefetch);
        else
            prefetch_keys(group, d, key, vectors);
        if (key < group->first || key >= group->end)
            continue;
        vf value[4];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v += 2) {
            const vu words = (vu)load(group->values + key * group->row_bytes + 2 * d, v * LANES / 2, FLOAT32);
            value[v] = (vf)(words << 16);
            value[v + 1] = (vf)(words & 0xffff0000u);
        }
#pragma GCC unroll 16
        for (int i = 0; i < queries * vectors; i++)
            sum[i] += group->probabilities[key * DECODE_QUERIES + i / vectors] * value[i % vectors];
    }
#pragma GCC unroll 16
    for (int i = 0; i < queries * vectors; i++)
        store(output, i / vectors * dim + d + i % vectors * LANES, sum[i], FLOAT32);
}

/* NOTE: not inlined, see TILE_FUNCTION in tile_products.h. */
#define ADD_VALUES(name, queries, with_amx)                                                                           \
    static __attribute__((noinline)) void name(float *output, int64_t dim, const struct value_group *group)           \
    {                                                                                                                 \
        int64_t d = 0;                                                                                                \
        for (; d + 4 * LANES <= dim; d += 4 * LANES)                                                                  \
            add_values(output, dim, group, d, queries, 4, with_amx);                                                  \
        for (; d < dim; d += 2 * LANES)                                                                               \
            add_values(output, dim, group, d, queries, 2, with_amx);                                                  \
    }
ADD_VALUES(add_values_of_1, 1, false)
ADD_VALUES(add_values_of_2, 2, false)
ADD_VALUES(add_values_of_3, 3, false)
ADD_VALUES(add_values_of_4, 4, false)
ADD_VALUES(add_values_of_1_with_amx, 1, true)
ADD_VALUES(add_values_of_2_with_amx, 2, true)
ADD_VALUES(add_values_of_3_with_amx, 3, true)
ADD_VALUES(add_values_of_4_with_amx, 4, true)

static void add_chunk(const struct attention *p, float *output, int64_t queries, const struct chunk *chunk,
                      const struct chunk *next, const float *probabilities)
{
    static void (*const add[][DECODE_QUERIES + 1])(float *, int64_t, const struct value_group *) = {
        {NULL, add_values_of_1, add_values_of_2, add_values_of_3, add_values_of_4},
        {NULL, add_values_of_1_with_amx, add_values_of_2_with_amx, add_values_of_3_with_amx, add_values_of_4_with_amx}};
    const int64_t passes = p->head_dim / (4 * LANES) + p->head_dim % (4 * LANES) / (2 * LANES); /* over each value */
    struct chunk_prefetch prefetch = start_prefetch(p, next, chunk->num_groups * GROUP * passes);
    const char *keys[GROUPS];
    for (int64_t i = 0; i < next->num_groups; i++)
        keys[i] = at(p->k_cache, next->rows[i], BFLOAT16);
    for (int64_t i = 0, prefetched = 0; i < chunk->num_groups; i++) {
        const int64_t prefetched_then = (i + 1) * next->num_groups / chunk->num_groups;
        const struct value_group group = {
            .values = at(p->v_cache, chunk->rows[i], BFLOAT16),
            .row_bytes = p->head_dim * (int64_t)size_of(BFLOAT16),
            .first = chunk->first - i * GROUP, .end = chunk->end - i * GROUP,
            .probabilities = probabilities + i * GROUP * DECODE_QUERIES,
            .prefetch = &prefetch,
            .pieces = keys + prefetched, .num_pieces = prefetched_then - prefetched,
        };
        prefetched = prefetched_then;
        add[amx_is_on()][queries](output, p->head_dim, &group);
    }
}

/* Brings totals and outputs into paged_attention.c's layout. */
static void end_span(struct state *state, const vf *totals, int64_t queries, int64_t dim)
{
    for (int64_t i = 0; i < queries; i++) {
        vf total;
        for (int key = 0; key < GROUP; key++)
            total[key] = totals[key / DECODE_QUERIES][key % DECODE_QUERIES * DECODE_QUERIES + i];
        state->total[i] = horizontal_sum(total);
        for (int64_t d = i * dim; d < (i + 1) * dim; d += 2 * LANES) {
            const vf even = load(state->output, d, FLOAT32), odd = load(state->output, d + LANES, FLOAT32);
            store(state->output, d, SHUFFLE(even, odd, LOW), FLOAT32);
            store(state->output, d + LANES, SHUFFLE(even, odd, HIGH), FLOAT32);
        }
    }
}

void attend_decode_span(const struct attention *p, const struct attention_item *item,
                        const struct attention_item *following, struct workspace *w)
{
    const int64_t queries = item->rows * group_size(p), dim = p->head_dim;
    const struct visible visible = find_visible(p, item, queries);
    vf totals[DECODE_QUERIES] = {{0}};
    memset(w->span.output, 0, (size_t)(queries * dim) * sizeof(float));
    for (int64_t i = 0; i < queries; i++)
        w->span.maximum[i] = -INFINITY;
    if (amx_is_on())
        amx_begin_scores();
    struct chunk chunk = find_chunk(p, item, item->first_key), next;
    for (int64_t end = 0; end < item->end_key; chunk = next) {
        end = chunk.base + chunk.end;
        if (end < item->end_key)
            next = find_chunk(p, item, end);
        else if (following)
            next = find_chunk(p, following, following->first_key);
        else
            next = (struct chunk){0};
        score_keys(p, &chunk, w, queries);
        const vf maxima = scale_scores(p, w->scores, &chunk, &visible);
        const vf shift = raise_maxima(&w->span, totals, maxima, queries, dim);
        exp_scores(w->scores, totals, shift, chunk.num_groups);
        add_chunk(p, w->span.output, queries, &chunk, &next, w->scores);
    }
    end_span(&w->span, totals, queries, dim);
}

#else

bool is_decode(const struct attention *p, int64_t rows, enum dtype dtype)
{
    (void)p, (void)rows, (void)dtype;
    return false;
}

void load_decode_queries(const struct attention *p, const struct attention_item *item, float *queries)
{
    (void)p, (void)item, (void)queries;
}

void attend_decode_span(const struct attention *p, const struct attention_item *item,
                        const struct attention_item *following, struct workspace *w)
{
    (void)p, (void)item, (void)following, (void)w;
}

#endif
