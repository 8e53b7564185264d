/* Rotates q in place and stores rotated k and unchanged v in their cache slots: one pass over the step's q, k and v. */
#include "row_ops.h"

#define PARALLEL_ELEMENTS (64 << 10)

/* Rotates the two halves of the first 2 * half elements against each other; src and dst may be the same. */
INLINE void rotate(void *dst, const void *src, const void *cosine, const void *sine, int64_t half,
                   const enum dtype dtype)
{
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf low = load(src, i, dtype), high = load(src, half + i, dtype);
        store(dst, i, low * load(cosine, i, dtype) - high * load(sine, i, dtype), dtype);
        store(dst, half + i, high * load(cosine, half + i, dtype) + low * load(sine, half + i, dtype), dtype);
    }
    if (i < half) {
        const int64_t n = half - i;
        vf low = load_partial(src, i, n, dtype), high = load_partial(src, half + i, n, dtype);
        store_partial(dst, i, n, low * load_partial(cosine, i, n, dtype) - high * load_partial(sine, i, n, dtype),
                      dtype);
        store_partial(dst, half + i, n,
                      high * load_partial(cosine, half + i, n, dtype) + low * load_partial(sine, half + i, n, dtype),
                      dtype);
    }
}

INLINE void rotate_row(const struct rotary *p, int64_t row, const enum dtype dtype)
{
    const int64_t half = p->rotary_dim / 2;
    const size_t head_bytes = (size_t)p->head_dim * size_of(dtype), rotated_bytes = 2 * (size_t)half * size_of(dtype);
    const void *cosine = at(p->cosine, row * p->rotary_dim, dtype), *sine = at(p->sine, row * p->rotary_dim, dtype);
    for (int64_t head = 0; head < p->num_heads; head++) {
        void *q = (void *)at(p->q, row * p->q_row_stride + head * p->q_head_stride, dtype);
        rotate(q, q, cosine, sine, half, dtype);
    }
    const int64_t block = p->slot_mapping[row] / p->block_size, offset = p->slot_mapping[row] % p->block_size;
    for (int64_t head = 0; head < p->num_kv_heads; head++) {
        const int64_t slot = ((block * p->num_kv_heads + head) * p->block_size + offset) * p->head_dim;
        const char *k = at(p->k, row * p->k_row_stride + head * p->k_head_stride, dtype);
        char *k_slot = (char *)at(p->k_cache, slot, dtype);
        rotate(k_slot, k, cosine, sine, half, dtype);
        memcpy(k_slot + rotated_bytes, k + rotated_bytes, head_bytes - rotated_bytes);
        memcpy((void *)at(p->v_cache, slot, dtype), at(p->v, row * p->v_row_stride + head * p->v_head_stride, dtype),
               head_bytes);
    }
}

enum status rotary_check(const struct rotary *p)
{
    for (int64_t row = 0; row < p->num_rows; row++)
        if (p->slot_mapping[row] < 0 || p->slot_mapping[row] >= p->num_blocks * p->block_size)
            return BAD_SLOT;
    return OK;
}

void rotary_row(const struct rotary *p, int64_t row, enum dtype dtype)
{
    if (dtype == BFLOAT16)
        rotate_row(p, row, BFLOAT16);
    else
        rotate_row(p, row, FLOAT32);
}

EXPORT int rotary_kv_write(const struct rotary *p, int dtype, int num_threads)
{
    const enum status status = rotary_check(p);
    if (status != OK)
        return status;
#pragma omp parallel for num_threads(num_threads) if (p->num_rows * p->num_heads * p->head_dim > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < p->num_rows; row++)
        rotary_row(p, row, (enum dtype)dtype);
    return OK;
}
