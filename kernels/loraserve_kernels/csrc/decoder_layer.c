/* Decoder layers of the Llama-like families, one after the other, by one team of threads: norm, attention and gated MLP,
 * with their linears, adapters and residual sums. Every value is rounded wherever the standalone ops round it.
 *
 * A step is many short pieces of work. If each is called from Python, the calls and the start and end of parallel regions
 * add up. Decode of 16 rows of 16 adapters, 12 layers of hidden size 768, two EPYC Zen 5 cores: 18.2 -> 13.1 ms per step
 * with one call per layer, packed linears and bfloat16 products in attention together.
 */
#include "decoder_layer.h"

#include "packed_linear.h"
#include "paged_attention.h"
#include "row_ops.h"

enum { QKV, OUTPUT, GATE_UP, DOWN, NUM_LINEARS };

/* What stays the same from step to step. */
struct decoder_layer {
    struct packed_linear linears[NUM_LINEARS];
    const struct group *groups[NUM_LINEARS]; /* of adapters; NULL without any */
    const struct table *tables[NUM_LINEARS];
    const void *input_norm, *mlp_norm, *q_norm, *k_norm; /* weights; q_norm and k_norm may be NULL */
    void *k_cache, *v_cache;
    int64_t num_blocks, num_kv_heads, block_size, head_dim, num_heads, hidden_size, intermediate_size, sliding_window;
    float input_eps, mlp_eps, q_eps, k_eps, scaling, softcap;
};

/* Everything one layer works with; activations are dense, except those with a stride function below. */
struct run {
    const struct decoder_layer *layer;
    const struct layer_step *step;
    const void *x;
    void *out, *between[2], *normed, *qkv, *attended, *sum, *gate_up, *activated;
    void *linear_scratch;
    struct rotary rotary;
    struct attention attention;
    struct attention_size attention_size;
    struct attention_plan attention_plan;
    struct lora_size lora_sizes[NUM_LINEARS];
    struct lora_plan lora_plans[NUM_LINEARS];
    bool keeps_all; /* all rows are needed after attention; if false, only the step's wanted rows */
    int64_t num_kept;
    enum dtype dtype;
};

static int64_t qkv_size(const struct decoder_layer *layer)
{
    return (layer->num_heads + 2 * layer->num_kv_heads) * layer->head_dim;
}

/* Number of rows that a linear gets. */
static int64_t rows_of(const struct run *run, int index)
{
    return index == QKV ? run->step->num_rows : run->num_kept;
}

static const struct segments *segments_of(const struct run *run, int index)
{
    return run->keeps_all || index == QKV ? &run->step->segments : &run->step->wanted_segments;
}

static int64_t normed_stride(const struct run *run) { return row_stride_of(run->layer->hidden_size, run->dtype); }
static int64_t gate_up_stride(const struct run *run) { return row_stride_of(2 * run->layer->intermediate_size, run->dtype); }
static int64_t activated_stride(const struct run *run) { return row_stride_of(run->layer->intermediate_size, run->dtype); }

static void set_attention(struct run *run)
{
    const struct decoder_layer *layer = run->layer;
    const struct layer_step *step = run->step;
    const int64_t row_stride = qkv_size(layer), head_dim = layer->head_dim;
    const void *k = at(run->qkv, layer->num_heads * head_dim, run->dtype);
    run->rotary = (struct rotary){
        .q = run->qkv, .q_row_stride = row_stride, .q_head_stride = head_dim,
        .k = k, .k_row_stride = row_stride, .k_head_stride = head_dim,
        .v = at(k, layer->num_kv_heads * head_dim, run->dtype), .v_row_stride = row_stride, .v_head_stride = head_dim,
        .cosine = step->cosine, .sine = step->sine, .k_cache = layer->k_cache, .v_cache = layer->v_cache,
        .slot_mapping = step->slot_mapping, .num_rows = step->num_rows, .num_heads = layer->num_heads,
        .num_blocks = layer->num_blocks, .num_kv_heads = layer->num_kv_heads, .block_size = layer->block_size,
        .head_dim = head_dim, .rotary_dim = step->rotary_dim,
    };
    run->attention = (struct attention){
        .q = run->qkv, .q_row_stride = row_stride, .q_head_stride = head_dim,
        .k_cache = layer->k_cache, .v_cache = layer->v_cache, .num_blocks = layer->num_blocks,
        .block_size = layer->block_size, .block_table = step->block_table,
        .block_table_stride = step->block_table_stride, .context_lens = step->context_lens,
        .row_start = step->row_start, .num_rows = step->sequence_rows, .out = run->attended,
        .num_sequences = step->num_sequences, .num_heads = layer->num_heads, .num_kv_heads = layer->num_kv_heads,
        .head_dim = head_dim, .sliding_window = layer->sliding_window, .scaling = layer->scaling,
        .softcap = layer->softcap,
    };
}

