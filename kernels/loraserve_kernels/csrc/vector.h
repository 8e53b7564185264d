/* Vectors of LANES floats, loads and stores of float32 / bfloat16 arrays, and a vectorized exp.
 *
 * Written with GCC/clang vector extensions, so one source serves AVX-512, AVX2 and NEON. A function with a parameter
 * `const enum dtype` is always inlined into a caller that passes a constant: that is our form of a template.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#if defined(__AVX512F__)
#define LANES 16
#define TILE_VECTORS 16 /* accumulators held in registers by a microkernel; 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define TILE_VECTORS 8 /* 16 registers */
#else
#define LANES 4
#define TILE_VECTORS 16 /* NEON: 32 registers */
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vu16 __attribute__((vector_size(2 * LANES)));

enum dtype { FLOAT32 = 0, BFLOAT16 = 1, INT16 = 2 /* words inside kernels, never a tensor's dtype */ };

/* Returned by exported functions that can fail. cpu_calls.py raises MemoryError for OUT_OF_MEMORY, ValueError for the
 * rest. */
enum status {
    OK = 0,
    BAD_SEGMENTS = 1,
    BAD_ADAPTER = 2,
    BAD_SLOT = 3,
    BAD_BLOCK = 4,
    OUT_OF_MEMORY = 5,
    BAD_TOKEN = 6,
    BAD_STATE = 7,
};

/* Without this, GCC loads a vector again for each use if that saves a register. */
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(vector) __asm__("" : "+v"(vector))
#elif defined(__aarch64__)
#define KEEP_IN_REGISTER(vector) __asm__("" : "+w"(vector))
#else
#define KEEP_IN_REGISTER(vector)
#endif

INLINE size_t size_of(const enum dtype dtype) { return dtype == BFLOAT16 ? 2 : 4; }

INLINE const void *at(const void *base, int64_t index, const enum dtype dtype)
{
    return (const char *)base + index * (int64_t)size_of(dtype);
}

/* a b + c, rounded once if the CPU has fused multiply-add. GCC fuses a plain a * b + c in some inlined copies and not in
 * others, so a row's bits would depend on the tile it falls into. */
