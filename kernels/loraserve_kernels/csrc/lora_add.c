/* y += scaling * (x Aᵀ) B for every segment and every member of a fused group, in one call. With DoRA each column of a
 * member is then multiplied by its factor, and its shift is added.
 *
 * Two phases share one parallel region: shrink writes h = x Aᵀ as float32 for all segments, expand adds
 * scaling * h B to y. Both are cut into small work items of (segment, rows, columns) that threads take, so sixteen one-row
 * segments and one segment of a thousand rows both keep all threads busy. In decode each byte of A and B is read
 * once; in prefill once per ROW_BLOCK rows. Sums run in a fixed order: a row's result does not depend on its batch.
 *
 * Measured, bfloat16, 16 one-row segments of distinct rank-16 adapters, 768 -> 2048 + 2048 (2.9 MB), EPYC Zen 5: one core
 * 124 us from memory and 64 us from L3, two cores 97 us from memory. One segment of 1,024 rows: 0.9 ms on two cores.
 * With DoRA, 18% more bytes, on Zen 4: 14% more time from memory, 5% from L3, 6% for the 1,024 rows.
 */
#include "lora_add.h"

#define ROW_BLOCK 64     /* rows of one item: its part of A or B stays in L2 meanwhile */
#define SHRINK_RANKS 16  /* rows of A of one shrink item */
#define EXPAND_COLUMNS 2048 /* columns of B of one expand item */
#define EXPAND_RANKS 4   /* rows of B read side by side for a single row of x */
#define PARALLEL_WORK 16384 /* multiply-adds; below this a second thread costs more than it saves */

struct lora_item {
    int64_t row;
    int32_t rows;
    int32_t rank;         /* shrink: rows of A of this item; expand: rank of the member */
    int64_t weight;       /* element offset into the arena */
    int64_t hidden;       /* element offset into h of the item's first row */
    int32_t hidden_stride;
    int32_t columns;      /* expand only */
    int64_t column;       /* expand only: first column of y */
    int64_t weight_stride; /* expand only: columns of the member's B */
    float scaling;        /* expand only */
    const float *magnitude; /* expand only: column factors; their shifts are weight_stride further; NULL without DoRA */
};

/* Dot products of `rows` rows of x with `ranks` rows of A, one accumulator each. */
INLINE void dot_tile(float *h, int64_t h_stride, const void *x, int64_t x_stride, const void *a, int64_t depth,
                     const int rows, const int ranks, const enum dtype dtype)
{
    const int64_t step = step_of(dtype);
    vf sum[TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * ranks; i++)
        sum[i] = (vf){0};
    int64_t k = 0;
    for (; k + step <= depth; k += step) {
        vf input[TILE_VECTORS];
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
            input[row] = load_step(x, row * x_stride + k, dtype);
#pragma GCC unroll 16
        for (int rank = 0; rank < ranks; rank++) {
            vf weight = load_step(a, rank * depth + k, dtype);
            if (rows == 1) /* decode: prefetch the next tile; A and B together 149 -> 124 us at the shape above */
                __builtin_prefetch(at(a, (rank + ranks) * depth + k, dtype), 0, 2);
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++)
                sum[row * ranks + rank] = multiply_add(sum[row * ranks + rank], input[row], weight, dtype);
        }
    }
    if (k < depth)
#pragma GCC unroll 16
        for (int i = 0; i < rows * ranks; i++)
            sum[i] = multiply_add(sum[i], load_step_partial(x, i / ranks * x_stride + k, depth - k, dtype),
                                  load_step_partial(a, i % ranks * depth + k, depth - k, dtype), dtype);
    float sums[TILE_VECTORS];
    horizontal_sums(sums, sum, rows * ranks);
    for (int row = 0; row < rows; row++)
        memcpy(h + row * h_stride, sums + row * ranks, (size_t)ranks * sizeof(float));
}