/* Points the run into the scratch memory; returns its size in bytes. Layers leave their output to the next one in the two
 * buffers of `between`, in turn. */
static size_t lay_out(struct run *run, char *memory, int num_threads)
{
    const struct attention_size *attention_size = &run->attention_size;
    const struct decoder_layer *layer = run->layer;
    const size_t row_bytes = (size_t)run->step->num_rows * size_of(run->dtype);
    size_t used = 0, linear_bytes = 0;
    for (int i = 0; i < 2; i++) /* first, so that they are at the same place for all layers */
        run->between[i] = reserve(memory, &used, row_bytes * (size_t)layer->hidden_size);
    for (int i = 0; i < NUM_LINEARS; i++)
        linear_bytes = MAX(linear_bytes,
                           linear_scratch(layer->linears + i, rows_of(run, i), num_threads, run->dtype));
    run->linear_scratch = reserve(memory, &used, linear_bytes);
    run->normed = reserve(memory, &used, row_bytes * (size_t)normed_stride(run));
    run->qkv = reserve(memory, &used, row_bytes * (size_t)qkv_size(layer));
    run->attended = reserve(memory, &used, row_bytes * (size_t)(layer->num_heads * layer->head_dim));
    run->sum = reserve(memory, &used, row_bytes * (size_t)layer->hidden_size);
    run->gate_up = reserve(memory, &used, row_bytes * (size_t)gate_up_stride(run));
    run->activated = reserve(memory, &used, row_bytes * (size_t)activated_stride(run));
    if (memory)
        set_attention(run);
    void *scratch = reserve(memory, &used, attention_scratch(&run->attention, attention_size, num_threads));
    if (memory)
        run->attention_plan = attention_prepare(&run->attention, attention_size, scratch);
    for (int i = 0; i < NUM_LINEARS; i++) {
        scratch = reserve(memory, &used, lora_scratch(run->lora_sizes + i));
        if (memory && run->lora_sizes[i].num_items > 0)
            run->lora_plans[i] = lora_prepare(layer->groups[i], layer->tables[i], segments_of(run, i),
                                              run->lora_sizes + i, scratch);
    }
    return used;
}

/* y = x Wᵀ + bias plus the rows' adapters; y is complete for the whole team. Strides in elements. */
static void linear(struct team *team, const struct run *run, int index, void *y, int64_t y_stride, const void *x,
                   int64_t x_stride)
{
    const struct packed_linear *packed = run->layer->linears + index;
    const struct lora_plan *plan = run->lora_plans + index;
    linear_stage(team, packed, y, y_stride, x, x_stride, rows_of(run, index), run->linear_scratch, run->dtype);
    if (run->lora_sizes[index].num_items > 0) {
        lora_shrink_stage(team, plan, x, x_stride, run->dtype);
        complete(team);
        lora_expand_stage(team, plan, y, y_stride, run->dtype);
    }
    complete(team);
}

INLINE void add_row(void *y, const void *a, const void *b, int64_t size, const enum dtype dtype)
{
    for (int64_t i = 0; i < size; i += LANES)
        store_upto(y, i, size - i, load_upto(a, i, size - i, dtype) + load_upto(b, i, size - i, dtype), dtype);
}

