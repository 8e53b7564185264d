/* Rounds weights to INT8 or INT4, see quantized_weight.h. */
#include "quantized_weight.h"

#include <float.h>
#include <math.h>

#include "linear_tiles.h"

/* WITH_CONSTANTS for the formats that weights are rounded to. */
#define OF_ROUNDED(format, dtype, call, ...)                                                                          \
    ((format) == INT8 ? WITH_DTYPE(dtype, INT8, call, __VA_ARGS__) : WITH_DTYPE(dtype, INT4, call, __VA_ARGS__))
#define BLOCK 512 /* elements of depth rounded at a time */
#define GROUP_VECTORS (GROUP / LANES)
#define SCALES_BELOW 2 /* scales tried below the one that makes the largest weight -8, in steps of the fifth digit */
#define NUM_SCALES 4
#define SMALLEST_SCALE 16 /* the smallest normal number without its last 19 bits */

/* NaN if a weight is not finite. */
INLINE float int8_scale_of(const void *weight, int64_t depth, const enum dtype dtype)
{
    vf largest = {0}, zeros = {0};
    for (int64_t k = 0; k < depth; k += LANES) {
        const vf values = load_upto(weight, k, depth - k, dtype);
        largest = vmax(largest, vmax(values, -values));
        zeros += values * 0;
    }
    return horizontal_max(largest) / INT8_MAX_MULTIPLE + horizontal_sum(zeros);
}

/* Halves round to even. */
INLINE vf round_to_integers(vf values) { return values + ROUND_TO_INTEGER - ROUND_TO_INTEGER; }

INLINE vf int8_multiples_of(vf values, float scale)
{
    /* With a scale below the normal range, quotients may be larger than any multiple. */
    return round_to_integers(
        clamp(values / splat(scale > 0 ? scale : 1.0f), -INT8_MAX_MULTIPLE, INT8_MAX_MULTIPLE));
}

INLINE int32_t bits_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Returns a group's scale and replaces its values by multiples; NaN and ones if a value is not finite. */
INLINE float int4_multiples_of(vf *values)
{
    vf most = values[0], least = -values[0];
    for (int v = 1; v < GROUP_VECTORS; v++) {
        most = vmax(most, values[v]);
        least = vmax(least, -values[v]);
    }
    const float high = horizontal_max(most), low = horizontal_max(least), largest = (high > low ? high : -low) / -8;
    /* With this factor, squared errors are of values near one, whatever the weights' magnitude. */
    const int32_t exponent = MAX(1, MIN(253, (bits_of(largest) & INT32_MAX) >> 23));
    const float factor = float_of((254 - exponent) << 23);
    const int32_t digits = ((bits_of(largest * factor) & INT32_MAX) + (1 << 18)) >> 19;
    const int32_t least_digits = MAX(digits - SCALES_BELOW, SMALLEST_SCALE);
    float scales[NUM_SCALES], errors[NUM_SCALES * GROUP_VECTORS];
    vf squares[NUM_SCALES * GROUP_VECTORS];
    const int num_sums = MAX(1, GROUP_VECTORS / 2); /* per scale */
    for (int v = 0; v < GROUP_VECTORS; v++)
        values[v] *= factor;
#pragma GCC unroll 4
    for (int i = 0; i < NUM_SCALES; i++) {
        scales[i] = float_of((least_digits + i) << 19 | (bits_of(largest) & INT32_MIN));
        const float inverse = 1 / scales[i];
        vf of_scale[GROUP_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < GROUP_VECTORS; v++) {
            const vf error = values[v] - round_to_integers(clamp(values[v] * inverse, -8, 7)) * scales[i];
            of_scale[v] = error * error;
            KEEP_IN_REGISTER(of_scale[v]); /* not fused with the sum, nor does torch */
        }
#pragma GCC unroll 4
        for (int v = 0; v < num_sums; v++)
            squares[i * num_sums + v] = of_scale[v] + of_scale[v + num_sums];
    }
    horizontal_sums(errors, squares, NUM_SCALES * num_sums);
    for (int i = 0; i < NUM_SCALES * num_sums; i += num_sums)
        for (int left = num_sums / 2; left > 0; left /= 2)
            for (int v = 0; v < left; v++)
                errors[i + v] = errors[i + 2 * v] + errors[i + 2 * v + 1];
    float least_error = errors[0], scale = scales[0];
    for (int i = 1; i < NUM_SCALES; i++) { /* without branches, which would be taken half of the time */
        const float error = errors[i * num_sums];
        scale = error < least_error ? scales[i] : scale;
        least_error = error < least_error ? error : least_error;
    }
    const bool is_finite = least_error < INFINITY;
    const float inverse = 1 / scale;
    for (int v = 0; v < GROUP_VECTORS; v++)
        values[v] = is_finite ? round_to_integers(clamp(values[v] * inverse, -8, 7)) : splat(1);
    if (!is_finite)
        return NAN;
    scale *= float_of(exponent << 23);
    return fabsf(scale) < FLT_MIN ? 0 : scale; /* bfloat16 lacks digits for smaller ones */
}