INLINE void dot_rows(float *h, int64_t h_stride, const void *x, int64_t x_stride, const void *a, int64_t depth,
                     int64_t ranks, const int rows, const int tile_ranks, const enum dtype dtype)
{
    int64_t rank = 0;
    for (; rank + tile_ranks <= ranks; rank += tile_ranks)
        dot_tile(h + rank, h_stride, x, x_stride, at(a, rank * depth, dtype), depth, rows, tile_ranks, dtype);
    for (; rank < ranks; rank++)
        dot_tile(h + rank, h_stride, x, x_stride, at(a, rank * depth, dtype), depth, rows, 1, dtype);
}

INLINE void shrink(const struct lora_item *item, float *hidden, const void *x, int64_t x_stride, const void *arena,
                   int64_t in_features, const enum dtype dtype)
{
    float *h = hidden + item->hidden;
    const void *a = at(arena, item->weight, dtype);
    const int64_t stride = item->hidden_stride;
    int64_t row = 0;
#define SHRINK_ROWS(tile_rows, tile_ranks)                                                                            \
    for (; row + tile_rows <= item->rows; row += tile_rows)                                                           \
        dot_rows(h + row * stride, stride, at(x, (item->row + row) * x_stride, dtype), x_stride, a, in_features,      \
                 item->rank, tile_rows, tile_ranks, dtype);
    SHRINK_ROWS(4, TILE_VECTORS / 4)
    SHRINK_ROWS(1, 4) /* and 4 prefetched: rows of A may be a page apart, and L1 holds few such lines */
#undef SHRINK_ROWS
}

/* The new y in `count` columns: y + scaling * sum; with DoRA, times the columns' factors, plus their shifts. */
INLINE vf new_y(vf y, vf sum, float scaling, const float *magnitude, int64_t column, int64_t shifts, int64_t count,
                const bool has_magnitude)
{
    const vf added = fused(splat(scaling), sum, y);
    if (!has_magnitude)
        return added;
    return fused(load_upto(magnitude, column, count, FLOAT32), added,
                 load_upto(magnitude, shifts + column, count, FLOAT32));
}

/* y[rows, vectors * LANES] += scaling * h B; the last vector may be partial. */
INLINE void expand_tile(void *y, int64_t y_stride, const float *h, int64_t h_stride, const void *b, int64_t b_stride,
                        int64_t ranks, float scaling, const float *magnitude, const int rows, const int vectors,
                        int64_t last, const enum dtype dtype, const bool has_magnitude)
{
    vf sum[TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++)
        sum[i] = (vf){0};
    for (int64_t rank = 0; rank < ranks; rank++) {
        vf weight[TILE_VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            weight[v] = last == LANES ? load(b, rank * b_stride + v * LANES, dtype)
                                      : load_partial(b, rank * b_stride, last, dtype);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows * vectors; i++)
            sum[i] = fused(splat(h[i / vectors * h_stride + rank]), weight[i % vectors], sum[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++) {
        const int64_t column = i % vectors * LANES, index = i / vectors * y_stride + column;
        store_upto(y, index, last, new_y(load_upto(y, index, last, dtype), sum[i], scaling, magnitude, column, b_stride,
                                         last, has_magnitude), dtype);
    }
}

/* sums[columns] += h B for `ranks` rows of B; prefetches `ranks` rows ahead. */
INLINE void expand_ranks(float *sums, const float *h, const void *b, int64_t b_stride, int64_t columns, const int ranks,
                         const enum dtype dtype)
{
    for (int64_t column = 0; column < columns; column += LANES) {
        vf sum = load(sums, column, FLOAT32);
#pragma GCC unroll 4
        for (int rank = 0; rank < ranks; rank++) {
            if (column % (64 / (int64_t)size_of(dtype)) == 0)
                __builtin_prefetch(at(b, (rank + ranks) * b_stride + column, dtype), 0, 2);
            sum = fused(splat(h[rank]), load(b, rank * b_stride + column, dtype), sum);
        }
        store(sums, column, sum, FLOAT32);
    }
}

/* The sums of expand_tile for one row, in an order that reads B from start to end. */
INLINE void expand_row(void *y, const float *h, const void *b, int64_t b_stride, int64_t columns, int64_t ranks,
                       float scaling, const float *magnitude, const enum dtype dtype, const bool has_magnitude)
{
    float sums[EXPAND_COLUMNS] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)columns * sizeof(float));
    int64_t rank = 0;
    for (; rank + EXPAND_RANKS <= ranks; rank += EXPAND_RANKS)
        expand_ranks(sums, h + rank, at(b, rank * b_stride, dtype), b_stride, columns, EXPAND_RANKS, dtype);
    for (; rank < ranks; rank++)
        expand_ranks(sums, h + rank, at(b, rank * b_stride, dtype), b_stride, columns, 1, dtype);
    for (int64_t column = 0; column < columns; column += LANES)
        store(y, column, new_y(load(y, column, dtype), load(sums, column, FLOAT32), scaling, magnitude, column, b_stride,
                               LANES, has_magnitude), dtype);
}

