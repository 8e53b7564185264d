/* See paged_attention.c. */
#pragma once

#include "team.h"
#include "vector.h"

struct attention {
    const void *q;
    int64_t q_row_stride, q_head_stride;
    const void *k_cache, *v_cache;
    int64_t num_blocks, block_size;
    const int32_t *block_table;
    int64_t block_table_stride;
    const int32_t *context_lens, *row_start, *num_rows;
    const float *sinks; /* or NULL */
    void *out;          /* dense [T, num_heads, head_dim] */
    int64_t num_sequences, num_heads, num_kv_heads, head_dim;
    int64_t sliding_window; /* 0 = none */
    float scaling, softcap; /* softcap 0 = none */
};

struct attention_size {
    int64_t num_tiles, max_parts, work;
};

struct attention_item;

/* The work of one call. */
struct attention_plan {
    struct attention_item *tiles, *items;
    int64_t num_tiles, num_items;
    bool is_split;
    float *parts, *workspaces;
};

/* Refuses row ranges and block ids that would read outside q and the caches; counts tiles and their work. */
enum status attention_measure(const struct attention *p, int64_t total_rows, int64_t max_blocks, int num_threads,
                              struct attention_size *size);
size_t attention_scratch(const struct attention *p, const struct attention_size *size, int num_threads);
struct attention_plan attention_prepare(const struct attention *p, const struct attention_size *size, void *scratch);

/* Up to two pieces of work; the caller completes the last one. */
void attention_stage(struct team *team, const struct attention *p, const struct attention_plan *plan, enum dtype dtype);
