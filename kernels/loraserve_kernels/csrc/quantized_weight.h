/* Packed quantized weights: multiples of scales, in fewer bits than their dtype has.
 *
 * If the CPU multiplies int16, bfloat16 rows are multiplied with them as integers, even if the CPU also multiplies
 * bfloat16 or has AMX, see int16_products.c and amx_bytes.c. On other CPUs, and for float32 rows, weights are widened
 * to floats.
 *
 * INT8: a byte per weight and a scale per output.
 *
 * INT4: four bits per weight and a scale for each GROUP of an output, with so few digits that all multiples are exact in
 * bfloat16. Two shifts widen a word to pairs of int16, some ten instructions to bfloat16. Two Xeon cores, 4,096 x 4,096,
 * us for 1 / 4 / 16 / 64 / 256 rows: 726 / 859 / 2,258 / 7,816 / 26,333; widened for AMX 1,671 / 1,722 / 1,831 / 4,282 /
 * 11,392. Only one way is used, because a row's result must not depend on the number of rows.
 *
 * With a few rows, weights are widened in registers. With more, the first rows leave the widened weights in L1 for the
 * rest, one stretch of the depth at a time. The number of panels is even, so that AMX can take two at a time. Padding
 * past the outputs and the depth is zero.
 *
 * INT8 layout: first the scales, a float32 for each output of every panel; then the panels in order,
 * [word][output][element], as pack_weight lays out the words they are widened to. Two Xeon cores under other load, 4,096
 * x 4,096, us for 1 / 4 / 16 / 256 rows, widened to bfloat16 in parentheses: with AMX 935 (1,760) / 1,057 (1,947) / 1,458
 * (2,124) / 10,248 (13,702), without 857 (1,404) / 950 (1,914) / 1,465 (4,742) / 19,365 (56,540).
 *
 * INT4 layout: panel after panel, each with its scales as bfloat16, [group][output], before its multiples, [four
 * words][output], 32 bits each. The low half has the first elements of the four pairs, the high half the second ones,
 * each with the first pair in the lowest bits.
 *
 * MXFP4 (gpt-oss's experts): the same, with powers of two as scales, and multiples from a table: a sign bit above an
 * index into 0, 1, 2, 3, 4, 6, 8, 12.
 *
 * NF4 (bitsandbytes): the same, with multiples from a table, the nearest to NF4's levels. The scale is a 2048th of the
 * largest of each 64 weights, stored for both of their groups. Sums of a group's products are still less than 2^31.
 *
 * UINT4 (GPTQ, AWQ and others): the same, with zero points of groups, a byte each, [group][output], between scales and
 * multiples. A zero point is subtracted from a code, 0 to 15, before multiplying. UINT4_G128 has groups of 128, the most
 * common size, whose sums are scaled a fourth as often. Two EPYC Zen 4 cores, 4,096 x 4,096, us for 1 / 4 / 16 / 128
 * rows: bfloat16 789 / 805 / 740 / 4,319, UINT4 190 / 221 / 718 / 5,186, UINT4_G128 160 / 190 / 636 / 4,570.
 *
 * The last four are packed from checkpoints' own codes, see four_bit_weight.c.
 */
#pragma once

#include "linear_tiles.h"

#define INT8_MAX_MULTIPLE 127
#define GROUP 32                /* elements of depth that share a scale in four-bit formats */
#define GROUP_WORDS (GROUP / 2) /* pairs */
#define WIDE_GROUP_WORDS 64     /* of UINT4_G128 */
#define MXFP4_MULTIPLES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
#define NF4_MULTIPLES -2048, -1426, -1075, -809, -583, -378, -186, 0, 163, 330, 504, 692, 903, 1152, 1481, 2048

/* Dtype of the words that multiples are widened to. */
INLINE enum dtype quantized_dtype_of(const enum dtype dtype)
{
    return dtype == BFLOAT16 && MULTIPLIES_INT16 ? INT16 : FLOAT32;
}

/* Words of x that a row of a quantized weight is multiplied with. */
INLINE int64_t quantized_words_of(int64_t depth, const enum dtype dtype)
{
    if (dtype == FLOAT32)
        return depth;
    return words_of(depth, BFLOAT16) * (quantized_dtype_of(dtype) == FLOAT32 ? 2 : 1);
}

/* Elements of one output that lie together in an INT8 panel. */
INLINE int int8_elements_of(const enum dtype dtype) { return quantized_dtype_of(dtype) == FLOAT32 ? 1 : 2; }

/* The next functions are about four-bit formats. */
INLINE bool has_zero_points(const enum weight_format format) { return format == UINT4 || format == UINT4_G128; }

INLINE int group_words_of(const enum weight_format format) { return format == UINT4_G128 ? WIDE_GROUP_WORDS : GROUP_WORDS; }

INLINE int64_t num_groups_of(const enum weight_format format, int64_t depth)
{
    return words_of(depth, BFLOAT16) / group_words_of(format);
}