INLINE void expand(const struct lora_item *item, const float *hidden, void *y, int64_t y_stride, const void *arena,
                   const enum dtype dtype, const bool has_magnitude)
{
    const float *h = hidden + item->hidden;
    const int64_t h_stride = item->hidden_stride;
    /* Column tiles outermost: a tile of B is read from memory once and from L1 for the item's other rows. */
#define EXPAND_ROWS(tile_rows, vectors, last)                                                                         \
    for (; row + tile_rows <= item->rows; row += tile_rows)                                                           \
        expand_tile((void *)at(y, (item->row + row) * y_stride + item->column + column, dtype), y_stride,             \
                    h + row * h_stride, h_stride, at(arena, item->weight + column, dtype), item->weight_stride,       \
                    item->rank, item->scaling, has_magnitude ? item->magnitude + column : NULL, tile_rows, vectors,   \
                    last, dtype, has_magnitude);
    int64_t column = 0;
    if (item->rows < 4) {
        column = item->columns / LANES * LANES;
        for (int64_t row = 0; row < item->rows; row++)
            expand_row((void *)at(y, (item->row + row) * y_stride + item->column, dtype), h + row * h_stride,
                       at(arena, item->weight, dtype), item->weight_stride, column, item->rank, item->scaling,
                       item->magnitude, dtype, has_magnitude);
    }
    for (; column + TILE_VECTORS / 4 * LANES <= item->columns; column += TILE_VECTORS / 4 * LANES) {
        int64_t row = 0;
        EXPAND_ROWS(4, TILE_VECTORS / 4, LANES)
        EXPAND_ROWS(1, TILE_VECTORS / 4, LANES)
    }
    for (; column + LANES <= item->columns; column += LANES) {
        int64_t row = 0;
        EXPAND_ROWS(1, 1, LANES)
    }
    if (column < item->columns) {
        int64_t row = 0;
        EXPAND_ROWS(1, 1, item->columns - column)
    }
#undef EXPAND_ROWS
}

static void shrink_item(const struct lora_item *item, float *hidden, const void *x, int64_t x_stride, const void *arena,
                        int64_t in_features, enum dtype dtype)
{
    if (dtype == BFLOAT16)
        shrink(item, hidden, x, x_stride, arena, in_features, BFLOAT16);
    else
        shrink(item, hidden, x, x_stride, arena, in_features, FLOAT32);
}

/* Not in expand_item: with all four variants in one function, GCC 12 generated slower code. 3 x 77 rows of rank 16
 * without DoRA, 768 -> 203 + 77, one EPYC Zen 4 core: 171 us in one function, 164 us now. */
static void expand_scaled(const struct lora_item *item, const float *hidden, void *y, int64_t y_stride,
                          const void *arena, enum dtype dtype)
{
    if (dtype == BFLOAT16)
        expand(item, hidden, y, y_stride, arena, BFLOAT16, true);
    else
        expand(item, hidden, y, y_stride, arena, FLOAT32, true);
}

