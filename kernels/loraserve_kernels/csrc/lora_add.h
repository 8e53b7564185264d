/* See lora_add.c. */
#pragma once

#include "team.h"
#include "vector.h"

struct group {
    int64_t in_features;
    int64_t num_members;
    const int64_t *out_features;
};

struct table {
    const void *arena;
    int64_t arena_size;
    const int64_t *offset_a; /* the group's column; stride in elements between slots */
    int64_t stride_a;
    const int64_t *offset_b; /* the first member's column */
    const int32_t *lora_rank;
    const float *scaling;
    int64_t stride_members;
    int64_t num_slots;
    const int64_t *offset_magnitude; /* the first member's column; -1 = without DoRA; NULL: no member has DoRA */
    int64_t elements_per_float;      /* arena elements per float32 of a magnitude */
};

/* Contiguous runs of rows of one adapter; -1 = base model. */
struct segments {
    const int32_t *start; /* [count + 1] */
    const int32_t *adapter_slot;
    int64_t count;
};

struct lora_size {
    size_t num_items, num_hidden, work;
};

struct lora_item;

/* The work of one call. */
struct lora_plan {
    const void *arena;
    int64_t in_features;
    float *hidden;
    struct lora_item *shrinks, *expands;
    int64_t num_shrinks, num_expands;
};

/* Counts the work of all segments; refuses tables that point outside the arena. */
enum status lora_measure(const struct group *group, const struct table *table, const struct segments *segments,
                         int64_t num_rows, struct lora_size *size);
size_t lora_scratch(const struct lora_size *size);
struct lora_plan lora_prepare(const struct group *group, const struct table *table, const struct segments *segments,
                              const struct lora_size *size, void *scratch);

/* Each is one piece of work. Complete the shrink before the expand, and the expand before reading y. */
void lora_shrink_stage(struct team *team, const struct lora_plan *plan, const void *x, int64_t x_stride,
                       enum dtype dtype);
void lora_expand_stage(struct team *team, const struct lora_plan *plan, void *y, int64_t y_stride, enum dtype dtype);
