/* The gated delta rule: state *= decay; state += k beta (v - kᵀ state); output = qᵀ state. In float32.
 *
 * Columns of a state do not depend on each other. A tile of columns is copied to scratch memory that fits into the L1
 * cache and stays there for a block of rows. One pass over the tile updates it for a row, multiplies it by the row's query
 * and by the next row's key. The decay is taken out of the latter product: kᵀ (decay state) = decay kᵀ state.
 */
#include <math.h>

#include "recurrent.h"

#define EPS 1e-6f
#define BLOCK_ROWS 32
#define WIDE (TILE_VECTORS == 8 ? 2 : 4) /* vectors of a tile: 64 columns of 128 keys are 32 KB with AVX-512 */
#define PARALLEL_ELEMENTS (64 << 10)     /* of states, times the rows */

/* Strides in elements; rows of q, k and v are [heads, dim], dense in the last dimension. */
struct gated_delta_rule {
    const void *q;
    int64_t q_row_stride, q_head_stride;
    const void *k;
    int64_t k_row_stride, k_head_stride;
    const void *v;
    int64_t v_row_stride, v_head_stride;
    const float *log_decay;
    int64_t log_decay_stride;
    const void *beta;
    int64_t beta_stride;
    float *state; /* dense [num_slots, num_v_heads, k_dim, v_dim] */
    void *out;    /* dense [total_rows, num_v_heads, v_dim] */
    int64_t num_k_heads, num_v_heads, k_dim, v_dim, normalize;
    struct sequences sequences;
};

/* A thread's scratch memory; queries and keys of a block's rows: [BLOCK_ROWS, k_dim]. */
struct workspace {
    float *decays, *betas, *queries, *keys;
    float *tile; /* [k_dim, columns of the tile] */
};

static struct workspace workspace_in(const struct gated_delta_rule *p, char *memory, size_t *used)
{
    struct workspace w;
    w.decays = reserve(memory, used, MAX(BLOCK_ROWS, LANES) * sizeof(float));
    w.betas = reserve(memory, used, BLOCK_ROWS * sizeof(float));
    w.queries = reserve(memory, used, (size_t)(BLOCK_ROWS * p->k_dim) * sizeof(float));
    w.keys = reserve(memory, used, (size_t)(BLOCK_ROWS * p->k_dim) * sizeof(float));
    w.tile = reserve(memory, used, (size_t)(p->k_dim * WIDE * LANES) * sizeof(float));
    return w;
}

static size_t workspace_bytes(const struct gated_delta_rule *p)
{
    size_t bytes = 0;
    workspace_in(p, NULL, &bytes);
    return bytes;
}

/* y <- x * scale, first divided by its length if `normalize`. */
INLINE void widen_vector(float *y, const void *x, int64_t size, float scale, bool normalize, const enum dtype dtype)
{
    vf squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const vf value = load_upto(x, i, size - i, dtype);
        squares = fused(value, value, squares);
        store_upto(y, i, size - i, value, FLOAT32);
    }
    if (normalize)
        scale /= sqrtf(horizontal_sum(squares) + EPS);
    for (int64_t i = 0; i < size; i += LANES)
        store_upto(y, i, size - i, load_upto(y, i, size - i, FLOAT32) * scale, FLOAT32);
}

INLINE void widen_rows(const struct gated_delta_rule *p, int64_t first_row, int64_t num_rows, int64_t head,
                       const struct workspace *w, const enum dtype dtype)
{
    const int64_t k_head = head / (p->num_v_heads / p->num_k_heads);
    const float scale = 1.0f / sqrtf((float)p->k_dim);
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t row = first_row + i;
        const void *q = at(p->q, row * p->q_row_stride + k_head * p->q_head_stride, dtype);
        const void *k = at(p->k, row * p->k_row_stride + k_head * p->k_head_stride, dtype);
        if (row + BLOCK_ROWS < p->sequences.total_rows) {
            const void *v = at(p->v, row * p->v_row_stride + head * p->v_head_stride, dtype);
            prefetch(at(q, BLOCK_ROWS * p->q_row_stride, dtype), p->k_dim, dtype);
            prefetch(at(k, BLOCK_ROWS * p->k_row_stride, dtype), p->k_dim, dtype);
            prefetch(at(v, BLOCK_ROWS * p->v_row_stride, dtype), p->v_dim, dtype);
        }
        widen_vector(w->queries + i * p->k_dim, q, p->k_dim, scale, p->normalize, dtype);
        widen_vector(w->keys + i * p->k_dim, k, p->k_dim, 1.0f, p->normalize, dtype);
        w->decays[i] = p->log_decay[row * p->log_decay_stride + head];
        w->betas[i] = load_one(p->beta, row * p->beta_stride + head, dtype);
    }
    exp_each(w->decays, num_rows);
}

