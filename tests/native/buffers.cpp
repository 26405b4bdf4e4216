// A program that uses only upstream's API. It writes to every byte of the buffers of a KV cache, which ggml allows, and
// decodes before and after that. It prints the log messages about variables and backings, and the number of buffers.
// Usage: buffers MODEL
#include "ggml-backend.h"
#include "llama.h"

#include "decode.h"

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace {

struct Found {
    std::set<ggml_backend_buffer_t> buffers;
    std::set<ggml_tensor *> tensors; // tensors of the cache
};

// Collect the tensors of the cache from the operations of a decode (cb_eval).
bool collect(ggml_tensor *node, bool, void *to) {
    auto &found = *static_cast<Found *>(to);
    for (ggml_tensor *each : {node, node->src[0], node->src[1], node->src[2]}) {
        while (each != nullptr && each->view_src != nullptr) {
            each = each->view_src;
        }
        if (each != nullptr && std::strncmp(each->name, "cache_", 6) == 0) {
            found.tensors.insert(each);
            found.buffers.insert(each->buffer);
        }
    }
    return false;
}

std::vector<float> logits(llama_context *ctx, int n) {
    const float *values = llama_get_logits_ith(ctx, -1);
    CHECK(values);
    return std::vector<float>(values, values + n);
}

} // namespace

int main(int n, char **words) {
    CHECK(n == 2);
    llama_log_set([](ggml_log_level level, const char *text, void *) {
        if (std::strstr(text, "LLAMA_KV_") || std::strstr(text, "KV cache (")) {
            std::printf("%s %s", level == GGML_LOG_LEVEL_WARN ? "warning" : "info", text);
        }
    }, nullptr);
    llama_model *model = llama_model_load_from_file(words[1], llama_model_default_params());
    CHECK(model);
    Found found;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_batch = params.n_ubatch = 64;
    params.n_seq_max = 2;
    params.n_threads = params.n_threads_batch = 1;
    params.cb_eval = collect;
    params.cb_eval_user_data = &found;
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx);
    decode(ctx, 0, 0, 40);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const auto before = logits(ctx, n_vocab);
    CHECK(!found.tensors.empty());
    for (const uint8_t byte : {7, 0}) {
        for (const auto buffer : found.buffers) {
            const auto *base = static_cast<const uint8_t *>(ggml_backend_buffer_get_base(buffer));
            const size_t size = ggml_backend_buffer_get_size(buffer);
            ggml_backend_buffer_clear(buffer, byte);
            for (size_t i = 0; i < size; ++i) {
                CHECK(base[i] == byte);
            }
        }
        for (auto *tensor : found.tensors) {
            const size_t size = ggml_nbytes(tensor);
            for (const size_t at : {static_cast<size_t>(0), size - 16}) {
                uint8_t bytes[16] = {1, 2, 3};
                ggml_backend_tensor_set(tensor, bytes, at, sizeof(bytes));
                std::memset(bytes, 9, sizeof(bytes));
                ggml_backend_tensor_get(tensor, bytes, at, sizeof(bytes));
                CHECK(bytes[0] == 1 && bytes[2] == 3 && bytes[15] == 0);
            }
        }
    }
    for (const auto buffer : found.buffers) {
        ggml_backend_buffer_clear(buffer, 0);
    }
    decode(ctx, 1, 0, 40);
    const auto after = logits(ctx, n_vocab);
    for (int i = 0; i < n_vocab; ++i) {
        CHECK(std::fabs(before[i] - after[i]) < 1e-4f);
    }
    std::printf("%d tensors in %d buffers\n", (int) found.tensors.size(), (int) found.buffers.size());
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
