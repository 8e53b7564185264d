/* The AVX-VNNI instruction that we use, built from AVX2 instructions: compile with `-include` of this file. */
#define _GNU_SOURCE /* as the sources do, before anything is included */
#include <immintrin.h>

#define __AVXVNNI__ 1

static inline __m256i emulated_dpwssd(__m256i sum, __m256i a, __m256i b)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

#define _mm256_dpwssd_avx_epi32 emulated_dpwssd