static void expand_item(const struct lora_item *item, const float *hidden, void *y, int64_t y_stride, const void *arena,
                        enum dtype dtype)
{
    if (item->magnitude)
        expand_scaled(item, hidden, y, y_stride, arena, dtype);
    else if (dtype == BFLOAT16)
        expand(item, hidden, y, y_stride, arena, BFLOAT16, false);
    else
        expand(item, hidden, y, y_stride, arena, FLOAT32, false);
}

/* -1 if a rank is negative. */
static int64_t sum_of_ranks(const struct table *table, int64_t slot, int64_t num_members)
{
    int64_t ranks = 0;
    for (int64_t member = 0; member < num_members; member++) {
        const int64_t rank = table->lora_rank[slot * table->stride_members + member];
        if (rank < 0)
            return -1;
        ranks += rank;
    }
    return ranks;
}

static bool inside(const struct table *table, int64_t offset, int64_t count)
{
    return offset >= 0 && count <= table->arena_size && offset <= table->arena_size - count;
}

/* Offset of the member's factors and shifts; -1 = without DoRA. */
static int64_t magnitude_offset(const struct table *table, int64_t entry)
{
    return table->offset_magnitude ? table->offset_magnitude[entry] : -1;
}

static bool are_inside(const struct table *table, int64_t magnitude, int64_t columns)
{
    const int64_t per_float = table->elements_per_float;
    return magnitude < 0 || (magnitude % per_float == 0 && inside(table, magnitude, 2 * columns * per_float));
}

/* Counts the work of all segments; refuses tables that point outside the arena. */
enum status lora_measure(const struct group *group, const struct table *table, const struct segments *segments,
                         int64_t num_rows, struct lora_size *size)
{
    const int32_t *segment_start = segments->start, *segment_adapter = segments->adapter_slot;
    const int64_t num_segments = segments->count;
    *size = (struct lora_size){0};
    if (segment_start[0] != 0 || segment_start[num_segments] != num_rows)
        return BAD_SEGMENTS;
    for (int64_t segment = 0; segment < num_segments; segment++) {
        const int64_t rows = segment_start[segment + 1] - segment_start[segment];
        const int64_t slot = segment_adapter[segment];
        if (rows < 0)
            return BAD_SEGMENTS;
        if (slot < 0 || rows == 0)
            continue;
        if (slot >= table->num_slots)
            return BAD_ADAPTER;
        const int64_t ranks = sum_of_ranks(table, slot, group->num_members);
        if (ranks == 0)
            continue;
        if (ranks < 0 || !inside(table, table->offset_a[slot * table->stride_a], ranks * group->in_features))
            return BAD_ADAPTER;
        const int64_t row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        size->num_items += (size_t)(row_blocks * ((ranks + SHRINK_RANKS - 1) / SHRINK_RANKS));
        size->num_hidden += (size_t)(rows * ranks);
        size->work += (size_t)(rows * ranks * group->in_features);
        for (int64_t member = 0; member < group->num_members; member++) {
            const int64_t entry = slot * table->stride_members + member;
            const int64_t rank = table->lora_rank[entry], columns = group->out_features[member];
            if (rank > 0 && !(inside(table, table->offset_b[entry], rank * columns) &&
                              are_inside(table, magnitude_offset(table, entry), columns)))
                return BAD_ADAPTER;
            size->num_items += (size_t)(row_blocks * ((columns + EXPAND_COLUMNS - 1) / EXPAND_COLUMNS));
            size->work += (size_t)(rows * rank * columns);
        }
    }
    return OK;
}

