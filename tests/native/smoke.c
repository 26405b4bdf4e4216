/* Test one libplk without Python: load, decode, cells, defragmentation, states, invalid calls.
 *
 * usage: smoke MODEL [FLASH_ATTN TYPE_K TYPE_V]; prints "ok" or the first failed check. */
#include "smoke.h"

static void check_identity(void) {
    CHECK(plk_abi() == PLK_ABI);
    CHECK(plk_init() == PLK_OK && plk_init() == PLK_OK);
    CHECK(plk_sizeof("plk_batch") == (int32_t)sizeof(plk_batch));
    CHECK(plk_sizeof("plk_counters") == (int32_t)sizeof(plk_counters));
    CHECK(plk_sizeof("nothing") == -1);
    plk_device device = {.size = sizeof device};
    CHECK(plk_device_count() >= 1);
    CHECK(plk_device_read(0, &device) == PLK_OK && device.name[0] != 0);
    CHECK(plk_device_read(99, &device) == PLK_EINVAL);
}

static void check_refusals(plk_model *model, plk_context *c) {
    plk_model *none = (plk_model *)1;
    plk_model_params mp = {.size = sizeof mp};
    CHECK(plk_model_load("/nowhere/model.gguf", &mp, &none) == PLK_EMODEL && none == NULL);
    plk_context *made = NULL;
    plk_context_params p = params(0, 999, 1);
    CHECK(plk_context_new(model, &p, &made) == PLK_EINVAL);
    p = params(0, 1, 8); /* a quantized V cache needs flash attention */
    CHECK(plk_context_new(model, &p, &made) < 0 && made == NULL);

    int32_t token[80] = {0}, pos[80] = {0}, seq[80] = {0};
    token[0] = 1 << 20;
    CHECK(decode(c, 1, token, pos, seq) == PLK_EINVAL);
    CHECK(strstr(plk_last_error(), "invalid token") != NULL);
    token[0] = 5;
    seq[0] = 8;
    CHECK(decode(c, 1, token, pos, seq) == PLK_EINVAL);
    seq[0] = 0;
    pos[0] = -1;
    CHECK(decode(c, 1, token, pos, seq) == PLK_EINVAL);
    CHECK(decode(c, 80, token, pos, seq) == PLK_EINVAL); /* more than n_batch */
    CHECK(decode(c, 0, token, pos, seq) == PLK_EINVAL);
    CHECK(plk_logits(c, 0) == NULL);
    CHECK(plk_seq_rm(c, 0, 5, 3) == PLK_EINVAL);
    CHECK(plk_seq_cp(c, 0, 8, -1, -1) == PLK_EINVAL);
    CHECK(plk_seq_div(c, 0, -1, -1, 0) == PLK_EINVAL);
    CHECK(plk_seq_pos_max(c, 0) == -1 && plk_seq_pos_min(c, 0) == -1);
}

/* Fill the cache with two interleaved sequences, then remove one: holes of one cell. */
static void make_holes(plk_context *c) {
    int32_t token[64], pos[64], seq[64];
    CHECK(plk_clear(c, 0) == PLK_OK);
    for (int base = 0; base < CELLS / 2; base += 32) {
        for (int i = 0; i < 64; i++) {
            token[i] = 3 + (base + i) % 60;
            pos[i] = base + i / 2;
            seq[i] = i % 2;
        }
        CHECK(decode(c, 64, token, pos, seq) == 0);
    }
    CHECK(plk_seq_rm(c, 1, -1, -1) == PLK_OK);
}

