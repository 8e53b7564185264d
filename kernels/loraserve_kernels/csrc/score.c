/* Log-probabilities from rows of logits: of one token, with its rank, and of the most likely ones.
 *
 * An outcome is 1 + num_top numbers, the token's rank and then the ids of the most likely tokens, and as many
 * log-probabilities.
 */
#include "argmax.h"

#define LIGHTEST 87.0f /* exp(-LIGHTEST) is close to the smallest normal number, and adds nothing to 1 */
#define VECTORS 4      /* weighed together, see vexp_within */
#define CHUNK (16 * VECTORS * LANES) /* elements whose weights are added up in float32 */

struct score_query {
    int64_t row, token, num_top; /* num_top: up to all tokens */
    int64_t first;               /* index of its outcome */
};

struct score_plan {
    const struct score_query *queries;
    int64_t num_queries;
    const void *x;
    int64_t stride, size;
    int64_t *numbers;
    double *logprobs; /* NaN if the row's largest logit is not finite; then no ids are set */
    enum dtype dtype;
};

/* Sum of exp(x - peak) over the elements from `start` on, up to a chunk. Adds to `above`, per lane, the number of
 * elements that exceed `value`. */
INLINE float weigh_chunk(const void *x, int64_t start, int64_t size, float peak, float value, vi *above,
                         const enum dtype dtype)
{
    vf sum = {0};
    for (int64_t i = start; i < MIN(size, start + CHUNK); i += VECTORS * LANES) {
        vf weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const vf logits = load_before(x, i + v * LANES, size, dtype);
            *above -= logits > value;
            weights[v] = vmax(splat(-LIGHTEST), logits - peak);
        }
        vexp_within(weights, VECTORS);
        sum += (weights[0] + weights[1]) + (weights[2] + weights[3]);
    }
    return horizontal_sum(sum);
}

/* Moves key i down to its place in a heap whose first key is the largest. */
static void sink(uint64_t *heap, int64_t count, int64_t i)
{
    const uint64_t key = heap[i];
    for (int64_t child = 2 * i + 1; child < count; child = 2 * i + 1) {
        if (child + 1 < count && heap[child + 1] > heap[child])
            child++;
        if (heap[child] < key)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

/* Keys of the `count` most likely tokens, in order. */
INLINE void find_top(uint64_t *keys, int64_t count, const void *x, int64_t size, const enum dtype dtype)
{
    if (count == 0)
        return;
    for (int64_t i = 0; i < count; i++)
        keys[i] = key_of(load_one(x, i, dtype), i);
    for (int64_t i = count / 2; i-- > 0;)
        sink(keys, count, i);
    float least = load_one(x, index_of_key(keys[0]), dtype);
    for (int64_t i = count; i < size; i += LANES) {
        const vf logits = load_before(x, i, size, dtype);
        for (unsigned lanes = lanes_of(logits > least); lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            const uint64_t key = key_of(logits[lane], i + lane);
            if (key > keys[0])
                continue;
            keys[0] = key;
            sink(keys, count, 0);
            least = load_one(x, index_of_key(keys[0]), dtype);
        }
    }
    for (int64_t end = count - 1; end > 0; end--) {
        const uint64_t last = keys[0];
        keys[0] = keys[end];
        keys[end] = last;
        sink(keys, end, 0);
    }
}

INLINE void score_row(int64_t *numbers, double *logprobs, const struct score_query *query, const void *x, int64_t size,
                      const enum dtype dtype)
{
    const float peak = peak_of(x, 0, size, dtype).value, value = load_one(x, query->token, dtype);
    if (!isfinite(peak)) {
        numbers[0] = 1;
        logprobs[0] = NAN;
        return;
    }
    double total = 0;
    vi above = {0};
    for (int64_t start = 0; start < size; start += CHUNK)
        total += weigh_chunk(x, start, size, peak, value, &above, dtype);
    const double log_total = log(total);
    logprobs[0] = (double)value - (double)peak - log_total;
    numbers[0] = 1;
    for (int lane = 0; lane < LANES; lane++)
        numbers[0] += above[lane];
    find_top((uint64_t *)numbers + 1, query->num_top, x, size, dtype);
    for (int64_t i = 1; i <= query->num_top; i++) {
        numbers[i] = index_of_key((uint64_t)numbers[i]);
        logprobs[i] = (double)load_one(x, numbers[i], dtype) - (double)peak - log_total;
    }
}

static void score_region(struct team *team, void *argument)
{
    const struct score_plan *plan = argument;
    struct work work = start_work(team, plan->num_queries);
    for (int64_t i; take(team, &work, &i);) {
        const struct score_query *query = plan->queries + i;
        const void *x = at(plan->x, query->row * plan->stride, plan->dtype);
        int64_t *numbers = plan->numbers + query->first;
        double *logprobs = plan->logprobs + query->first;
        if (plan->dtype == BFLOAT16)
            score_row(numbers, logprobs, query, x, plan->size, BFLOAT16);
        else
            score_row(numbers, logprobs, query, x, plan->size, FLOAT32);
    }
    complete(team);
}

/* See `score_plan`. The queries' rows must lie in x, their tokens below `size`, their outcomes within the arrays. */
EXPORT int score(int64_t *numbers, double *logprobs, const struct score_query *queries, int64_t num_queries, const void *x,
                 int64_t stride, int64_t size, int dtype, int num_threads)
{
    struct score_plan plan = {queries, num_queries, x, stride, size, numbers, logprobs, (enum dtype)dtype};
    return run_team(num_threads, 1, score_region, &plan) ? OK : OUT_OF_MEMORY;
}
