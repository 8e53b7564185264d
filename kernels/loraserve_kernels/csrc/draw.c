/* Draws one token from each of some rows of logits, like sampling.py's sample_reference except for rounding.
 *
 * The order by likelihood matters only at boundaries: at the end of top_k, at the end of top_p, and at the random number.
 * So tokens are put into bins by their distance from the largest logit, and only bins with a boundary are sorted.
 */
#include "draw.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#define LANE_LENGTH 64 /* tokens per lane, as in sampling.py; unrelated to LANES */
#define NUM_BINS 4096
#define VECTORS 4 /* of tokens weighed together, see vexp_within */
#define GROUP (VECTORS * LANES)
/* A weight below exp(-FURTHEST) of the largest is less than a random number can resolve. */
#define FURTHEST 60.0
#define LIGHTEST 87.0f /* exp(-LIGHTEST) is close to the smallest normal number */

/* Defines a token's weight: exp(-distance); the largest logit has distance 0. */
struct scale {
    float peak, inverse_temperature;
    float floor;    /* logits below weigh nothing; at most LIGHTEST away */
    float furthest; /* tokens further away go into no bin */
    float bins_per_distance;
};

struct token {
    uint64_t key; /* see key_of */
    float weight;
};

/* Scratch memory of one thread. */
struct drawing {
    double mass[NUM_BINS];
    int64_t count[NUM_BINS];
    struct token *tokens; /* of `bin`, the most likely first */
    int64_t bin, num_tokens;
    float *lanes;
};

/* The most likely tokens: all of the bins before `bin`, and the first `count` of `bin`. */
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

/* In [0, 1), the same number as sampling_noise.py's. */
static double uniform_of(const struct draw *draw)
{
    return (double)(splitmix64(splitmix64(draw->seed, 0), draw->position) >> 11) * 0x1p-53;
}

/* A share of a mass, always less than the mass. */
static double target_of(double uniform, double mass) { return fmin(uniform * mass, nextafter(mass, 0)); }

INLINE vf distance_of(vf x, const struct scale *scale) { return (scale->peak - x) * scale->inverse_temperature; }

/* Weights of `count` vectors of logits at these distances. */
INLINE void weigh(vf *weights, const vf *x, const vf *distances, const struct scale *scale, const int count)
{
#pragma GCC unroll 4
    for (int v = 0; v < count; v++)
        weights[v] = vmax(splat(-LIGHTEST), -distances[v]);
    vexp_within(weights, count);
#pragma GCC unroll 4
    for (int v = 0; v < count; v++)
        weights[v] = choose(x[v] >= scale->floor, weights[v], (vf){0});
}

INLINE vf weight_of(vf x, vf distance, const struct scale *scale)
{
    vf weight;
    weigh(&weight, &x, &distance, scale, 1);
    return weight;
}

INLINE void load_group(vf *values, const void *x, int64_t i, int64_t end, const enum dtype dtype)
{
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
        values[v] = load_before(x, i + v * LANES, end, dtype);
}

/* Bins of distances up to `furthest`; the largest logit is in bin 0. */
INLINE vi bins_of(vf distance, const struct scale *scale)
{
    return __builtin_convertvector(vmin(distance * scale->bins_per_distance, splat(NUM_BINS - 1)), vi);
}

/* Lowers `furthest` such that at least top_k tokens remain: at least that many groups have a token within it. */
INLINE void lower_furthest(struct scale *scale, struct drawing *drawing, int64_t top_k, const void *x, int64_t size,
                           const enum dtype dtype)
{
    memset(drawing->count, 0, sizeof drawing->count);
    for (int64_t start = 0; start < size; start += GROUP) {
        vf values[VECTORS];
        load_group(values, x, start, size, dtype);
        const vf largest = vmax(vmax(values[0], values[1]), vmax(values[2], values[3]));
        const float distance = (scale->peak - horizontal_max(largest)) * scale->inverse_temperature;
        if (distance <= scale->furthest)
            drawing->count[MIN((int64_t)(distance * scale->bins_per_distance), NUM_BINS - 1)]++;
    }
    int64_t bin = 0;
    for (int64_t found = 0; bin < NUM_BINS; bin++)
        if ((found += drawing->count[bin]) >= top_k)
            break;
    const float furthest = 1.0001f * (float)(bin + 1) / scale->bins_per_distance; /* margin for rounded products */
    if (furthest < scale->furthest) {
        scale->furthest = furthest;
        scale->bins_per_distance = NUM_BINS / furthest;
    }
}

