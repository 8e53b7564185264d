/* Packed weights of bfloat16 in three quarters of their bytes, the same bits when read.
 *
 * The weights of a panel have few different exponents. A weight is kept as a byte of sign and mantissa and half a byte that
 * says which of its panel's 16 most frequent exponents it has; the few weights that have another one are exceptions, kept
 * whole. For four lines of 32 weights there are 64 bytes of the first two, 64 bytes of the last two, and 64 bytes
 * of codes: low halves for the first two lines, high halves for the last two. Within each, byte i of 16 bytes is weight
 * i % 8 of its line's 8 there, of the first line for i < 8, as unpacking instructions give them.
 *
 * Two Xeon cores with AMX, 16 rows, all linears of a layer (hidden size 768) from memory: 401 us packed, 279 us so, where
 * reading the packed weights alone takes 376.
 */
#pragma once

#include "vector.h"

#define WEIGHT_TILE_BYTES 1024 /* of a panel: 16 words of depth, a tile of AMX */
#define WEIGHT_TILE_SIZE 512   /* weights */
#define COMPRESSED_TILE_BYTES 768
#define NUM_CODES 16

struct weight_exception {
    uint32_t tile;           /* of its panel */
    uint16_t position, bits; /* within the tile */
};

struct panel_code {
    uint8_t low[NUM_CODES], high[NUM_CODES]; /* of the exponents: the last bit, as bit 7; the other bits */
    int64_t first_exception;                 /* those of a panel end with one of no tile */
};

/* The tiles of one panel, in order. */
struct compressed_panel {
    const char *next;
    const struct panel_code *code;
    const struct weight_exception *exception; /* the next */
    uint32_t tile;
};

/* compressed: as compress_weight leaves it. */
INLINE struct compressed_panel compressed_panel_at(const void *compressed, int64_t num_panels, int64_t panel_tiles,
                                                   int64_t panel)
{
    const char *tiles = compressed;
    const struct panel_code *codes = (const void *)(tiles + num_panels * panel_tiles * COMPRESSED_TILE_BYTES);
    const struct weight_exception *exceptions = (const void *)(codes + num_panels);
    return (struct compressed_panel){tiles + panel * panel_tiles * COMPRESSED_TILE_BYTES, codes + panel,
                                     exceptions + codes[panel].first_exception, 0};
}

/* Row `output` of what compress_weight left: dense [depth]. */
void compressed_row(void *row, const void *compressed, int64_t num_outputs, int64_t depth, int64_t output);

#if defined(__AVX512BW__)

#define SIGN _mm512_set1_epi8((char)0x80)
#define MANTISSA _mm512_set1_epi8(0x7f)
#define CHOOSE 0xEA /* of vpternlog: (a & b) | c */

/* Two lines from their bytes of sign and mantissa and their codes. */
INLINE void decompress_lines(char *target, __m512i bytes, __m512i codes, __m512i low, __m512i high)
{
    codes = _mm512_and_si512(codes, _mm512_set1_epi8(NUM_CODES - 1));
    const __m512i first = _mm512_ternarylogic_epi64(bytes, MANTISSA, _mm512_shuffle_epi8(low, codes), CHOOSE);
    const __m512i second = _mm512_ternarylogic_epi64(bytes, SIGN, _mm512_shuffle_epi8(high, codes), CHOOSE);
    _mm512_store_si512(target, _mm512_unpacklo_epi8(first, second));
    _mm512_store_si512(target + 64, _mm512_unpackhi_epi8(first, second));
}

/* The panel's next tile to `target`, which is aligned to 64 bytes; what lies prefetch_bytes after it is asked for, if not
 * 0. */
INLINE void decompress_tile(char *target, struct compressed_panel *panel, const int64_t prefetch_bytes)
{
    const __m512i low = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)panel->code->low));
    const __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)panel->code->high));
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        const char *source = panel->next + group * 192;
        for (int line = 0; line < 3 && prefetch_bytes > 0; line++)
            __builtin_prefetch(source + prefetch_bytes + line * 64, 0, 3);
        const __m512i codes = _mm512_load_si512(source + 128);
        decompress_lines(target + group * 256, _mm512_load_si512(source), codes, low, high);
        decompress_lines(target + group * 256 + 128, _mm512_load_si512(source + 64), _mm512_srli_epi16(codes, 4), low, high);
    }
    panel->next += COMPRESSED_TILE_BYTES;
    for (; panel->exception->tile == panel->tile; panel->exception++)
        memcpy(target + 2 * panel->exception->position, &panel->exception->bits, sizeof(uint16_t));
    panel->tile++;
}

#endif
