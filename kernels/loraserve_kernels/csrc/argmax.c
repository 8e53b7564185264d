/* The first index of each row's largest element. */
#include "argmax.h"

#define PARALLEL_ELEMENTS (512 << 10)
#define CHUNK (32 * LANES) /* elements between comparisons with the largest so far */
#define PART (4 * CHUNK)   /* elements of a row in one item of work */

INLINE struct peak find_peak(const void *x, int64_t start, int64_t end, const enum dtype dtype)
{
    struct peak peak = {-INFINITY, start};
    int64_t next = start;
    vi nans = {0};
    for (; next + CHUNK <= end; next += CHUNK) {
        vf largest[4];
        for (int v = 0; v < 4; v++)
            largest[v] = splat(-INFINITY);
        for (int64_t i = next; i < next + CHUNK; i += 4 * LANES)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                const vf value = load(x, i + v * LANES, dtype);
                nans |= value != value;
                largest[v] = vmax(value, largest[v]);
            }
        const float of_chunk = horizontal_max(vmax(vmax(largest[0], largest[1]), vmax(largest[2], largest[3])));
        if (of_chunk > peak.value)
            peak = (struct peak){of_chunk, next};
    }
    bool has_nan = false;
    for (int i = 0; i < LANES; i++)
        has_nan = has_nan || nans[i] != 0;
    for (; next < end; next++) {
        const float value = load_one(x, next, dtype);
        has_nan = has_nan || value != value;
        if (value > peak.value)
            peak = (struct peak){value, next};
    }
    return has_nan ? (struct peak){NAN, start} : peak;
}

struct peak peak_of(const void *x, int64_t start, int64_t end, enum dtype dtype)
{
    return dtype == BFLOAT16 ? find_peak(x, start, end, BFLOAT16) : find_peak(x, start, end, FLOAT32);
}

int64_t num_peaks_of(int64_t size) { return (size + PART - 1) / PART; }

/* Items are ordered by column, so that a thread mostly reads columns that it has computed itself. */
void argmax_stage(struct team *team, struct peak *peaks, const void *x, int64_t stride, int64_t num_rows, int64_t size,
                  enum dtype dtype)
{
    const int64_t num_peaks = num_peaks_of(size);
    struct work work = start_work(team, num_peaks * num_rows);
    for (int64_t item; take(team, &work, &item);) {
        const int64_t part = item / num_rows, row = item % num_rows, start = part * PART;
        peaks[row * num_peaks + part] = peak_of(at(x, row * stride, dtype), start, MIN(size, start + PART), dtype);
    }
}

struct peak largest_peak(const struct peak *peaks, int64_t num_peaks)
{
    struct peak best = peaks[0];
    for (int64_t i = 1; i < num_peaks && !isnan(best.value); i++)
        if (isnan(peaks[i].value) || peaks[i].value > best.value)
            best = peaks[i];
    return best;
}

int64_t index_of_largest(const struct peak *peaks, int64_t num_peaks, const void *x, enum dtype dtype)
{
    const struct peak best = largest_peak(peaks, num_peaks);
    int64_t i = best.start;
    while (isnan(best.value) ? !isnan(load_one(x, i, dtype)) : load_one(x, i, dtype) != best.value)
        i++;
    return isfinite(best.value) ? i : ~i;
}

struct argmax_call {
    int64_t *best;
    const void *x;
    int64_t stride, num_rows, size;
    enum dtype dtype;
};

static void argmax_region(struct team *team, void *argument)
{
    const struct argmax_call *call = argument;
    struct work work = start_work(team, call->num_rows);
    for (int64_t row; take(team, &work, &row);) {
        const void *values = at(call->x, row * call->stride, call->dtype);
        const struct peak peak = peak_of(values, 0, call->size, call->dtype);
        call->best[row] = index_of_largest(&peak, 1, values, call->dtype);
    }
}

EXPORT int argmax(int64_t *best, const void *x, int64_t stride, int64_t num_rows, int64_t size, int dtype,
                  int num_threads)
{
    struct argmax_call call = {best, x, stride, num_rows, size, (enum dtype)dtype};
    if (num_rows * size <= PARALLEL_ELEMENTS)
        num_threads = 1;
    return run_beside(num_threads, 1, argmax_region, &call) ? OK : OUT_OF_MEMORY;
}
