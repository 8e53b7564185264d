/* The state space of Mamba-2: state = exp(dt a) state + dt x ⊗ b; output = state c + d x. In float32.
 *
 * Rows of a state, one for each element of x, do not depend on each other. Some vectors of such a row stay in registers for
 * a block of the sequence's rows. Their products with c are summed lane by lane, and at last over the lanes.
 */
#include <math.h>

#include "recurrent.h"

#define BLOCK_ROWS 16                     /* whose b and c, of 128 elements each, fit into half of the L1 cache */
#define PIECE (TILE_VECTORS == 8 ? 4 : 8) /* vectors of a state's row in registers */
#define ELEMENTS 2                        /* of x, that is, rows of a state, at a time */
#define PARALLEL_ELEMENTS (64 << 10)      /* of states, times the rows */

/* Strides in elements; rows of x are [num_heads, head_dim], of b and c [num_groups, state_dim], dense in the last
 * dimension. */
struct selective_scan {
    const void *x;
    int64_t x_row_stride, x_head_stride;
    const void *dt;
    int64_t dt_stride;
    const void *b;
    int64_t b_row_stride, b_group_stride;
    const void *c;
    int64_t c_row_stride, c_group_stride;
    const float *a;           /* [num_heads] */
    const float *d, *dt_bias; /* [num_heads], or NULL */
    float *state;             /* dense [num_slots, num_heads, head_dim, state_dim] */
    float *out;               /* dense [total_rows, num_heads, head_dim] */
    int64_t num_heads, num_groups, head_dim, state_dim, softplus;
    float dt_min, dt_max;
    struct sequences sequences;
};

/* A thread's scratch memory, for a block of rows. */
struct workspace {
    float *times, *decays; /* [BLOCK_ROWS] */
    float *inputs;         /* dt x: [BLOCK_ROWS, head_dim] */
    float *b, *c;          /* [BLOCK_ROWS, whole vectors of state_dim], padded with zeros */
    vf *sums;              /* [LANES, BLOCK_ROWS], of LANES elements of x */
};

static int64_t num_vectors(const struct selective_scan *p) { return (p->state_dim + LANES - 1) / LANES; }

static struct workspace workspace_in(const struct selective_scan *p, char *memory, size_t *used)
{
    const size_t row_bytes = (size_t)num_vectors(p) * sizeof(vf);
    struct workspace w;
    w.times = reserve(memory, used, BLOCK_ROWS * sizeof(float));
    w.decays = reserve(memory, used, BLOCK_ROWS * sizeof(float));
    w.inputs = reserve(memory, used, (size_t)(BLOCK_ROWS * p->head_dim) * sizeof(float));
    w.b = reserve(memory, used, BLOCK_ROWS * row_bytes);
    w.c = reserve(memory, used, BLOCK_ROWS * row_bytes);
    w.sums = reserve(memory, used, BLOCK_ROWS * LANES * sizeof(vf));
    return w;
}

static size_t workspace_bytes(const struct selective_scan *p)
{
    size_t bytes = 0;
    workspace_in(p, NULL, &bytes);
    return bytes;
}

/* The step sizes and decays of a block's rows. */
INLINE void compute_times(const struct selective_scan *p, int64_t first_row, int64_t num_rows, int64_t head,
                          const struct workspace *w, const enum dtype dtype)
{
    for (int64_t i = 0; i < num_rows; i++) {
        const float time = load_one(p->dt, (first_row + i) * p->dt_stride + head, dtype);
        w->times[i] = p->dt_bias ? time + p->dt_bias[head] : time;
    }
    if (p->softplus) {
        memcpy(w->decays, w->times, (size_t)num_rows * sizeof(float));
        exp_each(w->decays, num_rows);
        for (int64_t i = 0; i < num_rows; i++)
            if (w->times[i] <= 20)
                w->times[i] = log1pf(w->decays[i]);
    }
    for (int64_t i = 0; i < num_rows; i++) {
        if (w->times[i] < p->dt_min)
            w->times[i] = p->dt_min;
        if (w->times[i] > p->dt_max)
            w->times[i] = p->dt_max;
        w->decays[i] = w->times[i] * p->a[head];
    }
    exp_each(w->decays, num_rows);
}

