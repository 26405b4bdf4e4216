/* Helper functions of smoke.c. */
#ifndef SMOKE_H
#define SMOKE_H
#include "plk.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CELLS 256
#define TOLERANCE 0.25f /* noise is about 0.01, corruption 2 and more */
#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #what, plk_last_error());   \
            show_logs();                                                                           \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void show_logs(void) {
    char text[4096];
    int32_t level = 0, bytes = 0;
    while ((bytes = plk_log_read(&level, text, sizeof text)) >= 0) {
        fprintf(stderr, "log %d: %.*s\n", level, bytes, text);
    }
}

static int decode(plk_context *c, int n, const int32_t *token, const int32_t *pos,
                  const int32_t *seq) {
    plk_batch batch = {sizeof batch, n, token, pos, NULL, seq, NULL};
    return plk_decode(c, &batch);
}

static int decode_one(plk_context *c, int32_t token, int32_t pos, int32_t seq) {
    return decode(c, 1, &token, &pos, &seq);
}

static int used(plk_context *c, int32_t *largest_hole) {
    int32_t pos[4096], shift[4096];
    uint64_t seqs[4096];
    int32_t cells = plk_cells_read(c, 0, 4096, pos, shift, seqs, 1);
    int32_t run = 0, count = 0;
    CHECK(cells > 0);
    *largest_hole = 0;
    for (int32_t i = 0; i < cells; i++) {
        run = pos[i] < 0 ? run + 1 : 0;
        count += pos[i] >= 0;
        CHECK((pos[i] < 0) == (seqs[i] == 0));
        *largest_hole = run > *largest_hole ? run : *largest_hole;
    }
    return count;
}

/* Return the context parameters of the tests. */
static plk_context_params params(int flash, int type_k, int type_v) {
    plk_context_params p = {0};
    p.size = sizeof p;
    p.n_ctx = CELLS;
    p.n_batch = p.n_ubatch = 64;
    p.n_seq_max = 8;
    p.n_threads = p.n_threads_batch = 1;
    p.flash_attn = flash;
    p.type_k = type_k;
    p.type_v = type_v;
    p.kv_unified = 1;
    p.offload_kqv = 1;
    p.defrag_thold = -1.0f;
    p.guard = 1;
    return p;
}

/* Decode n tokens of one sequence, starting at a position. */
static int run(plk_context *c, int32_t first, int32_t n, int32_t seq) {
    int32_t token[128], pos[128], seqs[128];
    for (int32_t i = 0; i < n; i++) {
        token[i] = 3 + (first + i) % 60;
        pos[i] = first + i;
        seqs[i] = seq;
    }
    return decode(c, n, token, pos, seqs);
}

#endif
