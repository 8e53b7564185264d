/* Packed bfloat16 weights compressed to three quarters of their bytes, without loss.
 *
 * The weights of a panel have few different exponents. A weight is stored as a byte of sign and mantissa and a code of
 * half a byte that selects one of its panel's 16 most frequent exponents. The few weights with another exponent are
 * exceptions, stored whole. Four lines of 32 weights take 64 bytes for the first two lines, 64 bytes for the last two,
 * and 64 bytes of codes: low halves for the first two lines, high halves for the last two. Within these, each 16 bytes
 * are 8 weights of one line, then 8 of the next, as unpacking instructions expect them.
 *
 * Two Xeon cores with AMX, 16 rows, all linears of a layer (hidden size 768) from memory: 401 us uncompressed, 279
 * compressed; reading the uncompressed weights alone takes 376.
 */
#pragma once

#include "vector.h"

#define WEIGHT_TILE_BYTES 1024 /* 16 words of a panel's depth: an AMX tile */
#define WEIGHT_TILE_SIZE 512   /* weights */
#define COMPRESSED_TILE_BYTES 768
#define NUM_CODES 16

struct weight_exception {
    uint32_t tile;           /* of its panel */
    uint16_t position, bits; /* within the tile */
};

struct panel_code {
    uint8_t low[NUM_CODES], high[NUM_CODES]; /* of exponents: low has the last bit, as bit 7; high the others */
    int64_t first_exception;                 /* a panel's exceptions end with one for tile UINT32_MAX */
};

/* Reads the tiles of one panel in order. */
struct compressed_panel {
    const char *next;
    const struct panel_code *code;
    const struct weight_exception *exception; /* the next */
    uint32_t tile;
};

/* compressed: as compress_weight writes it. */
INLINE struct compressed_panel compressed_panel_at(const void *compressed, int64_t num_panels, int64_t panel_tiles,
                                                   int64_t panel)
{
    const char *tiles = compressed;
    const struct panel_code *codes = (const void *)(tiles + num_panels * panel_tiles * COMPRESSED_TILE_BYTES);
    const struct weight_exception *exceptions = (const void *)(codes + num_panels);
    return (struct compressed_panel){tiles + panel * panel_tiles * COMPRESSED_TILE_BYTES, codes + panel,
                                     exceptions + codes[panel].first_exception, 0};
}

/* Row `output` of a compressed weight: dense [depth]. */
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

/* Decompresses the panel's next tile to `target`, which is aligned to 64 bytes. Prefetches what lies prefetch_bytes after
 * the tile, if not 0. */
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
