/* See decode_attention.c. */
#pragma once

#include "amx.h"
#include "attention_tile.h"

#define DECODE_QUERIES AMX_QUERIES /* query vectors that a tile has at most */

/* Whether tiles of so many rows are attended to here. */
bool is_decode(const struct attention *p, int64_t rows, enum dtype dtype);

/* queries: words [head_dim / 2, DECODE_QUERIES] of the item's query vectors; zero where there are fewer. */
void load_decode_queries(const struct attention *p, const struct attention_item *item, float *queries);

/* The state of the item's queries over its keys, which lie within one span. The keys after them, first those of the
 * following item, are asked for meanwhile. NOTE: where AMX is on, sets this thread's tiles up, for amx_end to release. */
void attend_decode_span(const struct attention *p, const struct attention_item *item,
                        const struct attention_item *following, struct workspace *w);
