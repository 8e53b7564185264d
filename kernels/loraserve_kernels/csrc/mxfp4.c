/* Weights as checkpoints have them in MXFP4, made whole; what they are multiplied from is in quantized_weight.h. */
#include "quantized_weight.h"

/* A group. block: elements two in a byte, the first in its lower bits. exponent: of two, over -127. */
INLINE void make_whole(void *whole, const uint8_t *block, int32_t exponent, const enum dtype dtype)
{
    typedef uint8_t vb __attribute__((vector_size(LANES)));
    /* Of half an element, which multiples are of; below the normal range if the exponent is 0 or 1. */
    const vf scale = splat(float_of(exponent > 1 ? (exponent - 1) << 23 : 1 << (21 + exponent)));
    for (int byte = 0; byte < GROUP / 2; byte += LANES) {
        vb bytes;
        memcpy(&bytes, block + byte, sizeof bytes);
        const vu wide = __builtin_convertvector(bytes, vu);
        const vf pairs = (vf)mxfp4_multiples((vi16)((wide | wide << 12) & 0x000f000f), 0);
        const vf first = scaled_half(pairs, 0, scale), second = scaled_half(pairs, 1, scale);
        if (dtype == BFLOAT16) {
            const vf words = exact_words(first, second);
            memcpy((char *)whole + 2 * byte * (int64_t)size_of(BFLOAT16), &words, sizeof words);
        }
        for (int lane = 0; lane < LANES && dtype == FLOAT32; lane++) {
            ((float *)whole)[2 * (byte + lane)] = first[lane];
            ((float *)whole)[2 * (byte + lane) + 1] = second[lane];
        }
    }
}

/* whole: dense [num_groups, GROUP]; blocks: [num_groups, GROUP / 2]; exponents: [num_groups]. */
EXPORT int whole_mxfp4(void *whole, const uint8_t *blocks, const uint8_t *exponents, int64_t num_groups, int dtype,
                       int num_threads)
{
#pragma omp parallel for num_threads(num_threads)
    for (int64_t group = 0; group < num_groups; group++) {
        void *target = (void *)at(whole, group * GROUP, (enum dtype)dtype);
        if (dtype == BFLOAT16)
            make_whole(target, blocks + group * (GROUP / 2), exponents[group], BFLOAT16);
        else
            make_whole(target, blocks + group * (GROUP / 2), exponents[group], FLOAT32);
    }
    return OK;
}
