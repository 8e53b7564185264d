/* Draws one token for each of some rows of logits, as sampling.py's sample_reference does but for rounding.
 *
 * The most likely tokens first are needed only where something ends: at top_k, at top_p, and at the random number. So
 * tokens are dealt to bins by their distance from the largest logit, and only the bins where that is are sorted.
 */
#include <math.h>
#include <stdlib.h>

#include "argmax.h"

#define LANE_LENGTH 64 /* tokens of a lane, as sampling.py's; not LANES */
#define NUM_BINS 4096
#define CHUNK (8 * LANES) /* tokens whose weights are added up in float32 */
#define GROUP (4 * LANES)
/* Of the weight of the largest logit, what is lighter than exp(-FURTHEST) is less than a random number can tell. */
#define FURTHEST 60.0

/* How one row is drawn. */
struct draw {
    double temperature, top_p, log_min_p; /* 1: all; -INFINITY: no minimum */
    uint64_t seed, position;
    int64_t row, top_k; /* top_k: 0: all */
};

/* What a token weighs: exp(-distance), with the largest logit at distance 0. */
struct scale {
    float peak, inverse_temperature;
    float floor;    /* what is below weighs nothing */
    float furthest; /* what is further goes to no bin */
    float bins_per_distance;
};

struct token {
    uint64_t key; /* ascends from the largest logit, equal ones by id */
    float weight;
};

/* Scratch memory of one thread. */
struct drawing {
    double mass[NUM_BINS];
    int64_t count[NUM_BINS];
    struct token *tokens; /* of one bin, the most likely first */
    int64_t bin, num_tokens;
    float *lanes;
};

/* The most likely tokens: those of all bins before this one, and its first ones. */
struct kept {
    int64_t bin, count;
    double mass;
};

static uint64_t splitmix64(uint64_t state, uint64_t index)
{
    uint64_t mixed = state + (index + 1) * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return mixed ^ (mixed >> 31);
}

/* In [0, 1): sampling_noise.py's. */
static double uniform_of(const struct draw *draw)
{
    return (double)(splitmix64(splitmix64(draw->seed, 0), draw->position) >> 11) * 0x1p-53;
}

/* A share of a mass, less than it. */
static double target_of(double uniform, double mass) { return fmin(uniform * mass, nextafter(mass, 0)); }

INLINE vf distance_of(vf x, const struct scale *scale) { return (scale->peak - x) * scale->inverse_temperature; }

INLINE vf weight_of(vf x, vf distance, const struct scale *scale)
{
    return choose(x >= scale->floor, vexp(-distance), (vf){0});
}

/* Elements i to i + LANES; those from `end` on are -INFINITY. */
INLINE vf load_before(const void *x, int64_t i, int64_t end, const enum dtype dtype)
{
    if (i + LANES <= end)
        return load(x, i, dtype);
    float values[LANES];
    const vf loaded = load_partial(x, i, end - i, dtype);
    memcpy(values, &loaded, sizeof values);
    for (int64_t lane = end - i; lane < LANES; lane++)
        values[lane] = -INFINITY;
    return load(values, 0, FLOAT32);
}

INLINE double sum_of(vf values)
{
    float lanes[LANES];
    double sum = 0;
    memcpy(lanes, &values, sizeof lanes);
    for (int i = 0; i < LANES; i++)
        sum += lanes[i];
    return sum;
}

/* Of distances up to the furthest: descends as logits do. */
INLINE vi bins_of(vf distance, const struct scale *scale)
{
    return __builtin_convertvector(vmin(distance * scale->bins_per_distance, splat(NUM_BINS - 1)), vi);
}

