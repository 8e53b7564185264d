/* Rows of x packed in tiles of TILE_ROWS, [word][row], for packed_linear.c.
 *
 * If weights are multiplied as integers (see quantized_weight.h), bfloat16 rows are rounded to int16, which makes
 * products and their sums over a group of the depth exact. These take as many instructions as those of floats, but the
 * additions do not use the multiplying units, and words are loaded half as often. On CPUs that multiply and add in one
 * instruction (VNNI) they take half.
 */
#pragma once

#include "quantized_weight.h"
#include "linear_tiles.h"

#define INT16_GROUP 64 /* words of depth whose products are added as integers; sums stay below 2^30 */

/* Floats of x that a word of a weight is multiplied with, one after the other. */
INLINE int factors_of(const enum dtype dtype) { return dtype == BFLOAT16 && !MULTIPLIES_BFLOAT16 ? 2 : 1; }

/* Whether rows are rounded to int16. */
INLINE bool rounds_rows(const struct packed_linear *linear, const enum dtype dtype)
{
    return is_quantized(linear) && quantized_dtype_of(dtype) == INT16;
}

/* Words of x in a tile, for each of its rows; rounded rows have their scales last. */
INLINE int64_t tile_words_of(const struct packed_linear *linear, const enum dtype dtype)
{
    const int64_t words = words_of(linear->depth, dtype);
    return rounds_rows(linear, dtype) ? words + (words + INT16_GROUP - 1) / INT16_GROUP : words * factors_of(dtype);
}

/* Pairs of bfloat16 as pairs of int16, multiples of the scale whose inverse is given. Halves round to the even multiple. */
INLINE vf rounded_pairs(vf pairs, float inverse_scale)
{
    const vi even = (vi)(half_of(pairs, 0) * inverse_scale + ROUND_TO_INTEGER);
    const vi odd = (vi)(half_of(pairs, 1) * inverse_scale + ROUND_TO_INTEGER);
    return (vf)((even & 0xffff) | odd << 16);
}

/* Packs up to tile_rows <= LANES rows as [word][row]; missing elements are zero. words: what to pack; bfloat16 may become
 * floats, or int16 multiples of scales whose inverses are given for each row. */
INLINE void pack_rows(uint32_t *tile, const int tile_rows, const void *x, int64_t x_stride, int64_t num_rows, int64_t depth,
                      int64_t num_words, const enum dtype words, const float *inverse_scales, const enum dtype dtype)
{
    const int word_elements = words == FLOAT32 ? 1 : 2;
    for (int64_t word = 0; word < num_words; word += LANES) {
        const int64_t element = word * word_elements, count = MIN(LANES * word_elements, depth - element);
        vf lines[LANES];
        for (int64_t row = 0; row < LANES; row++) {
            lines[row] = (vf){0};
            if (row < MIN(tile_rows, num_rows) && count > 0)
                lines[row] = words == FLOAT32 ? load_upto(x, row * x_stride + element, count, dtype)
                                              : load_words(x, row * x_stride + element, count, dtype);
            if (words == INT16)
                lines[row] = rounded_pairs(lines[row], inverse_scales[row]);
        }
        transpose(lines);
        for (int i = 0; i < MIN(LANES, num_words - word); i++)
            memcpy(tile + (word + i) * tile_rows, lines + i, sizeof(float) * (size_t)tile_rows);
    }
}

/* The biased float32 exponent of the largest of `count` bfloat16. */
INLINE int32_t largest_exponent(const void *x, int64_t index, int64_t count)
{
    vi largest = {0};
    for (int64_t k = 0; k < count; k += 2 * LANES) {
        const vf words = load_words(x, index + k, MIN(2 * LANES, count - k), BFLOAT16);
        for (int half = 0; half < 2; half++) {
            const vi magnitude = (vi)half_of(words, half) & 0x7fffffff;
            largest = (vi)choose(magnitude > largest, (vf)magnitude, (vf)largest);
        }
    }
    int32_t lanes[LANES], bits = 0;
    memcpy(lanes, &largest, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        bits = MAX(bits, lanes[lane]);
    return bits >> 23;
}

/* Float bits of the scale for `count` bfloat16 as int16, and of its inverse. The scale is a power of two; the largest
 * value is 2^14 to 2^15 times it, so only values less than a 128th of the largest are rounded. If the largest is below
 * 2^-112, the scale is the smallest there is; if a value is not finite, it is NaN. Products of scales may leave float32's
 * range even if those of the values do not. */
INLINE uint32_t int16_scale(const void *x, int64_t index, int64_t count, uint32_t *inverse)
{
    const int32_t exponent = MAX(15, largest_exponent(x, index, count));
    *inverse = (uint32_t)(268 - exponent) << 23;
    return exponent == 255 ? 0x7fc00000 : (uint32_t)(exponent - 14) << 23;
}

/* Packs a tile of bfloat16 as int16; a row has a scale for each group of the depth. */
INLINE void round_tile(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows, int64_t depth)
{
    const int64_t words = words_of(depth, BFLOAT16);
    uint32_t *scales = tile + words * TILE_ROWS;
    for (int64_t word = 0; word < words; word += INT16_GROUP, scales += TILE_ROWS) {
        const int64_t element = 2 * word, count = MIN(2 * INT16_GROUP, depth - element);
        uint32_t inverse_scales[LANES] = {0};
        for (int64_t row = 0; row < TILE_ROWS; row++)
            scales[row] = row < num_rows ? int16_scale(x, row * x_stride + element, count, inverse_scales + row) : 0;
        float inverse[LANES];
        memcpy(inverse, inverse_scales, sizeof inverse);
        pack_rows(tile + word * TILE_ROWS, TILE_ROWS, at(x, element, BFLOAT16), x_stride, num_rows, depth - element,
                  MIN(INT16_GROUP, words - word), INT16, inverse, BFLOAT16);
    }
}

/* Packs a tile of x. */
INLINE void pack_tile(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows, const struct packed_linear *linear,
                      enum dtype dtype)
{
    const int64_t depth = linear->depth, num_words = tile_words_of(linear, dtype);
    const enum dtype words = MULTIPLIES_BFLOAT16 ? BFLOAT16 : FLOAT32; /* what bfloat16 is packed as */
    if (rounds_rows(linear, dtype))
        round_tile(tile, x, x_stride, num_rows, depth);
    else if (dtype == BFLOAT16)
        pack_rows(tile, TILE_ROWS, x, x_stride, num_rows, depth, num_words, words, NULL, BFLOAT16);
    else
        pack_rows(tile, TILE_ROWS, x, x_stride, num_rows, depth, num_words, FLOAT32, NULL, FLOAT32);
}