static void check_defrag(plk_context *c, const plk_context_info *info) {
    int32_t token[16], pos[16], seq[16], hole = 0;
    make_holes(c);
    CHECK(used(c, &hole) == CELLS / 2 && hole == 1);
    CHECK(plk_seq_pos_min(c, 0) == 0 && plk_seq_pos_max(c, 0) == CELLS / 2 - 1);
    CHECK(plk_seq_pos_max(c, 1) == -1);
    CHECK(decode_one(c, 7, CELLS / 2, 0) == 0);
    const float before = plk_logits(c, -1)[9];
    CHECK(plk_seq_rm(c, 0, CELLS / 2, -1) == PLK_OK);
    for (int i = 0; i < 16; i++) {
        token[i] = 9 + i;
        pos[i] = i;
        seq[i] = 2;
    }
    const int code = decode(c, 16, token, pos, seq);
    if (info->contiguous_slots == 1) {
        CHECK(code == PLK_NO_SLOT || code == 0); /* a patched build defragments */
    }
    if (code == PLK_NO_SLOT) {
        CHECK(used(c, &hole) == CELLS / 2);
        CHECK(plk_seq_pos_max(c, 2) == -1);
    } else {
        CHECK(code == 0 && plk_seq_rm(c, 2, -1, -1) == PLK_OK);
    }
    if (info->defrag) {
        plk_defrag_report report = {.size = sizeof report};
        CHECK(plk_defrag(c, &report) == PLK_OK);
        CHECK(report.cells > 0 || code == 0);
        while (report.cells > 0) { /* stock limits the moves per call */
            CHECK(plk_defrag(c, &report) == PLK_OK);
        }
        CHECK(used(c, &hole) == CELLS / 2 && hole == CELLS / 2);
        CHECK(decode(c, 16, token, pos, seq) == 0);
        CHECK(plk_seq_rm(c, 2, -1, -1) == PLK_OK);
    }
    CHECK(decode_one(c, 7, CELLS / 2, 0) == 0);
    CHECK(fabsf(plk_logits(c, 0)[9] - before) < TOLERANCE);
    CHECK(plk_logits(c, 1) == NULL && plk_logits(c, -2) == NULL);
}

static void check_states(plk_context *c) {
    int32_t hole = 0;
    CHECK(plk_clear(c, 0) == PLK_OK);
    for (int i = 0; i < 20; i++) {
        CHECK(decode_one(c, 3 + i, i, 3) == 0);
    }
    const int64_t size = plk_state_size(c, 3);
    CHECK(size > 0);
    uint8_t *state = malloc(size);
    CHECK(plk_state_save(c, 3, state, size - 1) == PLK_EINVAL);
    CHECK(plk_state_save(c, 3, state, size) == size);
    CHECK(plk_state_load(c, 4, state, size) == size);
    CHECK(plk_seq_pos_max(c, 4) == 19 && used(c, &hole) == 40);
    CHECK(plk_state_load(c, 5, state, size / 2) <= 0);
    CHECK(plk_state_load(c, 5, state, 3) <= 0);
    CHECK(plk_seq_pos_max(c, 5) == -1 && used(c, &hole) == 40);
    CHECK(decode_one(c, 50, 20, 3) == 0);
    const float first = plk_logits(c, 0)[11];
    CHECK(decode_one(c, 50, 20, 4) == 0);
    CHECK(fabsf(plk_logits(c, 0)[11] - first) < TOLERANCE);
    free(state);
    /* Loading the state of an empty sequence clears the target sequence. */
    const int64_t none = plk_state_size(c, 7);
    state = malloc(none > 0 ? none : 1);
    if (none > 0 && plk_state_save(c, 7, state, none) == none) {
        CHECK(plk_state_load(c, 4, state, none) >= 0 && plk_seq_pos_max(c, 4) == -1);
    }
    free(state);
}

/* Overlapping copies of a prefix share its cells. */
static void check_copies(plk_context *c) {
    int32_t hole = 0;
    CHECK(plk_clear(c, 0) == PLK_OK);
    for (int i = 0; i < 12; i++) {
        CHECK(decode_one(c, 3 + i, i, 0) == 0);
    }
    CHECK(plk_seq_cp(c, 0, 1, -1, 8) == PLK_OK && plk_seq_cp(c, 0, 1, 4, -1) == PLK_OK);
    CHECK(plk_seq_cp(c, 0, 1, -1, -1) == PLK_OK && used(c, &hole) == 12);
    CHECK(plk_seq_pos_min(c, 1) == 0 && plk_seq_pos_max(c, 1) == 11);
    CHECK(plk_seq_rm(c, 1, 6, -1) == PLK_OK && plk_seq_pos_max(c, 1) == 5);
    CHECK(decode_one(c, 9, 6, 1) == 0 && used(c, &hole) == 13);
    CHECK(plk_seq_keep(c, 1) == PLK_OK && used(c, &hole) == 7);
    CHECK(plk_seq_pos_max(c, 0) == -1 && plk_seq_pos_max(c, 1) == 6);
}