/* Items of one block of rows: appended to the shrink list or, when `expand` is set, to the expand list. */
static struct lora_item *append_items(struct lora_item *next, const struct group *group, const struct table *table,
                                      int64_t slot, struct lora_item item, int64_t ranks, bool expand)
{
    if (!expand) {
        const int64_t offset = table->offset_a[slot * table->stride_a], hidden = item.hidden;
        for (int64_t rank = 0; rank < ranks; rank += SHRINK_RANKS) {
            item.rank = (int32_t)MIN(SHRINK_RANKS, ranks - rank);
            item.weight = offset + rank * group->in_features;
            item.hidden = hidden + rank;
            *next++ = item;
        }
        return next;
    }
    const float *floats = table->arena;
    int64_t first_column = 0;
    for (int64_t member = 0; member < group->num_members; member++) {
        const int64_t entry = slot * table->stride_members + member, columns = group->out_features[member];
        item.rank = table->lora_rank[entry];
        item.weight_stride = columns;
        item.scaling = table->scaling[entry];
        const int64_t magnitude = magnitude_offset(table, entry);
        for (int64_t column = 0; item.rank > 0 && column < columns; column += EXPAND_COLUMNS) {
            item.columns = (int32_t)MIN(EXPAND_COLUMNS, columns - column);
            item.column = first_column + column;
            item.weight = table->offset_b[entry] + column;
            item.magnitude = magnitude < 0 ? NULL : floats + magnitude / table->elements_per_float + column;
            *next++ = item;
        }
        item.hidden += item.rank;
        first_column += columns;
    }
    return next;
}

static struct lora_item *list_items(struct lora_item *next, const struct group *group, const struct table *table,
                                    const int32_t *segment_start, const int32_t *segment_adapter, int64_t num_segments,
                                    bool expand)
{
    int64_t hidden = 0;
    for (int64_t segment = 0; segment < num_segments; segment++) {
        const int64_t slot = segment_adapter[segment], end = segment_start[segment + 1];
        if (slot < 0 || segment_start[segment] == end)
            continue; /* lora_measure does not check the slot of an empty segment */
        const int64_t ranks = sum_of_ranks(table, slot, group->num_members);
        for (int64_t row = segment_start[segment]; row < end; row += ROW_BLOCK) {
            struct lora_item item = {.row = row, .rows = (int32_t)MIN(ROW_BLOCK, end - row)};
            item.hidden = hidden;
            item.hidden_stride = (int32_t)ranks;
            next = append_items(next, group, table, slot, item, ranks, expand);
            hidden += item.rows * ranks;
        }
    }
    return next;
}

static size_t hidden_bytes(const struct lora_size *size)
{
    return (size->num_hidden * sizeof(float) + 63) & ~(size_t)63;
}

size_t lora_scratch(const struct lora_size *size)
{
    return hidden_bytes(size) + size->num_items * sizeof(struct lora_item);
}

struct lora_plan lora_prepare(const struct group *group, const struct table *table, const struct segments *segments,
                              const struct lora_size *size, void *scratch)
{
    struct lora_plan plan = {.arena = table->arena, .in_features = group->in_features, .hidden = scratch};
    const int32_t *start = segments->start, *slot = segments->adapter_slot;
    struct lora_item *items = (struct lora_item *)((char *)scratch + hidden_bytes(size));
    struct lora_item *middle = list_items(items, group, table, start, slot, segments->count, false);
    struct lora_item *end = list_items(middle, group, table, start, slot, segments->count, true);
    plan.shrinks = items;
    plan.expands = middle;
    plan.num_shrinks = middle - items;
    plan.num_expands = end - middle;
    return plan;
}

void lora_shrink_stage(struct team *team, const struct lora_plan *plan, const void *x, int64_t x_stride,
                       enum dtype dtype)
{
    struct work work = start_work(team, plan->num_shrinks);
    for (int64_t i; take(team, &work, &i);)
        shrink_item(plan->shrinks + i, plan->hidden, x, x_stride, plan->arena, plan->in_features, dtype);
}

void lora_expand_stage(struct team *team, const struct lora_plan *plan, void *y, int64_t y_stride, enum dtype dtype)
{
    struct work work = start_work(team, plan->num_expands);
    for (int64_t i; take(team, &work, &i);)
        expand_item(plan->expands + i, plan->hidden, y, y_stride, plan->arena, dtype);
}

