/* y = x Wᵀ + bias for a row-major weight that is not repacked, such as an lm_head tied to a scaled embedding, or an
 * adapter's own.
 *
 * Each thread takes blocks of rows of W and reads them from memory once for all rows of x.
 *
 * With AMX, rows of W are multiplied in place by columns of x, so only x is packed. On two Xeon cores, bfloat16,
 * 16,000 x 768 from memory, us for 1, 4, 16 and 64 rows of x: 975, 1,165, 2,520 and 7,900 without AMX, 1,090, 1,080, 1,140
 * and 1,940 with it.
 */
#include "amx.h"
#include "team.h"
#include "vector.h"

#define ROWS 4          /* rows of x per tile */
#define OUTPUTS (TILE_VECTORS / 4) /* rows of W per tile */
#define SINGLE_OUTPUTS MIN(8, LANES) /* the same for a single row of x */
#define BLOCK 64        /* rows of W that a thread takes at a time */
#define PARALLEL_WEIGHTS 65536 /* below this a second thread costs more than it saves */

/* Prefetches the next tile's rows of W as it goes. Measured on one EPYC Zen 5 core, 30,000 x 1,024: bfloat16 4 rows 3.6
 * -> 1.5 ms, 16 rows 6.1 -> 2.6 ms; prefetching again for every tile of x's rows helps bfloat16 and hurts float32. */
INLINE void linear_tile(void *y, int64_t y_stride, const void *x, int64_t x_stride, const void *weight, int64_t depth,
                        const void *bias, const int rows, const int outputs, bool is_first, const enum dtype dtype)
{
    const int64_t step = step_of(dtype);
    vf sum[TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * outputs; i++)
        sum[i] = (vf){0};
    int64_t k = 0;
    for (; k + step <= depth; k += step) {
        vf input[TILE_VECTORS];
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
            input[row] = load_step(x, row * x_stride + k, dtype);
#pragma GCC unroll 16
        for (int output = 0; output < outputs; output++) {
            const vf column = load_step(weight, output * depth + k, dtype);
            if (dtype == BFLOAT16 || is_first)
                __builtin_prefetch(at(weight, (output + outputs) * depth + k, dtype), 0, 3);
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++)
                sum[row * outputs + output] = multiply_add(sum[row * outputs + output], input[row], column, dtype);
        }
    }
    if (k < depth)
#pragma GCC unroll 16
        for (int i = 0; i < rows * outputs; i++)
            sum[i] = multiply_add(sum[i], load_step_partial(x, i / outputs * x_stride + k, depth - k, dtype),
                                  load_step_partial(weight, i % outputs * depth + k, depth - k, dtype), dtype);
    float sums[LANES + TILE_VECTORS];
    horizontal_sums(sums, sum, rows * outputs);
    const vf added = bias ? load_partial(bias, 0, outputs, dtype) : (vf){0};
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        store_partial(y, row * y_stride, outputs, load(sums, row * outputs, FLOAT32) + added, dtype);
}

/* All rows of x times `count` rows of W. */
INLINE void linear_block(void *y, int64_t y_stride, const void *x, int64_t x_stride, int64_t num_rows,
                         const void *weight, int64_t depth, const void *bias, int64_t count, const enum dtype dtype)
{
#define LINEAR_ROWS(tile_rows, tile_outputs)                                                                          \
    for (; row + tile_rows <= num_rows; row += tile_rows)                                                             \
        linear_tile((void *)at(y, row * y_stride + output, dtype), y_stride, at(x, row * x_stride, dtype), x_stride,  \
                    at(weight, output * depth, dtype), depth, bias ? at(bias, output, dtype) : NULL, tile_rows,       \
                    tile_outputs, row == 0, dtype);
    int64_t output = 0;
    if (num_rows < ROWS)
        for (; output + SINGLE_OUTPUTS <= count; output += SINGLE_OUTPUTS) {
            int64_t row = 0;
            LINEAR_ROWS(1, SINGLE_OUTPUTS)
        }
    for (; output + OUTPUTS <= count; output += OUTPUTS) {
        int64_t row = 0;
        LINEAR_ROWS(ROWS, OUTPUTS)
        LINEAR_ROWS(1, OUTPUTS)
    }
    for (; output < count; output++) {
        int64_t row = 0;
        LINEAR_ROWS(1, 1)
    }
#undef LINEAR_ROWS
}

/* All rows of x times the block of W that begins at row `first`. */
static void linear_range(void *y, int64_t y_stride, const void *x, int64_t x_stride, int64_t num_rows,
                         const void *weight, int64_t num_outputs, int64_t depth, const void *bias, int64_t first,
                         enum dtype dtype)
{
    const int64_t count = MIN(BLOCK, num_outputs - first);
    void *out = (void *)at(y, first, dtype);
    const void *w = at(weight, first * depth, dtype), *b = bias ? at(bias, first, dtype) : NULL;
    if (dtype == BFLOAT16)
        linear_block(out, y_stride, x, x_stride, num_rows, w, depth, b, count, BFLOAT16);
    else
        linear_block(out, y_stride, x, x_stride, num_rows, w, depth, b, count, FLOAT32);
}