static void check_shift(plk_context *c, const plk_context_info *info) {
    int32_t pos[4096], shift[4096];
    uint64_t seqs[4096];
    if (!info->can_shift) {
        return;
    }
    CHECK(plk_clear(c, 0) == PLK_OK);
    for (int i = 0; i < 10; i++) {
        CHECK(decode_one(c, 3 + i, i, 0) == 0);
    }
    CHECK(plk_seq_add(c, 0, 5, -1, 3) == PLK_OK);
    CHECK(plk_seq_pos_max(c, 0) == 12 && plk_seq_pos_min(c, 0) == 0);
    plk_cells_info cells = {.size = sizeof cells};
    CHECK(plk_cells_info_read(c, 0, &cells) == PLK_OK && cells.has_shift == 1);
    CHECK(plk_cells_read(c, 0, 4096, pos, shift, seqs, 1) == cells.n_cells);
    int shifted = 0;
    for (int i = 0; i < cells.n_cells; i++) {
        CHECK(pos[i] < 0 || shift[i] == (pos[i] >= 8 ? 3 : 0));
        shifted += shift[i] == 3;
    }
    CHECK(shifted == 5);
    CHECK(plk_update(c) == PLK_OK || decode_one(c, 3, 13, 0) == 0);
    CHECK(plk_cells_info_read(c, 0, &cells) == PLK_OK && cells.has_shift == 0);
    CHECK(plk_seq_div(c, 0, -1, -1, 2) == PLK_OK);
    CHECK(decode_one(c, 3, plk_seq_pos_max(c, 0) + 1, 0) == 0);
}

static void check_cancel(plk_context *c) {
    int32_t hole = 0;
    CHECK(plk_clear(c, 0) == PLK_OK);
    CHECK(decode_one(c, 3, 0, 0) == 0);
    const int64_t polls = plk_cancel_polls(c);
    if (polls < 2) {
        return;
    }
    CHECK(decode_one(c, 3, 1, 0) == 0 && plk_cancel_polls(c) == polls);
    plk_cancel_after(c, polls / 2);
    CHECK(decode_one(c, 3, 2, 0) == PLK_ABORTED);
    CHECK(plk_cancel_polls(c) == polls / 2);
    CHECK(plk_logits(c, 0) == NULL);
    plk_cancel_after(c, -1);
    CHECK(used(c, &hole) == 2);
    CHECK(decode_one(c, 3, 2, 0) == 0);
}

/* A guarded context rolls back a failed decode, also between two micro-batches. */
static void check_rollback(plk_model *model, plk_context_params p) {
    plk_context *c = NULL;
    int32_t hole = 0;
    p.n_batch = 128;
    p.n_ubatch = 32;
    CHECK(plk_context_new(model, &p, &c) == PLK_OK);
    CHECK(run(c, 0, 100, 0) == 0 && run(c, 100, 90, 0) == 0);
    CHECK(decode_one(c, 7, 190, 0) == 0);
    const float before = plk_logits(c, 0)[9];
    CHECK(plk_seq_rm(c, 0, 190, -1) == PLK_OK);
    CHECK(run(c, 0, 96, 1) == PLK_NO_SLOT);
    CHECK(plk_seq_pos_max(c, 1) == -1 && plk_seq_pos_min(c, 0) == 0);
    CHECK(plk_seq_pos_max(c, 0) == 189 && used(c, &hole) == 190);
    CHECK(decode_one(c, 7, 190, 0) == 0);
    CHECK(fabsf(plk_logits(c, 0)[9] - before) < TOLERANCE);
    CHECK(plk_seq_rm(c, 0, 100, -1) == PLK_OK && used(c, &hole) == 100);
    CHECK(run(c, 0, 96, 1) == 0);
    const int64_t polls = plk_cancel_polls(c);
    CHECK(plk_seq_rm(c, 1, -1, -1) == PLK_OK);
    if (polls > 8) {
        plk_cancel_after(c, polls / 2); /* in the second micro-batch of three */
        CHECK(run(c, 0, 96, 1) == PLK_ABORTED);
        CHECK(plk_seq_pos_max(c, 1) == -1 && used(c, &hole) == 100);
        CHECK(plk_seq_pos_min(c, 0) == 0 && plk_seq_pos_max(c, 0) == 99);
        plk_cancel_after(c, -1);
        CHECK(run(c, 0, 96, 1) == 0);
    }
    plk_context_free(c);
}

