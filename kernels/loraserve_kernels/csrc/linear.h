/* See linear.c. */
#pragma once

#include "team.h"
#include "vector.h"

/* y = x Wᵀ + bias for a row-major weight, shared by the team. One piece of work. NOTE: x must be complete; y is to be
 * completed. */
void row_major_stage(struct team *team, void *y, int64_t y_stride, const void *x, int64_t x_stride, int64_t num_rows,
                     const void *weight, int64_t num_outputs, int64_t depth, const void *bias, enum dtype dtype);
