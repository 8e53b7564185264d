#include "amx.h"

#include "vector.h"

static bool is_on;

bool amx_is_on(void) { return is_on; }

/* GCC 11 and later, and clang, which has the second header. */
#if defined(__AVX512BF16__) && defined(__linux__) && (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_FUNCTION __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */
#define CPUID_AMX_BF16 (1u << 22)
#define CPUID_AMX_TILE (1u << 24)
#define CPUID_AMX_INT8 (1u << 25)
#define PREFETCH_BYTES 8192
#define PAGE_BYTES 4096
#define NUM_PAGES 12 /* prefetched together */
#define LINE_BYTES (4 * AMX_WORDS)
#define TILES_AHEAD 2 /* of one compressed panel, prefetched ahead */
#define MAX_STEP_LINES 8 /* more would wait for each other */

#ifdef EMULATED_AMX /* a header of the tests that emulates AMX in software */
#include EMULATED_AMX
#else
static bool cpu_has_amx(void)
{
    unsigned int eax, ebx, ecx, edx;
    const unsigned int needed = CPUID_AMX_TILE | CPUID_AMX_BF16 | CPUID_AMX_INT8;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & needed) == needed;
}

/* Linux saves a thread's 8 KB of tiles only for processes that requested permission. */
static bool system_allows_amx(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }
#endif

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

AMX_FUNCTION static void load_shapes(const struct tile_shapes *shapes)
{
    __asm__ volatile("" : : "r"(shapes) : "memory"); /* GCC assumes that only 8 bytes of it are read */
    _tile_loadconfig(shapes);
}

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. */
AMX_FUNCTION void amx_begin(int num_rows)
{
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = LINE_BYTES;
        shapes.rows[tile] = (uint8_t)(tile < 6 ? num_rows : AMX_ROWS);
    }
    load_shapes(&shapes);
}

/* Tiles 0 to 3 are sums of 16 keys each, 4 and 5 keys, 6 queries. */
AMX_FUNCTION void amx_begin_scores(void)
{
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = tile == 4 || tile == 5 ? LINE_BYTES : 4 * AMX_QUERIES;
        shapes.rows[tile] = AMX_ROWS;
    }
    load_shapes(&shapes);
}

AMX_FUNCTION void amx_end(void) { _tile_release(); }

INLINE void prefetch_tile(const char *tile)
{
#pragma GCC unroll 16
    for (int line = 0; line < AMX_ROWS; line++)
        __builtin_prefetch(tile + line * LINE_BYTES, 0, 3);
}

#define MULTIPLY_PANEL(panel, tile, ahead)                                                                            \
    prefetch_tile(weight + (panel) * panel_bytes + word * LINE_BYTES + (ahead));                                      \
    _tile_loadd(tile, weight + (panel) * panel_bytes + word * LINE_BYTES, LINE_BYTES);                                \
    _tile_dpbf16ps(panel, 4, tile);

AMX_FUNCTION static void multiply_tile_by_4(float *sums, struct amx_rows rows, const char *weight,
                                            int64_t panel_bytes, int64_t words)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t word = 0; word < words; word += AMX_WORDS, rows.x += rows.step) {
        _tile_loadd(4, rows.x, rows.stride);
        MULTIPLY_PANEL(0, 6, PREFETCH_BYTES / 4)
        MULTIPLY_PANEL(1, 7, PREFETCH_BYTES / 4)
        MULTIPLY_PANEL(2, 6, PREFETCH_BYTES / 4)
        MULTIPLY_PANEL(3, 7, PREFETCH_BYTES / 4)
    }
    _tile_stored(0, sums, 4 * LINE_BYTES);
    _tile_stored(1, sums + LANES, 4 * LINE_BYTES);
    _tile_stored(2, sums + 2 * LANES, 4 * LINE_BYTES);
    _tile_stored(3, sums + 3 * LANES, 4 * LINE_BYTES);
}

AMX_FUNCTION static void multiply_tile_by_1(float *sums, struct amx_rows rows, const char *weight, int64_t words)
{
    const int64_t panel_bytes = 0;
    _tile_zero(0);
    for (int64_t word = 0; word < words; word += AMX_WORDS, rows.x += rows.step) {
        _tile_loadd(4, rows.x, rows.stride);
        MULTIPLY_PANEL(0, 6, PREFETCH_BYTES)
    }
    _tile_stored(0, sums, LINE_BYTES);
}

