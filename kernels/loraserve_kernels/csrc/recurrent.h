/* Shared by causal_conv.c, gated_delta_rule.c and selective_scan.c: the sequences of a step and where their states are.
 *
 * All three walk along the rows of a sequence, one after the other. A row's sums have one fixed order, so its bits depend
 * neither on other sequences nor on how the rows are cut into blocks, steps and items of work.
 */
#pragma once

#include "team.h"
#include "vector.h"

/* As `StateSlots` of step_batch.py. A sequence without rows copies its state. */
struct sequences {
    const int32_t *row_start, *num_rows, *read, *write, *save, *num_rows_saved;
    int64_t num_sequences, total_rows, num_slots;
};

/* Refuses rows outside 0 .. total_rows, slots outside the states, and states saved after rows that do not exist. */
enum status check_sequences(const struct sequences *s);

/* Copies the states of sequences without rows. slot_size: floats of a slot. */
void keep_states(const struct sequences *s, float *state, int64_t slot_size);

/* Rows of all sequences. */
int64_t count_rows(const struct sequences *s);

/* x[i] <- exp(x[i]), in whole vectors: the memory is LANES floats long or a multiple. */
void exp_each(float *x, int64_t count);

/* Rows of one sequence, at most a given number, between which no state is saved. */
struct row_block {
    int64_t sequence, start, end; /* within the sequence */
    int64_t read, save;           /* slots of the states before and after it; -1 = zeros, and not saved */
};

INLINE struct row_block block_of(const struct sequences *s, int64_t sequence, int64_t start, int64_t max_rows)
{
    const int64_t num_rows = s->num_rows[sequence], saved = s->save[sequence] < 0 ? 0 : s->num_rows_saved[sequence];
    const int64_t limit = MIN(start < saved ? saved : num_rows, start + max_rows);
    return (struct row_block){sequence, start, limit, start == 0 ? s->read[sequence] : s->write[sequence],
                              limit == saved && saved > 0 ? s->save[sequence] : -1};
}

/* Fetches part of a later row. Rows are too far apart for the CPU to predict the next one: 1,024 rows of 16 heads of 128,
 * gated delta rule, bfloat16, one Xeon core: 24.7 ms with prefetches, 27.1 without. */
INLINE void prefetch(const void *row, int64_t size, const enum dtype dtype)
{
    for (int64_t i = 0; i < size; i += 64 / (int64_t)size_of(dtype))
        __builtin_prefetch(at(row, i, dtype), 0, 3);
}

/* Items into which each sequence's state of a head is cut, at most max_parts. With few heads, threads share them. */
INLINE int64_t parts_of(int64_t num_heads, int64_t max_parts, int num_threads)
{
    const int64_t wanted = num_threads == 1 ? 1 : (4 * num_threads + num_heads - 1) / MAX(num_heads, 1);
    return MAX(1, MIN(wanted, max_parts));
}
