/* x / sqrt(mean(x²) + eps) * weight over the last dimension, in float32. */
#include <math.h>

#include "row_ops.h"

#define PARALLEL_ELEMENTS (64 << 10)

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

/* x: rows of `size` elements at outer * outer_stride + inner * inner_stride; y: dense. */
EXPORT int rms_norm(void *y, const void *x, int64_t outer_size, int64_t outer_stride, int64_t inner_size,
                    int64_t inner_stride, const void *weight, int64_t size, float eps, int dtype, int num_threads)
{
    const int64_t num_rows = outer_size * inner_size;
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < num_rows; row++) {
        const void *in = at(x, row / inner_size * outer_stride + row % inner_size * inner_stride, (enum dtype)dtype);
        rms_norm_row((void *)at(y, row * size, (enum dtype)dtype), in, weight, size, eps, (enum dtype)dtype);
    }
    return OK;
}
