/* Checkpoints' weights in four bits: packs them as in quantized_weight.h, and dequantizes them. */
#include "quantized_weight.h"

/* A weight as checkpoints store it, [num_outputs, depth]; depth is a multiple of the group size. */
struct four_bit_weight {
    const uint8_t *codes;   /* [num_outputs, depth / 2], two in a byte, the first in its lower bits */
    const uint16_t *scales; /* bfloat16, [num_outputs, groups] */
    const uint8_t *zeros;   /* the same, for formats with zero points */
    const int32_t *order;   /* [depth]: the inputs of the first group, then those of the next; NULL = they are in order */
    int64_t depth;
};

/* Bytes of codes per group: as many as it has pairs. */
INLINE int group_bytes_of(const enum weight_format format) { return group_words_of(format); }

/* Moves the even ones of eight codes to the lower half, the odd ones to the upper; the first code is in the lowest bits. */
INLINE uint32_t in_halves(uint32_t eight)
{
    uint32_t halves[2];
    for (int odd = 0; odd < 2; odd++) {
        const uint32_t bytes = eight >> 4 * odd & 0x0f0f0f0f, pairs = (bytes | bytes >> 4) & 0x00ff00ff;
        halves[odd] = (pairs | pairs >> 8) & 0xffff;
    }
    return halves[0] | halves[1] << 16;
}

/* Eight codes of a row: for a place in the order and the seven after it. */
INLINE uint32_t ordered_eight(const uint8_t *codes, const int32_t *order)
{
    uint32_t eight = 0;
    for (int i = 0; i < 8; i++)
        eight |= (uint32_t)(codes[order[i] / 2] >> order[i] % 2 * 4 & 15) << i * 4;
    return eight;
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
                if (weight->order)
                    eight = ordered_eight(weight->codes + (output + lane) * weight->depth / 2,
                                          weight->order + group * group_bytes * 2 + i * 8);
                else
                    memcpy(&eight, weight->codes + place * group_bytes + i * 4, sizeof eight);
                eight = in_halves(eight);
                memcpy(multiples + ((group * (group_bytes / 4) + i) * LANES + lane) * 4, &eight, sizeof eight);
            }
        }
}

/* packed: quantized_weight_bytes long. zeros: NULL for formats without them. */
EXPORT int pack_four_bits(void *packed, const uint8_t *codes, const uint16_t *scales, const uint8_t *zeros,
                          const int32_t *order, int64_t num_outputs, int64_t depth, int format, int num_threads)
{
    const struct four_bit_weight weight = {codes, scales, zeros, order, depth};
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
            pack_panel(target, &weight, output, count, NF4); /* the same for all others */
    }
    return OK;
}

/* Dequantizes LANES bytes. scales: for the first code of each byte, and for the second; zeros: pairs of int16. */
INLINE void dequantize_bytes(void *out, const uint8_t *codes, const vf *scales, vu zeros, const enum dtype dtype,
                             const enum weight_format format)
{
    typedef uint8_t vb __attribute__((vector_size(LANES)));
    vb bytes;
    memcpy(&bytes, codes, sizeof bytes);
    const vu wide = __builtin_convertvector(bytes, vu);
    const vf pairs = (vf)(multiples_in((vi16)((wide | wide << 12) & 0x000f000f), 0, format) - (vi16)zeros);
    const vf first = scaled_half(pairs, 0, scales[0]), second = scaled_half(pairs, 1, scales[1]);
    if (dtype == BFLOAT16) {
        const vf words = rounded_words(first, second);
        memcpy(out, &words, sizeof words);
    }
    for (int lane = 0; lane < LANES && dtype == FLOAT32; lane++) {
        ((float *)out)[2 * lane] = first[lane];
        ((float *)out)[2 * lane + 1] = second[lane];
    }
}