/* The last tiles have one vector, which may be partial; the others are WIDE. */
INLINE vf load_columns(const void *base, int64_t index, int64_t count, const int vectors, const enum dtype dtype)
{
    return vectors == 1 ? load_upto(base, index, count, dtype) : load(base, index, dtype);
}

INLINE void store_columns(void *base, int64_t index, int64_t count, vf value, const int vectors, const enum dtype dtype)
{
    if (vectors == 1)
        store_upto(base, index, count, value, dtype);
    else
        store(base, index, value, dtype);
}

/* Loads a tile and multiplies it by the first key. */
INLINE void load_tile(const struct gated_delta_rule *p, const float *from, int64_t left, const struct workspace *w,
                      vf *products, const int vectors)
{
    for (int64_t i = 0; i < p->k_dim; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const vf columns = load_columns(from, i * p->v_dim + v * LANES, left, vectors, FLOAT32);
            store(w->tile, (i * vectors + v) * LANES, columns, FLOAT32);
            products[v] = fused(spread(w->keys + i), columns, products[v]);
        }
}

/* Updates the tile for row i of a block, multiplies it by the row's query, and by the key of the next row if the tile
 * stays; otherwise stores it. */
INLINE void update_tile(const struct gated_delta_rule *p, const struct workspace *w, int64_t i, const vf *deltas,
                        vf *outputs, vf *products, float *to, int64_t left, const bool stays, const int vectors)
{
    const float *key = w->keys + i * p->k_dim, *query = w->queries + i * p->k_dim, decay = w->decays[i];
    for (int v = 0; v < vectors; v++)
        outputs[v] = products[v] = (vf){0};
    for (int64_t j = 0; j < p->k_dim; j++) {
        const vf of_key = spread(key + j), of_query = spread(query + j);
        const vf of_next = stays ? spread(key + p->k_dim + j) : (vf){0};
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *columns = w->tile + (j * vectors + v) * LANES;
            const vf updated = fused(of_key, deltas[v], load(columns, 0, FLOAT32) * decay);
            outputs[v] = fused(of_query, updated, outputs[v]);
            if (stays) {
                store(columns, 0, updated, FLOAT32);
                products[v] = fused(of_next, updated, products[v]);
            } else {
                store_columns(to, j * p->v_dim + v * LANES, left, updated, vectors, FLOAT32);
            }
        }
    }
}

/* The block's rows, for `vectors` vectors of columns. */
INLINE void compute_tile(const struct gated_delta_rule *p, const struct row_block *block, int64_t head, int64_t column,
                         const struct workspace *w, const int vectors, const enum dtype dtype)
{
    const struct sequences *s = &p->sequences;
    const int64_t v_dim = p->v_dim, left = v_dim - column, num_rows = block->end - block->start;
    const int64_t slot_size = p->num_v_heads * p->k_dim * v_dim, place = head * p->k_dim * v_dim + column;
    float *to = p->state + s->write[block->sequence] * slot_size + place;
    vf products[WIDE] = {{0}}, deltas[WIDE], outputs[WIDE];
    if (block->read < 0)
        memset(w->tile, 0, (size_t)(p->k_dim * vectors * LANES) * sizeof(float));
    else
        load_tile(p, p->state + block->read * slot_size + place, left, w, products, vectors);
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t row = s->row_start[block->sequence] + block->start + i;
        const void *values = at(p->v, row * p->v_row_stride + head * p->v_head_stride + column, dtype);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const vf value = load_columns(values, v * LANES, left, vectors, dtype);
            deltas[v] = fused(splat(-w->decays[i]), products[v], value) * w->betas[i];
        }
        if (i + 1 < num_rows)
            update_tile(p, w, i, deltas, outputs, products, to, left, true, vectors);
        else
            update_tile(p, w, i, deltas, outputs, products, to, left, false, vectors);
        void *out = (void *)at(p->out, (row * p->num_v_heads + head) * v_dim + column, dtype);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            store_columns(out, v * LANES, left, outputs[v], vectors, dtype);
    }
    if (block->save >= 0)
        for (int64_t i = 0; i < p->k_dim; i++)
            memmove(p->state + block->save * slot_size + place + i * v_dim, to + i * v_dim,
                    (size_t)MIN(left, vectors * LANES) * sizeof(float));
}

