/* The first index of each row's largest element. */
#include <math.h>

#include "vector.h"

#define PARALLEL_ELEMENTS (512 << 10)
#define CHUNK (32 * LANES) /* elements between two looks at the largest so far */

INLINE float largest_of(vf values)
{
    float lanes[LANES], largest = -INFINITY;
    memcpy(lanes, &values, sizeof lanes);
    for (int i = 0; i < LANES; i++)
        largest = MAX(largest, lanes[i]);
    return largest;
}

INLINE float scalar(const void *x, int64_t i, const enum dtype dtype)
{
    if (dtype == FLOAT32)
        return ((const float *)x)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The index, or its complement when the element is not finite. NaN counts as the largest. */
INLINE int64_t best_of(const void *x, int64_t size, const enum dtype dtype)
{
    float best = -INFINITY;
    int64_t best_start = 0, start = 0;
    vi nans = {0};
    for (; start + CHUNK <= size; start += CHUNK) {
        vf largest[4];
        for (int v = 0; v < 4; v++)
            largest[v] = splat(-INFINITY);
        for (int64_t i = start; i < start + CHUNK; i += 4 * LANES)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                const vf value = load(x, i + v * LANES, dtype);
                nans |= value != value;
                largest[v] = vmax(value, largest[v]);
            }
        const float of_chunk = largest_of(vmax(vmax(largest[0], largest[1]), vmax(largest[2], largest[3])));
        if (of_chunk > best) {
            best = of_chunk;
            best_start = start;
        }
    }
    bool has_nan = false;
    for (int i = 0; i < LANES; i++)
        has_nan = has_nan || nans[i] != 0;
    for (int64_t i = start; i < size; i++) {
        const float value = scalar(x, i, dtype);
        has_nan = has_nan || value != value;
        if (value > best) {
            best = value;
            best_start = i;
        }
    }
    for (int64_t i = has_nan ? 0 : best_start; i < size; i++) {
        const float value = scalar(x, i, dtype);
        if (has_nan ? value != value : value == best)
            return has_nan || isinf(best) ? ~i : i;
    }
    return ~INT64_C(0); /* not reached: the largest is somewhere */
}

EXPORT int argmax(int64_t *best, const void *x, int64_t stride, int64_t num_rows, int64_t size, int dtype,
                  int num_threads)
{
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < num_rows; row++) {
        if (dtype == BFLOAT16)
            best[row] = best_of(at(x, row * stride, BFLOAT16), size, BFLOAT16);
        else
            best[row] = best_of(at(x, row * stride, FLOAT32), size, FLOAT32);
    }
    return OK;
}
