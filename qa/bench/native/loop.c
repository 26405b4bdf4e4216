// Reference for the decode loop in Python, in plain C with upstream's llama.h: one llama_batch that
// is refilled for each step, and upstream's greedy sampler.
#include "llama.h"

static struct llama_model *model;
static struct llama_context *ctx;
static struct llama_sampler *chain;
static struct llama_batch batch;

static void quiet(enum ggml_log_level level, const char *text, void *data) {
    (void) level, (void) text, (void) data;
}

void finish(void) {
    if (chain) llama_sampler_free(chain);
    if (ctx) llama_free(ctx), llama_batch_free(batch);
    if (model) llama_model_free(model);
    chain = NULL, ctx = NULL, model = NULL;
}

int prepare(const char *path, uint32_t n_ctx, uint32_t n_batch, uint32_t n_seq) {
    llama_log_set(quiet, NULL);
    llama_backend_init();
    if (!(model = llama_model_load_from_file(path, llama_model_default_params()))) return -1;
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = n_ctx;
    params.n_batch = params.n_ubatch = n_batch;
    params.n_seq_max = n_seq;
    params.n_threads = params.n_threads_batch = 1;
    if (!(ctx = llama_init_from_model(model, params))) return -2;
    batch = llama_batch_init((int32_t) n_batch, 0, 1);
    chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    return 0;
}

static void put(int32_t token, int32_t pos, int32_t seq, int logits) {
    const int32_t at = batch.n_tokens++;
    batch.token[at] = token;
    batch.pos[at] = pos;
    batch.n_seq_id[at] = 1;
    batch.seq_id[at][0] = seq;
    batch.logits[at] = (int8_t) logits;
}

// Continue each sequence greedily; `tokens` are the first tokens on entry and the last on return.
int greedy(int32_t n_seq, int32_t steps, int32_t *tokens, float *last) {
    (void) last;
    for (int32_t i = 0; i < steps; i++) {
        batch.n_tokens = 0;
        for (int32_t k = 0; k < n_seq; k++) put(tokens[k], i, k, 1);
        const int code = llama_decode(ctx, batch);
        if (code) return code;
        for (int32_t k = 0; k < n_seq; k++) tokens[k] = llama_sampler_sample(chain, ctx, k);
    }
    return 0;
}

// Decode given tokens, and read the logits of each.
int logits(int32_t n_seq, int32_t steps, int32_t *tokens, float *last) {
    for (int32_t i = 0; i < steps; i++) {
        batch.n_tokens = 0;
        for (int32_t k = 0; k < n_seq; k++) put(tokens[k], i, k, 1);
        const int code = llama_decode(ctx, batch);
        if (code) return code;
        for (int32_t k = 0; k < n_seq; k++) *last = llama_get_logits_ith(ctx, k)[0];
    }
    return 0;
}

// Decode a prompt in pieces of n_batch, and read the logits of its last token.
int prompt(int32_t n_seq, int32_t n, int32_t *tokens, float *last) {
    (void) n_seq;
    const int32_t size = (int32_t) llama_n_batch(ctx);
    for (int32_t at = 0; at < n;) {
        batch.n_tokens = 0;
        for (; at < n && batch.n_tokens < size; at++) put(tokens[at], at, 0, at == n - 1);
        const int code = llama_decode(ctx, batch);
        if (code) return code;
    }
    *last = llama_get_logits_ith(ctx, -1)[0];
    return 0;
}

void forget(void) { llama_kv_self_seq_rm(ctx, -1, -1, -1); }