/* y[row] = a[a_row] + b[row]. */
static void add(const struct run *run, void *y, const void *a, int64_t a_row, const void *b, int64_t row)
{
    const int64_t size = run->layer->hidden_size, start = row * size, a_start = a_row * size;
    if (run->dtype == BFLOAT16)
        add_row((void *)at(y, start, BFLOAT16), at(a, a_start, BFLOAT16), at(b, start, BFLOAT16), size, BFLOAT16);
    else
        add_row((void *)at(y, start, FLOAT32), at(a, a_start, FLOAT32), at(b, start, FLOAT32), size, FLOAT32);
}

static void norm(const struct run *run, const void *x, const void *weight, float eps, int64_t row)
{
    const int64_t size = run->layer->hidden_size;
    rms_norm_row((void *)at(run->normed, row * normed_stride(run), run->dtype), at(x, row * size, run->dtype), weight, size,
                 eps, run->dtype);
}

static void norm_heads(const struct run *run, const void *weight, float eps, int64_t row, int64_t first, int64_t count)
{
    const struct decoder_layer *layer = run->layer;
    for (int64_t head = first; head < first + count; head++) {
        void *values = (void *)at(run->qkv, row * qkv_size(layer) + head * layer->head_dim, run->dtype);
        rms_norm_row(values, values, weight, layer->head_dim, eps, run->dtype);
    }
}

/* Moves attention's output for the kept rows to the first rows: one item. */
static void gather_attended(struct team *team, const struct run *run)
{
    const int64_t size = run->layer->num_heads * run->layer->head_dim;
    struct work work = start_work(team, 1);
    int64_t item;
    while (take(team, &work, &item))
        for (int64_t row = 0; row < run->num_kept; row++)
            memmove((void *)at(run->attended, row * size, run->dtype),
                    at(run->attended, run->step->wanted_rows[row] * size, run->dtype), (size_t)size * size_of(run->dtype));
    complete(team);
}

/* The work between q|k|v and attention for one row. */
static void place_row(const struct run *run, int64_t row)
{
    const struct decoder_layer *layer = run->layer;
    if (layer->q_norm)
        norm_heads(run, layer->q_norm, layer->q_eps, row, 0, layer->num_heads);
    if (layer->k_norm)
        norm_heads(run, layer->k_norm, layer->k_eps, row, layer->num_heads, layer->num_kv_heads);
    rotary_row(&run->rotary, row, run->dtype);
}

static void activate_row(const struct run *run, int64_t row)
{
    const int64_t size = run->layer->intermediate_size;
    const void *gate = at(run->gate_up, row * gate_up_stride(run), run->dtype);
    silu_mul_row((void *)at(run->activated, row * activated_stride(run), run->dtype), gate, at(gate, size, run->dtype),
                 size, run->dtype);
}

/* Everything after attention, for the kept rows. */
static void compute_kept(struct team *team, const struct run *run)
{
    const struct decoder_layer *layer = run->layer;
    const int64_t num_rows = run->num_kept;
    int64_t row;
    linear(team, run, OUTPUT, run->out, layer->hidden_size, run->attended, layer->num_heads * layer->head_dim);
    struct work adding = start_work(team, num_rows);
    while (take(team, &adding, &row)) {
        add(run, run->sum, run->x, run->keeps_all ? row : run->step->wanted_rows[row], run->out, row);
        norm(run, run->sum, layer->mlp_norm, layer->mlp_eps, row);
    }
    complete(team);
    linear(team, run, GATE_UP, run->gate_up, gate_up_stride(run), run->normed, normed_stride(run));
    struct work activating = start_work(team, num_rows);
    while (take(team, &activating, &row))
        activate_row(run, row);
    complete(team);
    linear(team, run, DOWN, run->out, layer->hidden_size, run->activated, activated_stride(run));
    adding = start_work(team, num_rows);
    while (take(team, &adding, &row))
        add(run, run->out, run->sum, row, run->out, row);
    complete(team);
}