/* Brings the furthest as near as leaves top_k tokens: as many groups of tokens have one that is no further. */
INLINE void bring_nearer(struct scale *scale, struct drawing *drawing, int64_t top_k, const void *x, int64_t size,
                         const enum dtype dtype)
{
    memset(drawing->count, 0, sizeof drawing->count);
    for (int64_t start = 0; start < size; start += GROUP) {
        vf largest = load_before(x, start, size, dtype);
        for (int64_t i = start + LANES; i < MIN(size, start + GROUP); i += LANES)
            largest = vmax(largest, load_before(x, i, size, dtype));
        const float distance = (scale->peak - largest_of(largest)) * scale->inverse_temperature;
        if (distance <= scale->furthest)
            drawing->count[MIN((int64_t)(distance * scale->bins_per_distance), NUM_BINS - 1)]++;
    }
    int64_t bin = 0;
    for (int64_t found = 0; bin < NUM_BINS; bin++)
        if ((found += drawing->count[bin]) >= top_k)
            break;
    const float furthest = 1.0001f * (float)(bin + 1) / scale->bins_per_distance; /* products are rounded */
    if (furthest < scale->furthest) {
        scale->furthest = furthest;
        scale->bins_per_distance = NUM_BINS / furthest;
    }
}

/* Returns the weight of all tokens, also of those in no bin, where that is needed. */
INLINE double fill_bins(struct drawing *drawing, const void *x, int64_t size, const struct scale *scale,
                        bool needs_total, const enum dtype dtype)
{
    double total = 0;
    memset(drawing->mass, 0, sizeof drawing->mass);
    memset(drawing->count, 0, sizeof drawing->count);
    for (int64_t start = 0; start < size; start += CHUNK) {
        vf sum = {0};
        for (int64_t i = start; i < MIN(size, start + CHUNK); i += LANES) {
            const vf value = load_before(x, i, size, dtype), distance = distance_of(value, scale);
            unsigned lanes = lanes_of((distance <= scale->furthest) & (value >= scale->floor));
            if (!lanes && !needs_total)
                continue;
            const vf weight = weight_of(value, distance, scale);
            sum += weight;
            if (!lanes)
                continue;
            const vi bins = bins_of(distance, scale);
            for (; lanes; lanes &= lanes - 1) {
                const int lane = __builtin_ctz(lanes);
                drawing->mass[bins[lane]] += weight[lane];
                drawing->count[bins[lane]]++;
            }
        }
        total += sum_of(sum);
    }
    return total;
}

static int compare(const void *a, const void *b)
{
    const uint64_t first = ((const struct token *)a)->key, second = ((const struct token *)b)->key;
    return first < second ? -1 : first > second;
}

static uint64_t key_of(float value, int64_t id)
{
    const float positive_zero = value + 0.0f; /* -0 is 0 */
    uint32_t bits;
    memcpy(&bits, &positive_zero, sizeof bits);
    return (uint64_t)(bits >> 31 ? bits : ~bits & INT32_MAX) << 32 | (uint64_t)id;
}

/* The tokens of a bin, sorted. */
INLINE void open_bin(struct drawing *drawing, int64_t bin, const void *x, int64_t size, const struct scale *scale,
                     const enum dtype dtype)
{
    int64_t count = 0;
    bool is_sorted = true;
    if (drawing->bin == bin)
        return;
    for (int64_t i = 0; i < size && count < drawing->count[bin]; i += LANES) {
        const vf value = load_before(x, i, size, dtype), distance = distance_of(value, scale);
        const vi is_here = (bins_of(distance, scale) == (int32_t)bin) & (distance <= scale->furthest);
        unsigned lanes = lanes_of(is_here & (value >= scale->floor));
        if (!lanes)
            continue;
        const vf weight = weight_of(value, distance, scale);
        for (; lanes; lanes &= lanes - 1, count++) {
            const int lane = __builtin_ctz(lanes);
            drawing->tokens[count] = (struct token){key_of(value[lane], i + lane), weight[lane]};
            is_sorted = is_sorted && (count == 0 || drawing->tokens[count - 1].key < drawing->tokens[count].key);
        }
    }
    if (!is_sorted)
        qsort(drawing->tokens, (size_t)count, sizeof *drawing->tokens, compare);
    drawing->bin = bin;
    drawing->num_tokens = count;
}

/* The first top_k of those in bins. */
INLINE struct kept keep_top_k(struct drawing *drawing, int64_t top_k, const void *x, int64_t size,
                              const struct scale *scale, const enum dtype dtype)
{
    struct kept kept = {0, 0, 0};
    int64_t left = top_k;
    for (; kept.bin < NUM_BINS && drawing->count[kept.bin] <= left; kept.bin++) {
        left -= drawing->count[kept.bin];
        kept.mass += drawing->mass[kept.bin];
    }
    if (kept.bin < NUM_BINS && left > 0) {
        open_bin(drawing, kept.bin, x, size, scale, dtype);
        for (; kept.count < left; kept.count++)
            kept.mass += drawing->tokens[kept.count].weight;
    }
    return kept;
}

