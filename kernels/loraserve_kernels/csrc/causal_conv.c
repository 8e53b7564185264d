/* A depthwise convolution along each sequence, over a row and the num_taps - 1 rows before it, in float32.
 *
 * A work item is a block of channels, for all sequences: its taps are transposed once.
 */
#include "recurrent.h"

#define STEP MAX_EXPS /* vectors at a time: 1,024 rows of 512 in bfloat16 take 286 us on a Xeon core, 330 four by four */
#define MAX_TAPS 16   /* as MAX_TAPS of cpu_calls.py */
#define MAX_BLOCK 512 /* channels of an item; narrower ones if there are fewer than ENOUGH_ITEMS per thread */
#define ENOUGH_ITEMS 4
#define ROWS_AHEAD 4 /* of which a row is prefetched */
#define PARALLEL_ELEMENTS (32 << 10)

/* Strides in elements; rows of x are dense. */
struct causal_conv {
    const void *x;
    int64_t x_stride;
    const void *weight; /* dense [num_channels, num_taps] */
    const void *bias;   /* [num_channels], or NULL */
    void *state;        /* dense [num_slots, num_taps - 1, num_channels] */
    void *out;          /* dense [total_rows, num_channels] */
    int64_t num_channels, num_taps, silu;
    struct sequences sequences;
};

/* A thread's scratch memory for a block of channels. */
struct workspace {
    float taps[MAX_TAPS * MAX_BLOCK]; /* [num_taps, MAX_BLOCK] */
    float bias[MAX_BLOCK];
    float before[(MAX_TAPS - 1) * MAX_BLOCK]; /* rows of x's dtype, MAX_BLOCK apart */
};

struct channels {
    int64_t first, count;
};

INLINE void transpose_taps(const struct causal_conv *p, struct channels channels, struct workspace *w,
                           const enum dtype dtype)
{
    const int64_t num_taps = p->num_taps;
    const void *weight = at(p->weight, channels.first * num_taps, dtype);
    int64_t i = 0;
    for (; num_taps == 4 && i + LANES <= channels.count; i += LANES) {
        vf a[4];
#pragma GCC unroll 8
        for (int v = 0; v < 4; v++)
            a[v] = load(weight, 4 * i + v * LANES, dtype);
        const vf even[2] = {SHUFFLE(a[0], a[1], EVEN), SHUFFLE(a[2], a[3], EVEN)};
        const vf odd[2] = {SHUFFLE(a[0], a[1], ODD), SHUFFLE(a[2], a[3], ODD)};
        store(w->taps, i, SHUFFLE(even[0], even[1], EVEN), FLOAT32);
        store(w->taps, MAX_BLOCK + i, SHUFFLE(odd[0], odd[1], EVEN), FLOAT32);
        store(w->taps, 2 * MAX_BLOCK + i, SHUFFLE(even[0], even[1], ODD), FLOAT32);
        store(w->taps, 3 * MAX_BLOCK + i, SHUFFLE(odd[0], odd[1], ODD), FLOAT32);
    }
    for (; i < channels.count; i++)
        for (int64_t tap = 0; tap < num_taps; tap++)
            w->taps[tap * MAX_BLOCK + i] = load_one(weight, i * num_taps + tap, dtype);
    for (i = 0; i < channels.count; i += LANES) {
        const int64_t left = channels.count - i;
        store_upto(w->bias, i, left, p->bias ? load_upto(p->bias, channels.first + i, left, dtype) : (vf){0}, FLOAT32);
    }
}

/* The `count` vectors of channels at `i`, of which `left` channels exist. inputs: the rows that the taps multiply. */
INLINE void convolve_vectors(void *out, const void *const *inputs, const struct workspace *w, int64_t num_taps,
                             bool silu, int64_t i, int64_t left, const int count, const enum dtype dtype)
{
    vf sums[STEP];
#pragma GCC unroll 8
    for (int v = 0; v < count; v++)
        sums[v] = load_upto(w->bias, i + v * LANES, count == 1 ? left : LANES, FLOAT32);
    for (int64_t tap = 0; tap < num_taps; tap++)
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
            const vf input = load_upto(inputs[tap], i + v * LANES, count == 1 ? left : LANES, dtype);
            sums[v] = fused(load(w->taps, tap * MAX_BLOCK + i + v * LANES, FLOAT32), input, sums[v]);
        }
    if (silu)
        vsilu(sums, count);
#pragma GCC unroll 8
    for (int v = 0; v < count; v++)
        store_upto(out, i + v * LANES, count == 1 ? left : LANES, sums[v], dtype);
}

INLINE void convolve_row(void *out, const void *const *inputs, int64_t num_channels, const struct workspace *w,
                         int64_t num_taps, bool silu, const enum dtype dtype)
{
    int64_t i = 0;
    for (; i + STEP * LANES <= num_channels; i += STEP * LANES)
        convolve_vectors(out, inputs, w, num_taps, silu, i, num_channels - i, STEP, dtype);
    for (; i < num_channels; i += LANES)
        convolve_vectors(out, inputs, w, num_taps, silu, i, num_channels - i, 1, dtype);
}