void amx_multiply_tile(float *sums, struct amx_rows rows, const char *weight, int64_t panel_bytes, int64_t words,
                       int panels)
{
    if (panels == 4)
        multiply_tile_by_4(sums, rows, weight, panel_bytes, words);
    else
        multiply_tile_by_1(sums, rows, weight, words);
}

/* While a tile of a panel is multiplied, the next one is decompressed. After the end of a panel lies the next of the
 * four, so prefetches there continue four panels further: without that 16 rows, 768 -> 4,096 took 12 % longer. */
#define MULTIPLY_COMPRESSED(panel, tile)                                                                              \
    _tile_loadd(tile, tiles[i % 2][panel], LINE_BYTES);                                                               \
    _tile_dpbf16ps(panel, 4, tile);                                                                                   \
    if (i + 1 < num_tiles)                                                                                            \
        decompress_tile(tiles[(i + 1) % 2][panel], &next[panel], i + 1 + TILES_AHEAD < num_tiles ? ahead : ahead_after);

AMX_FUNCTION void amx_multiply_compressed_tile(float *sums, struct amx_rows rows, const struct compressed_panel *panels,
                                               int64_t words)
{
    char tiles[2][4][WEIGHT_TILE_BYTES] __attribute__((aligned(64)));
    struct compressed_panel next[4];
    const int64_t num_tiles = words / AMX_WORDS;
    const int64_t ahead = TILES_AHEAD * COMPRESSED_TILE_BYTES, ahead_after = ahead + 3 * num_tiles * COMPRESSED_TILE_BYTES;
    for (int panel = 0; panel < 4; panel++) {
        next[panel] = panels[panel];
        decompress_tile(tiles[0][panel], &next[panel], ahead);
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < num_tiles; i++, rows.x += rows.step) {
        _tile_loadd(4, rows.x, rows.stride);
        MULTIPLY_COMPRESSED(0, 6)
        MULTIPLY_COMPRESSED(1, 7)
        MULTIPLY_COMPRESSED(2, 6)
        MULTIPLY_COMPRESSED(3, 7)
    }
    _tile_stored(0, sums, 4 * LINE_BYTES);
    _tile_stored(1, sums + LANES, 4 * LINE_BYTES);
    _tile_stored(2, sums + 2 * LANES, 4 * LINE_BYTES);
    _tile_stored(3, sums + 3 * LANES, 4 * LINE_BYTES);
}

/* Tiles 0 to 3 from or to sums [2, 16, 32]; for one tile of rows, only the first two. */
#define EACH_SUM(function)                                                                                            \
    function(0, sums, 2 * LINE_BYTES);                                                                                \
    function(1, sums + LANES, 2 * LINE_BYTES);                                                                        \
    if (is_pair) {                                                                                                    \
        function(2, sums + 2 * AMX_TILE_WORDS, 2 * LINE_BYTES);                                                       \
        function(3, sums + 2 * AMX_TILE_WORDS + LANES, 2 * LINE_BYTES);                                               \
    }

INLINE void start_pages(struct amx_prefetch *ahead, const char *memory)
{
    ahead->next = ahead->column = memory;
    ahead->column_end = MIN(memory + PAGE_BYTES, ahead->end);
    ahead->pages_end = MIN(memory + NUM_PAGES * PAGE_BYTES, ahead->end);
}

struct amx_prefetch amx_start_prefetch(const char *memory, int64_t size_bytes, int64_t num_steps)
{
    const int64_t num_lines = (size_bytes + LINE_BYTES - 1) / LINE_BYTES;
    struct amx_prefetch ahead = {.end = memory + size_bytes,
                              .step_lines = MIN(MAX_STEP_LINES, (num_lines + num_steps - 1) / num_steps)};
    start_pages(&ahead, memory);
    return ahead;
}

INLINE void prefetch_next_line(struct amx_prefetch *ahead)
{
    if (ahead->next >= ahead->end)
        return;
    __builtin_prefetch(ahead->next, 0, 2);
    ahead->next += PAGE_BYTES;
    if (ahead->next < ahead->pages_end)
        return;
    ahead->next = ahead->column += LINE_BYTES;
    if (ahead->column >= ahead->column_end)
        start_pages(ahead, ahead->pages_end);
}

