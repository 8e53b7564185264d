/* Products of floats, see tile_products.h: of weights as they are packed, or widened from fewer bits. */
#include "tile_products.h"

INLINE void multiply(float *sums, const struct product *product, const int rows, const int panels, const enum dtype dtype,
                     const enum weight_format format)
{
    const bool widens = format != PLAIN;
    const int factors = widens ? 1 : factors_of(dtype);
    const uint32_t *x = product->x;
    char *weight = product->weight;
    const char *ahead = product->ahead;
    const int64_t words = product->words, panel_bytes = product->panel_bytes, ahead_bytes = product->ahead_bytes;
    struct quantized_panel quantized[MAX_TILE_PANELS];
    for (int p = 0; p < panels && widens; p++)
        quantized[p] = product->quantized[p];
    vf sum[MAX_TILE_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * panels; i++)
        sum[i] = factors == 1 && product->adds ? load(sums, i * LANES, FLOAT32) : (vf){0};
    for (int64_t word = 0; word < words; word++, ahead += ahead_bytes) {
#pragma GCC unroll 4
        for (int line = 0; line < panels * (int)sizeof(vf); line += widens ? 128 : 64)
            __builtin_prefetch(ahead + line, 0, 2);
#pragma GCC unroll 2
        for (int factor = 0; factor < factors; factor++) {
            vf column[MAX_TILE_PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                const int64_t place = p * panel_bytes + word * (int64_t)sizeof(vf);
                if (widens)
                    column[p] = widen_word(quantized + p, product->first_word + word, format);
                else
                    memcpy(column + p, weight + place, sizeof(vf));
                if (widens && weight)
                    memcpy(weight + place, column + p, sizeof(vf));
                if (factors == 2)
                    column[p] = half_of(column[p], factor);
                KEEP_IN_REGISTER(column[p]);
            }
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                const vf input = spread(x + (word * factors + factor) * TILE_ROWS + row);
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
                    sum[row * panels + p] = multiply_add(sum[row * panels + p], input, column[p], dtype);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * panels; i++)
        memcpy(sums + i * LANES, sum + i, sizeof(vf));
}

TILE_PRODUCTS(plain_bfloat16, multiply, BFLOAT16, PLAIN)
TILE_PRODUCTS(plain_float32, multiply, FLOAT32, PLAIN)
TILE_PRODUCTS(widen_int8, multiply, FLOAT32, INT8)
TILE_PRODUCTS(widen_int4, multiply, FLOAT32, INT4)
TILE_PRODUCTS(widen_mxfp4, multiply, FLOAT32, MXFP4)
TILE_PRODUCTS(widen_nf4, multiply, FLOAT32, NF4)
TILE_PRODUCTS(widen_uint4, multiply, FLOAT32, UINT4)
TILE_PRODUCTS(widen_uint4_g128, multiply, FLOAT32, UINT4_G128)

const tile_products *float_products(enum weight_format format, bool is_first, enum dtype dtype)
{
    if (format == PLAIN)
        return dtype == BFLOAT16 ? &plain_bfloat16 : &plain_float32;
    if (!is_first)
        return &plain_float32;
    return format == INT8    ? &widen_int8
           : format == INT4  ? &widen_int4
           : format == MXFP4 ? &widen_mxfp4
           : format == NF4   ? &widen_nf4
           : format == UINT4 ? &widen_uint4
                             : &widen_uint4_g128;
}