/* Channels of a row of a state. */
INLINE void *state_row(const struct causal_conv *p, int64_t slot, int64_t row, int64_t channel, const enum dtype dtype)
{
    return (void *)at(p->state, (slot * (p->num_taps - 1) + row) * p->num_channels + channel, dtype);
}

INLINE void convolve_sequence(const struct causal_conv *p, int64_t sequence, struct channels channels,
                              struct workspace *w, const enum dtype dtype)
{
    const struct sequences *s = &p->sequences;
    const int64_t num_before = p->num_taps - 1, num_rows = s->num_rows[sequence], first = channels.first;
    const int64_t read = s->read[sequence], write = s->write[sequence], save = s->save[sequence];
    const size_t bytes = (size_t)channels.count * size_of(dtype);
    for (int64_t i = 0; i < num_before; i++) {
        void *before = (void *)at(w->before, i * MAX_BLOCK, dtype);
        if (read < 0)
            memset(before, 0, bytes);
        else
            memcpy(before, state_row(p, read, i, first, dtype), bytes);
    }
/* Row i of those before the sequence's rows, followed by these. */
#define INPUT(i)                                                                                                      \
    ((i) < num_before ? at(w->before, (i) * MAX_BLOCK, dtype)                                                         \
                      : at(p->x, (s->row_start[sequence] + (i) - num_before) * p->x_stride + first, dtype))
    for (int64_t row = 0; row < num_rows; row++) {
        const void *inputs[MAX_TAPS];
        for (int64_t tap = 0; tap <= num_before; tap++)
            inputs[tap] = INPUT(row + tap);
        if (row + ROWS_AHEAD < num_rows) /* 1,024 rows of 8,192 in bfloat16, one Xeon core: 7.9 ms, 9.1 without */
            prefetch(INPUT(num_before + row + ROWS_AHEAD), channels.count, dtype);
        void *out = (void *)at(p->out, (s->row_start[sequence] + row) * p->num_channels + first, dtype);
        if (p->num_taps == 4)
            convolve_row(out, inputs, channels.count, w, 4, p->silu, dtype);
        else
            convolve_row(out, inputs, channels.count, w, p->num_taps, p->silu, dtype);
    }
    for (int64_t i = 0; i < num_before; i++) {
        if (save >= 0)
            memcpy(state_row(p, save, i, first, dtype), INPUT(s->num_rows_saved[sequence] + i), bytes);
        memcpy(state_row(p, write, i, first, dtype), INPUT(num_rows + i), bytes);
    }
#undef INPUT
}

INLINE void convolve_channels(const struct causal_conv *p, struct channels channels, struct workspace *w,
                              const enum dtype dtype)
{
    transpose_taps(p, channels, w, dtype);
    for (int64_t sequence = 0; sequence < p->sequences.num_sequences; sequence++)
        convolve_sequence(p, sequence, channels, w, dtype);
}

struct conv_call {
    const struct causal_conv *p;
    int64_t block; /* channels of an item */
    struct workspace *workspaces;
    enum dtype dtype;
};

static void conv_region(struct team *team, void *argument)
{
    const struct conv_call *call = argument;
    const int64_t num_channels = call->p->num_channels, block = call->block;
    struct workspace *w = call->workspaces + team->thread;
    struct work work = start_work(team, (num_channels + block - 1) / block);
    for (int64_t item; take(team, &work, &item);) {
        const struct channels channels = {item * block, MIN(block, num_channels - item * block)};
        if (call->dtype == BFLOAT16)
            convolve_channels(call->p, channels, w, BFLOAT16);
        else
            convolve_channels(call->p, channels, w, FLOAT32);
    }
}

/* Whole steps, so that whether a channel is part of a whole step does not depend on the number of threads. */
static int64_t block_for(int64_t num_channels, int num_threads)
{
    int64_t block = MAX_BLOCK;
    while (num_threads > 1 && block > STEP * LANES && num_channels < ENOUGH_ITEMS * num_threads * block)
        block /= 2;
    return block;
}

/* num_taps: 2 to MAX_TAPS. */
EXPORT int causal_conv(const struct causal_conv *p, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const enum status status = check_sequences(&p->sequences);
    if (status != OK)
        return status;
    if (count_rows(&p->sequences) * p->num_channels <= PARALLEL_ELEMENTS)
        num_threads = 1;
    struct workspace *workspaces = grow_scratch(&scratch, &capacity, (size_t)num_threads * sizeof(struct workspace));
    if (!workspaces)
        return OUT_OF_MEMORY;
    struct conv_call call = {p, block_for(p->num_channels, num_threads), workspaces, (enum dtype)dtype};
    return run_beside(num_threads, 1, conv_region, &call) ? OK : OUT_OF_MEMORY;
}
