/* Multi-head latent attention with the up-projection absorbed: keys' half is applied to queries, values' half to what
 * attention returns, so that the KV cache holds one latent per token instead of keys and values of every head.
 *
 * A work item is a head and a block of rows, whose weights stay in L2. Inputs and sums are float32 and every sum has one
 * fixed order, so a row's result does not depend on its batch.
 *
 * LoRA is two products more, for each head: A times the latents that a head's weights have summed, or the head's columns of
 * B times its query. At rank 16 that is a sixth of the base's product with keys of 128, at rank 64 two thirds.
 */
#include "lora_add.h"

#define ROW_BLOCK 16
#define TILE_ROWS 4
#define TILE_WIDTH (TILE_VECTORS / TILE_ROWS) /* vectors of columns, or outputs, of a tile */
#define PARALLEL_WORK 16384                   /* multiply-adds; below this a second thread costs more than it saves */

/* Strides in elements. */
struct latent {
    const void *x; /* absorb_keys: [num_rows, num_heads, key_dim + rotary_dim]; expand_values: latents first */
    int64_t x_row_stride, x_head_stride;
    const void *weight; /* dense [num_heads, key_dim + value_dim, latent_dim] */
    void *out;          /* dense [num_rows, num_heads, latent_dim + rotary_dim, or value_dim] */
    int64_t num_rows, num_heads, key_dim, value_dim, latent_dim, rotary_dim;
    const struct group *group;
    const struct table *table; /* NULL: no row has an adapter */
    const int32_t *segment_start, *segment_adapter;
    int64_t num_segments;
};

/* One row's adapter for the up-projection. */
struct adapter {
    int64_t rank; /* 0 = none */
    const void *a, *b;
    float scaling;
    const float *magnitude; /* factors of all outputs, then their shifts; NULL without DoRA */
};

/* A thread's scratch memory; rows are padded with zeros to whole vectors. */
struct workspace {
    float *in, *out; /* [ROW_BLOCK, in_stride or out_stride] */
    float *hidden;   /* [TILE_ROWS, max_rank] */
};

struct latent_call {
    const struct latent *p;
    const int32_t *slots; /* of each row; NULL: no row has an adapter */
    char *workspaces;
    size_t workspace_bytes;
    int64_t in_dim, out_dim, max_rank;
    bool absorbs; /* absorb_keys, otherwise expand_values */
    enum dtype dtype;
};

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

static struct workspace workspace_in(const struct latent_call *call, char *memory, size_t *used)
{
    struct workspace w;
    w.in = reserve(memory, used, (size_t)(ROW_BLOCK * padded(call->in_dim)) * sizeof(float));
    w.out = reserve(memory, used, (size_t)(ROW_BLOCK * padded(call->out_dim)) * sizeof(float));
    w.hidden = reserve(memory, used, (size_t)(TILE_ROWS * call->max_rank) * sizeof(float));
    return w;
}

static struct adapter adapter_of(const struct latent_call *call, int64_t row)
{
    const struct table *table = call->p->table;
    const int64_t slot = call->slots ? call->slots[row] : -1;
    if (slot < 0)
        return (struct adapter){0};
    const int64_t entry = slot * table->stride_members, rank = table->lora_rank[entry];
    if (rank == 0)
        return (struct adapter){0};
    const int64_t magnitude = table->offset_magnitude ? table->offset_magnitude[entry] : -1;
    return (struct adapter){
        .rank = rank,
        .a = at(table->arena, table->offset_a[slot * table->stride_a], call->dtype),
        .b = at(table->arena, table->offset_b[entry], call->dtype),
        .scaling = table->scaling[entry],
        .magnitude = magnitude < 0 ? NULL : (const float *)table->arena + magnitude / table->elements_per_float,
    };
}

