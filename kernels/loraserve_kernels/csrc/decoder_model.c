/* A whole model of decoder layers: embedding, layers, norm and lm_head of the sampled rows.
 *
 * The operations around the layers are small, but each one called from Python takes 50 to 120 us in a decode step, whose
 * weights have driven all code from the caches.
 */
#include "decoder_layer.h"
#include "packed_linear.h"
#include "row_ops.h"

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

#if LANES == 16 /* as packed_linear.c */

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

#define MODEL_PIECES 4 /* of work around the layers */

/* What is to be done for one step. */
struct model_call {
    const struct decoder_model *model;
    const struct model_step *step;
    struct layers_plan layers;
    char *x, *out, *cosine, *sine;
    void *hidden, *logits;
    char *linear_scratch;
    size_t row_bytes, angle_bytes;
    enum dtype dtype;
};

static void copy_row(char *rows, int64_t row, const void *table, int64_t id, size_t row_bytes)
{
    memcpy(rows + (size_t)row * row_bytes, (const char *)table + (size_t)id * row_bytes, row_bytes);
}

static void model_region(struct team *team, void *argument)
{
    const struct model_call *call = argument;
    const struct decoder_model *model = call->model;
    const struct model_step *step = call->step;
    const int64_t num_sampled = step->layers.num_wanted;
    int64_t row;
    struct work gathering = start_work(team, step->layers.num_rows);
    while (take(team, &gathering, &row)) {
        copy_row(call->x, row, model->embedding, step->token_ids[row], call->row_bytes);
        copy_row(call->cosine, row, model->cosine, step->positions[row], call->angle_bytes);
        copy_row(call->sine, row, model->sine, step->positions[row], call->angle_bytes);
    }
    complete(team);
    layers_stage(team, &call->layers);
    struct work norming = start_work(team, num_sampled);
    while (take(team, &norming, &row))
        rms_norm_row((char *)call->hidden + (size_t)row * call->row_bytes, call->out + (size_t)row * call->row_bytes,
                     model->norm, model->hidden_size, model->eps, call->dtype);
    complete(team);
    linear_stage(team, &model->head, call->logits, model->head.num_outputs, call->hidden, model->hidden_size, num_sampled,
                 call->linear_scratch, call->dtype);
    complete(team);
}

/* hidden: [num_sampled, hidden_size], what lm_head is given; logits: [num_sampled, num_outputs]; both dense. Nothing is
 * changed when another status than OK is returned. */
EXPORT int decoder_model(const struct decoder_model *model, const struct model_step *step, void *hidden, void *logits,
                         int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const int64_t num_rows = step->layers.num_rows, num_sampled = step->layers.num_wanted;
    if (!are_below(step->token_ids, num_rows, model->vocab_size) ||
        !are_below(step->positions, num_rows, model->num_positions) ||
        !are_rows(step->layers.wanted_rows, num_sampled, num_rows))
        return BAD_TOKEN;
    struct model_call call = {.model = model, .step = step, .hidden = hidden, .logits = logits,
                              .row_bytes = (size_t)model->hidden_size * size_of((enum dtype)dtype),
                              .angle_bytes = (size_t)model->rotary_dim * size_of((enum dtype)dtype),
                              .dtype = (enum dtype)dtype};
    const size_t head_bytes = linear_scratch(&model->head, num_sampled, num_threads, call.dtype);
    call.linear_scratch = grow_scratch(&scratch, &capacity,
                                       head_bytes + (size_t)num_rows * 2 * (call.row_bytes + call.angle_bytes));
    if (!call.linear_scratch)
        return OUT_OF_MEMORY;
    call.x = call.linear_scratch + head_bytes;
    call.out = call.x + (size_t)num_rows * call.row_bytes;
    call.cosine = call.out + (size_t)num_rows * call.row_bytes;
    call.sine = call.cosine + (size_t)num_rows * call.angle_bytes;
    struct layer_step layers = step->layers;
    layers.cosine = call.cosine;
    layers.sine = call.sine;
    layers.rotary_dim = model->rotary_dim;
    const enum status status = layers_prepare(&call.layers, model->layers, model->num_layers, &layers, call.x, call.out,
                                              call.dtype, num_threads);
    if (status != OK)
        return status;
    const int64_t num_pieces = model->num_layers * LAYER_PIECES + MODEL_PIECES;
    return run_team(num_threads, num_pieces, model_region, &call) ? OK : OUT_OF_MEMORY;
}

#else

EXPORT int decoder_model(const struct decoder_model *model, const struct model_step *step, void *hidden, void *logits,
                         int dtype, int num_threads)
{
    (void)model, (void)step, (void)hidden, (void)logits, (void)dtype, (void)num_threads;
    return UNSUPPORTED;
}

#endif
