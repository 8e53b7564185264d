/* c = a b for small register-blocked tiles. Each element is summed over `depth` in order by one chain of fused
 * multiply-adds, so a result does not depend on how rows and columns are tiled (batch invariance). */
#pragma once

#include "vector.h"

/* One tile of rows x vectors * LANES. a: words [rows, depth], b: words [depth, vectors * LANES], c: float32; a word is a
 * float32 or, if `product` is BFLOAT16 and the CPU multiplies those, a pair of bfloat16. */
INLINE void gemm_tile(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                      int64_t depth, const int rows, const int vectors, const bool add, const enum dtype product)
{
    vf sum[TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++)
        sum[i] = add ? load(c, i / vectors * c_stride + i % vectors * LANES, FLOAT32) : (vf){0};
    for (int64_t k = 0; k < depth; k++) {
        vf column[TILE_VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++)
            column[v] = load(b, k * b_stride + v * LANES, FLOAT32);
#pragma GCC unroll 16
        for (int i = 0; i < rows * vectors; i++)
            sum[i] = multiply_add(sum[i], spread(a + i / vectors * a_stride + k), column[i % vectors], product);
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++)
        store(c, i / vectors * c_stride + i % vectors * LANES, sum[i], FLOAT32);
}

/* All of c: float32 [rows, columns], columns a multiple of LANES. */
INLINE void gemm(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                 int64_t rows, int64_t columns, int64_t depth, const bool add, const enum dtype product)
{
    const int wide = TILE_VECTORS / 4;
    int64_t row = 0;
#define GEMM_ROWS(tile_rows)                                                                                          \
    for (; row + tile_rows <= rows; row += tile_rows) {                                                               \
        int64_t column = 0;                                                                                           \
        for (; column + wide * LANES <= columns; column += wide * LANES)                                              \
            gemm_tile(c + row * c_stride + column, c_stride, a + row * a_stride, a_stride, b + column, b_stride,      \
                      depth, tile_rows, wide, add, product);                                                          \
        for (; column < columns; column += LANES)                                                                     \
            gemm_tile(c + row * c_stride + column, c_stride, a + row * a_stride, a_stride, b + column, b_stride,      \
                      depth, tile_rows, 1, add, product);                                                             \
    }
    GEMM_ROWS(4)
    GEMM_ROWS(3)
    GEMM_ROWS(2)
    GEMM_ROWS(1)
#undef GEMM_ROWS
}
