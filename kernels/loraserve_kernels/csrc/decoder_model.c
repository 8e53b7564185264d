/* A whole model of decoder layers: embedding, layers and, for the sampled rows, norm, lm_head, argmax and draws.
 *
 * The operations around the layers are small, but each takes 50 to 120 us if it is called from Python in a decode step,
 * because the step's weights have evicted all code from the caches.
 */
#include "decoder_layer.h"
#include "draw.h"
#include "packed_linear.h"
#include "row_ops.h"

/* What stays the same from step to step. */
struct decoder_model {
    const struct decoder_layer *const *layers;
    int64_t num_layers, hidden_size;
    const void *embedding; /* dense [num_embeddings, hidden_size]; NULL: the rows of lm_head's weight */
    int64_t num_embeddings;
    const void *cosine, *sine; /* dense [num_positions, rotary_dim] */
    int64_t num_positions, rotary_dim;
    const void *norm; /* weight */
    struct packed_linear head;
    const struct group *head_group; /* of adapters; NULL without any, like head_table */
    const struct table *head_table;
    int64_t vocab_size; /* columns of the logits that a token can be chosen from */
    float eps;
};

struct model_step {
    struct layer_step layers;             /* except cosine and sine; wanted_rows are the sampled rows */
    const int64_t *token_ids, *positions; /* [num_rows] */
};

static bool are_below(const int64_t *values, int64_t count, int64_t end)
{
    for (int64_t i = 0; i < count; i++)
        if (values[i] < 0 || values[i] >= end)
            return false;
    return true;
}

/* Whether these are ascending rows, as decoder_layers requires. */
static bool are_rows(const int64_t *values, int64_t count, int64_t num_rows)
{
    for (int64_t i = 1; i < count; i++)
        if (values[i] <= values[i - 1])
            return false;
    return are_below(values, count, num_rows);
}

#define MODEL_PIECES 9 /* pieces of work around the layers, at most */

/* The work of one step. */
struct model_call {
    const struct decoder_model *model;
    const struct model_step *step;
    struct layers_plan layers;
    char *x, *out, *cosine, *sine, *hidden; /* hidden: lm_head's input */
    void *logits, *linear_scratch;
    struct lora_size lora_size; /* of lm_head */
    struct lora_plan lora_plan;
    struct peak *peaks;
    struct draw_plan drawing;
    size_t row_bytes, angle_bytes;
    enum dtype dtype;
};

static void copy_row(char *rows, int64_t row, const void *table, int64_t id, size_t row_bytes)
{
    memcpy(rows + (size_t)row * row_bytes, (const char *)table + (size_t)id * row_bytes, row_bytes);
}

/* Points the call into the scratch memory; returns its size in bytes. */
static size_t lay_out(struct model_call *call, char *memory, int num_threads)
{
    const struct decoder_model *model = call->model;
    const struct layer_step *step = &call->step->layers;
    const size_t num_rows = (size_t)step->num_rows, num_sampled = (size_t)step->num_wanted;
    size_t used = 0;
    call->x = reserve(memory, &used, num_rows * call->row_bytes);
    call->out = reserve(memory, &used, num_sampled * call->row_bytes);
    call->hidden = reserve(memory, &used, num_sampled * call->row_bytes);
    call->cosine = reserve(memory, &used, num_rows * call->angle_bytes);
    call->sine = reserve(memory, &used, num_rows * call->angle_bytes);
    call->peaks = reserve(memory, &used, num_sampled * (size_t)num_peaks_of(model->vocab_size) * sizeof *call->peaks);
    call->linear_scratch = reserve(memory, &used,
                                   linear_scratch(&model->head, step->num_wanted, num_threads, call->dtype));
    call->drawing.peaks = call->peaks;
    call->drawing.scratch = reserve(memory, &used, call->drawing.num_draws > 0 ? (size_t)num_threads *
                                                       draw_scratch(model->vocab_size) : 0);
    void *lora = reserve(memory, &used, lora_scratch(&call->lora_size));
    if (memory && call->lora_size.num_items > 0)
        call->lora_plan = lora_prepare(model->head_group, model->head_table, &step->wanted_segments, &call->lora_size,
                                       lora);
    return used;
}

