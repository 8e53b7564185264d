/* y = x Wᵀ + bias for a weight packed once, at memory speed for up to 16 rows.
 *
 * W lies in panels of LANES outputs, [panel][word of depth][output]; a word is a float32 or a pair of bfloat16. Rows of x
 * are packed in tiles of TILE_ROWS, [word][row]. Every output is one fused chain over the words in order, so a row's
 * result depends neither on the number of rows nor on the tile it falls into. With AMX, for bfloat16, panels are tiles of AMX
 * one after the other, rows of x are read where they are (packed as [16 words][row][word] only where they end within a
 * tile), and the chain is of sums of 16 words: another order, as independent of rows and tiles. Its weights may be
 * compressed, see compressed_weight.h.
 *
 * Measured on two EPYC Zen 5 cores, bfloat16, 16 rows, weights from memory, a plain read in parentheses:
 * 768 -> 4,096 132 us (117), 2,048 -> 768 70 us (58), 768 -> 768 28 us (22). Panels are contiguous, and asking for the
 * memory ahead matters: without it 768 -> 4,096 takes 246 us. It is asked for into L2: on two EPYC Zen 4 cores all linears
 * of a layer took 584 us with 8 KB ahead into L1, 525 so.
 *
 * On two Xeon cores with AMX, the same: 193 to 236 us (205) with AMX, 627 without, oneDNN 314; 256 rows
 * 600, 8,860 and 1,103.
 */
#include "packed_linear.h"

#define TILE_ROWS 16
#define PREFETCH_BYTES 16384
#define ITEM_PANELS 4 /* panels of one item */
#define ITEM_TILES 20 /* tiles of rows of one item: their part of x stays in L2 while all weights pass */
#define FEW_AMX_ROWS AMX_ROWS /* for which four panels at a time are better than two */
#define AMX_STRETCH (8 * AMX_WORDS) /* words of depth whose weights stay in L1 */

#if LANES == 16

/* Of a panel or a packed row; those past the depth are zero, so that AMX has whole tiles. */
INLINE int64_t words_of(int64_t depth, const enum dtype dtype)
{
    return dtype == BFLOAT16 ? panel_tiles_of(depth) * AMX_WORDS : depth;
}

INLINE int64_t num_tiles_of(int64_t num_rows) { return (num_rows + TILE_ROWS - 1) / TILE_ROWS; }

static void pack_tile(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows, int64_t depth,
                      enum dtype dtype)
{
    const int64_t words = words_of(depth, dtype), row_bytes = depth * (int64_t)size_of(dtype);
    for (int64_t word = 0; word < words; word += LANES) {
        vf lines[LANES];
        for (int64_t row = 0; row < LANES; row++) {
            lines[row] = (vf){0};
            if (row >= num_rows)
                continue;
            const char *source = (const char *)at(x, row * x_stride, dtype) + 4 * word;
            if (4 * (word + LANES) <= row_bytes)
                memcpy(lines + row, source, sizeof(vf));
            else
                memcpy(lines + row, source, (size_t)(row_bytes - 4 * word));
        }
        transpose(lines);
        memcpy(tile + word * TILE_ROWS, lines, sizeof(vf) * (size_t)MIN(LANES, words - word));
    }
}

/* A tile of x for AMX. Rows past num_rows stay as they are, for their sums are not stored. */
static void pack_amx_tile(char *tile, const void *x, int64_t x_stride, int64_t num_rows, int64_t depth)
{
    const int64_t row_bytes = depth * (int64_t)size_of(BFLOAT16), line_bytes = (int64_t)sizeof(vf);
    for (int64_t row = 0; row < num_rows; row++) {
        const char *source = at(x, row * x_stride, BFLOAT16);
        char *target = tile + row * line_bytes;
        int64_t byte = 0;
        for (; byte + line_bytes <= row_bytes; byte += line_bytes)
            memcpy(target + byte * AMX_ROWS, source + byte, sizeof(vf));
        if (byte < row_bytes) {
            vf line = {0};
            memcpy(&line, source + byte, (size_t)(row_bytes - byte));
            memcpy(target + byte * AMX_ROWS, &line, sizeof line);
        }
    }
}

enum source { MEMORY, CACHE }; /* where the panels come from */

