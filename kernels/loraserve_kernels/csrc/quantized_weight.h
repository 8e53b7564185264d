/* Packed weights in fewer bits than their dtype has: multiples of scales.
 *
 * INT8: a byte each, and a scale for each output. Where the CPU multiplies pairs of bfloat16, the multiples of a bfloat16
 * linear are rounded to that, so that results are bit for bit those of a weight that was rounded so and packed. Elsewhere they
 * are multiplied as they are: by bfloat16 as integers where the CPU multiplies int16 (see row_tiles.h), else in float32.
 *
 * INT4: four bits each, and a scale for each INT4_GROUP of an output, of so few digits that all multiples are exact in
 * bfloat16. They are multiplied as integers where the CPU multiplies int16, also where it multiplies bfloat16: two shifts widen
 * a word to pairs of int16, and some ten instructions to bfloat16. AMX has them in bfloat16, which is the same numbers.
 *
 * A few rows widen weights in registers; with more, the first rows keep them in L1 for the rest, a stretch of the depth at a
 * time. The number of panels is even, so that AMX has two at a time: what lies past the outputs or the depth is zero.
 *
 * INT8: scales come first, a float32 for each output of every panel; then the panels in order, [word][output][element], as
 * pack_weight has the words they are widened to. Two EPYC Zen 4 cores, 4,096 x 4,096, us for 1 / 4 / 16 / 128 rows, packed
 * weights in parentheses: bfloat16 617 (1,062) / 720 (1,087) / 1,575 (1,457) / 10,046 (9,789).
 *
 * INT4: panel after panel, scales as bfloat16, [group][output], before multiples, [four words][output]: of 32 bits each half
 * has its element of the four pairs, the first in the lowest bits.
 */
#pragma once

#include "linear_tiles.h"

#define INT8_MAX_MULTIPLE 127
#define INT4_GROUP 32                     /* elements of depth */
#define INT4_GROUP_WORDS (INT4_GROUP / 2) /* pairs */

/* Of the words that multiples are widened to. */
INLINE enum dtype quantized_dtype_of(const enum weight_format format, const enum dtype dtype)
{
    if (dtype == FLOAT32 || (format == INT8 && MULTIPLIES_BFLOAT16))
        return dtype;
    return MULTIPLIES_INT16 ? INT16 : FLOAT32;
}

/* Words of x that a row of a quantized weight is multiplied with. */
INLINE int64_t quantized_words_of(const enum weight_format format, int64_t depth, const enum dtype dtype)
{
    if (dtype == FLOAT32)
        return depth;
    return words_of(depth, BFLOAT16) * (quantized_dtype_of(format, dtype) == FLOAT32 ? 2 : 1);
}

/* Elements that lie together in a panel of INT8. */
INLINE int int8_elements_of(const enum dtype dtype) { return quantized_dtype_of(INT8, dtype) == FLOAT32 ? 1 : 2; }

INLINE int64_t num_int4_groups_of(int64_t depth) { return words_of(depth, BFLOAT16) / INT4_GROUP_WORDS; }

INLINE int64_t quantized_panel_bytes_of(const enum weight_format format, int64_t depth, const enum dtype dtype)
{
    if (format == INT4)
        return num_int4_groups_of(depth) * LANES * ((int64_t)size_of(BFLOAT16) + INT4_GROUP / 2);
    return quantized_words_of(INT8, depth, dtype) * LANES * int8_elements_of(dtype);
}

INLINE int64_t num_quantized_panels_of(int64_t num_outputs) { return (num_panels_of(num_outputs) + 1) & ~(int64_t)1; }

/* Panels lie one after the other from there. */
INLINE const char *first_quantized_panel(const struct packed_linear *linear, const enum weight_format format)
{
    const int64_t scale_bytes = num_quantized_panels_of(linear->num_outputs) * (int64_t)sizeof(vf);
    return (const char *)linear->weight + (format == INT8 ? scale_bytes : 0);
}

/* The call with what is given, and the format and the dtype as constants. */
#define WITH_CONSTANTS(format, dtype, call, ...)                                                                      \
    ((format) == INT8 ? ((dtype) == BFLOAT16 ? call(__VA_ARGS__, BFLOAT16, INT8) : call(__VA_ARGS__, FLOAT32, INT8))  \
                      : ((dtype) == BFLOAT16 ? call(__VA_ARGS__, BFLOAT16, INT4) : call(__VA_ARGS__, FLOAT32, INT4)))

