/* y = x Wᵀ + bias for a weight packed once, at memory speed for up to 16 rows.
 *
 * W lies in panels of LANES outputs, [panel][word of depth][output]; a word is a float32 or a pair of bfloat16. Rows of x
 * are packed in tiles of TILE_ROWS, [word][row]; where the CPU does not multiply pairs of bfloat16, a word is widened to
 * two float32 as it is read, and so is x as it is packed. Every output is one fused chain over the words in order, so a
 * row's result depends neither on the number of rows nor on the tile it falls into. With AMX, for bfloat16, panels are
 * tiles of AMX one after the other, rows of x are read where they are (packed as [16 words][row][word] only where they end
 * within a tile), and the chain is of sums of 16 words: another order, as independent of rows and tiles. Its weights may be
 * compressed, see compressed_weight.h; on any CPU weights may be in eight or four bits, see quantized_weight.h. Their products
 * may be of integers, see row_tiles.h and amx_bytes.c: exact, and added to the chain a group of the depth at a time. Where a
 * checkpoint's groups are of inputs all over, rows of x are copied in the order of the weight's columns first.
 *
 * Measured on two EPYC Zen 5 cores, bfloat16, 16 rows, weights from memory, a plain read in parentheses:
 * 768 -> 4,096 132 us (117), 2,048 -> 768 70 us (58), 768 -> 768 28 us (22). Panels are contiguous, and asking for the
 * memory ahead matters: without it 768 -> 4,096 takes 246 us. It is asked for into L2, and the panels to come evenly under
 * all products of these: on two EPYC Zen 4 cores all linears of a layer took 584 us with 8 KB ahead into L1, 549 with 16 KB
 * ahead into L2 under the first tile of rows, 526 so; 24 rows 861 -> 776, and 4 rows with AVX2 520 -> 359.
 *
 * The same with AVX2 alone, all linears of a layer, us for 1 / 4 / 16 / 128 rows: bfloat16 357 / 359 / 1,082 / 8,647, float32
 * 645 / 700 / 1,103 / 8,337, oneDNN in float32 1,409 / 1,337 / 1,824 / 8,677.
 *
 * On two Xeon cores with AMX, the same: 193 to 236 us (205) with AMX, 627 without, oneDNN 314; 256 rows
 * 600, 8,860 and 1,103.
 */
#include "packed_linear.h"

#include "amx_bytes.h"
#include "amx_linear.h"
#include "quantized_weight.h"
#include "linear_tiles.h"
#include "row_tiles.h"

_Static_assert(WIDE_GROUP_WORDS == INT16_GROUP, "sums of a group are of one stretch of rounded rows");

#define FEW_ROWS 16 /* that each thread packs for itself: cheaper than waiting */
#define PARALLEL_WEIGHTS 65536 /* below this a second thread costs more than it saves */
#define LINEAR_PIECES 3 /* of work of linear_stage, at most */
#define STRETCH_BYTES 16384 /* of L1, for weights that are widened before they are multiplied */
#define MAX_TILE_SUMS 16
#define MAX_ROW_PANELS (LANES == 4 ? 4 : 2) /* that more rows than a few are multiplied with at a time */

/* A stretch of the depth of some panels, times a tile of x from one of its rows on. */
struct product {
    const uint32_t *x;
    const uint32_t *x_scales; /* floats, of those rows, if they are rounded */
    char *weight; /* the first of the panels, which lie panel_bytes apart */
    int64_t panel_bytes, words;
    const char *ahead; /* asked for meanwhile, ahead_bytes for each word */
    int64_t ahead_bytes;
    bool adds; /* to the sums of the depth before; only widened weights come in several stretches */
    struct quantized_panel quantized[4]; /* what the panels are widened from, and kept at `weight` unless that is NULL */
    int64_t first_word;                  /* of those, where the stretch begins */
};

