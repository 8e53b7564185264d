/* The tile instructions of AMX in software, so that `amx.c` is tested on CPUs without them: compile it with
 * -DEMULATED_AMX='"<path of this file>"'. An invalid instruction aborts the process.
 *
 * The order of sums, rounding and flushing to zero follow Intel's manual (Software Developer's Manual, volume 2,
 * TDPBF16PS, TDPBSSD, TDPBUSD).
 */
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILES 8
#define TILE_ROWS 16
#define TILE_ROW_BYTES 64

struct emulated_tile {
    char rows[TILE_ROWS][TILE_ROW_BYTES];
    int num_rows, row_bytes; /* 0 if the thread has not set tiles up */
};

static _Thread_local struct emulated_tile emulated_tiles[TILES];

static void emulated_require(bool is_met, const char *instruction)
{
    if (is_met)
        return;
    fprintf(stderr, "emulated AMX: %s with tiles that are not set up so\n", instruction);
    abort();
}

static struct emulated_tile *emulated_tile(int tile, const char *instruction)
{
    emulated_require(tile >= 0 && tile < TILES && emulated_tiles[tile].num_rows > 0, instruction);
    return &emulated_tiles[tile];
}

static void emulated_loadconfig(const void *memory)
{
    const uint8_t *config = memory;
    emulated_require(config[0] == 1 && config[1] == 0, "ldtilecfg");
    for (int byte = 2; byte < 16; byte++)
        emulated_require(config[byte] == 0, "ldtilecfg");
    for (int tile = 0; tile < TILES; tile++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, config + 16 + 2 * tile, sizeof row_bytes);
        const uint8_t num_rows = config[48 + tile];
        emulated_require(row_bytes <= TILE_ROW_BYTES && num_rows <= TILE_ROWS, "ldtilecfg");
        emulated_require((row_bytes == 0) == (num_rows == 0), "ldtilecfg");
        emulated_tiles[tile] = (struct emulated_tile){.num_rows = num_rows, .row_bytes = row_bytes};
    }
}

static void emulated_release(void) { memset(emulated_tiles, 0, sizeof emulated_tiles); }

static void emulated_zero(int tile) { memset(emulated_tile(tile, "tilezero")->rows, 0, TILE_ROWS * TILE_ROW_BYTES); }

static void emulated_loadd(int tile, const void *memory, int64_t stride)
{
    struct emulated_tile *to = emulated_tile(tile, "tileloadd");
    memset(to->rows, 0, sizeof to->rows);
    for (int row = 0; row < to->num_rows; row++)
        memcpy(to->rows[row], (const char *)memory + row * stride, (size_t)to->row_bytes);
}

static void emulated_stored(int tile, void *memory, int64_t stride)
{
    const struct emulated_tile *from = emulated_tile(tile, "tilestored");
    for (int row = 0; row < from->num_rows; row++)
        memcpy((char *)memory + row * stride, from->rows[row], (size_t)from->row_bytes);
}

static inline float emulated_flushed(float value) { return value > -FLT_MIN && value < FLT_MIN ? 0.0f : value; }

static inline float emulated_bfloat16(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return emulated_flushed(value);
}

/* The sums that a product of tiles of these shapes is added to. */
static struct emulated_tile *emulated_sums(int sums, int a, int b, const char *instruction)
{
    struct emulated_tile *c = emulated_tile(sums, instruction);
    const struct emulated_tile *left = emulated_tile(a, instruction), *right = emulated_tile(b, instruction);
    emulated_require(sums != a && sums != b && a != b, instruction);
    emulated_require(left->num_rows == c->num_rows && right->row_bytes == c->row_bytes, instruction);
    emulated_require(left->row_bytes == 4 * right->num_rows, instruction);
    return c;
}

static void emulated_dpbf16ps(int sums, int a, int b)
{
    struct emulated_tile *c = emulated_sums(sums, a, b, "tdpbf16ps");
    const struct emulated_tile *left = &emulated_tiles[a], *right = &emulated_tiles[b];
    for (int row = 0; row < c->num_rows; row++) {
        float low[TILE_ROW_BYTES / 4] = {0}, high[TILE_ROW_BYTES / 4] = {0}, sum[TILE_ROW_BYTES / 4];
        uint32_t pairs[TILE_ROW_BYTES / 4], others[TILE_ROW_BYTES / 4];
        memcpy(pairs, left->rows[row], sizeof pairs);
        for (int k = 0; k < right->num_rows; k++) {
            const float x_low = emulated_bfloat16(pairs[k] << 16), x_high = emulated_bfloat16(pairs[k] & 0xffff0000);
            memcpy(others, right->rows[k], sizeof others);
            for (int n = 0; n < TILE_ROW_BYTES / 4; n++) {
                low[n] = emulated_flushed(__builtin_fmaf(x_low, emulated_bfloat16(others[n] << 16), low[n]));
                high[n] = emulated_flushed(__builtin_fmaf(x_high, emulated_bfloat16(others[n] & 0xffff0000), high[n]));
            }
        }
        memcpy(sum, c->rows[row], sizeof sum);
        for (int n = 0; n < TILE_ROW_BYTES / 4; n++)
            sum[n] = emulated_flushed(emulated_flushed(sum[n]) + emulated_flushed(low[n] + high[n]));
        memcpy(c->rows[row], sum, (size_t)c->row_bytes);
    }
}

/* Bytes of b are signed, and those of a if is_signed. */
static void emulated_dpbytes(int sums, int a, int b, bool is_signed)
{
    struct emulated_tile *c = emulated_sums(sums, a, b, is_signed ? "tdpbssd" : "tdpbusd");
    const struct emulated_tile *left = &emulated_tiles[a], *right = &emulated_tiles[b];
    for (int row = 0; row < c->num_rows; row++) {
        uint32_t sum[TILE_ROW_BYTES / 4];
        memcpy(sum, c->rows[row], sizeof sum);
        for (int byte = 0; byte < left->row_bytes; byte++) {
            const int x = is_signed ? (int8_t)left->rows[row][byte] : (uint8_t)left->rows[row][byte];
            for (int n = 0; n < TILE_ROW_BYTES / 4; n++)
                sum[n] += (uint32_t)(x * (int8_t)right->rows[byte / 4][4 * n + byte % 4]);
        }
        memcpy(c->rows[row], sum, (size_t)c->row_bytes);
    }
}

static void emulated_dpbssd(int sums, int a, int b) { emulated_dpbytes(sums, a, b, true); }
static void emulated_dpbusd(int sums, int a, int b) { emulated_dpbytes(sums, a, b, false); }

/* The names in the compiler's header, which was included before. */
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stream_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbssd emulated_dpbssd
#define _tile_dpbusd emulated_dpbusd

static bool cpu_has_amx(void) { return true; }
static bool system_allows_amx(void) { return true; }
