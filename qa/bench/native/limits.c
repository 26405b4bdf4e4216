// Memory limits of a defragmentation: the same moves in a block with the layout of the cache (K and
// V of each layer), and a plain copy of the same number of bytes.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// K cells are `k` contiguous bytes. V cells are contiguous too if `rows` is 1; otherwise V has
// `rows` rows of values, and a cell has `v` bytes in each.
struct shape {
    uint64_t layers, cells, k, v, rows;
};

struct move {
    uint32_t src, dst, len;
};

static uint64_t total(const struct shape *s) { return s->layers * s->cells * (s->k + s->v * s->rows); }

// All pages are allocated before the measurement.
void *limits_new(const struct shape *s) {
    void *block = NULL;
    if (posix_memalign(&block, 64, total(s))) return NULL;
    memset(block, 1, total(s));
    return block;
}

void limits_free(void *block) { free(block); }

static void copy(uint8_t *dst, const uint8_t *src, uint64_t size) {
    if (src < dst + size && dst < src + size) memmove(dst, src, size);
    else memcpy(dst, src, size);
}

static void rows(uint8_t *data, uint64_t cell, const struct move *moves, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        copy(data + moves[i].dst * cell, data + moves[i].src * cell, moves[i].len * cell);
}

// One value of two bytes per cell: a transposed V has type f16.
static void values(uint16_t *row, const struct move *moves, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < moves[i].len; j++) row[moves[i].dst + j] = row[moves[i].src + j];
}

void limits_strided(uint8_t *block, const struct shape *s, const struct move *moves, uint64_t n) {
    for (uint64_t layer = 0; layer < s->layers; layer++) {
        rows(block, s->k, moves, n);
        block += s->cells * s->k;
        if (s->rows == 1) rows(block, s->v, moves, n);
        else
            for (uint64_t row = 0; row < s->rows; row++)
                values((uint16_t *) (block + row * s->cells * s->v), moves, n);
        block += s->cells * s->v * s->rows;
    }
}

// Copy from the upper half to the lower one, repeatedly if that is not enough.
void limits_straight(uint8_t *block, const struct shape *s, uint64_t size) {
    const uint64_t half = total(s) / 2;
    while (size) {
        const uint64_t part = size < half ? size : half;
        memcpy(block, block + half, part);
        size -= part;
    }
}