/* sums [rows, panels * LANES]. x: a tile, from the first of the rows on; weight: the first of the panels. */
INLINE void multiply(float *sums, const uint32_t *x, const char *weight, int64_t words, const bool prefetch,
                     const int rows, const int panels, const enum dtype dtype)
{
    const int64_t panel_bytes = words * (int64_t)sizeof(vf);
    vf sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < rows * panels; i++)
        sum[i] = (vf){0};
    for (int64_t word = 0; word < words; word++) {
        vf column[4];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const char *source = weight + p * panel_bytes + word * (int64_t)sizeof(vf);
            memcpy(column + p, source, sizeof(vf));
            if (prefetch)
                __builtin_prefetch(source + PREFETCH_BYTES / panels, 0, 2);
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            const vf input = spread(x + word * TILE_ROWS + row);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                sum[row * panels + p] = multiply_add(sum[row * panels + p], input, column[p], dtype);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * panels; i++)
        memcpy(sums + i * LANES, sum + i, sizeof(vf));
}

/* NOTE: functions of their own, with nothing but the loop: inlined, GCC 12 keeps the sums on the stack, which takes twice
 * as long. */
#define MULTIPLY(rows, panels, source)                                                                                \
    static __attribute__((noinline)) void multiply_##rows##x##panels##_##source##_bfloat16(                           \
        float *sums, const uint32_t *x, const char *weight, int64_t words)                                            \
    {                                                                                                                 \
        multiply(sums, x, weight, words, source == MEMORY, rows, panels, BFLOAT16);                                   \
    }                                                                                                                 \
    static __attribute__((noinline)) void multiply_##rows##x##panels##_##source##_float32(                            \
        float *sums, const uint32_t *x, const char *weight, int64_t words)                                            \
    {                                                                                                                 \
        multiply(sums, x, weight, words, source == MEMORY, rows, panels, FLOAT32);                                    \
    }
MULTIPLY(1, 4, MEMORY)
MULTIPLY(2, 4, MEMORY)
MULTIPLY(4, 4, MEMORY)
MULTIPLY(8, 2, MEMORY)
MULTIPLY(12, 1, MEMORY)
MULTIPLY(16, 1, MEMORY)
MULTIPLY(8, 1, MEMORY)
MULTIPLY(8, 2, CACHE)
MULTIPLY(8, 1, CACHE)

