/* y = x Wᵀ + bias for a weight packed once, at memory speed for up to 16 rows.
 *
 * W lies in panels of LANES outputs, [panel][word of depth][output]; a word is a float32 or a pair of bfloat16. Rows of x
 * are packed in tiles of TILE_ROWS, [word][row]. If the CPU does not multiply pairs of bfloat16, a word of W is widened
 * to two float32 as it is read, and x as it is packed. Every output is one fused chain over the words in order, so a
 * row's result depends neither on the number of rows nor on the tile it falls into.
 *
 * With AMX, for bfloat16, panels are sequences of AMX tiles. Rows of x are read in place (packed as [16 words][row][word]
 * only if they end within a tile), and the chain is of sums of 16 words: another order, as independent of rows and tiles.
 * These weights may be compressed, see compressed_weight.h.
 *
 * On any CPU weights may be in eight or four bits, see quantized_weight.h. Their products may be of integers
 * (int16_products.c, amx_bytes.c): exact, and added to the chain one group of the depth at a time. If a checkpoint's
 * groups are of scattered inputs, rows of x are first copied into the order of the weight's columns.
 *
 * Measured on two EPYC Zen 5 cores, bfloat16, 16 rows, weights from memory, a plain read in parentheses: 768 -> 4,096 132
 * us (117), 2,048 -> 768 70 us (58), 768 -> 768 28 us (22). Panels are contiguous, and prefetching matters: without it
 * 768 -> 4,096 takes 246 us. The next panels are prefetched into L2, evenly under all products of the current ones. On
 * two EPYC Zen 4 cores all linears of a layer took 584 us with 8 KB ahead into L1, 549 with 16 KB ahead into L2 under the
 * first tile of rows, 526 this way; 24 rows 861 -> 776, and 4 rows with AVX2 520 -> 359.
 *
 * The same with AVX2 alone, all linears of a layer, us for 1 / 4 / 16 / 128 rows: bfloat16 357 / 359 / 1,082 / 8,647,
 * float32 645 / 700 / 1,103 / 8,337, oneDNN in float32 1,409 / 1,337 / 1,824 / 8,677.
 *
 * On two Xeon cores with AMX, the same: 193 to 236 us (205) with AMX, 627 without, oneDNN 314; 256 rows 600, 8,860 and
 * 1,103.
 */
#include "packed_linear.h"

#include "amx_bytes.h"
#include "amx_linear.h"
#include "tile_products.h"

#define FEW_ROWS 16 /* each thread packs up to this many itself: cheaper than waiting */
#define PARALLEL_WEIGHTS 65536 /* below this a second thread costs more than it saves */
#define LINEAR_PIECES 3 /* pieces of work of linear_stage, at most */
#define STRETCH_BYTES 16384 /* of L1, for weights that are widened first */
#define MAX_ROW_PANELS (LANES == 4 ? 4 : 2) /* panels that more than a few rows are multiplied with at a time */

typedef void store_tile(void *y, int64_t y_stride, const float *sums, const struct packed_linear *linear, int64_t panel,
                        int64_t num_rows);

#define STORE(panels, name, dtype)                                                                                    \
    static void store_##panels##_##name(void *y, int64_t y_stride, const float *sums,                                 \
                                        const struct packed_linear *linear, int64_t panel, int64_t num_rows)          \
    {                                                                                                                 \
        store_sums(y, y_stride, sums, linear, panel, num_rows, panels, dtype);                                        \
    }
#define STORE_PANELS(panels) STORE(panels, bfloat16, BFLOAT16) STORE(panels, float32, FLOAT32)
STORE_PANELS(1)
STORE_PANELS(2)
STORE_PANELS(4)
static store_tile *const store_bfloat16[] = {[1] = store_1_bfloat16, [2] = store_2_bfloat16, [4] = store_4_bfloat16};
static store_tile *const store_float32[] = {[1] = store_1_float32, [2] = store_2_float32, [4] = store_4_float32};

/* Rows of x are taken `rows` at a time; the last last_rows or fewer in a tile of last_rows. */
struct tiling {
    int rows, last_rows, panels;
};

/* The first that fits is used for the remaining panels. One whose tiles all have the same number of rows has only one
 * tile. */
static const struct tiling tilings[] = {
#if LANES == 16
    {1, 1, 4}, {2, 2, 4}, {4, 4, 4}, {8, 8, 2}, {8, 4, 2}, {8, 4, 1},
#elif LANES == 8
    {1, 1, 4}, {2, 2, 4}, {6, 4, 2}, {6, 4, 1},
#else
    {1, 1, 4}, {2, 2, 4}, {4, 2, 4}, {4, 2, 1},
#endif
};

/* Some rows of x times a weight. */
struct rows_product {
    void *y;
    int64_t y_stride;
    const uint32_t *x; /* packed, tile_words for each tile */
    int64_t num_rows, tile_words;
    const struct packed_linear *linear;
    const char *memory; /* its panels */
    int64_t panel_bytes, words;
    enum weight_format format; /* of panels to widen; PLAIN = none */
    enum dtype dtype, words_dtype;
    float *sums;   /* of a tile; if weights are widened, of all tiles of an item */
    char *widened; /* [STRETCH_BYTES]: widened weights */
    const tile_products *first, *rest;
};