/* Of those the fewest, the most likely first, that weigh `mass` together. */
INLINE struct kept keep_mass(struct drawing *drawing, struct kept all, double mass, const void *x, int64_t size,
                             const struct scale *scale, const enum dtype dtype)
{
    struct kept kept = {0, 0, 0};
    for (; kept.bin < all.bin && kept.mass + drawing->mass[kept.bin] < mass; kept.bin++)
        kept.mass += drawing->mass[kept.bin];
    if (kept.bin == NUM_BINS)
        return all;
    open_bin(drawing, kept.bin, x, size, scale, dtype);
    const int64_t count = kept.bin == all.bin ? all.count : drawing->num_tokens;
    for (; kept.count < count && (kept.mass < mass || kept.mass == 0); kept.count++)
        kept.mass += drawing->tokens[kept.count].weight;
    return kept;
}

/* The first token with which the mass so far exceeds the target. That is less than all that is kept. */
INLINE int64_t find_token(struct drawing *drawing, struct kept kept, double target, const void *x, int64_t size,
                          const struct scale *scale, const enum dtype dtype)
{
    double before = 0;
    int64_t bin = 0, last = 0;
    while (bin < kept.bin && before + drawing->mass[bin] <= target) {
        if (drawing->count[bin] > 0)
            last = bin; /* its last token is the one, should the target lie behind all, as sums are rounded */
        before += drawing->mass[bin++];
    }
    if (bin == NUM_BINS || (bin == kept.bin && kept.count == 0))
        bin = last, before = -INFINITY;
    open_bin(drawing, bin, x, size, scale, dtype);
    const int64_t count = bin == kept.bin ? kept.count : drawing->num_tokens;
    int64_t i = 0;
    for (; i < count - 1; i++) {
        before += drawing->tokens[i].weight;
        if (before > target)
            break;
    }
    return (int64_t)(drawing->tokens[i].key & UINT32_MAX);
}

INLINE int64_t draw_of_likely(struct drawing *drawing, const struct draw *draw, const void *x, int64_t size,
                              const struct scale *scale, const enum dtype dtype)
{
    drawing->bin = -1;
    const bool has_top_k = draw->top_k > 0 && draw->top_k < size;
    struct scale near = *scale;
    if (has_top_k)
        bring_nearer(&near, drawing, draw->top_k, x, size, dtype);
    const double total = fill_bins(drawing, x, size, &near, !has_top_k && draw->top_p < 1, dtype);
    struct kept kept = keep_top_k(drawing, has_top_k ? draw->top_k : size, x, size, &near, dtype);
    if (draw->top_p < 1)
        kept = keep_mass(drawing, kept, draw->top_p * (has_top_k ? kept.mass : total), x, size, &near, dtype);
    return find_token(drawing, kept, target_of(uniform_of(draw), kept.mass), x, size, &near, dtype);
}

/* Over all tokens, lane by lane: lane l holds tokens l, l + num_lanes, l + 2 num_lanes, ... */
INLINE int64_t draw_of_all(struct drawing *drawing, const struct draw *draw, const void *x, int64_t size,
                           const struct scale *scale, const enum dtype dtype)
{
    const int64_t num_lanes = (size + LANE_LENGTH - 1) / LANE_LENGTH;
    memset(drawing->lanes, 0, (size_t)(num_lanes + LANES) * sizeof *drawing->lanes);
    for (int64_t start = 0; start < size; start += num_lanes)
        for (int64_t lane = 0; lane < num_lanes; lane += LANES) {
            const vf values = load_before(x, start + lane, MAX(start + lane, MIN(size, start + num_lanes)), dtype);
            const vf weights = weight_of(values, distance_of(values, scale), scale);
            store(drawing->lanes, lane, load(drawing->lanes, lane, FLOAT32) + weights, FLOAT32);
        }
    double total = 0, before = 0;
    for (int64_t lane = 0; lane < num_lanes; lane++)
        total += drawing->lanes[lane];
    const double target = target_of(uniform_of(draw), total);
    int64_t lane = 0;
    while (before + drawing->lanes[lane] <= target)
        before += drawing->lanes[lane++];
    double weights[LANE_LENGTH], of_lane = 0;
    for (int64_t i = 0; i < LANE_LENGTH; i++) {
        const int64_t id = lane + i * num_lanes;
        const vf value = splat(id < size ? load_one(x, id, dtype) : -INFINITY);
        weights[i] = weight_of(value, distance_of(value, scale), scale)[0];
        of_lane += weights[i];
    }
    const double inner = target_of((target - before) / drawing->lanes[lane], of_lane);
    int64_t place = 0;
    for (double sum = weights[0]; sum <= inner; sum += weights[place])
        place++;
    return lane + place * num_lanes;
}