/* sums: [num_rows, panels * LANES] */
INLINE void store_sums(void *y, int64_t y_stride, const float *sums, const struct packed_linear *linear, int64_t panel,
                       int64_t num_rows, const int panels, const enum dtype dtype)
{
    const int64_t output = panel * LANES, count = linear->num_outputs - output;
    vf bias[4];
    for (int p = 0; p < panels; p++)
        bias[p] = linear->bias ? load_upto(linear->bias, output + p * LANES, count - p * LANES, dtype) : (vf){0};
    if (count >= panels * LANES) {
        for (int64_t row = 0; row < num_rows; row++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                store(y, row * y_stride + output + p * LANES, load(sums, (row * panels + p) * LANES, FLOAT32) + bias[p],
                      dtype);
        return;
    }
    for (int64_t row = 0; row < num_rows; row++)
        for (int p = 0; p < panels; p++)
            store_upto(y, row * y_stride + output + p * LANES, count - p * LANES,
                       load(sums, (row * panels + p) * LANES, FLOAT32) + bias[p], dtype);
}

#define TILE(y_rows, x_rows, stored, rows, panels, source)                                                            \
    do {                                                                                                              \
        float sums[rows * panels * LANES] __attribute__((aligned(64)));                                               \
        const char *weight = (const char *)linear->weight + panel * words * (int64_t)sizeof(vf);                      \
        if (dtype == BFLOAT16)                                                                                        \
            multiply_##rows##x##panels##_##source##_bfloat16(sums, x_rows, weight, words);                            \
        else                                                                                                          \
            multiply_##rows##x##panels##_##source##_float32(sums, x_rows, weight, words);                             \
        store_sums(y_rows, y_stride, sums, linear, panel, MIN(rows, stored), panels, dtype);                          \
    } while (0)

/* Up to TILE_ROWS rows of one tile. */
INLINE void few_rows(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows, const struct packed_linear *linear,
                     int64_t panel, int64_t end, const enum dtype dtype)
{
    const int64_t words = words_of(linear->depth, dtype);
#define PANELS(rows, panels)                                                                                          \
    for (; panel + panels <= end; panel += panels)                                                                    \
        TILE(y, x, num_rows, rows, panels, MEMORY);
    if (num_rows == 1)
        PANELS(1, 4)
    if (num_rows <= 2)
        PANELS(2, 4)
    if (num_rows <= 4)
        PANELS(4, 4)
    if (num_rows <= 8)
        PANELS(8, 2)
    if (num_rows <= 12)
        PANELS(12, 1)
    PANELS(16, 1)
#undef PANELS
}

/* Tiles of TILE_ROWS rows, one after the other: a pair of panels comes from L1 or L2 for all but the first of them. */
INLINE void many_rows(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows,
                      const struct packed_linear *linear, int64_t panel, int64_t end, const enum dtype dtype)
{
    const int64_t words = words_of(linear->depth, dtype);
#define TILES(panels, source)                                                                                         \
    TILE((void *)at(y, row * y_stride, dtype), x + row / TILE_ROWS * TILE_ROWS * words + row % TILE_ROWS,             \
         num_rows - row, 8, panels, source)
#define PANELS(panels)                                                                                                \
    for (; panel + panels <= end; panel += panels) {                                                                  \
        int64_t row = 0;                                                                                              \
        TILES(panels, MEMORY);                                                                                        \
        for (row = 8; row < num_rows; row += 8)                                                                       \
            TILES(panels, CACHE);                                                                                     \
    }
    PANELS(2)
    PANELS(1)
#undef PANELS
#undef TILES
}

/* x for AMX: rows where they are, or packed tiles of them, tile_bytes apart. */
struct amx_input {
    const char *x;
    int64_t row_bytes, tile_bytes; /* tile_bytes 0: not packed */
    int64_t num_rows;
};

/* The tile of x from a row on. */
INLINE struct amx_rows tile_at(const struct amx_input *input, int64_t row)
{
    const int64_t line_bytes = (int64_t)sizeof(vf);
    if (input->tile_bytes)
        return (struct amx_rows){input->x + row / AMX_ROWS * input->tile_bytes, line_bytes, AMX_ROWS * line_bytes};
    return (struct amx_rows){input->x + row * input->row_bytes, input->row_bytes, line_bytes};
}

/* Where the tiles for the rows from `row` on begin: the last ones also have rows before these, which come out the same. */
INLINE int64_t first_row(const struct amx_input *input, int64_t row, int64_t num_rows)
{
    return input->tile_bytes ? row : MAX(0, MIN(row, input->num_rows - num_rows));
}

/* Of one panel in memory. */
INLINE int64_t panel_bytes_of(const struct packed_linear *linear)
{
    return panel_tiles_of(linear->depth) * (linear->is_compressed ? COMPRESSED_TILE_BYTES : WEIGHT_TILE_BYTES);
}

INLINE void compressed_panels(struct compressed_panel *panels, int count, const struct packed_linear *linear, int64_t panel)
{
    for (int i = 0; i < count; i++)
        panels[i] = compressed_panel_at(linear->weight, num_panels_of(linear->num_outputs), panel_tiles_of(linear->depth),
                                        panel + i);
}

/* Pairs of tiles of AMX, and a last one alone, times two panels. The depth is cut into stretches whose weights stay in L1
 * for all pairs: on two cores with AMX, 190 rows, 768 -> 4,096 856 -> 725 us. The panels after these are asked for
 * meanwhile if `ask`. */
static void amx_pairs(void *y, int64_t y_stride, const struct amx_input *input, const struct packed_linear *linear,
                      int64_t panel, bool ask)
{
    const int64_t words = words_of(linear->depth, BFLOAT16), panel_bytes = panel_bytes_of(linear);
    const int64_t pair_rows = 2 * AMX_ROWS, whole_pair = input->tile_bytes ? 0 : pair_rows;
    const int64_t num_steps = words / AMX_WORDS * ((input->num_rows + pair_rows - 1) / pair_rows);
    const char *panels = (const char *)linear->weight + panel * panel_bytes;
    struct amx_ahead ahead = amx_ask_for(panels + 2 * panel_bytes, ask ? 2 * panel_bytes : 0, num_steps);
    struct compressed_panel compressed[2];
    char decompressed[2][AMX_STRETCH * sizeof(vf)] __attribute__((aligned(64)));
    float sums[ITEM_TILES][AMX_ROWS * 2 * LANES] __attribute__((aligned(64)));
    if (linear->is_compressed) {
        compressed_panels(compressed, 2, linear, panel);
        for (int64_t i = 0; i < MIN(words, AMX_STRETCH) / AMX_WORDS; i++)
            for (int p = 0; p < 2; p++)
                decompress_tile(decompressed[p] + i * WEIGHT_TILE_BYTES, compressed + p, 0);
    }
    for (int64_t word = 0, end; word < words; word = end) {
        end = MIN(words, word + AMX_STRETCH);
        const struct amx_stretch stretch =
            linear->is_compressed ? (struct amx_stretch){decompressed[0], sizeof decompressed[0], end - word}
                                  : (struct amx_stretch){panels + word * (int64_t)sizeof(vf), panel_bytes, end - word};
        const struct amx_refill refill = {decompressed[0], compressed, MIN(words - end, AMX_STRETCH) / AMX_WORDS};
        for (int64_t row = 0, taken; row < input->num_rows; row += taken) {
            taken = input->num_rows - row > AMX_ROWS && input->num_rows >= whole_pair ? pair_rows : AMX_ROWS;
            const int64_t first = first_row(input, row, taken);
            struct amx_rows rows[2] = {tile_at(input, first), tile_at(input, first + AMX_ROWS)};
            for (int i = 0; i < 2; i++)
                rows[i].x += word / AMX_WORDS * rows[i].step;
            const bool refills = linear->is_compressed && row + taken >= input->num_rows;
            amx_multiply_stretch(sums[row / AMX_ROWS], rows, (int)(taken / AMX_ROWS), &stretch, word > 0, &ahead,
                                 refills ? &refill : NULL);
            if (end == words)
                store_sums((void *)at(y, first * y_stride, BFLOAT16), y_stride, sums[row / AMX_ROWS], linear, panel,
                           MIN(taken, input->num_rows - first), 2, BFLOAT16);
        }
    }
    amx_ask_for_rest(&ahead);
}

/* One tile of AMX at a time times all panels. */
static void amx_tiles(void *y, int64_t y_stride, const struct amx_input *input, const struct packed_linear *linear,
                      int64_t panel, int64_t panel_end)
{
    const int64_t words = words_of(linear->depth, BFLOAT16), panel_bytes = panel_bytes_of(linear);
    float sums[4 * AMX_TILE_WORDS] __attribute__((aligned(64)));
    struct compressed_panel compressed[4];
    for (int panels; panel < panel_end; panel += panels) {
        panels = panel_end - panel >= 4 ? 4 : 1;
        if (linear->is_compressed)
            compressed_panels(compressed, panels, linear, panel);
        for (int64_t row = 0; row < input->num_rows; row += AMX_ROWS) {
            const int64_t first = first_row(input, row, AMX_ROWS);
            if (linear->is_compressed)
                amx_multiply_compressed_tile(sums, tile_at(input, first), compressed, words);
            else
                amx_multiply_tile(sums, tile_at(input, first), (const char *)linear->weight + panel * panel_bytes,
                                  panel_bytes, words, panels);
            store_sums((void *)at(y, first * y_stride, BFLOAT16), y_stride, sums, linear, panel,
                       MIN(AMX_ROWS, input->num_rows - first), panels, BFLOAT16);
        }
    }
}

/* Any number of rows with AMX. */
static void amx_item(void *y, int64_t y_stride, const struct amx_input *input, const struct packed_linear *linear,
                     int64_t panel, int64_t panel_end)
{
    if (input->num_rows > FEW_AMX_ROWS)
        for (; panel + 2 <= panel_end; panel += 2)
            amx_pairs(y, y_stride, input, linear, panel, panel + 4 <= num_panels_of(linear->num_outputs));
    amx_tiles(y, y_stride, input, linear, panel, panel_end);
}

static void compute_item(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows,
                         const struct packed_linear *linear, int64_t panel, int64_t end, enum dtype dtype)
{
    if (dtype == BFLOAT16 && num_rows <= TILE_ROWS)
        few_rows(y, y_stride, x, num_rows, linear, panel, end, BFLOAT16);
    else if (dtype == BFLOAT16)
        many_rows(y, y_stride, x, num_rows, linear, panel, end, BFLOAT16);
    else if (num_rows <= TILE_ROWS)
        few_rows(y, y_stride, x, num_rows, linear, panel, end, FLOAT32);
    else
        many_rows(y, y_stride, x, num_rows, linear, panel, end, FLOAT32);
}

/* What was compressed with AMX is multiplied with it. */
static bool uses_amx(const struct packed_linear *linear, enum dtype dtype)
{
    return dtype == BFLOAT16 && (linear->is_compressed || amx_is_on());
}

/* Whether x need not be packed: AMX reads rows of whole words where they are. */
static bool reads_rows(const struct packed_linear *linear, enum dtype dtype)
{
    return uses_amx(linear, dtype) && linear->depth % (2 * AMX_WORDS) == 0;
}

size_t linear_scratch(const struct packed_linear *linear, int64_t num_rows, int num_threads, enum dtype dtype)
{
    if (reads_rows(linear, dtype))
        return 0;
    const int64_t num_tiles = num_rows <= TILE_ROWS ? num_threads : num_tiles_of(num_rows);
    return (size_t)(num_tiles * words_of(linear->depth, dtype) * TILE_ROWS) * sizeof(uint32_t);
}

/* What the threads share out: items of up to ITEM_TILES tiles of rows and ITEM_PANELS panels, all panels for the first
 * rows, then all for the next. On two Xeon cores with AMX all linears of a layer took 5.5 ms for 1,024 rows with all rows
 * for the first panels first, 4.4 so. */
struct linear_item {
    int64_t row, row_end, panel, panel_end;
};

static int64_t num_row_items(int64_t num_rows) { return (num_tiles_of(num_rows) + ITEM_TILES - 1) / ITEM_TILES; }

static int64_t num_panel_items(const struct packed_linear *linear)
{
    return (num_panels_of(linear->num_outputs) + ITEM_PANELS - 1) / ITEM_PANELS;
}

static bool take_item(const struct team *team, struct work *work, const struct packed_linear *linear, int64_t num_rows,
                      struct linear_item *item)
{
    const int64_t num_tiles = num_tiles_of(num_rows), row_items = num_row_items(num_rows);
    const int64_t num_panels = num_panels_of(linear->num_outputs), panel_items = num_panel_items(linear);
    int64_t i;
    if (!take(team, work, &i))
        return false;
    item->row = num_tiles * (i / panel_items) / row_items * TILE_ROWS;
    item->row_end = MIN(num_rows, num_tiles * (i / panel_items + 1) / row_items * TILE_ROWS);
    item->panel = i % panel_items * ITEM_PANELS;
    item->panel_end = MIN(num_panels, item->panel + ITEM_PANELS);
    return true;
}

/* linear_stage with AMX. */
static void amx_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
                      int64_t x_stride, int64_t num_rows, char *scratch)
{
    struct amx_input input = {x, x_stride * (int64_t)size_of(BFLOAT16), 0, num_rows};
    if (!reads_rows(linear, BFLOAT16)) {
        input.x = scratch;
        input.tile_bytes = words_of(linear->depth, BFLOAT16) * AMX_ROWS * (int64_t)sizeof(uint32_t);
        struct work packing = start_work(team, num_tiles_of(num_rows));
        for (int64_t i; take(team, &packing, &i);)
            pack_amx_tile(scratch + i * input.tile_bytes, at(x, i * AMX_ROWS * x_stride, BFLOAT16), x_stride,
                          MIN(AMX_ROWS, num_rows - i * AMX_ROWS), linear->depth);
        complete(team);
    }
    struct work computing = start_work(team, num_row_items(num_rows) * num_panel_items(linear));
    amx_begin((int)MIN(AMX_ROWS, num_rows));
    for (struct linear_item item; take_item(team, &computing, linear, num_rows, &item);) {
        struct amx_input part = input;
        part.x += item.row * (input.tile_bytes ? input.tile_bytes / AMX_ROWS : input.row_bytes);
        part.num_rows = item.row_end - item.row;
        amx_item((void *)at(y, item.row * y_stride, BFLOAT16), y_stride, &part, linear, item.panel, item.panel_end);
    }
    amx_end();
}

