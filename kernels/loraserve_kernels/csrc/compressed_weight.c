/* Compresses packed weights, see compressed_weight.h. */
#include "compressed_weight.h"

#include "packed_linear.h"

#define NUM_EXPONENTS 256
#define NO_CODE 0xff
#define UNIT_PANELS 4   /* panels that AMX takes at a time */
#define MIN_SAVING 0.15 /* share of the bytes for which compressing is worth it; at most a quarter is saved */

static int exponent_of(uint16_t bits) { return bits >> 7 & 0xff; }

/* frequency: [NUM_EXPONENTS]. Counts into four arrays in turn, because neighbors often have the same exponent. */
static void count_exponents(int64_t *frequency, const uint16_t *weights, int64_t count)
{
    uint32_t counts[4][NUM_EXPONENTS] = {0};
    for (int64_t i = 0; i < count; i += 4)
        for (int turn = 0; turn < 4; turn++)
            counts[turn][exponent_of(weights[i + turn])]++;
    for (int exponent = 0; exponent < NUM_EXPONENTS; exponent++)
        frequency[exponent] = (int64_t)counts[0][exponent] + counts[1][exponent] + counts[2][exponent] + counts[3][exponent];
}

/* Chooses the panel's exponents. codes: [NUM_EXPONENTS]; returns how many weights have none of them. */
static int64_t choose_exponents(uint8_t *codes, struct panel_code *code, const uint16_t *weights, int64_t count)
{
    int64_t frequency[NUM_EXPONENTS], num_exceptions = count;
    count_exponents(frequency, weights, count);
    memset(codes, NO_CODE, NUM_EXPONENTS);
    for (int i = 0; i < NUM_CODES; i++) {
        int exponent = 0;
        for (int other = 1; other < NUM_EXPONENTS; other++)
            if (frequency[other] > frequency[exponent])
                exponent = other;
        code->low[i] = (uint8_t)(exponent << 7);
        code->high[i] = (uint8_t)(exponent >> 1);
        codes[exponent] = (uint8_t)i;
        num_exceptions -= frequency[exponent];
        frequency[exponent] = 0;
    }
    return num_exceptions;
}

/* Returns whether there are weights without a code. */
static bool compress_tile(char *target, const uint16_t *weights, const uint8_t *codes)
{
    uint8_t seen = 0;
    memset(target, 0, COMPRESSED_TILE_BYTES);
    for (int run = 0; run < WEIGHT_TILE_SIZE / 8; run++) {
        char *group = target + run / 16 * 192, *bytes = group + run / 8 % 2 * 64;
        const int first = run % 4 * 16 + run / 4 % 2 * 8, shift = run / 8 % 2 * 4;
        for (int i = 0; i < 8; i++) {
            const uint16_t bits = weights[run * 8 + i];
            const uint8_t code = codes[exponent_of(bits)];
            bytes[first + i] = (char)((bits >> 8 & 0x80) | (bits & 0x7f));
            group[128 + first + i] |= (char)((code & (NUM_CODES - 1)) << shift);
            seen |= code;
        }
    }
    return seen >= NUM_CODES;
}

static void compress_panel(char *target, const uint16_t *weights, int64_t num_tiles, const uint8_t *codes,
                           struct weight_exception *exceptions)
{
    for (int64_t tile = 0; tile < num_tiles; tile++, weights += WEIGHT_TILE_SIZE) {
        if (!compress_tile(target + tile * COMPRESSED_TILE_BYTES, weights, codes))
            continue;
        for (int i = 0; i < WEIGHT_TILE_SIZE; i++)
            if (codes[exponent_of(weights[i])] == NO_CODE)
                *exceptions++ = (struct weight_exception){(uint32_t)tile, (uint16_t)i, weights[i]};
    }
    *exceptions = (struct weight_exception){UINT32_MAX, 0, 0};
}