/* sums [rows, outputs] = dot products of rows of x with rows of w. */
INLINE void dot_tile(float *sums, int64_t sums_stride, const float *x, int64_t x_stride, const void *w, int64_t w_stride,
                     int64_t depth, const int rows, const int outputs, const enum dtype dtype)
{
    vf sum[TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * outputs; i++)
        sum[i] = (vf){0};
    for (int64_t k = 0; k < depth; k += LANES) {
        vf input[TILE_ROWS];
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++)
            input[row] = load(x, row * x_stride + k, FLOAT32);
#pragma GCC unroll 4
        for (int output = 0; output < outputs; output++) {
            const vf weight = load_upto(w, output * w_stride + k, depth - k, dtype);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
                sum[row * outputs + output] = fused(input[row], weight, sum[row * outputs + output]);
        }
    }
    float totals[TILE_VECTORS];
    horizontal_sums(totals, sum, rows * outputs);
    for (int row = 0; row < rows; row++)
        memcpy(sums + row * sums_stride, totals + row * outputs, (size_t)outputs * sizeof(float));
}

INLINE void dot_rows(float *sums, int64_t sums_stride, const float *x, int64_t x_stride, const void *w, int64_t w_stride,
                     int64_t depth, int64_t outputs, const int rows, const enum dtype dtype)
{
    int64_t output = 0;
    for (; output + TILE_WIDTH <= outputs; output += TILE_WIDTH)
        dot_tile(sums + output, sums_stride, x, x_stride, at(w, output * w_stride, dtype), w_stride, depth, rows,
                 TILE_WIDTH, dtype);
    for (; output < outputs; output++)
        dot_tile(sums + output, sums_stride, x, x_stride, at(w, output * w_stride, dtype), w_stride, depth, rows, 1,
                 dtype);
}

