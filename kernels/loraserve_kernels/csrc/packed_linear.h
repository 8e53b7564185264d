/* See packed_linear.c. */
#pragma once

#include <stddef.h>

#include "amx.h"
#include "team.h"
#include "vector.h"

/* As pack_weight lays a weight out, or compress_weight, or quantize_weight or pack_four_bits in fewer bits. */
enum weight_format { PLAIN = 0, COMPRESSED = 1, INT8 = 2, INT4 = 3, MXFP4 = 4, NF4 = 5, UINT4 = 6, UINT4_G128 = 7 };

struct packed_linear {
    const void *weight;
    const void *bias; /* [num_outputs] or NULL */
    int64_t num_outputs, depth, format;
    const int32_t *order; /* [depth]: the input that each column of the weight is of, or NULL = they are in order */
};

INLINE bool is_quantized(const struct packed_linear *linear) { return linear->format >= INT8; }

/* Panels of a weight. */
INLINE int64_t num_panels_of(int64_t num_outputs) { return (num_outputs + LANES - 1) / LANES; }

/* Tiles of AMX of a panel of bfloat16; what lies past the depth is zero. */
INLINE int64_t panel_tiles_of(int64_t depth) { return (depth + 2 * AMX_WORDS - 1) / (2 * AMX_WORDS); }

/* Bytes of scratch for so many rows; 0 where x is read where it is. */
size_t linear_scratch(const struct packed_linear *linear, int64_t num_rows, int num_threads, enum dtype dtype);

/* Row `output` of the weight, as it is multiplied, in the order of its columns: `row` is dense [depth]. */
void packed_row(void *row, const struct packed_linear *linear, int64_t output, enum dtype dtype);

/* y = x Wᵀ + bias, shared by the team. Up to three pieces of work. NOTE: x must be complete; y is to be completed. */
void linear_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
                  int64_t x_stride, int64_t num_rows, void *scratch, enum dtype dtype);

/* The whole op: linear_stage on a team of its own. y: dense or strided [num_rows, num_outputs]. */
int packed_linear(const struct packed_linear *linear, void *y, int64_t y_stride, const void *x, int64_t x_stride,
                  int64_t num_rows, int dtype, int num_threads);