/* Bytes of a four-bit panel before its multiples. */
INLINE int64_t head_bytes_of(const enum weight_format format, int64_t depth)
{
    return num_groups_of(format, depth) * LANES * (has_zero_points(format) ? 3 : 2);
}

INLINE int64_t quantized_panel_bytes_of(const enum weight_format format, int64_t depth, const enum dtype dtype)
{
    if (format != INT8)
        return head_bytes_of(format, depth) + words_of(depth, BFLOAT16) * LANES;
    return quantized_words_of(depth, dtype) * LANES * int8_elements_of(dtype);
}

INLINE int64_t num_quantized_panels_of(int64_t num_outputs) { return (num_panels_of(num_outputs) + 1) & ~(int64_t)1; }

/* The panels, which lie one after the other. */
INLINE const char *first_quantized_panel(const struct packed_linear *linear, const enum weight_format format)
{
    const int64_t scale_bytes = num_quantized_panels_of(linear->num_outputs) * (int64_t)sizeof(vf);
    return (const char *)linear->weight + (format == INT8 ? scale_bytes : 0);
}

/* Calls `call` with the given arguments, then the dtype and the format as constants. */
#define WITH_CONSTANTS(format, dtype, call, ...)                                                                      \
    ((format) == INT8    ? WITH_DTYPE(dtype, INT8, call, __VA_ARGS__)                                                 \
     : (format) == INT4  ? WITH_DTYPE(dtype, INT4, call, __VA_ARGS__)                                                 \
     : (format) == MXFP4 ? WITH_DTYPE(dtype, MXFP4, call, __VA_ARGS__)                                                \
     : (format) == NF4   ? WITH_DTYPE(dtype, NF4, call, __VA_ARGS__)                                                  \
     : (format) == UINT4 ? WITH_DTYPE(dtype, UINT4, call, __VA_ARGS__)                                                \
                         : WITH_DTYPE(dtype, UINT4_G128, call, __VA_ARGS__))
#define WITH_DTYPE(dtype, format, call, ...)                                                                          \
    ((dtype) == BFLOAT16 ? call(__VA_ARGS__, BFLOAT16, format) : call(__VA_ARGS__, FLOAT32, format))

struct quantized_panel {
    const char *multiples;
    vf scale;               /* INT8 */
    const uint16_t *scales; /* four-bit formats: [groups, LANES] */
    const uint8_t *zeros;   /* the same, for formats with zero points */
};

INLINE struct quantized_panel quantized_panel_at(const struct packed_linear *linear, const enum weight_format format,
                                                 int64_t panel, const enum dtype dtype)
{
    const char *memory =
        first_quantized_panel(linear, format) + panel * quantized_panel_bytes_of(format, linear->depth, dtype);
    if (format != INT8) {
        const uint16_t *scales = (const uint16_t *)memory;
        const uint8_t *zeros = (const uint8_t *)(scales + num_groups_of(format, linear->depth) * LANES);
        return (struct quantized_panel){memory + head_bytes_of(format, linear->depth), .scales = scales, .zeros = zeros};
    }
    return (struct quantized_panel){memory, .scale = load(linear->weight, panel * LANES, FLOAT32)};
}

/* The outputs' scales from a word on, until its group ends. */
INLINE vf quantized_scale(const struct quantized_panel *panel, int64_t word, const enum weight_format format)
{
    return format == INT8 ? panel->scale : load(panel->scales, word / group_words_of(format) * LANES, BFLOAT16);
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

typedef int16_t vi16 __attribute__((vector_size(4 * LANES)));

/* For each int16, looks up the multiple that four of its bits, from `bit` on, select. */
INLINE vi16 mxfp4_multiples(vi16 words, const int bit)
{
#if defined(__AVX512BW__) || (LANES == 8 && defined(__AVX2__))
    /* Looks up by the upper bytes, so that the sign of the result is in the highest bit. */
    const vi16 places = (bit > 8 ? words >> (bit - 8) : words << (8 - bit)) & 0x0f00;
    const __m128i multiples = _mm_setr_epi8(MXFP4_MULTIPLES);
#if defined(__AVX512BW__)
    return (vi16)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(multiples), (__m512i)places) >> 8;
#else
    return (vi16)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(multiples), (__m256i)places) >> 8;
#endif
#else
    const vi16 sign = words << (12 - bit) >> 15, place = (words >> bit) & 7;
    const vi16 multiple = place + ((place - 4) & (place > 4)) + (2 * (place - 6) & (place > 6));
    return (multiple ^ sign) - sign;
#endif
}

