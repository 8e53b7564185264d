/* See packed_linear.c. */
#pragma once

#include "packed_linear.h"

/* Whether to multiply with AMX; weights compressed for it always are. */
bool uses_amx(const struct packed_linear *linear, enum dtype dtype);

/* Whether x is read in place, without packing: AMX does so if rows fill whole tiles. */
bool reads_rows(const struct packed_linear *linear, enum dtype dtype);

/* linear_stage if uses_amx. */
void amx_linear_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
                      int64_t x_stride, int64_t num_rows, char *scratch);
