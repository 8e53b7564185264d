/* Shared by paged_attention.c, decode_attention.c and prompt_attention.c: tiles of query rows, their softmax state, and
 * which keys they see. */
#pragma once

#include <math.h>

#include "paged_attention.h"

#define TILE_QUERIES 64
#define KEYS 64
#define SPAN 512

struct attention_item {
    int32_t sequence, first_row, rows, kv_head; /* first_row within the sequence */
    int32_t first_key, end_key;
    int32_t part; /* this span's partial result (a tile to merge: its first span's); -1 = the item does the whole tile */
};

/* Softmax state of the query vectors of a tile: O = output / total once complete. */
struct state {
    float *maximum; /* [queries] */
    float *total;   /* [queries] */
    float *output;  /* [queries, padded_dim] */
};

struct workspace {
    float *keys;        /* words [padded_dim, KEYS], see words_of */
    float *values;      /* [KEYS, padded_dim] */
    float *queries;     /* words [queries, padded_dim] */
    float *scores;      /* [queries, KEYS] */
    float *lane_totals; /* [queries, LANES] */
    struct state span, sum;
};

/* head_dim rounded up to whole vectors of pairs of bfloat16, see load_keys. */
INLINE int64_t padded_dim(const struct attention *p) { return (p->head_dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

INLINE int64_t group_size(const struct attention *p) { return p->num_heads / p->num_kv_heads; }

/* Query rows per tile; a single row's group may exceed TILE_QUERIES. */
INLINE int64_t tile_rows(const struct attention *p) { return MAX(1, TILE_QUERIES / group_size(p)); }

INLINE int64_t tile_queries(const struct attention *p) { return tile_rows(p) * group_size(p); }

INLINE int64_t position_of(const struct attention *p, int64_t sequence, int64_t row)
{
    return p->context_lens[sequence] - p->num_rows[sequence] + row;
}

INLINE int64_t first_visible(const struct attention *p, int64_t position)
{
    return p->sliding_window ? MAX(0, position - p->sliding_window + 1) : 0;
}
