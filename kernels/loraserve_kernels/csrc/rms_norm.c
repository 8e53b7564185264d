/* x / sqrt(mean(x²) + eps) * weight over the last dimension, in float32. */
#include <math.h>

#include "row_ops.h"
#include "team.h"

#define PARALLEL_ELEMENTS (64 << 10)
#define ROWS_OF_ITEM 8

INLINE void normalize(void *y, const void *x, const void *weight, int64_t size, float eps, const enum dtype dtype)
{
    vf squares[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            vf value = load(x, i + v * LANES, dtype);
            squares[v] += value * value;
        }
    for (; i + LANES <= size; i += LANES) {
        vf value = load(x, i, dtype);
        squares[0] += value * value;
    }
    if (i < size) {
        vf value = load_partial(x, i, size - i, dtype);
        squares[1] += value * value;
    }
    const float mean = horizontal_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size;
    const float scale = 1.0f / sqrtf(mean + eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(y, i, load(x, i, dtype) * scale * load(weight, i, dtype), dtype);
    if (i < size)
        store_partial(y, i, size - i,
                      load_partial(x, i, size - i, dtype) * scale * load_partial(weight, i, size - i, dtype), dtype);
}

void rms_norm_row(void *y, const void *x, const void *weight, int64_t size, float eps, enum dtype dtype)
{
    if (dtype == BFLOAT16)
        normalize(y, x, weight, size, eps, BFLOAT16);
    else
        normalize(y, x, weight, size, eps, FLOAT32);
}

struct norm_call {
    void *y;
    const void *x, *weight;
    int64_t outer_stride, inner_size, inner_stride, num_rows, size;
    float eps;
    enum dtype dtype;
};

static void norm_region(struct team *team, void *argument)
{
    const struct norm_call *call = argument;
    const int64_t inner_size = call->inner_size, size = call->size;
    const enum dtype dtype = call->dtype;
    struct work work = start_work(team, (call->num_rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM);
    for (int64_t item; take(team, &work, &item);)
        for (int64_t row = item * ROWS_OF_ITEM; row < MIN((item + 1) * ROWS_OF_ITEM, call->num_rows); row++) {
            const int64_t start = row / inner_size * call->outer_stride + row % inner_size * call->inner_stride;
            rms_norm_row((void *)at(call->y, row * size, dtype), at(call->x, start, dtype), call->weight, size, call->eps,
                         dtype);
        }
}

/* x: rows of `size` elements at outer * outer_stride + inner * inner_stride; y: dense. */
EXPORT int rms_norm(void *y, const void *x, int64_t outer_size, int64_t outer_stride, int64_t inner_size,
                    int64_t inner_stride, const void *weight, int64_t size, float eps, int dtype, int num_threads)
{
    const int64_t num_rows = outer_size * inner_size;
    struct norm_call call = {y, x, weight, outer_stride, inner_size, inner_stride, num_rows, size, eps, (enum dtype)dtype};
    if (num_rows * size <= PARALLEL_ELEMENTS)
        num_threads = 1;
    return run_beside(num_threads, 1, norm_region, &call) ? OK : OUT_OF_MEMORY;
}