struct linear_call {
    void *y;
    const void *x, *weight, *bias;
    int64_t y_stride, x_stride, num_rows, num_outputs, depth;
    enum dtype dtype;
    uint32_t *packed; /* for AMX: tiles of rows of x, [tile][word][row]; NULL = without AMX */
};

static void linear_region(struct team *team, void *argument)
{
    const struct linear_call *call = argument;
    struct work work = start_work(team, (call->num_outputs + BLOCK - 1) / BLOCK);
    for (int64_t block; take(team, &work, &block);)
        linear_range(call->y, call->y_stride, call->x, call->x_stride, call->num_rows, call->weight, call->num_outputs,
                     call->depth, call->bias, block * BLOCK, call->dtype);
}

/* Rows of x from `first` on as columns; those past the last one are zero. */
static void pack_columns(uint32_t *tile, const struct linear_call *call, int64_t first)
{
    const int64_t words = call->depth / 2, count = MIN(AMX_ROWS, call->num_rows - first);
    if (count < AMX_ROWS)
        memset(tile, 0, (size_t)words * AMX_ROWS * sizeof *tile);
    for (int64_t row = 0; row < count; row++) {
        const char *x = at(call->x, (first + row) * call->x_stride, BFLOAT16);
        for (int64_t word = 0; word < words; word++)
            memcpy(tile + word * AMX_ROWS + row, x + word * (int64_t)sizeof *tile, sizeof *tile);
    }
}

/* sums: [BLOCK, AMX_ROWS], of rows of x from `first` on. */
static void store_columns(const struct linear_call *call, const float *sums, int64_t output, int64_t first)
{
    for (int64_t row = first; row < MIN(call->num_rows, first + AMX_ROWS); row++)
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            float values[LANES] __attribute__((aligned(64)));
            for (int64_t lane = 0; lane < LANES; lane++)
                values[lane] = sums[(i + lane) * AMX_ROWS + row - first];
            const vf added = call->bias ? load(call->bias, output + i, BFLOAT16) : (vf){0};
            store(call->y, row * call->y_stride + output + i, load(values, 0, FLOAT32) + added, BFLOAT16);
        }
}

/* Blocks with AMX, the last one without if it is not whole. */
static void amx_linear_region(struct team *team, void *argument)
{
    const struct linear_call *call = argument;
    const int64_t words = call->depth / 2, row_bytes = call->depth * (int64_t)size_of(BFLOAT16);
    struct work packing = start_work(team, (call->num_rows + AMX_ROWS - 1) / AMX_ROWS);
    for (int64_t tile; take(team, &packing, &tile);)
        pack_columns(call->packed + tile * words * AMX_ROWS, call, tile * AMX_ROWS);
    complete(team);
    float sums[BLOCK * AMX_ROWS] __attribute__((aligned(64)));
    struct work work = start_work(team, (call->num_outputs + BLOCK - 1) / BLOCK);
    amx_begin(AMX_ROWS);
    for (int64_t block; take(team, &work, &block);) {
        const int64_t output = block * BLOCK;
        if (output + BLOCK > call->num_outputs) {
            linear_range(call->y, call->y_stride, call->x, call->x_stride, call->num_rows, call->weight,
                         call->num_outputs, call->depth, call->bias, output, BFLOAT16);
            continue;
        }
        for (int64_t row = 0; row < call->num_rows; row += AMX_ROWS) {
            amx_multiply_row_major(sums, at(call->weight, output * call->depth, BFLOAT16), row_bytes,
                                   call->packed + row * words, words, row == 0);
            store_columns(call, sums, output, row);
        }
    }
    amx_end();
}

/* Scratch memory for x as columns; NULL if there is too little. */
static uint32_t *columns_memory(int64_t num_rows, int64_t depth)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const int64_t num_tiles = (num_rows + AMX_ROWS - 1) / AMX_ROWS;
    return grow_scratch(&scratch, &capacity, (size_t)(num_tiles * AMX_ROWS * depth / 2) * sizeof(uint32_t));
}

/* weight: dense [num_outputs, depth]; bias: [num_outputs] or NULL; y: rows of num_outputs. */
EXPORT int linear_rowmajor(void *y, int64_t y_stride, const void *x, int64_t x_stride, int64_t num_rows,
                           const void *weight, int64_t num_outputs, int64_t depth, const void *bias, int dtype,
                           int num_threads)
{
    struct linear_call call = {
        y, x, weight, bias, y_stride, x_stride, num_rows, num_outputs, depth, (enum dtype)dtype, NULL,
    };
    const bool with_amx = dtype == BFLOAT16 && amx_is_on() && depth % (2 * AMX_WORDS) == 0 && num_rows > 0;
    if (with_amx && !(call.packed = columns_memory(num_rows, depth)))
        return OUT_OF_MEMORY;
    if (num_outputs * depth <= PARALLEL_WEIGHTS)
        num_threads = 1;
    return run_beside(num_threads, 2, with_amx ? amx_linear_region : linear_region, &call) ? OK : OUT_OF_MEMORY;
}