INLINE vf fused(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf splat(float value) { return (vf){0} + value; }

/* 1.5 * 2^23. Adding it rounds a float below 2^22 to an integer, halves to even; the low bits of the sum hold it. */
#define ROUND_TO_INTEGER 12582912.0f

/* The 32-bit word at `word` in every lane, whatever its bits mean. */
INLINE vf spread(const void *word)
{
    uint32_t bits;
    memcpy(&bits, word, sizeof bits);
    return (vf)((vu){0} + bits);
}

/* Bit i of the result is lane i of the mask. */
INLINE unsigned lanes_of(vi mask)
{
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (unsigned)_mm256_movemask_ps((__m256)mask);
#else
    unsigned lanes = 0;
    for (int i = 0; i < LANES; i++)
        lanes |= (unsigned)(mask[i] != 0) << i;
    return lanes;
#endif
}

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* Return b if either is a NaN. GCC 12 compiles `choose` to a comparison and three bitwise instructions. */
#if defined(__AVX512F__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vf vmax(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return choose(a < b, a, b); }
#endif

/* GCC 12 compiles __builtin_convertvector to four instructions; AVX-512 has one for it. */
#if defined(__AVX512F__)
INLINE vu words_of_halves(vu16 halves) { return (vu)_mm512_cvtepu16_epi32((__m256i)halves); }
INLINE vu16 halves_of_words(vu words) { return (vu16)_mm512_cvtepi32_epi16((__m512i)words); }
#else
INLINE vu words_of_halves(vu16 halves) { return __builtin_convertvector(halves, vu); }
INLINE vu16 halves_of_words(vu words) { return __builtin_convertvector(words, vu16); }
#endif

INLINE vf widen(vu16 bits) { return (vf)(words_of_halves(bits) << 16); }

/* Rounds to nearest even; a NaN stays a NaN. The AVX-512 instruction turns values below the normal range into 0. */
INLINE vu16 narrow(vf value)
{
#if defined(__AVX512BF16__)
    return (vu16)_mm512_cvtneps_pbh((__m512)value);
#else
    vu bits = (vu)value;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu quiet = (vu){0} + 0x7fc0;
    /* Otherwise GCC loads the constant from memory, masked by the NaNs. As long as there are no NaNs its page is never
     * touched, and suppressing an access to such a page takes some 400 cycles. */
    KEEP_IN_REGISTER(quiet);
    return halves_of_words((vu)choose(value != value, (vf)quiet, (vf)rounded));
#endif
}

INLINE vf load(const void *base, int64_t index, const enum dtype dtype)
{
    if (dtype == BFLOAT16) {
        vu16 bits;
        memcpy(&bits, (const uint16_t *)base + index, sizeof bits);
        return widen(bits);
    }
    vf value;
    memcpy(&value, (const float *)base + index, sizeof value);
    return value;
}

INLINE void store(void *base, int64_t index, vf value, const enum dtype dtype)
{
    if (dtype == BFLOAT16) {
        vu16 bits = narrow(value);
        memcpy((uint16_t *)base + index, &bits, sizeof bits);
    } else {
        memcpy((float *)base + index, &value, sizeof value);
    }
}

/* The first `count` < LANES elements; the other lanes are zero. */
INLINE vf load_partial(const void *base, int64_t index, int64_t count, const enum dtype dtype)
{
    uint32_t buffer[LANES] = {0};
    memcpy(buffer, at(base, index, dtype), (size_t)count * size_of(dtype));
    return load(buffer, 0, dtype);
}

INLINE void store_partial(void *base, int64_t index, int64_t count, vf value, const enum dtype dtype)
{
    uint32_t buffer[LANES];
    store(buffer, 0, value, dtype);
    memcpy((void *)at(base, index, dtype), buffer, (size_t)count * size_of(dtype));
}

/* The first (half = 0) or second (1) bfloat16 of each word, as float32. */
INLINE vf half_of(vf words, const int half) { return (vf)(half ? (vu)words & 0xffff0000 : (vu)words << 16); }

INLINE float load_one(const void *base, int64_t index, const enum dtype dtype)
{
    if (dtype == FLOAT32)
        return ((const float *)base)[index];
    const uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE vf load_upto(const void *base, int64_t index, int64_t count, const enum dtype dtype)
{
    return count >= LANES ? load(base, index, dtype) : load_partial(base, index, count, dtype);
}

INLINE void store_upto(void *base, int64_t index, int64_t count, vf value, const enum dtype dtype)
{
    if (count >= LANES)
        store(base, index, value, dtype);
    else
        store_partial(base, index, count, value, dtype);
}

/* LANES 32-bit words that hold up to `count` elements, zero after them; two bfloat16 share a word. */
INLINE vf load_words(const void *base, int64_t index, int64_t count, const enum dtype dtype)
{
    vf words = {0};
    const size_t size_bytes = (size_t)count * size_of(dtype);
    if (size_bytes >= sizeof words)
        memcpy(&words, at(base, index, dtype), sizeof words);
    else
        memcpy(&words, at(base, index, dtype), size_bytes);
    return words;
}

/* sum + a b; sum: LANES int32; a, b: LANES pairs of int16. */
INLINE vf add_int16_products(vf sum, vf a, vf b)
{
#if defined(__AVX512VNNI__)
    return (vf)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return (vf)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVXVNNI__)
    return (vf)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
    /* With intrinsics GCC 12 keeps some of twelve sums on the stack: 112 GOP/s per core instead of 171. */
    vf products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(a), "x"(b));
    return sum;
#else
    (void)a, (void)b, (void)sum;
    __builtin_unreachable();
#endif
}

/* Whether add_int16_products is faster than products of floats. */
#if defined(__AVX2__)
#define MULTIPLIES_INT16 1
#else
#define MULTIPLIES_INT16 0
#endif

/* A step is the elements of one multiply-add: LANES floats, or LANES pairs of bfloat16 if the CPU multiplies those. */
#if defined(__AVX512BF16__)
#define MULTIPLIES_BFLOAT16 1
INLINE int64_t step_of(const enum dtype dtype) { return dtype == BFLOAT16 ? 2 * LANES : LANES; }
INLINE vf load_step(const void *base, int64_t index, const enum dtype dtype)
{
    return load_words(base, index, step_of(dtype), dtype);
}
INLINE vf load_step_partial(const void *base, int64_t index, int64_t count, const enum dtype dtype)
{
    return load_words(base, index, count, dtype);
}
INLINE vf multiply_add(vf sum, vf a, vf b, const enum dtype dtype)
{
    if (dtype == BFLOAT16)
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    return fused(a, b, sum);
}
#else
#define MULTIPLIES_BFLOAT16 0
INLINE int64_t step_of(const enum dtype dtype)
{
    (void)dtype;
    return LANES;
}
#define load_step load
#define load_step_partial load_partial
INLINE vf multiply_add(vf sum, vf a, vf b, const enum dtype dtype)
{
    (void)dtype;
    return fused(a, b, sum);
}
#endif

