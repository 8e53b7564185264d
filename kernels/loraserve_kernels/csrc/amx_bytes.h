/* See packed_linear.c. */
#pragma once

#include "packed_linear.h"

/* Whether this many rows are multiplied as bytes; the results are those without AMX, bit for bit. */
bool multiplies_bytes(const struct packed_linear *linear, int64_t num_rows, enum dtype dtype);

/* pack_tile for multiply_bytes; a tile takes as many words. */
void pack_bytes(uint32_t *tile, const void *x, int64_t x_stride, int64_t num_rows, const struct packed_linear *linear);

/* Computes an item, see linear_tiles.h, between amx_begin and amx_end. x: tiles from pack_bytes. */
void multiply_bytes(void *y, int64_t y_stride, const uint32_t *x, int64_t num_rows, const struct packed_linear *linear,
                    int64_t panel, int64_t panel_end);
