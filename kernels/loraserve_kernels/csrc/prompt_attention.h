/* See prompt_attention.c. */
#pragma once

#include "attention_tile.h"

/* Whether tiles of this many rows are computed here. */
bool is_prompt(const struct attention *p, int64_t rows, enum dtype dtype);

/* queries: words [panels, head_dim / 2, LANES] of the item's query vectors, the last one repeated to fill a panel. */
void load_prompt_queries(const struct attention *p, const struct attention_item *item, float *queries);

/* Computes the state of the item's queries over its keys, which lie within one span. NOTE: configures this thread's AMX
 * tiles; amx_end releases them. */
void attend_prompt_span(const struct attention *p, const struct attention_item *item, struct workspace *w);