/* Loads the group of values from k on and turns them into multiples; returns their scale. */
INLINE float load_group(vf *values, const void *row, int64_t k, int64_t depth, const enum dtype dtype)
{
    for (int v = 0; v < GROUP_VECTORS; v++)
        values[v] = load_upto(row, k + v * LANES, MAX(0, depth - k - v * LANES), dtype);
    return int4_multiples_of(values);
}

/* multiples: [count], from weight[index ...]. */
INLINE void round_to_int8(int8_t *multiples, const void *weight, int64_t index, int64_t count, float scale,
                          const enum dtype dtype)
{
    for (int64_t k = 0; k < count; k += LANES) {
        const vf values = load_upto(weight, index + k, count - k, dtype);
        const vi rounded = __builtin_convertvector(int8_multiples_of(values, scale), vi);
        for (int64_t i = 0; i < MIN(LANES, count - k); i++)
            multiples[k + i] = (int8_t)rounded[i];
    }
}

INLINE void quantize_int8_panel(float *scales, int8_t *panel, const void *weight, int64_t num_outputs, int64_t depth,
                                const enum dtype dtype)
{
    const int64_t elements = int8_elements_of(dtype);
    int8_t block[BLOCK];
    for (int64_t output = 0; output < num_outputs; output++) {
        const void *row = at(weight, output * depth, dtype);
        scales[output] = int8_scale_of(row, depth, dtype);
        for (int64_t k = 0; k < depth; k += BLOCK) {
            const int64_t count = MIN(BLOCK, depth - k);
            round_to_int8(block, row, k, count, scales[output], dtype);
            for (int64_t i = 0; i < count; i++)
                panel[((k + i) / elements * LANES + output) * elements + (k + i) % elements] = block[i];
        }
    }
}

INLINE void quantize_int4_panel(uint16_t *scales, uint32_t *panel, const void *weight, int64_t num_outputs, int64_t depth,
                                const enum dtype dtype)
{
    for (int64_t output = 0; output < num_outputs; output++)
        for (int64_t k = 0; k < depth; k += GROUP) {
            vf multiples[GROUP_VECTORS];
            const float scale = load_group(multiples, at(weight, output * depth, dtype), k, depth, dtype);
            scales[k / GROUP * LANES + output] = (uint16_t)(bits_of(scale) >> 16);
            float values[GROUP];
            memcpy(values, multiples, sizeof values);
            for (int first = 0; first < GROUP; first += 8) {
                uint32_t eight = 0;
                for (int i = 0; i < 8; i++)
                    eight |= ((uint32_t)(int32_t)values[first + i] & 15) << (i % 2 * 16 + i / 2 * 4);
                panel[(k + first) / 8 * LANES + output] = eight;
            }
        }
}

INLINE void quantize_panel(float *int8_scales, char *panel, const void *weight, int64_t num_outputs, int64_t depth,
                           const enum dtype dtype, const enum weight_format format)
{
    const int64_t scale_bytes = head_bytes_of(INT4, depth);
    if (format == INT8)
        quantize_int8_panel(int8_scales, (int8_t *)panel, weight, num_outputs, depth, dtype);
    else
        quantize_int4_panel((uint16_t *)panel, (uint32_t *)(panel + scale_bytes), weight, num_outputs, depth, dtype);
}

EXPORT int64_t quantized_weight_bytes(int64_t num_outputs, int64_t depth, int format, int dtype)
{
    const int64_t scale_bytes = format == INT8 ? LANES * (int64_t)sizeof(float) : 0;
    const int64_t panel_bytes = quantized_panel_bytes_of((enum weight_format)format, depth, (enum dtype)dtype);
    return num_quantized_panels_of(num_outputs) * (scale_bytes + panel_bytes);
}