#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* Sums of the lanes of each of `count` vectors. Neighbors are added first: one fixed order, whatever the count. */
INLINE void horizontal_sums(float *sums, const vf *vectors, const int count)
{
#pragma GCC unroll 4
    for (int first = 0; first < count; first += LANES) {
        vf level[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            level[i] = first + i < count ? vectors[first + i] : (vf){0};
#pragma GCC unroll 4
        for (int size = LANES / 2; size > 0; size /= 2)
#pragma GCC unroll 8
            for (int i = 0; i < size; i++)
                level[i] = SHUFFLE(level[2 * i], level[2 * i + 1], EVEN) + SHUFFLE(level[2 * i], level[2 * i + 1], ODD);
        memcpy(sums + first, level, sizeof(float) * (size_t)MIN(LANES, count - first));
    }
}

INLINE float horizontal_sum(vf value)
{
    float sum;
    horizontal_sums(&sum, &value, 1);
    return sum;
}

#if defined(__AVX512F__)
/* rows[i][j] <-> rows[j][i]: first within squares of 4 x 4 words, then the 4 x 4 squares. */
INLINE void transpose(vf *rows)
{
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        const __m512 low = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        const __m512 high = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
        const __m512 next_low = _mm512_unpacklo_ps((__m512)rows[i + 2], (__m512)rows[i + 3]);
        const __m512 next_high = _mm512_unpackhi_ps((__m512)rows[i + 2], (__m512)rows[i + 3]);
        rows[i] = (vf)_mm512_unpacklo_pd((__m512d)low, (__m512d)next_low);
        rows[i + 1] = (vf)_mm512_unpackhi_pd((__m512d)low, (__m512d)next_low);
        rows[i + 2] = (vf)_mm512_unpacklo_pd((__m512d)high, (__m512d)next_high);
        rows[i + 3] = (vf)_mm512_unpackhi_pd((__m512d)high, (__m512d)next_high);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 a = (__m512)rows[i], b = (__m512)rows[i + 4], c = (__m512)rows[i + 8], d = (__m512)rows[i + 12];
        const __m512 even = _mm512_shuffle_f32x4(a, b, 0x88), odd = _mm512_shuffle_f32x4(a, b, 0xdd);
        const __m512 next_even = _mm512_shuffle_f32x4(c, d, 0x88), next_odd = _mm512_shuffle_f32x4(c, d, 0xdd);
        rows[i] = (vf)_mm512_shuffle_f32x4(even, next_even, 0x88);
        rows[i + 4] = (vf)_mm512_shuffle_f32x4(odd, next_odd, 0x88);
        rows[i + 8] = (vf)_mm512_shuffle_f32x4(even, next_even, 0xdd);
        rows[i + 12] = (vf)_mm512_shuffle_f32x4(odd, next_odd, 0xdd);
    }
}
#else
/* rows[i][j] <-> rows[j][i]: log2(LANES) perfect shuffles of the whole square. */
INLINE void transpose(vf *rows)
{
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        vf shuffled[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            shuffled[2 * i] = SHUFFLE(rows[i], rows[i + LANES / 2], LOW);
            shuffled[2 * i + 1] = SHUFFLE(rows[i], rows[i + LANES / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            rows[i] = shuffled[i];
    }
}
#endif

INLINE float horizontal_max(vf value)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float lanes[LANES];
    memcpy(lanes, &value, sizeof lanes);
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int lane = 0; lane < half; lane++)
            lanes[lane] = MAX(lanes[lane], lanes[lane + half]);
    return lanes[0];
#endif
}

#define MAX_EXPS 8 /* vectors at a time */

