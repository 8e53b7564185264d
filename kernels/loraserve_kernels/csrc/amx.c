#include "amx.h"

#include "vector.h"

static bool is_on;

bool amx_is_on(void) { return is_on; }

#if defined(__AVX512BF16__) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_FUNCTION __attribute__((target("amx-tile,amx-bf16")))
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */
#define PREFETCH_BYTES 8192
#define TILE_BYTES (4 * AMX_TILE_WORDS)
#define LINE_BYTES (4 * AMX_WORDS)

static bool cpu_has_amx(void)
{
    unsigned int eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & bit_AMX_TILE) && (edx & bit_AMX_BF16);
}

/* Linux keeps the tiles' 8 KB of a thread only for processes that have asked. */
static bool system_allows_amx(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. */
AMX_FUNCTION void amx_begin(int num_rows)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = LINE_BYTES;
        shapes.rows[tile] = (uint8_t)(tile < 6 ? num_rows : AMX_ROWS);
    }
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* GCC believes that 8 bytes of it are read */
    _tile_loadconfig(&shapes);
}

AMX_FUNCTION void amx_end(void) { _tile_release(); }

INLINE void prefetch_tile(const char *tile)
{
#pragma GCC unroll 16
    for (int line = 0; line < AMX_ROWS; line++)
        __builtin_prefetch(tile + line * LINE_BYTES, 0, 3);
}

#define MULTIPLY_PANEL(panel, tile)                                                                                   \
    prefetch_tile(weight + (panel) * panel_bytes + word * LINE_BYTES + PREFETCH_BYTES / 4);                           \
    _tile_loadd(tile, weight + (panel) * panel_bytes + word * LINE_BYTES, LINE_BYTES);                                \
    _tile_dpbf16ps(panel, 4, tile);

AMX_FUNCTION static void multiply_tile_by_4(float *sums, const uint32_t *x, const char *weight, int64_t panel_bytes,
                                            int64_t words)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t word = 0; word < words; word += AMX_WORDS) {
        _tile_loadd(4, x + word * AMX_ROWS, LINE_BYTES);
        MULTIPLY_PANEL(0, 6)
        MULTIPLY_PANEL(1, 7)
        MULTIPLY_PANEL(2, 6)
        MULTIPLY_PANEL(3, 7)
    }
    _tile_stored(0, sums, 4 * LINE_BYTES);
    _tile_stored(1, sums + LANES, 4 * LINE_BYTES);
    _tile_stored(2, sums + 2 * LANES, 4 * LINE_BYTES);
    _tile_stored(3, sums + 3 * LANES, 4 * LINE_BYTES);
}

AMX_FUNCTION static void multiply_tile_by_1(float *sums, const uint32_t *x, const char *weight, int64_t words)
{
    const int64_t panel_bytes = 0;
    _tile_zero(0);
    for (int64_t word = 0; word < words; word += AMX_WORDS) {
        _tile_loadd(4, x + word * AMX_ROWS, LINE_BYTES);
        MULTIPLY_PANEL(0, 6)
    }
    _tile_stored(0, sums, LINE_BYTES);
}

void amx_multiply_tile(float *sums, const uint32_t *x, const char *weight, int64_t panel_bytes, int64_t words,
                       int panels)
{
    if (panels == 4)
        multiply_tile_by_4(sums, x, weight, panel_bytes, words);
    else
        multiply_tile_by_1(sums, x, weight, words);
}

/* Tiles 0 to 3 from or to sums [2, 16, 32]. */
#define EACH_SUM(function)                                                                                            \
    function(0, sums, 2 * LINE_BYTES);                                                                                \
    function(1, sums + LANES, 2 * LINE_BYTES);                                                                        \
    function(2, sums + 2 * AMX_TILE_WORDS, 2 * LINE_BYTES);                                                           \
    function(3, sums + 2 * AMX_TILE_WORDS + LANES, 2 * LINE_BYTES);

AMX_FUNCTION void amx_multiply_pair(float *sums, const uint32_t *x, int64_t tile_words, const char *weight,
                                    int64_t panel_bytes, int64_t words, bool add, struct amx_ahead ahead)
{
    if (add) {
        EACH_SUM(_tile_loadd)
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t word = 0; word < words; word += AMX_WORDS) {
        const char *tile = weight + word * LINE_BYTES, *next = ahead.weight + word * LINE_BYTES;
        for (int line = ahead.first; line < ahead.end; line++)
            __builtin_prefetch(next + line / AMX_ROWS * panel_bytes + line % AMX_ROWS * LINE_BYTES, 0, 2);
        _tile_loadd(6, tile, LINE_BYTES);
        _tile_loadd(4, x + word * AMX_ROWS, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tile + panel_bytes, LINE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + tile_words + word * AMX_ROWS, LINE_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    EACH_SUM(_tile_stored)
}

#else

static bool cpu_has_amx(void) { return false; }
static bool system_allows_amx(void) { return false; }
void amx_begin(int num_rows) { (void)num_rows; }
void amx_end(void) {}
void amx_multiply_tile(float *sums, const uint32_t *x, const char *weight, int64_t panel_bytes, int64_t words,
                       int panels)
{
    (void)sums, (void)x, (void)weight, (void)panel_bytes, (void)words, (void)panels;
}
void amx_multiply_pair(float *sums, const uint32_t *x, int64_t tile_words, const char *weight, int64_t panel_bytes,
                       int64_t words, bool add, struct amx_ahead ahead)
{
    (void)sums, (void)x, (void)tile_words, (void)weight, (void)panel_bytes, (void)words, (void)add, (void)ahead;
}

#endif

/* Turns AMX on or off for all threads, not while other functions run; returns whether it is on. */
EXPORT int amx_enable(int wanted)
{
    is_on = wanted && cpu_has_amx() && system_allows_amx();
    return is_on;
}
