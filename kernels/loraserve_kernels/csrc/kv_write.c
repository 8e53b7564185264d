/* Stores the step's K and V rows in their cache slots. */
#include "vector.h"

#define PARALLEL_BYTES (256 << 10) /* below this one thread is faster */

/* Strides in elements. Caches are dense [num_blocks, num_kv_heads, block_size, head_dim]. */
EXPORT int kv_write(const void *k, int64_t k_row_stride, int64_t k_head_stride, const void *v, int64_t v_row_stride,
                    int64_t v_head_stride, void *k_cache, void *v_cache, const int64_t *slot_mapping, int64_t num_rows,
                    int64_t num_blocks, int64_t num_kv_heads, int64_t block_size, int64_t head_dim, int dtype,
                    int num_threads)
{
    const size_t head_bytes = (size_t)head_dim * size_of(dtype);
    for (int64_t row = 0; row < num_rows; row++)
        if (slot_mapping[row] < 0 || slot_mapping[row] >= num_blocks * block_size)
            return BAD_SLOT;

#pragma omp parallel for num_threads(num_threads) if ((size_t)(num_rows * num_kv_heads) * head_bytes > PARALLEL_BYTES)
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t block = slot_mapping[row] / block_size, offset = slot_mapping[row] % block_size;
        for (int64_t head = 0; head < num_kv_heads; head++) {
            const int64_t slot = ((block * num_kv_heads + head) * block_size + offset) * head_dim;
            memcpy((void *)at(k_cache, slot, dtype), at(k, row * k_row_stride + head * k_head_stride, dtype), head_bytes);
            memcpy((void *)at(v_cache, slot, dtype), at(v, row * v_row_stride + head * v_head_stride, dtype), head_bytes);
        }
    }
    return OK;
}