static void check_sampler(plk_model *model, plk_context *c) {
    plk_sampler_params p = {.size = sizeof p, .temperature = 0.0f};
    plk_sampler *greedy = NULL;
    plk_model_info info = {.size = sizeof info};
    CHECK(plk_model_read(model, &info) == PLK_OK);
    CHECK(plk_clear(c, 0) == PLK_OK);
    CHECK(plk_sampler_new(model, &p, &greedy) == PLK_OK);
    CHECK(decode_one(c, 3, 0, 0) == 0);
    const float *row = plk_logits(c, 0);
    int32_t best = 0;
    for (int32_t i = 1; i < info.n_vocab; i++) {
        best = row[i] > row[best] ? i : best;
    }
    CHECK(plk_sample(greedy, c, -1) == best && plk_sample(greedy, c, 0) == best);
    CHECK(plk_sample(greedy, c, 1) == PLK_EINVAL);
    /* Three sequences in one batch: each row of logits is at the index of its token. */
    const int32_t token[3] = {3, 4, 5}, pos[3] = {1, 0, 0}, seq[3] = {0, 1, 2};
    const int8_t logits[3] = {1, 0, 1};
    plk_batch batch = {.size = sizeof batch, .n_tokens = 3, .token = token, .pos = pos,
                       .seq_id = seq, .logits = logits};
    CHECK(plk_decode(c, &batch) == 0);
    int32_t rows = 0, chosen[2] = {-1, -1};
    const float *all = plk_logits_all(c, &rows);
    CHECK(rows == 2 && all == plk_logits(c, 0) && all + info.n_vocab == plk_logits(c, 2));
    CHECK(plk_sample_all(greedy, c, chosen, 1) == PLK_EINVAL);
    CHECK(plk_sample_all(greedy, c, chosen, 2) == 2);
    CHECK(chosen[0] == plk_sample(greedy, c, 0) && chosen[1] == plk_sample(greedy, c, 2));
    /* Two steps of two sequences are two batches; the second decodes the tokens of the first. */
    int32_t run[6] = {5, 6}, next[2] = {2, 1}, ids[2] = {0, 2}, done = -1;
    CHECK(plk_run(greedy, c, 2, ids, next, run, 2, 0, &done) == 0 && done == 2);
    CHECK(plk_seq_pos_max(c, 0) == 3 && plk_seq_pos_max(c, 2) == 2);
    CHECK(plk_sample(greedy, c, 0) == run[4] && plk_sample(greedy, c, 1) == run[5]);
    CHECK(plk_run(greedy, c, 2, ids, next, run, 0, 0, &done) == PLK_EINVAL && done == 0);
    plk_sampler_free(greedy);
    /* Logits of the caller; biases; invalid calls do not change the sampler. */
    float *mine = calloc((size_t) info.n_vocab, sizeof *mine);
    const int32_t biased[2] = {4, 5};
    float bias[2] = {2.0f, 1.0f};
    p.n_bias = 2;
    p.bias_token = biased;
    p.bias = bias;
    CHECK(plk_sampler_new(model, &p, &greedy) == PLK_OK);
    CHECK(plk_sample_logits(greedy, mine, info.n_vocab) == 4);
    CHECK(plk_sample_logits(greedy, mine, info.n_vocab - 1) == PLK_EINVAL);
    CHECK(plk_sample_logits(greedy, NULL, info.n_vocab) == PLK_EINVAL);
    mine[7] = NAN;
    CHECK(plk_sample_logits(greedy, mine, info.n_vocab) == PLK_EINVAL);
    for (int32_t i = 0; i < info.n_vocab; i++) {
        mine[i] = -INFINITY;
    }
    CHECK(plk_sample_logits(greedy, mine, info.n_vocab) == PLK_ENOTOKEN);
    CHECK(plk_sampler_accept(greedy, biased, 2) == PLK_OK);
    CHECK(plk_sampler_accept(greedy, &info.n_vocab, 1) == PLK_EINVAL);
    plk_sampler_free(greedy);
    bias[0] = NAN;
    CHECK(plk_sampler_new(model, &p, &greedy) == PLK_EINVAL && greedy == NULL);
    p.n_bias = 0;
    p.temperature = NAN;
    CHECK(plk_sampler_new(model, &p, &greedy) == PLK_EINVAL);
    p.temperature = 1.0f;
    p.samplers = "top_k,nothing";
    CHECK(plk_sampler_new(model, &p, &greedy) == PLK_EINVAL);
    free(mine);
}

