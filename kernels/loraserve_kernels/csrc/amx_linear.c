/* Packed linears with AMX, see packed_linear.c. */
#include "amx_linear.h"

#include "linear_tiles.h"

bool uses_amx(const struct packed_linear *linear, enum dtype dtype)
{
    return dtype == BFLOAT16 && (linear->format == COMPRESSED || (amx_is_on() && !is_quantized(linear)));
}

bool reads_rows(const struct packed_linear *linear, enum dtype dtype)
{
    return uses_amx(linear, dtype) && linear->depth % (2 * AMX_WORDS) == 0;
}

#if MULTIPLIES_BFLOAT16

#define FEW_AMX_ROWS AMX_ROWS /* up to which four panels at a time are better than two */
#define AMX_STRETCH (8 * AMX_WORDS) /* words of depth whose weights stay in L1 */

/* Packs a tile of x for AMX. Rows past num_rows keep stale data; their sums are not stored. */
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

/* x for AMX: rows in place, or packed tiles of them, tile_bytes apart. */
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

/* First row of the tiles for the rows from `row` on. The last tiles may include earlier rows, which get the same results
 * again. */
INLINE int64_t first_row(const struct amx_input *input, int64_t row, int64_t num_rows)
{
    return input->tile_bytes ? row : MAX(0, MIN(row, input->num_rows - num_rows));
}

/* Bytes of one panel in memory. */
INLINE int64_t panel_bytes_of(const struct packed_linear *linear)
{
    return panel_tiles_of(linear->depth) * (linear->format == PLAIN ? WEIGHT_TILE_BYTES : COMPRESSED_TILE_BYTES);
}

INLINE void compressed_panels(struct compressed_panel *panels, int count, const struct packed_linear *linear, int64_t panel)
{
    for (int i = 0; i < count; i++)
        panels[i] = compressed_panel_at(linear->weight, num_panels_of(linear->num_outputs), panel_tiles_of(linear->depth),
                                        panel + i);
}

/* Pairs of AMX tiles of rows, and a last one alone, times two panels. The depth is cut into stretches whose weights stay
 * in L1 for all pairs: on two cores with AMX, 190 rows, 768 -> 4,096 856 -> 725 us. If `prefetch_next`, the next two panels
 * are prefetched at the same time. */
static void amx_pairs(void *y, int64_t y_stride, const struct amx_input *input, const struct packed_linear *linear,
                      int64_t panel, bool prefetch_next)
{
    const int64_t words = words_of(linear->depth, BFLOAT16), panel_bytes = panel_bytes_of(linear);
    const int64_t pair_rows = 2 * AMX_ROWS, whole_pair = input->tile_bytes ? 0 : pair_rows;
    const int64_t num_steps = words / AMX_WORDS * ((input->num_rows + pair_rows - 1) / pair_rows);
    const char *panels = (const char *)linear->weight + panel * panel_bytes;
    struct amx_prefetch ahead = amx_start_prefetch(panels + 2 * panel_bytes, prefetch_next ? 2 * panel_bytes : 0, num_steps);
    struct compressed_panel compressed[2];
    char unpacked[2][AMX_STRETCH * sizeof(vf)] __attribute__((aligned(64)));
    float sums[ITEM_TILES][AMX_ROWS * 2 * LANES] __attribute__((aligned(64)));
    if (linear->format == COMPRESSED) {
        compressed_panels(compressed, 2, linear, panel);
        for (int64_t i = 0; i < MIN(words, AMX_STRETCH) / AMX_WORDS; i++)
            for (int p = 0; p < 2; p++)
                decompress_tile(unpacked[p] + i * WEIGHT_TILE_BYTES, compressed + p, 0);
    }
    for (int64_t word = 0, end; word < words; word = end) {
        end = MIN(words, word + AMX_STRETCH);
        const struct amx_stretch stretch =
            linear->format == PLAIN ? (struct amx_stretch){panels + word * (int64_t)sizeof(vf), panel_bytes, end - word}
                                    : (struct amx_stretch){unpacked[0], sizeof unpacked[0], end - word};
        const struct amx_refill refill = {unpacked[0], compressed, MIN(words - end, AMX_STRETCH) / AMX_WORDS};
        for (int64_t row = 0, taken; row < input->num_rows; row += taken) {
            taken = input->num_rows - row > AMX_ROWS && input->num_rows >= whole_pair ? pair_rows : AMX_ROWS;
            const int64_t first = first_row(input, row, taken);
            struct amx_rows rows[2] = {tile_at(input, first), tile_at(input, first + AMX_ROWS)};
            for (int i = 0; i < 2; i++)
                rows[i].x += word / AMX_WORDS * rows[i].step;
            const bool refills = linear->format == COMPRESSED && row + taken >= input->num_rows;
            amx_multiply_stretch(sums[row / AMX_ROWS], rows, (int)(taken / AMX_ROWS), &stretch, word > 0, &ahead,
                                 refills ? &refill : NULL);
            if (end == words)
                store_sums((void *)at(y, first * y_stride, BFLOAT16), y_stride, sums[row / AMX_ROWS], linear, panel,
                           MIN(taken, input->num_rows - first), 2, BFLOAT16);
        }
    }
    amx_prefetch_rest(&ahead);
}

/* All panels times one AMX tile of rows at a time. */
static void amx_tiles(void *y, int64_t y_stride, const struct amx_input *input, const struct packed_linear *linear,
                      int64_t panel, int64_t panel_end)
{
    const int64_t words = words_of(linear->depth, BFLOAT16), panel_bytes = panel_bytes_of(linear);
    float sums[4 * AMX_TILE_WORDS] __attribute__((aligned(64)));
    struct compressed_panel compressed[4];
    for (int panels; panel < panel_end; panel += panels) {
        panels = panel_end - panel >= 4 ? 4 : 1;
        if (linear->format == COMPRESSED)
            compressed_panels(compressed, panels, linear, panel);
        for (int64_t row = 0; row < input->num_rows; row += AMX_ROWS) {
            const int64_t first = first_row(input, row, AMX_ROWS);
            if (linear->format == COMPRESSED)
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
    const int64_t num_panels = num_panels_of(linear->num_outputs);
    if (input->num_rows > FEW_AMX_ROWS)
        for (; panel + 2 <= panel_end; panel += 2)
            amx_pairs(y, y_stride, input, linear, panel, panel + 4 <= num_panels);
    amx_tiles(y, y_stride, input, linear, panel, panel_end);
}

void amx_linear_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
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

#else

void amx_linear_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
                      int64_t x_stride, int64_t num_rows, char *scratch)
{
    (void)team, (void)linear, (void)y, (void)y_stride, (void)x, (void)x_stride, (void)num_rows, (void)scratch;
}

#endif