/* weight: dense [num_outputs, depth], finite; quantized: quantized_weight_bytes long. */
EXPORT int quantize_weight(void *quantized, const void *weight, int64_t num_outputs, int64_t depth, int format, int dtype,
                           int num_threads)
{
    const struct packed_linear linear = {quantized, NULL, num_outputs, depth, format};
    const int64_t panel_bytes = quantized_panel_bytes_of((enum weight_format)format, depth, (enum dtype)dtype);
    char *panels = (char *)first_quantized_panel(&linear, (enum weight_format)format);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < num_quantized_panels_of(num_outputs); panel++) {
        const int64_t output = panel * LANES, count = MAX(0, MIN(LANES, num_outputs - output));
        const void *rows = at(weight, output * depth, (enum dtype)dtype);
        char *target = panels + panel * panel_bytes;
        float *scales = (float *)quantized + output;
        memset(target, 0, (size_t)panel_bytes);
        if (format == INT8)
            memset(scales, 0, LANES * sizeof *scales);
        OF_ROUNDED(format, dtype, quantize_panel, scales, target, rows, count, depth);
    }
    return OK;
}

INLINE void round_row(void *rounded, const void *row, int64_t depth, const enum dtype dtype,
                      const enum weight_format format)
{
    const float scale = format == INT8 ? int8_scale_of(row, depth, dtype) : 0;
    for (int64_t k = 0; k < depth && format == INT8; k += LANES)
        store_upto(rounded, k, depth - k, int8_multiples_of(load_upto(row, k, depth - k, dtype), scale) * scale, dtype);
    for (int64_t k = 0; k < depth && format != INT8; k += GROUP) {
        vf values[GROUP_VECTORS];
        const float of_group = load_group(values, row, k, depth, dtype);
        for (int v = 0; v < GROUP_VECTORS; v++)
            store_upto(rounded, k + v * LANES, MAX(0, depth - k - v * LANES), values[v] * of_group, dtype);
    }
}

/* rounded, weight: dense [num_outputs, depth]. */
EXPORT int round_weight(void *rounded, const void *weight, int64_t num_outputs, int64_t depth, int format, int dtype,
                        int num_threads)
{
#pragma omp parallel for num_threads(num_threads)
    for (int64_t output = 0; output < num_outputs; output++) {
        const void *row = at(weight, output * depth, (enum dtype)dtype);
        void *target = (void *)at(rounded, output * depth, (enum dtype)dtype);
        OF_ROUNDED(format, dtype, round_row, target, row, depth);
    }
    return OK;
}

INLINE float multiple_at(const struct quantized_panel *panel, int64_t k, int64_t lane, const enum weight_format format,
                         const enum dtype dtype)
{
    if (format == INT8) {
        const int64_t elements = int8_elements_of(dtype);
        return (float)(int8_t)panel->multiples[(k / elements * LANES + lane) * elements + k % elements];
    }
    uint32_t eight;
    memcpy(&eight, panel->multiples + (k / 8 * LANES + lane) * (int64_t)sizeof eight, sizeof eight);
    const vi16 words = (vi16)((vu){0} + (eight >> k % 2 * 16 & 0xffff));
    const int zero = has_zero_points(format) ? panel->zeros[k / 2 / group_words_of(format) * LANES + lane] : 0;
    return (float)(multiples_in(words, k % 8 / 2 * 4, format)[0] - zero);
}

INLINE void read_row(void *row, const struct packed_linear *linear, int64_t output, const enum dtype dtype,
                     const enum weight_format format)
{
    const struct quantized_panel panel = quantized_panel_at(linear, format, output / LANES, dtype);
    const int64_t lane = output % LANES;
    for (int64_t first = 0; first < linear->depth; first += LANES) {
        const int64_t count = MIN(LANES, linear->depth - first);
        const float scale = format == INT8 ? ((const float *)linear->weight)[output]
                                           : load_one(panel.scales, first / 2 / group_words_of(format) * LANES + lane, BFLOAT16);
        float values[LANES];
        for (int64_t k = 0; k < count; k++)
            values[k] = multiple_at(&panel, first + k, lane, format, dtype) * scale;
        store_upto(row, first, count, load_upto(values, 0, count, FLOAT32), dtype);
    }
}

void quantized_row(void *row, const struct packed_linear *linear, int64_t output, enum dtype dtype)
{
    WITH_CONSTANTS(linear->format, dtype, read_row, row, linear, output);
}
