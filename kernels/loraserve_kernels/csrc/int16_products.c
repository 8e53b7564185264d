/* Products of int16, see tile_products.h: of rounded rows and weights' multiples. */
#include "tile_products.h"

_Static_assert(WIDE_GROUP_WORDS == INT16_GROUP, "sums of a group are of one stretch of rounded rows");

#if MULTIPLIES_INT16
/* Sums each group of weights that share scales, scales the sums and adds them. widens: if false, the pairs are already at
 * `weight`. */
INLINE void multiply_int16(float *sums, const struct product *product, const int rows, const int panels,
                           const enum weight_format format, const bool widens)
{
    const int group_words = format == INT8 ? INT16_GROUP : group_words_of(format);
    const int bytes_of_four = panels * LANES * (format == INT8 ? 16 : has_zero_points(format) ? 10 : 9) / 2; /* scales too */
    const uint32_t *x = product->x;
    char *weight = product->weight;
    const char *ahead = product->ahead;
    const int64_t words = product->words, panel_bytes = product->panel_bytes;
    for (int64_t word = 0, end; word < words; word = end) {
        vf sum[MAX_TILE_SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < rows * panels; i++)
            sum[i] = (vf){0};
        const int64_t group = product->first_word + word;
        vi16 zeros[MAX_TILE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels && widens && has_zero_points(format); p++)
            zeros[p] = zero_points(product->quantized + p, group / group_words);
        for (end = MIN(words, word + group_words); word < end; word += 4, ahead += 4 * product->ahead_bytes) {
#pragma GCC unroll 8
            for (int line = 0; line < bytes_of_four; line += 64)
                __builtin_prefetch(ahead + line, 0, 2);
#pragma GCC unroll 4
            for (int of_four = 0; of_four < 4; of_four++) {
                vf column[MAX_TILE_PANELS];
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++) {
                    const int64_t place = p * panel_bytes + (word + of_four) * (int64_t)sizeof(vf);
                    if (widens)
                        column[p] = int16_codes(product->quantized + p, (product->first_word + word) / 4, of_four, format);
                    else
                        memcpy(column + p, weight + place, sizeof(vf));
                    if (widens && has_zero_points(format))
                        column[p] = (vf)((vi16)column[p] - zeros[p]);
                    if (widens && weight)
                        memcpy(weight + place, column + p, sizeof(vf));
                    KEEP_IN_REGISTER(column[p]);
                }
#pragma GCC unroll 16
                for (int row = 0; row < rows; row++) {
                    const vf input = spread(x + (word + of_four) * TILE_ROWS + row);
#pragma GCC unroll 4
                    for (int p = 0; p < panels; p++)
                        sum[row * panels + p] = add_int16_products(sum[row * panels + p], input, column[p]);
                }
            }
        }
        vf scales[MAX_TILE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            scales[p] = quantized_scale(product->quantized + p, group, format);
        const bool adds = product->adds || group > product->first_word;
#pragma GCC unroll 16
        for (int i = 0; i < rows * panels; i++) {
            const vf before = adds ? load(sums, i * LANES, FLOAT32) : (vf){0};
            const vf scale = spread(product->x_scales + i / panels) * scales[i % panels];
            store(sums, i * LANES, fused(__builtin_convertvector((vi)sum[i], vf), scale, before), FLOAT32);
        }
    }
}

TILE_PRODUCTS(widen_int8, multiply_int16, INT8, true)
TILE_PRODUCTS(widen_int4, multiply_int16, INT4, true)
TILE_PRODUCTS(widen_mxfp4, multiply_int16, MXFP4, true)
TILE_PRODUCTS(widen_nf4, multiply_int16, NF4, true)
TILE_PRODUCTS(widen_uint4, multiply_int16, UINT4, true)
TILE_PRODUCTS(widen_uint4_g128, multiply_int16, UINT4_G128, true)
TILE_PRODUCTS(widened_int8, multiply_int16, INT8, false)
TILE_PRODUCTS(widened_groups, multiply_int16, INT4, false)
TILE_PRODUCTS(widened_wide_groups, multiply_int16, UINT4_G128, false)

const tile_products *int16_products(enum weight_format format, bool is_first)
{
    if (!is_first)
        return format == INT8 ? &widened_int8 : format == UINT4_G128 ? &widened_wide_groups : &widened_groups;
    return format == INT8    ? &widen_int8
           : format == INT4  ? &widen_int4
           : format == MXFP4 ? &widen_mxfp4
           : format == NF4   ? &widen_nf4
           : format == UINT4 ? &widen_uint4
                             : &widen_uint4_g128;
}
#else
const tile_products *int16_products(enum weight_format format, bool is_first)
{
    (void)format, (void)is_first;
    return NULL; /* without these products, nothing is rounded to int16 */
}
#endif
