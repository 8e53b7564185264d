/* Shared by packed_linear.c, amx_linear.c and amx_bytes.c: tiles of rows, panels of outputs, and items of both. */
#pragma once

#include "packed_linear.h"

#if LANES == 16
#define TILE_ROWS 16
#elif LANES == 8
#define TILE_ROWS 6 /* with two panels, their sums leave four of 16 registers */
#else
#define TILE_ROWS 4
#endif
#define ITEM_PANELS (64 / LANES) /* panels per item */
/* Tiles of rows per item: their part of x stays in L2 while all weights pass. If bfloat16 is widened it takes twice as
 * much, and such CPUs have less L2. */
#define ITEM_TILES ((MULTIPLIES_BFLOAT16 ? 320 : 96) / TILE_ROWS)

/* Words of a panel or a packed row; those past the depth are zero, so that AMX has whole tiles. */
INLINE int64_t words_of(int64_t depth, const enum dtype dtype)
{
    return dtype == BFLOAT16 ? panel_tiles_of(depth) * AMX_WORDS : depth;
}

INLINE int64_t num_tiles_of(int64_t num_rows) { return (num_rows + TILE_ROWS - 1) / TILE_ROWS; }

/* sums: [num_rows, panels * LANES] */
INLINE void store_sums(void *y, int64_t y_stride, const float *sums, const struct packed_linear *linear, int64_t panel,
                       int64_t num_rows, const int panels, const enum dtype dtype)
{
    const int64_t output = panel * LANES, count = linear->num_outputs - output;
    vf bias[4];
    for (int p = 0; p < panels; p++)
        bias[p] = linear->bias ? load_upto(linear->bias, output + p * LANES, MAX(0, count - p * LANES), dtype) : (vf){0};
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
            store_upto(y, row * y_stride + output + p * LANES, MAX(0, count - p * LANES),
                       load(sums, (row * panels + p) * LANES, FLOAT32) + bias[p], dtype);
}

/* An item of work: up to ITEM_TILES tiles of rows and ITEM_PANELS panels. Items go through all panels for the first rows,
 * then all panels for the next. On two Xeon cores with AMX all linears of a layer took 5.5 ms for 1,024 rows with all
 * rows for the first panels first, 4.4 in this order. */
struct linear_item {
    int64_t row, row_end, panel, panel_end;
};

INLINE int64_t num_row_items(int64_t num_rows) { return (num_tiles_of(num_rows) + ITEM_TILES - 1) / ITEM_TILES; }

INLINE int64_t num_panel_items(const struct packed_linear *linear)
{
    return (num_panels_of(linear->num_outputs) + ITEM_PANELS - 1) / ITEM_PANELS;
}

INLINE bool take_item(const struct team *team, struct work *work, const struct packed_linear *linear, int64_t num_rows,
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
