/* Weights that checkpoints have in four bits: packed as quantized_weight.h has them, and made whole. */
#include "quantized_weight.h"

/* As checkpoints have it, [num_outputs, depth]: depth is of whole groups. */
struct four_bit_weight {
    const uint8_t *codes;   /* [num_outputs, depth / 2], two in a byte, the first in its lower bits */
    const uint16_t *scales; /* bfloat16, [num_outputs, groups] */
    const uint8_t *zeros;   /* the same, of formats with zero points */
    int64_t depth;
    const int32_t *order;   /* see packed_linear.h; only what is made whole is put in order */
};

/* Of codes: as many as a group has words of pairs. */
INLINE int group_bytes_of(const enum weight_format format) { return group_words_of(format); }

/* Of eight codes, the first in the lowest bits, the even ones in the lower half. */
INLINE uint32_t in_halves(uint32_t eight)
{
    uint32_t halves[2];
    for (int odd = 0; odd < 2; odd++) {
        const uint32_t bytes = eight >> 4 * odd & 0x0f0f0f0f, pairs = (bytes | bytes >> 4) & 0x00ff00ff;
        halves[odd] = (pairs | pairs >> 8) & 0xffff;
    }
    return halves[0] | halves[1] << 16;
}

INLINE void pack_panel(char *panel, const struct four_bit_weight *weight, int64_t output, int64_t num_outputs,
                       const enum weight_format format)
{
    const int64_t group_bytes = group_bytes_of(format), num_groups = weight->depth / 2 / group_bytes;
    uint16_t *scales = (uint16_t *)panel;
    uint8_t *zeros = (uint8_t *)(scales + num_groups_of(format, weight->depth) * LANES);
    char *multiples = panel + head_bytes_of(format, weight->depth);
    for (int64_t lane = 0; lane < num_outputs; lane++)
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t place = (output + lane) * num_groups + group;
            scales[group * LANES + lane] = weight->scales[place];
            if (has_zero_points(format))
                zeros[group * LANES + lane] = weight->zeros[place];
            for (int64_t i = 0; i < group_bytes / 4; i++) {
                uint32_t eight;
                memcpy(&eight, weight->codes + place * group_bytes + i * 4, sizeof eight);
                eight = in_halves(eight);
                memcpy(multiples + ((group * (group_bytes / 4) + i) * LANES + lane) * 4, &eight, sizeof eight);
            }
        }
}

/* packed: of quantized_weight_bytes. zeros: NULL of formats that have none. */
EXPORT int pack_four_bits(void *packed, const uint8_t *codes, const uint16_t *scales, const uint8_t *zeros,
                          int64_t num_outputs, int64_t depth, int format, int num_threads)
{
    const struct four_bit_weight weight = {codes, scales, zeros, depth, NULL};
    const int64_t panel_bytes = quantized_panel_bytes_of((enum weight_format)format, depth, BFLOAT16);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < num_quantized_panels_of(num_outputs); panel++) {
        const int64_t output = panel * LANES, count = MAX(0, MIN(LANES, num_outputs - output));
        char *target = (char *)packed + panel * panel_bytes;
        memset(target, 0, (size_t)panel_bytes);
        if (format == UINT4_G128)
            pack_panel(target, &weight, output, count, UINT4_G128);
        else if (format == UINT4)
            pack_panel(target, &weight, output, count, UINT4);
        else
            pack_panel(target, &weight, output, count, NF4); /* any other */
    }
    return OK;
}

/* A group. */
INLINE void make_whole(void *whole, const struct four_bit_weight *weight, int64_t group, const enum dtype dtype,
                       const enum weight_format format)
{
    typedef uint8_t vb __attribute__((vector_size(LANES)));
    const vf scale = splat(load_one(weight->scales, group, BFLOAT16));
    const uint32_t zero = has_zero_points(format) ? weight->zeros[group] * 0x10001u : 0;
    for (int byte = 0; byte < group_bytes_of(format); byte += LANES) {
        vb bytes;
        memcpy(&bytes, weight->codes + group * group_bytes_of(format) + byte, sizeof bytes);
        const vu wide = __builtin_convertvector(bytes, vu);
        const vf pairs = (vf)(multiples_in((vi16)((wide | wide << 12) & 0x000f000f), 0, format) - (vi16)(wide * 0 + zero));
        const vf first = scaled_half(pairs, 0, scale), second = scaled_half(pairs, 1, scale);
        if (dtype == BFLOAT16) {
            const vf words = rounded_words(first, second);
            memcpy((char *)whole + 2 * byte * (int64_t)size_of(BFLOAT16), &words, sizeof words);
        }
        for (int lane = 0; lane < LANES && dtype == FLOAT32; lane++) {
            ((float *)whole)[2 * (byte + lane)] = first[lane];
            ((float *)whole)[2 * (byte + lane) + 1] = second[lane];
        }
    }
}

/* A row. */
INLINE void make_row_whole(void *whole, const struct four_bit_weight *weight, int64_t output, const enum dtype dtype,
                           const enum weight_format format)
{
    const int64_t group_size = 2 * group_bytes_of(format), num_groups = weight->depth / group_size;
    const int32_t *order = weight->order;
    for (int64_t group = output * num_groups; group < (output + 1) * num_groups; group++) {
        float ordered[2 * WIDE_GROUP_WORDS]; /* or bfloat16 */
        void *target = (void *)at(whole, group * group_size, dtype);
        make_whole(order ? ordered : target, weight, group, dtype, format);
        for (int64_t i = 0; i < group_size && order; i++) {
            const int64_t place = output * weight->depth + order[(group - output * num_groups) * group_size + i];
            if (dtype == BFLOAT16)
                ((uint16_t *)whole)[place] = ((const uint16_t *)ordered)[i];
            else
                ((float *)whole)[place] = ordered[i];
        }
    }
}

/* whole: dense [num_outputs, depth]; the others as pack_four_bits has them. */
EXPORT int whole_four_bits(void *whole, const uint8_t *codes, const uint16_t *scales, const uint8_t *zeros,
                           const int32_t *order, int64_t num_outputs, int64_t depth, int format, int dtype, int num_threads)
{
    const struct four_bit_weight weight = {codes, scales, zeros, depth, order};
#pragma omp parallel for num_threads(num_threads)
    for (int64_t output = 0; output < num_outputs; output++)
        WITH_CONSTANTS(format, dtype, make_row_whole, whole, &weight, output);
    return OK;
}