/* Returns the weight of all tokens, including those in no bin if `needs_total`. */
INLINE double fill_bins(struct drawing *drawing, const void *x, int64_t size, const struct scale *scale,
                        bool needs_total, const enum dtype dtype)
{
    double total = 0;
    memset(drawing->mass, 0, sizeof drawing->mass);
    memset(drawing->count, 0, sizeof drawing->count);
    for (int64_t start = 0; start < size; start += GROUP) {
        vf values[VECTORS], distances[VECTORS], weights[VECTORS];
        unsigned lanes[VECTORS], all_lanes = 0;
        load_group(values, x, start, size, dtype);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            distances[v] = distance_of(values[v], scale);
            lanes[v] = lanes_of((distances[v] <= scale->furthest) & (values[v] >= scale->floor));
            all_lanes |= lanes[v];
        }
        if (!all_lanes && !needs_total)
            continue;
        weigh(weights, values, distances, scale, VECTORS);
        total += horizontal_sum((weights[0] + weights[1]) + (weights[2] + weights[3]));
        for (int v = 0; all_lanes && v < VECTORS; v++) {
            const vi bins = bins_of(distances[v], scale);
            for (; lanes[v]; lanes[v] &= lanes[v] - 1) {
                const int lane = __builtin_ctz(lanes[v]);
                drawing->mass[bins[lane]] += weights[v][lane];
                drawing->count[bins[lane]]++;
            }
        }
    }
    return total;
}

static int compare(const void *a, const void *b)
{
    const uint64_t first = ((const struct token *)a)->key, second = ((const struct token *)b)->key;
    return first < second ? -1 : first > second;
}

/* Loads and sorts the tokens of a bin. */
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

/* The top_k most likely of the tokens in bins. */
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

/* The fewest of these tokens, most likely first, that together weigh at least `mass`. */
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

