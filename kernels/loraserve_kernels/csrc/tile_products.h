/* Products of a tile of rows and a few panels of a weight, for packed_linear.c: of floats (float_products.c) or of int16
 * (int16_products.c). Each number of rows and panels has its own function, which keeps all sums in registers.
 */
#pragma once

#include "quantized_weight.h"
#include "row_tiles.h"

#define MAX_TILE_SUMS 16
#define MAX_TILE_PANELS 4
#define MAX_TILE_ROWS 8

/* A stretch of the depth of some panels, times rows of a tile of x. */
struct product {
    const uint32_t *x;
    const uint32_t *x_scales; /* floats: scales of those rows, if they are rounded */
    char *weight; /* the first of the panels, which lie panel_bytes apart */
    int64_t panel_bytes, words;
    const char *ahead; /* prefetched meanwhile, ahead_bytes for each word */
    int64_t ahead_bytes;
    bool adds; /* to the sums of earlier stretches; only widened weights have several */
    /* What to widen the panels from; the result is kept at `weight` unless that is NULL. */
    struct quantized_panel quantized[MAX_TILE_PANELS];
    int64_t first_word; /* of `quantized`, where the stretch begins */
};

/* sums: [rows, panels * LANES] */
typedef void multiply_tile(float *sums, const struct product *product);

/* Indexed by rows and panels; NULL if there is no such tile. */
typedef multiply_tile *tile_products[MAX_TILE_ROWS + 1][MAX_TILE_PANELS + 1];

/* format: of the panels that the first tile of rows widens and the rest finds widened; PLAIN = nothing is widened. */
const tile_products *float_products(enum weight_format format, bool is_first, enum dtype dtype);
const tile_products *int16_products(enum weight_format format, bool is_first);

/* TILE(rows, panels, ...) for each kind of tile in packed_linear.c's tilings. */
#if LANES == 16
#define EACH_TILE(TILE, ...)                                                                                          \
    TILE(1, 4, __VA_ARGS__)                                                                                           \
    TILE(2, 4, __VA_ARGS__)                                                                                           \
    TILE(4, 4, __VA_ARGS__)                                                                                           \
    TILE(8, 2, __VA_ARGS__)                                                                                           \
    TILE(8, 1, __VA_ARGS__)                                                                                           \
    TILE(4, 2, __VA_ARGS__)                                                                                           \
    TILE(4, 1, __VA_ARGS__)
#elif LANES == 8
#define EACH_TILE(TILE, ...)                                                                                          \
    TILE(1, 4, __VA_ARGS__)                                                                                           \
    TILE(2, 4, __VA_ARGS__)                                                                                           \
    TILE(6, 2, __VA_ARGS__)                                                                                           \
    TILE(6, 1, __VA_ARGS__)                                                                                           \
    TILE(4, 2, __VA_ARGS__)                                                                                           \
    TILE(4, 1, __VA_ARGS__)
#else
#define EACH_TILE(TILE, ...)                                                                                          \
    TILE(1, 4, __VA_ARGS__)                                                                                           \
    TILE(2, 4, __VA_ARGS__)                                                                                           \
    TILE(4, 4, __VA_ARGS__)                                                                                           \
    TILE(4, 1, __VA_ARGS__)                                                                                           \
    TILE(2, 1, __VA_ARGS__)
#endif

/* NOTE: separate functions, called only through the table, with nothing but the loop. Otherwise GCC 12 inlines them and
 * keeps the sums on the stack, which takes twice as long. */
#define TILE_FUNCTION(rows, panels, name, multiplies, ...)                                                            \
    static void name##_##rows##x##panels(float *sums, const struct product *product)                                  \
    {                                                                                                                 \
        multiplies(sums, product, rows, panels, __VA_ARGS__);                                                         \
    }
#define TILE_ENTRY(rows, panels, name) [rows][panels] = name##_##rows##x##panels,
#define TILE_PRODUCTS(name, multiplies, ...)                                                                          \
    EACH_TILE(TILE_FUNCTION, name, multiplies, __VA_ARGS__)                                                           \
    static const tile_products name = {EACH_TILE(TILE_ENTRY, name)};
