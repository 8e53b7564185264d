/* silu(gate) * up, in float32. */
#include "row_ops.h"

#define PARALLEL_ELEMENTS (32 << 10)

INLINE vf silu(vf gate) { return gate / (1.0f + vexp(-gate)); }

INLINE void multiply(void *y, const void *gate, const void *up, int64_t size, const enum dtype dtype)
{
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(y, i, silu(load(gate, i, dtype)) * load(up, i, dtype), dtype);
    if (i < size)
        store_partial(y, i, size - i,
                      silu(load_partial(gate, i, size - i, dtype)) * load_partial(up, i, size - i, dtype), dtype);
}

void silu_mul_row(void *y, const void *gate, const void *up, int64_t size, enum dtype dtype)
{
    if (dtype == BFLOAT16)
        multiply(y, gate, up, size, BFLOAT16);
    else
        multiply(y, gate, up, size, FLOAT32);
}

EXPORT int silu_mul(void *y, const void *gate, int64_t gate_stride, const void *up, int64_t up_stride, int64_t num_rows,
                    int64_t size, int dtype, int num_threads)
{
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < num_rows; row++)
        silu_mul_row((void *)at(y, row * size, (enum dtype)dtype), at(gate, row * gate_stride, (enum dtype)dtype),
                     at(up, row * up_stride, (enum dtype)dtype), size, (enum dtype)dtype);
    return OK;
}
