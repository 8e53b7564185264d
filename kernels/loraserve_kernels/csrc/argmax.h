/* See argmax.c. */
#pragma once

#include "team.h"
#include "vector.h"

#include <math.h>

/* Elements i to i + LANES; those from `end` on are -INFINITY. */
INLINE vf load_before(const void *x, int64_t i, int64_t end, const enum dtype dtype)
{
    if (i + LANES <= end)
        return load(x, i, dtype);
    if (i >= end)
        return splat(-INFINITY);
    float values[LANES];
    const vf loaded = load_partial(x, i, end - i, dtype);
    memcpy(values, &loaded, sizeof values);
    for (int64_t lane = end - i; lane < LANES; lane++)
        values[lane] = -INFINITY;
    return load(values, 0, FLOAT32);
}

/* Sort key: ascending keys are descending values, equal values in order of index. No element may be a NaN. */
INLINE uint64_t key_of(float value, int64_t index)
{
    const float positive_zero = value + 0.0f; /* -0 becomes 0 */
    uint32_t bits;
    memcpy(&bits, &positive_zero, sizeof bits);
    return (uint64_t)(bits >> 31 ? bits : ~bits & INT32_MAX) << 32 | (uint64_t)index;
}

INLINE int64_t index_of_key(uint64_t key) { return (int64_t)(key & UINT32_MAX); }

/* The largest of a range of a row's elements. */
struct peak {
    float value;   /* NaN if there is one: it counts as the largest */
    int64_t start; /* at the first element with this value or shortly before it */
};

/* The peak of the elements start .. end. */
struct peak peak_of(const void *x, int64_t start, int64_t end, enum dtype dtype);

/* Number of peaks that argmax_stage writes for a row. */
int64_t num_peaks_of(int64_t size);

/* Finds the peaks of parts of rows of `size` elements: one piece of work. peaks: [num_rows, num_peaks_of(size)]. Stride
 * in elements. NOTE: x must be complete; call `complete` before reading peaks. */
void argmax_stage(struct team *team, struct peak *peaks, const void *x, int64_t stride, int64_t num_rows, int64_t size,
                  enum dtype dtype);

/* The first of a row's largest peaks. */
struct peak largest_peak(const struct peak *peaks, int64_t num_peaks);

/* The first index of the row's largest element; its complement (~) if that element is not finite. */
int64_t index_of_largest(const struct peak *peaks, int64_t num_peaks, const void *x, enum dtype dtype);
