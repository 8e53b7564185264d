/* AMX multiplies 16 x 32 by 32 x 16 bfloat16, or 16 x 64 by 64 x 16 bytes, in one instruction, if the CPU has it and the
 * system allows it.
 *
 * Compilers that know AMX compile it, with a target attribute, into the libraries with bfloat16 products. It is chosen at
 * run time, so it needs no library of its own. Tiles are 16 rows of 16 words of 4 bytes: pairs of bfloat16, float32 sums,
 * four bytes, or int32 sums.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "compressed_weight.h"

#define AMX_ROWS 16
#define AMX_WORDS 16
#define AMX_TILE_WORDS (AMX_ROWS * AMX_WORDS)

/* Whether amx_enable was called and found AMX. If not, nothing below may be called. */
bool amx_is_on(void);

/* Configures this thread's tiles for num_rows (1 to 16) rows of x and of sums, until amx_end. */
void amx_begin(int num_rows);
void amx_end(void);

/* The rows of x of one tile: `stride` bytes between rows, `step` bytes between one row's 16 words and the next. */
struct amx_rows {
    const char *x;
    int64_t stride, step;
};

/* sums [rows, panels * 16] = one tile of x times `panels` (4 or 1) panels of weights, which lie panel_bytes apart. A panel
 * is [words, 16]; words is a multiple of 16. */
void amx_multiply_tile(float *sums, struct amx_rows rows, const char *weight, int64_t panel_bytes, int64_t words,
                       int panels);

/* amx_multiply_tile for four compressed panels. */
void amx_multiply_compressed_tile(float *sums, struct amx_rows rows, const struct compressed_panel *panels,
                                  int64_t words);

/* Memory to prefetch while other memory is multiplied: of several pages, the first line of each, then the second of each.
 * Each page is a stream for the hardware to run ahead in. */
struct amx_prefetch {
    const char *next, *end;
    int64_t step_lines; /* prefetched at a time */
    const char *column, *column_end, *pages_end; /* current line of the first page; end of that page, of all pages */
};

/* Prefetches nothing yet; size_bytes may be 0. num_steps: tiles of depth, times pairs of tiles of rows, that are
 * multiplied meanwhile. */
struct amx_prefetch amx_start_prefetch(const char *memory, int64_t size_bytes, int64_t num_steps);

/* Prefetches at once what amx_multiply_stretch left. */
void amx_prefetch_rest(struct amx_prefetch *ahead);

/* amx_multiply_tile for num_tiles (1 or 2) tiles of 16 rows and two panels; sums [num_tiles, 16, 32]. */
void amx_multiply_panels(float *sums, const struct amx_rows *rows, int num_tiles, const char *weight, int64_t panel_bytes,
                       int64_t words);

/* A part of two panels' depth that stays in L1 while many rows are multiplied. */
struct amx_stretch {
    const char *weight;
    int64_t panel_bytes, words; /* bytes from one panel to the other; a multiple of 16 */
};

/* Compressed tiles that replace a stretch's, each as soon as the old one was multiplied for the last time. */
struct amx_refill {
    char *weight;                    /* the stretch's */
    struct compressed_panel *panels; /* two */
    int64_t num_tiles;               /* per panel; at most the stretch's */
};

/* amx_multiply_panels for a stretch; adds to the sums if `add`. Rows of x bypass L1. refill: may be NULL. */
void amx_multiply_stretch(float *sums, const struct amx_rows *rows, int num_tiles, const struct amx_stretch *stretch,
                          bool add, struct amx_prefetch *ahead, const struct amx_refill *refill);

/* Multiplies a tile of x, [pieces][2 halves][16 rows][64], first halves signed, second ones unsigned, by two panels,
 * panel_bytes apart, signed [pieces][16][16 outputs][4]. */
void amx_multiply_bytes(const char *x, const char *weight, int64_t panel_bytes, int num_pieces);

/* Stores the sums of amx_multiply_bytes: int32 [2 panels][2 halves][16 rows][16 outputs]. */
void amx_store_bytes(int32_t *sums);

#define AMX_QUERIES 4 /* query vectors that amx_score_keys takes at a time */

/* Configures this thread's tiles for amx_score_keys, until amx_end. */
void amx_begin_scores(void);

/* scores [groups * 16, AMX_QUERIES] float32 = keys times queries, for at most 4 groups of 16 keys, each of them dense
 * bfloat16 [16, 2 * words]. queries: [words, AMX_QUERIES] pairs of bfloat16. The sums are those of amx_gemm. */
void amx_score_keys(float *scores, const void *const *groups, int num_groups, const uint32_t *queries, int64_t words);

/* sums [4 * 16, 16] float32 = 64 rows of a weight, row_bytes apart, times 16 rows of x, packed as [words, 16]; words is a
 * multiple of 16. `prefetch_next`: the next 64 rows of the weight are prefetched. After amx_begin(16). */
void amx_multiply_row_major(float *sums, const char *weight, int64_t row_bytes, const uint32_t *x, int64_t words,
                            bool prefetch_next);

/* c [rows, columns] float32 = a [rows, words] times b [words, columns]; columns and words are multiples of 16. Configures
 * tiles itself; amx_end releases them. */
void amx_gemm(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
              int64_t rows, int64_t columns, int64_t words);
