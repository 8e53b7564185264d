/* See recurrent.h. */
#include "recurrent.h"

static bool is_slot(const struct sequences *s, int64_t slot) { return slot >= 0 && slot < s->num_slots; }

enum status check_sequences(const struct sequences *s)
{
    for (int64_t i = 0; i < s->num_sequences; i++) {
        const int64_t first = s->row_start[i], rows = s->num_rows[i];
        if (first < 0 || rows < 0 || first + rows > s->total_rows)
            return BAD_SEGMENTS;
        if ((s->read[i] != -1 && !is_slot(s, s->read[i])) || !is_slot(s, s->write[i]))
            return BAD_STATE;
        if (s->save[i] == -1)
            continue;
        if (!is_slot(s, s->save[i]) || s->num_rows_saved[i] < 1 || s->num_rows_saved[i] > rows)
            return BAD_STATE;
    }
    return OK;
}

void keep_states(const struct sequences *s, float *state, int64_t slot_size)
{
    for (int64_t i = 0; i < s->num_sequences; i++) {
        if (s->num_rows[i] > 0 || s->read[i] == s->write[i])
            continue;
        float *to = state + s->write[i] * slot_size;
        if (s->read[i] < 0)
            memset(to, 0, (size_t)slot_size * sizeof(float));
        else
            memcpy(to, state + s->read[i] * slot_size, (size_t)slot_size * sizeof(float));
    }
}

int64_t count_rows(const struct sequences *s)
{
    int64_t rows = 0;
    for (int64_t i = 0; i < s->num_sequences; i++)
        rows += s->num_rows[i];
    return rows;
}

void exp_each(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES)
        store(x, i, vexp(load(x, i, FLOAT32)), FLOAT32);
}