/* sums: [rows, panels * LANES]. format: of what is widened; PLAIN = nothing is. */
INLINE void multiply(float *sums, const struct product *product, const int rows, const int panels, const enum dtype dtype,
                     const enum weight_format format)
{
    const bool widens = format != PLAIN;
    const int factors = widens ? 1 : factors_of(dtype);
    const uint32_t *x = product->x;
    char *weight = product->weight;
    const char *ahead = product->ahead;
    const int64_t words = product->words, panel_bytes = product->panel_bytes, ahead_bytes = product->ahead_bytes;
    struct quantized_panel quantized[4];
    for (int p = 0; p < panels && widens; p++)
        quantized[p] = product->quantized[p];
    vf sum[MAX_TILE_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * panels; i++)
        sum[i] = factors == 1 && product->adds ? load(sums, i * LANES, FLOAT32) : (vf){0};
    for (int64_t word = 0; word < words; word++, ahead += ahead_bytes) {
#pragma GCC unroll 4
        for (int line = 0; line < panels * (int)sizeof(vf); line += widens ? 128 : 64)
            __builtin_prefetch(ahead + line, 0, 2);
#pragma GCC unroll 2
        for (int factor = 0; factor < factors; factor++) {
            vf column[4];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                const int64_t place = p * panel_bytes + word * (int64_t)sizeof(vf);
                if (widens)
                    column[p] = widen_word(quantized + p, product->first_word + word, format);
                else
                    memcpy(column + p, weight + place, sizeof(vf));
                if (widens && weight)
                    memcpy(weight + place, column + p, sizeof(vf));
                if (factors == 2)
                    column[p] = half_of(column[p], factor);
                KEEP_IN_REGISTER(column[p]);
            }
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                const vf input = spread(x + (word * factors + factor) * TILE_ROWS + row);
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
                    sum[row * panels + p] = multiply_add(sum[row * panels + p], input, column[p], dtype);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * panels; i++)
        memcpy(sums + i * LANES, sum + i, sizeof(vf));
}

/* The same of pairs of int16. Sums of groups whose weights share their scales are scaled and added. widens: else the pairs
 * are at `weight`. */
INLINE void multiply_int16(float *sums, const struct product *product, const int rows, const int panels,
                           const enum weight_format format, const bool widens)
{
    const int group_words = format == INT8 ? INT16_GROUP : group_words_of(format);
    const int bytes_of_four = panels * LANES * (format == INT8 ? 16 : has_zero_points(format) ? 10 : 9) / 2; /* scales too */
    const uint32_t *x = product->x;
    char *weight = product->weight;
    const char *ahead = product->ahead;
    const int64_t words = product->words, panel_bytes = product->panel_bytes;
    for (int64_t word = 0, end; word < words; word = end) {
        vf sum[MAX_TILE_SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < rows * panels; i++)
            sum[i] = (vf){0};
        const int64_t group = product->first_word + word;
        vi16 zeros[4];
#pragma GCC unroll 4
        for (int p = 0; p < panels && widens && has_zero_points(format); p++)
            zeros[p] = zero_points(product->quantized + p, group / group_words);
        for (end = MIN(words, word + group_words); word < end; word += 4, ahead += 4 * product->ahead_bytes) {
#pragma GCC unroll 8
            for (int line = 0; line < bytes_of_four; line += 64)
                __builtin_prefetch(ahead + line, 0, 2);
#pragma GCC unroll 4
            for (int of_four = 0; of_four < 4; of_four++) {
                vf column[4];
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++) {
                    const int64_t place = p * panel_bytes + (word + of_four) * (int64_t)sizeof(vf);
                    if (widens)
                        column[p] = int16_codes(product->quantized + p, (product->first_word + word) / 4, of_four, format);
                    else
                        memcpy(column + p, weight + place, sizeof(vf));
                    if (widens && has_zero_points(format))
                        column[p] = (vf)((vi16)column[p] - zeros[p]);
                    if (widens && weight)
                        memcpy(weight + place, column + p, sizeof(vf));
                    KEEP_IN_REGISTER(column[p]);
                }
#pragma GCC unroll 16
                for (int row = 0; row < rows; row++) {
                    const vf input = spread(x + (word + of_four) * TILE_ROWS + row);
#pragma GCC unroll 4
                    for (int p = 0; p < panels; p++)
                        sum[row * panels + p] = add_int16_products(sum[row * panels + p], input, column[p]);
                }
            }
        }
        vf scales[4];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            scales[p] = quantized_scale(product->quantized + p, group, format);
        const bool adds = product->adds || group > product->first_word;
#pragma GCC unroll 16
        for (int i = 0; i < rows * panels; i++) {
            const vf before = adds ? load(sums, i * LANES, FLOAT32) : (vf){0};
            const vf scale = spread(product->x_scales + i / panels) * scales[i % panels];
            store(sums, i * LANES, fused(__builtin_convertvector((vi)sum[i], vf), scale, before), FLOAT32);
        }
    }
}