static void embed(const struct model_call *call, int64_t row)
{
    const struct decoder_model *model = call->model;
    const int64_t token_id = call->step->token_ids[row];
    if (model->embedding)
        copy_row(call->x, row, model->embedding, token_id, call->row_bytes);
    else
        packed_row(call->x + (size_t)row * call->row_bytes, &model->head, token_id, call->dtype);
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
        embed(call, row);
        copy_row(call->cosine, row, model->cosine, step->positions[row], call->angle_bytes);
        copy_row(call->sine, row, model->sine, step->positions[row], call->angle_bytes);
    }
    complete(team);
    layers_stage(team, &call->layers);
    struct work norming = start_work(team, num_sampled);
    while (take(team, &norming, &row))
        rms_norm_row(call->hidden + (size_t)row * call->row_bytes, call->out + (size_t)row * call->row_bytes,
                     model->norm, model->hidden_size, model->eps, call->dtype);
    complete(team);
    linear_stage(team, &model->head, call->logits, model->head.num_outputs, call->hidden, model->head.depth, num_sampled,
                 call->linear_scratch, call->dtype);
    if (call->lora_size.num_items > 0) {
        lora_shrink_stage(team, &call->lora_plan, call->hidden, model->hidden_size, call->dtype);
        complete(team);
        lora_expand_stage(team, &call->lora_plan, call->logits, model->head.num_outputs, call->dtype);
    }
    complete(team);
    argmax_stage(team, call->peaks, call->logits, model->head.num_outputs, num_sampled, model->vocab_size, call->dtype);
    complete(team);
    if (call->drawing.num_draws > 0) {
        draw_stage(team, &call->drawing);
        complete(team);
    }
}

/* logits: dense [num_sampled, num_outputs]. best: for each of these rows the first index of its largest logit; its
 * complement (~) if that logit is not finite. drawn: see draw.h. Nothing has changed if a status other than OK is
 * returned. */
EXPORT int decoder_model(const struct decoder_model *model, const struct model_step *step, void *logits, int64_t *best,
                         const struct draw *draws, int64_t num_draws, int64_t *drawn, int dtype, int num_threads)
{
    static _Thread_local void *scratch;
    static _Thread_local size_t capacity;
    const int64_t num_rows = step->layers.num_rows, num_sampled = step->layers.num_wanted;
    if (!are_below(step->token_ids, num_rows, model->num_embeddings) ||
        !are_below(step->positions, num_rows, model->num_positions) ||
        !are_rows(step->layers.wanted_rows, num_sampled, num_rows))
        return BAD_TOKEN;
    struct model_call call = {.model = model, .step = step, .logits = logits,
                              .row_bytes = (size_t)model->hidden_size * size_of((enum dtype)dtype),
                              .angle_bytes = (size_t)model->rotary_dim * size_of((enum dtype)dtype),
                              .dtype = (enum dtype)dtype};
    call.drawing = (struct draw_plan){.draws = draws, .num_draws = num_draws, .x = logits,
                                      .stride = model->head.num_outputs, .size = model->vocab_size, .chosen = drawn,
                                      .dtype = (enum dtype)dtype};
    if (model->head_table && step->layers.wanted_segments.count > 0) {
        const enum status status = lora_measure(model->head_group, model->head_table, &step->layers.wanted_segments,
                                                num_sampled, &call.lora_size);
        if (status != OK)
            return status;
    }
    char *memory = grow_scratch(&scratch, &capacity, lay_out(&call, NULL, num_threads));
    if (!memory)
        return OUT_OF_MEMORY;
    lay_out(&call, memory, num_threads);
    struct layer_step layers = step->layers;
    layers.cosine = call.cosine;
    layers.sine = call.sine;
    layers.rotary_dim = model->rotary_dim;
    const enum status status = layers_prepare(&call.layers, model->layers, model->num_layers, &layers, call.x, call.out,
                                              call.dtype, num_threads);
    if (status != OK)
        return status;
    const int64_t num_pieces = model->num_layers * LAYER_PIECES + MODEL_PIECES;
    if (!run_layers(num_threads, num_pieces, model_region, &call))
        return OUT_OF_MEMORY;
    const int64_t num_peaks = num_peaks_of(model->vocab_size);
    for (int64_t row = 0; row < num_sampled; row++) {
        const void *of_row = at(logits, row * model->head.num_outputs, call.dtype);
        best[row] = index_of_largest(call.peaks + row * num_peaks, num_peaks, of_row, call.dtype);
    }
    return OK;
}