/* x <- exp(x) within 2 units in the last place for x in [-87, 88], or a NaN. Cephes' expf: x = n ln 2 + r, a polynomial
 * in r, then n added to the exponent. All vectors take each step together: one after the other they would be long
 * dependency chains, of which the CPU runs too few at once (see silu_mul.c). */
INLINE void vexp_within(vf *x, const int count)
{
    const vf round_to_integer = splat(ROUND_TO_INTEGER);
    vf shifted[MAX_EXPS], p[MAX_EXPS];
#define EACH(step)                                                                                                    \
    _Pragma("GCC unroll 8") for (int i = 0; i < count; i++) { step; }
    EACH(shifted[i] = x[i] * 1.44269504088896341f + round_to_integer)
    EACH(p[i] = shifted[i] - round_to_integer)
    EACH(x[i] = x[i] - p[i] * 0.693359375f)
    EACH(x[i] = x[i] + p[i] * 2.12194440e-4f)
    EACH(p[i] = x[i] * 1.9875691500e-4f + 1.3981999507e-3f)
    EACH(p[i] = p[i] * x[i] + 8.3334519073e-3f)
    EACH(p[i] = p[i] * x[i] + 4.1665795894e-2f)
    EACH(p[i] = p[i] * x[i] + 1.6666665459e-1f)
    EACH(p[i] = p[i] * x[i] + 5.0000001201e-1f)
    EACH(p[i] = p[i] * (x[i] * x[i]) + x[i] + 1.0f)
    /* the low bits of `shifted` hold n; the shift drops the rest */
    EACH(x[i] = (vf)((vi)p[i] + ((vi)shifted[i] << 23)))
#undef EACH
}

INLINE vf clamp(vf x, float low, float high) { return vmax(splat(low), vmin(splat(high), x)); }

/* exp(x) for any x: 0 below -87, exp(88) above 88. */
INLINE vf vexp(vf x)
{
    vf power = clamp(x, -87.0f, 88.0f);
    vexp_within(&power, 1);
    return choose(x < -87.0f, (vf){0}, power);
}

/* a / b within 2 units in the last place, if the reciprocal of b is a normal number. */
INLINE vf vdivide(vf a, vf b)
{
#if defined(__AVX512F__)
    const vf guess = (vf)_mm512_rcp14_ps((__m512)b); /* 14 bits are right; one Newton step doubles them */
    return a * (guess + guess * (1.0f - b * guess));
#else
    return a / b;
#endif
}

/* x <- silu(x). Values of -86 and below are divided by the same 2e37, so that -inf stays -inf. */
INLINE void vsilu(vf *x, const int count)
{
    vf power[MAX_EXPS];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
        power[i] = clamp(-x[i], -87.0f, 86.0f);
    vexp_within(power, count);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
        x[i] = vdivide(x[i], 1.0f + power[i]);
}

/* tanh through exp: absolute error about 1e-7, exact at the ends. */
INLINE vf vtanh(vf x)
{
    vf twice = choose(x > 10.0f, splat(20.0f), choose(x < -10.0f, splat(-20.0f), x + x));
    return 1.0f - 2.0f / (vexp(twice) + 1.0f);
}

/* Scratch owned by the calling thread, grown when too small and reused between calls; 64-byte aligned. */
INLINE void *grow_scratch(void **buffer, size_t *capacity, size_t size_bytes)
{
    if (size_bytes > *capacity || !*buffer) { /* allocates even for size 0: NULL means out of memory */
        free(*buffer);
        *capacity = (size_bytes + size_bytes / 2 + 4096) & ~(size_t)4095;
        *buffer = aligned_alloc(64, *capacity);
        if (!*buffer)
            *capacity = 0;
    }
    return *buffer;
}

/* Row stride in elements: an odd number of cache lines, so that lines of one column do not evict each other. Two Xeon
 * cores, weights from memory, all linears of a layer for 190 rows: 965 us with dense rows, 910 with this stride. */
INLINE int64_t row_stride_of(int64_t row_size, enum dtype dtype)
{
    const int64_t line = 64 / (int64_t)size_of(dtype);
    return ((row_size + line - 1) / line | 1) * line;
}

/* The next part of scratch memory; while `memory` is NULL, only adds up the sizes. */
INLINE void *reserve(char *memory, size_t *used, size_t size_bytes)
{
    void *part = memory ? memory + *used : NULL;
    *used += (size_bytes + 63) & ~(size_t)63;
    return part;
}