struct quantized_panel {
    const char *multiples;
    vf scale[2];            /* INT8: of a word's multiples, in their order */
    const uint16_t *scales; /* INT4: [groups, LANES] */
};

INLINE struct quantized_panel quantized_panel_at(const struct packed_linear *linear, const enum weight_format format,
                                                 int64_t panel, const enum dtype dtype)
{
    const char *memory =
        first_quantized_panel(linear, format) + panel * quantized_panel_bytes_of(format, linear->depth, dtype);
    if (format == INT4) {
        const int64_t scale_bytes = num_int4_groups_of(linear->depth) * LANES * (int64_t)size_of(BFLOAT16);
        return (struct quantized_panel){memory + scale_bytes, .scales = (const uint16_t *)memory};
    }
    const vf scale = load(linear->weight, panel * LANES, FLOAT32);
    struct quantized_panel found = {memory, {scale, scale}, NULL};
    if (quantized_dtype_of(INT8, dtype) == BFLOAT16) {
        found.scale[0] = SHUFFLE(scale, scale, LOW);
        found.scale[1] = SHUFFLE(scale, scale, HIGH);
    }
    return found;
}

/* Of a word on, until its group ends. */
INLINE vf quantized_scale(const struct quantized_panel *panel, int64_t word, const enum weight_format format)
{
    return format == INT4 ? load(panel->scales, word / INT4_GROUP_WORDS * LANES, BFLOAT16) : panel->scale[0];
}

INLINE vf load_int8(const char *source)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)source)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)source)));
#else
    typedef int8_t vb __attribute__((vector_size(LANES)));
    vb bytes;
    memcpy(&bytes, source, sizeof bytes);
    return __builtin_convertvector(bytes, vf);
#endif
}

/* The multiples of one of four words, LANES pairs of int16. */
INLINE vf int16_pairs(const struct quantized_panel *panel, int64_t four, const int of_four, const enum weight_format format)
{
    if (format == INT4) {
        typedef int16_t vi16 __attribute__((vector_size(4 * LANES)));
        vi16 words;
        memcpy(&words, panel->multiples + four * (int64_t)sizeof words, sizeof words);
        return (vf)(words << (12 - 4 * of_four) >> 12);
    }
    const char *source = panel->multiples + (4 * four + of_four) * LANES * 2;
#if defined(__AVX512BW__)
    return (vf)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)source));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)source));
#else
    (void)source;
    __builtin_unreachable(); /* INT8 is widened to floats there */
#endif
}

/* The first (0) or second (1) int16 of each pair, times the scales. */
INLINE vf scaled_half(vf pairs, const int half, vf scale)
{
    return __builtin_convertvector(half ? (vi)pairs >> 16 : (vi)((vu)pairs << 16) >> 16, vf) * scale;
}

/* A word of each output in float32, or of INT8 in bfloat16. */
INLINE vf widen_word(const struct quantized_panel *panel, int64_t word, const enum weight_format format,
                     const enum dtype words)
{
    if (format == INT4) {
        const int64_t pair = word / 2;
        return scaled_half(int16_pairs(panel, pair / 4, (int)(pair % 4), INT4), (int)(word % 2),
                           quantized_scale(panel, pair, INT4));
    }
    const char *source = panel->multiples + word * LANES * (words == FLOAT32 ? 1 : 2);
    const vf first = load_int8(source) * panel->scale[0];
#if MULTIPLIES_BFLOAT16
    if (words == BFLOAT16) {
        const vf second = load_int8(source + LANES) * panel->scale[1];
        return (vf)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
#endif
    return first;
}

/* Four words of INT4 in bfloat16. */
INLINE void widen_four(vf *words, const struct quantized_panel *panel, int64_t word)
{
    const vf scale = quantized_scale(panel, word, INT4);
#pragma GCC unroll 4
    for (int of_four = 0; of_four < 4; of_four++) {
        const vf pairs = int16_pairs(panel, word / 4, of_four, INT4);
        words[of_four] = (vf)((vu)scaled_half(pairs, 0, scale) >> 16 | ((vu)scaled_half(pairs, 1, scale) & 0xffff0000));
    }
}

/* Row `output` of what quantize_weight left, rounded to the dtype: dense [depth]. */
void quantized_row(void *row, const struct packed_linear *linear, int64_t output, enum dtype dtype);
