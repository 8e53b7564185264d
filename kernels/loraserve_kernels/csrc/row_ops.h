/* Operations on one row, used by the standalone ops and by decoder_layer.c. */
#pragma once

#include "vector.h"

/* rms_norm.c; y and x may be the same. */
void rms_norm_row(void *y, const void *x, const void *weight, int64_t size, float eps, enum dtype dtype);

/* silu_mul.c */
void silu_mul_row(void *y, const void *gate, const void *up, int64_t size, enum dtype dtype);

/* rotary_kv_write.c. Strides in elements. cosine, sine: dense [num_rows, rotary_dim]. Caches as in kv_write. */
struct rotary {
    void *q;
    int64_t q_row_stride, q_head_stride;
    const void *k;
    int64_t k_row_stride, k_head_stride;
    const void *v;
    int64_t v_row_stride, v_head_stride;
    const void *cosine, *sine;
    void *k_cache, *v_cache;
    const int64_t *slot_mapping;
    int64_t num_rows, num_heads, num_blocks, num_kv_heads, block_size, head_dim, rotary_dim;
};

enum status rotary_check(const struct rotary *p);
void rotary_row(const struct rotary *p, int64_t row, enum dtype dtype);
