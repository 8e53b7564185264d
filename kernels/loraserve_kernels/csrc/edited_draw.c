/* Chooses one token from each of some rows of logits after editing them: allowed tokens, biases, bans, penalties.
 *
 * A thread edits a float32 copy of one row and chooses from it while it is in the thread's cache. Edits are applied in
 * the order of logit_edits.py's edit_row_reference.
 */
#include "draw.h"

#define IS_ALLOWED 1 /* logit_edits.py's marks */
#define IS_BANNED 2
#define LEAST_TEMPERATURE 1e-5 /* sampling.py's */

/* A list has each token id at most once; ids outside the row are ignored. */
struct edited_draw {
    struct draw draw; /* below LEAST_TEMPERATURE: takes the largest logit */
    const int32_t *listed;
    const float *biases;
    const int8_t *marks;
    int64_t num_listed;
    const int64_t *penalised;
    const float *counts; /* occurrences in the output */
    int64_t num_penalised;
    float repetition, frequency, presence;
    int32_t is_blank; /* only allowed tokens remain */
};

struct edited_draw_plan {
    const struct edited_draw *draws;
    int64_t num_draws;
    const void *x;
    int64_t stride, size;
    int64_t *chosen; /* token ids; -1: the row is not finite, or no token that it has is allowed */
    char *scratch;   /* scratch_of(size) bytes for each thread */
    enum dtype dtype;
};

static size_t row_bytes(int64_t size) { return ((size_t)size * sizeof(float) + 63) & ~(size_t)63; }

static size_t scratch_of(int64_t size) { return row_bytes(size) + draw_scratch(size); }

/* NOTE: the row x has `size` logits; elements after them may be anything. */
INLINE void edit_row(float *edited, const struct edited_draw *edits, const void *x, int64_t size, const enum dtype dtype)
{
    for (int64_t i = 0; i < size; i += LANES) {
        const vf value = edits->is_blank ? splat(-INFINITY) : load_before(x, i, size, dtype);
        store_upto(edited, i, size - i, value, FLOAT32);
    }
    for (int64_t i = 0; i < edits->num_listed; i++) {
        if (edits->listed[i] < 0 || edits->listed[i] >= size)
            continue;
        float *logit = edited + edits->listed[i];
        if (edits->marks[i] & IS_ALLOWED)
            *logit = load_one(x, edits->listed[i], dtype);
        *logit = edits->marks[i] & IS_BANNED ? -INFINITY : *logit + edits->biases[i];
    }
    for (int64_t i = 0; i < edits->num_penalised; i++) {
        if (edits->penalised[i] < 0 || edits->penalised[i] >= size)
            continue;
        float *logit = edited + edits->penalised[i];
        *logit = *logit > 0 ? *logit / edits->repetition : *logit * edits->repetition;
        *logit -= edits->frequency * edits->counts[i] + (edits->counts[i] > 0 ? edits->presence : 0.0f);
    }
}

/* For a row whose edits leave no token: the allowed token with the largest logit, banned or not. */
static int64_t best_allowed(const struct edited_draw *edits, const void *x, int64_t size, enum dtype dtype)
{
    if (!edits->is_blank) {
        const struct peak peak = peak_of(x, 0, size, dtype);
        return isfinite(peak.value) ? index_of_largest(&peak, 1, x, dtype) : -1;
    }
    uint64_t best = UINT64_MAX; /* no token has this key */
    for (int64_t i = 0; i < edits->num_listed; i++) {
        const int64_t token = edits->listed[i];
        if (edits->marks[i] & IS_ALLOWED && token >= 0 && token < size)
            best = MIN(best, key_of(load_one(x, token, dtype), token));
    }
    return best == UINT64_MAX ? -1 : index_of_key(best);
}

static int64_t choose_of(const struct edited_draw_plan *plan, const struct edited_draw *edits, char *scratch)
{
    float *edited = (float *)scratch;
    const void *x = at(plan->x, edits->draw.row * plan->stride, plan->dtype);
    if (plan->dtype == BFLOAT16)
        edit_row(edited, edits, x, plan->size, BFLOAT16);
    else
        edit_row(edited, edits, x, plan->size, FLOAT32);
    const struct peak peak = peak_of(edited, 0, plan->size, FLOAT32);
    if (peak.value == -INFINITY)
        return best_allowed(edits, x, plan->size, plan->dtype);
    if (!isfinite(peak.value))
        return -1;
    if (edits->draw.temperature < LEAST_TEMPERATURE)
        return index_of_largest(&peak, 1, edited, FLOAT32);
    return draw_one(&edits->draw, edited, plan->size, peak.value, scratch + row_bytes(plan->size));
}

static void edited_draw_region(struct team *team, void *of)
{
    const struct edited_draw_plan *plan = of;
    struct work work = start_work(team, plan->num_draws);
    for (int64_t i; take(team, &work, &i);)
        plan->chosen[i] = choose_of(plan, plan->draws + i, plan->scratch + (size_t)team->thread * scratch_of(plan->size));
    complete(team);
}

/* See `edited_draw_plan`. */
EXPORT int edited_draw(int64_t *chosen, const struct edited_draw *draws, int64_t num_draws, const void *x,
                       int64_t stride, int64_t size, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    char *memory = grow_scratch(&scratch, &capacity, (size_t)num_threads * scratch_of(size));
    if (!memory)
        return OUT_OF_MEMORY;
    struct edited_draw_plan plan = {draws, num_draws, x, stride, size, chosen, memory, (enum dtype)dtype};
    return run_team(num_threads, 1, edited_draw_region, &plan) ? OK : OUT_OF_MEMORY;
}