void linear_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
                  int64_t x_stride, int64_t num_rows, void *scratch, enum dtype dtype)
{
    if (num_rows == 0)
        return; /* there may be no scratch memory */
    if (uses_amx(linear, dtype)) {
        amx_stage(team, linear, y, y_stride, x, x_stride, num_rows, scratch);
        return;
    }
    const int64_t tile_words = words_of(linear->depth, dtype) * TILE_ROWS;
    const bool packs_own = num_rows <= TILE_ROWS; /* each thread its own copy: cheaper than waiting */
    uint32_t *tiles = (uint32_t *)scratch + (packs_own ? team->thread * tile_words : 0);
    if (!packs_own) {
        struct work packing = start_work(team, num_tiles_of(num_rows));
        for (int64_t i; take(team, &packing, &i);)
            pack_tile(tiles + i * tile_words, at(x, i * TILE_ROWS * x_stride, dtype), x_stride,
                      MIN(TILE_ROWS, num_rows - i * TILE_ROWS), linear->depth, dtype);
        complete(team);
    }
    struct work computing = start_work(team, num_row_items(num_rows) * num_panel_items(linear));
    bool is_packed = !packs_own;
    for (struct linear_item item; take_item(team, &computing, linear, num_rows, &item);) {
        if (!is_packed)
            pack_tile(tiles, x, x_stride, num_rows, linear->depth, dtype);
        is_packed = true;
        compute_item((void *)at(y, item.row * y_stride, dtype), y_stride, tiles + item.row / TILE_ROWS * tile_words,
                     item.row_end - item.row, linear, item.panel, item.panel_end, dtype);
    }
}