INLINE void widen_rows(const struct selective_scan *p, int64_t first_row, int64_t num_rows, int64_t head,
                       const struct workspace *w, const enum dtype dtype)
{
    const int64_t group = head / (p->num_heads / p->num_groups), head_dim = p->head_dim;
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t row = first_row + i, place = i * num_vectors(p) * LANES;
        const void *x = at(p->x, row * p->x_row_stride + head * p->x_head_stride, dtype);
        if (row + BLOCK_ROWS < p->sequences.total_rows)
            prefetch(at(x, BLOCK_ROWS * p->x_row_stride, dtype), head_dim, dtype);
        const void *b = at(p->b, row * p->b_row_stride + group * p->b_group_stride, dtype);
        const void *c = at(p->c, row * p->c_row_stride + group * p->c_group_stride, dtype);
        for (int64_t j = 0; j < head_dim; j += LANES)
            store_upto(w->inputs, i * head_dim + j, head_dim - j, load_upto(x, j, head_dim - j, dtype) * w->times[i],
                       FLOAT32);
        for (int64_t j = 0; j < p->state_dim; j += LANES) {
            store(w->b, place + j, load_upto(b, j, p->state_dim - j, dtype), FLOAT32);
            store(w->c, place + j, load_upto(c, j, p->state_dim - j, dtype), FLOAT32);
        }
    }
}

/* Where the state of a head comes from, NULL = zeros, and where it goes; save: NULL = nowhere else. */
struct places {
    const float *from;
    float *to, *save;
};

/* The vectors from `first` of elements x and following of the head, over all rows of a block. */
INLINE void scan_piece(const struct selective_scan *p, const struct workspace *w, int64_t num_rows, struct places places,
                       int64_t x, int64_t first, const int elements, const int vectors)
{
    const int64_t column = first * LANES, left = vectors == 1 ? p->state_dim - column : LANES;
    vf piece[ELEMENTS * PIECE];
#pragma GCC unroll 16
    for (int i = 0; i < elements * vectors; i++) {
        const int64_t place = (x + i / vectors) * p->state_dim + column + i % vectors * LANES;
        piece[i] = places.from ? load_upto(places.from, place, left, FLOAT32) : (vf){0};
    }
    for (int64_t row = 0; row < num_rows; row++) {
        const float *b = w->b + row * num_vectors(p) * LANES + column, *c = w->c + row * num_vectors(p) * LANES + column;
        const vf decay = spread(w->decays + row);
        vf *sums = w->sums + x % LANES * BLOCK_ROWS + row, sum[ELEMENTS], input[ELEMENTS];
#pragma GCC unroll 2
        for (int e = 0; e < elements; e++) {
            input[e] = spread(w->inputs + row * p->head_dim + x + e);
            sum[e] = first == 0 ? (vf){0} : sums[e * BLOCK_ROWS];
        }
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            vf of_b = load(b, v * LANES, FLOAT32), of_c = load(c, v * LANES, FLOAT32);
            KEEP_IN_REGISTER(of_b);
            KEEP_IN_REGISTER(of_c);
#pragma GCC unroll 2
            for (int e = 0; e < elements; e++) {
                vf *state = piece + e * vectors + v;
                *state = fused(input[e], of_b, *state * decay);
                sum[e] = fused(*state, of_c, sum[e]);
            }
        }
#pragma GCC unroll 2
        for (int e = 0; e < elements; e++)
            sums[e * BLOCK_ROWS] = sum[e];
    }
#pragma GCC unroll 16
    for (int i = 0; i < elements * vectors; i++) {
        const int64_t place = (x + i / vectors) * p->state_dim + column + i % vectors * LANES;
        store_upto(places.to, place, left, piece[i], FLOAT32);
        if (places.save)
            store_upto(places.save, place, left, piece[i], FLOAT32);
    }
}

INLINE void scan_elements(const struct selective_scan *p, const struct workspace *w, int64_t num_rows,
                          struct places places, int64_t x, const int elements)
{
    const int64_t whole = p->state_dim / LANES;
    int64_t first = 0;
    for (; first + PIECE <= whole; first += PIECE)
        scan_piece(p, w, num_rows, places, x, first, elements, PIECE);
    for (; first + PIECE / 2 <= whole; first += PIECE / 2)
        scan_piece(p, w, num_rows, places, x, first, elements, PIECE / 2);
    for (; first < num_vectors(p); first++)
        scan_piece(p, w, num_rows, places, x, first, elements, 1);
}