static void compute_tile(const struct rows_product *of, struct product *product, int64_t panel, int64_t row, int num_rows,
                         int panels)
{
    const int factors = of->format == PLAIN ? factors_of(of->dtype) : 1;
    const uint32_t *x = of->x + row / TILE_ROWS * of->tile_words + row % TILE_ROWS;
    float *sums = of->sums + (of->format == PLAIN ? 0 : row * panels * LANES);
    product->x = x + product->first_word * factors * TILE_ROWS;
    if (of->words_dtype == INT16)
        product->x_scales = x + (of->words + product->first_word / INT16_GROUP) * TILE_ROWS;
    (row == 0 ? *of->first : *of->rest)[num_rows][panels](sums, product);
    product->ahead += product->words * product->ahead_bytes;
    if (product->first_word + product->words == of->words)
        (of->dtype == BFLOAT16 ? store_bfloat16 : store_float32)[panels](
            (void *)at(of->y, row * of->y_stride, of->dtype), of->y_stride, sums, of->linear, panel,
            MIN(num_rows, of->num_rows - row));
}

/* All rows times some panels. For all tiles but the first, panels come from L1 or L2, and meanwhile the next ones are
 * prefetched. Panels to widen are taken in stretches if there is more than one tile, and always for int16. */
static void compute_panels(const struct rows_product *of, const struct tiling *tiling, int64_t panel)
{
    const int rows = tiling->rows, panels = tiling->panels;
    const bool widens = of->format != PLAIN, keeps = of->num_rows > rows;
    const int64_t most = widens && keeps ? STRETCH_BYTES / (panels * (int64_t)sizeof(vf)) : of->words;
    const int64_t stretch = of->words_dtype == INT16 ? INT16_GROUP : most;
    struct product product = {
        .weight = !widens ? (char *)of->memory + panel * of->panel_bytes : keeps ? of->widened : NULL,
        .panel_bytes = widens ? STRETCH_BYTES / panels : of->panel_bytes,
        .ahead = of->memory + (panel + panels) * of->panel_bytes,
        .ahead_bytes = panels * of->panel_bytes / of->words / ((of->num_rows + rows - 1) / rows),
    };
    for (int p = 0; p < panels && widens; p++)
        product.quantized[p] = quantized_panel_at(of->linear, of->format, panel + p, of->dtype);
    for (int64_t word = 0; word < of->words; word += product.words) {
        product.first_word = word;
        product.words = MIN(of->words - word, stretch);
        product.adds = word > 0;
        for (int64_t row = 0; row < of->num_rows; row += rows)
            compute_tile(of, &product, panel, row, row + tiling->last_rows < of->num_rows ? rows : tiling->last_rows, panels);
    }
}

static void compute_rows(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows, const struct packed_linear *linear,
                         int64_t panel, int64_t end, float *sums, char *widened, enum dtype dtype)
{
    const bool widens = is_quantized(linear);
    const enum weight_format format = widens ? (enum weight_format)linear->format : PLAIN;
    const enum dtype words_dtype = widens ? quantized_dtype_of(dtype) : dtype;
    const int64_t depth = linear->depth, words = widens ? quantized_words_of(depth, dtype) : words_of(depth, dtype);
    const bool as_int16 = words_dtype == INT16;
    const struct rows_product of = {
        .y = y,
        .y_stride = y_stride,
        .x = x,
        .num_rows = num_rows,
        .tile_words = tile_words_of(linear, dtype) * TILE_ROWS,
        .linear = linear,
        .memory = widens ? first_quantized_panel(linear, format) : linear->weight,
        .panel_bytes = widens ? quantized_panel_bytes_of(format, depth, dtype) : words * (int64_t)sizeof(vf),
        .words = words,
        .format = format,
        .dtype = dtype,
        .words_dtype = words_dtype,
        .sums = sums,
        .widened = widened,
        .first = as_int16 ? int16_products(format, true) : float_products(format, true, dtype),
        .rest = as_int16 ? int16_products(format, false) : float_products(format, false, dtype),
    };
    for (const struct tiling *tiling = tilings; panel < end;) {
        if (panel + tiling->panels <= end && (num_rows <= tiling->rows || tiling->last_rows < tiling->rows)) {
            compute_panels(&of, tiling, panel);
            panel += tiling->panels;
        } else {
            tiling++; /* the last tiling has one panel and takes any number of rows */
        }
    }
}

/* NOTE: a separate function, because it takes 56 KB of stack. */
static __attribute__((noinline)) void compute_quantized_item(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows,
                                                             const struct packed_linear *linear, int64_t panel,
                                                             int64_t end, enum dtype dtype)
{
    float sums[ITEM_TILES * TILE_ROWS * MAX_ROW_PANELS * LANES] __attribute__((aligned(64)));
    char widened[STRETCH_BYTES] __attribute__((aligned(64)));
    compute_rows(y, y_stride, x, num_rows, linear, panel, end, sums, widened, dtype);
}

static void compute_item(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows,
                         const struct packed_linear *linear, int64_t panel, int64_t end, enum dtype dtype, bool as_bytes)
{
    float sums[MAX_TILE_SUMS * LANES] __attribute__((aligned(64)));
    if (as_bytes)
        multiply_bytes(y, y_stride, x, num_rows, linear, panel, end);
    else if (is_quantized(linear))
        compute_quantized_item(y, y_stride, x, num_rows, linear, panel, end, dtype);
    else
        compute_rows(y, y_stride, x, num_rows, linear, panel, end, sums, NULL, dtype);
}

static void pack_any_tile(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows,
                          const struct packed_linear *linear, enum dtype dtype, bool as_bytes)
{
    if (as_bytes)
        pack_bytes(tile, x, x_stride, num_rows, linear);
    else
        pack_tile(tile, x, x_stride, num_rows, linear, dtype);
}

/* Bytes of rows in the order of the weight's columns, row_stride_of(depth) apart. */
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

/* Writes and completes `ordered`, which is ordered_bytes long. */
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

/* Bytes of the packed weight; 0 if torch's linears are Apple's own, on matrix units that no other code can use. */
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

/* Rows of the weight, such as embeddings of tokens if it is lm_head's. rows: dense [num_rows, depth]. */
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