/* The first token with which the running mass exceeds the target, which is less than the mass of all kept tokens. */
INLINE int64_t find_token(struct drawing *drawing, struct kept kept, double target, const void *x, int64_t size,
                          const struct scale *scale, const enum dtype dtype)
{
    double before = 0;
    int64_t bin = 0, last = 0;
    while (bin < kept.bin && before + drawing->mass[bin] <= target) {
        if (drawing->count[bin] > 0)
            last = bin; /* its last token is chosen if, after rounding, the target lies past all tokens */
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
    return index_of_key(drawing->tokens[i].key);
}

INLINE int64_t draw_of_likely(struct drawing *drawing, const struct draw *draw, const void *x, int64_t size,
                              const struct scale *scale, const enum dtype dtype)
{
    drawing->bin = -1;
    const bool has_top_k = draw->top_k > 0 && draw->top_k < size;
    struct scale near = *scale;
    if (has_top_k)
        lower_furthest(&near, drawing, draw->top_k, x, size, dtype);
    const double total = fill_bins(drawing, x, size, &near, !has_top_k && draw->top_p < 1, dtype);
    struct kept kept = {NUM_BINS, 0, total}; /* all */
    if (has_top_k)
        kept = keep_top_k(drawing, draw->top_k, x, size, &near, dtype);
    if (draw->top_p < 1)
        kept = keep_mass(drawing, kept, draw->top_p * kept.mass, x, size, &near, dtype);
    return find_token(drawing, kept, target_of(uniform_of(draw), kept.mass), x, size, &near, dtype);
}

static int64_t num_lanes_of(int64_t size) { return (size + LANE_LENGTH - 1) / LANE_LENGTH; }

/* Adds the weights of `count` vectors of tokens from i on to as many lanes; sums past the last lane are never read. */
INLINE void add_to_lanes(float *lanes, const void *x, int64_t i, int64_t size, const struct scale *scale,
                         const int count, const enum dtype dtype)
{
    vf values[VECTORS], distances[VECTORS], weights[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < count; v++) {
        values[v] = load_before(x, i + v * LANES, size, dtype);
        distances[v] = distance_of(values[v], scale);
    }
    weigh(weights, values, distances, scale, count);
#pragma GCC unroll 4
    for (int v = 0; v < count; v++)
        store(lanes, v * LANES, load(lanes, v * LANES, FLOAT32) + weights[v], FLOAT32);
}

/* Draws from all tokens, lane by lane: lane l holds tokens l, l + num_lanes, l + 2 num_lanes, ... */
INLINE int64_t draw_of_all(struct drawing *drawing, const struct draw *draw, const void *x, int64_t size,
                           const struct scale *scale, const enum dtype dtype)
{
    const int64_t num_lanes = num_lanes_of(size);
    memset(drawing->lanes, 0, (size_t)(num_lanes + LANES) * sizeof *drawing->lanes);
    for (int64_t start = 0; start < size; start += num_lanes) {
        int64_t lane = 0;
        for (; lane + (VECTORS - 1) * LANES < num_lanes; lane += GROUP)
            add_to_lanes(drawing->lanes + lane, x, start + lane, size, scale, VECTORS, dtype);
        for (; lane < num_lanes; lane += LANES)
            add_to_lanes(drawing->lanes + lane, x, start + lane, size, scale, 1, dtype);
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

/* peak: the largest logit. */
INLINE int64_t draw_row(struct drawing *drawing, const struct draw *draw, const void *x, int64_t size, float peak,
                        const enum dtype dtype)
{
    if (!isfinite(peak))
        return -1;
    const bool has_top_k = draw->top_k > 0 && draw->top_k < size;
    /* Without top_k, the tokens beyond `furthest` weigh less than half of what top_p leaves out. */
    const bool is_cut = !has_top_k && draw->top_p < 1;
    const double furthest = is_cut ? fmin(FURTHEST, log(2 * (double)size / (1 - draw->top_p))) : FURTHEST;
    const double floor = (double)peak + draw->temperature * fmax(draw->log_min_p, -LIGHTEST);
    const struct scale scale = {.peak = peak, .inverse_temperature = (float)(1 / draw->temperature),
                                .floor = (float)fmax(floor, -FLT_MAX), /* leaves out -INFINITY */
                                .furthest = (float)furthest, .bins_per_distance = (float)(NUM_BINS / furthest)};
    if (has_top_k || draw->top_p < 1)
        return draw_of_likely(drawing, draw, x, size, &scale, dtype);
    return draw_of_all(drawing, draw, x, size, &scale, dtype);
}

/* Lays out one thread's scratch in `memory`; only computes its size if that is NULL. */
static struct drawing *lay_out(char *memory, int64_t size, size_t *used)
{
    *used = 0;
    struct drawing *drawing = reserve(memory, used, sizeof *drawing);
    float *lanes = reserve(memory, used, (size_t)(num_lanes_of(size) + LANES) * sizeof *lanes);
    struct token *tokens = reserve(memory, used, (size_t)size * sizeof *tokens);
    if (memory) {
        drawing->lanes = lanes;
        drawing->tokens = tokens;
    }
    return drawing;
}

size_t draw_scratch(int64_t size)
{
    size_t used;
    lay_out(NULL, size, &used);
    return used;
}

int64_t draw_one(const struct draw *draw, const float *x, int64_t size, float peak, char *scratch)
{
    size_t used;
    return draw_row(lay_out(scratch, size, &used), draw, x, size, peak, FLOAT32);
}

void draw_stage(struct team *team, const struct draw_plan *plan)
{
    const int64_t num_peaks = num_peaks_of(plan->size);
    struct work work = start_work(team, plan->num_draws);
    for (int64_t i; take(team, &work, &i);) {
        const struct draw *draw = plan->draws + i;
        const void *x = at(plan->x, draw->row * plan->stride, plan->dtype);
        const float peak = plan->peaks ? largest_peak(plan->peaks + draw->row * num_peaks, num_peaks).value
                                       : peak_of(x, 0, plan->size, plan->dtype).value;
        size_t used;
        char *scratch = plan->scratch + (size_t)team->thread * draw_scratch(plan->size);
        struct drawing *drawing = lay_out(scratch, plan->size, &used); /* not before an item is taken: see team.h */
        plan->chosen[i] = plan->dtype == BFLOAT16 ? draw_row(drawing, draw, x, plan->size, peak, BFLOAT16)
                                                  : draw_row(drawing, draw, x, plan->size, peak, FLOAT32);
    }
}

static void draw_region(struct team *team, void *plan)
{
    draw_stage(team, plan);
    complete(team);
}

/* See `draw_plan`. */
EXPORT int draw(int64_t *chosen, const struct draw *draws, int64_t num_draws, const void *x, int64_t stride,
                int64_t size, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    char *memory = grow_scratch(&scratch, &capacity, (size_t)num_threads * draw_scratch(size));
    if (!memory)
        return OUT_OF_MEMORY;
    struct draw_plan plan = {draws, num_draws, x, stride, size, NULL, chosen, memory, (enum dtype)dtype};
    return run_team(num_threads, 1, draw_region, &plan) ? OK : OUT_OF_MEMORY;
}