/* Plans a standalone call, in this thread's memory until its next one; leaves `plan` unset if there are no items. */
static enum status plan_call(struct lora_plan *plan, struct lora_size *size, const struct group *group,
                             const struct table *table, const struct segments *segments, int64_t num_rows)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const enum status status = lora_measure(group, table, segments, num_rows, size);
    if (status != OK || size->num_items == 0)
        return status;
    char *memory = grow_scratch(&scratch, &capacity, lora_scratch(size));
    if (!memory)
        return OUT_OF_MEMORY;
    *plan = lora_prepare(group, table, segments, size, memory);
    return OK;
}

struct lora_call {
    const struct lora_plan *plan;
    void *y;
    const void *x;
    int64_t y_stride, x_stride;
    enum dtype dtype;
};

static void lora_region(struct team *team, void *argument)
{
    const struct lora_call *call = argument;
    lora_shrink_stage(team, call->plan, call->x, call->x_stride, call->dtype);
    complete(team);
    lora_expand_stage(team, call->plan, call->y, call->y_stride, call->dtype);
}

EXPORT int lora_add(void *y, int64_t y_stride, const void *x, int64_t x_stride, int64_t num_rows,
                    const struct group *group, const struct table *table, const int32_t *segment_start,
                    const int32_t *segment_adapter, int64_t num_segments, int dtype, int num_threads)
{
    const struct segments segments = {segment_start, segment_adapter, num_segments};
    struct lora_size size;
    struct lora_plan plan;
    const enum status status = plan_call(&plan, &size, group, table, &segments, num_rows);
    if (status != OK || size.num_items == 0)
        return status;
    struct lora_call call = {&plan, y, x, y_stride, x_stride, (enum dtype)dtype};
    return run_beside(size.work > PARALLEL_WORK ? num_threads : 1, 2, lora_region, &call) ? OK : OUT_OF_MEMORY;
}

struct embed_call {
    const struct lora_plan *plan;
    void *y;
    int64_t y_stride;
    const int64_t *token_ids;
    float embed_scale;
    enum dtype dtype;
};

/* Shrinks by looking up columns of A instead of multiplying with it. */
static void embed_region(struct team *team, void *argument)
{
    const struct embed_call *call = argument;
    const struct lora_plan *plan = call->plan;
    struct work work = start_work(team, plan->num_shrinks);
    for (int64_t i; take(team, &work, &i);) {
        const struct lora_item *item = plan->shrinks + i;
        for (int64_t row = 0; row < item->rows; row++) {
            float *h = plan->hidden + item->hidden + row * item->hidden_stride;
            for (int64_t rank = 0; rank < item->rank; rank++) {
                const int64_t column = rank * plan->in_features + call->token_ids[item->row + row];
                h[rank] = call->embed_scale * load_one(plan->arena, item->weight + column, call->dtype);
            }
        }
    }
    complete(team);
    lora_expand_stage(team, plan, call->y, call->y_stride, call->dtype);
}

EXPORT int lora_embed(void *y, int64_t y_stride, const int64_t *token_ids, float embed_scale, int64_t num_rows,
                      const struct group *group, const struct table *table, const int32_t *segment_start,
                      const int32_t *segment_adapter, int64_t num_segments, int dtype, int num_threads)
{
    const struct segments segments = {segment_start, segment_adapter, num_segments};
    struct lora_size size;
    struct lora_plan plan;
    const enum status status = plan_call(&plan, &size, group, table, &segments, num_rows);
    if (status != OK || size.num_items == 0)
        return status;
    for (int64_t row = 0; row < num_rows; row++)
        if (token_ids[row] < 0 || token_ids[row] >= group->in_features)
            return BAD_TOKEN;
    struct embed_call call = {&plan, y, y_stride, token_ids, embed_scale, (enum dtype)dtype};
    if (size.num_hidden * (size_t)group->out_features[0] <= PARALLEL_WORK)
        num_threads = 1;
    return run_beside(num_threads, 2, embed_region, &call) ? OK : OUT_OF_MEMORY;
}