/* y [rows, vectors * LANES] += x [rows, depth] times w; only the first `count` columns of the last vector exist. */
INLINE void combine_tile(float *y, int64_t y_stride, const float *x, int64_t x_stride, const void *w, int64_t w_stride,
                         int64_t depth, int64_t count, const int rows, const int vectors, const enum dtype dtype)
{
    vf sum[TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++)
        sum[i] = load(y, i / vectors * y_stride + i % vectors * LANES, FLOAT32);
    for (int64_t k = 0; k < depth; k++) {
        vf weight[TILE_WIDTH];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            weight[v] = vectors > 1 ? load(w, k * w_stride + v * LANES, dtype)
                                    : load_upto(w, k * w_stride, count, dtype);
#pragma GCC unroll 16
        for (int i = 0; i < rows * vectors; i++)
            sum[i] = fused(spread(x + i / vectors * x_stride + k), weight[i % vectors], sum[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++)
        store(y, i / vectors * y_stride + i % vectors * LANES, sum[i], FLOAT32);
}

INLINE void combine_rows(float *y, int64_t y_stride, const float *x, int64_t x_stride, const void *w, int64_t w_stride,
                         int64_t depth, int64_t columns, const int rows, const enum dtype dtype)
{
    int64_t column = 0;
    for (; column + TILE_WIDTH * LANES <= columns; column += TILE_WIDTH * LANES)
        combine_tile(y + column, y_stride, x, x_stride, at(w, column, dtype), w_stride, depth, LANES, rows, TILE_WIDTH,
                     dtype);
    for (; column < columns; column += LANES)
        combine_tile(y + column, y_stride, x, x_stride, at(w, column, dtype), w_stride, depth, columns - column, rows, 1,
                     dtype);
}

/* The base's product for `rows` rows of the block. weight: of the item's head and half. */
INLINE void multiply_rows(const struct latent_call *call, float *out, const float *in, const void *weight, const int rows,
                          const enum dtype dtype)
{
    const int64_t in_stride = padded(call->in_dim), out_stride = padded(call->out_dim);
    const int64_t latent_dim = call->p->latent_dim;
    if (call->absorbs)
        combine_rows(out, out_stride, in, in_stride, weight, latent_dim, call->in_dim, latent_dim, rows, dtype);
    else
        dot_rows(out, out_stride, in, in_stride, weight, latent_dim, latent_dim, call->out_dim, rows, dtype);
}

/* out += scaling * LoRA of `rows` rows of one adapter. first: the first of the item's columns of B. */
INLINE void add_lora(const struct latent_call *call, const struct adapter *adapter, float *out, const float *in,
                     float *hidden, int64_t first, const int rows, const enum dtype dtype)
{
    const struct latent *p = call->p;
    const int64_t in_stride = padded(call->in_dim), out_stride = padded(call->out_dim), rank = adapter->rank;
    const int64_t columns = p->num_heads * (p->key_dim + p->value_dim), latent_dim = p->latent_dim;
    const void *b = at(adapter->b, first, dtype);
    if (call->absorbs)
        dot_rows(hidden, rank, in, in_stride, b, columns, p->key_dim, rank, rows, dtype);
    else
        dot_rows(hidden, rank, in, in_stride, adapter->a, latent_dim, latent_dim, rank, rows, dtype);
    for (int64_t i = 0; i < rows * rank; i++)
        hidden[i] *= adapter->scaling;
    if (call->absorbs)
        combine_rows(out, out_stride, hidden, rank, adapter->a, latent_dim, rank, latent_dim, rows, dtype);
    else
        combine_rows(out, out_stride, hidden, rank, b, columns, rank, p->value_dim, rows, dtype);
}

/* Rows from `row` on, at most TILE_ROWS, that have one adapter. */
static int64_t rows_of_tile(const struct adapter *adapters, int64_t row, int64_t rows)
{
    int64_t end = row + 1;
    while (end < MIN(rows, row + TILE_ROWS) && adapters[end].a == adapters[row].a)
        end++;
    return end - row;
}

/* x = factors * x, plus shifts unless NULL, in whole vectors. */
static void scale(float *x, const float *factors, const float *shifts, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = count - i;
        const vf shift = shifts ? load_upto(shifts, i, left, FLOAT32) : (vf){0};
        store(x, i, fused(load_upto(factors, i, left, FLOAT32), load(x, i, FLOAT32), shift), FLOAT32);
    }
}

INLINE void compute_item(const struct latent_call *call, int64_t head, int64_t first_row, int64_t rows,
                         const struct workspace *w, const enum dtype dtype)
{
    const struct latent *p = call->p;
    const int64_t in_stride = padded(call->in_dim), out_stride = padded(call->out_dim);
    const int64_t outputs = p->key_dim + p->value_dim, tail = call->absorbs ? p->rotary_dim : 0;
    const int64_t first = head * outputs + (call->absorbs ? 0 : p->key_dim);
    struct adapter adapters[ROW_BLOCK];
    for (int64_t i = 0; i < rows; i++) {
        const int64_t offset = (first_row + i) * p->x_row_stride + head * p->x_head_stride;
        float *in = w->in + i * in_stride;
        for (int64_t k = 0; k < call->in_dim; k += LANES)
            store(in, k, load_upto(p->x, offset + k, call->in_dim - k, dtype), FLOAT32);
        adapters[i] = adapter_of(call, first_row + i);
        if (call->absorbs && adapters[i].magnitude)
            scale(in, adapters[i].magnitude + first, NULL, call->in_dim);
    }
    memset(w->out, 0, (size_t)(rows * out_stride) * sizeof(float));
    const void *weight = at(p->weight, first * p->latent_dim, dtype);
    int64_t row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        multiply_rows(call, w->out + row * out_stride, w->in + row * in_stride, weight, TILE_ROWS, dtype);
    for (; row < rows; row++)
        multiply_rows(call, w->out + row * out_stride, w->in + row * in_stride, weight, 1, dtype);
    for (int64_t i = 0; i < rows;) {
        float *out = w->out + i * out_stride;
        const float *in = w->in + i * in_stride;
        const bool is_full = rows_of_tile(adapters, i, rows) == TILE_ROWS;
        if (adapters[i].rank > 0 && is_full)
            add_lora(call, adapters + i, out, in, w->hidden, first, TILE_ROWS, dtype);
        else if (adapters[i].rank > 0)
            add_lora(call, adapters + i, out, in, w->hidden, first, 1, dtype);
        i += is_full ? TILE_ROWS : 1;
    }
    for (int64_t i = 0; i < rows; i++) {
        float *out = w->out + i * out_stride;
        if (!call->absorbs && adapters[i].magnitude)
            scale(out, adapters[i].magnitude + first, adapters[i].magnitude + p->num_heads * outputs + first,
                  call->out_dim);
        const int64_t to = ((first_row + i) * p->num_heads + head) * (call->out_dim + tail);
        for (int64_t k = 0; k < call->out_dim; k += LANES)
            store_upto(p->out, to + k, call->out_dim - k, load(out, k, FLOAT32), dtype);
        const int64_t from = (first_row + i) * p->x_row_stride + head * p->x_head_stride + call->in_dim;
        memcpy((void *)at(p->out, to + call->out_dim, dtype), at(p->x, from, dtype), (size_t)tail * size_of(dtype));
    }
}

static void latent_region(struct team *team, void *argument)
{
    const struct latent_call *call = argument;
    const int64_t num_blocks = (call->p->num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    size_t used = 0;
    const struct workspace w =
        workspace_in(call, call->workspaces + (size_t)team->thread * call->workspace_bytes, &used);
    struct work work = start_work(team, call->p->num_heads * num_blocks);
    for (int64_t item; take(team, &work, &item);) {
        const int64_t row = item % num_blocks * ROW_BLOCK, rows = MIN(ROW_BLOCK, call->p->num_rows - row);
        if (call->dtype == BFLOAT16)
            compute_item(call, item / num_blocks, row, rows, &w, BFLOAT16);
        else
            compute_item(call, item / num_blocks, row, rows, &w, FLOAT32);
    }
}

/* Checks the adapters; returns the highest rank of any row's. */
static enum status find_slots(const struct latent *p, int32_t *slots, int64_t *max_rank)
{
    const struct segments segments = {p->segment_start, p->segment_adapter, p->num_segments};
    struct lora_size size;
    const enum status status = lora_measure(p->group, p->table, &segments, p->num_rows, &size);
    for (int64_t segment = 0; status == OK && segment < p->num_segments; segment++) {
        const int32_t slot = p->segment_adapter[segment], start = p->segment_start[segment];
        for (int64_t row = start; row < p->segment_start[segment + 1]; row++)
            slots[row] = slot;
        if (slot >= 0 && start < p->segment_start[segment + 1])
            *max_rank = MAX(*max_rank, p->table->lora_rank[slot * p->table->stride_members]);
    }
    return status;
}

static enum status run(const struct latent *p, bool absorbs, int dtype, int num_threads)
{
    static _Thread_local void *scratch, *row_slots;
    static _Thread_local size_t capacity, slots_capacity;
    struct latent_call call = {.p = p, .absorbs = absorbs, .dtype = (enum dtype)dtype};
    call.in_dim = absorbs ? p->key_dim : p->latent_dim;
    call.out_dim = absorbs ? p->latent_dim : p->value_dim;
    if (p->table) {
        int32_t *slots = grow_scratch(&row_slots, &slots_capacity, (size_t)p->num_rows * sizeof *slots);
        if (!slots)
            return OUT_OF_MEMORY;
        const enum status status = find_slots(p, slots, &call.max_rank);
        if (status != OK)
            return status;
        call.slots = slots;
    }
    if (p->num_rows * p->num_heads * call.in_dim * call.out_dim <= PARALLEL_WORK)
        num_threads = 1;
    workspace_in(&call, NULL, &call.workspace_bytes);
    call.workspaces = grow_scratch(&scratch, &capacity, (size_t)num_threads * call.workspace_bytes);
    if (!call.workspaces)
        return OUT_OF_MEMORY;
    return run_beside(num_threads, 1, latent_region, &call) ? OK : OUT_OF_MEMORY;
}

EXPORT int absorb_keys(const struct latent *p, int dtype, int num_threads) { return run(p, true, dtype, num_threads); }

EXPORT int expand_values(const struct latent *p, int dtype, int num_threads)
{
    return run(p, false, dtype, num_threads);
}
