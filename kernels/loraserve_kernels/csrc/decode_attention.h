/* See decode_attention.c. */
#pragma once

#include "amx.h"
#include "attention_tile.h"

#define DECODE_QUERIES AMX_QUERIES /* most query vectors of a tile */

/* Whether tiles of this many rows are computed here. */
bool is_decode(const struct attention *p, int64_t rows, enum dtype dtype);

/* queries: words [head_dim / 2, DECODE_QUERIES] of the item's query vectors; columns without one are zero. */
void load_decode_queries(const struct attention *p, const struct attention_item *item, float *queries);

/* Computes the state of the item's queries over its keys, which lie within one span. Meanwhile prefetches the next keys;
 * after the item's last chunk these are the first of the following item. NOTE: if AMX is on, configures this thread's
 * tiles; amx_end releases them. */
void attend_decode_span(const struct attention *p, const struct attention_item *item,
                        const struct attention_item *following, struct workspace *w);