/* `out` holds first attention's, then the MLP's output. */
static void compute(struct team *team, const struct run *run)
{
    const struct decoder_layer *layer = run->layer;
    const int64_t num_rows = run->step->num_rows;
    int64_t row;
    struct work norming = start_work(team, num_rows);
    while (take(team, &norming, &row))
        norm(run, run->x, layer->input_norm, layer->input_eps, row);
    complete(team);
    linear(team, run, QKV, run->qkv, qkv_size(layer), run->normed, normed_stride(run));
    struct work placing = start_work(team, num_rows);
    while (take(team, &placing, &row))
        place_row(run, row);
    complete(team);
    attention_stage(team, &run->attention, &run->attention_plan, run->dtype);
    complete(team);
    if (!run->keeps_all)
        gather_attended(team, run);
    if (run->num_kept > 0)
        compute_kept(team, run);
}

/* Measures the layer's work; refuses input that would read or write outside its tensors. */
static enum status measure(struct run *run, int num_threads)
{
    const struct decoder_layer *layer = run->layer;
    const struct layer_step *step = run->step;
    set_attention(run);
    enum status status = rotary_check(&run->rotary);
    if (status == OK)
        status = attention_measure(&run->attention, step->num_rows, step->max_blocks, num_threads, &run->attention_size);
    for (int i = 0; i < NUM_LINEARS && status == OK; i++)
        if (layer->tables[i] && segments_of(run, i)->count > 0)
            status = lora_measure(layer->groups[i], layer->tables[i], segments_of(run, i),
                                  rows_of(run, i), run->lora_sizes + i);
    return status;
}

enum status layers_prepare(struct layers_plan *plan, const struct decoder_layer *const *layers, int64_t num_layers,
                           const struct layer_step *step, const void *x, void *out, enum dtype dtype, int num_threads)
{
    static _Thread_local void *run_memory, *scratch;
    static _Thread_local size_t run_capacity, capacity;
    struct run *runs = grow_scratch(&run_memory, &run_capacity, (size_t)num_layers * sizeof *runs);
    if (!runs)
        return OUT_OF_MEMORY;
    size_t size_bytes = 0;
    for (int64_t i = 0; i < num_layers; i++) {
        const bool keeps_all = i + 1 < num_layers || step->num_wanted == step->num_rows;
        runs[i] = (struct run){.layer = layers[i], .step = step, .x = x, .out = out, .dtype = dtype,
                               .keeps_all = keeps_all,
                               .num_kept = keeps_all ? step->num_rows : step->num_wanted};
        const enum status status = measure(runs + i, num_threads);
        if (status != OK)
            return status;
        size_bytes = MAX(size_bytes, lay_out(runs + i, NULL, num_threads));
    }
    char *memory = grow_scratch(&scratch, &capacity, size_bytes);
    if (!memory)
        return OUT_OF_MEMORY;
    *plan = (struct layers_plan){runs, num_layers, memory};
    return OK;
}

void layers_stage(struct team *team, const struct layers_plan *plan)
{
    const int64_t last = plan->num_layers - 1;
    if (plan->runs->step->num_rows == 0)
        return;
    for (int64_t i = 0; i <= last; i++) {
        struct run *run = plan->runs + i;
        struct work preparing = start_work(team, 1);
        for (int64_t item; take(team, &preparing, &item);) {
            lay_out(run, plan->memory, team->num_threads);
            if (i > 0)
                run->x = run->between[i % 2];
            if (i < last)
                run->out = run->between[(i + 1) % 2];
        }
        complete(team);
        compute(team, run);
    }
}

static void layers_region(struct team *team, void *plan) { layers_stage(team, plan); }

EXPORT int decoder_layers(const struct decoder_layer *const *layers, int64_t num_layers, const struct layer_step *step,
                          const void *x, void *out, int dtype, int num_threads)
{
    struct layers_plan plan;
    const enum status status = layers_prepare(&plan, layers, num_layers, step, x, out, (enum dtype)dtype, num_threads);
    if (status != OK)
        return status;
    return run_layers(num_threads, num_layers * LAYER_PIECES, layers_region, &plan) ? OK : OUT_OF_MEMORY;
}