INLINE int64_t draw_row(struct drawing *drawing, const struct draw *draw, const void *x, int64_t size,
                        const enum dtype dtype)
{
    const float peak = peak_of(x, 0, size, dtype).value;
    if (!isfinite(peak))
        return -1;
    const bool has_top_k = draw->top_k > 0 && draw->top_k < size;
    /* Without top_k, what is lighter than that weighs less than half of what top_p leaves out. */
    const bool is_cut = !has_top_k && draw->top_p < 1;
    const double furthest = is_cut ? fmin(FURTHEST, log(2 * (double)size / (1 - draw->top_p))) : FURTHEST;
    const struct scale scale = {.peak = peak, .inverse_temperature = (float)(1 / draw->temperature),
                                .floor = (float)((double)peak + draw->temperature * draw->log_min_p),
                                .furthest = (float)furthest, .bins_per_distance = (float)(NUM_BINS / furthest)};
    if (has_top_k || draw->top_p < 1)
        return draw_of_likely(drawing, draw, x, size, &scale, dtype);
    return draw_of_all(drawing, draw, x, size, &scale, dtype);
}

struct draw_call {
    const struct draw *draws;
    int64_t num_draws;
    const void *x;
    int64_t stride, size, *chosen;
    char *scratch;
    size_t thread_bytes;
    enum dtype dtype;
};

static void draw_region(struct team *team, void *argument)
{
    const struct draw_call *call = argument;
    char *memory = call->scratch + (size_t)team->thread * call->thread_bytes;
    size_t used = 0;
    struct drawing *drawing = reserve(memory, &used, sizeof *drawing);
    drawing->lanes = reserve(memory, &used, (size_t)(call->size / LANE_LENGTH + 1 + LANES) * sizeof *drawing->lanes);
    drawing->tokens = reserve(memory, &used, (size_t)call->size * sizeof *drawing->tokens);
    struct work work = start_work(team, call->num_draws);
    for (int64_t i; take(team, &work, &i);) {
        const struct draw *draw = call->draws + i;
        const void *x = at(call->x, draw->row * call->stride, call->dtype);
        call->chosen[i] = call->dtype == BFLOAT16 ? draw_row(drawing, draw, x, call->size, BFLOAT16)
                                                  : draw_row(drawing, draw, x, call->size, FLOAT32);
    }
    complete(team);
}

/* chosen: a token id for each draw, -1 where the row's largest logit is not finite. size: logits of a row. Stride in
 * elements; the draws' rows must lie in x. */
EXPORT int draw(int64_t *chosen, const struct draw *draws, int64_t num_draws, const void *x, int64_t stride,
                int64_t size, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    size_t thread_bytes = 0;
    reserve(NULL, &thread_bytes, sizeof(struct drawing));
    reserve(NULL, &thread_bytes, (size_t)(size / LANE_LENGTH + 1 + LANES) * sizeof(float));
    reserve(NULL, &thread_bytes, (size_t)size * sizeof(struct token));
    char *memory = grow_scratch(&scratch, &capacity, (size_t)num_threads * thread_bytes);
    if (!memory)
        return OUT_OF_MEMORY;
    struct draw_call call = {draws, num_draws, x, stride, size, chosen, memory, thread_bytes, (enum dtype)dtype};
    return run_team(num_threads, 1, draw_region, &call) ? OK : OUT_OF_MEMORY;
}