/* NOTE: functions of their own, with nothing but the loop: inlined, GCC 12 keeps the sums on the stack, which takes twice
 * as long. */
#define KERNEL(name, multiplies, ...)                                                                                 \
    static __attribute__((noinline)) void name(float *sums, const struct product *product)                            \
    {                                                                                                                 \
        multiplies(sums, product, __VA_ARGS__);                                                                       \
    }
#define MULTIPLY(rows, panels)                                                                                        \
    KERNEL(multiply_##rows##x##panels##_bfloat16, multiply, rows, panels, BFLOAT16, PLAIN)                            \
    KERNEL(multiply_##rows##x##panels##_float32, multiply, rows, panels, FLOAT32, PLAIN)                              \
    KERNEL(widen_##rows##x##panels##_int8_float32, multiply, rows, panels, FLOAT32, INT8)                             \
    KERNEL(widen_##rows##x##panels##_int4_float32, multiply, rows, panels, FLOAT32, INT4)                             \
    KERNEL(widen_##rows##x##panels##_mxfp4_float32, multiply, rows, panels, FLOAT32, MXFP4)                           \
    KERNEL(widen_##rows##x##panels##_nf4_float32, multiply, rows, panels, FLOAT32, NF4)                               \
    KERNEL(widen_##rows##x##panels##_uint4_float32, multiply, rows, panels, FLOAT32, UINT4)                           \
    KERNEL(widen_##rows##x##panels##_g128_float32, multiply, rows, panels, FLOAT32, UINT4_G128)                       \
    KERNEL(widen_##rows##x##panels##_int8_int16, multiply_int16, rows, panels, INT8, true)                            \
    KERNEL(widen_##rows##x##panels##_int4_int16, multiply_int16, rows, panels, INT4, true)                            \
    KERNEL(widen_##rows##x##panels##_mxfp4_int16, multiply_int16, rows, panels, MXFP4, true)                          \
    KERNEL(widen_##rows##x##panels##_nf4_int16, multiply_int16, rows, panels, NF4, true)                              \
    KERNEL(widen_##rows##x##panels##_uint4_int16, multiply_int16, rows, panels, UINT4, true)                          \
    KERNEL(widen_##rows##x##panels##_g128_int16, multiply_int16, rows, panels, UINT4_G128, true)                      \
    KERNEL(multiply_##rows##x##panels##_int8_int16, multiply_int16, rows, panels, INT8, false)                        \
    KERNEL(multiply_##rows##x##panels##_g128_int16, multiply_int16, rows, panels, UINT4_G128, false)                  \
    KERNEL(multiply_##rows##x##panels##_groups_int16, multiply_int16, rows, panels, INT4, false)
MULTIPLY(1, 4)
MULTIPLY(2, 4)
#if LANES == 16
MULTIPLY(4, 4)
MULTIPLY(8, 2)
MULTIPLY(8, 1)
MULTIPLY(4, 2)
MULTIPLY(4, 1)
#elif LANES == 8
MULTIPLY(6, 2)
MULTIPLY(6, 1)
MULTIPLY(4, 2)
MULTIPLY(4, 1)
#else
MULTIPLY(4, 4)
MULTIPLY(4, 1)
MULTIPLY(2, 1)
#endif

/* Apart too: there are few of them, and many places that store. Written out there, they took two thirds of compiling. */
#define STORE(panels, name, dtype)                                                                                    \
    static __attribute__((noinline)) void store_##panels##_##name(void *y, int64_t y_stride, const float *sums,       \
                                                                  const struct packed_linear *linear, int64_t panel,  \
                                                                  int64_t num_rows)                                   \
    {                                                                                                                 \
        store_sums(y, y_stride, sums, linear, panel, num_rows, panels, dtype);                                        \
    }
STORE(1, bfloat16, BFLOAT16)
STORE(1, float32, FLOAT32)
STORE(4, bfloat16, BFLOAT16)
STORE(4, float32, FLOAT32)
#if LANES > 4
STORE(2, bfloat16, BFLOAT16)
STORE(2, float32, FLOAT32)
#endif
#define STORE_OF(panels) (dtype == BFLOAT16 ? store_##panels##_bfloat16 : store_##panels##_float32)

/* By what compute_rows is made for, and whether the rows are the first. */
#define KERNEL_OF(shape, is_first)                                                                                    \
    (words_dtype == INT16 ? INT16_KERNEL_OF(shape, is_first)                                                          \
     : is_first && format == INT8       ? widen_##shape##_int8_float32                                                \
     : is_first && format == INT4       ? widen_##shape##_int4_float32                                                \
     : is_first && format == MXFP4      ? widen_##shape##_mxfp4_float32                                               \
     : is_first && format == NF4        ? widen_##shape##_nf4_float32                                                 \
     : is_first && format == UINT4      ? widen_##shape##_uint4_float32                                               \
     : is_first && format == UINT4_G128 ? widen_##shape##_g128_float32                                                \
     : words_dtype == BFLOAT16          ? multiply_##shape##_bfloat16                                                 \
                                        : multiply_##shape##_float32)
#define INT16_KERNEL_OF(shape, is_first)                                                                              \
    (format == INT8         ? (is_first ? widen_##shape##_int8_int16 : multiply_##shape##_int8_int16)                 \
     : format == UINT4_G128 ? (is_first ? widen_##shape##_g128_int16 : multiply_##shape##_g128_int16)                 \
     : !is_first            ? multiply_##shape##_groups_int16                                                         \
     : format == INT4       ? widen_##shape##_int4_int16                                                              \
     : format == MXFP4      ? widen_##shape##_mxfp4_int16                                                             \
     : format == NF4        ? widen_##shape##_nf4_int16                                                               \
                            : widen_##shape##_uint4_int16)

#define TILE(rows, panels)                                                                                            \
    do {                                                                                                              \
        float *tile_sums = sums + (widens ? row * panels * LANES : 0);                                                \
        const uint32_t *tile_x = x + row / TILE_ROWS * tile_words + row % TILE_ROWS;                                  \
        product.x = tile_x + word * factors * TILE_ROWS;                                                              \
        if (words_dtype == INT16)                                                                                     \
            product.x_scales = tile_x + (words + word / INT16_GROUP) * TILE_ROWS;                                     \
        if (row == 0)                                                                                                 \
            KERNEL_OF(rows##x##panels, true)(tile_sums, &product);                                                    \
        else                                                                                                          \
            KERNEL_OF(rows##x##panels, false)(tile_sums, &product);                                                   \
        product.ahead += product.words * product.ahead_bytes;                                                         \
        if (end_word == words)                                                                                        \
            STORE_OF(panels)((void *)at(y, row * y_stride, dtype), y_stride, tile_sums, linear, panel,                \
                             MIN(rows, num_rows - row));                                                              \
    } while (0)

/* All rows of x, some at a time, the last of them in a tile of their own: panels come from L1 or L2 for all but the first,
 * and meanwhile the next ones are asked for. Panels that are widened are taken in stretches, if there is more than one tile. */
#define PANELS(rows, last_rows, panels)                                                                               \
    for (; panel + panels <= end; panel += panels) {                                                                  \
        const bool keeps = num_rows > rows;                                                                           \
        const int64_t most = widens && keeps ? STRETCH_BYTES / (panels * (int64_t)sizeof(vf)) : words;                \
        const int64_t stretch = words_dtype == INT16 ? INT16_GROUP : most;                                            \
        struct product product = {                                                                                    \
            .weight = widens ? (keeps ? widened : NULL) : (char *)memory + panel * panel_bytes,                       \
            .panel_bytes = widens ? STRETCH_BYTES / panels : panel_bytes,                                             \
            .ahead = memory + (panel + panels) * panel_bytes,                                                         \
            .ahead_bytes = panels * panel_bytes / words / ((num_rows + rows - 1) / rows),                             \
        };                                                                                                            \
        for (int p = 0; p < panels && widens; p++)                                                                    \
            product.quantized[p] = quantized_panel_at(linear, format, panel + p, dtype);                              \
        for (int64_t word = 0, end_word; word < words; word = end_word) {                                             \
            end_word = MIN(words, word + stretch);                                                                    \
            product.first_word = word;                                                                                \
            product.words = end_word - word;                                                                          \
            product.adds = word > 0;                                                                                  \
            int64_t row = 0;                                                                                          \
            for (; row + last_rows < num_rows; row += rows)                                                           \
                TILE(rows, panels);                                                                                   \
            if (row < num_rows)                                                                                       \
                TILE(last_rows, panels);                                                                              \
        }                                                                                                             \
    }

/* sums: of a tile; of weights that are widened, whose stretches are kept in widened [STRETCH_BYTES], of an item. */
INLINE void compute_rows(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows,
                         const struct packed_linear *linear, int64_t panel, int64_t end, float *sums, char *widened,
                         const enum dtype dtype, const enum weight_format format)
{
    const bool widens = format != PLAIN;
    const enum dtype words_dtype = widens ? quantized_dtype_of(dtype) : dtype;
    const int64_t depth = linear->depth, words = widens ? quantized_words_of(depth, dtype) : words_of(depth, dtype);
    const int64_t panel_bytes = widens ? quantized_panel_bytes_of(format, depth, dtype) : words * (int64_t)sizeof(vf);
    const int64_t tile_words = tile_words_of(linear, dtype) * TILE_ROWS;
    const char *memory = widens ? first_quantized_panel(linear, format) : linear->weight;
    const int factors = widens ? 1 : factors_of(dtype);
#define FEW_ROWS_PANELS(rows, panels)                                                                                 \
    if (num_rows <= rows)                                                                                             \
        PANELS(rows, rows, panels)
    FEW_ROWS_PANELS(1, 4)
    FEW_ROWS_PANELS(2, 4)
#if LANES == 16
    FEW_ROWS_PANELS(4, 4)
    FEW_ROWS_PANELS(8, 2)
    PANELS(8, 4, 2)
    PANELS(8, 4, 1)
#elif LANES == 8
    PANELS(6, 4, 2)
    PANELS(6, 4, 1)
#else
    PANELS(4, 2, 4)
    PANELS(4, 2, 1)
#endif
#undef FEW_ROWS_PANELS
}

/* NOTE: apart, as it takes 56 KB of the stack. */
static __attribute__((noinline)) void compute_quantized_item(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows,
                                                             const struct packed_linear *linear, int64_t panel,
                                                             int64_t end, enum dtype dtype)
{
    float sums[ITEM_TILES * TILE_ROWS * MAX_ROW_PANELS * LANES] __attribute__((aligned(64)));
    char widened[STRETCH_BYTES] __attribute__((aligned(64)));
    WITH_CONSTANTS(linear->format, dtype, compute_rows, y, y_stride, x, num_rows, linear, panel, end, sums, widened);
}

static void compute_item(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows,
                         const struct packed_linear *linear, int64_t panel, int64_t end, enum dtype dtype, bool as_bytes)
{
    float sums[MAX_TILE_SUMS * LANES] __attribute__((aligned(64)));
    if (as_bytes)
        multiply_bytes(y, y_stride, x, num_rows, linear, panel, end);
    else if (is_quantized(linear))
        compute_quantized_item(y, y_stride, x, num_rows, linear, panel, end, dtype);
    else if (dtype == BFLOAT16)
        compute_rows(y, y_stride, x, num_rows, linear, panel, end, sums, NULL, BFLOAT16, PLAIN);
    else
        compute_rows(y, y_stride, x, num_rows, linear, panel, end, sums, NULL, FLOAT32, PLAIN);
}

static void pack_any_tile(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows,
                          const struct packed_linear *linear, enum dtype dtype, bool as_bytes)
{
    if (as_bytes)
        pack_bytes(tile, x, x_stride, num_rows, linear);
    else
        pack_tile(tile, x, x_stride, num_rows, linear, dtype);
}

/* Of rows in the order of the weight's columns, row_stride_of(depth) apart. */
static size_t ordered_bytes(const struct packed_linear *linear, int64_t num_rows, enum dtype dtype)
{
    return linear->order ? (size_t)(num_rows * row_stride_of(linear->depth, dtype)) * size_of(dtype) : 0;
}

size_t linear_scratch(const struct packed_linear *linear, int64_t num_rows, int num_threads, enum dtype dtype)
{
    const size_t ordered = ordered_bytes(linear, num_rows, dtype);
    if (reads_rows(linear, dtype))
        return ordered;
    const int64_t num_tiles = num_tiles_of(num_rows) * (num_rows <= FEW_ROWS ? num_threads : 1);
    return ordered + (size_t)(num_tiles * tile_words_of(linear, dtype) * TILE_ROWS) * sizeof(uint32_t);
}

static void order_row(void *ordered, const void *x, const int32_t *order, int64_t depth, enum dtype dtype)
{
    if (dtype == BFLOAT16)
        for (int64_t k = 0; k < depth; k++)
            ((uint16_t *)ordered)[k] = ((const uint16_t *)x)[order[k]];
    else
        for (int64_t k = 0; k < depth; k++)
            ((uint32_t *)ordered)[k] = ((const uint32_t *)x)[order[k]];
}

/* ordered: of ordered_bytes; complete. */
static void order_rows(struct team *team, const struct packed_linear *linear, void *ordered, const void *x,
                       int64_t x_stride, int64_t num_rows, enum dtype dtype)
{
    const int64_t stride = row_stride_of(linear->depth, dtype);
    struct work ordering = start_work(team, num_rows);
    for (int64_t row; take(team, &ordering, &row);)
        order_row((void *)at(ordered, row * stride, dtype), at(x, row * x_stride, dtype), linear->order, linear->depth,
                  dtype);
    complete(team);
}

void linear_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
                  int64_t x_stride, int64_t num_rows, void *scratch, enum dtype dtype)
{
    if (num_rows == 0)
        return; /* there may be no scratch memory */
    if (linear->order) {
        order_rows(team, linear, scratch, x, x_stride, num_rows, dtype);
        x = scratch;
        x_stride = row_stride_of(linear->depth, dtype);
        scratch = (char *)scratch + ordered_bytes(linear, num_rows, dtype);
    }
    if (uses_amx(linear, dtype)) {
        amx_linear_stage(team, linear, y, y_stride, x, x_stride, num_rows, scratch);
        return;
    }
    const int64_t row_words = tile_words_of(linear, dtype), num_tiles = num_tiles_of(num_rows);
    const bool packs_own = num_rows <= FEW_ROWS, as_bytes = multiplies_bytes(linear, num_rows, dtype);
    uint32_t *rows = (uint32_t *)scratch + (packs_own ? team->thread * num_tiles * TILE_ROWS * row_words : 0);
    if (!packs_own) {
        struct work packing = start_work(team, num_tiles);
        for (int64_t i; take(team, &packing, &i);)
            pack_any_tile(rows + i * TILE_ROWS * row_words, at(x, i * TILE_ROWS * x_stride, dtype), x_stride,
                          num_rows - i * TILE_ROWS, linear, dtype, as_bytes);
        complete(team);
    }
    struct work computing = start_work(team, num_row_items(num_rows) * num_panel_items(linear));
    bool is_packed = !packs_own;
    if (as_bytes)
        amx_begin((int)MIN(AMX_ROWS, num_rows));
    for (struct linear_item item; take_item(team, &computing, linear, num_rows, &item);) {
        for (int64_t row = 0; row < num_rows && !is_packed; row += TILE_ROWS)
            pack_any_tile(rows + row * row_words, at(x, row * x_stride, dtype), x_stride, num_rows - row, linear, dtype,
                          as_bytes);
        is_packed = true;
        compute_item((void *)at(y, item.row * y_stride, dtype), y_stride, rows + item.row * row_words,
                     item.row_end - item.row, linear, item.panel, item.panel_end, dtype, as_bytes);
    }
    if (as_bytes)
        amx_end();
}

/* Bytes of the packed weight; 0 where torch's linears are Apple's own, on units for matrices that nobody else can use. */
EXPORT int64_t packed_weight_bytes(int64_t num_outputs, int64_t depth, int dtype)
{
#if defined(__APPLE__)
    return 0;
#endif
    return num_panels_of(num_outputs) * words_of(depth, (enum dtype)dtype) * (int64_t)sizeof(vf);
}

/* weight: dense [num_outputs, depth]. */
EXPORT int pack_weight(void *packed, const void *weight, int64_t num_outputs, int64_t depth, int dtype, int num_threads)
{
    const int64_t words = words_of(depth, (enum dtype)dtype);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t output = 0; output < num_outputs; output += LANES) {
        uint32_t *panel = (uint32_t *)packed + output * words;
        const void *rows = at(weight, output * depth, (enum dtype)dtype);
        if (dtype == BFLOAT16)
            pack_rows(panel, LANES, rows, depth, num_outputs - output, depth, words, BFLOAT16, NULL, BFLOAT16);
        else
            pack_rows(panel, LANES, rows, depth, num_outputs - output, depth, words, FLOAT32, NULL, FLOAT32);
    }
    return OK;
}

void packed_row(void *row, const struct packed_linear *linear, int64_t output, enum dtype dtype)
{
    if (linear->format == COMPRESSED) {
        compressed_row(row, linear->weight, linear->num_outputs, linear->depth, output);
        return;
    }
    if (is_quantized(linear)) {
        quantized_row(row, linear, output, dtype);
        return;
    }
    const int64_t num_words = words_of(linear->depth, dtype), row_bytes = linear->depth * (int64_t)size_of(dtype);
    const uint32_t *column = (const uint32_t *)linear->weight + output / LANES * num_words * LANES + output % LANES;
    for (int64_t byte = 0; byte < row_bytes; byte += (int64_t)sizeof *column, column += LANES)
        memcpy((char *)row + byte, column, MIN(sizeof *column, (size_t)(row_bytes - byte)));
}

struct rows_call {
    const struct packed_linear *linear;
    char *rows;
    const int64_t *outputs;
    int64_t num_rows;
    size_t row_bytes;
    enum dtype dtype;
};

static void rows_region(struct team *team, void *argument)
{
    const struct rows_call *call = argument;
    struct work work = start_work(team, call->num_rows);
    for (int64_t row; take(team, &work, &row);)
        packed_row(call->rows + (size_t)row * call->row_bytes, call->linear, call->outputs[row], call->dtype);
}

/* Rows of the weight, such as the embeddings of tokens where it is lm_head's. rows: dense [num_rows, depth]. */
EXPORT int packed_rows(const struct packed_linear *linear, void *rows, const int64_t *outputs, int64_t num_rows, int dtype,
                       int num_threads)
{
    const size_t row_bytes = (size_t)linear->depth * size_of((enum dtype)dtype);
    for (int64_t row = 0; row < num_rows; row++)
        if (outputs[row] < 0 || outputs[row] >= linear->num_outputs)
            return BAD_TOKEN;
    struct rows_call call = {linear, rows, outputs, num_rows, row_bytes, (enum dtype)dtype};
    return run_beside(num_rows > 16 ? num_threads : 1, 1, rows_region, &call) ? OK : OUT_OF_MEMORY;
}

struct linear_call {
    const struct packed_linear *linear;
    void *y;
    const void *x;
    int64_t y_stride, x_stride, num_rows;
    char *scratch;
    enum dtype dtype;
};

static void linear_region(struct team *team, void *argument)
{
    const struct linear_call *call = argument;
    linear_stage(team, call->linear, call->y, call->y_stride, call->x, call->x_stride, call->num_rows, call->scratch,
                 call->dtype);
}

EXPORT int packed_linear(const struct packed_linear *linear, void *y, int64_t y_stride, const void *x, int64_t x_stride,
                         int64_t num_rows, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    if (linear->num_outputs * linear->depth <= PARALLEL_WEIGHTS)
        num_threads = 1;
    char *memory = grow_scratch(&scratch, &capacity, linear_scratch(linear, num_rows, num_threads, (enum dtype)dtype));
    if (!memory)
        return OUT_OF_MEMORY;
    struct linear_call call = {linear, y, x, y_stride, x_stride, num_rows, memory, (enum dtype)dtype};
    return run_beside(num_threads, LINEAR_PIECES, linear_region, &call) ? OK : OUT_OF_MEMORY;
}