void amx_prefetch_rest(struct amx_prefetch *ahead)
{
    while (ahead->next < ahead->end)
        prefetch_next_line(ahead);
}

/* NOTE: a stretch's tiles and the sums have L1 to themselves: rows of x bypass it, and the next stretch is decompressed
 * into tiles that were just read. 128 rows, 768 -> 4,096, one core: 13.4 ns per product of tiles without either, 11.6
 * with both. All four tiles are loaded before the products: on busy cores all linears of a layer, 300 rows, take 5 % less
 * time than with loads between products. */
#define LOAD_ROWS(tile, x, stride)                                                                                    \
    if (ahead)                                                                                                        \
        _tile_stream_loadd(tile, x, stride);                                                                          \
    else                                                                                                              \
        _tile_loadd(tile, x, stride);

/* ahead: NULL for rows that are soon multiplied again, which stay in L1. */
AMX_FUNCTION INLINE void multiply_panels(float *sums, const struct amx_rows *rows, const bool is_pair,
                                         const struct amx_stretch *stretch, bool add, struct amx_prefetch *ahead,
                                         const struct amx_refill *refill)
{
    struct amx_prefetch current = {0}; /* a copy in registers */
    if (ahead)
        current = *ahead;
    const char *first = rows[0].x, *second = is_pair ? rows[1].x : NULL;
    if (add) {
        EACH_SUM(_tile_loadd)
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < stretch->words / AMX_WORDS; i++, first += rows[0].step) {
        const int64_t offset = i * WEIGHT_TILE_BYTES;
        for (int64_t line = 0; line < current.step_lines; line++)
            prefetch_next_line(&current);
        LOAD_ROWS(4, first, rows[0].stride)
        if (is_pair) {
            LOAD_ROWS(5, second, rows[1].stride)
            second += rows[1].step;
        }
        _tile_loadd(6, stretch->weight + offset, LINE_BYTES);
        _tile_loadd(7, stretch->weight + stretch->panel_bytes + offset, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (refill && i < refill->num_tiles)
            decompress_tile(refill->weight + offset, refill->panels, 0);
        if (is_pair) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (refill && i < refill->num_tiles)
            decompress_tile(refill->weight + stretch->panel_bytes + offset, refill->panels + 1, 0);
    }
    EACH_SUM(_tile_stored)
    if (ahead)
        *ahead = current;
}

AMX_FUNCTION void amx_multiply_panels(float *sums, const struct amx_rows *rows, int num_tiles, const char *weight,
                                      int64_t panel_bytes, int64_t words)
{
    const struct amx_stretch stretch = {weight, panel_bytes, words};
    if (num_tiles == 2)
        multiply_panels(sums, rows, true, &stretch, false, NULL, NULL);
    else
        multiply_panels(sums, rows, false, &stretch, false, NULL, NULL);
}

AMX_FUNCTION void amx_multiply_stretch(float *sums, const struct amx_rows *rows, int num_tiles,
                                       const struct amx_stretch *stretch, bool add, struct amx_prefetch *ahead,
                                       const struct amx_refill *refill)
{
    if (num_tiles == 2 && refill)
        multiply_panels(sums, rows, true, stretch, add, ahead, refill);
    else if (num_tiles == 2)
        multiply_panels(sums, rows, true, stretch, add, ahead, NULL);
    else if (refill)
        multiply_panels(sums, rows, false, stretch, add, ahead, refill);
    else
        multiply_panels(sums, rows, false, stretch, add, ahead, NULL);
}

AMX_FUNCTION void amx_multiply_bytes(const char *x, const char *weight, int64_t panel_bytes, int num_pieces)
{
    const int64_t half_bytes = AMX_ROWS * LINE_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int piece = 0; piece < num_pieces; piece++, x += 2 * half_bytes, weight += WEIGHT_TILE_BYTES) {
        _tile_loadd(4, x, LINE_BYTES);
        _tile_loadd(5, x + half_bytes, LINE_BYTES);
        _tile_loadd(6, weight, LINE_BYTES);
        _tile_loadd(7, weight + panel_bytes, LINE_BYTES);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbusd(1, 5, 6);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbusd(3, 5, 7);
    }
}

