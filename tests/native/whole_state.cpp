// Restore the state of a whole context into another one: both compute the same logits afterwards.
// Usage: whole_state MODEL
#include "llama.h"

#include "decode.h"

#include <cmath>
#include <vector>

namespace {

llama_context *open(llama_model *model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_batch = params.n_ubatch = 256;
    params.n_seq_max = 2;
    // Upstream restores only the last of several streams.
    params.kv_unified = true;
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

void restored(llama_model *model) {
    llama_context *first = open(model), *second = open(model);
    decode(first, 0, 0, 100);
    decode(first, 1, 0, 50);
    llama_memory_seq_rm(llama_get_memory(first), 0, 60, -1);
    decode(first, 1, 50, 20);
    // The restored state replaces the second context's cells.
    decode(second, 0, 0, 30);
    std::vector<uint8_t> state(llama_state_get_size(first));
    CHECK(llama_state_get_data(first, state.data(), state.size()) == state.size());
    CHECK(llama_state_set_data(second, state.data(), state.size()) == state.size());
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (llama_seq_id seq : {0, 1}) {
        const int next = llama_memory_seq_pos_max(llama_get_memory(first), seq) + 1;
        CHECK(next == llama_memory_seq_pos_max(llama_get_memory(second), seq) + 1);
        decode(first, seq, next, 1);
        decode(second, seq, next, 1);
        const float *left = llama_get_logits_ith(first, -1);
        const float *right = llama_get_logits_ith(second, -1);
        for (int i = 0; i < n_vocab; ++i) {
            // The order of cells differs, and with it the order of floating-point sums.
            CHECK(std::fabs(left[i] - right[i]) <= 1e-3f * (1.0f + std::fabs(left[i])));
        }
    }
    llama_free(first);
    llama_free(second);
}

} // namespace

int main(int n, char **words) {
    CHECK(n == 2);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model *model = llama_model_load_from_file(words[1], llama_model_default_params());
    CHECK(model);
    restored(model);
    llama_model_free(model);
    return 0;
}
