/* INT8 and UINT4_G128 times many rows rounded to int16 with AMX, see packed_linear.c and row_tiles.h.
 *
 * AMX multiplies bytes. Weights are bytes: codes minus their zero points. The higher bytes of x's int16, signed, and the
 * lower ones, unsigned, are multiplied separately, and a group's sums are combined as int32: bit for bit the results of
 * int16 products.
 *
 * Two Xeon cores under other load, 4,096 x 4,096, us for 16 / 64 / 256 rows, two runs: 964 to 1,142 / 2,023 to 3,185 /
 * 7,736 to 10,020, products of int16 1,367 to 1,514 / 4,863 to 5,325 / 18,188 to 21,225, bfloat16 1,118 to 1,275 / 2,279
 * to 2,491 / 9,679 to 15,997 (benchmarks/bench_quantized_linear.py). Groups of 32 were no faster this way than as int16:
 * products of 32 of the depth take as long as those of 64, and each group's sums are stored and scaled.
 */
#include "amx_bytes.h"

#include "linear_tiles.h"
#include "quantized_weight.h"
#include "row_tiles.h"

#if MULTIPLIES_BFLOAT16

#define MIN_ROWS 9                           /* fewer are as fast as int16 */
#define STRETCH_WORDS (4 * INT16_GROUP)      /* of depth, whose weights stay in L1 */
#define PIECE_WORDS (2 * AMX_WORDS)          /* of depth in one product */
#define LAG 2                                /* groups between a group's products and its scaling */
#define PREFETCH_BYTES 4096                  /* how far ahead a panel's weights are prefetched */

typedef int8_t vi8 __attribute__((vector_size(4 * LANES)));

/* Whether weights fit into bytes and their groups are those of x's scales, all of them whole. */
INLINE bool fits(const struct packed_linear *linear)
{
    return linear->format == UINT4_G128 || (linear->format == INT8 && linear->depth % (2 * INT16_GROUP) == 0);
}

bool multiplies_bytes(const struct packed_linear *linear, int64_t num_rows, enum dtype dtype)
{
    return dtype == BFLOAT16 && amx_is_on() && num_rows >= MIN_ROWS && fits(linear);
}

/* The higher bytes of all int16, then the lower ones, in widen_group's order of elements: unchanged for INT8; for four
 * bits, of each eight the first, fifth, second and sixth, then the third, seventh, fourth and eighth. */
INLINE vf in_bytes(vf pairs, const enum weight_format format)
{
    const __m128i order = format == INT8 ? _mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14)
                                         : _mm_setr_epi8(1, 9, 3, 11, 5, 13, 7, 15, 0, 8, 2, 10, 4, 12, 6, 14);
    const __m512i eights = _mm512_shuffle_epi8((__m512i)pairs, _mm512_broadcast_i32x4(order));
    return (vf)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), eights);
}

/* Packs a tile as [pieces of the depth][2 halves][row][64], with scales as in round_tile. Rows past num_rows keep stale
 * data; their sums are not stored. */
INLINE void pack_tile_of(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows, int64_t depth,
                         const enum weight_format format)
{
    const int64_t vector_elements = 2 * LANES, piece_elements = 2 * PIECE_WORDS, half_bytes = AMX_ROWS * piece_elements;
    uint32_t *scales = tile + words_of(depth, BFLOAT16) * AMX_ROWS;
    for (int64_t row = 0; row < MIN(AMX_ROWS, num_rows); row++)
        for (int64_t k = 0; k < depth; k += 2 * INT16_GROUP) {
            const int64_t index = row * x_stride + k;
            uint32_t inverse;
            scales[k / (2 * INT16_GROUP) * AMX_ROWS + row] = int16_scale(x, index, 2 * INT16_GROUP, &inverse);
            char *line = (char *)tile + k / piece_elements * 2 * half_bytes + row * piece_elements;
            for (int64_t i = 0; i < 2 * INT16_GROUP; i += vector_elements) {
                const vf pairs = load_words(x, index + i, vector_elements, BFLOAT16);
                const vf halves = in_bytes(rounded_pairs(pairs, load_one(&inverse, 0, FLOAT32)), format);
                char *target = line + i / piece_elements * 2 * half_bytes + i % piece_elements;
                memcpy(target, &halves, sizeof halves / 2);
                memcpy(target + half_bytes, (const char *)&halves + sizeof halves / 2, sizeof halves / 2);
            }
        }
}

void pack_bytes(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows, const struct packed_linear *linear)
{
    if (linear->format == INT8)
        pack_tile_of(tile, x, x_stride, num_rows, linear->depth, INT8);
    else
        pack_tile_of(tile, x, x_stride, num_rows, linear->depth, UINT4_G128);
}