static void check_adapters(plk_model *model, plk_context *c) {
    plk_adapter *adapter = (plk_adapter *) model;
    plk_adapter *const none[] = {NULL};
    const float scales[] = {1.0f};
    if (!(plk_capabilities() & PLK_CAP_ADAPTERS)) {
        CHECK(plk_adapter_load(model, "none", 1, &adapter) == PLK_EUNSUPPORTED);
        return;
    }
    CHECK(plk_adapter_load(model, "/no/such/file", 1, &adapter) == PLK_EADAPTER && adapter == NULL);
    CHECK(plk_adapter_load(NULL, "none", 1, &adapter) == PLK_EINVAL);
    CHECK(plk_adapter_load(model, NULL, 1, &adapter) == PLK_EINVAL);
    CHECK(plk_adapter_load(model, "none", -1, &adapter) == PLK_EINVAL);
    CHECK(plk_adapters_set(c, 1, NULL, scales) == PLK_EINVAL);
    CHECK(plk_adapters_set(c, 1, none, scales) == PLK_EINVAL);
    CHECK(plk_adapters_set(c, -1, none, scales) == PLK_EINVAL);
    CHECK(plk_adapters_set(NULL, 0, NULL, NULL) == PLK_EINVAL);
    CHECK(plk_adapters_set(c, 0, NULL, NULL) == PLK_OK);
    plk_adapter_free(NULL);
}

static void check_embeddings(plk_model *model, plk_context_params p) {
    plk_context *c = NULL;
    p.embeddings = 1;
    p.pooling = 9;
    CHECK(plk_context_new(model, &p, &c) == PLK_EINVAL);
    p.pooling = PLK_POOLING_MEAN;
    p.kv_unified = 1;
    CHECK(plk_context_new(model, &p, &c) == PLK_OK);
    plk_context_info info = {.size = sizeof info};
    CHECK(plk_context_read(c, &info) == PLK_OK && info.pooling == PLK_POOLING_MEAN);
    int32_t token[] = {3, 4, 5}, pos[] = {0, 1, 0}, seq[] = {0, 0, 1};
    CHECK(plk_embeddings(c, 0) == NULL);
    CHECK(decode(c, 3, token, pos, seq) == PLK_OK);
    CHECK(plk_embeddings(c, 0) != NULL && plk_embeddings(c, 1) != NULL);
    CHECK(plk_embeddings(c, 2) == NULL && plk_embeddings(c, -1) == NULL);
    seq[2] = 5; /* releases assert that it is below the number of tokens */
    CHECK(decode(c, 3, token, pos, seq) == PLK_EINVAL);
    CHECK(decode_one(c, 3, 0, 5) == PLK_EINVAL);
    plk_context_free(c);
}

/* Decode three embeddings of sequence `seq`. */
static int decode_embeddings(plk_context *c, int32_t n_embd, int32_t n_pos, const float *embd,
                             const int32_t *pos, int32_t seq) {
    const int32_t seqs[] = {seq, seq, seq};
    plk_batch batch = {.size = sizeof batch, .n_tokens = 3, .pos = pos, .seq_id = seqs,
                       .embd = embd, .n_embd = n_embd, .n_pos = n_pos};
    return plk_decode(c, &batch);
}