INLINE vi16 nf4_multiples(vi16 words, const int bit)
{
#if defined(__AVX512BW__)
    /* The table twice, because lookups use five bits, the highest of which belongs to the next code. */
    static const int16_t multiples[] = {NF4_MULTIPLES, NF4_MULTIPLES};
    return (vi16)_mm512_permutexvar_epi16((__m512i)(words >> bit), _mm512_loadu_si512(multiples));
#elif LANES == 8 && defined(__AVX2__)
    /* Looks up lower and upper bytes separately; an index with its highest bit set finds zero. */
#define LOW_BYTE(multiple) ((multiple) & 255)
#define HIGH_BYTE(multiple) ((multiple) >> 8)
#define OF_EACH(byte, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)                                                 \
    _mm_setr_epi8((char)byte(a), (char)byte(b), (char)byte(c), (char)byte(d), (char)byte(e), (char)byte(f),           \
                  (char)byte(g), (char)byte(h), (char)byte(i), (char)byte(j), (char)byte(k), (char)byte(l),           \
                  (char)byte(m), (char)byte(n), (char)byte(o), (char)byte(p))
#define BYTES(byte, ...) OF_EACH(byte, __VA_ARGS__)
    const __m256i low = _mm256_broadcastsi128_si256(BYTES(LOW_BYTE, NF4_MULTIPLES));
    const __m256i high = _mm256_broadcastsi128_si256(BYTES(HIGH_BYTE, NF4_MULTIPLES));
    const vi16 places = words >> bit & 15, zero_above = places | (int16_t)0x8000, zero_below = places << 8 | 0x80;
    return (vi16)(_mm256_shuffle_epi8(low, (__m256i)zero_above) | _mm256_shuffle_epi8(high, (__m256i)zero_below));
#else
    static const int16_t multiples[] = {NF4_MULTIPLES};
    vi16 found;
    for (int i = 0; i < 2 * LANES; i++)
        found[i] = multiples[words[i] >> bit & 15];
    return found;
#endif
}

/* For each int16, the multiple (or code, with zero points) that four of its bits, from `bit` on, stand for. */
INLINE vi16 multiples_in(vi16 words, const int bit, const enum weight_format format)
{
    if (format == INT4)
        return words << (12 - bit) >> 12;
    if (has_zero_points(format))
        return words >> bit & 15;
    return format == NF4 ? nf4_multiples(words, bit) : mxfp4_multiples(words, bit);
}

/* A group's zero points, the same for both elements of each pair. */
INLINE vi16 zero_points(const struct quantized_panel *panel, int64_t group)
{
    const uint8_t *source = panel->zeros + group * LANES;
#if defined(__AVX512F__)
    const vu zeros = (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)source));
#elif defined(__AVX2__)
    const vu zeros = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)source));
#else
    typedef uint8_t vb __attribute__((vector_size(LANES)));
    vb bytes;
    memcpy(&bytes, source, sizeof bytes);
    const vu zeros = __builtin_convertvector(bytes, vu);
#endif
    return (vi16)(zeros | zeros << 16);
}

/* The multiples of one of four words, LANES pairs of int16; zero points are not yet subtracted. */
INLINE vf int16_codes(const struct quantized_panel *panel, int64_t four, const int of_four, const enum weight_format format)
{
    if (format != INT8) {
        vi16 words;
        memcpy(&words, panel->multiples + four * (int64_t)sizeof words, sizeof words);
        return (vf)multiples_in(words, 4 * of_four, format);
    }
    const char *source = panel->multiples + (4 * four + of_four) * LANES * 2;
#if defined(__AVX512BW__)
    return (vf)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)source));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)source));
#else
    (void)source;
    __builtin_unreachable(); /* without AVX2, INT8 is widened to floats */
#endif
}

/* int16_codes with zero points subtracted. */
INLINE vf int16_pairs(const struct quantized_panel *panel, int64_t four, const int of_four, const enum weight_format format)
{
    const vf codes = int16_codes(panel, four, of_four, format);
    if (!has_zero_points(format))
        return codes;
    return (vf)((vi16)codes - zero_points(panel, four / (group_words_of(format) / 4)));
}

/* The first (half = 0) or second (1) int16 of each pair, times the scales. */
INLINE vf scaled_half(vf pairs, const int half, vf scale)
{
    return __builtin_convertvector(half ? (vi)pairs >> 16 : (vi)((vu)pairs << 16) >> 16, vf) * scale;
}

/* A word of each output, in float32. */
INLINE vf widen_word(const struct quantized_panel *panel, int64_t word, const enum weight_format format)
{
    if (format == INT8)
        return load_int8(panel->multiples + word * LANES) * panel->scale;
    const int64_t pair = word / 2;
    return scaled_half(int16_pairs(panel, pair / 4, (int)(pair % 4), format), (int)(word % 2),
                       quantized_scale(panel, pair, format));
}

INLINE float float_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Pairs of bfloat16 from any floats, rounded; a NaN stays one if all its bits fit in bfloat16. */
INLINE vf rounded_words(vf first, vf second)
{
    const vu low = (vu)first, high = (vu)second;
    return (vf)((low + 0x7fff + (low >> 16 & 1)) >> 16 | ((high + 0x7fff + (high >> 16 & 1)) & 0xffff0000));
}

/* Row `output` of a quantized weight, rounded to the dtype: dense [depth]. */
void quantized_row(void *row, const struct packed_linear *linear, int64_t output, enum dtype dtype);