static int64_t num_wide(const struct gated_delta_rule *p) { return p->v_dim / (WIDE * LANES); }

static int64_t num_tiles(const struct gated_delta_rule *p)
{
    return num_wide(p) + (p->v_dim - num_wide(p) * WIDE * LANES + LANES - 1) / LANES;
}

INLINE void compute_head(const struct gated_delta_rule *p, int64_t sequence, int64_t head, int64_t first_tile,
                         int64_t end_tile, const struct workspace *w, const enum dtype dtype)
{
    const struct sequences *s = &p->sequences;
    const int64_t wide = num_wide(p);
    for (int64_t start = 0; start < s->num_rows[sequence];) {
        const struct row_block block = block_of(s, sequence, start, BLOCK_ROWS);
        widen_rows(p, s->row_start[sequence] + block.start, block.end - block.start, head, w, dtype);
        for (int64_t tile = first_tile; tile < end_tile; tile++)
            if (tile < wide)
                compute_tile(p, &block, head, tile * WIDE * LANES, w, WIDE, dtype);
            else
                compute_tile(p, &block, head, (wide * WIDE + tile - wide) * LANES, w, 1, dtype);
        start = block.end;
    }
}

struct delta_call {
    const struct gated_delta_rule *p;
    int64_t num_parts; /* of the tiles of a head */
    char *workspaces;
    enum dtype dtype;
};

static void delta_region(struct team *team, void *argument)
{
    const struct delta_call *call = argument;
    const struct gated_delta_rule *p = call->p;
    const int64_t parts = call->num_parts, tiles = num_tiles(p);
    size_t used = 0;
    const struct workspace w = workspace_in(p, call->workspaces + (size_t)team->thread * workspace_bytes(p), &used);
    struct work work = start_work(team, p->sequences.num_sequences * p->num_v_heads * parts);
    for (int64_t item; take(team, &work, &item);) {
        const int64_t part = item % parts, head = item / parts % p->num_v_heads, sequence = item / parts / p->num_v_heads;
        const int64_t first = tiles * part / parts, end = tiles * (part + 1) / parts;
        if (call->dtype == BFLOAT16)
            compute_head(p, sequence, head, first, end, &w, BFLOAT16);
        else
            compute_head(p, sequence, head, first, end, &w, FLOAT32);
    }
}

EXPORT int gated_delta_rule(const struct gated_delta_rule *p, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const enum status status = check_sequences(&p->sequences);
    if (status != OK)
        return status;
    if (count_rows(&p->sequences) * p->num_v_heads * p->k_dim * p->v_dim <= PARALLEL_ELEMENTS)
        num_threads = 1;
    keep_states(&p->sequences, p->state, p->num_v_heads * p->k_dim * p->v_dim);
    char *workspaces = grow_scratch(&scratch, &capacity, (size_t)num_threads * workspace_bytes(p));
    if (!workspaces)
        return OUT_OF_MEMORY;
    const int64_t num_heads = p->sequences.num_sequences * p->num_v_heads;
    struct delta_call call = {p, parts_of(num_heads, num_tiles(p), num_threads), workspaces, (enum dtype)dtype};
    return run_beside(num_threads, 1, delta_region, &call) ? OK : OUT_OF_MEMORY;
}