AMX_FUNCTION void amx_store_bytes(int32_t *sums)
{
    _tile_stored(0, sums, LINE_BYTES);
    _tile_stored(1, sums + AMX_TILE_WORDS, LINE_BYTES);
    _tile_stored(2, sums + 2 * AMX_TILE_WORDS, LINE_BYTES);
    _tile_stored(3, sums + 3 * AMX_TILE_WORDS, LINE_BYTES);
}

#define SCORE_GROUP(group, tile)                                                                                      \
    if ((group) < num_groups) {                                                                                       \
        _tile_loadd(tile, (const uint32_t *)groups[group] + word, 4 * words);                                         \
        _tile_dpbf16ps(group, tile, 6);                                                                               \
    }

#define STORE_GROUP(group)                                                                                            \
    if ((group) < num_groups)                                                                                         \
        _tile_stored(group, scores + (group) * AMX_ROWS * AMX_QUERIES, 4 * AMX_QUERIES);

AMX_FUNCTION void amx_score_keys(float *scores, const void *const *groups, int num_groups, const uint32_t *queries,
                                 int64_t words)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t word = 0; word < words; word += AMX_WORDS) {
        _tile_loadd(6, queries + word * AMX_QUERIES, 4 * AMX_QUERIES);
        SCORE_GROUP(0, 4)
        SCORE_GROUP(1, 5)
        SCORE_GROUP(2, 4)
        SCORE_GROUP(3, 5)
    }
    STORE_GROUP(0)
    STORE_GROUP(1)
    STORE_GROUP(2)
    STORE_GROUP(3)
}

#define MULTIPLY_WEIGHT_ROWS(group, tile)                                                                             \
    if (prefetch_next)                                                                                                \
        prefetch_lines(next + (group) * AMX_ROWS * LINE_BYTES);                                                       \
    _tile_loadd(tile, rows + (group) * AMX_ROWS * row_bytes, row_bytes);                                              \
    _tile_dpbf16ps(group, tile, 6);

/* A block of rows is larger than L1. */
INLINE void prefetch_lines(const char *memory)
{
#pragma GCC unroll 16
    for (int line = 0; line < AMX_ROWS; line++)
        __builtin_prefetch(memory + line * LINE_BYTES, 0, 2);
}

AMX_FUNCTION void amx_multiply_row_major(float *sums, const char *weight, int64_t row_bytes, const uint32_t *x,
                                         int64_t words, bool prefetch_next)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t word = 0; word < words; word += AMX_WORDS) {
        const char *rows = weight + word * (int64_t)sizeof(uint32_t);
        const char *next = weight + 4 * AMX_ROWS * (row_bytes + word * (int64_t)sizeof(uint32_t));
        _tile_loadd(6, x + word * AMX_ROWS, LINE_BYTES);
        MULTIPLY_WEIGHT_ROWS(0, 4)
        MULTIPLY_WEIGHT_ROWS(1, 5)
        MULTIPLY_WEIGHT_ROWS(2, 4)
        MULTIPLY_WEIGHT_ROWS(3, 5)
    }
    _tile_stored(0, sums, LINE_BYTES);
    _tile_stored(1, sums + AMX_TILE_WORDS, LINE_BYTES);
    _tile_stored(2, sums + 2 * AMX_TILE_WORDS, LINE_BYTES);
    _tile_stored(3, sums + 3 * AMX_TILE_WORDS, LINE_BYTES);
}

#define MULTIPLY_COLUMNS(sum, tile)                                                                                   \
    _tile_loadd(tile, b + word * b_stride + column + (sum) * LANES, 4 * b_stride);                                    \
    _tile_dpbf16ps(sum, 4, tile);

AMX_FUNCTION static void gemm_by_64(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b,
                                    int64_t b_stride, int64_t column, int64_t words)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t word = 0; word < words; word += AMX_WORDS) {
        _tile_loadd(4, a + word, 4 * a_stride);
        MULTIPLY_COLUMNS(0, 6)
        MULTIPLY_COLUMNS(1, 7)
        MULTIPLY_COLUMNS(2, 6)
        MULTIPLY_COLUMNS(3, 7)
    }
    _tile_stored(0, c + column, 4 * c_stride);
    _tile_stored(1, c + column + LANES, 4 * c_stride);
    _tile_stored(2, c + column + 2 * LANES, 4 * c_stride);
    _tile_stored(3, c + column + 3 * LANES, 4 * c_stride);
}

