/* Weights as bitsandbytes has them in NF4, made whole; what they are multiplied from is in quantized_weight.h. */
#include "quantized_weight.h"

/* A block. codes: places in levels, two in a byte, the first in its upper bits. */
INLINE void make_whole(void *whole, const uint8_t *codes, float largest, const float *levels, const enum dtype dtype)
{
    float values[BLOCK_OF_NF4];
    for (int byte = 0; byte < BLOCK_OF_NF4 / 2; byte++) {
        values[2 * byte] = levels[codes[byte] >> 4] * largest;
        values[2 * byte + 1] = levels[codes[byte] & 15] * largest;
    }
    for (int i = 0; i < BLOCK_OF_NF4; i += LANES)
        store(whole, i, load(values, i, FLOAT32), dtype);
}

/* whole: dense [num_blocks, BLOCK_OF_NF4]; codes: [num_blocks, BLOCK_OF_NF4 / 2]; largest: [num_blocks]; levels: [16]. */
EXPORT int whole_nf4(void *whole, const uint8_t *codes, const float *largest, const float *levels, int64_t num_blocks,
                     int dtype, int num_threads)
{
#pragma omp parallel for num_threads(num_threads)
    for (int64_t block = 0; block < num_blocks; block++) {
        void *target = (void *)at(whole, block * BLOCK_OF_NF4, (enum dtype)dtype);
        if (dtype == BFLOAT16)
            make_whole(target, codes + block * (BLOCK_OF_NF4 / 2), largest[block], levels, BFLOAT16);
        else
            make_whole(target, codes + block * (BLOCK_OF_NF4 / 2), largest[block], levels, FLOAT32);
    }
    return OK;
}