/* Widens a group of a panel's depth to bytes, [words / 2][16 outputs][4]. */
INLINE void widen_group(char *widened, const struct quantized_panel *panel, int64_t word, const enum weight_format format)
{
    if (format == INT8) {
        short places[2 * LANES]; /* of pairs: those of the next word beside those of this one */
        for (int i = 0; i < 2 * LANES; i++)
            places[i] = (short)(i % 2 * LANES + i / 2);
        const __m512i order = _mm512_loadu_si512(places);
        const char *source = panel->multiples + word * 2 * LANES;
        for (int64_t byte = 0; byte < INT16_GROUP * 2 * LANES; byte += (int64_t)sizeof(vf)) {
            __builtin_prefetch(source + byte + PREFETCH_BYTES, 0, 3);
            const __m512i line = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(source + byte));
            memcpy(widened + byte, &line, sizeof line);
        }
        return;
    }
    const vi8 zeros = (vi8)((vu)zero_points(panel, word / INT16_GROUP) * 0x101);
    const char *source = panel->multiples + word * LANES;
    for (int64_t byte = 0; byte < INT16_GROUP * LANES; byte += (int64_t)sizeof(vf)) {
        vu codes;
        memcpy(&codes, source + byte, sizeof codes);
        __builtin_prefetch(source + byte + PREFETCH_BYTES, 0, 3);
        const vi8 fours[] = {(vi8)(codes & 0x0f0f0f0f) - zeros, (vi8)(codes >> 4 & 0x0f0f0f0f) - zeros};
        memcpy(widened + 2 * byte, fours, sizeof fours);
    }
}

/* sums [rows, 2 * LANES] += a group's products, as amx_store_bytes stores them, times the group's scales. */
INLINE void add_group(float *sums, const int32_t *products, const uint32_t *x_scales, const struct quantized_panel *panels,
                      int64_t word, int64_t num_rows, const enum weight_format format)
{
    vf scales[2];
    for (int p = 0; p < 2; p++)
        scales[p] = quantized_scale(panels + p, word, format);
    for (int64_t row = 0; row < num_rows; row++)
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) {
            const vf before = word ? load(sums, (2 * row + p) * LANES, FLOAT32) : (vf){0};
            const vu higher = (vu)load((const float *)products, 2 * p * AMX_TILE_WORDS + row * LANES, FLOAT32);
            const vu lower = (vu)load((const float *)products, (2 * p + 1) * AMX_TILE_WORDS + row * LANES, FLOAT32);
            const vf product = __builtin_convertvector((vi)((higher << 8) + lower), vf);
            store(sums, (2 * row + p) * LANES, fused(product, spread(x_scales + row) * scales[p], before), FLOAT32);
        }
}

/* All rows times two panels: for each stretch of the depth, each tile of rows and each group in turn. A group's products
 * are started before those of two groups earlier are scaled: both take equally long, and what tiles just stored is slow
 * to load. */
INLINE void multiply_panels(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows,
                            const struct packed_linear *linear, int64_t panel, const enum weight_format format)
{
    const int64_t words = words_of(linear->depth, BFLOAT16), tile_words = tile_words_of(linear, BFLOAT16) * AMX_ROWS;
    char widened[2][STRETCH_WORDS * 2 * LANES] __attribute__((aligned(64)));
    int32_t products[LAG][4 * AMX_TILE_WORDS] __attribute__((aligned(64)));
    float sums[ITEM_TILES][AMX_ROWS * 2 * LANES] __attribute__((aligned(64)));
    struct quantized_panel panels[2];
    for (int p = 0; p < 2; p++)
        panels[p] = quantized_panel_at(linear, format, panel + p, BFLOAT16);
    for (int64_t word = 0, end; word < words; word = end) {
        end = MIN(words, word + STRETCH_WORDS);
        for (int p = 0; p < 2; p++)
            for (int64_t group = word; group < end; group += INT16_GROUP)
                widen_group(widened[p] + (group - word) * 2 * LANES, panels + p, group, format);
        const int64_t num_groups = (end - word) / INT16_GROUP, num_steps = num_tiles_of(num_rows) * num_groups;
        for (int64_t step = 0; step < num_steps + LAG; step++) {
            if (step < num_steps) {
                const uint32_t *tile = x + step / num_groups * tile_words;
                const int64_t group = step % num_groups * INT16_GROUP;
                amx_multiply_bytes((const char *)(tile + (word + group) * AMX_ROWS), widened[0] + group * 2 * LANES,
                                   sizeof widened[0], INT16_GROUP / PIECE_WORDS);
            }
            if (step >= LAG) {
                const int64_t tile = (step - LAG) / num_groups, row = tile * AMX_ROWS;
                const int64_t group = word + (step - LAG) % num_groups * INT16_GROUP;
                const uint32_t *x_scales = x + tile * tile_words + (words + group / INT16_GROUP) * AMX_ROWS;
                add_group(sums[tile], products[step % LAG], x_scales, panels, group, MIN(AMX_ROWS, num_rows - row),
                          format);
            }
            if (step < num_steps)
                amx_store_bytes(products[step % LAG]);
        }
    }
    store_sums(y, y_stride, sums[0], linear, panel, num_rows, 2, BFLOAT16);
}

void multiply_bytes(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows, const struct packed_linear *linear,
                    int64_t panel, int64_t panel_end)
{
    for (; panel < panel_end; panel += 2)
        if (linear->format == INT8)
            multiply_panels(y, y_stride, x, num_rows, linear, panel, INT8);
        else
            multiply_panels(y, y_stride, x, num_rows, linear, panel, UINT4_G128);
}

#else

bool multiplies_bytes(const struct packed_linear *linear, int64_t num_rows, enum dtype dtype)
{
    (void)linear, (void)num_rows, (void)dtype;
    return false;
}

void pack_bytes(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows, const struct packed_linear *linear)
{
    (void)tile, (void)x, (void)x_stride, (void)num_rows, (void)linear;
}

void multiply_bytes(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows, const struct packed_linear *linear,
                    int64_t panel, int64_t panel_end)
{
    (void)y, (void)y_stride, (void)x, (void)num_rows, (void)linear, (void)panel, (void)panel_end;
}

#endif