/* Bytes of a packed weight once it is compressed; 0 if that saves too little, or if AMX, which alone can read it, is off
 * or cannot take its panels or its dtype. packed: as pack_weight writes it. */
EXPORT int64_t compressed_weight_bytes(const void *packed, int64_t num_outputs, int64_t depth, int dtype, int num_threads)
{
    const int64_t num_panels = num_panels_of(num_outputs), panel_tiles = panel_tiles_of(depth);
    if (dtype != BFLOAT16 || !amx_is_on() || num_panels % UNIT_PANELS != 0)
        return 0;
    int64_t num_exceptions = num_panels;
#pragma omp parallel for num_threads(num_threads) reduction(+ : num_exceptions)
    for (int64_t panel = 0; panel < num_panels; panel++) {
        uint8_t codes[NUM_EXPONENTS];
        struct panel_code code;
        num_exceptions += choose_exponents(codes, &code, (const uint16_t *)packed + panel * panel_tiles * WEIGHT_TILE_SIZE,
                                           panel_tiles * WEIGHT_TILE_SIZE);
    }
    const int64_t size_bytes = num_panels * (panel_tiles * COMPRESSED_TILE_BYTES + (int64_t)sizeof(struct panel_code)) +
                               num_exceptions * (int64_t)sizeof(struct weight_exception);
    return (double)size_bytes <= (1 - MIN_SAVING) * (double)(num_panels * panel_tiles * WEIGHT_TILE_BYTES) ? size_bytes : 0;
}

/* compressed: compressed_weight_bytes long, aligned to 64 bytes. */
EXPORT int compress_weight(void *compressed, const void *packed, int64_t num_outputs, int64_t depth, int num_threads)
{
    const int64_t num_panels = num_panels_of(num_outputs), panel_tiles = panel_tiles_of(depth);
    char *tiles = compressed;
    struct panel_code *panel_codes = (void *)(tiles + num_panels * panel_tiles * COMPRESSED_TILE_BYTES);
    struct weight_exception *exceptions = (void *)(panel_codes + num_panels);
    const uint16_t *weights = packed;
    int64_t first_exception = 0;
#pragma omp parallel for ordered schedule(static, 1) num_threads(num_threads)
    for (int64_t panel = 0; panel < num_panels; panel++) {
        const uint16_t *panel_weights = weights + panel * panel_tiles * WEIGHT_TILE_SIZE;
        uint8_t codes[NUM_EXPONENTS];
        const int64_t count = choose_exponents(codes, panel_codes + panel, panel_weights, panel_tiles * WEIGHT_TILE_SIZE);
#pragma omp ordered
        {
            panel_codes[panel].first_exception = first_exception;
            first_exception += count + 1;
        }
        compress_panel(tiles + panel * panel_tiles * COMPRESSED_TILE_BYTES, panel_weights, panel_tiles, codes,
                       exceptions + panel_codes[panel].first_exception);
    }
    return OK;
}

void compressed_row(void *row, const void *compressed, int64_t num_outputs, int64_t depth, int64_t output)
{
#if defined(__AVX512BW__)
    const int64_t panel_tiles = panel_tiles_of(depth), row_bytes = depth * (int64_t)size_of(BFLOAT16);
    struct compressed_panel panel = compressed_panel_at(compressed, num_panels_of(num_outputs), panel_tiles, output / LANES);
    uint32_t tile[AMX_TILE_WORDS] __attribute__((aligned(64)));
    for (int64_t byte = 0; byte < row_bytes; byte += (int64_t)sizeof *tile) {
        const int64_t word = byte / (int64_t)sizeof *tile % AMX_WORDS;
        if (word == 0)
            decompress_tile((char *)tile, &panel, 0);
        memcpy((char *)row + byte, tile + word * LANES + output % LANES, MIN(sizeof *tile, (size_t)(row_bytes - byte)));
    }
#else
    (void)row, (void)compressed, (void)num_outputs, (void)depth, (void)output;
#endif
}
