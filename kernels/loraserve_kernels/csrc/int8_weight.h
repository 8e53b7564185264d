/* Packed weights in a byte each: those of an output are multiples of its scale.
 *
 * Where the CPU multiplies pairs of bfloat16, the multiples of a bfloat16 linear are rounded to that, so that results are bit
 * for bit those of a weight that was rounded so and packed. Elsewhere they are multiplied as they are: by bfloat16 as integers
 * where the CPU multiplies int16 (see row_tiles.h), else in float32. A few rows widen weights in registers; with more, the
 * first rows keep them in L1 for the rest, a stretch of the depth at a time.
 *
 * Scales come first, a float32 for each output of every panel; then the panels in order, [word][output][element], as
 * pack_weight has the words they are widened to. The number of panels is even, so that AMX has two at a time: what lies past
 * the outputs or the depth is zero.
 *
 * Two EPYC Zen 4 cores, 4,096 x 4,096, us for 1 / 4 / 16 / 128 rows, packed weights in parentheses: bfloat16 617 (1,062) /
 * 720 (1,087) / 1,575 (1,457) / 10,046 (9,789), with AVX2 516 (1,072) / 883 (1,099) / 2,848 (2,710) / 20,630 (19,639).
 */
#pragma once

#include "linear_tiles.h"

#define INT8_MAX_MULTIPLE 127

/* Of the words that multiples are widened to. */
INLINE enum dtype int8_dtype_of(const enum dtype dtype)
{
    return dtype == FLOAT32 || MULTIPLIES_BFLOAT16 ? dtype : MULTIPLIES_INT16 ? INT16 : FLOAT32;
}

/* Elements of a word of that dtype. */
INLINE int int8_elements_of(const enum dtype dtype) { return int8_dtype_of(dtype) == FLOAT32 ? 1 : 2; }

/* Words of a panel. */
INLINE int64_t int8_words_of(int64_t depth, const enum dtype dtype)
{
    return dtype == BFLOAT16 ? words_of(depth, BFLOAT16) * 2 / int8_elements_of(dtype) : depth;
}

INLINE int64_t int8_panel_bytes_of(int64_t depth, const enum dtype dtype)
{
    return int8_words_of(depth, dtype) * LANES * int8_elements_of(dtype);
}

INLINE int64_t num_int8_panels_of(int64_t num_outputs) { return (num_panels_of(num_outputs) + 1) & ~(int64_t)1; }

struct int8_panel {
    const int8_t *multiples; /* [words, LANES, elements] */
    vf scale[2];             /* of a word's multiples, in their order */
};

INLINE struct int8_panel int8_panel_at(const struct packed_linear *linear, int64_t panel, const enum dtype dtype)
{
    const int8_t *panels = (const int8_t *)((const float *)linear->weight + num_int8_panels_of(linear->num_outputs) * LANES);
    const vf scale = load(linear->weight, panel * LANES, FLOAT32);
    struct int8_panel found = {panels + panel * int8_panel_bytes_of(linear->depth, dtype), {scale, scale}};
    if (int8_dtype_of(dtype) == BFLOAT16) {
        found.scale[0] = SHUFFLE(scale, scale, LOW);
        found.scale[1] = SHUFFLE(scale, scale, HIGH);
    }
    return found;
}

INLINE vf load_int8(const int8_t *source)
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

#if MULTIPLIES_INT16
/* LANES pairs of int16. */
INLINE vf load_int8_pairs(const int8_t *source)
{
#if defined(__AVX512BW__)
    return (vf)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)source));
#else
    return (vf)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)source));
#endif
}
#endif

/* A word of each output, as int8_dtype_of says. */
INLINE vf widen_word(const struct int8_panel *panel, int64_t word, const enum dtype words)
{
    const int8_t *source = panel->multiples + word * LANES * (words == FLOAT32 ? 1 : 2);
#if MULTIPLIES_INT16
    if (words == INT16)
        return load_int8_pairs(source);
#endif
    const vf first = load_int8(source) * panel->scale[0];
#if MULTIPLIES_BFLOAT16
    if (words == BFLOAT16) {
        const vf second = load_int8(source + LANES) * panel->scale[1];
        return (vf)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
#endif
    return first;
}

/* Row `output` of what quantize_weight left, rounded to the dtype: dense [depth]. */
void int8_row(void *row, const struct packed_linear *linear, int64_t output, enum dtype dtype);
