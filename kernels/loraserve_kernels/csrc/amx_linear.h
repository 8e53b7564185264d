/* See packed_linear.c. */
#pragma once

#include "packed_linear.h"

/* What was compressed with AMX is multiplied with it. */
bool uses_amx(const struct packed_linear *linear, enum dtype dtype);

/* Whether x need not be packed: AMX reads rows of whole words where they are. */
bool reads_rows(const struct packed_linear *linear, enum dtype dtype);

/* linear_stage where uses_amx. */
void amx_linear_stage(struct team *team, const struct packed_linear *linear, void *y, int64_t y_stride, const void *x,
                      int64_t x_stride, int64_t num_rows, char *scratch);