AMX_FUNCTION static void gemm_by_16(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b,
                                    int64_t b_stride, int64_t column, int64_t words)
{
    _tile_zero(0);
    for (int64_t word = 0; word < words; word += AMX_WORDS) {
        _tile_loadd(4, a + word, 4 * a_stride);
        MULTIPLY_COLUMNS(0, 6)
    }
    _tile_stored(0, c + column, 4 * c_stride);
}

void amx_gemm(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
              int64_t rows, int64_t columns, int64_t words)
{
    for (int64_t row = 0; row < rows; row += AMX_ROWS) {
        if (row == 0 || rows - row < AMX_ROWS)
            amx_begin((int)MIN(AMX_ROWS, rows - row));
        int64_t column = 0;
        for (; column + 4 * LANES <= columns; column += 4 * LANES)
            gemm_by_64(c + row * c_stride, c_stride, a + row * a_stride, a_stride, b, b_stride, column, words);
        for (; column < columns; column += LANES)
            gemm_by_16(c + row * c_stride, c_stride, a + row * a_stride, a_stride, b, b_stride, column, words);
    }
}

#else

static bool cpu_has_amx(void) { return false; }
static bool system_allows_amx(void) { return false; }
void amx_begin(int num_rows) { (void)num_rows; }
void amx_end(void) {}
void amx_multiply_tile(float *sums, struct amx_rows rows, const char *weight, int64_t panel_bytes, int64_t words,
                       int panels)
{
    (void)sums, (void)rows, (void)weight, (void)panel_bytes, (void)words, (void)panels;
}
void amx_multiply_compressed_tile(float *sums, struct amx_rows rows, const struct compressed_panel *panels,
                                  int64_t words)
{
    (void)sums, (void)rows, (void)panels, (void)words;
}
struct amx_prefetch amx_start_prefetch(const char *memory, int64_t size_bytes, int64_t num_steps)
{
    (void)memory, (void)size_bytes, (void)num_steps;
    return (struct amx_prefetch){0};
}
void amx_prefetch_rest(struct amx_prefetch *ahead) { (void)ahead; }
void amx_begin_scores(void) {}
void amx_multiply_bytes(const char *x, const char *weight, int64_t panel_bytes, int num_pieces)
{
    (void)x, (void)weight, (void)panel_bytes, (void)num_pieces;
}
void amx_store_bytes(int32_t *sums) { (void)sums; }
void amx_score_keys(float *scores, const void *const *groups, int num_groups, const uint32_t *queries, int64_t words)
{
    (void)scores, (void)groups, (void)num_groups, (void)queries, (void)words;
}
void amx_multiply_row_major(float *sums, const char *weight, int64_t row_bytes, const uint32_t *x, int64_t words,
                            bool prefetch_next)
{
    (void)sums, (void)weight, (void)row_bytes, (void)x, (void)words, (void)prefetch_next;
}
void amx_gemm(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
              int64_t rows, int64_t columns, int64_t words)
{
    (void)c, (void)c_stride, (void)a, (void)a_stride, (void)b, (void)b_stride, (void)rows, (void)columns, (void)words;
}
void amx_multiply_panels(float *sums, const struct amx_rows *rows, int num_tiles, const char *weight, int64_t panel_bytes,
                       int64_t words)
{
    (void)sums, (void)rows, (void)num_tiles, (void)weight, (void)panel_bytes, (void)words;
}
void amx_multiply_stretch(float *sums, const struct amx_rows *rows, int num_tiles, const struct amx_stretch *stretch,
                          bool add, struct amx_prefetch *ahead, const struct amx_refill *refill)
{
    (void)sums, (void)rows, (void)num_tiles, (void)stretch, (void)add, (void)ahead, (void)refill;
}

#endif

/* Turns AMX on or off for all threads, not while other functions run. Returns whether it is on. */
EXPORT int amx_enable(int wanted)
{
    is_on = wanted && cpu_has_amx() && system_allows_amx();
    return is_on;
}
