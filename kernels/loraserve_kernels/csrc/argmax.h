/* See argmax.c. */
#pragma once

#include "team.h"
#include "vector.h"

/* What is known of the largest element of some of a row. */
struct peak {
    float value;   /* NaN where there is one: it counts as the largest */
    int64_t start; /* not behind the first element of this value, and not far before it */
};

/* Of the elements from start to end. */
struct peak peak_of(const void *x, int64_t start, int64_t end, enum dtype dtype);

/* Peaks that argmax_stage makes for a row. */
int64_t num_peaks_of(int64_t size);

/* Of rows of `size` elements in parts, shared by the team: one piece of work. peaks: [num_rows, num_peaks_of(size)].
 * Stride in elements. NOTE: x must be complete; peaks are to be completed. */
void argmax_stage(struct team *team, struct peak *peaks, const void *x, int64_t stride, int64_t num_rows, int64_t size,
                  enum dtype dtype);

/* Of a row: the first of the largest. */
struct peak largest_peak(const struct peak *peaks, int64_t num_peaks);

/* The first index of the row's largest element, or its complement when that is not finite. */
int64_t index_of_largest(const struct peak *peaks, int64_t num_peaks, const void *x, enum dtype dtype);
