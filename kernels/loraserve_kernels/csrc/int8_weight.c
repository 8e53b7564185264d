/* Rounding weights to eight bits, see int8_weight.h. */
#include "int8_weight.h"

#include "linear_tiles.h"

#define BLOCK 512 /* elements of depth rounded at a time */

INLINE float scale_of(const void *weight, int64_t depth, const enum dtype dtype)
{
    vf largest = {0};
    for (int64_t k = 0; k < depth; k += LANES) {
        const vf values = load_upto(weight, k, depth - k, dtype);
        largest = vmax(largest, vmax(values, -values));
    }
    return horizontal_max(largest) / INT8_MAX_MULTIPLE;
}

/* Halves go to the even multiple. */
INLINE vf multiples_of(vf values, float scale)
{
    const vf round_to_integer = splat(12582912.0f); /* 1.5 * 2^23 */
    /* Of a scale below the normal range quotients may be larger than any multiple there is. */
    const vf quotients = clamp(values / splat(scale > 0 ? scale : 1.0f), -INT8_MAX_MULTIPLE, INT8_MAX_MULTIPLE);
    return quotients + round_to_integer - round_to_integer;
}

/* multiples: [count] of weight[index ...]. */
INLINE void round_to_multiples(int8_t *multiples, const void *weight, int64_t index, int64_t count, float scale,
                               const enum dtype dtype)
{
    for (int64_t k = 0; k < count; k += LANES) {
        const vf values = load_upto(weight, index + k, count - k, dtype);
        const vi rounded = __builtin_convertvector(multiples_of(values, scale), vi);
        for (int64_t i = 0; i < MIN(LANES, count - k); i++)
            multiples[k + i] = (int8_t)rounded[i];
    }
}

INLINE void quantize_panel(float *scales, int8_t *panel, const void *weight, int64_t num_outputs, int64_t depth,
                           const enum dtype dtype)
{
    const int64_t elements = int8_elements_of(dtype);
    int8_t block[BLOCK];
    for (int64_t output = 0; output < LANES; output++) {
        const void *row = at(weight, output * depth, dtype);
        scales[output] = output < num_outputs ? scale_of(row, depth, dtype) : 0;
        for (int64_t k = 0; k < depth && output < num_outputs; k += BLOCK) {
            const int64_t count = MIN(BLOCK, depth - k);
            round_to_multiples(block, row, k, count, scales[output], dtype);
            for (int64_t i = 0; i < count; i++)
                panel[((k + i) / elements * LANES + output) * elements + (k + i) % elements] = block[i];
        }
    }
}

EXPORT int64_t int8_weight_bytes(int64_t num_outputs, int64_t depth, int dtype)
{
    const int64_t panel_bytes = int8_panel_bytes_of(depth, (enum dtype)dtype);
    return num_int8_panels_of(num_outputs) * (LANES * (int64_t)sizeof(float) + panel_bytes);
}

/* weight: dense [num_outputs, depth], finite; quantized: of int8_weight_bytes. */
EXPORT int quantize_weight(void *quantized, const void *weight, int64_t num_outputs, int64_t depth, int dtype,
                           int num_threads)
{
    const int64_t num_panels = num_int8_panels_of(num_outputs);
    const int64_t panel_bytes = int8_panel_bytes_of(depth, (enum dtype)dtype);
    float *scales = quantized;
    int8_t *panels = (int8_t *)(scales + num_panels * LANES);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < num_panels; panel++) {
        const int64_t output = panel * LANES, count = MAX(0, MIN(LANES, num_outputs - output));
        const void *rows = at(weight, output * depth, (enum dtype)dtype);
        int8_t *target = panels + panel * panel_bytes;
        memset(target, 0, (size_t)panel_bytes);
        if (dtype == BFLOAT16)
            quantize_panel(scales + output, target, rows, count, depth, BFLOAT16);
        else
            quantize_panel(scales + output, target, rows, count, depth, FLOAT32);
    }
    return OK;
}

INLINE void round_row(void *rounded, const void *row, int64_t depth, const enum dtype dtype)
{
    const float scale = scale_of(row, depth, dtype);
    for (int64_t k = 0; k < depth; k += LANES)
        store_upto(rounded, k, depth - k, multiples_of(load_upto(row, k, depth - k, dtype), scale) * scale, dtype);
}

/* rounded, weight: dense [num_outputs, depth]. */
EXPORT int round_weight(void *rounded, const void *weight, int64_t num_outputs, int64_t depth, int dtype, int num_threads)
{
#pragma omp parallel for num_threads(num_threads)
    for (int64_t output = 0; output < num_outputs; output++) {
        const void *row = at(weight, output * depth, (enum dtype)dtype);
        void *target = (void *)at(rounded, output * depth, (enum dtype)dtype);
        if (dtype == BFLOAT16)
            round_row(target, row, depth, BFLOAT16);
        else
            round_row(target, row, depth, FLOAT32);
    }
    return OK;
}

INLINE void read_row(void *row, const struct packed_linear *linear, int64_t output, const enum dtype dtype)
{
    const int64_t elements = int8_elements_of(dtype);
    const struct int8_panel panel = int8_panel_at(linear, output / LANES, dtype);
    const float scale = ((const float *)linear->weight)[output];
    float values[LANES];
    for (int64_t first = 0; first < linear->depth; first += LANES) {
        const int64_t count = MIN(LANES, linear->depth - first);
        for (int64_t k = first; k < first + count; k++)
            values[k - first] =
                (float)panel.multiples[(k / elements * LANES + output % LANES) * elements + k % elements] * scale;
        store_upto(row, first, count, load_upto(values, 0, count, FLOAT32), dtype);
    }
}

void int8_row(void *row, const struct packed_linear *linear, int64_t output, enum dtype dtype)
{
    if (dtype == BFLOAT16)
        read_row(row, linear, output, BFLOAT16);
    else
        read_row(row, linear, output, FLOAT32);
}
