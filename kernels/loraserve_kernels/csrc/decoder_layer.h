/* See decoder_layer.c. */
#pragma once

#include "lora_add.h"

struct decoder_layer;

/* Shared by all layers of a step. */
struct layer_step {
    int64_t num_rows, num_sequences, max_blocks;
    const void *cosine, *sine; /* dense [num_rows, rotary_dim] */
    int64_t rotary_dim;
    const int64_t *slot_mapping;
    const int32_t *block_table;
    int64_t block_table_stride;
    const int32_t *context_lens, *row_start, *sequence_rows;
    struct segments segments; /* none: base model only */
    /* Rows of the last layer's output to compute; of other rows only keys and values are needed. Ascending; not read if
     * all are wanted. */
    const int64_t *wanted_rows;
    int64_t num_wanted;
    struct segments wanted_segments; /* of those rows */
};

#define LAYER_PIECES 29 /* pieces of work of one layer, at most */

struct run;

/* The work of one step. */
struct layers_plan {
    struct run *runs;
    int64_t num_layers;
    char *memory;
};

/* layers: all with the same hidden size. x: dense [num_rows, hidden_size]; out: dense [num_wanted, hidden_size], not x. A
 * thread has only one plan at a time. */
enum status layers_prepare(struct layers_plan *plan, const struct decoder_layer *const *layers, int64_t num_layers,
                           const struct layer_step *step, const void *x, void *out, enum dtype dtype, int num_threads);

/* Up to LAYER_PIECES pieces of work per layer. NOTE: x must be complete; out is complete afterwards. */
void layers_stage(struct team *team, const struct layers_plan *plan);
