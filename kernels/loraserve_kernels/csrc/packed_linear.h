/* See packed_linear.c. */
#pragma once

#include <stddef.h>

#include "amx.h"
#include "team.h"
#include "vector.h"

/* PLAIN is laid out by pack_weight, COMPRESSED by compress_weight; the others, in fewer bits, by quantize_weight or
 * pack_four_bits. */
enum weight_format { PLAIN = 0, COMPRESSED = 1, INT8 = 2, INT4 = 3, MXFP4 = 4, NF4 = 5, UINT4 = 6, UINT4_G128 = 7 };

struct packed_linear {
    const void *weight;
    const void *bias; /* [num_outputs] or NULL */
    int64_t num_outputs, depth, format;
    const int32_t *order; /* [depth]: the input that each column of the weight is for, or NULL = they are in order */
};

INLINE bool is_quantized(const struct packed_linear *linear) { return linear->format >= INT8; }

INLINE int64_t num_panels_of(int64_t num_outputs) { return (num_outputs + LANES - 1) / LANES; }

/* AMX tiles of a bfloat16 panel, which is zero past the depth. */
INLINE int64_t panel_tiles_of(int64_t depth) { return (depth + 2 * AMX_WORDS - 1) / (2 * AMX_WORDS); }

/* Bytes of scratch for this many rows; 0 if x is read in place. */
size_t linear_scratch(const struct packed_linear *linear, int64_t num_rows, int num_threads, enum dtype dtype);

/* Row `output` of the weight, with the values that are multiplied, in the order of its columns. row: dense [depth]. */
void packed_row(void *row, const struct packed_linear *linear, int64_t output, enum dtype dtype);

/* y = x Wᵀ + bias, in up to three pieces of work. NOTE: x must be complete; call `complete` before reading y. */
void linear_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
                  int64_t x_stride, int64_t num_rows, void *scratch, enum dtype dtype);

/* The standalone op: linear_stage on its own team. y: dense or strided [num_rows, num_outputs]. */
int packed_linear(const struct packed_linear *linear, void *y, int64_t y_stride, const void *x, int64_t x_stride,
                  int64_t num_rows, int dtype, int num_threads);