/* Elements first_x .. end_x of the head; first_x is a multiple of LANES. */
INLINE void scan_block(const struct selective_scan *p, const struct row_block *block, int64_t head, int64_t first_x,
                       int64_t end_x, const struct workspace *w, const enum dtype dtype)
{
    const int64_t num_rows = block->end - block->start, size = p->head_dim * p->state_dim;
    float *states = p->state + head * size;
    const struct places places = {
        .from = block->read < 0 ? NULL : states + block->read * p->num_heads * size,
        .to = states + p->sequences.write[block->sequence] * p->num_heads * size,
        .save = block->save < 0 ? NULL : states + block->save * p->num_heads * size,
    };
    for (int64_t start = first_x; start < end_x; start += LANES) {
        const int64_t end = MIN(start + LANES, end_x);
        int64_t x = start;
        for (; x + ELEMENTS <= end; x += ELEMENTS)
            scan_elements(p, w, num_rows, places, x, ELEMENTS);
        for (; x < end; x++)
            scan_elements(p, w, num_rows, places, x, 1);
        for (int64_t i = 0; i < num_rows; i++) {
            const int64_t row = p->sequences.row_start[block->sequence] + block->start + i;
            const void *values = at(p->x, row * p->x_row_stride + head * p->x_head_stride, dtype);
            vf sums, lanes[LANES];
#pragma GCC unroll 16
            for (int x = 0; x < LANES; x++)
                lanes[x] = w->sums[x * BLOCK_ROWS + i];
            horizontal_sums((float *)&sums, lanes, LANES);
            if (p->d)
                sums = fused(splat(p->d[head]), load_upto(values, start, end_x - start, dtype), sums);
            store_upto(p->out, (row * p->num_heads + head) * p->head_dim + start, end_x - start, sums, FLOAT32);
        }
    }
}

INLINE void scan_head(const struct selective_scan *p, int64_t sequence, int64_t head, int64_t first_x, int64_t end_x,
                      const struct workspace *w, const enum dtype dtype)
{
    const struct sequences *s = &p->sequences;
    for (int64_t start = 0; start < s->num_rows[sequence];) {
        const struct row_block block = block_of(s, sequence, start, BLOCK_ROWS);
        const int64_t first_row = s->row_start[sequence] + start, num_rows = block.end - start;
        compute_times(p, first_row, num_rows, head, w, dtype);
        widen_rows(p, first_row, num_rows, head, w, dtype);
        scan_block(p, &block, head, first_x, end_x, w, dtype);
        start = block.end;
    }
}

struct scan_call {
    const struct selective_scan *p;
    int64_t num_parts; /* of the elements of a head */
    char *workspaces;
    enum dtype dtype;
};

static void scan_region(struct team *team, void *argument)
{
    const struct scan_call *call = argument;
    const struct selective_scan *p = call->p;
    const int64_t parts = call->num_parts, steps = (p->head_dim + LANES - 1) / LANES;
    size_t used = 0;
    const struct workspace w = workspace_in(p, call->workspaces + (size_t)team->thread * workspace_bytes(p), &used);
    struct work work = start_work(team, p->sequences.num_sequences * p->num_heads * parts);
    for (int64_t item; take(team, &work, &item);) {
        const int64_t part = item % parts, head = item / parts % p->num_heads, sequence = item / parts / p->num_heads;
        const int64_t first = steps * part / parts * LANES, end = MIN(p->head_dim, steps * (part + 1) / parts * LANES);
        if (call->dtype == BFLOAT16)
            scan_head(p, sequence, head, first, end, &w, BFLOAT16);
        else
            scan_head(p, sequence, head, first, end, &w, FLOAT32);
    }
}

EXPORT int selective_scan(const struct selective_scan *p, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const enum status status = check_sequences(&p->sequences);
    if (status != OK)
        return status;
    const int64_t slot_size = p->num_heads * p->head_dim * p->state_dim;
    keep_states(&p->sequences, p->state, slot_size);
    if (count_rows(&p->sequences) * slot_size <= PARALLEL_ELEMENTS)
        num_threads = 1;
    char *workspaces = grow_scratch(&scratch, &capacity, (size_t)num_threads * workspace_bytes(p));
    if (!workspaces)
        return OUT_OF_MEMORY;
    const int64_t num_heads = p->sequences.num_sequences * p->num_heads, steps = (p->head_dim + LANES - 1) / LANES;
    struct scan_call call = {p, parts_of(num_heads, steps, num_threads), workspaces, (enum dtype)dtype};
    return run_beside(num_threads, 1, scan_region, &call) ? OK : OUT_OF_MEMORY;
}
