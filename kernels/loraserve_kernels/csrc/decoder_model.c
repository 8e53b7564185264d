/* A whole model of decoder layers: embedding, layers, norm and lm_head of the sampled rows.
 *
 * The operations around the layers are small, but each one called from Python takes 50 to 120 us in a decode step, whose
 * weights have driven all code from the caches.
 */
#include "decoder_layer.h"
#include "packed_linear.h"
#include "row_ops.h"

#define PARALLEL_ELEMENTS (64 << 10)

/* What stays the same from step to step. */
struct decoder_model {
    const struct decoder_layer *const *layers;
    int64_t num_layers, hidden_size;
    const void *embedding; /* dense [vocab_size, hidden_size] */
    int64_t vocab_size;
    const void *cosine, *sine; /* dense [num_positions, rotary_dim] */
    int64_t num_positions, rotary_dim;
    const void *norm; /* weight */
    struct packed_linear head;
    float eps;
};

struct model_step {
    struct layer_step layers;             /* but cosine and sine; wanted_rows are those that are sampled */
    const int64_t *token_ids, *positions; /* [num_rows] */
};

static bool are_below(const int64_t *values, int64_t count, int64_t end)
{
    for (int64_t i = 0; i < count; i++)
        if (values[i] < 0 || values[i] >= end)
            return false;
    return true;
}

/* Ascending, as decoder_layers wants them. */
static bool are_rows(const int64_t *values, int64_t count, int64_t num_rows)
{
    for (int64_t i = 1; i < count; i++)
        if (values[i] <= values[i - 1])
            return false;
    return are_below(values, count, num_rows);
}

static void gather(void *rows, const void *table, const int64_t *ids, int64_t count, size_t row_bytes, int num_threads)
{
#pragma omp parallel for num_threads(num_threads) if (count * (int64_t)row_bytes > 2 * PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i++)
        memcpy((char *)rows + (size_t)i * row_bytes, (const char *)table + (size_t)ids[i] * row_bytes, row_bytes);
}

/* hidden: [num_sampled, hidden_size], what lm_head is given; logits: [num_sampled, num_outputs]; both dense. Nothing is
 * changed when another status than OK is returned. */
EXPORT int decoder_model(const struct decoder_model *model, const struct model_step *step, void *hidden, void *logits,
                         int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const int64_t num_rows = step->layers.num_rows, num_sampled = step->layers.num_wanted;
    const int64_t hidden_size = model->hidden_size;
    if (!are_below(step->token_ids, num_rows, model->vocab_size) ||
        !are_below(step->positions, num_rows, model->num_positions) ||
        !are_rows(step->layers.wanted_rows, num_sampled, num_rows))
        return BAD_TOKEN;
    const size_t row_bytes = (size_t)hidden_size * size_of((enum dtype)dtype);
    const size_t angle_bytes = (size_t)model->rotary_dim * size_of((enum dtype)dtype);
    char *x = grow_scratch(&scratch, &capacity, (size_t)num_rows * 2 * (row_bytes + angle_bytes));
    if (!x)
        return OUT_OF_MEMORY;
    char *out = x + (size_t)num_rows * row_bytes, *cosine = out + (size_t)num_rows * row_bytes;
    char *sine = cosine + (size_t)num_rows * angle_bytes;
    gather(x, model->embedding, step->token_ids, num_rows, row_bytes, num_threads);
    gather(cosine, model->cosine, step->positions, num_rows, angle_bytes, num_threads);
    gather(sine, model->sine, step->positions, num_rows, angle_bytes, num_threads);
    struct layer_step layers = step->layers;
    layers.cosine = cosine;
    layers.sine = sine;
    layers.rotary_dim = model->rotary_dim;
    const int status = decoder_layers(model->layers, model->num_layers, &layers, x, out, dtype, num_threads);
    if (status != OK)
        return status;
#pragma omp parallel for num_threads(num_threads) if (num_sampled * hidden_size > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < num_sampled; i++)
        rms_norm_row((char *)hidden + (size_t)i * row_bytes, out + (size_t)i * row_bytes, model->norm, hidden_size,
                     model->eps, (enum dtype)dtype);
    return packed_linear(&model->head, logits, model->head.num_outputs, hidden, hidden_size, num_sampled, dtype,
                         num_threads);
}