/* Embeddings as input: only in unguarded contexts, with one row of positions and last logits. */
static void check_embedding_input(plk_model *model, plk_context_params p) {
    plk_model_info info = {.size = sizeof info};
    CHECK(plk_model_read(model, &info) == PLK_OK);
    const int32_t n = info.n_embd, pos[] = {0, 1, 2}, far[] = {0, 1, 1 << 30};
    float *embd = calloc(3 * (size_t) n, sizeof *embd);
    for (int32_t i = 0; i < 3 * n; i++) {
        embd[i] = (float) (i % 7) - 3.0f;
    }
    plk_context *c = NULL;
    p.guard = 1;
    CHECK(plk_context_new(model, &p, &c) == PLK_OK);
    CHECK(decode_embeddings(c, n, 1, embd, pos, 1) == PLK_EUNSUPPORTED);
    plk_context_free(c);
    p.guard = 0;
    CHECK(plk_context_new(model, &p, &c) == PLK_OK);
    CHECK(decode_embeddings(NULL, n, 1, embd, pos, 1) == PLK_EINVAL);
    plk_batch both = {.size = sizeof both, .n_tokens = 3, .token = pos, .pos = pos, .seq_id = pos,
                      .embd = embd, .n_embd = n, .n_pos = 1};
    CHECK(plk_decode(c, &both) == PLK_EINVAL);
    both.token = NULL;
    both.n_tokens = 0;
    CHECK(plk_decode(c, &both) == PLK_EINVAL);
    CHECK(decode_embeddings(c, n + 1, 1, embd, pos, 1) == PLK_EINVAL);
    CHECK(decode_embeddings(c, n, 4, embd, pos, 1) == PLK_EINVAL);
    CHECK(decode_embeddings(c, n, 1, NULL, pos, 1) == PLK_EINVAL);
    CHECK(decode_embeddings(c, n, 1, embd, NULL, 1) == PLK_EINVAL);
    CHECK(decode_embeddings(c, n, 1, embd, far, 1) == PLK_EINVAL);
    CHECK(decode_embeddings(c, n, 1, embd, pos, 8) == PLK_EINVAL);
    CHECK(decode_embeddings(c, n, 1, embd, pos, 1) == PLK_OK);
    CHECK(plk_seq_pos_max(c, 1) == 2 && plk_seq_pos_max(c, 0) == -1);
    CHECK(plk_logits(c, 2) != NULL && plk_logits(c, 0) == NULL);
    plk_context_free(c);
    free(embd);
}

int main(int argc, char **argv) {
    CHECK(argc == 2 || argc == 5);
    check_identity();
    plk_model_params mp = {.size = sizeof mp, .use_mmap = 1};
    plk_model *model = NULL;
    CHECK(plk_model_load(argv[1], &mp, &model) == PLK_OK);
    plk_context_params p = params(argc > 2 ? atoi(argv[2]) : 0, argc > 3 ? atoi(argv[3]) : 1,
                                  argc > 4 ? atoi(argv[4]) : 1);
    plk_context *c = NULL;
    CHECK(plk_context_new(model, &p, &c) == PLK_OK);
    plk_context_info info = {.size = sizeof info};
    CHECK(plk_context_read(c, &info) == PLK_OK && info.n_seq_max == 8);
    check_refusals(model, c);
    check_adapters(model, c);
    check_embeddings(model, p);
    check_embedding_input(model, p);
    if (plk_capabilities() & PLK_CAP_CELLS) {
        check_defrag(c, &info);
        check_states(c);
        check_copies(c);
        check_shift(c, &info);
        check_cancel(c);
        check_rollback(model, p);
    }
    if (plk_capabilities() & PLK_CAP_SAMPLER) {
        check_sampler(model, c);
    }
    plk_model_free(model); /* the context keeps it alive */
    CHECK(decode_one(c, 3, 1, 0) == 0 || plk_clear(c, 1) == PLK_OK);
    plk_context_free(c);
    puts("ok");
    return 0;
}