/* Dequantizes a row whose groups lie one after the other. */
INLINE void dequantize_row(void *out, const struct four_bit_weight *weight, int64_t output, const enum dtype dtype,
                           const enum weight_format format)
{
    const int64_t group_bytes = group_bytes_of(format), first = output * weight->depth / 2 / group_bytes;
    for (int64_t group = first; group < first + weight->depth / 2 / group_bytes; group++) {
        const vf scale = splat(load_one(weight->scales, group, BFLOAT16)), scales[] = {scale, scale};
        const vu zeros = (vu){0} + (has_zero_points(format) ? weight->zeros[group] * 0x10001u : 0);
        for (int64_t byte = group * group_bytes; byte < (group + 1) * group_bytes; byte += LANES)
            dequantize_bytes((void *)at(out, 2 * byte, dtype), weight->codes + byte, scales, zeros, dtype, format);
    }
}

INLINE vu gather(const uint32_t *table, const int32_t *places)
{
#if defined(__AVX512F__)
    return (vu)_mm512_i32gather_epi32(_mm512_loadu_si512(places), table, sizeof *table);
#elif defined(__AVX2__)
    return (vu)_mm256_i32gather_epi32((const int *)table, _mm256_loadu_si256((const void *)places), sizeof *table);
#else
    vu found;
    for (int lane = 0; lane < LANES; lane++)
        found[lane] = table[places[lane]];
    return found;
#endif
}

/* Dequantizes a row with any order. groups: each input's group; of 2 LANES inputs, the even ones before the odd ones.
 * table: scratch, [groups]. */
INLINE void dequantize_ordered_row(void *out, const struct four_bit_weight *weight, int64_t output, const int32_t *groups,
                                   uint32_t *table, const enum dtype dtype, const enum weight_format format)
{
    const int64_t row_bytes = weight->depth / 2, num_groups = row_bytes / group_bytes_of(format), row = output * num_groups;
    for (int64_t group = 0; group < num_groups; group++)
        table[group] = (uint32_t)weight->scales[row + group] << 16 | (has_zero_points(format) ? weight->zeros[row + group] : 0);
    for (int64_t byte = 0; byte < row_bytes; byte += LANES, groups += 2 * LANES) {
        const vu of_first = gather(table, groups), of_second = gather(table, groups + LANES);
        const vf scales[] = {(vf)(of_first & 0xffff0000), (vf)(of_second & 0xffff0000)};
        dequantize_bytes((void *)at(out, 2 * (output * row_bytes + byte), dtype), weight->codes + output * row_bytes + byte,
                         scales, (of_first & 0xffff) | of_second << 16, dtype, format);
    }
}

static int dequantize_ordered(void *out, const struct four_bit_weight *weight, int64_t num_outputs,
                              enum weight_format format, enum dtype dtype, int num_threads)
{
    const int64_t group_size = 2 * group_bytes_of(format), num_groups = weight->depth / group_size;
    int32_t *groups = malloc((size_t)(weight->depth + num_threads * num_groups) * sizeof *groups);
    if (!groups)
        return OUT_OF_MEMORY;
    for (int64_t place = 0; place < weight->depth; place++) {
        const int32_t input = weight->order[place], in_line = input % (2 * LANES);
        groups[input - in_line + in_line % 2 * LANES + in_line / 2] = (int32_t)(place / group_size);
    }
#pragma omp parallel for num_threads(num_threads)
    for (int64_t output = 0; output < num_outputs; output++) {
        uint32_t *table = (uint32_t *)groups + weight->depth + omp_get_thread_num() * num_groups;
        WITH_CONSTANTS(format, dtype, dequantize_ordered_row, out, weight, output, groups, table);
    }
    free(groups);
    return OK;
}

/* out: dense [num_outputs, depth]; other arguments as in pack_four_bits. */
EXPORT int dequantize_four_bits(void *out, const uint8_t *codes, const uint16_t *scales, const uint8_t *zeros,
                                const int32_t *order, int64_t num_outputs, int64_t depth, int format, int dtype,
                                int num_threads)
{
    const struct four_bit_weight weight = {codes, scales, zeros, order, depth};
    if (order)
        return dequantize_ordered(out, &weight, num_outputs, (enum weight_format)format, (enum dtype)dtype, num_threads);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t output = 0; output < num_outputs; output++)
        WITH_CONSTANTS(format, dtype, dequantize_row, out, &weight, output);
    return OK;
}
