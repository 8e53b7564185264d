/* See draw.c. */
#pragma once

#include "argmax.h"

/* How to draw from one row. */
struct draw {
    double temperature, top_p, log_min_p; /* top_p 1: all; log_min_p -INFINITY: no minimum */
    uint64_t seed, position;
    int64_t row, top_k; /* top_k 0: all */
};

/* Draws from rows of `size` logits. Stride in elements; the draws' rows must lie in x. */
struct draw_plan {
    const struct draw *draws;
    int64_t num_draws;
    const void *x;
    int64_t stride, size;
    const struct peak *peaks; /* [rows of x, num_peaks_of(size)]; NULL: unknown */
    int64_t *chosen;          /* [num_draws] token ids; -1 if the row's largest logit is not finite */
    char *scratch;            /* draw_scratch(size) bytes for each thread */
    enum dtype dtype;
};

size_t draw_scratch(int64_t size);

/* Draws from one row of `size` logits, the largest of which is `peak`. */
int64_t draw_one(const struct draw *draw, const float *x, int64_t size, float peak, char *scratch);

/* One piece of work. NOTE: x and peaks must be complete; call `complete` before reading `chosen`. */
void draw_stage(struct team *team, const struct draw_plan *plan);