/* Bytes of the packed weight; 0 where this library has no fast kernel for the dtype. */
EXPORT int64_t packed_weight_bytes(int64_t num_outputs, int64_t depth, int dtype)
{
#if !defined(__AVX512BF16__)
    if (dtype == BFLOAT16)
        return 0;
#endif
    return num_panels_of(num_outputs) * words_of(depth, (enum dtype)dtype) * (int64_t)sizeof(vf);
}

/* weight: dense [num_outputs, depth]. */
EXPORT int pack_weight(void *packed, const void *weight, int64_t num_outputs, int64_t depth, int dtype, int num_threads)
{
    const int64_t words = words_of(depth, (enum dtype)dtype);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t output = 0; output < num_outputs; output += LANES)
        pack_tile((uint32_t *)packed + output * words, at(weight, output * depth, (enum dtype)dtype), depth,
                  num_outputs - output, depth, (enum dtype)dtype);
    return OK;
}

EXPORT int packed_linear(const struct packed_linear *linear, void *y, int64_t y_stride, const void *x, int64_t x_stride,
                         int64_t num_rows, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const size_t share_bytes = 2 * (size_t)num_threads * sizeof(struct share);
    char *memory = grow_scratch(&scratch, &capacity,
                                share_bytes + linear_scratch(linear, num_rows, num_threads, (enum dtype)dtype));
    if (!memory)
        return OUT_OF_MEMORY;
    memset(memory, 0, share_bytes);
#pragma omp parallel num_threads(num_threads) if (linear->num_outputs * linear->depth > 65536)
    {
        struct team team = team_of(omp_get_thread_num(), omp_get_num_threads(), (struct share *)memory);
        linear_stage(&team, linear, y, y_stride, x, x_stride, num_rows, memory + share_bytes, (enum dtype)dtype);
    }
    return OK;
}

#else /* other vectors: packed_weight_bytes tells the caller to use another library's linears */

EXPORT int64_t packed_weight_bytes(int64_t num_outputs, int64_t depth, int dtype)
{
    (void)num_outputs, (void)depth, (void)dtype;
    return 0;
}

EXPORT int pack_weight(void *packed, const void *weight, int64_t num_outputs, int64_t depth, int dtype, int num_threads)
{
    (void)packed, (void)weight, (void)num_outputs, (void)depth, (void)dtype, (void)num_threads;
    return UNSUPPORTED;
}

EXPORT int packed_linear(const struct packed_linear *linear, void *y, int64_t y_stride, const void *x, int64_t x_stride,
                         int64_t num_rows, int dtype, int num_threads)
{
    (void)linear, (void)y, (void)y_stride, (void)x, (void)x_stride, (void)num_rows, (void)dtype, (void)num_threads;
    return UNSUPPORTED;
}

#endif
