/* silu(gate) * up, in float32. */
#include "vector.h"

#define PARALLEL_ELEMENTS (32 << 10)

INLINE vf silu(vf gate) { return gate / (1.0f + vexp(-gate)); }

INLINE void silu_mul_row(void *y, const void *gate, const void *up, int64_t size, const enum dtype dtype)
{
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(y, i, silu(load(gate, i, dtype)) * load(up, i, dtype), dtype);
    if (i < size)
        store_partial(y, i, size - i,
                      silu(load_partial(gate, i, size - i, dtype)) * load_partial(up, i, size - i, dtype), dtype);
}

EXPORT int silu_mul(void *y, const void *gate, int64_t gate_stride, const void *up, int64_t up_stride, int64_t num_rows,
                    int64_t size, int dtype, int num_threads)
{
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < num_rows; row++) {
        const void *g = at(gate, row * gate_stride, dtype), *u = at(up, row * up_stride, dtype);
        void *out = (void *)at(y, row * size, dtype);
        if (dtype == BFLOAT16)
            silu_mul_row(out, g, u, size, BFLOAT16);
        else
            silu_mul_row(out, g, u, size, FLOAT32);
    }
    return OK;
}
